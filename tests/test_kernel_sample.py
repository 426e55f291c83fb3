"""The sampling kernel against the decoder's own distribution and draw: same coins, same tokens."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import generator, on_every_device

from spectune.decoding.random import Stream, uniform
from spectune.decoding.sampling import probabilities
from spectune.kernels.sample import sample, sample_reference
from spectune.sweeping.cell import Sampling

PLAIN = Sampling(temperature=0.8)
SETTINGS = [
    PLAIN,
    Sampling(temperature=1.0, top_k=20),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=1.5, top_k=50, top_p=0.8, min_p=0.02),
]


def case(rows: int, vocab: int, dtype=torch.float32, device="cpu", spread: float = 2.0):
    g = generator(vocab)
    logits = (torch.randn(rows, vocab, generator=g) * spread).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    return logits.to(device), seeds.to(device), torch.arange(rows, device=device) * 7


def check(logits, sampling, seeds, positions) -> None:
    expected = sample_reference(logits, sampling, seeds, positions)
    assert sample(logits, sampling, seeds, positions).tolist() == expected.tolist()


@on_every_device
@pytest.mark.parametrize("sampling", SETTINGS, ids=["temperature", "top-k", "top-p", "min-p", "all"])
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(33, torch.float32), (128, torch.float16), (1000, torch.bfloat16), (5000, torch.float32)]
)
def test_sample_draws_as_the_decoder(device, vocab, dtype, sampling):
    logits, seeds, positions = case(2, vocab, dtype, device)
    check(logits, sampling, seeds, positions)


@on_every_device
@pytest.mark.parametrize(("vocab", "sampling"), [(9000, SETTINGS[4]), (32000, SETTINGS[3]), (128256, PLAIN)])
def test_sample_draws_as_the_decoder_from_large_vocabularies(device, vocab, sampling):
    logits, seeds, positions = case(1, vocab, torch.float32, device, spread=3.0)
    check(logits, sampling, seeds, positions)


def drawn_by_spread_coins(logits, sampling, device) -> set[int]:
    """The tokens that coins near 1/16, 3/16 … 15/16 draw."""
    zero = torch.zeros(2000, dtype=torch.long)
    u = uniform(torch.arange(2000), Stream.TARGET, zero, zero)
    seeds = (u[:, None] - (torch.arange(8) + 0.5) / 8).abs().argmin(0).to(device)
    drawn = sample(logits.to(device).expand(8, -1), sampling, seeds, torch.zeros_like(seeds))
    assert drawn.tolist() == sample_reference(logits.to(device).expand(8, -1), sampling, seeds, 0 * seeds).tolist()
    return set(drawn.tolist())


@on_every_device
@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_k=3), {5, 40, 41, 42, 43}),  # four equal ones at the border all stay
        (Sampling(temperature=1.0, top_k=1), {5}),
        (Sampling(temperature=1.0, top_p=0.7), {5, 42, 43}),  # 1/2, then 1/8 each: the lowest ids are cut
        (Sampling(temperature=1.0, top_p=0.45), {5}),
        (Sampling(temperature=1.0, top_p=1e-6), {5}),
        (Sampling(temperature=1.0, min_p=0.24), {5, 40, 41, 42, 43}),
        (Sampling(temperature=1.0, min_p=0.26), {5}),
    ],
)
def test_borders_with_equal_logits_are_cut_as_by_the_decoder(device, sampling, kept):
    """Weights 4, 1, 1, 1, 1 and nothing else; the borders lie far enough from every sum."""
    logits = torch.zeros(64)
    logits[5] = 4.0
    logits[40:44] = 1.0
    logits = logits.log()
    assert set(probabilities(logits, sampling).nonzero().flatten().tolist()) == kept
    assert drawn_by_spread_coins(logits, sampling, device) == kept


@on_every_device
def test_equal_logits_are_cut_by_their_ids_over_all_tiles(device):
    logits = torch.full((3500,), -torch.inf)
    logits[[2, 900, 1030, 2100, 3400]] = torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0]).log()
    assert drawn_by_spread_coins(logits, Sampling(temperature=1.0, top_p=0.7), device) == {2, 2100, 3400}


@on_every_device
@pytest.mark.parametrize("sampling", SETTINGS, ids=["temperature", "top-k", "top-p", "min-p", "all"])
def test_masked_stretches_of_the_vocabulary_are_never_drawn(device, sampling):
    """As a grammar masks: whole tiles without any token that is allowed."""
    logits, seeds, positions = case(2, 3500, torch.float32, device)
    logits[:, :1100] = logits[:, 2040:3080] = -torch.inf
    check(logits, sampling, seeds, positions)


@on_every_device
def test_zeros_of_both_signs_are_equal(device):
    logits = torch.full((40,), -5.0)
    logits[3], logits[9], logits[20] = 0.0, -0.0, 0.0
    assert drawn_by_spread_coins(logits, Sampling(temperature=1.0, top_k=2), device) == {3, 9, 20}


@on_every_device
def test_strided_logits_are_read_where_they_stand(device):
    logits, seeds, positions = case(3, 200, torch.float32, device)
    wide = torch.full((3, 2, 256), torch.nan, device=device)
    wide[:, 1, 30:230] = logits
    found = sample(wide[:, 1, 30:230], PLAIN, seeds, positions)
    assert found.tolist() == sample_reference(logits, PLAIN, seeds, positions).tolist()


@on_every_device
@pytest.mark.parametrize("sampling", [SETTINGS[0], SETTINGS[4]], ids=["temperature", "all"])
def test_unsound_rows_are_marked_and_leave_their_neighbours_alone(device, sampling):
    logits, seeds, positions = case(4, 2500, torch.float32, device)
    logits[0, 2100] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    out = torch.full_like(seeds, 77)
    assert sample(logits, sampling, seeds, positions, out) is out
    assert out[:3].tolist() == [-1, -1, -1]
    assert out[3:].tolist() == sample_reference(logits[3:], sampling, seeds[3:], positions[3:]).tolist()


@on_every_device
def test_wrong_arguments_are_refused_with_the_reason(device):
    logits, seeds, positions = case(3, 64, torch.float32, device)
    wrong = [
        ((logits.double(), PLAIN, seeds, positions), "takes no torch.float64 logits"),
        ((logits.mT.contiguous().mT, PLAIN, seeds, positions), "vocabulary is contiguous"),
        ((logits, Sampling(), seeds, positions), "temperature 0.0 is greedy"),
        ((logits, PLAIN, seeds.int(), positions), "seeds must be int64"),
        ((logits, PLAIN, seeds, positions[:2]), r"positions must be \[3\], not \[2\]"),
    ]
    for arguments, message in wrong:
        with pytest.raises(AssertionError, match=message):
            sample(*arguments)
    assert sample(logits[:0], PLAIN, seeds[:0], positions[:0]).shape == (0,)
