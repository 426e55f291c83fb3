def report() -> None:
    """(being written)"""
