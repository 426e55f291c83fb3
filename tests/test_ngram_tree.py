"""The n-gram trie: what it holds, and that drafting it is lossless."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import decode, random_prompts, tokens_of
from tree_helpers import g_test

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.ngram import NgramDrafter, NgramIndex, NgramTreeDrafter
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.errors import UsageError
from spectune.sweeping.cell import Sampling


def trie_of(tokens, nodes, limit=99, stop_ids=(), sizes=(1, 4)):
    index = NgramIndex(*sizes)
    index.extend(tokens)
    return index.trie(tokens, nodes, limit, stop_ids)


def paths(nodes):
    """The path of every node, in order."""
    found = [()]
    for node in nodes:
        assert node.parent < len(found), "parents stand before their children"
        found.append((*found[node.parent], node.token))
        assert node.depth == len(found[-1])
    return found[1:]


def test_one_continuation_is_a_chain_as_long_as_the_budget():
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert paths(trie_of(text, 4)) == [(3,), (3, 4), (3, 4, 5), (3, 4, 5, 6)]
    assert paths(trie_of(text, 4, limit=2)) == [(3,), (3, 4)]
    assert [p[-1] for p in paths(trie_of(text, 99))] == [3, 4, 5, 6, 7, 1, 2]


def test_continuations_merge_where_they_agree():
    text = [9, 1, 2, 3, 7, 9, 1, 2, 4, 7, 9, 1]
    assert paths(trie_of(text, 3, sizes=(2, 2))) == [(2,), (2, 4), (2, 3)]  # the most recent first


def test_the_longer_match_comes_first_and_the_shorter_one_beside_it():
    text = [5, 1, 2, 8, 8, 1, 2, 6, 6, 5, 1, 2]
    found = paths(trie_of(text, 2, limit=1))
    assert found == [(8,), (6,)]  # (5, 1, 2) went on with 8, the more recent (1, 2) with 6


def test_what_followed_more_often_comes_first():
    text = [1, 7, 1, 6, 1, 6, 1, 6, 1, 5, 1]
    assert paths(trie_of(text, 3, limit=1, sizes=(1, 1))) == [(6,), (5,), (7,)]


def test_a_budget_is_shared_by_chance():
    """Two continuations agree, a third parts at once: it gets its node when the common path has become less likely."""
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 9, 9, 1]
    ways = [(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (9,)]
    assert set(paths(trie_of(text, 4, sizes=(1, 1)))) == set(ways[:4])
    assert set(paths(trie_of(text, 5, sizes=(1, 1)))) == set(ways)


def test_nothing_follows_a_stop_token():
    text = [1, 2, 3, 4, 1, 2, 9, 9, 1]
    assert paths(trie_of(text, 9, limit=3, stop_ids={2}, sizes=(1, 1))) == [(2,)]


def test_no_match_and_no_room_give_no_tree():
    assert trie_of([1, 2, 3], 5) == []
    assert trie_of([1, 2, 1], 5, limit=0) == []


def test_a_trie_obeys_its_rules_on_random_texts():
    draw = random.Random(4)
    for _ in range(300):
        text = [draw.randrange(5) for _ in range(draw.randrange(1, 40))]
        nodes, limit = draw.randrange(1, 20), draw.randrange(1, 6)
        found = trie_of(text, nodes, limit, {4})
        ways = paths(found)
        assert len(ways) == len(set(ways)) <= nodes
        assert [n.depth for n in found] == sorted(n.depth for n in found)
        assert all(len(way) <= limit and 4 not in way[:-1] for way in ways)
        for way in ways:
            # It stands in the text, behind a place that ends as the text does.
            places = [i for i in range(1, len(text)) if text[i : i + len(way)] == list(way)]
            assert any(text[i - 1] == text[-1] for i in places)
        lookup = NgramIndex(1, 4)
        lookup.extend(text)
        assert bool(found) == bool(lookup.lookup(text, 1))


def test_a_growing_text_gives_the_same_trie_as_a_whole_one():
    draw = random.Random(7)
    text = [draw.randrange(4) for _ in range(60)]
    grown = NgramIndex(1, 4)
    for end in range(1, len(text) + 1):
        grown.extend(text[:end])
        assert grown.trie(text[:end], 8, 5, ()) == trie_of(text[:end], 8, 5)


def repetitive_prompts():
    return [p * 3 for p in random_prompts(4, lengths=(7, 12, 4, 9))] + [[3, 4, 5], [6]]


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_output_equals_plain_decoding(tiny, batch):
    prompts = repetitive_prompts()
    plain = tokens_of(decode(tiny, None, prompts, k=0, max_new_tokens=40, stop=StopRule()))
    kept = 0
    for k in range(1, 17, 3):
        run = decode(tiny, NgramTreeDrafter(), prompts, k=k, batch=batch, max_new_tokens=40, stop=StopRule())
        assert tokens_of(run) == plain
        kept += sum(r.accepted for g in run.generations for r in g.rounds)
        assert all(r.nodes <= k for g in run.generations for r in g.rounds)
        assert sum(t.draft_steps for t in run.trace) == 0
    assert kept > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_matched_sampling_equals_plain_sampling(tiny, batch):
    sampling = Sampling(temperature=0.3, repetition_penalty=1.1)
    prompts = repetitive_prompts()
    plain = tokens_of(decode(tiny, None, prompts, k=0, sampling=sampling))
    run = decode(tiny, NgramTreeDrafter(), prompts, k=8, batch=batch, rule="match", sampling=sampling)
    assert tokens_of(run) == plain


def test_a_tree_accepts_at_least_what_its_first_branches_would(tiny):
    """Over many rounds several continuations beat one."""
    prompts = repetitive_prompts()
    sampling = Sampling(temperature=0.4)
    counts = {}
    for drafter in (NgramDrafter(), NgramTreeDrafter()):
        run = decode(
            tiny, drafter, prompts * 3, k=8, batch=6, max_new_tokens=60, rule="match", sampling=sampling,
            stop=StopRule(),
        )  # fmt: skip
        counts[type(drafter)] = run.target_forwards
    assert counts[NgramTreeDrafter] < counts[NgramDrafter]


def test_sampled_output_has_the_targets_law(tmp_path):
    """The delta rule over distinct children: the first drafted token's law, against the exact one."""
    settings = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    target = load_tiny(save_tiny(tmp_path, seed=3, **settings))
    prompt = [3, 5, 4, 3, 6, 3, 5, 7, 4, 6, 5, 3, 4, 7, 3, 2, 6, 5]
    sampling = Sampling(temperature=1.0)
    decoder = Decoder(
        target.model, NgramTreeDrafter(), DecodeSettings(KSchedule.constant(6), "speculative", sampling), StopRule()
    )
    run = decoder.decode([Request(str(i), tuple(prompt), 3, i) for i in range(4000)], 2000)
    assert sum(r.accepted for g in run.generations for r in g.rounds) > 200
    ids = torch.tensor([[*prompt, a] for a in range(8)])
    step = Step(0, (0,) * 8, ids.shape[1], target.model.device)
    with torch.inference_mode():
        p = target.model.forward(ids, step, KVStore(8, ids.shape[1]))[:, -2:].double().softmax(-1)
    law = p[0, 0, :, None] * p[:, 1]  # [first token, second token]
    tokens = torch.tensor(tokens_of(run))
    seen = torch.bincount(tokens[:, 0] * 8 + tokens[:, 1], minlength=64)
    assert g_test(seen, law) < 4
    swapped = law.roll(1, 1)
    assert g_test(seen, swapped) > 20


def test_a_trie_refuses_block_verification(tiny):
    with pytest.raises(UsageError, match="block verification is for chains"):
        decode(tiny, NgramTreeDrafter(), [[3, 4]], rule="block", sampling=Sampling(temperature=1.0))
