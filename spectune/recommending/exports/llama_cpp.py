"""llama-server of 2026-10: flags.

Names: ggml-org/llama.cpp `tools/server/README.md` at 00dc805. Builds before the renaming take other names and these
fail there; both spellings are given.
"""

from __future__ import annotations

import shlex

from spectune.recommending.exports.export import Export, Variant, Wanted, allowed, lacking
from spectune.recommending.exports.names import head_path, ngram_lengths

VERSION = "llama.cpp of 2026-10"
OFF = "--spec-type none"
FLAGS = frozenset(
    {
        "--model",
        "--spec-type",
        "--spec-draft-model",
        "--spec-draft-n-max",
        "--spec-ngram-simple-size-n",
        "--spec-ngram-simple-size-m",
        "--spec-synth-rates",
    }
)
TYPES = frozenset({"none", "draft-simple", "draft-eagle3", "ngram-simple"})
OLDER_FLAGS = frozenset({"--model", "--model-draft", "--draft-max"})


def export(wanted: Wanted) -> Export:
    """The command with one K, and with forced acceptance; there is no K by batch."""
    options = _options(wanted)
    if options is None:
        return lacking("llama.cpp", VERSION, wanted)
    notes = ["Target and draft must be GGUF files." if wanted.method != "ngram" else "The target must be a GGUF file."]
    if wanted.method == "draft-model":
        notes.append(f"Builds that do not know --spec-type: {_older(wanted)}")
    return Export(
        "llama.cpp",
        VERSION,
        _command(wanted, options),
        tuple(notes),
        schedule=Variant(None, ("llama-server takes one K for all batches.",)) if wanted.schedule else None,
        synthetic=_synthetic(wanted, options),
        warnings=_warnings(wanted),
    )


def _options(wanted: Wanted) -> dict[str, str] | None:
    drafter, k, kind = wanted.choice.drafter, str(wanted.choice.k), wanted.method
    if wanted.tree:
        return None
    if kind in ("draft-model", "eagle3"):
        return {
            "--spec-type": "draft-eagle3" if kind == "eagle3" else "draft-simple",
            "--spec-draft-model": head_path(drafter),
            "--spec-draft-n-max": k,
        }
    if kind == "ngram":
        return {
            "--spec-type": "ngram-simple",
            "--spec-ngram-simple-size-n": str(ngram_lengths(drafter)[1]),
            "--spec-ngram-simple-size-m": k,
        }
    return None


def _command(wanted: Wanted, options: dict[str, str]) -> str:
    pairs = allowed({"--model": wanted.target, **options}, FLAGS)
    return shlex.join(["llama-server", *(word for pair in pairs.items() for word in pair)])


def _older(wanted: Wanted) -> str:
    draft = {"--model-draft": head_path(wanted.choice.drafter), "--draft-max": str(wanted.choice.k)}
    pairs = allowed({"--model": wanted.target, **draft}, OLDER_FLAGS)
    return shlex.join(["llama-server", *(word for pair in pairs.items() for word in pair)])


def _synthetic(wanted: Wanted, options: dict[str, str]) -> Variant | None:
    if wanted.acceptance is None:
        return None
    rates = ",".join(f"{rate:g}" for rate in wanted.acceptance.joint)
    return Variant(_command(wanted, {**options, "--spec-synth-rates": rates}), ("For timing: the output is wrong.",))


def _warnings(wanted: Wanted) -> tuple[str, ...]:
    found = [
        "A fixed cost per round made 0.9 acceptance slower than plain decoding (llama.cpp#25908): compare the two."
    ]
    if wanted.method == "ngram":
        found.append("ngram-simple was seen to draft for the first request only (llama.cpp#19231): watch draft_n.")
    return tuple(found)
