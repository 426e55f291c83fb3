"""A tiny target from which heads can learn something in a second, its greedy text, and a short training loop."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import random_prompts

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.loading import Loaded
from spectune.training.loop import Batch

LENGTH = 48
PROMPT = 6


def load_calm(folder: Path) -> Loaded:
    """A random model whose next token depends mostly on the last one: little text is enough to learn from."""
    from transformers import AutoModelForCausalLM

    save_tiny(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.003
        layer.mlp.down_proj.weight.data *= 0.003
    model.save_pretrained(folder)
    return load_tiny(folder)


def greedy_corpus(loaded: Loaded, taps: tuple[int, ...], batches: int = 10, rows: int = 6) -> list[Batch]:
    """Greedy text of the model with its states."""
    model = loaded.model
    prompts = random_prompts(batches * rows, lengths=(PROMPT,))
    corpus = []
    for first in range(0, len(prompts), rows):
        ids = torch.tensor(prompts[first : first + rows])
        store = KVStore(rows, LENGTH + 1)
        with torch.inference_mode():
            step = Step(0, (0,) * rows, PROMPT, ids.device)
            logits = model.forward(ids, step, store, last_only=True)
            for place in range(PROMPT, LENGTH):
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
                logits = model.forward(ids[:, -1:], Step(0, (place,) * rows, 1, ids.device), store)
            step = Step(0, (0,) * rows, LENGTH, ids.device)
            _, states = model.forward_with_states(ids, step, KVStore(rows, LENGTH), taps)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, :PROMPT] = False
        corpus.append(Batch(ids.clone(), mask, states.clone()))
    return corpus


def learn(method, batches: list[Batch], epochs: int = 12, rate: float = 3e-3, progress: float = 0.0) -> list[float]:
    """Train a method's module, as at this progress of a run; the losses of all steps."""
    optimizer = torch.optim.AdamW([p for p in method.module.parameters() if p.requires_grad], rate)
    losses = []
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = method.loss(batch._replace(progress=progress))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses
