"""Both caches equal a fresh prefill after every round, and the state invariant holds."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import decode, drafter_of, random_prompts

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.stopping import StopRule
from spectune.sweeping.cell import Sampling


def assert_prefix_equals_prefill(model, store: KVStore, row: int, tokens: list[int]) -> None:
    """Slots 0 … len(tokens) - 1 of a row hold what prefilling those tokens gives."""
    if not tokens:
        return
    fresh = KVStore(1, len(tokens))
    ids = torch.tensor([tokens])
    model.forward(ids, Step(0, (0,), len(tokens), model.device), fresh)
    for layer in fresh.keys:
        for kept, expected in ((store.keys, fresh.keys), (store.values, fresh.values)):
            actual = kept[layer][row, :, : len(tokens)]
            torch.testing.assert_close(actual, expected[layer][0], atol=1e-4, rtol=1e-4)


def check_caches(decoder, _trace) -> None:
    for index, slot in enumerate(decoder.slots):
        tokens = slot.row.tokens
        assert_prefix_equals_prefill(decoder.target, decoder.store, index, tokens[:-1])
        drafter = decoder.drafter
        if isinstance(drafter, ModelDrafter) and not drafter.shares_target_cache:
            cached = drafter.cached[index]
            assert len(tokens) - 2 <= cached <= len(tokens) - 1
            assert_prefix_equals_prefill(drafter.model, drafter.store, index, tokens[:cached])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("drafter", ["self", "other", "ngram", "early-exit:1", "layer-skip:1"])
def test_caches_equal_a_fresh_prefill_after_every_round(tiny, tiny_folder, other_folder, drafter, k, batch):
    name = {"self": tiny_folder, "other": other_folder}.get(drafter, drafter)
    decode(
        tiny, drafter_of(tiny, name), random_prompts(4), k=k, batch=batch, max_new_tokens=20, stop=StopRule(),
        on_round=check_caches,
    )  # fmt: skip


def test_caches_equal_a_fresh_prefill_when_sampling(tiny, other_folder):
    decode(
        tiny, drafter_of(tiny, other_folder), random_prompts(4), k=4, batch=2, max_new_tokens=30,
        sampling=Sampling(temperature=1.5), on_round=check_caches,
    )  # fmt: skip


def test_a_full_draft_cache_lags_by_one_token_and_no_more(tiny, tiny_folder):
    """After full acceptance the last drafted token was never fed; a lasting hole would halve acceptance."""
    lags = []

    def look(decoder, _trace) -> None:
        lags.extend(slot.row.length - decoder.drafter.cached[index] for index, slot in enumerate(decoder.slots))

    decode(tiny, drafter_of(tiny, tiny_folder), random_prompts(2), k=4, max_new_tokens=40, on_round=look)
    assert set(lags) <= {1, 2}


def test_ragged_forward_equals_row_by_row_forward(tiny):
    lengths = (3, 11, 7)
    prompts = random_prompts(3, lengths=lengths)
    store = KVStore(3, 16)
    for row, prompt in enumerate(prompts):
        tiny.model.forward(torch.tensor([prompt]), Step(row, (0,), len(prompt), tiny.model.device), store)
    block = torch.tensor([[4, 5, 6], [7, 8, 9], [10, 11, 12]])
    ragged = tiny.model.forward(block, Step(0, lengths, 3, tiny.model.device), store)
    for row, prompt in enumerate(prompts):
        alone = KVStore(1, 20)
        ids = torch.tensor([prompt + block[row].tolist()])
        whole = tiny.model.forward(ids, Step(0, (0,), ids.shape[1], tiny.model.device), alone)
        torch.testing.assert_close(ragged[row], whole[0, -3:], atol=1e-4, rtol=1e-4)
