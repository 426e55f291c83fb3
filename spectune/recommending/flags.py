"""Ready settings: the chosen configuration in the words of each engine.

Names change between releases, so every text carries the version that its names were taken from. Nothing is
translated silently: where an engine has no such method, that is what is said.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from spectune.speedup.profile import Config
from spectune.sweeping.cell import LOSSY_RULES
from spectune.sweeping.drafter_names import has_random_weights

EngineName = Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

# The n-gram lengths that spectune's own drafter looks up where its name gives none.
NGRAM_MIN, NGRAM_MAX = 1, 4

Method = Literal[
    "draft-model",
    "ngram",
    "early-exit",
    "layer-skip",
    "eagle",
    "eagle3",
    "medusa",
    "mlp-speculator",
    "blockwise",
    "staged",
]
_EAGLES = ("eagle", "eagle3")
_TREES = ("tree", "sequoia", "specinfer")


@dataclass(frozen=True, slots=True)
class Flags:
    """`text` is a piece of a command line, of YAML or of Python; None where `notes` say why."""

    engine: EngineName
    version: str
    text: str | None
    notes: tuple[str, ...] = ()


def flags(choice: Config | None, *, temperature: float = 0.0, engine: EngineName | None = None) -> tuple[Flags, ...]:
    """The settings for `engine`, or for every engine. For OFF there are none: leave speculation out."""
    wanted = ENGINES if engine is None else (engine,)
    found = [_FORMS[name](choice, temperature) for name in wanted]
    notes = () if choice is None else _own_notes(choice)
    return tuple(replace(f, notes=(*f.notes, *notes)) if f.text else f for f in found)


def _own_notes(choice: Config) -> tuple[str, ...]:
    """What no engine's settings can say."""
    notes = []
    if choice.rule in LOSSY_RULES:
        notes.append(f"Measured with {choice.rule} acceptance, which changes the output; here acceptance is exact.")
    if choice.synthetic is not None:
        notes.append("Measured with synthetic acceptance: real acceptance must be measured before this is worth using.")
    if has_random_weights(choice.drafter):
        notes.append("The draft had random weights of its shape: name a trained one of that shape.")
    if _is_shipped(choice.drafter):
        notes.append("The drafts that ship with spectune are packed: `spectune train` makes one that engines can load.")
    return tuple(notes)


def method(drafter: str) -> Method:
    """The kind of drafter behind a name as `sweep --draft` takes it."""
    kind, _, rest = drafter.partition(":")
    if kind in _TREES:
        return method(rest)
    if kind == "eagle2":
        return "eagle"
    return kind if kind in get_args(Method) else "draft-model"  # type: ignore[return-value]


def is_tree(drafter: str) -> bool:
    return drafter.partition(":")[0] in (*_TREES, "eagle2")


def head_path(drafter: str) -> str:
    """The folder or hub id in `eagle3:PATH` or `tree:eagle3:PATH`; a draft model's name as it is."""
    kind, _, rest = drafter.partition(":")
    if kind in _TREES:
        return head_path(rest)
    return rest if kind == "eagle2" or kind in get_args(Method) else drafter


def _is_shipped(drafter: str) -> bool:
    return head_path(drafter) == "demo" or head_path(drafter).startswith("smollm2-")


def ngram_lengths(drafter: str) -> tuple[int, int]:
    """The shortest and longest n-gram that `ngram`, `ngram:N` or `ngram:MIN-MAX` looks up."""
    low, _, high = drafter.partition(":")[2].partition("-")
    return (int(low), int(high or low)) if low else (NGRAM_MIN, NGRAM_MAX)


def _vllm(choice: Config | None, temperature: float) -> Flags:
    version = "vLLM 0.32"
    if choice is None:
        return Flags("vllm", version, None, ("Leave --speculative-config out: vLLM refuses num_speculative_tokens 0.",))
    kind = method(choice.drafter)
    if is_tree(choice.drafter):
        return _no_method("vllm", version, kind, "trees")
    settings: dict[str, object]
    if kind in ("draft-model", "medusa", "mlp-speculator", *_EAGLES):
        name, model = kind.replace("-", "_"), head_path(choice.drafter)
        settings = {"method": name, "model": model, "num_speculative_tokens": choice.k}
        if temperature > 0 and choice.rule in ("speculative", "block"):
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
        return _no_method("vllm", version, kind)
    if choice.rule == "block":
        settings["rejection_sample_method"] = "block"
    text = f"--speculative-config {shlex.quote(json.dumps(settings))}"
    return Flags("vllm", version, text)


def _sglang(choice: Config | None, temperature: float) -> Flags:
    version = "SGLang 0.5.23"
    if choice is None:
        return Flags("sglang", version, None, ("Leave --speculative-algorithm out.",))
    kind = method(choice.drafter)
    reset = "Set --max-running-requests too: with speculation its default is 48."
    tree = is_tree(choice.drafter)
    if (kind == "draft-model" and not tree) or kind in _EAGLES:
        width, depth = tree_size(choice.k) if tree else (1, choice.k)
        words = [
            "--speculative-algorithm",
            {"eagle": "EAGLE", "eagle3": "EAGLE3"}.get(kind, "STANDALONE"),
            "--speculative-draft-model-path",
            head_path(choice.drafter),
            "--speculative-num-steps",
            str(depth),
            "--speculative-eagle-topk",
            str(width),
            "--speculative-num-draft-tokens",
            str(choice.k + 1),  # it counts the root of the draft
        ]
        return Flags("sglang", version, shlex.join(words), (reset,))
    if kind == "ngram":
        words = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(choice.k + 1)]
        other = "SGLang drafts a tree of n-grams in its own way: expect another acceptance."
        return Flags("sglang", version, shlex.join(words), (other, reset))
    return _no_method("sglang", version, kind, "trees" if tree else None)


def _tensorrt_llm(choice: Config | None, temperature: float) -> Flags:
    version = "TensorRT-LLM 1.2"
    if choice is None:
        return Flags("tensorrt-llm", version, None, ("Leave speculative_config out of the YAML file.",))
    kind = method(choice.drafter)
    if is_tree(choice.drafter):
        return _no_method("tensorrt-llm", version, kind, "trees")
    lines = ["disable_overlap_scheduler: true", "speculative_config:"]
    if kind in ("draft-model", "eagle3"):
        # A JSON string is a YAML string, whatever is in the name.
        model = json.dumps(head_path(choice.drafter))
        lines += [
            f"  decoding_type: {'Eagle3' if kind == 'eagle3' else 'DraftTarget'}",
            f"  max_draft_len: {choice.k}",
            f"  speculative_model_dir: {model}",
        ]
    elif kind == "ngram":
        lines += [
            "  decoding_type: NGram",
            f"  max_draft_len: {choice.k}",
            f"  max_matching_ngram_size: {ngram_lengths(choice.drafter)[1]}",
        ]
    else:
        return _no_method("tensorrt-llm", version, kind)
    return Flags("tensorrt-llm", version, "\n".join(lines), ("For the YAML file given with --config.",))


def _llama_cpp(choice: Config | None, temperature: float) -> Flags:
    version = "llama.cpp of 2026-10"
    if choice is None:
        return Flags("llama.cpp", version, "--spec-type none")
    kind = method(choice.drafter)
    if is_tree(choice.drafter):
        return _no_method("llama.cpp", version, kind, "trees")
    if kind in ("draft-model", "eagle3"):
        words = ["--spec-type", "draft-eagle3" if kind == "eagle3" else "draft-simple"]
        words += ["--spec-draft-model", head_path(choice.drafter)]
        words += ["--spec-draft-n-max", str(choice.k)]
        return Flags("llama.cpp", version, shlex.join(words), ("The draft must be a GGUF file.",))
    if kind == "ngram":
        words = [
            "--spec-type",
            "ngram-simple",
            "--spec-ngram-simple-size-n",
            str(ngram_lengths(choice.drafter)[1]),
        ]
        words += ["--spec-ngram-simple-size-m", str(choice.k)]
        return Flags("llama.cpp", version, shlex.join(words))
    return _no_method("llama.cpp", version, kind)


def _transformers(choice: Config | None, temperature: float) -> Flags:
    version = "transformers 5.24"
    if choice is None:
        return Flags("transformers", version, "model.generate(**inputs)")
    kind = method(choice.drafter)
    if is_tree(choice.drafter):
        return _no_method("transformers", version, kind, "trees")
    one = "Assisted generation takes batch 1 only."
    # Its defaults change K as they go and stop drafting early; these do neither.
    fixed = 'num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0'
    if kind == "draft-model":
        name = json.dumps(choice.drafter, ensure_ascii=False)
        text = (
            f"assistant = AutoModelForCausalLM.from_pretrained({name})\n"
            f"assistant.generation_config.update(num_assistant_tokens={choice.k}, {fixed})\n"
            "model.generate(**inputs, assistant_model=assistant)"
        )
        return Flags("transformers", version, text, (one,))
    if kind == "ngram":
        longest = ngram_lengths(choice.drafter)[1]
        lookup = f"prompt_lookup_num_tokens={choice.k}, max_matching_ngram_size={longest}"
        text = f"model.generate(**inputs, {lookup})"
        return Flags("transformers", version, text, (one,))
    layer = head_path(choice.drafter)
    if kind == "early-exit" and layer.isdecimal():
        text = (
            f"model.generation_config.update(num_assistant_tokens={choice.k}, {fixed})\n"
            f"model.generate(**inputs, assistant_early_exit={layer})"
        )
        return Flags("transformers", version, text, (one,))
    return _no_method("transformers", version, kind)


def _no_method(engine: EngineName, version: str, kind: Method, what: str | None = None) -> Flags:
    lacking = f"{what} of {kind}" if what else f"{kind} method"
    return Flags(engine, version, None, (f"{version} has no {lacking}.",))


def tree_size(nodes: int) -> tuple[int, int]:
    """Width and depth that spectune searches a dynamic tree of so many nodes with."""
    return min(10, max(2, round(math.sqrt(nodes)))), math.ceil(math.log2(nodes)) + 2


_FORMS: dict[EngineName, Callable[[Config | None, float], Flags]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}
