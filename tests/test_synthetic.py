"""Synthetic acceptance: what it asks for, what the decoder then keeps, and how results say so."""

from __future__ import annotations

import json

import pytest
import synthetic_run
import torch
from decoding_helpers import check_accounting, drafter_of, random_prompts, requests_of, tokens_of
from pydantic import ValidationError

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.errors import UsageError
from spectune.recommending.exports.engines import exports
from spectune.recommending.exports.export import Wanted
from spectune.reporting.summary import recommendation_document, summarise
from spectune.speedup.profile import profile
from spectune.sweeping.cell import Sampling
from spectune.sweeping.opening import plan_differences
from spectune.sweeping.synthetic import expected_length, one_setting, synthetic_rates

RATES = (0.9, 0.6, 0.8, 0.3)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0])
def test_a_length_becomes_the_rate_that_has_it_at_the_largest_k(k, share):
    length = 1 + share * k
    rates = synthetic_rates(f"{length:.12g}", k)
    assert len(set(rates)) == 1
    assert len(rates) == k
    assert expected_length(rates) == pytest.approx(length, abs=1e-9)


def test_rates_come_as_a_list_or_from_a_file(tmp_path):
    files = {
        "a.json": json.dumps({"conditional": RATES}),
        "b.json": json.dumps({"joint": [0.9, 0.54, 0.432, 0.1296]}),  # as vLLM writes rates
        "c.csv": "position,rate\n" + "".join(f"{i},{rate}\n" for i, rate in enumerate(RATES, 1)),
        "d.csv": "".join(f"{i},{rate}\n" for i, rate in enumerate(RATES, 1)),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert synthetic_rates(str(tmp_path / name), 4) == pytest.approx(RATES)
    (tmp_path / "e.json").write_text('{"acceptance_length": 3.2}')
    assert synthetic_rates(str(tmp_path / "e.json"), 4) == synthetic_rates("3.2", 4)
    assert synthetic_rates("0.9,0.6,0.8,0.3", 3) == RATES[:3]
    assert synthetic_rates("0.5,", 1) == (0.5,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.7", "lies between 1 and 5"),
        ("5.1", "lies between 1 and 5"),
        ("nan", "lies between 1 and 5"),
        ("0.9,0.8", "gives 2 rates, and K 4 needs 4"),
        ("0.9,1.2,0.1,0.1", "between 0 and 1, not 1.2"),
        ("0.9,x,1,1", "'x' is not a number"),
        ("no-such-file.json", "No such file"),
    ],
)
def test_what_no_draft_can_have_is_wrong_use(text, message):
    with pytest.raises(UsageError, match=message):
        synthetic_rates(text, 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[0.5]"),
        ("a.json", '{"rates": [0.5]}'),
        ("a.json", '{"joint": [0.5, 0.6, 0.1, 0.1]}'),
        ("a.json", "{"),
        ("a.csv", "1,0.5\n3,0.5\n"),
        ("a.csv", "1;0.5\n"),
    ],
)
def test_a_file_of_another_form_is_wrong_use(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError):
        synthetic_rates(str(tmp_path / name), 4)


def force(tiny, draft: str, rates, *, k=4, batch=1, prompts=None, sampling=None, rule="speculative", new=24):
    settings = DecodeSettings(KSchedule.constant(k), rule, sampling or Sampling(), tuple(rates))
    decoder = Decoder(tiny.model, drafter_of(tiny, draft), settings, StopRule())
    run = decoder.decode(requests_of(prompts or random_prompts(4), new), batch)
    check_accounting(run, k)
    return run


def rounds_of(run):
    return [[(r.drafted, r.accepted) for r in g.rounds] for g in run.generations]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
def test_conditional_acceptance_is_what_was_asked_for(tiny, other_folder, sampling):
    run = force(tiny, other_folder, RATES, prompts=random_prompts(16), batch=16, sampling=sampling, new=100)
    full = [r for g in run.generations for r in g.rounds if r.drafted == 4]
    for i, rate in enumerate(RATES):
        reached = [r for r in full if r.accepted >= i]
        kept = sum(r.accepted > i for r in reached) / len(reached)
        assert kept == pytest.approx(rate, abs=4 * (rate * (1 - rate) / len(reached)) ** 0.5), i


@pytest.mark.parametrize("draft", ["other", "tree:other", "specinfer:other", "tree:eagle3:shape", "medusa:shape"])
def test_all_and_nothing(tiny, other_folder, draft):
    draft = draft.replace("other", str(other_folder))
    for rate, sampling in ((1.0, Sampling()), (0.0, Sampling(temperature=1.0))):
        run = force(tiny, draft, [rate] * 4, batch=3, sampling=sampling)
        for drafted, accepted in (r for rounds in rounds_of(run) for r in rounds):
            assert accepted == (drafted if rate else 0)


def test_nothing_accepted_leaves_the_targets_own_tokens(tiny, other_folder):
    """Each round then ends with what plain decoding chooses: the caches hold nothing that was not kept."""
    plain = Decoder(tiny.model, None, DecodeSettings(KSchedule.constant(4)), StopRule())
    expected = tokens_of(plain.decode(requests_of(random_prompts(4), 24), 2))
    assert tokens_of(force(tiny, other_folder, [0.0] * 4, batch=2)) == expected
    assert tokens_of(force(tiny, f"tree:{other_folder}", [0.0] * 4, batch=2)) == expected


def test_the_closing_token_is_the_targets_choice_behind_the_kept_ones(tiny, other_folder):
    """The text is the draft's where it was kept, and at every other place what the target says of the text before."""
    run = force(tiny, other_folder, RATES, batch=3)
    for prompt, g in zip(random_prompts(4), run.generations, strict=True):
        ids = torch.tensor([[*prompt, *g.tokens]])
        from spectune.decoding.cache import KVStore, Step

        with torch.inference_mode():
            logits = tiny.model.forward(ids, Step(0, (0,), ids.shape[1], ids.device), KVStore(1, ids.shape[1]))
        choices = logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        closing = [i for i, origin in enumerate(g.origins) if origin != "draft"]
        assert [g.tokens[i] for i in closing] == [choices[i] for i in closing]
        assert any(a != b for a, b in zip(g.tokens, choices, strict=True))  # drafts were kept that the target rejects


def test_counts_do_not_depend_on_batch_mates(tiny, other_folder):
    for draft in (str(other_folder), f"tree:{other_folder}"):
        alone = force(tiny, draft, RATES)
        together = force(tiny, draft, RATES, batch=4)
        assert rounds_of(alone) == rounds_of(together)
        assert tokens_of(alone) == tokens_of(together)


def test_a_cell_knows_its_rates_and_keys_of_other_cells_stay_what_they_were():
    plain, forced = synthetic_run.spec(), synthetic_run.spec(synthetic=RATES)
    assert plain.key != forced.key != synthetic_run.spec(synthetic=(0.9, 0.6, 0.8, 0.4)).key
    assert "synthetic" not in plain.model_dump()
    assert type(forced).model_validate_json(forced.model_dump_json()) == forced
    with pytest.raises(ValidationError, match="2 synthetic rates for K 4"):
        synthetic_run.spec(synthetic=(0.5, 0.5))


def test_one_run_has_one_synthetic_acceptance():
    assert one_setting([None, None])
    assert one_setting([RATES, RATES[:2]])
    assert not one_setting([RATES, None])
    assert not one_setting([RATES, (0.9, 0.5)])
    there = (synthetic_run.spec(synthetic=RATES),)
    assert plan_differences(there, (synthetic_run.spec(k=2, synthetic=RATES[:2]),)) == []
    assert "synthetic acceptance is" in plan_differences(there, (synthetic_run.spec(),))[0]


def test_every_output_says_that_acceptance_was_forced(tmp_path, capsys):
    from spectune.reporting.page import render
    from spectune.reporting.terminal import print_fit, print_recommendation

    cell = synthetic_run.cell(speedup=1.8, synthetic=RATES, identical=None)
    summary = summarise(synthetic_run.write_run(tmp_path / "run", [cell]))
    print_recommendation(summary)
    print_fit(summary)
    text = capsys.readouterr().out
    assert text.count("SYNTHETIC ACCEPTANCE: forced") == 2
    assert "draft, K 4, synthetic acceptance  [FASTER]" in text
    assert "Synthetic acceptance length" in text
    assert "there is nothing to audit" in text
    page = render(summary)
    assert "SYNTHETIC ACCEPTANCE: forced" in page
    assert "Synthetic acceptance by position" in page
    document = recommendation_document(summary)
    assert document["caveats"]
    assert document["overall"]["choice"]["synthetic"] == RATES
    assert document["losslessness"]["choice"]["verdict"] == "lossy"
    assert summary.rows[0]["synthetic"] is True
    assert all("synthetic acceptance" in note for e in summary.exports if e.text for note in e.notes[-1:])
    assert exports(Wanted(profile(synthetic_run.cell()).config, "target"))[0].notes == ()


def test_verify_refuses_it(tiny_folder):
    from spectune.sweeping.options import SweepOptions
    from spectune.verifying.audit import audit

    with pytest.raises(UsageError, match="nothing to verify"):
        audit(SweepOptions(target=str(tiny_folder), synthetic_acceptance="2"))
