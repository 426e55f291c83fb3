"""The acceptance kernels against the rules the decoder uses: same coins, same tokens."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import HAS_GPU, generator, on_every_device

from spectune.decoding.random import Stream
from spectune.decoding.rules import Verdict
from spectune.kernels.accept import accept, accept_reference
from spectune.kernels.coins import coins, coins_reference
from spectune.kernels.match import match_greedy, match_greedy_reference


def case(rows: int, k: int, vocab: int, *, seed: int = 0, dtype=torch.float32, spread: float = 2.0, drafted=True):
    """Random logits, a draft that resembles them, ragged counts (0 and K among them) and keys of coins."""
    g = generator(seed)
    logits = torch.randn(rows, k + 1, vocab, generator=g) * spread
    draft = logits[:, :k] + torch.randn(rows, k, vocab, generator=g) * spread / 2
    q = draft.softmax(-1)
    if k == 0:
        tokens = torch.empty(rows, 0, dtype=torch.long)
    elif drafted:
        tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(rows, k)
    else:
        tokens = logits[:, :k].argmax(-1)
    counts = torch.arange(rows).flip(0) % (k + 1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 5000, (rows,), generator=g)
    return logits.to(dtype), tokens, counts, q if drafted else None, seeds, positions


def placed(device: str, *tensors):
    return [None if t is None else t.to(device) for t in tensors]


def same(found: Verdict, expected: Verdict) -> None:
    assert found.accepted.tolist() == expected.accepted.tolist()
    assert found.token.tolist() == expected.token.tolist()


@on_every_device
@pytest.mark.parametrize("stream", [Stream.ACCEPT, Stream.TARGET])
def test_coins_are_the_decoders_bit_for_bit(device, stream):
    g = generator(1)
    keys = [torch.randint(-(2**63), 2**63 - 1, (1500,), generator=g).to(device) for _ in range(3)]
    small = [torch.arange(1500, device=device) % n for n in (7, 1500, 11)]
    for seeds, positions, indices in (keys, small):
        assert torch.equal(coins(seeds, stream, positions, indices), coins_reference(seeds, stream, positions, indices))


@on_every_device
@pytest.mark.parametrize("drafted", [True, False], ids=["sampled draft", "one-hot draft"])
@pytest.mark.parametrize(
    ("vocab", "k", "dtype", "temperature"),
    [
        (33, 0, torch.float32, 1.0),
        (33, 1, torch.bfloat16, 0.7),
        (128, 4, torch.float16, 1.3),
        (1000, 3, torch.bfloat16, 1.0),
        (5000, 7, torch.float32, 0.7),
    ],
)
def test_accept_decides_as_the_rule(device, vocab, k, dtype, temperature, drafted):
    logits, tokens, counts, q, seeds, positions = placed(device, *case(k + 2, k, vocab, dtype=dtype, drafted=drafted))
    found = accept(logits, tokens, counts, q, temperature, seeds, positions)
    same(found, accept_reference(logits, tokens, counts, q, temperature, seeds, positions))


@on_every_device
@pytest.mark.parametrize("vocab", [32000, 128256])
def test_accept_decides_as_the_rule_on_large_vocabularies(device, vocab):
    logits, tokens, counts, q, seeds, positions = placed(device, *case(2, 1, vocab, spread=3.0))
    found = accept(logits, tokens, counts, q, 1.0, seeds, positions)
    same(found, accept_reference(logits, tokens, counts, q, 1.0, seeds, positions))


@on_every_device
def test_accept_equals_the_rule_where_no_rounding_is_possible(device):
    """2^n equal probabilities and zeros: p, q, their residual and every sum are exact."""
    g = generator(3)
    rows, k, vocab = 12, 3, 5000
    logits = torch.full((rows, k + 1, vocab), -torch.inf)
    logits.scatter_(2, torch.rand(rows, k + 1, vocab, generator=g).topk(64).indices, 0.0)
    # Half of the draft's 32 tokens are the target's: some are rejected, and the residual spans the vocabulary.
    q = torch.zeros(rows, k, vocab)
    mine = logits[:, :k].topk(16).indices
    theirs = torch.rand(rows, k, vocab, generator=g).masked_fill(logits[:, :k] == 0, 0).topk(16).indices
    either = torch.cat([mine, theirs], -1)
    q.scatter_(2, either, 1 / 32)
    tokens = either.gather(2, torch.randint(0, 20, (rows, k, 1), generator=g)).squeeze(2)
    counts = torch.arange(rows) % (k + 1)
    seeds, positions = torch.arange(rows), torch.arange(rows) % 17
    arguments = placed(device, logits, tokens, counts, q), placed(device, seeds, positions)
    found = accept(*arguments[0], 1.0, *arguments[1])
    same(found, accept_reference(*arguments[0], 1.0, *arguments[1]))
    assert len(set(found.accepted.tolist())) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device: the interpreter takes 0.2 s a row")
def test_emitted_tokens_follow_the_target():
    """The first token of a round has the law p whatever was drafted: chi-square over 6 tokens."""
    device, rows, vocab = "cuda", 20_000, 6
    p = torch.tensor([0.30, 0.05, 0.20, 0.25, 0.05, 0.15])
    q = torch.tensor([0.05, 0.40, 0.10, 0.10, 0.30, 0.05]).expand(rows, 1, vocab)
    tokens = torch.multinomial(q[:, 0], 1, generator=generator(5))
    logits = p.log().expand(rows, 2, vocab)
    counts, seeds, positions = torch.ones(rows, dtype=torch.long), torch.arange(rows), torch.zeros(rows).long()
    logits, tokens, counts, q, seeds, positions = placed(device, logits, tokens, counts, q, seeds, positions)
    found = accept(logits, tokens, counts, q, 1.0, seeds, positions)
    emitted = torch.where(found.accepted > 0, tokens[:, 0], found.token).cpu()
    expected = p * rows
    statistic = ((emitted.bincount(minlength=vocab) - expected) ** 2 / expected).sum()
    assert statistic < 30.86  # the 1 - 1e-5 quantile with 5 degrees of freedom


@on_every_device
def test_strided_inputs_are_read_where_they_stand(device):
    logits, tokens, counts, q, seeds, positions = placed(device, *case(6, 3, 300))
    wide = torch.full((6, 8, 340), torch.nan, device=device)
    wide[:, ::2, 20:320] = logits
    wide_q = torch.full((6, 3, 512), torch.nan, device=device)
    wide_q[..., :300] = q
    wide_tokens = torch.stack([tokens, tokens + 1], -1)
    found = accept(wide[:, ::2, 20:320], wide_tokens[..., 0], counts, wide_q[..., :300], 1.0, seeds, positions)
    same(found, accept_reference(logits, tokens, counts, q, 1.0, seeds, positions))
    found = match_greedy(wide[:, ::2, 20:320], wide_tokens[..., 0], counts)
    same(found, match_greedy_reference(logits, tokens, counts))


@on_every_device
def test_padding_behind_the_counts_is_never_read(device):
    logits, tokens, counts, q, seeds, positions = placed(device, *case(4, 3, 200))
    expected = accept_reference(logits, tokens, counts, q, 1.0, seeds, positions)
    greedy = match_greedy_reference(logits, tokens, counts)
    place = torch.arange(4, device=device)
    logits[place > counts[:, None]] = torch.nan
    q[place[:3] >= counts[:, None]] = torch.nan
    tokens[place[:3] >= counts[:, None]] = 1 << 40
    same(accept(logits, tokens, counts, q, 1.0, seeds, positions), expected)
    same(match_greedy(logits, tokens, counts), greedy)


@on_every_device
def test_unsound_rows_are_marked_and_leave_their_neighbours_alone(device):
    logits, tokens, counts, q, seeds, positions = placed(device, *case(10, 3, 2500))
    counts[:] = 3
    whole = accept(logits, tokens, counts, q, 1.0, seeds, positions)
    logits[0, 0, 2321] = torch.nan
    logits[1, 2, 7] = torch.inf
    logits[2, 0] = -torch.inf
    tokens[3, 0] = 2500
    tokens[4, 1] = -1
    q[5, 0] = torch.nan
    logits[6:8, 3, 9] = torch.nan  # behind all drafted tokens, though one of them may be rejected before
    logits[8, 3, 9] = torch.inf
    found = accept(logits, tokens, counts, q, 1.0, seeds, positions)
    assert found.token[:9].tolist() == [-1] * 9
    assert found.accepted[:9].tolist() == [0] * 9
    same(Verdict(found.accepted[9:], found.token[9:]), Verdict(whole.accepted[9:], whole.token[9:]))
    greedy = match_greedy(logits, tokens, counts)
    unsound = {0, 1, 6, 7, 8}
    assert [token == -1 for token in greedy.token.tolist()] == [row in unsound for row in range(10)]


@on_every_device
def test_masked_stretches_of_the_vocabulary_leave_the_others_sound(device):
    """As a grammar masks: whole tiles without any token that is allowed."""
    logits, tokens, counts, q, seeds, positions = placed(device, *case(4, 2, 3500))
    logits[..., :1100] = logits[..., 2040:3080] = -torch.inf
    same(
        accept(logits, tokens, counts, q, 1.0, seeds, positions),
        accept_reference(logits, tokens, counts, q, 1.0, seeds, positions),
    )
    same(match_greedy(logits, tokens, counts), match_greedy_reference(logits, tokens, counts))


@on_every_device
def test_a_residual_without_mass_falls_back_to_p(device):
    """p equals q, yet the drafted token was rejected: only a q of 0 at it can do that."""
    logits = torch.full((12, 2, 64), -torch.inf)
    logits[..., 10:26] = 0.0
    q = logits[:, :1].softmax(-1)
    tokens, counts = torch.zeros(12, 1, dtype=torch.long), torch.ones(12, dtype=torch.long)
    arguments = placed(device, logits, tokens, counts, q), placed(device, torch.arange(12), torch.arange(12))
    found = accept(*arguments[0], 1.0, *arguments[1])
    same(found, accept_reference(*arguments[0], 1.0, *arguments[1]))
    assert found.accepted.tolist() == [0] * 12
    assert len(set(found.token.tolist())) > 4


@on_every_device
def test_a_draft_equal_to_the_target_is_always_kept(device):
    logits, tokens, counts, _, seeds, positions = placed(device, *case(8, 4, 512, drafted=False))
    q = logits[:, :4].softmax(-1)
    counts[:] = 4
    assert accept(logits, tokens, counts, q, 1.0, seeds, positions).accepted.tolist() == [4] * 8


@on_every_device
@pytest.mark.parametrize(
    ("vocab", "k", "dtype"),
    [(33, 0, torch.float32), (128, 4, torch.float16), (1000, 3, torch.bfloat16), (32000, 2, torch.float32)],
)
def test_greedy_matches_as_the_rule(device, vocab, k, dtype):
    logits, tokens, counts, *_ = placed(device, *case(9, k, vocab, dtype=dtype, drafted=False))
    tokens[::2, 1:2] += 1
    tokens %= vocab
    same(match_greedy(logits, tokens, counts), match_greedy_reference(logits, tokens, counts))


@on_every_device
def test_the_first_of_equal_logits_wins(device):
    logits = torch.zeros(1, 3, 9000, device=device)
    logits[0, 0, [3, 7, 8000]] = 1.0
    logits[0, 1, [4095, 4096, 8191]] = 1.0
    tokens, counts = torch.tensor([[3, 4096]], device=device), torch.tensor([2], device=device)
    same(match_greedy(logits, tokens, counts), Verdict(torch.tensor([1]), torch.tensor([4095])))
    tokens[0, 1] = 4095
    same(match_greedy(logits, tokens, counts), Verdict(torch.tensor([2]), torch.tensor([0])))


@on_every_device
def test_outputs_can_be_passed_in_and_an_empty_batch_is_nothing(device):
    logits, tokens, counts, q, seeds, positions = placed(device, *case(5, 2, 128))
    out = Verdict(torch.full_like(counts, 77), torch.full_like(counts, 77))
    found = accept(logits, tokens, counts, q, 1.0, seeds, positions, out)
    assert found.token is out.token
    same(out, accept_reference(logits, tokens, counts, q, 1.0, seeds, positions))
    match_greedy(logits, tokens, counts, out)
    same(out, match_greedy_reference(logits, tokens, counts))
    none = accept(logits[:0], tokens[:0], counts[:0], q[:0], 1.0, seeds[:0], positions[:0])
    assert none.token.shape == match_greedy(logits[:0], tokens[:0], counts[:0]).token.shape == (0,)


@on_every_device
def test_wrong_arguments_are_refused_with_the_reason(device):
    logits, tokens, counts, q, seeds, positions = placed(device, *case(4, 2, 64))
    wrong = [
        ((logits.double(), tokens, counts, q, 1.0, seeds, positions), "takes no torch.float64 logits"),
        ((logits.mT.contiguous().mT, tokens, counts, q, 1.0, seeds, positions), "vocabulary is contiguous"),
        ((logits, tokens[:, :1], counts, q, 1.0, seeds, positions), r"tokens must be \[4, 2\], not \[4, 1\]"),
        ((logits, tokens.int(), counts, q, 1.0, seeds, positions), "tokens must be int64, not torch.int32"),
        ((logits, tokens, counts[:3], q, 1.0, seeds, positions), r"counts must be \[4\], not \[3\]"),
        ((logits, tokens, counts, q.half(), 1.0, seeds, positions), "q must be float32, not torch.float16"),
        ((logits, tokens, counts, q[..., :60], 1.0, seeds, positions), r"q must be \[4, 2, 64\]"),
        ((logits, tokens, counts, q, 0.0, seeds, positions), "temperature 0.0 is greedy"),
    ]
    for arguments, message in wrong:
        with pytest.raises(AssertionError, match=message):
            accept(*arguments)
