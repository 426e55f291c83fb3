"""Medusa, blockwise, MLP and exit heads: what they compute, against the formulas written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from spectune.errors import UsageError
from spectune.heads.blockwise import BlockwiseConfig, BlockwiseHeads
from spectune.heads.exit import ExitConfig, ExitHead
from spectune.heads.medusa import MedusaConfig, MedusaHeads
from spectune.heads.mlp import MlpConfig, MlpSpeculator

H, V = 12, 40
DRAFT_IDS = torch.tensor([1, 4, 5, 9, 17, 30, 39])


@pytest.fixture
def head_weight() -> torch.Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, H, generator=torch.Generator().manual_seed(4))


def scramble(module: torch.nn.Module, scale: float = 0.3) -> None:
    """Random weights in place of the starting ones."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize("own", [False, True])
def test_untrained_medusa_heads_predict_what_the_targets_head_does(head_weight, x, own, draft_ids):
    heads = MedusaHeads(MedusaConfig(H, V, heads=3, layers=2, own_heads=own), draft_ids)
    heads.start_from(head_weight)
    rows = head_weight if draft_ids is None else head_weight[draft_ids]
    expected = (x @ rows.T)[:, :, None].expand(-1, -1, 3, -1)
    torch.testing.assert_close(heads(x), expected)


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_untrained_blockwise_heads_predict_what_the_targets_head_does(head_weight, x, draft_ids):
    heads = BlockwiseHeads(BlockwiseConfig(H, V, inner_size=20, heads=3), draft_ids)
    heads.bind(head_weight, head_weight)
    rows = head_weight if draft_ids is None else head_weight[draft_ids]
    torch.testing.assert_close(heads(x), (x @ rows.T)[:, :, None].expand(-1, -1, 3, -1))


def test_an_untrained_exit_is_the_targets_norm_and_head(head_weight, x):
    head = ExitHead(ExitConfig(layer=3, hidden_size=H, vocab_size=V, rank=4, eps=1e-5), DRAFT_IDS)
    head.bind(head_weight, head_weight)
    norm = torch.nn.RMSNorm(H, eps=1e-5)
    scramble(norm)
    head.norm.load_state_dict(norm.state_dict())
    torch.testing.assert_close(head(x), norm(x) @ head_weight[DRAFT_IDS].T)


@pytest.mark.parametrize("own", [False, True])
def test_medusa_is_residual_blocks_and_an_output_head(head_weight, x, own):
    heads = MedusaHeads(MedusaConfig(H, V, heads=2, layers=3, own_heads=own))
    heads.start_from(head_weight)
    scramble(heads)
    state = heads.state_dict()
    for i in range(2):
        y = x
        for j in range(3):
            z = y @ state[f"blocks.{i}.layers.{j}.weight"].T + state[f"blocks.{i}.layers.{j}.bias"]
            y = y + z * torch.sigmoid(z)
        output = state[f"lm_heads.{i}.weight"] if own else head_weight
        torch.testing.assert_close(heads(x)[:, :, i], y @ output.T)


def test_blockwise_heads_add_their_own_slice_of_the_networks_output(head_weight, x):
    heads = BlockwiseHeads(BlockwiseConfig(H, V, inner_size=20, heads=3))
    heads.bind(head_weight, head_weight)
    scramble(heads)
    inner = x @ heads.inner.weight.T + heads.inner.bias
    changes = (inner * torch.sigmoid(inner)) @ heads.outer.weight.T + heads.outer.bias
    for i in range(3):
        expected = (x + changes[..., i * H : (i + 1) * H]) @ head_weight.T
        torch.testing.assert_close(heads(x)[:, :, i], expected)


def test_the_exits_change_is_low_rank(head_weight, x):
    head = ExitHead(ExitConfig(layer=3, hidden_size=H, vocab_size=V, rank=4))
    head.bind(head_weight, head_weight)
    scramble(head)
    y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * head.norm.weight
    torch.testing.assert_close(head(x), (y + y @ head.down.weight.T @ head.up.weight.T) @ head_weight.T)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
def test_the_mlp_speculator_follows_its_recurrence(x, tie, scale_input):
    inner, steps = 8, 3
    module = MlpSpeculator(MlpConfig(H, inner, V, steps, tie_weights=tie, scale_input=scale_input))
    scramble(module)
    weights = module.state_dict()
    state_weight = 0.5 ** (0.5 / steps)
    token_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    tokens = torch.randint(0, V, (steps, *x.shape[:-1]), generator=torch.Generator().manual_seed(1))

    def normal(y):
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    state, expected = module.start(x), normal(x) / math.sqrt(2) if scale_input else x
    for i in range(steps):
        of, projection = (0, min(i, 1)) if tie else (i, i)
        mixed = expected @ weights[f"proj.{projection}.weight"].T
        mixed = mixed + token_weight / state_weight * weights[f"emb.{of}.weight"][tokens[i]]
        mixed = normal(mixed) * weights[f"ln.{of}.weight"] + weights[f"ln.{of}.bias"]
        expected = functional.gelu(mixed)
        state = module.advance(i, state, tokens[i])
        torch.testing.assert_close(state, expected)
        torch.testing.assert_close(module.logits(i, state), expected @ weights[f"head.{of}.weight"].T)


def test_a_whole_vocabulary_shares_the_targets_memory(head_weight):
    heads = MedusaHeads(MedusaConfig(H, V))
    heads.shared_head = head_weight.clone()  # a file that brings the same rows again
    heads.bind(head_weight, head_weight)
    assert heads.head_weight().data_ptr() == head_weight.data_ptr()


def test_other_rows_than_the_targets_are_kept(head_weight):
    heads = MedusaHeads(MedusaConfig(H, V))
    heads.shared_head = head_weight + 1
    heads.bind(head_weight, head_weight)
    torch.testing.assert_close(heads.head_weight(), head_weight + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: MedusaHeads(MedusaConfig(H, V), ids),
        lambda ids: BlockwiseHeads(BlockwiseConfig(H, V, inner_size=8), ids),
        lambda ids: ExitHead(ExitConfig(2, H, V), ids),
    ],
)
def test_heads_of_another_target_are_refused(head_weight, make):
    with pytest.raises(UsageError, match="width 12, the target's are 13 wide"):
        make(None).bind(torch.zeros(V, 13), torch.zeros(V, 13))
    with pytest.raises(UsageError, match="up to 39, the target's vocabulary has 39"):
        make(DRAFT_IDS).bind(head_weight[:39], head_weight[:39])
    make(DRAFT_IDS[:-1]).bind(head_weight[:39], head_weight[:39])  # ids within are enough


def test_an_mlp_speculator_of_another_target_is_refused():
    with pytest.raises(UsageError, match="up to 39, the target's vocabulary has 30"):
        MlpSpeculator(MlpConfig(H, 8, V, 2)).bind(torch.zeros(30, H), torch.zeros(30, H))
