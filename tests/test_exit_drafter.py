"""Drafting with a trained exit: the logits are the exit's, on the target's own keys; the output stays the target's."""

from __future__ import annotations

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import decode, drafter_of, random_prompts, reference, tokens_of
from test_adapter import save
from test_decoder_cache import assert_prefix_equals_prefill

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.exit_drafter import TrimmedDrafter, exit_drafter, exit_model
from spectune.decoding.lean import LeanModel
from spectune.decoding.loading import weight_bytes_per_step
from spectune.decoding.stopping import StopRule
from spectune.errors import UsageError
from spectune.heads.exit import ExitConfig, ExitHead
from spectune.heads.medusa_layouts import load_exit, save_exit
from spectune.sweeping.cell import Sampling

VOCAB, HIDDEN, LAYERS = 128, 64, 4
HALF = torch.arange(1, VOCAB, 2)
SETTINGS = {
    "temperature": Sampling(temperature=0.8),
    "all": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.1),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return load_tiny(save_tiny(folder, num_hidden_layers=LAYERS, initializer_range=0.3))


def make_exit(layer: int = 2, draft_ids=None, *, trained: bool = True, **sizes) -> ExitHead:
    torch.manual_seed(7)
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "rank": 8} | sizes
    head = ExitHead(ExitConfig(layer=layer, **config), draft_ids)
    if trained:
        with torch.no_grad():
            head.norm.weight.copy_(1 + 0.3 * torch.randn(config["hidden_size"]))
            torch.nn.init.normal_(head.up.weight, std=0.3)
    return head


@pytest.mark.parametrize("draft_ids", [None, HALF], ids=["whole", "trimmed"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "gpt2", "phi3", "olmo2", "gpt-neox"])
def test_the_logits_are_the_exits_on_the_state_that_enters_its_layer(tmp_path, name, draft_ids):
    loaded = load_tiny(save(name, tmp_path))
    model = exit_model(loaded.model, make_exit(2, draft_ids))
    assert isinstance(model, LeanModel) == isinstance(loaded.model, LeanModel)
    assert model.vocab_size == VOCAB  # of the ids it reads
    ids = torch.tensor(random_prompts(1, lengths=(30,)))
    step = Step(0, (0,), 30, ids.device)
    expected_head = make_exit(2, draft_ids)
    expected_head.bind(loaded.model.embedding, loaded.model.head_rows())
    with torch.inference_mode():
        _, states = loaded.model.forward_with_states(ids, step, KVStore(1, 30), (2,))
        store = KVStore(1, 30)
        logits, last = model.forward(ids, step, store), model.forward(ids, step, KVStore(1, 30), last_only=True)
        expected = expected_head(states)
    assert logits.shape == (1, 30, VOCAB if draft_ids is None else len(draft_ids))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, expected[:, -1:], atol=1e-4, rtol=1e-4)
    assert sorted(store.keys) == [0, 1]


def test_an_untrained_exit_is_the_plain_one(four):
    """Its norm and correction as initialised, and a target whose final norm does nothing special."""
    prompts = random_prompts(3)
    runs = [
        decode(four, drafter, prompts, k=4, batch=2, max_new_tokens=30)
        for drafter in (exit_drafter(four.model, make_exit(3, trained=False)), drafter_of(four, "early-exit:3"))
    ]
    assert [g.rounds for g in runs[0].generations] == [g.rounds for g in runs[1].generations]


def check_cache(decoder, _trace) -> None:
    for index, slot in enumerate(decoder.slots):
        assert_prefix_equals_prefill(decoder.target, decoder.store, index, slot.row.tokens[:-1])


@pytest.mark.parametrize(("k", "batch"), [(1, 3), (4, 1), (7, 3)])
@pytest.mark.parametrize("draft_ids", [None, HALF], ids=["whole", "trimmed"])
@pytest.mark.parametrize("layer", [1, 3])
def test_greedy_output_equals_generate_and_the_cache_is_the_targets(four, layer, draft_ids, k, batch):
    prompts = random_prompts(5)
    drafter = exit_drafter(four.model, make_exit(layer, draft_ids))
    run = decode(four, drafter, prompts, k=k, batch=batch, on_round=check_cache)
    assert tokens_of(run) == [reference(four, p, 24) for p in prompts]
    assert sum(t.drafted for t in run.trace) > 0


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("draft_ids", [None, HALF], ids=["whole", "trimmed"])
def test_sample_then_match_is_token_identical_to_plain_sampling(four, draft_ids, sampling):
    prompts = random_prompts(4)
    plain = tokens_of(decode(four, None, prompts, k=0, batch=2, sampling=sampling))
    drafter = exit_drafter(four.model, make_exit(2, draft_ids))
    for k, batch in ((1, 1), (4, 3)):
        run = decode(four, drafter, prompts, k=k, batch=batch, rule="match", sampling=sampling)
        assert tokens_of(run) == plain


@pytest.mark.parametrize("rule", ["speculative", "block"])
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_an_exit_that_says_what_the_target_says_is_always_accepted(tmp_path, rule, sampling):
    """The last layer adds nothing and the exit has the target's norm: q, scattered over the vocabulary, is p."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path, num_hidden_layers=3, initializer_range=0.3))
    model.model.layers[2].self_attn.o_proj.weight.data.zero_()
    model.model.layers[2].mlp.down_proj.weight.data.zero_()
    model.save_pretrained(tmp_path)
    loaded = load_tiny(tmp_path)
    head = make_exit(2, torch.arange(VOCAB), trained=False, eps=1e-6)
    run = decode(
        loaded, exit_drafter(loaded.model, head), random_prompts(3), k=4, batch=3, max_new_tokens=40, rule=rule,
        sampling=sampling, stop=StopRule(),
    )  # fmt: skip
    rounds = [r for g in run.generations for r in g.rounds]
    assert sum(r.accepted for r in rounds) == sum(r.drafted for r in rounds)


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_ids_outside_the_draft_vocabulary_have_no_chance_and_q_sums_to_one(four, monkeypatch, rule):
    drafts = []
    drafter = exit_drafter(four.model, make_exit(2, HALF))
    monkeypatch.setattr(
        drafter, "propose", lambda round_: drafts.append(TrimmedDrafter.propose(drafter, round_)) or drafts[-1]
    )
    decode(four, drafter, random_prompts(3), k=4, batch=2, rule=rule, sampling=SETTINGS["all"])
    for draft in drafts:
        if draft is not None:
            assert draft.probabilities.shape[-1] == VOCAB
            torch.testing.assert_close(draft.probabilities.sum(-1), torch.ones(draft.tokens.shape))
            assert draft.probabilities[..., HALF - 1].sum() == 0
            assert torch.isin(draft.tokens, HALF).all()


def test_the_target_is_not_touched(four):
    ids = torch.tensor(random_prompts(1, lengths=(12,)))
    step = Step(0, (0,), 12, ids.device)
    with torch.inference_mode():
        before = four.model.forward(ids, step, KVStore(1, 12))
        exit_model(four.model, make_exit(2, HALF))
        after = four.model.forward(ids, step, KVStore(1, 12))
    assert torch.equal(before, after)
    assert four.model.head_rows().shape == (VOCAB, HIDDEN)
    assert sum(p.numel() for p in four.model.model.parameters()) == four.info.parameters


def test_weight_bytes_are_those_of_the_first_layers_the_exit_and_its_rows(four):
    layer = 64 * (64 + 64 + 32 + 32) + 3 * 64 * 96 + 2 * 64
    for draft_ids, rows in ((None, VOCAB), (HALF, len(HALF))):
        model = exit_model(four.model, make_exit(2, draft_ids))
        assert weight_bytes_per_step(model.model) == 4 * (2 * layer + HIDDEN + 2 * 8 * HIDDEN + rows * HIDDEN)


def test_a_saved_exit_drafts_as_before(four, tmp_path):
    save_exit(tmp_path, make_exit(3, HALF))
    prompts = random_prompts(3)
    runs = [
        decode(four, exit_drafter(four.model, head), prompts, k=4, batch=2)
        for head in (make_exit(3, HALF), load_exit(tmp_path))
    ]
    assert [g.rounds for g in runs[0].generations] == [g.rounds for g in runs[1].generations]


def test_bfloat16_targets_take_an_exit_too(tmp_path):
    loaded = load_tiny(save_tiny(tmp_path, num_hidden_layers=LAYERS), dtype=torch.bfloat16)
    drafter = exit_drafter(loaded.model, make_exit(2, HALF))
    run = decode(loaded, drafter, random_prompts(2), k=3, batch=2)
    assert sum(t.drafted for t in run.trace) > 0


def test_an_exit_of_another_target_is_refused(four):
    with pytest.raises(UsageError, match="behind 4 layers"):
        exit_drafter(four.model, make_exit(4))
    with pytest.raises(UsageError, match="width"):
        exit_drafter(four.model, make_exit(2, hidden_size=32))
    with pytest.raises(UsageError, match="token ids"):
        exit_drafter(four.model, make_exit(2, vocab_size=200))
