"""The comparison with transformers and the losslessness check, on tiny random models."""

from __future__ import annotations

import json
import math

import pytest
import torch
from decoding_helpers import random_prompts, requests_of
from typer import Typer
from typer.testing import CliRunner

from spectune.engines import lossless, peers
from spectune.errors import UsageError

TOKENS = 12


def measured(tiny, draft, **changes):
    settings = {"tokens": TOKENS, "repeats": 2, "k": 3}
    return peers.measure(tiny, str(draft), random_prompts(3), **(settings | changes))


def lossless_command(folder, *options: str):
    app = Typer()
    app.command()(lossless.main)
    return CliRunner().invoke(app, ["--target", str(folder), "--device", "cpu", *options])


def perturb(monkeypatch, target) -> None:
    """Make the target prefer another token wherever it verifies a draft."""
    forward = target.model.forward

    def wrong(ids, step, store, *, last_only=False):
        logits = forward(ids, step, store, last_only=last_only)
        return logits if last_only else logits.roll(1, -1)

    monkeypatch.setattr(target.model, "forward", wrong)


@pytest.fixture(scope="module")
def comparisons(tiny, other_folder):
    return measured(tiny, other_folder)


def test_ratios_are_finite_and_both_sides_emit_the_same_tokens(comparisons):
    assert len(comparisons) == 4
    for c in comparisons:
        for rates in (c.decode, c.with_prefill):
            for spread in (rates.ours, rates.theirs, rates.ratio):
                assert len(spread.repeats) == 2
                assert 0 < spread.low <= spread.median <= spread.high < math.inf
        assert c.same_outputs == c.prompts == 3
        assert c.their_tokens == 3 * TOKENS
    assert [c.our_tokens for c in comparisons] == [3 * TOKENS] * 3 + [peers.WIDE_BATCH * TOKENS]


def test_plain_decoding_takes_one_target_forward_per_token(comparisons):
    plain, _, _, wide = comparisons
    for c in (plain, wide):
        assert c.our_tokens_per_forward == c.their_tokens_per_forward == 1.0


def test_both_sides_draft_exactly_k_tokens_a_round(tiny, tiny_folder):
    """A draft that is the target: every round keeps all K, so the forwards count the rounds."""
    k, tokens = 3, 17
    draft = measured(tiny, tiny_folder, tokens=tokens, k=k, repeats=1)[1]
    assert draft.our_tokens_per_forward == tokens / (1 + (tokens - 1) / (k + 1))
    # Transformers verifies the first draft within the prefill.
    assert draft.their_tokens_per_forward == tokens / math.ceil(tokens / (k + 1))


def test_the_saved_draft_is_the_target_without_a_layer(tiny, tiny_folder, tmp_path):
    assert peers.save_draft(str(tiny_folder), tmp_path) == "draft model (1 of 2 layers)"
    draft = peers.Peer(str(tmp_path), device=tiny.model.device, dtype=torch.float32)
    layers = peers.Peer(str(tiny_folder), device=tiny.model.device, dtype=torch.float32).model.model.layers
    kept = draft.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(kept, layers[1].mlp.up_proj.weight)


def test_json_is_strict(comparisons, tiny):
    text = peers.to_json(comparisons, peers.environment(tiny))
    report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert report["environment"]["dtype"] == "float32"
    assert len(report["comparisons"]) == 4


def test_table_has_a_line_with_and_without_prefill_for_each_comparison(comparisons):
    assert peers.table(comparisons).row_count == 8


def test_too_few_tokens_to_leave_the_prefill_out_are_refused(tiny, other_folder):
    with pytest.raises(UsageError, match="first round"):
        measured(tiny, other_folder, tokens=4)


def test_output_beyond_the_context_is_refused(tiny, other_folder):
    with pytest.raises(UsageError, match="context"):
        measured(tiny, other_folder, tokens=250)


def test_plan_has_every_configuration_once_and_every_pair_early():
    cases = lossless.plan()
    assert len(set(cases)) == len(cases) == 4 * 3 * 3
    early = cases[:12]
    assert len({(c.drafter, c.k) for c in early}) == len({(c.drafter, c.batch) for c in early}) == 12
    assert len({(c.k, c.batch) for c in early}) == 9


def test_lossless_check_finds_no_difference(tiny):
    cases = lossless.plan((lossless.TRIMMED, "ngram", "early-exit:1", "layer-skip:0"))
    outcomes = lossless.check_all(tiny, requests_of(random_prompts(4), TOKENS), cases)
    assert [o.case for o in outcomes] == cases
    assert all(o.identical and o.requests == 4 for o in outcomes)


def test_lossless_check_reports_a_difference(tiny, monkeypatch):
    requests = requests_of(random_prompts(3), TOKENS)
    perturb(monkeypatch, tiny)
    said = []
    (outcome,) = lossless.check_all(tiny, requests, [lossless.Case("ngram", 2, 3)], said.append)
    assert not outcome.identical
    mismatch = outcome.mismatches[0]
    assert mismatch.position == 1  # the first token comes from the prefill
    assert mismatch.expected != mismatch.found
    assert mismatch.margin > 0
    assert "DIFFER" in said[1]
    assert "output position 1" in said[2]


def test_lossless_exit_code(tiny, tiny_folder, monkeypatch):
    requests = requests_of(random_prompts(2), TOKENS)
    monkeypatch.setattr(lossless, "requests_for", lambda *_: requests)
    monkeypatch.setattr(lossless, "load", lambda *_, **__: tiny)
    options = ("--drafter", "ngram", "--k", "2", "--batch", "1")
    good = lossless_command(tiny_folder, *options)
    assert good.exit_code == 0, good.output
    assert "1 of 1 configurations identical" in good.output
    perturb(monkeypatch, tiny)
    assert lossless_command(tiny_folder, *options).exit_code == 1
