"""Shorthands to run the decoder and its oracle, transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spectune.decoding.decoder import Decoder, DecodeSettings, Run
from spectune.decoding.drafter import Draft, Round, Row
from spectune.decoding.drafters import build_drafter
from spectune.decoding.loading import Loaded
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.sweeping.cell import Sampling

GREEDY = Sampling()


def random_prompts(count: int, *, vocab_size: int = 128, lengths: Sequence[int] = (5, 17, 1, 40, 9)):
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(3, vocab_size, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)
    ]


def requests_of(prompts, max_new_tokens: int, seed: int = 0) -> list[Request]:
    return [Request(str(i), tuple(p), max_new_tokens, seed + i) for i, p in enumerate(prompts)]


def reference(loaded: Loaded, prompt: Sequence[int], max_new_tokens: int, **settings) -> list[int]:
    """Greedy `generate` of transformers with its own attention and cache."""
    from transformers import AutoModelForCausalLM

    key = (loaded.model.model.name_or_path, loaded.model.model.dtype)
    if key not in _REFERENCES:
        where, dtype = key
        _REFERENCES[key] = AutoModelForCausalLM.from_pretrained(where, dtype=dtype).eval()
    model = _REFERENCES[key]
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
    return out[0, len(prompt) :].tolist()


_REFERENCES: dict[tuple[str, torch.dtype], Any] = {}


def drafter_of(loaded: Loaded, name: str):
    return build_drafter(str(name), loaded, device=loaded.model.device, dtype=loaded.model.model.dtype).drafter


def decode(
    loaded: Loaded,
    drafter,
    prompts,
    *,
    k: int = 4,
    batch: int = 1,
    max_new_tokens: int = 24,
    rule: str = "speculative",
    sampling: Sampling = GREEDY,
    stop: StopRule | None = None,
    seed: int = 0,
    schedule: KSchedule | None = None,
    on_round=None,
) -> Run:
    settings = DecodeSettings(schedule or KSchedule.constant(k), rule, sampling)
    decoder = Decoder(loaded.model, drafter, settings, stop or StopRule(loaded.stop_ids))
    decoder.on_round = on_round
    run = decoder.decode(requests_of(prompts, max_new_tokens, seed), batch)
    check_accounting(run, k if schedule is None else schedule.largest)
    return run


def check_accounting(run: Run, k: int) -> None:
    """The invariants every run must hold."""
    for g in run.generations:
        assert len(g.tokens) == 1 + sum(r.emitted for r in g.rounds) == len(g.origins)
        for r in g.rounds:
            assert 0 <= r.accepted <= r.drafted <= k
            assert r.accepted <= r.emitted <= r.accepted + 1
    assert sum(t.emitted for t in run.trace) == sum(len(g.tokens) - 1 for g in run.generations)
    assert run.target_forwards == len(run.trace)


def tokens_of(run: Run) -> list[list[int]]:
    return [g.tokens for g in run.generations]


class ScriptedDrafter:
    """Drafts the plain continuation, right or wrong by a script: `right[i]` tokens are right in round i of a row."""

    device = None
    taps = ()

    def __init__(self, continuations: dict[int, list[int]], script, vocab_size: int = 128) -> None:
        self.continuations = continuations  # by row seed
        self.script = script  # (seed, round index) -> list of bools, one per drafted token
        self.vocab_size = vocab_size
        self.round: dict[int, int] = {}

    def start(self, rows: int, capacity: int) -> None:
        self.round = {}

    def admit(self, index: int, row: Row, states=None) -> None:
        self.round[row.seed] = 0

    def propose(self, round_: Round) -> Draft | None:
        tokens, counts = [], []
        for row, limit in zip(round_.rows, round_.limits, strict=True):
            whole = self.continuations[row.seed]
            coming = whole[whole_index(whole, row.tokens) :][:limit]
            marks = self.script(row.seed, self.round[row.seed])[: len(coming)]
            self.round[row.seed] += 1
            drafted = [t if ok else (t + 1) % self.vocab_size for t, ok in zip(coming, marks, strict=True)]
            counts.append(len(drafted))
            tokens.append(drafted + [0] * (max(round_.limits) - len(drafted)))
        if max(counts) == 0:
            return None
        return Draft(torch.tensor(tokens), torch.tensor(counts), None, 0)

    def keep(self, rows, kept) -> None:
        pass

    def move(self, source: int, destination: int) -> None:
        pass


def whole_index(whole: list[int], tokens: list[int]) -> int:
    """How many tokens of the prompt-and-output `whole` are known."""
    assert whole[: len(tokens)] == tokens
    return len(tokens)
