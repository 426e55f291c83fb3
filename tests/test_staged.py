"""Staged drafting: the output stays the target's, the caches of both stages hold kept text, no coin is tossed twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import decode, drafter_of, random_prompts, reference, requests_of, tokens_of
from eagle_helpers import randomize, tiny_config
from test_decoder_cache import assert_prefix_equals_prefill
from test_decoder_sampling import SAMPLINGS, joint

from spectune.decoding import random as coins
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.eagle_drafter import EagleDrafter
from spectune.decoding.schedule import KSchedule
from spectune.decoding.staged import StagedDrafter, stage_names, staged
from spectune.decoding.stages import EagleStage, ModelStage
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.errors import UsageError
from spectune.heads.eagle import EagleHead, default_taps
from spectune.sweeping.cell import Sampling

NEW = 16
SHAPES = ((1, 1), (2, 3), (3, 1), (4, 3), (5, 1), (8, 3))  # K and B
STAGES = {
    "lookup, wrong draft": ("ngram", "other"),
    "lookup, right draft": ("ngram", "self"),
    "wrong draft, right draft": ("other", "self"),
    "right draft, wrong draft": ("self", "other"),
    "lookup, own layers": ("ngram", "early-exit:1"),
    "draft, own layers": ("other", "layer-skip:0"),
    "own layers, draft": ("early-exit:1", "other"),
    "own layers twice": ("layer-skip:0", "early-exit:1"),
    "three stages": ("ngram", "other", "self"),
    "three stages with own layers": ("ngram", "early-exit:1", "other"),
}


@pytest.fixture(scope="module")
def prompts():
    """Random texts, and one that repeats itself, for lookup."""
    return [*random_prompts(5), [9, 8, 7, 9, 8, 7, 9, 8, 7, 9, 8]]


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    return [reference(tiny, p, NEW) for p in prompts]


@pytest.fixture(scope="module")
def build(tiny, tiny_folder, other_folder):
    """Stage names -> a staged drafter for the tiny target."""
    folders = {"self": tiny_folder, "other": other_folder}
    return lambda names: staged([drafter_of(tiny, folders.get(name, name)) for name in names])


@pytest.mark.parametrize("names", STAGES.values(), ids=STAGES)
def test_greedy_output_equals_generate(tiny, build, prompts, expected, names):
    for k, batch in SHAPES:
        run = decode(tiny, build(names), prompts, k=k, batch=batch, max_new_tokens=NEW)
        assert tokens_of(run) == expected
        assert sum(t.drafted for t in run.trace) > 0


@pytest.fixture(scope="module")
def sampled(tiny, prompts):
    """Plain sampling, by its settings."""
    return {
        name: tokens_of(decode(tiny, None, prompts, k=0, batch=3, max_new_tokens=NEW, sampling=sampling))
        for name, sampling in SAMPLINGS.items()
    }


@pytest.mark.parametrize("names", STAGES.values(), ids=STAGES)
def test_sample_then_match_is_token_identical_to_plain_sampling(tiny, build, prompts, sampled, names):
    for (name, sampling), (k, batch) in zip(SAMPLINGS.items(), SHAPES, strict=True):
        run = decode(tiny, build(names), prompts, k=k, batch=batch, max_new_tokens=NEW, rule="match", sampling=sampling)
        assert tokens_of(run) == sampled[name]


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_the_seed_decides_and_nothing_else_does(tiny, build, prompts, rule):
    drafter = build(("ngram", "other"))
    settings = DecodeSettings(KSchedule.constant(4), rule, Sampling(temperature=0.8))
    decoder = Decoder(tiny.model, drafter, settings, StopRule())

    def run(requests: list[Request], batch: int) -> dict[str, list[int]]:
        return {g.id: g.tokens for g in decoder.decode(requests, batch).generations}

    requests = requests_of(prompts, NEW, seed=17)
    alone = {r.id: run([r], 1)[r.id] for r in requests}
    assert run(requests, 8) == alone
    assert run(requests[::-1], 3) == alone
    assert run(requests_of(prompts, NEW, seed=1007), 8) != alone


@pytest.mark.parametrize("sampling", [SAMPLINGS["temperature"], SAMPLINGS["all"]], ids=["temperature", "all"])
@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
@pytest.mark.parametrize("first", ["ngram", "other", "self"])
def test_a_second_stage_equal_to_the_target_is_always_accepted(tiny, build, prompts, first, rule, sampling):
    """What the second stage draws and what is recorded for it have gone through the target's own settings."""
    drafter = build((first, "self"))
    run = decode(tiny, drafter, prompts, k=5, batch=3, max_new_tokens=40, rule=rule, sampling=sampling, stop=StopRule())
    rounds = [r for g in run.generations for r in g.rounds]
    assert sum(r.accepted for r in rounds) == sum(r.drafted for r in rounds)
    assert {r.drafted for g in run.generations for r in g.rounds[:-1]} == {5}


def test_under_typical_acceptance_the_draft_is_greedy_whatever_stands_in_front(tiny, tiny_folder, build, prompts):
    alone = StagedDrafter(None, ModelStage(drafter_of(tiny, tiny_folder)))
    settings = {"k": 4, "batch": 3, "rule": "typical", "sampling": SAMPLINGS["all"]}
    runs = [decode(tiny, drafter, prompts, **settings) for drafter in (alone, build(("other", "self")))]
    assert tokens_of(runs[0]) == tokens_of(runs[1])
    assert [g.rounds for g in runs[0].generations] == [g.rounds for g in runs[1].generations]


def test_real_runs_draw_from_the_targets_law(tmp_path):
    settings = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    target = load_tiny(save_tiny(tmp_path / "t", seed=3, **settings))
    middle = drafter_of(target, save_tiny(tmp_path / "m", seed=4, **settings))
    small = drafter_of(target, save_tiny(tmp_path / "s", seed=5, **settings))
    prompt, draws = [3, 5], 4000
    for rule in ("speculative", "block"):
        decode_settings = DecodeSettings(KSchedule.constant(3), rule, Sampling(temperature=1.0))
        decoder = Decoder(target.model, staged([small, middle]), decode_settings, StopRule())
        run = decoder.decode([Request(str(i), tuple(prompt), 3, i) for i in range(draws)], 2048)
        tokens = torch.tensor([g.tokens for g in run.generations])
        law = joint(target, prompt, 3)
        for place in range(3):
            seen = torch.bincount(tokens[:, place], minlength=8) / draws
            # 4000 true draws are 0.018 away on average; 0.05 is beyond 1e-6.
            assert 0.5 * (seen - law.sum(dim=[d for d in range(3) if d != place])).abs().sum() < 0.05
        assert sum(r.accepted for g in run.generations for r in g.rounds) > 0


def test_no_coin_is_tossed_for_two_decisions(tiny, build, prompts, monkeypatch):
    tossed: Counter[tuple[int, ...]] = Counter()

    def recording(seed, stream, position, index, fork=coins.fork):
        key = torch.broadcast_tensors(seed, torch.as_tensor(int(stream)), position, index)
        tossed.update(map(tuple, torch.stack([k.reshape(-1) for k in key], 1).tolist()))
        return (((fork(seed, stream, position, index) >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52

    for module in ("random", "drafter", "staged"):
        monkeypatch.setattr(f"spectune.decoding.{module}.uniform", recording)

    def repeats() -> int:
        """One row at a time: the drafter of a batch goes through the coins of rows that are complete, too."""
        tossed.clear()
        for index, prompt in enumerate(prompts):
            drafter = build(("other", "self"))
            decode(tiny, drafter, [prompt], k=6, rule="block", sampling=SAMPLINGS["temperature"], seed=100 * index)
        assert len(tossed) > 500
        return sum(count > 1 for count in tossed.values())

    assert repeats() == 0
    monkeypatch.setattr("spectune.decoding.staged.fork", lambda seeds, *_: seeds)  # the control
    assert repeats() > 50


def check_caches(decoder, _trace) -> None:
    drafter = decoder.drafter
    for index, slot in enumerate(decoder.slots):
        tokens = slot.row.tokens
        assert_prefix_equals_prefill(decoder.target, decoder.store, index, tokens[:-1])
        inner = drafter
        while isinstance(inner, StagedDrafter):
            if isinstance(inner.second, ModelStage):
                cached = inner.second.cached[index]
                assert cached <= len(tokens) - 1
                if not inner.second.shares_target_cache:
                    assert_prefix_equals_prefill(inner.second.model, inner.second.store, index, tokens[:cached])
            inner = inner.first
        if hasattr(inner, "cached"):
            assert inner.cached[index] <= len(tokens) - 1
            assert_prefix_equals_prefill(inner.model, inner.store, index, tokens[: inner.cached[index]])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("names", STAGES.values(), ids=STAGES)
def test_caches_equal_a_fresh_prefill_after_every_round(tiny, build, prompts, names, sampling):
    for k, batch in ((1, 3), (3, 1), (8, 3)):
        decode(
            tiny, build(names), prompts, k=k, batch=batch, max_new_tokens=NEW, stop=StopRule(), sampling=sampling,
            on_round=check_caches,
        )  # fmt: skip


@pytest.mark.parametrize("names", [("layer-skip:0", "self"), ("self", "layer-skip:0", "self")], ids=">".join)
def test_what_the_target_has_verified_is_never_overwritten_while_its_neighbours_draft_on(
    tiny, build, prompts, monkeypatch, names
):
    """A row that may draft nothing rides along; the skipping stage's keys for its known text are not the target's."""
    drafter = build(names)
    decoder = Decoder(tiny.model, drafter, DecodeSettings(KSchedule.constant(16)), StopRule())
    propose = drafter.propose

    def verified(round_) -> list[torch.Tensor]:
        keys = decoder.store.keys.values()
        return [layer[i, :, : row.length - 1].clone() for i, row in enumerate(round_.rows) for layer in keys]

    def watched(round_):
        before = verified(round_)
        draft = propose(round_)
        assert all(torch.equal(old, new) for old, new in zip(before, verified(round_), strict=True))
        resting.append(0 in round_.limits)
        return draft

    resting: list[bool] = []
    monkeypatch.setattr(drafter, "propose", watched)
    decoder.decode([Request(str(i), tuple(p), 2 + 18 * (i % 2), i) for i, p in enumerate(prompts)], 3)
    assert any(resting)


def test_the_second_stages_cache_lags_by_one_token_and_no_more(tiny, build, prompts):
    """The last token of a draft that was kept whole is in no forward; a lasting hole would be a second prefill."""
    drafter = build(("ngram", "self"))
    lags = Counter()

    def look(decoder, _trace) -> None:
        lags.update(slot.row.length - drafter.second.cached[index] for index, slot in enumerate(decoder.slots))

    decode(tiny, drafter, prompts, k=4, batch=2, max_new_tokens=40, on_round=look)
    assert set(lags) <= {1, 2}


def test_what_own_layers_propose_between_the_stages_is_what_they_would_say_of_that_text(tiny, tiny_folder, prompts):
    """A first stage on the target's cache keeps account of keys the target has not verified: no hole is left there.

    Both stages are the whole target here, so each guess must be right.
    """
    own = drafter_of(tiny, "layer-skip:1")
    own.model = tiny.model  # every layer, on the target's cache
    drafter = staged([own, drafter_of(tiny, tiny_folder)])
    run = decode(tiny, drafter, prompts, k=8, max_new_tokens=50, stop=StopRule())
    full = [t for t in run.trace if t.drafted == 8]
    # 4 guesses and a token behind them, then 2 and one: two forwards of the second stage, six of the first.
    assert {t.draft_steps for t in full} == {8}


def test_steps_count_the_forwards_of_both_stages(tiny, build, prompts, monkeypatch):
    drafter = build(("other", "self"))
    models = {"first": drafter.first.model, "second": drafter.second.model}
    ran: Counter[str] = Counter()
    for name, model in models.items():

        def forward(*args, name=name, run=model.forward, **options):
            ran[name] += 1
            return run(*args, **options)

        monkeypatch.setattr(model, "forward", forward)
    run = decode(tiny, drafter, prompts[:1], k=4, max_new_tokens=NEW, stop=StopRule())
    prefills = {"first": 1, "second": 1}
    assert sum(t.draft_steps for t in run.trace) <= ran.total() - sum(prefills.values())
    assert ran["second"] - 1 < sum(t.draft_steps for t in run.trace)


def test_a_lookup_that_is_right_saves_forwards_of_the_second_stage(tiny, tiny_folder):
    """The target repeats itself here: with lookup the draft model runs less than once per drafted token."""
    prompt = [5, 6, 7] * 8
    plain = decode(tiny, drafter_of(tiny, tiny_folder), [prompt], k=8, max_new_tokens=64, stop=StopRule())
    drafter = staged([drafter_of(tiny, "ngram"), drafter_of(tiny, tiny_folder)])
    run = decode(tiny, drafter, [prompt], k=8, max_new_tokens=64, stop=StopRule())
    assert tokens_of(run) == tokens_of(plain)
    steps, alone = (sum(t.draft_steps for t in r.trace) for r in (run, plain))
    assert steps <= alone


def test_vocabularies_of_other_widths_are_no_obstacle(tmp_path):
    """The first stage may propose ids that the second lacks, and the target has more than both."""
    target = load_tiny(save_tiny(tmp_path / "t", vocab_size=128))
    second = load_tiny(save_tiny(tmp_path / "m", vocab_size=100, seed=1))
    from spectune.decoding.model_drafter import ModelDrafter

    def build() -> StagedDrafter:
        first = drafter_of(target, "ngram")
        return staged([first, ModelDrafter(second.model, shared_vocab=90, target_vocab=128)])

    prompts = [[120, 121, 122, 120, 121, 122, 120, 121], *random_prompts(3)]
    for sampling, rule in ((Sampling(), "greedy"), (SAMPLINGS["all"], "match")):
        plain = tokens_of(decode(target, None, prompts, k=0, sampling=sampling))
        run = decode(target, build(), prompts, k=4, batch=2, rule=rule, sampling=sampling)
        assert tokens_of(run) == plain
    run = decode(target, build(), prompts, k=4, batch=2, sampling=SAMPLINGS["all"])
    assert sum(r.drafted for g in run.generations for r in g.rounds) > 0


@pytest.mark.parametrize("graphs", ["0", "1"])
@pytest.mark.parametrize("short", ["first", "second", "both"])
@pytest.mark.parametrize("batch", [1, 3])
def test_stages_with_a_shorter_context_than_the_target_fall_silent_there(tmp_path, short, batch, graphs, monkeypatch):
    """Recorded rounds draft K places whatever is left, over the last slot."""
    monkeypatch.setenv("SPECTUNE_GRAPHS", graphs)
    target = load_tiny(save_tiny(tmp_path / "t"))
    lengths = {"first": (40, 256), "second": (256, 40), "both": (44, 40)}[short]
    folders = [save_tiny(tmp_path / f"d{i}", seed=i, max_positions=n) for i, n in enumerate(lengths)]
    drafter = staged([drafter_of(target, folder) for folder in folders])
    prompts = random_prompts(5, lengths=(30, 38, 5, 45, 39))
    plain = decode(target, None, prompts, k=0, max_new_tokens=30, stop=StopRule())
    run = decode(target, drafter, prompts, k=6, batch=batch, max_new_tokens=30, stop=StopRule(), on_round=check_caches)
    assert tokens_of(run) == tokens_of(plain)
    if short != "first":
        ends = [g.prompt_tokens + len(g.tokens) for g in run.generations]
        assert all(g.rounds[-1].drafted == 0 for g, end in zip(run.generations, ends, strict=True) if end > 48)


def test_stop_tokens_inside_a_draft_end_the_output_there(tiny, build):
    prompt = random_prompts(1)[0]
    plain = decode(tiny, None, [prompt], k=0, max_new_tokens=24, stop=StopRule()).generations[0].tokens
    for place in range(24):
        stop = StopRule(frozenset([plain[place]]))
        run = decode(tiny, build(("other", "self")), [prompt], k=7, max_new_tokens=24, stop=stop)
        generation = run.generations[0]
        assert generation.tokens == plain[: plain.index(plain[place]) + 1]
        assert all(r.accepted == r.drafted for r in generation.rounds)


# An EAGLE head as the last stage.


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight layers, so that three different states exist inside."""
    folder = tmp_path_factory.mktemp("eight")
    return load_tiny(save_tiny(folder, num_hidden_layers=8, initializer_range=0.3))


def eagle(loaded, version: int, draft_ids=None) -> EagleDrafter:
    torch.manual_seed(3)
    head = EagleHead(tiny_config(version, taps=default_taps(version, loaded.model.layers_count)), draft_ids)
    randomize(head)
    head.bind(loaded.model.embedding, loaded.model.head_rows())
    return EagleDrafter(head.eval().requires_grad_(False), target_vocab=128)


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, 128, 2)], ids=["whole", "trimmed"])
@pytest.mark.parametrize("version", [1, 3])
def test_an_eagle_head_alone_as_a_stage_drafts_what_the_eagle_drafter_drafts(eight, version, draft_ids):
    """One token per extension: the feature carried along is the one that the chain feeds."""
    prompts = random_prompts(4)
    for rule, sampling in (("greedy", Sampling()), ("match", SAMPLINGS["penalty"])):
        runs = [
            decode(eight, drafter, prompts, k=4, batch=3, rule=rule, sampling=sampling)
            for drafter in (
                eagle(eight, version, draft_ids),
                StagedDrafter(None, EagleStage(eagle(eight, version, draft_ids))),
            )
        ]
        assert [g.rounds for g in runs[0].generations] == [g.rounds for g in runs[1].generations]
        # The chain goes on behind a stop token that it drafts, a stage does not.
        steps = [(t.draft_steps, u.draft_steps) for t, u in zip(runs[0].trace, runs[1].trace, strict=True)]
        assert all(chain >= stage for chain, stage in steps)
        assert sum(chain == stage for chain, stage in steps) > 0.8 * len(steps)


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, 128, 2)], ids=["whole", "trimmed"])
@pytest.mark.parametrize("version", [1, 3])
def test_behind_either_first_stage_the_output_of_an_eagle_stage_is_the_targets(eight, other_folder, version, draft_ids):
    prompts = [*random_prompts(3), [9, 8, 7, 9, 8, 7, 9, 8]]
    for rule, sampling in (("greedy", Sampling()), ("match", SAMPLINGS["all"])):
        plain = tokens_of(decode(eight, None, prompts, k=0, batch=4, max_new_tokens=NEW, sampling=sampling))
        for first in ("ngram", other_folder):
            for k, batch in ((1, 1), (3, 3), (4, 1), (8, 3)):
                drafter = staged([drafter_of(eight, first), eagle(eight, version, draft_ids)])
                run = decode(
                    eight, drafter, prompts, k=k, batch=batch, max_new_tokens=NEW, rule=rule, sampling=sampling
                )
                assert tokens_of(run) == plain


@pytest.mark.parametrize("version", [1, 3])
def test_an_eagle_stages_extension_equals_the_head_fed_with_the_carried_feature(eight, version):
    """Several tokens in one forward give what feeding them one by one with the same feature gives."""

    class Seen(Exception):
        """The first round is all that is looked at."""

    prompts = random_prompts(2, lengths=(7, 12))
    guess = torch.tensor([[5, 6, 7], [8, 9, 10]])
    logits = []

    def at_once(stage, rows):
        logits.append(stage.extend(rows, guess)[0])

    def one_by_one(stage, rows):
        network, store = stage.drafter.network, stage.drafter.store
        parts = [network.logits(stage.last)]
        feature = network.following(stage.last)[:, None]
        for i in range(3):
            step = Step(0, tuple(row.length - 1 + i for row in rows), 1, guess.device)
            parts.append(network.logits(network.step(guess[:, i : i + 1], feature, step, store)[:, -1]))
        logits.append(torch.stack(parts, 1))

    for way in (at_once, one_by_one):
        stage = EagleStage(eagle(eight, version))

        def look(decoder, _trace, stage=stage, way=way) -> None:
            rows = [slot.row for slot in decoder.slots]
            stage.begin(rows)
            way(stage, rows)
            raise Seen

        with pytest.raises(Seen):
            decode(eight, StagedDrafter(None, stage), prompts, k=2, batch=2, max_new_tokens=12, on_round=look)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def test_an_eagle_stage_keeps_true_pairs_only(eight):
    drafter = staged([drafter_of(eight, "ngram"), eagle(eight, 3)])
    head = drafter.second.drafter
    seen = []

    def check(decoder, _trace) -> None:
        for index, slot in enumerate(decoder.slots):
            ids = torch.tensor([slot.row.tokens[:-1]])
            with torch.inference_mode():
                step = Step(0, (0,), ids.shape[1], ids.device)
                _, states = decoder.target.forward_with_states(ids, step, KVStore(1, ids.shape[1]), drafter.taps)
                store = KVStore(1, ids.shape[1])
                head.network.step(torch.tensor([slot.row.tokens[1:]]), head.network.fuse(states), step, store)
            fed = head.fed[index]
            assert fed <= slot.row.length - 1
            torch.testing.assert_close(
                head.store.keys[0][index, :, :fed], store.keys[0][0][:, :fed], atol=1e-4, rtol=1e-4
            )
            seen.append(fed)

    decode(eight, drafter, [[9, 8, 7] * 4, *random_prompts(3)], k=5, batch=2, max_new_tokens=20, on_round=check)
    assert len(set(seen)) > 10


def test_an_eagle_stage_draws_from_the_targets_law(tmp_path):
    """Its rows depend on how the inner rounds cut the text, and the output must not."""
    settings = {"vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 8, "initializer_range": 0.3}
    target = load_tiny(save_tiny(tmp_path / "t", seed=3, **settings))
    small = drafter_of(target, save_tiny(tmp_path / "s", seed=5, **settings))
    torch.manual_seed(3)
    head = EagleHead(tiny_config(3, taps=default_taps(3, 8), vocab_size=8), None)
    randomize(head)
    head.bind(target.model.embedding, target.model.head_rows())
    drafter = staged([small, EagleDrafter(head.eval().requires_grad_(False), target_vocab=8)])
    prompt, draws = [3, 5], 4000
    settings = DecodeSettings(KSchedule.constant(3), "speculative", Sampling(temperature=1.0))
    run = Decoder(target.model, drafter, settings, StopRule()).decode(
        [Request(str(i), tuple(prompt), 3, i) for i in range(draws)], 2048
    )
    tokens = torch.tensor([g.tokens for g in run.generations])
    law = joint(target, prompt, 3)
    for place in range(3):
        seen = torch.bincount(tokens[:, place], minlength=8) / draws
        assert 0.5 * (seen - law.sum(dim=[d for d in range(3) if d != place])).abs().sum() < 0.05


# What cannot be staged.


def test_names_of_stages_are_split_and_checked():
    assert stage_names("staged:a>b", "a>b") == ["a", "b"]
    assert stage_names("staged:a>b>c:9", "a>b>c:9") == ["a", "b", "c:9"]
    for text in ("", "a", "a>", ">b", "a>>b"):
        with pytest.raises(UsageError, match="two stages"):
            stage_names(f"staged:{text}", text)


def test_a_head_on_the_targets_states_cannot_come_first(eight, tiny_folder):
    with pytest.raises(UsageError, match="first stage"):
        staged([eagle(eight, 3), drafter_of(eight, tiny_folder)])


def test_lookup_cannot_verify(tiny, tiny_folder):
    with pytest.raises(UsageError, match="does not verify"):
        staged([drafter_of(tiny, tiny_folder), drafter_of(tiny, "ngram")])


def test_a_first_stage_that_drafts_trees_is_refused(tiny, tiny_folder):
    from spectune.decoding.ngram import NgramTreeDrafter

    drafter = staged([NgramTreeDrafter(), drafter_of(tiny, tiny_folder)])
    with pytest.raises(UsageError, match="chains, not trees"):
        decode(tiny, drafter, [[9, 8, 7] * 4], k=4)
    for name in ("tree:ngram", f"sequoia:{tiny_folder}", "eagle2:demo"):  # by name, before anything is drafted
        with pytest.raises(UsageError, match=r"first stage .* drafts trees"):
            drafter_of(tiny, f"staged:{name}>{tiny_folder}")
