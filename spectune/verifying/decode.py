"""Decoders for an audit: the engine's own, with a cell's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spectune.decoding.decoder import Decoder, DecodeSettings, Run
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.engines.native import NativeEngine
from spectune.sweeping.cell import CellSpec, Rule
from spectune.verifying.witness import Witness

OnTokens = Callable[[int], None]


def decode_plainly(engine: NativeEngine, spec: CellSpec, requests: Sequence[Request], on_tokens: OnTokens) -> Run:
    """Plain decoding at the cell's batch, with the requests' seeds: what every rule is held against."""
    decoder = Decoder(engine.loaded.model, None, _settings(spec, reference_rule(spec)), _stop(engine, spec))
    return _decode(decoder, requests, spec.batch, on_tokens)


def decode_speculatively(
    engine: NativeEngine, spec: CellSpec, requests: Sequence[Request], on_tokens: OnTokens, *, rule: Rule | None = None
) -> tuple[Run, Witness]:
    """Speculative decoding with the cell's rule or another one."""
    drafter = engine.built(spec.drafter).drafter
    decoder = Witness(engine.loaded.model, drafter, _settings(spec, rule or spec.rule), _stop(engine, spec))
    return _decode(decoder, requests, spec.batch, on_tokens), decoder


def reference_rule(spec: CellSpec) -> Rule:
    """The rule that promises the very tokens of plain decoding."""
    return "greedy" if spec.sampling.greedy else "match"


def _decode(decoder: Decoder, requests: Sequence[Request], batch: int, on_tokens: OnTokens) -> Run:
    decoder.on_round = lambda _, trace: on_tokens(trace.emitted)
    return decoder.decode(requests, batch)


def _settings(spec: CellSpec, rule: Rule) -> DecodeSettings:
    return DecodeSettings(KSchedule.constant(spec.k), rule, spec.sampling, graphs=spec.graphs)


def _stop(engine: NativeEngine, spec: CellSpec) -> StopRule:
    return StopRule(frozenset() if spec.ignore_eos else engine.loaded.stop_ids)
