"""Acceptance, speedup models, uncertainty: pure functions of a run directory."""
