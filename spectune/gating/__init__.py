"""The gate: a run against a committed baseline and stated requirements, with an exit code. Pure functions of files."""
