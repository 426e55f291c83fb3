def export() -> None:
    """(being written)"""
