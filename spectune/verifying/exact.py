"""The target's exact probabilities for given outputs, by teacher forcing: prompt and output in, distributions out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.random import Stream, pick, uniform
from spectune.decoding.sampling import is_greedy, penalize, probabilities
from spectune.engines.engine import Request
from spectune.sweeping.cell import Sampling


@torch.inference_mode()
def forced_logits(
    model: CausalModel,
    prompt: Sequence[int],
    outputs: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    width: int | None = None,
    copies: int = 1,
) -> Tensor:
    """[R, n, V] float32 logits, penalty applied: place t chooses token t of an output from the prompt and its first t.

    What stands behind a shorter output's end is padding.

    Args:
        outputs: R continuations of the prompt, the longest of n tokens.
        width: tokens fed at once; all if None.
        copies: how often the rows are repeated, to compute in the shapes of a larger batch.
    """
    rows, length, device = len(outputs), max(map(len, outputs)), model.device
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    for row, tokens in zip(ids, outputs, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, device=device)
    batch = rows * copies
    store = KVStore(batch, len(prompt) + length)
    start = torch.tensor([list(prompt)], device=device)
    first = model.forward(start, Step(0, (0,), len(prompt), device), store, last_only=True)  # [1, 1, V]
    for row in range(1, batch):
        store.move(0, row)
    parts = [first.expand(rows, -1, -1)]
    width = width or length
    for at in range(0, length - 1, width):
        piece = ids[:, at : min(at + width, length - 1)].repeat(copies, 1)
        step = Step(0, (len(prompt) + at,) * batch, piece.shape[1], device)
        parts.append(model.forward(piece, step, store)[:rows])
    return _penalized(torch.cat(parts, 1).float(), prompt, ids, sampling)


@torch.inference_mode()
def prefilled_logits(model: CausalModel, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> Tensor:
    """[1, n, V] as `forced_logits`, with prompt and output in one forward, as a prompt is read."""
    text = torch.tensor([[*prompt, *output[:-1]]], device=model.device)
    size = text.shape[1]
    logits = model.forward(text, Step(0, (0,), size, model.device), KVStore(1, size))
    ids = torch.tensor([list(output)], device=model.device)
    return _penalized(logits[:, len(prompt) - 1 :].float(), prompt, ids, sampling)


def _penalized(logits: Tensor, prompt: Sequence[int], outputs: Tensor, sampling: Sampling) -> Tensor:
    """Logits [R, n, V] of outputs [R, n] with the repetition penalty, each place with its own past."""
    if sampling.repetition_penalty == 1.0:
        return logits
    seen = torch.zeros(logits.shape[0], logits.shape[-1], dtype=torch.bool, device=logits.device)
    seen[:, list(prompt)] = True
    logits = logits.clone()
    for t in range(logits.shape[1]):
        logits[:, t] = penalize(logits[:, t], seen, sampling.repetition_penalty)
        seen.scatter_(1, outputs[:, t : t + 1], True)
    return logits


def chosen(logits: Tensor, request: Request, sampling: Sampling) -> list[int]:
    """What plain decoding of the request chooses from its logits [n, V], place by place."""
    if is_greedy(sampling):
        return logits.argmax(-1).tolist()
    return pick(probabilities(logits, sampling), coins(request, len(logits), logits.device)).tolist()


def coins(request: Request, count: int, device: torch.device) -> Tensor:
    """[n] float64: the coins that choose a request's first tokens in plain sampling."""
    first = len(request.token_ids)
    position = torch.arange(first, first + count, device=device)
    return uniform(torch.full_like(position, request.seed), Stream.TARGET, position, torch.zeros_like(position))


def rounding(model: CausalModel, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> float:
    """Mean total-variation distance per place between the distributions of two exact ways to decode an output.

    One feeds token by token, as plain decoding does, the other all at once: they differ by rounding alone.
    """
    ways = [
        probabilities(forced_logits(model, prompt, [output], sampling, width=width)[0], sampling) for width in (1, None)
    ]
    return float((ways[0] - ways[1]).abs().sum(-1).mean() / 2)
