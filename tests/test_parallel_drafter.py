"""Medusa, blockwise and MLP drafting: right positions, lossless output, one target forward a round and no other."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from decoding_helpers import decode, random_prompts, tokens_of
from heads_helpers import greedy_corpus, learn, load_calm

from spectune.decoding.drafter import Kept, Round, Row
from spectune.decoding.mlp_drafter import MlpDrafter
from spectune.decoding.parallel_drafter import ParallelDrafter, fuse, usual_accuracy
from spectune.decoding.sampling import History
from spectune.decoding.stopping import StopRule
from spectune.errors import UsageError
from spectune.heads.blockwise import BlockwiseConfig, BlockwiseHeads
from spectune.heads.medusa import MedusaConfig, MedusaHeads
from spectune.heads.mlp import MlpConfig, MlpSpeculator
from spectune.sweeping.cell import Sampling
from spectune.training.blockwise import BlockwiseTraining
from spectune.training.medusa import MedusaTraining

LAYERS, V, H = 2, 128, 64
CPU = torch.device("cpu")
DRAFT_IDS = torch.arange(0, V, 2)
WARM = Sampling(temperature=0.8)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_calm(tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def trained(target):
    """Heads of every kind, trained until they are often right, over the whole vocabulary and over half of it."""
    head = target.model.head_rows(None).detach()
    batches = greedy_corpus(target, (LAYERS,), batches=8)
    heads = {}
    for draft_ids in (None, DRAFT_IDS):
        part = "" if draft_ids is None else "-half"
        for name, method in (
            ("medusa", MedusaTraining(head, LAYERS, draft_ids, layers=2)),
            ("own", MedusaTraining(head, LAYERS, draft_ids, own_heads=True)),
            ("blockwise", BlockwiseTraining(head, LAYERS, draft_ids)),
        ):
            learn(method, batches, epochs=6)
            method.evaluate(batches[:2])
            heads[name + part] = method.module.eval().requires_grad_(False)
    return heads


KINDS = ("medusa", "own", "blockwise", "medusa-half", "own-half", "blockwise-half")


def drafter_of(heads, tree: bool = False) -> ParallelDrafter:
    return ParallelDrafter(heads, layers=LAYERS, target_vocab=V, tree=tree)


def make_round(
    rows: list[Row], limits: list[int], *, nodes: int = 8, rule="greedy", sampling=None, stop_ids=(), penalty=1.0
) -> Round:
    history = History(len(rows), V, penalty, CPU)
    for index, row in enumerate(rows):
        history.reset(index, row.tokens)
    stops = torch.tensor(list(stop_ids), dtype=torch.long)
    return Round(rows, limits, max(limits), nodes, rule, sampling or Sampling(), history, stops, CPU)


def fed(drafter, states: torch.Tensor) -> ParallelDrafter:
    """The drafter as after prefills whose last states are `states` [B, h]."""
    drafter.start(len(states), 64)
    for index, state in enumerate(states):
        drafter.admit(index, Row([1, 2], 0), torch.stack([torch.zeros_like(state), state]))
    return drafter


def reference_states(target, tokens: list[int]) -> torch.Tensor:
    """[n, h] states behind the final norm, by transformers' own forward."""
    from transformers import AutoModelForCausalLM

    if not hasattr(reference_states, "model"):
        reference_states.model = AutoModelForCausalLM.from_pretrained(target.model.model.name_or_path).eval()
    with torch.inference_mode():
        return reference_states.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]


@pytest.fixture(scope="module")
def plain(target):
    """What plain greedy decoding writes for five prompts."""
    return tokens_of(decode(target, None, random_prompts(5), batch=5))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", ["medusa", "blockwise-half"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_greedy_output_is_that_of_plain_decoding(target, trained, plain, kind, batch, k, tree):
    run = decode(target, drafter_of(trained[kind], tree), random_prompts(5), k=k, batch=batch)
    assert tokens_of(run) == plain
    assert sum(r.accepted for g in run.generations for r in g.rounds) > 5
    assert all(t.draft_steps == 1 for t in run.trace if t.drafted)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_head_i_drafts_from_the_state_of_the_token_before_the_newest(target, trained, kind, tree):
    """Every round of ragged rows, with refills, against the heads on transformers' own states of the text so far."""
    heads = trained[kind]
    drafter = drafter_of(heads, tree)
    propose, checked = drafter.propose, Counter()

    def spy(round_: Round):
        draft = propose(round_)
        for index, row in enumerate(round_.rows):
            state = reference_states(target, row.tokens[:-1])[-1]
            ranked = heads(state).argsort(-1, descending=True)  # [n, D]
            if heads.draft_ids is not None:
                ranked = heads.draft_ids[ranked]
            count = int(draft.counts[index])
            if tree:
                depths = draft.tree.depths[index, 1:] - 1
                expected = ranked[depths, draft.tree.ranks[index]][:count]
            else:
                expected = ranked[:count, 0]
            assert draft.tokens[index, :count].tolist() == expected.tolist()
            checked[row.seed] += 1
        return draft

    drafter.propose = spy
    run = decode(target, drafter, random_prompts(5), k=3, batch=3)
    assert len(checked) == 5
    assert any(r.accepted > 1 for g in run.generations for r in g.rounds)


@pytest.mark.parametrize("tree", [False, True])
def test_a_round_is_one_target_forward_and_no_other_model_runs(target, trained, tree, monkeypatch):
    drafter = drafter_of(trained["medusa"], tree)
    calls = []
    forward = type(target.model).forward_with_states

    def counting(self, ids, *args, **kwargs):
        calls.append(tuple(ids.shape))
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(type(target.model), "forward_with_states", counting)
    monkeypatch.setattr(type(target.model), "forward", lambda *a, **k: pytest.fail("a forward without states"))
    run = decode(target, drafter, random_prompts(3), k=4, batch=3)
    assert len(calls) == run.target_forwards + 3  # the prefills
    assert sum(len(g.tokens) for g in run.generations) > 3 * run.target_forwards


@pytest.mark.parametrize("kind", KINDS)
def test_fused_products_equal_the_modules(trained, kind):
    x = torch.randn(5, H)
    torch.testing.assert_close(fuse(trained[kind])(x), trained[kind](x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_blocks_without_bias_are_fused_too(bias):
    heads = MedusaHeads(MedusaConfig(H, V, heads=3, layers=3, bias=bias))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    heads.bind(torch.randn(V, H), torch.randn(V, H))
    x = torch.randn(2, H)
    torch.testing.assert_close(fuse(heads)(x), heads(x), rtol=1e-4, atol=1e-4)


def test_no_more_tokens_than_heads_are_drafted(trained):
    drafter = fed(drafter_of(trained["medusa"]), torch.randn(2, H))
    draft = drafter.propose(make_round([Row([1, 2], 0), Row([3, 4], 1)], [7, 2], nodes=7))
    assert draft.tokens.shape == (2, 4)
    assert draft.counts.tolist() == [4, 2]
    assert draft.steps == 1


def test_a_chain_ends_with_its_first_stop_token(trained):
    states = torch.randn(2, H)
    rows = [Row([1, 2], 0), Row([3, 4], 1)]
    free = fed(drafter_of(trained["medusa"]), states).propose(make_round(rows, [4, 4]))
    stop = int(free.tokens[0, 1])
    first = free.tokens[0].tolist().index(stop)
    draft = fed(drafter_of(trained["medusa"]), states).propose(make_round(rows, [4, 4], stop_ids=[stop]))
    assert draft.counts[0] == first + 1


@pytest.mark.parametrize("tree", [False, True])
def test_stop_tokens_end_the_output_where_they_do_without_drafting(target, trained, tree):
    prompts = random_prompts(3)
    plain = tokens_of(decode(target, None, prompts))
    stop = StopRule(frozenset({plain[0][7], plain[1][9]}))
    expected = tokens_of(decode(target, None, prompts, stop=stop))
    assert min(map(len, expected)) < 24
    assert tokens_of(decode(target, drafter_of(trained["medusa"], tree), prompts, batch=3, stop=stop)) == expected


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", ["greedy", "match"])
def test_the_repetition_penalty_changes_nothing_but_what_it_changes_in_plain_decoding(target, trained, rule, tree):
    sampling = Sampling(temperature=0.8 if rule == "match" else 0.0, repetition_penalty=1.3)
    prompts = random_prompts(3)
    arguments = {"rule": "match" if rule == "match" else "speculative", "sampling": sampling}
    plain = decode(target, None, prompts, **arguments)
    run = decode(target, drafter_of(trained["medusa-half"], tree), prompts, k=3, batch=3, **arguments)
    assert tokens_of(run) == tokens_of(plain)


def test_the_draft_penalises_what_the_row_and_the_draft_itself_have_seen(trained):
    heads = trained["medusa-half"]
    state = torch.randn(1, H)
    rows = [Row([6, 8, 10, 12, 7], 0)]
    draft = fed(drafter_of(heads), state).propose(make_round(rows, [4], penalty=5.0))
    seen = set(rows[0].tokens)
    for place, logits in enumerate(heads(state)[0].detach()):
        for i, token in enumerate(DRAFT_IDS.tolist()):
            if token in seen:
                logits[i] = logits[i] * 5.0 if logits[i] < 0 else logits[i] / 5.0
        token = int(DRAFT_IDS[logits.argmax()])
        assert draft.tokens[0, place] == token
        seen.add(token)


def test_a_trees_guesses_are_penalised_by_what_the_row_has_seen(trained):
    heads = trained["medusa-half"]
    state = torch.randn(1, H)
    likely = DRAFT_IDS[heads(state)[0, 0].topk(4).indices].tolist()
    drafter = fed(drafter_of(heads, tree=True), state)
    rows = [Row([*likely[:2], 7], 0)]
    free = drafter.propose(make_round(rows, [1], nodes=2)).tokens[0].tolist()
    penalised = drafter.propose(make_round(rows, [1], nodes=2, penalty=100.0)).tokens[0].tolist()
    assert (free, penalised) == (likely[:2], likely[2:])


@pytest.mark.parametrize("kind", ["medusa", "blockwise-half"])
@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_sampled_tokens_come_from_the_recorded_distribution(trained, kind, rule):
    """20,000 rows with one state: frequencies of every place against q, and q against the heads' own softmax."""
    heads = trained[kind]
    state = torch.randn(H)
    sampling = Sampling(temperature=1.5, top_k=20)
    many = 20_000
    drafter = drafter_of(heads)
    drafter.start(many, 8)
    drafter.state[:] = state
    rows = [Row([1, 2], seed) for seed in range(many)]
    draft = drafter.propose(make_round(rows, [3] * many, rule=rule, sampling=sampling))
    assert draft.probabilities.shape == (many, 3, V)
    logits = heads(state).detach()[:3] / 1.5
    ids = torch.arange(V) if heads.draft_ids is None else heads.draft_ids
    for place in range(3):
        kept = logits[place].topk(20).indices
        q = torch.zeros(V)
        q[ids[kept]] = logits[place][kept].softmax(-1)
        torch.testing.assert_close(draft.probabilities[0, place], q, rtol=1e-3, atol=1e-5)
        frequency = torch.bincount(draft.tokens[:, place], minlength=V) / many
        assert float((frequency - q).abs().max()) < 0.02
        assert bool((frequency[q == 0] == 0).all())
    pairs = Counter(zip(draft.tokens[:, 0].tolist(), draft.tokens[:, 1].tolist(), strict=True))
    (a, b), count = pairs.most_common(1)[0]
    joint = float(draft.probabilities[0, 0, a] * draft.probabilities[0, 1, b])
    assert count / many == pytest.approx(joint, abs=0.02)  # the heads do not see each other


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", ["medusa", "blockwise-half"])
def test_sample_then_match_gives_the_plain_sampled_text(target, trained, kind, tree):
    prompts = random_prompts(4)
    plain = decode(target, None, prompts, rule="match", sampling=WARM, seed=5)
    run = decode(target, drafter_of(trained[kind], tree), prompts, k=4, batch=3, rule="match", sampling=WARM, seed=5)
    assert tokens_of(run) == tokens_of(plain)
    assert sum(r.accepted for g in run.generations for r in g.rounds) > 3


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", ["speculative", "block", "typical"])
def test_sampled_decoding_runs_under_every_rule(target, trained, rule, tree):
    if tree and rule == "block":
        with pytest.raises(UsageError, match="block verification is for chains"):
            decode(target, drafter_of(trained["medusa"], tree), random_prompts(1), rule=rule, sampling=WARM)
        return
    run = decode(target, drafter_of(trained["medusa-half"], tree), random_prompts(3), batch=3, rule=rule, sampling=WARM)
    assert all(len(g.tokens) == 24 for g in run.generations if g.finish_reason == "length")
    assert sum(r.accepted for g in run.generations for r in g.rounds) > 3


def test_a_tree_keeps_to_its_nodes_and_every_row_to_its_depth(trained):
    heads = trained["blockwise-half"]
    drafter = fed(drafter_of(heads, tree=True), torch.randn(4, H))
    rows = [Row([1, 2], i) for i in range(4)]
    for nodes in (1, 5, 16, 40):
        draft = drafter.propose(make_round(rows, [1, 4, 0, 2], nodes=nodes))
        assert draft.tokens.shape[1] <= nodes
        assert draft.probabilities is None
        assert draft.siblings == "distinct"
        for row, limit in enumerate([1, 4, 0, 2]):
            count = int(draft.counts[row])
            depths = draft.tree.depths[row, 1:].tolist()
            assert depths == sorted(depths)
            assert all(d <= limit for d in depths[:count])
            assert all(d > limit for d in depths[count:])
            parents = draft.tree.parents[row].tolist()
            named = list(zip(parents, draft.tokens[row].tolist(), strict=True))
            assert len(set(named)) == len(named)  # no two siblings are the same token
        assert int(draft.counts[1]) == draft.tokens.shape[1] > 0


def test_the_whole_node_budget_is_spent_where_the_depth_is_limited(trained):
    """Near the end of a text the tree grows wide instead of deep."""
    drafter = fed(drafter_of(trained["medusa"], tree=True), torch.randn(1, H))
    draft = drafter.propose(make_round([Row([1, 2], 0)], [1], nodes=6))
    assert draft.counts.tolist() == [6]
    assert draft.tree.depths[0].tolist() == [0] + [1] * 6


def test_a_tree_accepts_more_than_a_chain_of_the_same_heads(target, trained):
    prompts = random_prompts(5)
    chain = decode(target, drafter_of(trained["medusa"]), prompts, k=4, batch=1)
    tree = decode(target, drafter_of(trained["medusa"], tree=True), prompts, k=24, batch=1)
    assert tree.target_forwards < chain.target_forwards


def test_heads_without_measured_accuracies_still_grow_a_tree(target):
    heads = BlockwiseHeads(BlockwiseConfig(H, V, inner_size=8, heads=3))
    heads.bind(target.model.embedding, target.model.head_rows(None))
    draft = fed(drafter_of(heads, tree=True), torch.randn(1, H)).propose(make_round([Row([1, 2], 0)], [9], nodes=12))
    assert draft.tokens.shape == (1, 12)
    table = usual_accuracy(3, 10)
    assert all(sum(row) < 1 for row in table)
    assert table[0][0] > table[0][1] > table[1][1]


def test_rows_keep_their_own_states_when_they_move(trained):
    drafter = fed(drafter_of(trained["medusa"]), torch.randn(3, H))
    rows = [Row([1, 2], i) for i in range(3)]
    before = drafter.propose(make_round(rows, [4] * 3)).tokens
    drafter.move(2, 0)
    after = drafter.propose(make_round(rows[:2], [4] * 2)).tokens
    assert after.tolist() == [before[2].tolist(), before[1].tolist()]


def test_the_last_accepted_node_of_a_tree_is_the_next_start(trained):
    drafter = drafter_of(trained["medusa"], tree=True)
    drafter.start(2, 64)
    states = torch.randn(2, 6, H)
    path = torch.tensor([[0, 2, 5, 0], [0, 0, 0, 0]])
    drafter.keep([Row([1], 0), Row([1], 1)], Kept([2, 0], path, states))
    torch.testing.assert_close(drafter.state, torch.stack([states[0, 5], states[1, 0]]))


def mlp(*, steps: int = 3, tie: bool = False) -> MlpSpeculator:
    module = MlpSpeculator(MlpConfig(H, 24, V, steps, tie_weights=tie, scale_input=True))
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return module.eval().requires_grad_(False)


@pytest.mark.parametrize("tie", [False, True])
def test_the_mlp_speculator_drafts_each_token_from_those_before_it(target, tie):
    module = mlp(tie=tie)
    drafter = MlpDrafter(mlp(tie=tie), layers=LAYERS, target_vocab=V)
    propose, checked = drafter.propose, []

    def spy(round_: Round):
        draft = propose(round_)
        for index, row in enumerate(round_.rows):
            state = module.start(reference_states(target, row.tokens[:-1])[-1])
            token = torch.tensor(row.tokens[-1])
            for place in range(int(draft.counts[index])):
                state = module.advance(place, state, token)
                token = module.logits(place, state).argmax()
                assert draft.tokens[index, place] == token
                checked.append(place)
        assert draft.steps == draft.tokens.shape[1]
        return draft

    drafter.propose = spy
    prompts = random_prompts(4)
    run = decode(target, drafter, prompts, k=5, batch=3)
    assert tokens_of(run) == tokens_of(decode(target, None, prompts))
    assert max(checked) == 2  # never more than n_predict


@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
def test_the_mlp_speculator_samples_under_every_rule(target, rule):
    drafter = MlpDrafter(mlp(), layers=LAYERS, target_vocab=V)
    prompts = random_prompts(4)
    run = decode(target, drafter, prompts, k=3, batch=3, rule=rule, sampling=WARM)
    if rule == "match":
        assert tokens_of(run) == tokens_of(decode(target, None, prompts, rule="match", sampling=WARM))
