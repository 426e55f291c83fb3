def sweep() -> None:
    """(being written)"""
