"""The EAGLE drafter: its cache holds true pairs, its proposals are the head's, and the output stays the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import decode, random_prompts, requests_of, tokens_of
from eagle_helpers import HIDDEN, VARIANTS, naive, randomize, tiny_config, tiny_head

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.drafter import Kept, Round, Row
from spectune.decoding.eagle_drafter import EagleDrafter, EagleTreeDrafter
from spectune.decoding.eagle_network import EagleNetwork
from spectune.decoding.sampling import History
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.decoding.tree_plans import DynamicPlan, StaticPlan
from spectune.decoding.tree_size import TreeSize
from spectune.errors import UsageError
from spectune.heads.eagle import EagleHead, default_taps
from spectune.sweeping.cell import Sampling

VOCAB = 128
DRAFT_IDS = torch.arange(0, VOCAB, 2)
SAMPLED = Sampling(temperature=0.8, top_k=20)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Eight layers, so that three different states exist inside."""
    folder = tmp_path_factory.mktemp("eight")
    return load_tiny(save_tiny(folder, num_hidden_layers=8, initializer_range=0.3))


def make_head(loaded, version: int = 3, draft_ids=DRAFT_IDS, **changes) -> EagleHead:
    torch.manual_seed(3)
    taps = default_taps(version, loaded.model.layers_count)
    head = EagleHead(tiny_config(version, taps=taps, **changes), draft_ids)
    randomize(head)
    head.bind(loaded.model.embedding, loaded.model.head_rows())
    return head.eval().requires_grad_(False)


def make_drafter(loaded, version: int = 3, **changes) -> EagleDrafter:
    return EagleDrafter(make_head(loaded, version, **changes), target_vocab=VOCAB)


def run_once(loaded, drafter, rows, *, k, sampling=Sampling(), rule="greedy", nodes=None):
    """Admit rows of tokens and propose once, as the decoder would."""
    model = loaded.model
    with torch.inference_mode():
        drafter.start(len(rows), 64)
        for index, tokens in enumerate(rows):
            ids = torch.tensor([tokens[:-1]])
            step = Step(0, (0,), ids.shape[1], model.device)
            _, states = model.forward_with_states(ids, step, KVStore(1, 64), drafter.taps)
            drafter.admit(index, Row(list(tokens), index), states[0])
        history = History(len(rows), VOCAB, sampling.repetition_penalty, model.device)
        for index, tokens in enumerate(rows):
            history.reset(index, tokens)
        limits = [k] * len(rows)
        stop_ids = torch.tensor([2])
        typed = [Row(list(t), i) for i, t in enumerate(rows)]
        return drafter.propose(Round(typed, limits, k, nodes or k, rule, sampling, history, stop_ids, model.device))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_network_computes_what_the_head_does(name):
    """In two pieces over a cache, the second one on its own outputs, in every variant."""
    config = VARIANTS[name]
    head = tiny_head(config)
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(2, 9, len(config.taps) * HIDDEN, generator=generator)
    ids = torch.randint(0, VOCAB, (2, 9), generator=generator)
    with torch.inference_mode():
        expected = head.run(states, ids)
        features, logits = head.following(expected), head.logits(expected)
        network, store = EagleNetwork(head), KVStore(2, 9)
        network.make_room(9)
        pieces = []
        for first, last in ((0, 5), (5, 9)):
            step = Step(0, (first,) * 2, last - first, ids.device)
            pieces.append(network.step(ids[:, first:last], network.fuse(states[:, first:last]), step, store))
        output = torch.cat(pieces, 1)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(network.following(output), features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(network.logits(output), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("version", [1, 3])
def test_greedy_output_is_the_targets_whatever_the_head_says(target, version, k, batch):
    prompts = random_prompts(5)
    plain = decode(target, None, prompts, max_new_tokens=20)
    run = decode(target, make_drafter(target, version), prompts, k=k, batch=batch, max_new_tokens=20)
    assert tokens_of(run) == tokens_of(plain)
    assert sum(t.drafted for t in run.trace) > 0


@pytest.mark.parametrize("version", [1, 3])
def test_seeded_match_equals_plain_sampling(target, version):
    prompts = random_prompts(4)
    plain = decode(target, None, prompts, max_new_tokens=20, sampling=SAMPLED, rule="match")
    run = decode(
        target, make_drafter(target, version), prompts, k=3, batch=2, max_new_tokens=20, sampling=SAMPLED, rule="match"
    )
    assert tokens_of(run) == tokens_of(plain)


def true_keys(target, drafter, row: Row) -> list[torch.Tensor]:
    """Keys of all true pairs of a row, computed in one go from the target's states."""
    ids = torch.tensor([row.tokens[:-1]])
    _, states = target.model.forward_with_states(
        ids, Step(0, (0,), ids.shape[1], ids.device), KVStore(1, ids.shape[1]), drafter.taps
    )
    store = KVStore(1, ids.shape[1])
    step = Step(0, (0,), ids.shape[1], ids.device)
    drafter.network.step(torch.tensor([row.tokens[1:]]), drafter.network.fuse(states), step, store)
    return [store.keys[layer][0] for layer in sorted(store.keys)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("version", [1, 3])
def test_after_every_round_the_cache_holds_the_pairs_that_true_states_make(target, version, batch):
    """A head that is often right (draft ids hold the likely tokens) leaves kept and dropped pairs of its own behind."""
    drafter = make_drafter(target, version, draft_ids=None)
    checked = []

    def check(decoder: Decoder, _) -> None:
        for index, slot in enumerate(decoder.slots):
            fed = drafter.fed[index]
            with torch.inference_mode():
                expected = true_keys(target, drafter, slot.row)
            assert slot.row.length - 1 - fed == sum(len(s) for s in drafter.pending[index])
            for layer, keys in enumerate(expected):
                torch.testing.assert_close(
                    drafter.store.keys[layer][index, :, :fed], keys[:, :fed], rtol=1e-4, atol=1e-4
                )
            checked.append(fed)

    decode(target, drafter, random_prompts(4), k=4, batch=batch, max_new_tokens=16, on_round=check)
    assert len(set(checked)) > 10


class Oracle(EagleDrafter):
    """Replaces a draft's first tokens by what the target will say, so that they are accepted.

    right: how many; None: as many as the row's seed says.
    """

    def __init__(self, head, continuations, right: int | None) -> None:
        super().__init__(head, target_vocab=VOCAB)
        self.continuations, self.right = continuations, right
        self.proposed = {}  # by seed and length: the head's own proposals

    def propose(self, round_):
        draft = super().propose(round_)
        if draft is None:
            return None
        for index, row in enumerate(round_.rows):
            whole = self.continuations[row.seed]
            self.proposed[row.seed, row.length] = draft.tokens[index, : int(draft.counts[index])].tolist()
            right = row.seed if self.right is None else self.right
            for place in range(min(right, draft.tokens.shape[1])):
                if row.length + place < len(whole):
                    draft.tokens[index, place] = whole[row.length + place]
        return draft


@pytest.mark.parametrize("right", [1, 2, 4])
def test_accepted_tokens_get_pairs_of_true_states(target, right):
    prompts = random_prompts(3)
    plain = decode(target, None, prompts, max_new_tokens=24)
    whole = {i: list(p) + t for i, (p, t) in enumerate(zip(prompts, tokens_of(plain), strict=True))}
    drafter = Oracle(make_head(target), whole, right)

    def check(decoder: Decoder, _) -> None:
        for index, slot in enumerate(decoder.slots):
            expected = true_keys(target, drafter, slot.row)[0]
            fed = drafter.fed[index]
            torch.testing.assert_close(drafter.store.keys[0][index, :, :fed], expected[:, :fed], rtol=1e-4, atol=1e-4)

    run = decode(target, drafter, prompts, k=4, batch=3, max_new_tokens=24, on_round=check)
    assert tokens_of(run) == tokens_of(plain)
    accepted = [r.accepted for g in run.generations for r in g.rounds]
    assert max(accepted) >= right


@pytest.mark.parametrize("version", [1, 3])
def test_proposals_are_those_of_the_formulas(target, version):
    """Greedy tokens and sampled distributions over a chain, against the head written place by place."""
    rows = random_prompts(3, lengths=(9, 14, 4))
    drafter = make_drafter(target, version)
    head = make_head(target, version)
    sampled = run_once(target, drafter, rows, k=4, sampling=Sampling(temperature=0.7), rule="speculative")
    assert sampled.probabilities.shape == (3, 4, VOCAB)
    assert sampled.steps == 4
    for index, tokens in enumerate(rows):
        ids = torch.tensor([tokens[:-1]])
        _, states = target.model.forward_with_states(
            ids, Step(0, (0,), ids.shape[1], ids.device), KVStore(1, 64), drafter.taps
        )
        reference = naive(head)
        output = reference.run(states[0], torch.tensor(tokens[1:]))[-1]
        for place in range(4):
            q = torch.zeros(VOCAB, dtype=torch.float64)
            q[DRAFT_IDS] = (reference.logits(output) / 0.7).softmax(0)
            torch.testing.assert_close(sampled.probabilities[index, place].double(), q, rtol=1e-3, atol=1e-4)
            token = int(sampled.tokens[index, place])
            assert token in DRAFT_IDS
            output = reference.step(token, reference.following(output), len(tokens) - 1 + place)


def test_repetition_penalty_shapes_the_draft_too(target):
    rows = random_prompts(1, lengths=(12,))
    plain = run_once(target, make_drafter(target), rows, k=3, sampling=Sampling(temperature=1.0), rule="speculative")
    penalty = Sampling(temperature=1.0, repetition_penalty=2.0)
    penalised = run_once(target, make_drafter(target), rows, k=3, sampling=penalty, rule="speculative")
    seen = torch.isin(torch.arange(VOCAB), torch.tensor(rows[0]))
    assert not torch.allclose(plain.probabilities[0, 0], penalised.probabilities[0, 0])
    assert penalised.probabilities[0, 0, seen].sum() < plain.probabilities[0, 0, seen].sum()


def test_rounds_without_draft_leave_pairs_pending_that_are_fed_later(target):
    """Above one active row nothing is drafted; the last row then drafts with all it has missed."""
    prompts = random_prompts(2, lengths=(7, 7))
    requests = [replace(r, max_new_tokens=n) for r, n in zip(requests_of(prompts, 0), (45, 60), strict=True)]
    settings = DecodeSettings(KSchedule(((1, 3), (2, 0))), "greedy", Sampling())
    plain = Decoder(target.model, None, settings, StopRule()).decode(requests, 2)
    drafter = make_drafter(target)
    most = []

    def check(decoder: Decoder, _) -> None:
        for index, slot in enumerate(decoder.slots):
            fed = drafter.fed[index]
            most.append(slot.row.length - 1 - fed)
            expected = true_keys(target, drafter, slot.row)[0]
            torch.testing.assert_close(drafter.store.keys[0][index, :, :fed], expected[:, :fed], rtol=1e-4, atol=1e-4)

    decoder = Decoder(target.model, drafter, settings, StopRule())
    decoder.on_round = check
    run = decoder.decode(requests, 2)
    assert tokens_of(run) == tokens_of(plain)
    assert max(most) > 40
    assert any(t.draft_steps for t in run.trace)


def test_many_pending_pairs_of_one_row_do_not_push_its_neighbour_past_the_cache(target):
    drafter = make_drafter(target)
    drafter.start(2, 64)
    long, behind = (random_prompts(1, lengths=(n,))[0] for n in (60, 50))
    states = torch.randn(59, len(drafter.taps) * 64)
    with torch.inference_mode():
        for index, tokens in enumerate((long, behind)):
            drafter.admit(index, Row(tokens[:2], index), states[:1])
            drafter.pending[index] = [states[: len(tokens) - 1]]
        drafter._catch_up(0, Row(long, 0))
        outputs = drafter._take_in(drafter._pending([Row(long, 0), Row(behind, 1)]))
        alone = make_drafter(target)
        alone.start(1, 64)
        alone.admit(0, Row(behind, 1), states[:49])
        expected = alone._take_in(alone._pending([Row(behind, 1)]))
    torch.testing.assert_close(outputs[1], expected[0], rtol=1e-4, atol=1e-4)


def test_a_row_proposes_the_same_whoever_runs_beside_it(target):
    """Rows that keep different numbers of tokens feed different numbers of pairs, in one padded forward."""
    prompts = random_prompts(3)
    plain = decode(target, None, prompts, max_new_tokens=20)
    whole = {i: list(p) + t for i, (p, t) in enumerate(zip(prompts, tokens_of(plain), strict=True))}

    def proposals(seeds: list[int]) -> dict[tuple[int, int], list[int]]:
        """What the head proposed, by row and length; row i is made right in its first i places."""
        drafter = Oracle(make_head(target), whole, right=None)
        run = decode(target, drafter, [prompts[i] for i in seeds], k=3, batch=3, max_new_tokens=20, seed=seeds[0])
        assert tokens_of(run) == [tokens_of(plain)[i] for i in seeds]
        return drafter.proposed

    together = proposals([0, 1, 2])
    for seed in range(3):
        for place, tokens in proposals([seed]).items():
            assert together[place] == tokens


def test_drafts_end_at_stop_tokens_and_limits(target):
    rows = random_prompts(2, lengths=(6, 6))
    drafter = make_drafter(target, draft_ids=torch.tensor([2]))  # can only say the stop token
    draft = run_once(target, drafter, rows, k=4)
    assert draft.counts.tolist() == [1, 1]


def test_near_the_end_of_the_context_fewer_tokens_are_drafted(tmp_path):
    loaded = load_tiny(save_tiny(tmp_path, num_hidden_layers=8, initializer_range=0.3, max_positions=48))
    prompts = random_prompts(3, lengths=(40, 30, 44))
    plain = decode(loaded, None, prompts, max_new_tokens=100)
    run = decode(loaded, make_drafter(loaded), prompts, k=5, batch=3, max_new_tokens=100)
    assert tokens_of(run) == tokens_of(plain)
    assert all(g.finish_reason == "context" for g in run.generations)


def test_a_head_whose_frequencies_change_with_length_stops_at_its_own_context(target):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    head = make_head(target, rope=rope, max_positions=20)
    prompts = random_prompts(1, lengths=(8,))
    run = decode(target, EagleDrafter(head, target_vocab=VOCAB), prompts, k=3, max_new_tokens=30)
    assert tokens_of(run) == tokens_of(decode(target, None, prompts, max_new_tokens=30))
    # With n tokens known (one more than the context says), K drafted tokens take slots up to n - 3 + K.
    for trace in run.trace[:-1]:
        assert trace.drafted == max(0, min(3, 20 - int(trace.context + 1) + 2))


def test_states_are_handed_over_for_every_verified_token(target):
    """keep() gets the states of the root and the accepted nodes, also along a tree's path."""
    drafter = make_drafter(target)
    drafter.start(1, 64)
    row = Row([5, 6, 7], 0)
    width = len(drafter.taps) * 64
    drafter.admit(0, row, torch.zeros(2, width))
    states = torch.arange(4.0)[None, :, None].expand(1, 4, width)
    row.tokens += [9, 10, 11]
    drafter.fed[0], drafter.pending[0] = 2, []
    drafter.keep([row], Kept([2], torch.tensor([[0, 2, 3]]), states))
    assert torch.cat(drafter.pending[0])[:, 0].tolist() == [0.0, 2.0, 3.0]


def make_tree_drafter(loaded, version: int = 1, *, width: int = 4, depth: int = 3, **changes) -> EagleTreeDrafter:
    plan = DynamicPlan(lambda nodes: TreeSize(width, depth))
    return EagleTreeDrafter(make_head(loaded, version, **changes), plan, target_vocab=VOCAB)


@pytest.mark.parametrize("version", [1, 3])
def test_the_tree_is_what_the_formulas_grow(target, version):
    """Every node's log-probability against the head written place by place, and the selection by brute force."""
    width, depth, nodes = 3, 3, 18
    rows = random_prompts(2, lengths=(9, 5))
    drafter = make_tree_drafter(target, version, width=width, depth=depth)
    draft = run_once(target, drafter, rows, k=nodes, nodes=nodes)
    assert draft.steps == depth
    assert draft.probabilities is None
    head = make_head(target, version)
    for index, tokens in enumerate(rows):
        ids = torch.tensor([tokens[:-1]])
        _, states = target.model.forward_with_states(
            ids, Step(0, (0,), ids.shape[1], ids.device), KVStore(1, 64), drafter.taps
        )
        root = naive(head)
        output = root.run(states[0], torch.tensor(tokens[1:]))[-1]
        frontier = [((), 0.0, root, output)]
        candidates = []
        for level in range(depth):
            grown = []
            for path, score, state, out in frontier:
                log_p = state.logits(out).log_softmax(0)
                for at in log_p.topk(width).indices.tolist():
                    grown.append(((*path, int(DRAFT_IDS[at])), score + float(log_p[at]), state, out))
            candidates += [(path, score) for path, score, _, _ in grown]
            grown.sort(key=lambda c: -c[1])
            frontier = []
            for path, score, state, out in grown[:width]:
                if path[-1] == 2:  # a stop token is never extended
                    continue
                fork = state.fork()
                place = len(tokens) - 1 + level
                frontier.append((path, score, fork, fork.step(path[-1], fork.following(out), place)))
        expected = sorted(candidates, key=lambda c: -c[1])[:nodes]
        assert int(draft.counts[index]) == len(expected)
        paths = []
        for node in range(len(expected)):
            path, at = (), node + 1
            while at:
                path = (int(draft.tokens[index, at - 1]), *path)
                at = int(draft.tree.parents[index, at - 1])
            paths.append(path)
        assert sorted(paths) == sorted(path for path, _ in expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("k", [1, 4, 12])
def test_tree_output_is_the_targets_whatever_the_head_says(target, version, k, batch):
    prompts = random_prompts(5)
    plain = decode(target, None, prompts, max_new_tokens=16)
    run = decode(target, make_tree_drafter(target, version), prompts, k=k, batch=batch, max_new_tokens=16)
    assert tokens_of(run) == tokens_of(plain)


def test_tree_with_seeded_match_equals_plain_sampling(target):
    prompts = random_prompts(4)
    plain = decode(target, None, prompts, max_new_tokens=16, sampling=SAMPLED, rule="match")
    run = decode(
        target, make_tree_drafter(target), prompts, k=8, batch=2, max_new_tokens=16, sampling=SAMPLED, rule="match"
    )
    assert tokens_of(run) == tokens_of(plain)


@pytest.mark.parametrize("batch", [1, 3])
def test_after_every_tree_round_the_cache_holds_the_pairs_that_true_states_make(target, batch):
    """Also where a path through the tree was accepted."""
    drafter = make_tree_drafter(target, 3, width=40, depth=2, draft_ids=None)
    accepted = []

    def check(decoder: Decoder, _) -> None:
        for index, slot in enumerate(decoder.slots):
            accepted.append(slot.generation.rounds[-1].accepted)
            fed = drafter.fed[index]
            expected = true_keys(target, drafter, slot.row)[0]
            torch.testing.assert_close(drafter.store.keys[0][index, :, :fed], expected[:, :fed], rtol=1e-4, atol=1e-4)

    plain = decode(target, None, random_prompts(4), max_new_tokens=16)
    run = decode(target, drafter, random_prompts(4), k=90, batch=batch, max_new_tokens=16, on_round=check)
    assert tokens_of(run) == tokens_of(plain)
    assert max(accepted) >= 1


class OneShape:
    """Root with three children, the first two with one each, and one behind the second of those."""

    notes = ()

    def parents(self, round_, slots):
        return (0, 0, 0, 1, 2, 5)


@pytest.mark.parametrize("siblings", ["without_replacement", "iid"])
def test_children_of_a_planned_shape_are_drawn_from_the_heads_distribution(target, siblings):
    """Every node's recorded q against the head written place by place."""
    rows = random_prompts(2, lengths=(9, 5))
    drafter = EagleTreeDrafter(make_head(target), StaticPlan(OneShape(), siblings), target_vocab=VOCAB)
    sampling = Sampling(temperature=0.7)
    draft = run_once(target, drafter, rows, k=4, nodes=6, sampling=sampling, rule="speculative")
    assert draft.siblings == siblings
    assert draft.steps == 3
    head = make_head(target)
    for index, tokens in enumerate(rows):
        ids = torch.tensor([tokens[:-1]])
        _, states = target.model.forward_with_states(
            ids, Step(0, (0,), ids.shape[1], ids.device), KVStore(1, 64), drafter.taps
        )
        root = naive(head)
        output = root.run(states[0], torch.tensor(tokens[1:]))[-1]
        for node, path in ((0, ()), (1, (1,)), (2, (2,)), (5, (2, 5))):
            assert int(draft.counts[index]) == 6
            fork, out = root.fork(), output
            for depth, at in enumerate(path):
                out = fork.step(int(draft.tokens[index, at - 1]), fork.following(out), len(tokens) - 1 + depth)
            q = torch.zeros(VOCAB, dtype=torch.float64)
            q[DRAFT_IDS] = (fork.logits(out) / 0.7).softmax(0)
            torch.testing.assert_close(draft.probabilities[index, node].double(), q, rtol=1e-3, atol=1e-4)


def test_repetition_penalty_follows_each_path_of_a_tree(target):
    """Behind a node, its own token is seen too: the same head without the penalty scores it higher."""
    rows = random_prompts(1, lengths=(12,))
    q = {}
    for penalty in (1.0, 3.0):
        drafter = EagleTreeDrafter(make_head(target), StaticPlan(OneShape(), "iid"), target_vocab=VOCAB)
        sampling = Sampling(temperature=1.0, repetition_penalty=penalty)
        draft = run_once(target, drafter, rows, k=4, nodes=6, sampling=sampling, rule="speculative")
        q[penalty] = draft.probabilities[0]
        penalised_token = int(draft.tokens[0, 0])
    seen = torch.isin(torch.arange(VOCAB), torch.tensor(rows[0]))
    assert q[3.0][0, seen].sum() < 0.5 * q[1.0][0, seen].sum()
    head = make_head(target)
    ids = torch.tensor([rows[0][:-1]])
    _, states = target.model.forward_with_states(
        ids, Step(0, (0,), ids.shape[1], ids.device), KVStore(1, 64), head.config.taps
    )
    reference = naive(head)
    output = reference.run(states[0], torch.tensor(rows[0][1:]))[-1]
    output = reference.step(penalised_token, reference.following(output), 11)
    logits = reference.logits(output)
    past = seen.clone()
    past[penalised_token] = True
    past = past[DRAFT_IDS]
    logits = torch.where(past, torch.where(logits < 0, logits * 3.0, logits / 3.0), logits)
    torch.testing.assert_close(q[3.0][1, DRAFT_IDS].double(), logits.softmax(0), rtol=1e-3, atol=1e-4)


def test_block_verification_of_a_tree_is_refused(target):
    with pytest.raises(UsageError, match="block verification is for chains"):
        run_once(target, make_tree_drafter(target), random_prompts(1), k=2, sampling=SAMPLED, rule="block")
