def fit() -> None:
    """(being written)"""
