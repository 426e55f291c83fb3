"""Trees drafted by models: lossless, of the draft's true distributions, on a cache that holds the text and no more."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import decode, drafter_of, random_prompts, requests_of, tokens_of
from test_decoder_cache import assert_prefix_equals_prefill
from tree_helpers import g_test

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.exit_drafter import exit_drafter
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.sampling import penalize, probabilities
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.decoding.tree import TokenTree
from spectune.decoding.tree_drafter import TreeModelDrafter, vocabulary_of
from spectune.decoding.tree_plans import DynamicPlan, StaticPlan
from spectune.decoding.tree_shapes import SequoiaTable
from spectune.decoding.tree_size import TreeSize, default_growth
from spectune.engines.engine import Request
from spectune.errors import UsageError
from spectune.heads.exit import ExitConfig, ExitHead
from spectune.sweeping.cell import Sampling

HOT = Sampling(temperature=1.0)
SHAPED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)


class Planned:
    """The best tree for made-up chances; or one given shape."""

    notes = ()

    def __init__(self, *parents: int) -> None:
        self.given = parents

    def parents(self, round_, slots):
        if self.given:
            return self.given
        depth = min(4, round_.nodes)
        return SequoiaTable((0.4, 0.25, 0.15), round_.nodes, depth).shape(round_.nodes, depth).parents


PLANS = {
    "dynamic": DynamicPlan,
    "sequoia": lambda: StaticPlan(Planned(), "without_replacement"),
    "specinfer": lambda: StaticPlan(Planned(), "iid"),
}
STATIC = ["sequoia", "specinfer"]


@pytest.fixture(scope="module")
def near_folder(tmp_path_factory, tiny_folder):
    """The target with a little noise on its weights: a draft that is often right."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("near")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drafts(tiny_folder, other_folder, near_folder):
    """Draft models by name; layers of the target by the drafter's own name."""
    return {"self": tiny_folder, "other": other_folder, "near": near_folder}


class Spy(TreeModelDrafter):
    """Keeps the rounds it drafted for, with the rows' texts then."""

    def __init__(self, drafter, plan) -> None:
        super().__init__(drafter, plan)
        self.seen = []

    def propose(self, round_):
        draft = super().propose(round_)
        if draft is not None:
            seen = None if round_.history.seen is None else round_.history.seen[: len(round_.rows)].clone()
            q = None if draft.probabilities is None else draft.probabilities.clone()  # the next round takes its place
            tree = TokenTree(draft.tree.parents.clone(), draft.tree.levels)
            draft = draft._replace(tokens=draft.tokens.clone(), counts=draft.counts.clone(), probabilities=q, tree=tree)
            self.seen.append((draft, [list(row.tokens) for row in round_.rows], round_.limits, seen))
        return draft


def spy_of(loaded, name, plan="dynamic") -> Spy:
    return Spy(drafter_of(loaded, name), PLANS[plan]() if isinstance(plan, str) else plan)


def accepted(run) -> int:
    return sum(r.accepted for g in run.generations for r in g.rounds)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("draft", ["self", "near", "other"])
def test_greedy_output_equals_plain_decoding(tiny, drafts, draft, plan, batch):
    prompts = random_prompts(4)
    plain = tokens_of(decode(tiny, None, prompts, k=0, max_new_tokens=14))
    for k in range(1, 17) if draft == "near" and batch == 3 else (1, 3, 8, 16):
        run = decode(tiny, spy_of(tiny, drafts[draft], plan), prompts, k=k, batch=batch, max_new_tokens=14)
        assert tokens_of(run) == plain
        if draft == "self":
            # A target's own likeliest token is among the first children of every tree.
            assert all(r.accepted > 0 for g in run.generations for r in g.rounds if r.drafted)
        if draft == "near":
            assert accepted(run) > 0


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["early-exit:1", "layer-skip:0"])
def test_trees_of_the_targets_own_layers_leave_its_cache_as_it_should_be(tiny, name, plan):
    prompts = random_prompts(5)
    plain = tokens_of(decode(tiny, None, prompts, k=0, max_new_tokens=40, stop=StopRule()))

    def check(decoder, _trace) -> None:
        assert decoder.drafter.store is decoder.store
        for index, slot in enumerate(decoder.slots):
            assert_prefix_equals_prefill(decoder.target, decoder.store, index, slot.row.tokens[:-1])

    for k, batch in ((5, 1), (16, 3)):
        run = decode(
            tiny, spy_of(tiny, name, plan), prompts, k=k, batch=batch, max_new_tokens=40, stop=StopRule(),
            on_round=check,
        )  # fmt: skip
        assert tokens_of(run) == plain


@pytest.mark.parametrize("sampling", [HOT, SHAPED], ids=["hot", "shaped"])
@pytest.mark.parametrize("plan", PLANS)
def test_matched_sampling_equals_plain_sampling_token_by_token(tiny, drafts, plan, sampling):
    prompts = random_prompts(5)
    plain = tokens_of(decode(tiny, None, prompts, k=0, batch=2, sampling=sampling))
    kept = 0
    for draft in drafts.values():
        for k, batch in ((1, 1), (7, 3), (16, 5)):
            run = decode(
                tiny, spy_of(tiny, draft, plan), prompts, k=k, batch=batch, rule="match", sampling=sampling
            )  # fmt: skip
            assert tokens_of(run) == plain
            kept += accepted(run)
    assert kept > 0


@pytest.mark.parametrize("plan", PLANS)
def test_a_repetition_penalty_keeps_greedy_decoding_lossless(tiny, drafts, plan):
    prompts = random_prompts(5)
    sampling = Sampling(repetition_penalty=1.7)
    plain = tokens_of(decode(tiny, None, prompts, k=0, sampling=sampling))
    run = decode(tiny, spy_of(tiny, drafts["self"], plan), prompts, k=9, batch=2, sampling=sampling)
    assert tokens_of(run) == plain
    assert all(r.accepted > 0 for g in run.generations for r in g.rounds if r.drafted)


def rounds_of(run):
    return [[(r.drafted, r.accepted, r.emitted, r.nodes) for r in g.rounds] for g in run.generations]


@pytest.mark.parametrize("draft", ["near", "other"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_dynamic_tree_of_width_one_is_the_greedy_chain(tiny, drafts, draft, batch):
    prompts = random_prompts(5)
    line = DynamicPlan(lambda nodes: TreeSize(1, nodes))
    for k in (1, 4, 9):
        chain = decode(tiny, drafter_of(tiny, drafts[draft]), prompts, k=k, batch=batch)
        tree = decode(tiny, spy_of(tiny, drafts[draft], line), prompts, k=k, batch=batch)
        assert tokens_of(tree) == tokens_of(chain)
        assert rounds_of(tree) == rounds_of(chain)
        assert [t.draft_steps for t in tree.trace] == [t.draft_steps for t in chain.trace]


@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
@pytest.mark.parametrize("sampling", [HOT, SHAPED, Sampling()], ids=["hot", "shaped", "greedy"])
def test_a_static_shape_of_width_one_is_the_chain_with_its_coins(tiny, drafts, sampling, siblings):
    prompts = random_prompts(5)
    kept = 0
    for draft in ("near", "other"):
        for k in (1, 4, 9):
            line = StaticPlan(Planned(*range(k)), siblings)
            chain = decode(tiny, drafter_of(tiny, drafts[draft]), prompts, k=k, batch=3, sampling=sampling)
            tree = decode(tiny, spy_of(tiny, drafts[draft], line), prompts, k=k, batch=3, sampling=sampling)
            assert tokens_of(tree) == tokens_of(chain)
            assert rounds_of(tree) == rounds_of(chain)
            kept += accepted(tree)
    assert kept > 0


def fresh_logits(drafter: TreeModelDrafter, tokens: list[int]) -> torch.Tensor:
    """[D] logits behind a text, without any cache or tree."""
    step = Step(0, (0,), len(tokens), drafter.model.device)
    logits = drafter.model.forward(torch.tensor([tokens]), step, KVStore(1, len(tokens)), last_only=True)
    return logits[0, -1, : drafter.shared_vocab]


def nodes_with_paths(draft, texts):
    """(row, node, path behind the text, token ids of the node's children in order) for every node that counts."""
    tree = draft.tree
    for row in range(len(texts)):
        count = int(draft.counts[row])
        paths = [[]]
        for j in range(count):
            paths.append([*paths[int(tree.parents[row, j])], int(draft.tokens[row, j])])
        for node, path in enumerate(paths):
            children = [int(draft.tokens[row, j]) for j in range(count) if int(tree.parents[row, j]) == node]
            yield row, node, path, children


def exit_of(loaded) -> ModelDrafter:
    """A trained exit with a draft vocabulary of every third id."""
    ids = torch.arange(1, 128, 3)
    torch.manual_seed(2)
    head = ExitHead(ExitConfig(1, 64, 128, rank=8), ids)
    torch.nn.init.normal_(head.up.weight)
    return exit_drafter(loaded.model, head)


@pytest.mark.parametrize("plan", STATIC)
@pytest.mark.parametrize("draft", ["near", "other", "early-exit:1", "exit"])
@pytest.mark.parametrize("sampling", [HOT, SHAPED], ids=["hot", "shaped"])
def test_every_node_states_the_distribution_its_children_were_drawn_from(tiny, drafts, draft, plan, sampling):
    inner = exit_of(tiny) if draft == "exit" else drafter_of(tiny, drafts.get(draft, draft))
    drafter = Spy(inner, PLANS[plan]())
    decode(tiny, drafter, random_prompts(5), k=11, batch=3, sampling=sampling, stop=StopRule())
    depths = set()
    for draft_, texts, limits, seen in drafter.seen:
        assert draft_.siblings == {"sequoia": "without_replacement", "specinfer": "iid"}[plan]
        q = draft_.probabilities
        for row, node, path, children in nodes_with_paths(draft_, texts):
            assert len(path) <= limits[row]
            if not children:
                continue
            logits = fresh_logits(drafter, texts[row] + path)
            ids = drafter.vocabulary.draft_ids
            if seen is not None:
                mask = seen[row].clone()
                mask[path] = True
                logits = penalize(
                    logits, mask[: len(logits)] if ids is None else mask[ids], sampling.repetition_penalty
                )
            expected = drafter.vocabulary.widen(probabilities(logits, sampling))
            torch.testing.assert_close(q[row, node], expected, atol=1e-4, rtol=1e-3)
            assert (expected[children] > 0).all()
            if plan == "sequoia":
                assert len(set(children)) == len(children)
            depths.add(len(path))
    assert max(depths) >= 2


def test_independent_children_may_be_equal(tiny, drafts):
    drafter = spy_of(tiny, drafts["other"], "specinfer")
    decode(tiny, drafter, random_prompts(5), k=11, sampling=Sampling(temperature=0.5), stop=StopRule())
    assert any(len(set(c)) < len(c) for d, texts, _, _ in drafter.seen for *_, c in nodes_with_paths(d, texts))


@pytest.mark.parametrize("plan", STATIC)
@pytest.mark.parametrize("rule", ["greedy", "match", "typical"])
def test_children_are_the_likeliest_tokens_where_the_rule_looks_at_tokens_only(tiny, drafts, plan, rule):
    sampling = Sampling() if rule == "greedy" else HOT
    drafter = spy_of(tiny, drafts["near"], plan)
    decode(tiny, drafter, random_prompts(4), k=11, batch=2, rule=rule, sampling=sampling, stop=StopRule())
    for draft, texts, _, _ in drafter.seen:
        assert draft.probabilities is None
        assert draft.siblings == "distinct"
        for row, _, path, children in nodes_with_paths(draft, texts):
            best = fresh_logits(drafter, texts[row] + path).topk(max(1, len(children))).indices
            assert children in ([], best.tolist())


@pytest.mark.parametrize("draft", ["near", "other", "early-exit:1", "exit"])
def test_dynamic_trees_hold_the_drafts_likeliest_paths(tiny, drafts, draft):
    """Against EAGLE-2's selection written out naively, on fresh forwards."""
    inner = exit_of(tiny) if draft == "exit" else drafter_of(tiny, drafts.get(draft, draft))
    drafter = Spy(inner, DynamicPlan(lambda nodes: TreeSize(3, 4)))
    decode(tiny, drafter, random_prompts(3), k=9, batch=3, max_new_tokens=12, sampling=HOT, stop=StopRule())
    for proposal, texts, limits, _ in drafter.seen:
        assert proposal.siblings == "distinct"
        found = {row: set() for row in range(len(texts))}
        for row, _, path, _ in nodes_with_paths(proposal, texts):
            found[row].add(tuple(path))
        for row, text in enumerate(texts):
            assert found[row] - {()} == likeliest_paths(drafter, text, 3, min(4, limits[row]), 9)


def likeliest_paths(drafter, text, width, depth, nodes) -> set[tuple[int, ...]]:
    ids = drafter.vocabulary.draft_ids
    frontier, candidates = [((), 0.0)], []
    for _ in range(depth):
        level = []
        for path, score in frontier:
            log_p = fresh_logits(drafter, text + list(path)).log_softmax(-1)
            for value, place in zip(*(x.tolist() for x in log_p.topk(width)), strict=True):
                level.append(((*path, place if ids is None else int(ids[place])), score + value))
        candidates += level
        frontier = sorted(level, key=lambda c: -c[1])[:width]
    return {path for path, _ in sorted(candidates, key=lambda c: -c[1])[:nodes]}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "hot"])
def test_nothing_stands_behind_a_stop_token(tiny, drafts, plan, sampling):
    stop = StopRule(frozenset(range(0, 128, 4)))
    drafter = spy_of(tiny, drafts["near"], plan)
    prompts = random_prompts(12)
    plain = tokens_of(decode(tiny, None, prompts, k=0, stop=stop))
    run = decode(tiny, drafter, prompts, k=12, batch=3, sampling=sampling, stop=stop)
    stops = 0
    for draft, texts, _, _ in drafter.seen:
        for _, _, path, children in nodes_with_paths(draft, texts):
            assert not stop.token_ids & set(path[:-1])
            if path and path[-1] in stop.token_ids:
                assert not children
                stops += 1
    assert stops > 10
    if sampling.greedy:
        assert tokens_of(run) == plain


@pytest.mark.parametrize("plan", STATIC)
def test_children_stop_where_the_distribution_is_used_up(tiny, drafts, plan):
    """Two tokens are left by top-k: a third draw without replacement has nothing to draw from."""
    sampling = Sampling(temperature=1.0, top_k=2)
    drafter = Spy(drafter_of(tiny, drafts["near"]), StaticPlan(Planned(0, 0, 0, 0, 1, 1, 1, 3), PLANS[plan]().siblings))
    decode(tiny, drafter, random_prompts(4), k=8, batch=2, sampling=sampling, stop=StopRule())
    widths = Counter(len(c) for d, texts, _, _ in drafter.seen for *_, c in nodes_with_paths(d, texts))
    assert max(widths) == (2 if plan == "sequoia" else 4)
    assert widths[2] > 0 or plan == "specinfer"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("draft", ["near", "other", "self"])
def test_the_draft_cache_equals_a_fresh_prefill_after_every_round(tiny, drafts, draft, plan, k, batch):
    before = {}

    def check(decoder, _trace) -> None:
        drafter = decoder.drafter
        for index, slot in enumerate(decoder.slots):
            tokens, seed = slot.row.tokens, slot.row.seed
            # All that was known when the round began, and nothing of the tree.
            assert drafter.cached[index] == before.get(seed, slot.generation.prompt_tokens + 1)
            before[seed] = len(tokens)
            assert_prefix_equals_prefill(drafter.model, drafter.store, index, tokens[: drafter.cached[index]])

    sampling = HOT if k == 4 else Sampling()
    decode(
        tiny, spy_of(tiny, drafts[draft], plan), random_prompts(5), k=k, batch=batch, max_new_tokens=20,
        stop=StopRule(), on_round=check, sampling=sampling,
    )  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_a_round_is_one_target_forward_and_one_draft_forward_per_level(tiny, drafts, plan, monkeypatch):
    drafter = spy_of(tiny, drafts["near"], plan)
    calls = Counter()

    def count(model, name):
        forward = model.forward

        def counted(*args, **kwargs):
            calls[name] += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", counted)

    count(tiny.model, "target")
    count(drafter.model, "draft")
    run = decode(tiny, drafter, random_prompts(3), k=9, batch=1, max_new_tokens=30, stop=StopRule())
    assert calls["target"] == 3 + len(run.trace)  # 3 prefills
    assert calls["draft"] == 3 + sum(t.draft_steps for t in run.trace)
    most = default_growth(9).depth if plan == "dynamic" else 3  # levels below the root of the planned shape
    assert max(t.draft_steps for t in run.trace) == most
    assert all(t.draft_steps >= t.drafted for t in run.trace)


@pytest.mark.parametrize("plan", PLANS)
def test_a_draft_of_shorter_context_falls_silent_and_nothing_else_changes(tiny, tmp_path, plan):
    prompts = random_prompts(5)  # of 1 to 40 tokens
    plain = tokens_of(decode(tiny, None, prompts, k=0, max_new_tokens=60, stop=StopRule()))
    short = save_tiny(tmp_path, max_positions=24)
    for k, batch in ((3, 1), (12, 3), (12, 5)):
        drafter = spy_of(tiny, short, plan)
        run = decode(tiny, drafter, prompts, k=k, batch=batch, max_new_tokens=60, stop=StopRule())
        assert tokens_of(run) == plain
        rounds = [r for g in run.generations for r in g.rounds]
        assert any(r.accepted == r.drafted > 0 for r in rounds)
        for draft, texts, _, _ in drafter.seen:
            for row, _, path, _ in nodes_with_paths(draft, texts):
                # The last token is drafted by position 23 and stands behind it.
                assert not path or len(texts[row]) + len(path) <= 25


@pytest.mark.parametrize("plan", PLANS)
def test_the_targets_context_ends_a_request_as_in_plain_decoding(tmp_path, plan):
    loaded = load_tiny(save_tiny(tmp_path, max_positions=32))
    prompts = random_prompts(4, lengths=(31, 29, 20, 5))
    plain = decode(loaded, None, prompts, k=0, max_new_tokens=60, stop=StopRule())
    for k, batch in ((4, 1), (16, 4)):
        run = decode(
            loaded, spy_of(loaded, tmp_path, plan), prompts, k=k, batch=batch, max_new_tokens=60, stop=StopRule()
        )  # fmt: skip
        assert tokens_of(run) == tokens_of(plain)
        assert {g.finish_reason for g in run.generations} == {"context"}


def test_a_draft_that_slept_catches_up(tiny, drafts):
    """With three rows active nothing is drafted; the last rows draft again, far behind."""
    prompts = random_prompts(3)
    drafter = spy_of(tiny, drafts["self"])
    decoder = Decoder(tiny.model, drafter, DecodeSettings(KSchedule(((2, 8),))), StopRule())
    requests = [
        Request(r.id, r.token_ids, n, r.seed) for r, n in zip(requests_of(prompts, 1), (40, 80, 80), strict=True)
    ]
    run = decoder.decode(requests, 3)
    plain = Decoder(tiny.model, None, DecodeSettings(KSchedule.constant(0)), StopRule()).decode(requests, 3)
    assert tokens_of(run) == tokens_of(plain)
    late = [r for g in run.generations for r in g.rounds if r.drafted]
    assert late
    assert all(r.accepted > 0 for r in late)


@pytest.mark.parametrize("plan", STATIC)
def test_the_seed_decides_and_batch_mates_do_not(tiny, drafts, plan):
    prompts = random_prompts(6)
    decoder = Decoder(
        tiny.model, spy_of(tiny, drafts["near"], plan), DecodeSettings(KSchedule.constant(6), "speculative", HOT),
        StopRule(),
    )  # fmt: skip
    requests = requests_of(prompts, 24, seed=17)
    alone = [decoder.decode([r], 1).generations[0].tokens for r in requests]
    assert tokens_of(decoder.decode(requests, 4)) == alone
    assert tokens_of(decoder.decode(requests_of(prompts, 24, seed=18), 4)) != alone


@pytest.mark.parametrize("plan", STATIC)
def test_a_draft_equal_to_the_target_is_always_accepted_when_sampling(tiny, drafts, plan):
    run = decode(
        tiny, spy_of(tiny, drafts["self"], plan), random_prompts(3), k=9, batch=3, max_new_tokens=64, sampling=HOT,
        stop=StopRule(),
    )  # fmt: skip
    rounds = [r for g in run.generations for r in g.rounds]
    # The first child always passes: every round goes down the eldest branch as far as that reaches.
    assert all(r.accepted > 0 for r in rounds if r.drafted)


# The law of sampled trees, on a target of 8 tokens with exactly known probabilities.

DRAWS = 6000
SHAPE = (0, 0, 0, 1, 1, 2)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A target, a draft model for it, and the exact law [8, 8, 8] of tokens 1 to 3 behind the prompt's first."""
    from transformers import AutoModelForCausalLM

    settings = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    folder = save_tiny(tmp_path_factory.mktemp("t"), seed=3, **settings)
    target = load_tiny(folder)
    draft = drafter_of(target, save_tiny(tmp_path_factory.mktemp("d"), seed=4, **settings))
    outcomes = list(itertools.product(range(8), repeat=4))
    ids = torch.tensor([[3, 5, *o] for o in outcomes])
    with torch.inference_mode():
        log_p = AutoModelForCausalLM.from_pretrained(folder)(ids).logits.double().log_softmax(-1)[:, 1:-1]
    law = log_p.gather(-1, torch.tensor(outcomes)[..., None]).squeeze(-1).sum(1).exp()
    return target, draft, law.reshape(8, 8, 8, 8).sum(0)  # over the token that comes from the prefill


class Mislabelled(TreeModelDrafter):
    """Says of its children that they were drawn in another way than they were."""

    def propose(self, round_):
        draft = super().propose(round_)
        other = {"iid": "without_replacement", "without_replacement": "iid"}
        return draft and draft._replace(siblings=other[draft.siblings])


def drawn(toy, drafter) -> torch.Tensor:
    """[8, 8, 8] how often tokens 1 to 3 came out together."""
    target, *_ = toy
    decoder = Decoder(
        target.model, drafter, DecodeSettings(KSchedule.constant(len(SHAPE)), "speculative", HOT), StopRule()
    )
    run = decoder.decode([Request(str(i), (3, 5), 4, i) for i in range(DRAWS)], 3000)
    assert accepted(run) > 0.3 * DRAWS
    tokens = torch.tensor(tokens_of(run))
    return torch.bincount(tokens[:, 1] * 64 + tokens[:, 2] * 8 + tokens[:, 3], minlength=512).reshape(8, 8, 8)


@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_sampled_trees_draw_from_the_targets_law(toy, siblings):
    """Seeds are fixed, so the result is too; 4 deviations of a true sample would be one seed in ten thousand."""
    _, draft, law = toy
    plan = StaticPlan(Planned(*SHAPE), siblings)
    seen = drawn(toy, TreeModelDrafter(draft, plan))
    for reach in ((2, 1), (2,), ()):  # the first token, the first two, all three
        assert g_test(seen.sum(reach) if reach else seen, law.sum(reach) if reach else law) < 4


@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_the_law_test_notices_the_wrong_rule(toy, siblings):
    _, draft, law = toy
    plan = StaticPlan(Planned(*SHAPE), siblings)
    assert g_test(drawn(toy, Mislabelled(draft, plan)).sum(2), law.sum(2)) > 8


def test_trees_refuse_block_verification(tiny, tiny_folder):
    for plan in PLANS:
        with pytest.raises(UsageError, match="block verification is for chains"):
            decode(tiny, spy_of(tiny, tiny_folder, plan), [[3, 4]], rule="block", sampling=HOT)


def test_no_shape_means_no_draft(tiny, tiny_folder):
    class Nothing(Planned):
        def parents(self, round_, slots):
            return ()

    run = decode(tiny, spy_of(tiny, tiny_folder, StaticPlan(Nothing(), "iid")), random_prompts(2))
    assert accepted(run) == 0
    assert tokens_of(run) == tokens_of(decode(tiny, None, random_prompts(2), k=0))


def test_the_default_search_grows_with_the_budget_and_is_never_wasted():
    sizes = [default_growth(nodes) for nodes in range(1, 200)]
    assert sizes[59] == TreeSize(8, 8)
    assert all(2 <= size.width <= 10 for size in sizes)
    for nodes, size in enumerate(sizes, 1):
        # All levels together have at least as many candidates as nodes are wanted, unless the depth is cut.
        assert size.width + (size.depth - 1) * size.width**2 >= nodes


def test_vocabularies_of_drafters(tiny):
    whole = vocabulary_of(drafter_of(tiny, "early-exit:1"))
    assert whole.draft_ids is None
    trimmed = vocabulary_of(exit_of(tiny))
    assert trimmed.tokens(torch.tensor([0, 2])).tolist() == [1, 7]
