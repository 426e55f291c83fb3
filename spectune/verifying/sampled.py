"""The distribution test: do sampled tokens follow the target's exact probabilities?

Each prompt is continued with many seeds. Every token behind a continuation's first one, which no draft precedes, is
compared with the target's distribution given the text before it (`exact`), and all of them together are judged by the
tests of `statistics`. A row's tokens are used up to its end, so errors that build up over rounds show too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from spectune.decoding.generation import Generation
from spectune.decoding.sampling import probabilities
from spectune.engines.engine import Request
from spectune.engines.native import NativeEngine, request_seed
from spectune.sweeping.cell import CellSpec
from spectune.verifying.decode import OnTokens, decode_speculatively
from spectune.verifying.exact import forced_logits, rounding
from spectune.verifying.record import DistributionCheck, SetName, SetTest
from spectune.verifying.statistics import Numbers, SetCount, kolmogorov, pair_test
from spectune.verifying.witness import Witness

TESTS = 5  # uniformity, independence, and the three sets
ROUNDING_FACTOR = 2.0  # decoding uses more shapes than the two that are measured
_ROUNDING_ROWS = 4  # continuations on which rounding is measured
_COOLER = 0.8  # "likely" tokens are those that this share of the temperature would favour
_GROUP_BYTES = 1 << 28  # of distributions held at once
_MOST_ROWS = 4  # times the continuations that would do if none ended early


def check_distribution(
    engine: NativeEngine,
    spec: CellSpec,
    requests: Sequence[Request],
    *,
    samples: int,
    alpha: float,
    on_tokens: OnTokens,
) -> DistributionCheck:
    """Decode until `samples` tokens have been compared, or until the prompts' outputs all end too early for that.

    Args:
        requests: the prompts, each once.
        alpha: level of each single test.
    """
    evidence = Evidence()
    for group in _groups(engine, spec, requests, samples):
        if evidence.tokens >= samples:
            break
        run, witness = decode_speculatively(engine, spec, group, on_tokens)
        on_tokens(evidence.add(engine, spec, group, run.generations, witness))
    return evidence.judge(spec, alpha)


def _groups(engine: NativeEngine, spec: CellSpec, requests: Sequence[Request], samples: int) -> Iterator[list[Request]]:
    """Groups of one prompt with new seeds; the prompts take turns."""
    longest = max(2, *(r.max_new_tokens for r in requests))
    wanted = -(-samples // (longest - 1))  # continuations
    per_prompt = -(-wanted // len(requests))
    held = _GROUP_BYTES // (4 * longest * engine.loaded.model.vocab_size)
    size = max(1, min(max(per_prompt, spec.batch), max(held, spec.batch)))
    for turn in range(-(-_MOST_ROWS * per_prompt // size)):
        for r in requests:
            names = [f"{r.id}/{turn * size + i}" for i in range(size)]
            yield [Request(n, r.token_ids, r.max_new_tokens, request_seed(spec.seed, n), r.id) for n in names]


@dataclass(slots=True)
class _Counted:
    """A SetCount that grows."""

    tokens: int = 0
    seen: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, chances: Tensor, hits: Tensor) -> None:
        """[n] probability of each place's set, [n] whether its token was in it."""
        chances = chances.double().clamp(0.0, 1.0)
        self.tokens += len(hits)
        self.seen += int(hits.sum())
        self.expected += float(chances.sum())
        self.variance += float((chances * (1 - chances)).sum())

    @property
    def total(self) -> SetCount:
        return SetCount(self.tokens, self.seen, self.expected, self.variance)


@dataclass(slots=True)
class Evidence:
    """What has been counted so far."""

    uniform: list[Numbers] = field(default_factory=list)  # per continuation, tokens ranked by probability
    pairs: list[Numbers] = field(default_factory=list)
    likely: _Counted = field(default_factory=_Counted)
    favoured: _Counted = field(default_factory=_Counted)
    impossible: _Counted = field(default_factory=_Counted)
    noises: list[float] = field(default_factory=list)
    prompts: set[str] = field(default_factory=set)
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.uniform))

    @torch.inference_mode()
    def add(
        self,
        engine: NativeEngine,
        spec: CellSpec,
        requests: Sequence[Request],
        generations: Sequence[Generation],
        witness: Witness,
    ) -> int:
        """Compare continuations of one prompt. Returns how many tokens that were."""
        before = self.tokens
        prompt, model = requests[0].token_ids, engine.loaded.model
        outputs = [g.tokens for g in generations]
        logits = forced_logits(model, prompt, outputs, spec.sampling)  # [R, n, V]
        for request, generation, row in zip(requests, generations, logits, strict=True):
            self.drafted += sum(r.drafted for r in generation.rounds)
            self.accepted += sum(r.accepted for r in generation.rounds)
            places = range(1, len(generation.tokens))
            if not places:
                continue
            p = probabilities(row[1 : len(generation.tokens)], spec.sampling)  # [n - 1, V]
            tokens = torch.tensor(generation.tokens[1:], device=p.device)
            preferences = [witness.preferences.get((request.seed, len(prompt) + place)) for place in places]
            self._count(p, tokens, preferences, spec, request.seed)
        if len(self.noises) < _ROUNDING_ROWS:
            self.noises.append(rounding(model, prompt, outputs[0], spec.sampling))
        self.prompts.add(requests[0].repeats or requests[0].id)
        return self.tokens - before

    def _count(
        self, p: Tensor, tokens: Tensor, preferences: Sequence[Tensor | None], spec: CellSpec, seed: int
    ) -> None:
        """One continuation: p [n, V], tokens [n], what the draft preferred at each place."""
        coins = torch.from_numpy(np.random.default_rng([seed, spec.k]).random((2, len(tokens)))).to(p.device)
        token = tokens[:, None]
        mine = p.gather(1, token)  # [n, 1]
        ids = torch.arange(p.shape[1], device=p.device)
        above = (p > mine) | ((p == mine) & (ids < token))
        self.uniform.append(_transform(p, above, mine, coins[0]))
        by_id = _transform(p, ids < token, mine, coins[1])
        even = len(by_id) // 2 * 2
        self.pairs.append(by_id[:even].reshape(-1, 2))
        self.likely.add(*_in_set(p, _cooler(p), token))
        if spec.sampling.top_k or spec.sampling.top_p < 1 or spec.sampling.min_p:
            self.impossible.add(*_in_set(p, p == 0, token))
        known = [place for place, q in enumerate(preferences) if q is not None]
        if known:
            q = torch.stack([q for q in preferences if q is not None])
            self.favoured.add(*_in_set(p[known], favoured(p[known], q), token[known]))

    def judge(self, spec: CellSpec, alpha: float) -> DistributionCheck:
        """All tests on what was counted."""
        u = np.concatenate(self.uniform) if self.uniform else np.empty(0)
        pairs = np.concatenate(self.pairs) if self.pairs else np.empty((0, 2))
        noise = fmean(self.noises) if self.noises else 0.0
        tolerance = ROUNDING_FACTOR * noise
        distance, chance = kolmogorov(u, tolerance)
        counted: tuple[tuple[SetName, SetCount], ...] = (
            ("likely", self.likely.total),
            ("favoured", self.favoured.total),
            ("impossible", self.impossible.total),
        )
        return DistributionCheck(
            tokens=len(u),
            continuations=len(self.uniform),
            prompts=len(self.prompts),
            drafted=self.drafted,
            accepted=self.accepted,
            rounding=noise,
            tolerance=tolerance,
            alpha=alpha,
            distance=distance,
            uniformity_p=chance,
            independence_p=pair_test(pairs),
            sets=tuple(
                SetTest(
                    name=name,
                    tokens=own.tokens,
                    seen=own.seen,
                    expected=own.expected,
                    p_value=own.p_value(tolerance),
                    detectable=own.detectable(alpha, tolerance) / len(u),
                )
                for name, own in counted
                if own.tokens
            ),
        )


def favoured(p: Tensor, q: Tensor) -> Tensor:
    """The tokens that a rule favours which, after a rejection, draws from p and not from the residual. [n, V] -> bool.

    Such a rule emits x with probability min(p, q) + (1 - Σ min(p, q))·p, which is above p where q > p·Σ min(p, q).
    """
    overlap = torch.minimum(p, q).sum(-1, keepdim=True)
    return (p > 0) & (q > overlap * p)


def _cooler(p: Tensor) -> Tensor:
    """The tokens that a lower temperature favours: p^(1/c) / Σ p^(1/c) > p. [n, V] -> bool."""
    power = p ** (1 / _COOLER)
    return power > p * power.sum(-1, keepdim=True)


def _in_set(p: Tensor, members: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """[n] the probability of each place's set of tokens [n, V], and whether its token [n, 1] is in it."""
    return (p * members).sum(-1, dtype=torch.float64), members.gather(1, token).squeeze(1)


def _transform(p: Tensor, before: Tensor, mine: Tensor, coins: Tensor) -> Numbers:
    """u = F(tokens before it) + v·p(token), [n] float64."""
    total = p.sum(-1, dtype=torch.float64)
    u = ((p * before).sum(-1, dtype=torch.float64) + coins * mine.squeeze(1)) / total
    return u.clamp(0.0, 1.0).cpu().numpy()
