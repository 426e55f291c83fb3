"""Clocks, NVML, bandwidth probe, bytes model and environment fingerprint."""
