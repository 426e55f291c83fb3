"""Greedy and seeded outputs are compared with plain decoding: rounding is excused, a mistake never."""

from __future__ import annotations

import pytest
import torch
from conftest import save_tiny
from decoding_helpers import drafter_of, random_prompts, requests_of
from verify_helpers import prompts_of, put_drafter, save_near, spec_of, tiny_engine

from spectune.decoding import rules, verification
from spectune.decoding.generation import Generation
from spectune.decoding.model_drafter import ModelDrafter
from spectune.sweeping.cell import Sampling
from spectune.verifying.conclude import conclude, describe
from spectune.verifying.decode import decode_plainly, decode_speculatively
from spectune.verifying.identity import check_identity, partings_of

GREEDY = Sampling()


@pytest.fixture(scope="module")
def engine(tiny_folder):
    return tiny_engine(tiny_folder)


@pytest.fixture(scope="module")
def near(tmp_path_factory, tiny_folder):
    return str(save_near(tmp_path_factory.mktemp("near"), tiny_folder))


def check(engine, drafter, *, requests=None, **changes):
    """Audit token by token, greedy unless a sampling is given."""
    spec = spec_of(engine, drafter, **({"sampling": GREEDY, "rule": "greedy", "batch": 3} | changes))
    requests = requests or prompts_of(6)
    rule = "greedy" if spec.sampling.greedy else "match"
    plain = decode_plainly(engine, spec, requests, lambda count: None)
    run, _ = decode_speculatively(engine, spec, requests, lambda count: None, rule=rule)
    found = check_identity(engine, spec, requests, plain, run)
    return spec, found


def verdict(spec, found) -> str:
    return conclude(spec, found, None)[0]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("drafter", ["near", "ngram", "early-exit:1", "layer-skip:1"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(repetition_penalty=1.3), Sampling(temperature=0.8, top_k=40, top_p=0.9)]
)
def test_float32_is_identical(engine, near, drafter, batch, sampling):
    drafter = near if drafter == "near" else drafter
    rule = "greedy" if sampling.greedy else "match"
    spec, found = check(engine, drafter, batch=batch, sampling=sampling, rule=rule)
    assert verdict(spec, found) == "identical"
    assert found.identical == found.requests == 6
    assert found.tokens == 6 * 24
    assert found.drafted > 0


def test_stop_tokens_and_limits_of_a_prompt_are_kept(engine, near):
    requests = requests_of(random_prompts(40), 60)
    spec, found = check(engine, near, requests=requests, ignore_eos=False, max_new_tokens=60, batch=8)
    assert verdict(spec, found) == "identical"
    assert found.tokens < 40 * 60  # some met a stop token


def test_in_bfloat16_200_prompts_drafted_by_the_target_itself_part_by_ties_only(tiny_folder):
    """Case 10 (ii)."""
    engine = tiny_engine(tiny_folder, "bfloat16")
    requests = requests_of(random_prompts(200), 24)
    spec, found = check(engine, str(tiny_folder), requests=requests, batch=8)
    assert verdict(spec, found) in ("identical", "numeric ties"), [describe(p) for p in found.failures]


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """A model whose best logits are often close."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "initializer_range": 0.05}
    return save_tiny(tmp_path_factory.mktemp("flat"), **sizes)


def test_a_tie_names_its_place_both_tokens_the_margin_and_the_rounding(flat):
    engine = tiny_engine(flat, "bfloat16")
    requests = requests_of(random_prompts(100), 24)
    spec, found = check(engine, "ngram", requests=requests, batch=8)
    assert verdict(spec, found) == "numeric ties", [describe(p) for p in found.failures]
    for parting in found.partings:
        assert None not in (parting.expected, parting.found)
        assert parting.expected != parting.found
        assert parting.margin is not None
        assert parting.gap <= max(4 * parting.noise, 2 * 2.0**-6)  # two units in the last place of 2
        assert f"output position {parting.position}: token {parting.found}" in describe(parting)
    # In float32 the same model parts nowhere.
    spec, found = check(tiny_engine(flat), "ngram", requests=requests, batch=8)
    assert verdict(spec, found) == "identical"


def test_in_bfloat16_seeded_sampling_parts_by_ties_only(tiny_folder):
    engine = tiny_engine(tiny_folder, "bfloat16")
    requests = requests_of(random_prompts(60), 24)
    spec, found = check(
        engine, "early-exit:1", requests=requests, sampling=Sampling(temperature=1.0), rule="match", batch=4
    )
    assert verdict(spec, found) in ("identical", "numeric ties"), [describe(p) for p in found.failures]


def save_tied(folder, first: int, second: int):
    """A model whose logits of two ids are always equal, and often the best."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny(folder))
    with torch.no_grad():
        model.lm_head.weight[first] *= 6
        model.lm_head.weight[second] = model.lm_head.weight[first]
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exact_tie_of_ids_3_and_7_is_id_3_in_every_path(tmp_path, dtype):
    """Case 10 (i)."""
    folder = save_tied(tmp_path / "tied", 3, 7)
    engine = tiny_engine(folder, dtype)
    requests = requests_of(random_prompts(6), 24)
    for drafter in (str(folder), "ngram", "early-exit:1", "tree:ngram"):
        for batch in (1, 4):
            spec = spec_of(engine, drafter, sampling=GREEDY, rule="greedy", batch=batch)
            plain = decode_plainly(engine, spec, requests, lambda count: None)
            run, _ = decode_speculatively(engine, spec, requests, lambda count: None)
            for generations in (plain.generations, run.generations):
                tokens = [t for g in generations for t in g.tokens]
                assert 7 not in tokens
                assert tokens.count(3) > 30
            assert not check_identity(engine, spec, requests, plain, run).failures


def accepts_one_more(tokens, counts, choices):
    good = rules.Verdict(*_match(tokens, counts, choices))
    accepted = torch.minimum(good.accepted + 1, counts)
    return rules.Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def takes_the_second_place(tokens, counts, choices):
    good = rules.Verdict(*_match(tokens, counts, choices))
    return rules.Verdict(good.accepted, choices[:, 0])


_match = rules.match


@pytest.mark.parametrize("broken", [accepts_one_more, takes_the_second_place])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_broken_acceptance_fails_and_is_no_tie(tiny_folder, near, monkeypatch, broken, dtype, temperature):
    engine = tiny_engine(tiny_folder, dtype)
    monkeypatch.setattr(rules, "match", broken)
    rule = "match" if temperature else "greedy"
    spec, found = check(engine, near, sampling=Sampling(temperature=temperature), rule=rule)
    told, reason = conclude(spec, found, None)
    assert told == "FAIL"
    assert "outputs are wrong" in reason
    assert len({p.id for p in found.failures}) >= found.requests // 2


def test_a_cache_with_a_hole_fails(engine, near, monkeypatch):
    """After a rejection the verification writes one slot too low."""
    step = verification.Step

    def shifted(first_row, starts, query, device, tail=None):
        if query > 1 and all(s > 4 for s in starts):
            starts = tuple(s - 1 for s in starts)
        return step(first_row, starts, query, device, tail)

    monkeypatch.setattr(verification, "Step", shifted)
    spec, found = check(engine, near)
    assert verdict(spec, found) == "FAIL"


def generation(tokens) -> Generation:
    made = Generation("0", 5)
    made.tokens = list(tokens)
    return made


def test_an_error_behind_a_numeric_tie_is_found(tmp_path):
    folder = save_tied(tmp_path / "tied", 3, 7)
    engine = tiny_engine(folder)
    (request,) = requests_of(random_prompts(1), 12)
    spec = spec_of(engine, "ngram", sampling=GREEDY, rule="greedy", batch=1)
    plain = decode_plainly(engine, spec, [request], lambda count: None).generations[0].tokens
    place = plain.index(3)
    # The other half of the tie, and from there what the target itself says.
    start = (*request.token_ids, *plain[:place], 7)
    rest = (
        decode_plainly(engine, spec, [type(request)("r", start, 12 - place - 1, request.seed)], lambda count: None)
        .generations[0]
        .tokens
    )
    tied = [*plain[:place], 7, *rest]
    found = partings_of(engine, spec, request, generation(plain), generation(tied))
    assert [(p.position, p.expected, p.found, p.is_tie) for p in found] == [(place, 3, 7, True)]
    assert found[0].margin == pytest.approx(0.0, abs=1e-4)
    wrong = list(tied)
    wrong[-1] = (wrong[-1] + 1) % 128
    found = partings_of(engine, spec, request, generation(plain), generation(wrong))
    assert [p.is_tie for p in found] == [True, False]
    assert found[-1].position == 11
    assert found[-1].gap > found[-1].noise


@pytest.mark.parametrize("cut", [1, 5])
def test_an_output_that_ends_early_or_late_fails(engine, cut):
    (request,) = requests_of(random_prompts(1), 12)
    spec = spec_of(engine, "ngram", sampling=GREEDY, rule="greedy", batch=1)
    plain = decode_plainly(engine, spec, [request], lambda count: None).generations[0].tokens
    for first, second in ((plain, plain[:-cut]), (plain[:-cut], plain)):
        found = partings_of(engine, spec, request, generation(first), generation(second))
        assert not found[-1].is_tie
        assert "(end)" in describe(found[-1])


def test_an_output_that_ends_early_behind_a_tie_fails(tmp_path):
    folder = save_tied(tmp_path / "tied", 3, 7)
    engine = tiny_engine(folder)
    (request,) = requests_of(random_prompts(1), 12)
    spec = spec_of(engine, "ngram", sampling=GREEDY, rule="greedy", batch=1)
    plain = decode_plainly(engine, spec, [request], lambda count: None).generations[0].tokens
    place = plain.index(3)
    found = partings_of(engine, spec, request, generation(plain), generation([*plain[:place], 7]))
    assert [p.is_tie for p in found] == [True, False]
    assert "ends at the wrong place" in describe(found[-1])


class Late(ModelDrafter):
    """Drafts nothing at all."""

    def propose(self, round_):
        return None


def test_without_any_draft_there_is_nothing_to_judge(engine, near):
    model = drafter_of(engine.loaded, near).model
    name = put_drafter(engine, "late", Late(model, shared_vocab=128, target_vocab=128))
    spec, found = check(engine, name)
    told, reason = conclude(spec, found, None)
    assert told == "cannot judge"
    assert "nothing was drafted" in reason
