"""EAGLE heads as networks: the published formulas, in every variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eagle_helpers import HIDDEN, VARIANTS, VOCAB, naive, tiny_config, tiny_head

from spectune.errors import UsageError
from spectune.heads.eagle import EagleHead, default_taps


def text(config, length=9, rows=2):
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(rows, length, len(config.taps) * HIDDEN, generator=generator)
    return states, torch.randint(0, VOCAB, (rows, length), generator=generator)


@pytest.mark.parametrize("name", VARIANTS)
def test_full_form_equals_the_formulas_written_place_by_place(name):
    config = VARIANTS[name]
    head = tiny_head(config)
    states, ids = text(config)
    with torch.no_grad():
        outputs = head.run(states, ids)
        logits = head.logits(outputs)
    for row in range(2):
        reference = naive(head)
        expected = reference.run(states[row], ids[row])
        torch.testing.assert_close(outputs[row].double(), expected, rtol=1e-4, atol=1e-4)
        expected_logits = torch.stack([reference.logits(x) for x in expected])
        torch.testing.assert_close(logits[row].double(), expected_logits, rtol=1e-4, atol=1e-4)
        following = torch.stack([reference.following(x) for x in expected])
        torch.testing.assert_close(head.following(outputs[row]).double(), following, rtol=1e-4, atol=1e-4)


def test_several_layers_equal_the_formulas():
    config = replace(tiny_config(3, layers=8), layers=3)
    head = tiny_head(config)
    states, ids = text(config)
    expected = naive(head).run(states[0], ids[0])
    torch.testing.assert_close(head.run(states, ids)[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_places_do_not_see_what_follows():
    config = tiny_config(3, layers=8)
    head = tiny_head(config)
    states, ids = text(config)
    before = head.run(states, ids)
    states[:, 6:], ids[:, 6:] = 0.0, 0
    torch.testing.assert_close(head.run(states, ids)[:, :6], before[:, :6])


def test_the_order_of_the_states_matters():
    config = tiny_config(3, layers=8)
    head = tiny_head(config)
    states, ids = text(config)
    low, mid, high = states.chunk(3, -1)
    wrong = head.logits(head.run(torch.cat([mid, low, high], -1), ids))
    assert (wrong - head.logits(head.run(states, ids))).abs().mean() > 0.1


def test_default_taps_are_the_authors_choice():
    assert default_taps(3, 32) == (2, 16, 29)
    assert default_taps(3, 30) == (2, 15, 27)
    assert default_taps(1, 30) == (30,)
    for layers in range(1, 8):
        taps = default_taps(3, layers)
        assert taps == tuple(sorted(set(taps)))
        assert 0 <= taps[0] <= taps[-1] < layers


def test_trimmed_head_takes_the_rows_of_its_ids_from_the_target():
    ids = torch.tensor([3, 7, 50, 127])
    config = tiny_config(1)
    head, whole = tiny_head(config, draft_ids=ids), tiny_head(config)
    states, text_ids = text(config)
    assert head.draft_size == 4
    torch.testing.assert_close(
        head.logits(head.run(states, text_ids)), whole.logits(whole.run(states, text_ids))[..., ids]
    )


def test_weights_of_the_target_are_neither_saved_nor_trained_with_the_head():
    head = EagleHead(tiny_config(1))
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN))
    head.bind(weight, weight)
    names = {*head.state_dict(), *dict(head.named_parameters())}
    assert not names & {"embedding", "head_rows", "draft_ids", "embed_tokens.weight", "lm_head.weight"}


def test_a_copy_of_the_targets_embedding_is_shared():
    config = tiny_config(3, layers=8, own_embedding=True)
    embedding = torch.randn(VOCAB, HIDDEN)
    head = EagleHead(config)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(embedding)
    head.bind(embedding, embedding)
    assert head.embed_tokens is None
    assert head.embedding.data_ptr() == embedding.data_ptr()
    other = EagleHead(config)
    other.bind(embedding, embedding)
    assert other.embed_tokens is not None


def test_a_head_for_another_target_is_refused():
    head = EagleHead(tiny_config(3, layers=8))
    with pytest.raises(UsageError, match=r"width 64.* 32 wide"):
        head.bind(torch.randn(VOCAB, 32), torch.randn(VOCAB, 32))
    with pytest.raises(UsageError, match="token ids up to 127"):
        head.bind(torch.randn(100, HIDDEN), torch.randn(100, HIDDEN))
    narrow = EagleHead(tiny_config(3, layers=8, target_hidden_size=32))
    with pytest.raises(UsageError, match=r"embed_tokens\.weight"):
        narrow.bind(torch.randn(VOCAB, 32), torch.randn(VOCAB, 32))


def test_rotary_frequencies_stay_exact_in_half_precision():
    head = tiny_head(tiny_config(1))
    positions = torch.tensor([[4000]])
    exact = head.rotary(positions, torch.float32)
    head.to(torch.bfloat16)
    assert torch.equal(head.rotary(positions, torch.float32)[0], exact[0])
