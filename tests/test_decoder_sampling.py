"""Sampled decoding: seeds, batch independence, token identity of sample-then-match, and the law of real runs."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import decode, drafter_of, random_prompts, requests_of, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.random import Stream, pick, uniform
from spectune.decoding.sampling import probabilities
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.sweeping.cell import Sampling

SAMPLINGS = {
    "temperature": Sampling(temperature=0.8),
    "top-k": Sampling(temperature=1.0, top_k=5),
    "top-p": Sampling(temperature=1.2, top_p=0.8),
    "min-p": Sampling(temperature=1.0, min_p=0.1),
    "penalty": Sampling(temperature=0.9, repetition_penalty=1.2),
    "all": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.1),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("drafter", ["self", "other", "ngram", "early-exit:1", "layer-skip:0"])
def test_sample_then_match_is_token_identical_to_plain_sampling(tiny, tiny_folder, other_folder, drafter, sampling):
    prompts = random_prompts(5)
    plain = tokens_of(decode(tiny, None, prompts, k=0, batch=2, sampling=sampling))
    name = {"self": tiny_folder, "other": other_folder}.get(drafter, drafter)
    for k, batch in ((1, 1), (4, 3), (8, 5)):
        run = decode(tiny, drafter_of(tiny, name), prompts, k=k, batch=batch, rule="match", sampling=sampling)
        assert tokens_of(run) == plain


def test_the_seed_decides_and_nothing_else_does(tiny, tiny_folder, other_folder):
    prompts = random_prompts(10)
    sampling = Sampling(temperature=0.8)
    differs = 0
    for rule in ("speculative", "block", "match"):
        for folder in (tiny_folder, other_folder):
            drafter = drafter_of(tiny, folder)
            decoder = Decoder(tiny.model, drafter, DecodeSettings(KSchedule.constant(4), rule, sampling), StopRule())

            def run(requests: list[Request], batch: int, decoder=decoder) -> dict[str, list[int]]:
                return {g.id: g.tokens for g in decoder.decode(requests, batch).generations}

            requests = requests_of(prompts, 24, seed=17)
            alone = {r.id: run([r], 1)[r.id] for r in requests}
            assert run(requests, 8) == alone
            assert run(requests[::-1], 3) == alone
            reseeded = run(requests_of(prompts, 24, seed=1007), 8)
            differs += sum(reseeded[i] != alone[i] for i in alone)
    assert differs >= 50


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_draft_equal_to_target_accepts_everything_when_sampling(tiny, tiny_folder, rule):
    run = decode(
        tiny, drafter_of(tiny, tiny_folder), random_prompts(3), k=4, batch=3, max_new_tokens=64, rule=rule,
        sampling=Sampling(temperature=1.0), stop=StopRule(),
    )  # fmt: skip
    rounds = [r for g in run.generations for r in g.rounds]
    # p and q are the same up to float32 rounding, so a coin may fall between them once in a million.
    assert sum(r.accepted for r in rounds) == sum(r.drafted for r in rounds)


@pytest.mark.parametrize(("rule", "draws", "bound"), [("speculative", 20_000, 0.02), ("block", 5_000, 0.04)])
def test_real_runs_draw_from_the_targets_law(tmp_path, rule, draws, bound):
    """Continuations by a model of 8 tokens: total variation below the bound at each position.

    The expected distance of 20,000 true draws over 8 outcomes is about 0.008, of 5,000 about 0.016; either bound is
    beyond 1e-6.
    """
    settings = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    target = load_tiny(save_tiny(tmp_path / "t", seed=3, **settings))
    draft = drafter_of(target, save_tiny(tmp_path / "d", seed=4, **settings))
    prompt = [3, 5]
    decoder = Decoder(
        target.model,
        draft,
        DecodeSettings(KSchedule.constant(2), rule, Sampling(temperature=1.0)),
        StopRule(),
    )
    run = decoder.decode([Request(str(i), tuple(prompt), 3, i) for i in range(draws)], 2048)
    tokens = torch.tensor([g.tokens for g in run.generations])
    expected = joint(target, prompt, 3)
    for place in range(3):
        law = expected.sum(dim=[d for d in range(3) if d != place])
        seen = torch.bincount(tokens[:, place], minlength=8) / draws
        assert 0.5 * (seen - law).abs().sum() < bound
    assert sum(r.accepted for g in run.generations for r in g.rounds) > 0


def joint(loaded, prompt: list[int], length: int) -> torch.Tensor:
    """[8, 8, 8] exact law of the next tokens, from full forwards without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(loaded.model.model.name_or_path)
    outcomes = list(itertools.product(range(8), repeat=length))
    ids = torch.tensor([prompt + list(o) for o in outcomes])
    with torch.inference_mode():
        log_p = model(ids).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
    chosen = log_p.gather(-1, torch.tensor(outcomes)[..., None]).squeeze(-1).sum(1).exp()
    return chosen.reshape(8, 8, 8)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_probabilities_equal_those_of_transformers_processors(sampling):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(40, 97, generator=torch.Generator().manual_seed(1)) * 3
    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    expected = chain(torch.zeros(40, 1, dtype=torch.long), logits.clone()).softmax(-1)
    torch.testing.assert_close(probabilities(logits, sampling), expected)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda w: sum(w) > 1e-9),
    st.floats(1e-12, 1 - 1e-12),
)
def test_a_token_of_zero_weight_is_never_picked(weights, u):
    index = int(pick(torch.tensor([weights], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)))
    assert weights[index] > 0


def test_coins_are_uniform_and_independent_over_seeds_positions_and_streams():
    n = 40_000
    arange = torch.arange(n)
    zero = torch.zeros_like(arange)
    by_seed = uniform(arange, Stream.TARGET, zero + 5, zero)
    by_position = uniform(zero + 3, Stream.TARGET, arange, zero)
    by_stream = uniform(arange, Stream.ACCEPT, zero + 5, zero)
    for u in (by_seed, by_position, by_stream):
        assert 0 < u.min() < u.max() < 1
        counts = torch.histc(u.float(), bins=20, min=0, max=1)
        # chi-square with 19 degrees of freedom: 60 is beyond 1e-5
        assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 60
    pairs = torch.stack([by_seed, by_stream, by_position, by_seed.roll(1)])
    correlation = torch.corrcoef(pairs) - torch.eye(4)
    assert correlation.abs().max() < 0.03


def test_coins_of_a_row_do_not_depend_on_the_shape_they_are_computed_in():
    seeds, places = torch.tensor([5, 9]), torch.arange(3)
    grid = uniform(seeds[:, None], Stream.ACCEPT, torch.tensor([[4], [7]]), places[None])
    single = uniform(torch.tensor(9), Stream.ACCEPT, torch.tensor(7), torch.tensor(2))
    assert grid[1, 2] == single
