"""The decoder with the Triton kernels in their places, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import drafter_of, random_prompts, requests_of, tokens_of

from spectune.decoding import fused
from spectune.decoding.cache import KVStore
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.errors import SpectuneError
from spectune.sweeping.cell import Sampling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=1)


def decode(target, drafter, sampling, *, tokens=7):
    rule = "greedy" if sampling.greedy else "speculative"
    settings = DecodeSettings(KSchedule.constant(3), rule, sampling, graphs=True)
    return Decoder(target.model, drafter, settings, StopRule()).decode(requests_of(random_prompts(3), tokens), 2)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", [None, "self", "tree:ngram"])
def test_kernels_in_the_decoder_change_no_token(folder, name, temperature, monkeypatch):
    target = load_tiny(folder)
    drafter = None if name is None else drafter_of(target, name.replace("self", str(folder)))
    sampling = Sampling(temperature=temperature)
    expected = tokens_of(decode(target, drafter, sampling))
    used = []
    for kind in ("attend", "accept"):
        original = getattr(fused, kind)

        def spy(*arguments, original=original, kind=kind):
            found = original(*arguments)
            used.append((kind, found is not None))
            return found

        monkeypatch.setattr(fused, kind, spy)
    monkeypatch.setattr(fused, "usable", lambda _: True)
    assert tokens_of(decode(target, drafter, sampling)) == expected
    assert ("attend", True) in used
    assert ("accept", True) in used  # for trees, in rounds without a draft


def test_the_compaction_kernel_leaves_the_cache_as_plain_torch_does(monkeypatch):
    monkeypatch.setattr(fused, "usable", lambda _: True)
    stores = []
    for with_kernel in (False, True):
        torch.manual_seed(0)
        store = KVStore(2, 20)
        for layer in range(2):
            store.keys[layer] = torch.randn(2, 3, 20, 8)
            store.values[layer] = torch.randn(2, 3, 20, 8)
        if with_kernel:
            fused.prepare(store)
            assert store.compaction is not None
        path = torch.tensor([[0, 2, 5, 0], [0, 1, 3, 6]])
        store.compact_all(torch.tensor([4, 9]), path, torch.tensor([2, 3]))
        stores.append(store)
    plain, moved = stores
    for row, base, accepted in ((0, 4, 2), (1, 9, 3)):
        kept = slice(0, base + accepted + 1)
        for layer in range(2):
            assert torch.equal(plain.keys[layer][row, :, kept], moved.keys[layer][row, :, kept])
            assert torch.equal(plain.values[layer][row, :, kept], moved.values[layer][row, :, kept])


@pytest.mark.parametrize("good", [0, 3], ids=["first token", "later"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (name, rule)
        for name in (None, "ngram", "tree:ngram", "self", "tree:self")
        for rule in ("greedy", "speculative", "block", "match", "typical")
        if rule != "block" or name in (None, "ngram", "self")  # block verification is for chains
    ],
)
def test_a_model_whose_outputs_are_not_numbers_is_an_error_and_not_a_text(folder, name, rule, good):
    target = load_tiny(folder)
    drafter = None if name is None else drafter_of(target, name.replace("self", str(folder)))
    forward, calls = target.model.forward, []

    def broken(ids, step, store, *, last_only=False):
        calls.append(1)
        logits = forward(ids, step, store, last_only=last_only)
        return logits if len(calls) <= good else logits * torch.nan

    target.model.forward = broken
    settings = DecodeSettings(KSchedule.constant(3), rule, Sampling(temperature=0.0 if rule == "greedy" else 0.8))
    with pytest.raises(SpectuneError, match="not finite"):
        Decoder(target.model, drafter, settings, StopRule()).decode(requests_of([[5, 6, 7, 5, 6, 7]], 30), 1)
