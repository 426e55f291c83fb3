"""SGLang 0.5.23: flags of the launch command, a JSON file for K by batch, environment variables for forced acceptance.

Names: `srt/arg_groups/fields/spec.py`, `srt/arg_groups/speculative_hook.py` and
`srt/speculative/adaptive_spec_params.py` of the sglang 0.5.23 wheel.
"""

from __future__ import annotations

import json
import shlex

from spectune.decoding.tree_size import default_growth
from spectune.recommending.exports.export import Export, Variant, Wanted, allowed, lacking, require
from spectune.recommending.exports.names import EAGLES, head_path

VERSION = "SGLang 0.5.23"
OFF = "Leave --speculative-algorithm out."
FLAGS = frozenset(
    {
        "--model-path",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
        "--speculative-adaptive",
        "--speculative-adaptive-config",
    }
)
ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "STANDALONE", "NGRAM"})
VARIABLES = frozenset({"SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_SIMULATE_ACC_TOKEN_MODE"})
ADAPTIVE_KEYS = frozenset({"candidate_steps"})
ADAPTIVE_FILE = "sglang-adaptive.json"

_LIMIT = "Set --max-running-requests too: with speculation its default is 48."
_OTHER_NGRAM = "SGLang drafts a tree of n-grams in its own way: expect another acceptance."


def export(wanted: Wanted) -> Export:
    """The command with one K, then with K by batch, then with forced acceptance."""
    words = _words(wanted, wanted.choice.k)
    if words is None:
        return lacking("sglang", VERSION, wanted)
    notes = (_OTHER_NGRAM, _LIMIT) if wanted.method == "ngram" else (_LIMIT,)
    return Export(
        "sglang",
        VERSION,
        shlex.join(words),
        notes,
        schedule=_schedule(wanted) if wanted.schedule else None,
        synthetic=_synthetic(wanted, words),
        warnings=_warnings(wanted),
    )


def _words(wanted: Wanted, k: int) -> list[str] | None:
    drafter, kind = wanted.choice.drafter, wanted.method
    options: dict[str, str]
    if kind in EAGLES or (kind == "draft-model" and not wanted.tree):
        width, depth = default_growth(k) if wanted.tree else (1, k)
        options = {
            "--speculative-algorithm": {"eagle": "EAGLE", "eagle3": "EAGLE3"}.get(kind, "STANDALONE"),
            "--speculative-draft-model-path": head_path(drafter),
            "--speculative-num-steps": str(depth),
            "--speculative-eagle-topk": str(width),
            "--speculative-num-draft-tokens": str(k + 1),  # it counts the root of the draft
        }
    elif kind == "ngram":
        options = {"--speculative-algorithm": "NGRAM", "--speculative-num-draft-tokens": str(k + 1)}
    else:
        return None
    pairs = allowed({"--model-path": wanted.target, **options}, FLAGS)
    return ["python", "-m", "sglang.launch_server", *(word for pair in pairs.items() for word in pair)]


def _schedule(wanted: Wanted) -> Variant:
    """Two lines: one writes the file, the other starts the server."""
    if wanted.method not in EAGLES or wanted.tree:
        return Variant(None, (f"{VERSION} adapts K for EAGLE and EAGLE-3 chains only.",))
    content = {str(first): allowed({"candidate_steps": [k]}, ADAPTIVE_KEYS) for first, _, k in wanted.schedule}
    words = _words(wanted, wanted.most)
    assert words is not None
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", ADAPTIVE_FILE]
    require([a for a in adaptive if a.startswith("--")], FLAGS)
    write = shlex.join(["printf", "%s\\n", json.dumps(content)]) + f" > {ADAPTIVE_FILE}"
    notes = (
        "More steps in a list let the server choose among them by what it sees accepted.",
        "Switched off by the server with data-parallel attention or two-batch overlap.",
        _LIMIT,
    )
    return Variant(f"{write}\n{shlex.join([*words, *adaptive])}", notes)


def _synthetic(wanted: Wanted, words: list[str]) -> Variant | None:
    if wanted.acceptance is None:
        return None
    variables = allowed(
        {
            "SGLANG_SIMULATE_ACC_LEN": f"{wanted.acceptance.length:g}",
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            # The default writes one fixed token, which draws an n-gram or EAGLE draft off its course.
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        },
        VARIABLES,
    )
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return Variant(shlex.join(["env", *assignments, *words]), ("For timing: the output is wrong.",))


def _warnings(wanted: Wanted) -> tuple[str, ...]:
    found = []
    if wanted.method == "draft-model":
        found.append(
            "STANDALONE does not check that target and draft share a vocabulary; with another one the output is "
            "silently wrong (sglang#24051)." + (" These two differ in size." if wanted.same_vocabulary is False else "")
        )
    if wanted.method == "ngram":
        found.append("NGRAM crashed on requests with a JSON schema (sglang#17576): test that before use.")
    return tuple(found)
