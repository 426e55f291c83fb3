"""The speculative decoder."""
