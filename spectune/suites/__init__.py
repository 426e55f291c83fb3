"""Prompts: the bundled suites and loaders for public formats."""

from __future__ import annotations

from spectune.suites.load import inspect_suite, load_suite
from spectune.suites.prompt import Message, Prompt, Suite
from spectune.suites.render import render

__all__ = ["Message", "Prompt", "Suite", "inspect_suite", "load_suite", "render"]
