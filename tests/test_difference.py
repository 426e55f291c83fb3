"""Differing outputs are judged: rounding may excuse a near-tie, never a mistake."""

from __future__ import annotations

import pytest
import torch
from conftest import load_tiny
from decoding_helpers import decode, drafter_of, random_prompts

from spectune.decoding.stopping import StopRule
from spectune.engines.difference import find_difference, first_difference
from spectune.engines.engine import Request
from spectune.sweeping.cell import Sampling


def request_of(prompt: list[int]) -> Request:
    return Request("r", tuple(prompt), 24, 0)


def test_the_first_differing_token_is_found():
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_token_is_no_tie(tiny_folder, dtype):
    loaded = load_tiny(tiny_folder, dtype)
    prompt = random_prompts(1)[0]
    plain = decode(loaded, None, [prompt], k=0, stop=StopRule()).generations[0].tokens
    for place in (0, 7, 23):
        wrong = list(plain)
        wrong[place] = (wrong[place] + 1) % 128
        found = find_difference(loaded.model, request_of(prompt), plain, wrong, width=5)
        assert found.position == place
        assert not found.is_tie


def test_an_output_that_ends_early_is_no_tie(tiny):
    prompt = random_prompts(1)[0]
    plain = decode(tiny, None, [prompt], k=0, stop=StopRule()).generations[0].tokens
    assert not find_difference(tiny.model, request_of(prompt), plain, plain[:10], width=5).is_tie


def test_an_exact_tie_is_one(tiny_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        model.lm_head.weight[:] = model.lm_head.weight[:1]
    model.save_pretrained(tmp_path)
    loaded = load_tiny(tmp_path)
    found = find_difference(loaded.model, request_of([5, 6, 7]), [9, 9], [9, 11], width=3)
    assert found.is_tie
    assert found.gap == pytest.approx(0.0, abs=1e-5)


def test_bfloat16_runs_differ_by_ties_only(tiny_folder, other_folder):
    """200 prompts, drafted by the model itself: whatever differs from plain decoding must be a numeric tie."""
    loaded = load_tiny(tiny_folder, torch.bfloat16)
    prompts = random_prompts(200)
    plain = decode(loaded, None, prompts, k=0, batch=8, stop=StopRule())
    for folder in (tiny_folder, other_folder):
        run = decode(loaded, drafter_of(loaded, folder), prompts, k=4, batch=8, stop=StopRule())
        differing = [
            find_difference(loaded.model, request_of(prompt), a.tokens, b.tokens, width=5)
            for prompt, a, b in zip(prompts, plain.generations, run.generations, strict=True)
            if a.tokens != b.tokens
        ]
        assert all(d.is_tie for d in differing), [d for d in differing if not d.is_tie]


@pytest.mark.parametrize(
    ("rule", "sampling", "count"),
    [
        ("greedy", Sampling(repetition_penalty=1.1), 240),  # without AVX-512 few of them differ
        ("match", Sampling(temperature=1.0), 60),
        ("match", Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2), 60),
    ],
)
def test_penalties_and_sampled_choices_in_bfloat16_differ_by_ties_only(tiny_folder, rule, sampling, count):
    loaded = load_tiny(tiny_folder, torch.bfloat16)
    prompts = random_prompts(count)
    plain = decode(loaded, None, prompts, k=0, batch=4, sampling=sampling, rule=rule, stop=StopRule())
    drafter = drafter_of(loaded, "early-exit:1")
    run = decode(loaded, drafter, prompts, k=4, batch=4, sampling=sampling, rule=rule, stop=StopRule())
    differing = 0
    for i, (prompt, a, b) in enumerate(zip(prompts, plain.generations, run.generations, strict=True)):
        if a.tokens != b.tokens:
            request = Request(str(i), tuple(prompt), 24, i)
            found = find_difference(loaded.model, request, a.tokens, b.tokens, width=5, batch=4, sampling=sampling)
            differing += 1
            assert found.is_tie, found
    assert differing  # else nothing was judged


def test_a_wrong_sampled_token_is_no_tie(tiny):
    prompt, sampling = random_prompts(1)[0], Sampling(temperature=1.0)
    plain = decode(tiny, None, [prompt], k=0, sampling=sampling, rule="match", stop=StopRule()).generations[0].tokens
    wrong = [*plain[:9], (plain[9] + 40) % 128, *plain[10:]]
    found = find_difference(tiny.model, request_of(prompt), plain, wrong, width=5, sampling=sampling)
    assert not found.is_tie
