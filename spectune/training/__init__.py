"""Training of drafters on text that the target wrote itself."""
