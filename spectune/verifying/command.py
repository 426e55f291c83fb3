"""The ready `spectune verify` command for a configuration of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from spectune.suites.bundled import bundled_names
from spectune.sweeping.cell import CellSpec, Sampling
from spectune.sweeping.options import DEMO_TARGET


def verify_command(spec: CellSpec, *, ks: Iterable[int], batches: Iterable[int], output: Path) -> str:
    """What to type to audit the drafter, rule and settings of `spec` at these Ks and batches, quoted for a shell."""
    words = ["spectune", "verify"]
    if spec.target != DEMO_TARGET:
        words += ["--target", spec.target]
    words += ["--draft", spec.drafter]
    if spec.suite in bundled_names():
        words += ["--suite", spec.suite]
    words += ["--k", _counts(ks), "--batch", _counts(batches), "--dtype", spec.dtype, "--device", spec.device]
    if spec.draft_device != spec.device:
        words += ["--draft-device", spec.draft_device]
    for name, value in spec.sampling.model_dump().items():
        if value != Sampling.model_fields[name].default:
            words += ["--" + name.replace("_", "-"), f"{value:g}"]
    if not spec.sampling.greedy:
        words += ["--rule", spec.rule]
    if spec.chat_template is not None:
        words.append("--chat" if spec.chat_template else "--no-chat")
    return shlex.join((*words, "-o", str(output)))


def _counts(values: Iterable[int]) -> str:
    return ",".join(map(str, sorted(set(values))))
