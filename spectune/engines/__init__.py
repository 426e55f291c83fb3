"""Ways to run a cell."""
