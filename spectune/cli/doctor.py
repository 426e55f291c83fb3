def doctor() -> None:
    """(being written)"""
