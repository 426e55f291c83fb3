"""TensorRT-LLM 1.2: a YAML file for `trtllm-serve --config`.

Names: `DecodingBaseConfig` and its kinds in `tensorrt_llm/llmapi/llm_args.py`, which refuses unknown keys, and
docs/source/features/speculative-decoding.md. The environment variable: InferenceX, golden_al_distribution/README.md.
"""

from __future__ import annotations

import json
import shlex

from spectune.recommending.exports.export import Export, Variant, Wanted, allowed, lacking, require
from spectune.recommending.exports.names import head_path, ngram_lengths

VERSION = "TensorRT-LLM 1.2"
OFF = "Leave speculative_config out of the YAML file."
TOP_KEYS = frozenset({"disable_overlap_scheduler", "speculative_config"})
KEYS = frozenset(
    {"decoding_type", "max_draft_len", "speculative_model_dir", "max_matching_ngram_size", "draft_len_schedule"}
)
TYPES = frozenset({"DraftTarget", "Eagle3", "NGram"})
VARIABLE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
CONFIG_FILE = "speculative.yaml"

Settings = dict[str, object]


def export(wanted: Wanted) -> Export:
    """The file with one K, then with K by batch; the command with forced acceptance."""
    settings = _settings(wanted)
    if settings is None:
        return lacking("tensorrt-llm", VERSION, wanted)
    command = ["trtllm-serve", wanted.target, "--config", CONFIG_FILE]
    return Export(
        "tensorrt-llm",
        VERSION,
        _yaml(settings),
        (f"For the YAML file in: {shlex.join(command)}",),
        schedule=_schedule(wanted, settings) if wanted.schedule else None,
        synthetic=_synthetic(wanted, command),
        warnings=_warnings(wanted),
    )


def _settings(wanted: Wanted) -> Settings | None:
    drafter, k = wanted.choice.drafter, wanted.choice.k
    if wanted.tree:
        return None
    if wanted.method in ("draft-model", "eagle3"):
        kind = "Eagle3" if wanted.method == "eagle3" else "DraftTarget"
        return {"decoding_type": kind, "max_draft_len": k, "speculative_model_dir": head_path(drafter)}
    if wanted.method == "ngram":
        return {"decoding_type": "NGram", "max_draft_len": k, "max_matching_ngram_size": ngram_lengths(drafter)[1]}
    return None


def _yaml(settings: Settings) -> str:
    top = ("disable_overlap_scheduler", "speculative_config")
    require(top, TOP_KEYS)
    lines = [f"{top[0]}: true", f"{top[1]}:"]
    for key, value in allowed(settings, KEYS).items():
        if isinstance(value, dict):
            lines += [f"  {key}:", *(f"    {k}: {v}" for k, v in value.items())]
        elif key == "decoding_type":
            lines.append(f"  {key}: {value}")
        else:
            lines.append(f"  {key}: {json.dumps(value)}")  # a JSON string is a YAML string, whatever is in the name
    return "\n".join(lines)


def _schedule(wanted: Wanted, settings: Settings) -> Variant:
    """Keys are the largest batch of each range; above the last nothing is drafted."""
    if wanted.schedule[0][2] != wanted.most:
        return Variant(None, ("TensorRT-LLM wants the largest K at the smallest batches.",))
    ranges = list(wanted.schedule)
    while ranges[-1][2] == 0:
        ranges.pop()
    own = {**settings, "max_draft_len": wanted.most, "draft_len_schedule": {last: k for _, last, k in ranges}}
    notes = (
        "For versions after 1.2, where keys are the largest batch of a range; 1.2 and older read them as the "
        "smallest, and fail without a key 1.",
        f"Above batch {ranges[-1][1]} nothing is drafted; after that a draft may not come back (TensorRT-LLM#16888).",
    )
    return Variant(_yaml(own), notes)


def _synthetic(wanted: Wanted, command: list[str]) -> Variant | None:
    if wanted.acceptance is None:
        return None
    forced = f"{VARIABLE}={wanted.acceptance.length - 1:g}"  # it does not count the target's own token
    return Variant(shlex.join(["env", forced, *command]), ("For timing: the output is wrong.",))


def _warnings(wanted: Wanted) -> tuple[str, ...]:
    found = [
        "Its acceptance figures take every round for a full draft, so short last rounds lower them "
        "(TensorRT-LLM#14724)."
    ]
    if wanted.method != "ngram":
        found.append("Its memory plan was seen to leave the draft out (TensorRT-LLM#12188): keep a reserve.")
    return tuple(found)
