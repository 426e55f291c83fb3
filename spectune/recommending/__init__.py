"""The choice, and why."""
