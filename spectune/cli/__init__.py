"""The command line: one module per command, which reads arguments, calls one function and prints.

Nothing here imports torch, transformers, pandas or matplotlib at module level, so `--help` stays instant.
"""

from __future__ import annotations

from spectune.cli.app import main

__all__ = ["main"]
