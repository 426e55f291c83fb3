"""The exports of a choice for one server or for all."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from spectune.recommending.exports import llama_cpp, sglang, tensorrt_llm, transformers, vllm
from spectune.recommending.exports.export import ENGINES, EngineName, Export, Wanted
from spectune.recommending.exports.names import is_shipped
from spectune.speedup.profile import Config
from spectune.sweeping.cell import LOSSY_RULES
from spectune.sweeping.drafter_names import has_int8_weights, has_random_weights

_MODULES: dict[EngineName, ModuleType] = {
    "vllm": vllm,
    "sglang": sglang,
    "tensorrt-llm": tensorrt_llm,
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}


def exports(wanted: Wanted | None, *, engine: EngineName | None = None) -> tuple[Export, ...]:
    """The settings for `engine`, or for every engine. None is OFF: leave speculation out."""
    return tuple(_export(name, wanted) for name in (ENGINES if engine is None else (engine,)))


def expressible(choice: Config, engine: EngineName) -> bool:
    """Whether the engine has this method with these settings."""
    return _MODULES[engine].export(Wanted(choice, "target")).text is not None


def _export(name: EngineName, wanted: Wanted | None) -> Export:
    module = _MODULES[name]
    if wanted is None:
        # Where switching off has a form of its own, that is given; elsewhere there is nothing to write.
        if name in ("llama.cpp", "transformers"):
            return Export(name, module.VERSION, module.OFF)
        return Export(name, module.VERSION, None, (module.OFF,))
    found: Export = module.export(wanted)
    return replace(found, notes=(*found.notes, *_own_notes(wanted.choice))) if found.text else found


def _own_notes(choice: Config) -> tuple[str, ...]:
    """What no engine's settings can say."""
    notes = []
    if choice.rule in LOSSY_RULES:
        notes.append(f"Measured with {choice.rule} acceptance, which changes the output; here acceptance is exact.")
    if choice.synthetic is not None:
        notes.append("Measured with synthetic acceptance: real acceptance must be measured before this is worth using.")
    if has_random_weights(choice.drafter):
        notes.append("The draft had random weights of its shape: name a trained one of that shape.")
    if has_int8_weights(choice.drafter):
        notes.append("Measured with the draft's weights in 8 bits, on a CPU; the server runs the draft as its file is.")
    if is_shipped(choice.drafter):
        notes.append("Fill in the path: drafts that ship with spectune are packed, `spectune train` makes one to load.")
    return tuple(notes)
