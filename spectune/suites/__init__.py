"""Prompts: the bundled suites and loaders for public formats."""
