def generate() -> None:
    """(being written)"""
