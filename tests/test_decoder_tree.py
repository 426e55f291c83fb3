"""Trees in the decoder: verified in one forward, losslessly, and compacted so that the cache is that of the text."""

from __future__ import annotations

import random

import pytest
import torch
from decoding_helpers import decode, random_prompts, tokens_of, whole_index
from test_decoder_cache import assert_prefix_equals_prefill

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.drafter import Draft
from spectune.decoding.stopping import StopRule
from spectune.decoding.tree import TokenTree
from spectune.sweeping.cell import Sampling

TAPS = (0, 1, 2)


class TreeDrafter:
    """Random trees, ragged over the rows, in which one random path holds part of the true continuation."""

    device = None

    def __init__(self, continuations, *, taps=(), seed=0, vocab_size=128) -> None:
        self.continuations = continuations  # by row seed
        self.taps = taps
        self.random = random.Random(seed)
        self.vocab_size = vocab_size
        self.states = {}  # by row seed: what was handed over, in text order
        self.accepted = 0

    def start(self, rows, capacity) -> None:
        self.states = {}

    def admit(self, index, row, states) -> None:
        self.states[row.seed] = [states]

    def propose(self, round_):
        width = round_.nodes
        tokens, parents, counts = [], [], []
        for row, limit in zip(round_.rows, round_.limits, strict=True):
            whole = self.continuations[row.seed]
            coming = whole[whole_index(whole, row.tokens) :]
            shape = self._shape(self.random.randint(0, width), limit)
            tokens.append(self._fill(shape, coming) + [0] * (width - len(shape)))
            parents.append(shape + [0] * (width - len(shape)))
            counts.append(len(shape))
        return Draft(torch.tensor(tokens), torch.tensor(counts), None, 0, tree=TokenTree(torch.tensor(parents)))

    def _shape(self, count, limit):
        """Parents of a random tree, sorted by depth."""
        depths, shape = [0], []
        if limit == 0:
            return []
        pairs = []
        for _ in range(count):
            parent = self.random.choice([i for i, d in enumerate(depths) if d < limit])
            depths.append(depths[parent] + 1)
            pairs.append(parent)
        order = sorted(range(len(depths)), key=lambda i: depths[i])
        new = {old: place for place, old in enumerate(order)}
        for old in order[1:]:
            shape.append(new[pairs[old - 1]])
        return shape

    def _fill(self, shape, coming):
        """Random distinct siblings; along one path the right tokens, as far as luck wants."""
        on_path, taken, tokens, depth = {0}, {}, [], {0: 0}
        reach = self.random.randint(0, len(coming))
        for node, parent in enumerate(shape, 1):
            depth[node] = depth[parent] + 1
            right = coming[depth[parent]] if depth[parent] < min(reach, len(coming)) else None
            siblings = taken.setdefault(parent, set())
            last = parent not in shape[node:]
            if (
                parent in on_path
                and right is not None
                and right not in siblings
                and (last or self.random.random() < 0.5)
            ):
                token = right
                on_path.add(node)
            else:
                token = self.random.choice([t for t in range(self.vocab_size) if t not in siblings and t != right])
            siblings.add(token)
            tokens.append(token)
        return tokens

    def keep(self, rows, kept) -> None:
        self.accepted += sum(kept.accepted)
        for index, row in enumerate(rows):
            if kept.states is not None:
                path = kept.path[index, : kept.accepted[index] + 1]
                self.states[row.seed].append(kept.states[index, path])

    def move(self, source, destination) -> None:
        pass


def plain_and_drafter(loaded, prompts, *, max_new_tokens, sampling=Sampling(), rule="speculative", **options):
    plain = decode(
        loaded, None, prompts, max_new_tokens=max_new_tokens + 12, stop=StopRule(), sampling=sampling, rule=rule
    )
    whole = {i: list(p) + g.tokens for i, (p, g) in enumerate(zip(prompts, plain.generations, strict=True))}
    return [t[:max_new_tokens] for t in tokens_of(plain)], TreeDrafter(whole, **options)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [1, 3, 7, 16])
def test_greedy_output_with_trees_equals_plain_decoding(tiny, k, batch):
    prompts = random_prompts(6)
    expected, drafter = plain_and_drafter(tiny, prompts, max_new_tokens=21, seed=k)
    run = decode(tiny, drafter, prompts, k=k, batch=batch, max_new_tokens=21, stop=StopRule())
    assert tokens_of(run) == expected
    assert drafter.accepted > 0


@pytest.mark.parametrize("batch", [1, 4])
def test_matched_sampling_with_trees_equals_plain_sampling(tiny, batch):
    sampling = Sampling(temperature=1.3, top_p=0.9)
    prompts = random_prompts(5)
    expected, drafter = plain_and_drafter(tiny, prompts, max_new_tokens=21, sampling=sampling, rule="match")
    run = decode(
        tiny, drafter, prompts, k=6, batch=batch, max_new_tokens=21, stop=StopRule(), sampling=sampling, rule="match"
    )
    assert tokens_of(run) == expected
    assert drafter.accepted > 0


def test_a_repetition_penalty_sees_each_nodes_own_path(tiny):
    sampling = Sampling(repetition_penalty=1.7)
    prompts = random_prompts(5)
    expected, drafter = plain_and_drafter(tiny, prompts, max_new_tokens=30, sampling=sampling)
    run = decode(tiny, drafter, prompts, k=8, batch=2, max_new_tokens=30, stop=StopRule(), sampling=sampling)
    assert tokens_of(run) == expected
    assert drafter.accepted > 0


@pytest.mark.parametrize("rule", ["speculative", "typical"])
def test_the_cache_behind_an_accepted_path_equals_a_fresh_prefill(tiny, rule):
    prompts = random_prompts(5)
    sampling = Sampling(temperature=0.7) if rule == "typical" else Sampling()
    _, drafter = plain_and_drafter(tiny, prompts, max_new_tokens=24)

    def check(decoder, _trace) -> None:
        for index, slot in enumerate(decoder.slots):
            assert_prefix_equals_prefill(decoder.target, decoder.store, index, slot.row.tokens[:-1])

    if rule == "typical":
        drafter.propose = lambda round_: _any_tree(round_)  # sampled text has no known continuation
    decode(
        tiny, drafter, prompts, k=7, batch=3, max_new_tokens=24, stop=StopRule(), on_round=check, rule=rule,
        sampling=sampling,
    )  # fmt: skip


def _any_tree(round_):
    shape = [0, 0, 0, 1, 1, 2, 4]
    rows = len(round_.rows)
    tokens = torch.arange(rows * 7).reshape(rows, 7) % 128
    tree = TokenTree(torch.tensor([shape] * rows))
    counts = tree.within(torch.tensor(round_.limits))
    return Draft(tokens, counts, None, 0, tree=tree)


@pytest.mark.parametrize("batch", [1, 3])
def test_states_handed_to_a_drafter_are_those_of_the_text(tiny, batch):
    prompts = random_prompts(5)
    _, drafter = plain_and_drafter(tiny, prompts, max_new_tokens=24, taps=TAPS)
    checked = []

    def check(decoder, _trace) -> None:
        for slot in decoder.slots:
            tokens = slot.row.tokens[:-1]
            step = Step(0, (0,), len(tokens), tiny.model.device)
            _, expected = tiny.model.forward_with_states(torch.tensor([tokens]), step, KVStore(1, len(tokens)), TAPS)
            torch.testing.assert_close(torch.cat(drafter.states[slot.row.seed]), expected[0], atol=1e-4, rtol=1e-4)
            checked.append(len(tokens))

    decode(tiny, drafter, prompts, k=7, batch=batch, max_new_tokens=24, stop=StopRule(), on_round=check)
    assert max(checked) > 50


def test_states_are_those_of_transformers(tiny, tiny_folder):
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[5, 9, 77, 3]])
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder)
    expected = reference(ids, output_hidden_states=True).hidden_states
    logits, states = tiny.model.forward_with_states(ids, Step(0, (0,), 4, tiny.model.device), KVStore(1, 4), TAPS)
    torch.testing.assert_close(states, torch.cat(expected, -1), atol=1e-4, rtol=1e-4)
    # What the head reads is the last tap.
    head = tiny.model.head_rows()
    torch.testing.assert_close(states[..., -64:] @ head.T, logits, atol=1e-4, rtol=1e-4)


def test_sliding_window_layers_measure_reach_along_the_path(tmp_path):
    """The nodes of a tree lie side by side, but the window counts positions."""
    from conftest import load_tiny
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=9, initializer_range=0.5,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    loaded = load_tiny(tmp_path)
    prompts = random_prompts(5)
    expected, drafter = plain_and_drafter(loaded, prompts, max_new_tokens=24)
    run = decode(loaded, drafter, prompts, k=12, batch=2, max_new_tokens=24, stop=StopRule())
    assert tokens_of(run) == expected
    assert drafter.accepted > 0


def test_a_stop_token_inside_an_accepted_path_ends_the_output(tiny):
    prompts = random_prompts(3)
    expected, _ = plain_and_drafter(tiny, prompts, max_new_tokens=20)
    for place in range(20):
        stop = StopRule(frozenset({expected[0][place]}))
        _, drafter = plain_and_drafter(tiny, prompts[:1], max_new_tokens=20, seed=place)
        run = decode(tiny, drafter, prompts[:1], k=7, max_new_tokens=20, stop=stop)
        first = expected[0].index(expected[0][place])
        assert tokens_of(run)[0] == expected[0][: first + 1]
        assert run.generations[0].finish_reason == "stop"
