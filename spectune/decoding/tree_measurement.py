"""Measurements that static trees are planned from: how often a draft's r-th child is accepted, and what steps cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.loading import Loaded
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.random import Stream, pick, uniform
from spectune.decoding.sampling import History, is_greedy, probabilities
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.decoding.tree import Siblings
from spectune.decoding.tree_drafter import vocabulary_of
from spectune.engines.engine import Request
from spectune.measuring.clock import make_clock
from spectune.suites.render import render
from spectune.sweeping.cell import Sampling
from spectune.training.prompts import expand, training_book

_PROMPTS = 8
_TOKENS = 40  # written behind each prompt
_RANKS = 16  # children looked at
_CONTEXT = 256  # tokens in the cache while steps are timed
_REPEATS = 5
_SEED = 41  # of prompts and coins


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`ranks[r]` is the chance that a node's r-th child is the one that is accepted."""

    ranks: tuple[float, ...]
    positions: int  # measured


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one forward over `widths[i]` tokens of every row."""

    widths: tuple[int, ...]
    draft: tuple[float, ...]
    verify: tuple[float, ...]

    def draft_seconds(self, width: int) -> float:
        return float(np.interp(width, self.widths, self.draft))

    def verify_seconds(self, width: int) -> float:
        return float(np.interp(width, self.widths, self.verify))


@torch.inference_mode()
def measure_acceptance(
    target: Loaded,
    drafter: ModelDrafter,
    siblings: Siblings,
    sampling: Sampling,
    requests: Sequence[Request] | None = None,
) -> Acceptance:
    """Let the target write, and see at every token which of the draft's children the rule would have accepted.

    The children are drawn once per token; the chances that the rule accepts them are summed, not tossed.

    Args:
        siblings: how children are drawn; "distinct" are the draft's likeliest tokens.
        requests: what the target answers; prompts of the training book if None.
    """
    requests = calibration_requests(target) if requests is None else requests
    settings = DecodeSettings(KSchedule.constant(0), sampling=sampling)
    written = Decoder(target.model, None, settings, StopRule(target.stop_ids)).decode(requests, len(requests))
    ranks = min(_RANKS, drafter.shared_vocab)
    total = torch.zeros(ranks, dtype=torch.float64)
    positions = 0
    for request, generation in zip(requests, written.generations, strict=True):
        text = list(request.token_ids), generation.tokens
        history = History(1, target.model.vocab_size, sampling.repetition_penalty, target.model.device)
        history.reset(0, text[0])
        ids = torch.tensor([generation.tokens[:-1]], dtype=torch.long, device=target.model.device)
        scores = []
        for logits in (_logits(target.model, *text), _draft_logits(drafter, *text).to(target.model.device)):
            count = logits.shape[0]  # a draft's context may end first
            scores.append(history.apply_block(logits[None], ids[:, : max(0, count - 1)])[0])
        chances = _chances(scores[0][: len(scores[1])], scores[1], ranks, siblings, sampling)
        total += chances.sum(0).cpu()
        positions += len(chances)
    # At most one child is accepted; rounding must not make it more.
    return Acceptance(tuple((total / max(1.0, positions, float(total.sum()))).tolist()), positions)


def calibration_requests(target: Loaded) -> list[Request]:
    """Prompts of the training book; random ids for a target without a tokenizer."""
    if target.tokenizer is None:
        generator = torch.Generator().manual_seed(_SEED)
        prompts = torch.randint(0, target.model.vocab_size, (_PROMPTS, 16), generator=generator).tolist()
    else:
        book = islice(expand(training_book(), seed=_SEED), _PROMPTS)
        prompts = [render(prompt, target.tokenizer) for prompt in book]
    room = max(1, target.model.max_context - _TOKENS)
    return [Request(f"calibration-{i}", tuple(p[:room]), _TOKENS, _SEED + i) for i, p in enumerate(prompts)]


def _logits(model: CausalModel, prompt: list[int], output: list[int]) -> Tensor:
    """[n, width] what the model would write in place of each output token, as far as its context reaches."""
    ids = torch.tensor([[*prompt, *output[:-1]]], device=model.device)[:, : model.max_context]
    ids = ids.clamp(max=model.vocab_size - 1)
    before = min(len(prompt), ids.shape[1]) - 1
    store = KVStore(1, ids.shape[1])
    if before:
        model.forward(ids[:, :before], Step(0, (0,), before, model.device), store, last_only=True)
    step = Step(0, (before,), ids.shape[1] - before, model.device)
    logits = model.forward(ids[:, before:], step, store)[0]
    return logits if len(prompt) <= ids.shape[1] else logits[:0]


def _draft_logits(drafter: ModelDrafter, prompt: list[int], output: list[int]) -> Tensor:
    """The draft's logits for the output tokens, over the target's vocabulary: -inf where the draft names nothing."""
    logits = _logits(drafter.model, prompt, output)[:, : drafter.shared_vocab]
    vocabulary = vocabulary_of(drafter)
    ids = (
        torch.arange(drafter.shared_vocab, device=logits.device)
        if vocabulary.draft_ids is None
        else (vocabulary.draft_ids)
    )
    wide = torch.full((len(logits), vocabulary.target_width), -torch.inf, dtype=logits.dtype, device=logits.device)
    wide[:, ids] = logits
    return wide


def _chances(target: Tensor, draft: Tensor, ranks: int, siblings: Siblings, sampling: Sampling) -> Tensor:
    """Chance that the r-th child is accepted, at each of n places. Logits [n, V] twice -> [n, ranks] float64."""
    likeliest = draft.topk(ranks).indices
    if is_greedy(sampling):
        return (likeliest == target.argmax(-1, keepdim=True)).double()
    p = probabilities(target, sampling)
    if siblings == "distinct":
        return p.gather(1, likeliest).double()
    q = probabilities(draft, sampling)
    place = torch.arange(len(draft), device=draft.device)
    seed = torch.full_like(place, _SEED)
    chances, open_ = [], torch.ones(len(draft), dtype=torch.float64, device=p.device)
    for rank in range(ranks):
        coins = uniform(seed, Stream.DRAFT, place, torch.full_like(place, rank))
        token = pick(q, coins).clamp(max=q.shape[1] - 1)[:, None]  # behind the end where q is used up
        p_token, q_token = p.gather(1, token), q.gather(1, token)
        ratio = torch.where(q_token > 0, p_token / q_token, 0.0).clamp(max=1.0)[:, 0].double()
        chances.append(open_ * ratio)
        open_ = open_ * (1 - ratio)
        rest = (p - q).clamp(min=0)
        p = torch.where(rest.sum(1, keepdim=True) > 0, rest / rest.sum(1, keepdim=True), p)
        if siblings == "without_replacement":
            q = q.scatter(1, token, 0.0)
            q = q / q.sum(1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    return torch.stack(chances, 1)


@torch.inference_mode()
def measure_times(target: CausalModel, draft: CausalModel, nodes: int, rows: int) -> StepTimes:
    """Time both models over 1, 2, 4, … tokens per row, up to a verification of so many nodes and the root."""
    widths = [1 << i for i in range((nodes + 1).bit_length()) if 1 << i < nodes + 1] + [nodes + 1]
    draft_seconds, verify_seconds = ([_step_seconds(m, width, rows) for width in widths] for m in (draft, target))
    return StepTimes(tuple(widths), tuple(draft_seconds), tuple(verify_seconds))


def _step_seconds(model: CausalModel, width: int, rows: int) -> float:
    """Median time of a forward behind a typical context."""
    context = max(0, min(_CONTEXT, model.max_context - width))
    store = KVStore(rows, context + width)
    ids = torch.zeros(rows, width, dtype=torch.long, device=model.device)
    clock = make_clock(model.device)

    def run() -> None:
        model.forward(ids, Step(0, (context,) * rows, width, model.device), store)

    run()  # allocates
    marks = [clock.mark()]
    for _ in range(_REPEATS):
        run()
        marks.append(clock.mark())
    clock.sync()
    return statistics.median(clock.seconds(start, end) for start, end in pairwise(marks))
