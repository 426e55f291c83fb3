def probe() -> None:
    """(being written)"""
