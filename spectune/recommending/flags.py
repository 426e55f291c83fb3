"""Ready settings: the chosen configuration in the words of each engine.

Names change between releases, so every text carries the version that its names were taken from. Nothing is
translated silently: where an engine has no such method, that is what is said.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from spectune.speedup.profile import Config

EngineName = Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

# The n-gram lengths that spectune's own drafter looks up where its name gives none.
NGRAM_MIN, NGRAM_MAX = 1, 4

Method = Literal["draft-model", "ngram", "early-exit", "layer-skip"]


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
    return tuple(_FORMS[name](choice, temperature) for name in wanted)


def method(drafter: str) -> Method:
    """The kind of drafter behind a name as `sweep --draft` takes it."""
    kind = drafter.partition(":")[0]
    return kind if kind in ("ngram", "early-exit", "layer-skip") else "draft-model"  # type: ignore[return-value]


def ngram_lengths(drafter: str) -> tuple[int, int]:
    """The shortest and longest n-gram that `ngram`, `ngram:N` or `ngram:MIN-MAX` looks up."""
    low, _, high = drafter.partition(":")[2].partition("-")
    return (int(low), int(high or low)) if low else (NGRAM_MIN, NGRAM_MAX)


def _vllm(choice: Config | None, temperature: float) -> Flags:
    version = "vLLM 0.32"
    if choice is None:
        return Flags("vllm", version, None, ("Leave --speculative-config out: vLLM refuses num_speculative_tokens 0.",))
    kind = method(choice.drafter)
    settings: dict[str, object]
    if kind == "draft-model":
        settings = {"method": "draft_model", "model": choice.drafter, "num_speculative_tokens": choice.k}
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
    if kind == "draft-model":
        words = [
            "--speculative-algorithm",
            "STANDALONE",
            "--speculative-draft-model-path",
            choice.drafter,
            "--speculative-num-steps",
            str(choice.k),
            "--speculative-eagle-topk",
            "1",
            "--speculative-num-draft-tokens",
            str(choice.k + 1),  # it counts the root of the draft
        ]
        return Flags("sglang", version, shlex.join(words), (reset,))
    if kind == "ngram":
        words = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(choice.k + 1)]
        tree = "SGLang drafts a tree of n-grams, not a chain: expect another acceptance."
        return Flags("sglang", version, shlex.join(words), (tree, reset))
    return _no_method("sglang", version, kind)


def _tensorrt_llm(choice: Config | None, temperature: float) -> Flags:
    version = "TensorRT-LLM 1.2"
    if choice is None:
        return Flags("tensorrt-llm", version, None, ("Leave speculative_config out of the YAML file.",))
    kind = method(choice.drafter)
    lines = ["disable_overlap_scheduler: true", "speculative_config:"]
    if kind == "draft-model":
        # A JSON string is a YAML string, whatever is in the name.
        model = json.dumps(choice.drafter)
        lines += [
            "  decoding_type: DraftTarget",
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
    if kind == "draft-model":
        words = ["--spec-type", "draft-simple", "--spec-draft-model", choice.drafter]
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
    if kind == "early-exit":
        layer = choice.drafter.partition(":")[2]
        text = (
            f"model.generation_config.update(num_assistant_tokens={choice.k}, {fixed})\n"
            f"model.generate(**inputs, assistant_early_exit={layer})"
        )
        return Flags("transformers", version, text, (one,))
    return _no_method("transformers", version, kind)


def _no_method(engine: EngineName, version: str, kind: Method) -> Flags:
    return Flags(engine, version, None, (f"{version} has no {kind} method.",))


_FORMS: dict[EngineName, Callable[[Config | None, float], Flags]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}
