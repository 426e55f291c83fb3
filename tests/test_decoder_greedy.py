"""Greedy decoding is token-identical to transformers, whatever drafts."""

from __future__ import annotations

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import (
    ScriptedDrafter,
    decode,
    drafter_of,
    random_prompts,
    reference,
    tokens_of,
)

from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.errors import UsageError
from spectune.sweeping.cell import Sampling

NEW = 24


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(9)


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    return [reference(tiny, p, NEW) for p in prompts]


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_plain_decoding_equals_generate(tiny, prompts, expected, batch):
    assert tokens_of(decode(tiny, None, prompts, k=0, batch=batch, max_new_tokens=NEW)) == expected


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("drafter", ["self", "other", "ngram", "early-exit:1", "layer-skip:0"])
def test_every_drafter_equals_generate(tiny, tiny_folder, other_folder, prompts, expected, drafter, k, batch):
    name = {"self": tiny_folder, "other": other_folder}.get(drafter, drafter)
    run = decode(tiny, drafter_of(tiny, name), prompts, k=k, batch=batch, max_new_tokens=NEW)
    assert tokens_of(run) == expected


def test_prompts_of_one_to_three_tokens_work_for_every_k(tiny, tiny_folder, other_folder):
    prompts = [[7], [9, 4], [5, 6, 7]]
    expected = [reference(tiny, p, 16) for p in prompts]
    for folder in (tiny_folder, other_folder):
        for k in range(1, 9):
            run = decode(tiny, drafter_of(tiny, folder), prompts, k=k, batch=3, max_new_tokens=16)
            assert tokens_of(run) == expected


@pytest.mark.parametrize("k", [1, 4, 7])
def test_a_stop_token_inside_an_accepted_block_ends_the_output_there(tiny, tiny_folder, k):
    prompt = random_prompts(1)[0]
    plain = decode(tiny, None, [prompt], k=0, max_new_tokens=24, stop=StopRule()).generations[0].tokens
    for place in range(24):
        stop = StopRule(frozenset([plain[place]]))
        run = decode(tiny, drafter_of(tiny, tiny_folder), [prompt], k=k, max_new_tokens=24, stop=stop)
        generation = run.generations[0]
        assert generation.tokens == plain[: plain.index(plain[place]) + 1]
        assert generation.finish_reason == "stop"
        # A draft that is cut by its own stop token is no rejection.
        assert all(r.accepted == r.drafted for r in generation.rounds)


def test_a_list_of_stop_tokens_ends_at_whichever_comes_first(tiny, tiny_folder):
    prompt = random_prompts(1)[0]
    plain = decode(tiny, None, [prompt], k=0, max_new_tokens=24, stop=StopRule()).generations[0].tokens
    stop = StopRule(frozenset([plain[20], plain[6]]))
    run = decode(tiny, drafter_of(tiny, tiny_folder), [prompt], max_new_tokens=24, stop=stop)
    assert len(run.generations[0].tokens) == 1 + min(plain.index(plain[20]), plain.index(plain[6]))


@pytest.mark.parametrize("limit", range(1, 14))
def test_exactly_the_asked_number_of_tokens_and_no_false_rejections(tiny, tiny_folder, limit):
    prompt = random_prompts(1)[0]
    for k in (4, 8):
        run = decode(tiny, drafter_of(tiny, tiny_folder), [prompt], k=k, max_new_tokens=limit, stop=StopRule())
        generation = run.generations[0]
        assert len(generation.tokens) == limit
        assert generation.finish_reason == "length"
        assert sum(r.accepted for r in generation.rounds) == sum(r.drafted for r in generation.rounds)


@pytest.mark.parametrize("k", range(1, 9))
def test_draft_equal_to_target_accepts_everything_for_128_tokens(tiny, tiny_folder, k):
    prompts = random_prompts(3)
    drafter = drafter_of(tiny, tiny_folder)
    run = decode(tiny, drafter, prompts, k=k, batch=2, max_new_tokens=128, stop=StopRule())
    for generation in run.generations:
        assert [r.accepted for r in generation.rounds] == [r.drafted for r in generation.rounds]
        assert {r.drafted for r in generation.rounds[:-1]} == {k}


def test_a_draft_that_is_never_right_emits_one_token_a_round(tiny, prompts, expected):
    continuations = {i: p + e for i, (p, e) in enumerate(zip(prompts, expected, strict=True))}
    drafter = ScriptedDrafter(continuations, lambda seed, r: [False] * 4)
    run = decode(tiny, drafter, prompts, batch=3, max_new_tokens=NEW)
    assert tokens_of(run) == expected
    assert all(r.accepted == 0 and r.emitted == 1 for g in run.generations for r in g.rounds)


def test_matches_behind_the_first_mismatch_do_not_count(tiny):
    prompts = random_prompts(2)
    expected = [reference(tiny, p, 6, eos_token_id=None) for p in prompts]
    continuations = {i: p + e for i, (p, e) in enumerate(zip(prompts, expected, strict=True))}
    marks = {0: [True, False, True], 1: [True, True, True]}
    drafter = ScriptedDrafter(continuations, lambda seed, r: marks[seed])
    run = decode(tiny, drafter, prompts, k=3, batch=2, max_new_tokens=6, stop=StopRule())
    first = [g.rounds[0] for g in run.generations]
    assert [r.accepted for r in first] == [1, 3]
    assert [r.emitted for r in first] == [2, 4]


@pytest.mark.parametrize(("right", "rate"), [(0, 0.0), (2, 0.5), (4, 1.0)])
def test_acceptance_rate_counts_neither_the_bonus_nor_the_correction(tiny, right, rate):
    prompt = random_prompts(1)[0]
    expected = reference(tiny, prompt, 61, eos_token_id=None)
    script = [True] * right + [False] * (4 - right)
    drafter = ScriptedDrafter({0: prompt + expected}, lambda seed, r: script)
    rounds = 60 // (right + 1)
    limit = 1 + rounds * (right + 1)
    run = decode(tiny, drafter, [prompt], k=4, max_new_tokens=limit, stop=StopRule())
    whole = [r for r in run.generations[0].rounds if r.drafted == 4]
    assert sum(r.accepted for r in whole) / sum(r.drafted for r in whole) == rate


def test_ragged_rows_equal_their_batch_one_runs_in_any_order(tiny, other_folder):
    prompts = random_prompts(4, lengths=(1, 17, 40, 9))
    plain = [reference(tiny, p, 32, eos_token_id=None) for p in prompts]
    continuations = {i: p + e for i, (p, e) in enumerate(zip(prompts, plain, strict=True))}

    def script(seed: int, r: int) -> list[bool]:
        return {0: [r % 2 == 0] * 4, 1: [True] * 4, 2: [False] * 4, 3: [True, r % 3 == 0, True, True]}[seed]

    def outcome(order: list[int], batch: int) -> dict[int, tuple]:
        drafter = ScriptedDrafter(continuations, script)
        from spectune.decoding.decoder import Decoder, DecodeSettings
        from spectune.engines.engine import Request

        decoder = Decoder(tiny.model, drafter, DecodeSettings(KSchedule.constant(4)), StopRule())
        requests = [Request(str(i), tuple(prompts[i]), 32, i) for i in order]
        run = decoder.decode(requests, batch)
        return {int(g.id): (g.tokens, [(r.drafted, r.accepted, r.emitted) for r in g.rounds]) for g in run.generations}

    alone = {i: outcome([i], 1)[i] for i in range(4)}
    assert {i: alone[i][0] for i in range(4)} == dict(enumerate(plain))
    assert outcome([0, 1, 2, 3], 4) == alone
    assert outcome([2, 0, 3, 1], 4) == alone
    assert outcome([3, 2, 1, 0], 2) == alone


def test_k_shrinks_at_the_context_limit(tmp_path):
    loaded = load_tiny(save_tiny(tmp_path, max_positions=64))
    prompt = random_prompts(1, lengths=(58,))[0]
    expected = reference(loaded, prompt, 6, eos_token_id=None)
    for limit, reason in ((6, "length"), (20, "context")):
        run = decode(loaded, drafter_of(loaded, tmp_path), [prompt], k=5, max_new_tokens=limit, stop=StopRule())
        assert run.generations[0].tokens == expected
        assert run.generations[0].finish_reason == reason


def test_a_draft_with_a_shorter_context_stops_drafting_and_the_output_stays_right(tiny, tmp_path):
    short = save_tiny(tmp_path, max_positions=32, rope_theta=10000.0)
    prompts = random_prompts(3, lengths=(20, 31, 50))
    run = decode(tiny, drafter_of(tiny, short), prompts, k=4, batch=3, max_new_tokens=24)
    assert tokens_of(run) == [reference(tiny, p, 24) for p in prompts]
    assert all(r.drafted == 0 for r in run.generations[2].rounds)
    assert run.generations[0].rounds[0].drafted == 4


@pytest.mark.parametrize("k", [4, 20])
@pytest.mark.parametrize(("target_window", "draft_window"), [(16, None), (None, 16), (16, 16)])
def test_sliding_window_layers(tmp_path, k, target_window, draft_window):
    from transformers import MistralConfig, MistralForCausalLM

    def save(name: str, window: int | None):
        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, sliding_window=window, initializer_range=0.5,
        )  # fmt: skip
        MistralForCausalLM(config).save_pretrained(tmp_path / name)
        return tmp_path / name

    loaded = load_tiny(save("target", target_window))
    draft = save("draft", draft_window)
    prompts = random_prompts(3, lengths=(10, 3, 30))
    run = decode(loaded, drafter_of(loaded, draft), prompts, k=k, batch=2, max_new_tokens=64)
    assert tokens_of(run) == [reference(loaded, p, 64) for p in prompts]


@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(160, 128), (128, 160)])
def test_padded_vocabularies_of_different_width(tmp_path, target_vocab, draft_vocab):
    target = load_tiny(with_tokenizer(save_tiny(tmp_path / "t", vocab_size=target_vocab), 120))
    draft = with_tokenizer(save_tiny(tmp_path / "d", vocab_size=draft_vocab), 120)
    drafter = drafter_of(target, draft)
    prompts = random_prompts(3, vocab_size=120)
    proposed: list[int] = []
    propose = drafter.propose

    def spy(round_):
        found = propose(round_)
        if found is not None:
            proposed.extend(found.tokens.flatten().tolist())
        return found

    drafter.propose = spy
    expected = [reference(target, p, NEW) for p in prompts]
    assert tokens_of(decode(target, drafter, prompts, batch=2, max_new_tokens=NEW)) == expected
    sampled = decode(target, drafter, prompts, batch=2, max_new_tokens=NEW, sampling=Sampling(temperature=1.0))
    assert all(g.tokens for g in sampled.generations)
    assert proposed
    assert max(proposed) < 120


def with_tokenizer(folder, size: int, swap: tuple[int, int] | None = None):
    """Put a word-level tokenizer of `size` entries beside a model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    names = [f"w{i}" for i in range(size)]
    if swap:
        names[swap[0]], names[swap[1]] = names[swap[1]], names[swap[0]]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=names[0]).save_pretrained(folder)
    return folder


def test_another_tokenizer_is_refused_with_the_first_differing_id(tmp_path):
    target = load_tiny(with_tokenizer(save_tiny(tmp_path / "t"), 120))
    draft = with_tokenizer(save_tiny(tmp_path / "d"), 120, swap=(17, 40))
    with pytest.raises(UsageError, match=r"id 17 is 'w40' there and 'w17' in the target"):
        drafter_of(target, draft)


def test_repetition_penalty_equals_generate(tiny, tiny_folder):
    prompts = random_prompts(4)
    expected = [reference(tiny, p, NEW, repetition_penalty=1.3) for p in prompts]
    sampling = Sampling(repetition_penalty=1.3)
    assert expected != [reference(tiny, p, NEW) for p in prompts]
    for drafter in (None, drafter_of(tiny, tiny_folder), drafter_of(tiny, "ngram")):
        run = decode(tiny, drafter, prompts, batch=3, max_new_tokens=NEW, sampling=sampling)
        assert tokens_of(run) == expected


def test_an_exact_tie_goes_to_the_lowest_id_in_every_path(tmp_path):
    folder = save_tiny(tmp_path / "tie", tie=False)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[3] = model.lm_head.weight[7] = 0.0  # every logit is equal from here on
    model.save_pretrained(folder)
    loaded = load_tiny(folder)
    for drafter in (None, drafter_of(loaded, folder), drafter_of(loaded, "ngram")):
        run = decode(loaded, drafter, [[5, 6]], k=3, max_new_tokens=8, stop=StopRule())
        assert set(run.generations[0].tokens) == {0}


def test_k_follows_the_number_of_active_rows_and_the_draft_catches_up(tiny, tiny_folder):
    prompts = random_prompts(4)
    schedule = KSchedule(((1, 4), (2, 2)))  # three rows: nothing is drafted
    drafter = drafter_of(tiny, tiny_folder)
    run = decode(tiny, drafter, prompts, batch=3, max_new_tokens=40, schedule=schedule, stop=StopRule())
    assert tokens_of(run) == [reference(tiny, p, 40, eos_token_id=None) for p in prompts]
    by_rows = {t.rows: set() for t in run.trace}
    for t in run.trace:
        by_rows[t.rows].add(t.drafted / t.rows)
    assert by_rows[3] == {0}
    assert max(by_rows[1]) == 4
    # The draft is the target: after the undrafted rounds it must still be right every time.
    assert all(r.accepted == r.drafted for g in run.generations for r in g.rounds)


def test_tokens_of_finished_rows_are_not_counted(tiny, tiny_folder):
    prompts = random_prompts(2)
    plain = [reference(tiny, p, 64, eos_token_id=None) for p in prompts]
    stop_token = next(t for t in plain[0][2:] if t not in plain[1] and t not in plain[0][:2])
    run = decode(
        tiny, drafter_of(tiny, tiny_folder), prompts, batch=2, max_new_tokens=64,
        stop=StopRule(frozenset([stop_token])),
    )  # fmt: skip
    counts = [len(g.tokens) for g in run.generations]
    assert counts == [plain[0].index(stop_token) + 1, 64]
    assert sum(t.emitted for t in run.trace) == sum(counts) - 2


def test_wrong_requests_are_named(tiny):
    for prompt, words in (([], "empty prompt"), ([5] * 300, "context"), ([5, 500], "vocabulary")):
        with pytest.raises(UsageError, match=words):
            decode(tiny, None, [prompt], k=0)
