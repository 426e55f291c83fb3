def recommend() -> None:
    """(being written)"""
