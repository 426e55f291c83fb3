"""The training loop, pruned drafts and the search for layers to skip."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import decode, random_prompts, reference, tokens_of
from heads_helpers import greedy_corpus, learn, load_calm
from torch import nn
from transformers import AutoModelForCausalLM

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.layer_skip import read_skip
from spectune.decoding.pruned_drafter import load_pruned_model, pruned_drafter, pruned_model
from spectune.errors import UsageError
from spectune.heads.checkpoint import save_tensors
from spectune.heads.pruned import load_pruned
from spectune.sweeping.cell import Sampling
from spectune.training import layer_skip as layer_skip_module
from spectune.training import loop as loop_module
from spectune.training.data import TrainingData
from spectune.training.draft import PLACES, DraftTraining, spread_layers
from spectune.training.layer_skip import Found, LayerSkipSearch, best_k
from spectune.training.loop import CURVE, Batch, HeldOut, Loop, LoopSettings, Stopped, schedule
from spectune.training.text import Text

CPU = torch.device("cpu")
DRAFT_IDS = torch.arange(0, 128, 2)


class Bigrams:
    """The smallest method: a table of next tokens, with noise from torch's own generator."""

    taps = ()
    learning_rate = 0.05

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Embedding(128, 128)
        self.batches: list[Batch] = []

    def loss(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        logits = self.module(batch.ids[:, :-1])
        logits = logits + 0.1 * torch.randn_like(logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
        return (loss * batch.mask[:, 1:].flatten()).mean()

    def evaluate(self, batches) -> HeldOut:
        right = [(self.module(b.ids[:, :-1]).argmax(-1) == b.ids[:, 1:]).float().mean() for b in batches]
        return HeldOut([float(torch.stack(right).mean())], [0.0])


def some_data(seed: int = 0) -> TrainingData:
    generator = torch.Generator().manual_seed(7)
    texts = [Text(tuple(torch.randint(3, 128, (12,), generator=generator).tolist()), 3) for _ in range(150)]
    return TrainingData(texts, None, batch_tokens=100, device=CPU, seed=seed)


def make_loop(path: Path, *, fingerprint: str = "f", should_stop=lambda: False, method=None, **settings) -> Loop:
    settings = {"learning_rate": 0.05, "epochs": 2} | settings
    return Loop(method or Bigrams(), some_data(), LoopSettings(**settings), path, fingerprint, should_stop=should_stop)


def stop_after(steps: int):
    count = iter(range(steps))
    return lambda: next(count, None) is None


# ------------------------------------------------------------------------------------------------------------- loop


def test_a_run_interrupted_anywhere_ends_exactly_like_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "_losses_per_entry", lambda _: 7)
    whole = make_loop(tmp_path / "whole.pt")
    expected = whole.run()
    steps = len(whole.method.batches)
    assert steps == 2 * len(some_data().plan(0))
    for stops in ([0], [5, 3], [steps // 2], [steps - 1]):
        path = tmp_path / f"{stops}.pt"
        for after in stops:
            with pytest.raises(Stopped):
                make_loop(path, should_stop=stop_after(after)).run()
        resumed = make_loop(path)
        assert resumed.run() == expected
        torch.testing.assert_close(resumed.method.module.weight, whole.method.module.weight, rtol=0, atol=0)
        assert resumed.curves.losses == whole.curves.losses
        assert [tuple(x) for x in resumed.curves.held_out] == [tuple(x) for x in whole.curves.held_out]
        assert resumed.curves.tokens == whole.curves.tokens


def test_every_epoch_sees_every_training_text_and_the_curve_has_its_points(tmp_path):
    loop = make_loop(tmp_path / "c.pt", epochs=3)
    loop.run()
    data = some_data()
    assert loop.curves.tokens == 3 * sum(text.written for text in data.training)
    progress = [batch.progress for batch in loop.method.batches]
    assert progress[0] == 0
    assert progress == sorted(progress)
    assert progress[-1] < 1
    assert len(loop.curves.held_out) == len(CURVE) + 1
    assert [tokens for tokens, _, _ in loop.curves.held_out][-1] == loop.curves.tokens
    assert loop.curves.losses[0][1] > loop.curves.losses[-1][1]


def test_a_time_budget_ends_the_run_with_its_schedule(tmp_path):
    class Slow(Bigrams):
        def loss(self, batch):
            import time

            time.sleep(0.01)
            return super().loss(batch)

    loop = make_loop(tmp_path / "c.pt", epochs=1000, minutes=0.3 / 60, method=Slow())
    loop.run()
    assert 0.3 <= loop.curves.seconds < 30
    assert len(loop.method.batches) < 60
    assert loop.method.batches[-1].progress > 0.5


def test_the_learning_rate_rises_then_falls():
    rates = [schedule(i / 200, 0.1) for i in range(201)]
    peak = rates.index(max(rates))
    assert peak == 20
    assert max(rates) == pytest.approx(1.0)
    assert all(a < b for a, b in pairwise(rates[: peak + 1]))
    assert all(a > b for a, b in pairwise(rates[peak:]))
    assert rates[-1] == pytest.approx(0.05)
    assert 0 < rates[0] < 0.02


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "c.pt"
    with pytest.raises(Stopped):
        make_loop(path, should_stop=stop_after(2)).run()
    with pytest.raises(UsageError, match="other data or settings"):
        make_loop(path, fingerprint="other").run()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match=r"cannot read .*c\.pt"):
        make_loop(path).run()


def test_a_loss_that_is_no_number_ends_the_run_with_advice(tmp_path):
    class Broken(Bigrams):
        def loss(self, batch):
            return super().loss(batch) * math.nan

    with pytest.raises(UsageError, match="loss is nan") as caught:
        make_loop(tmp_path / "c.pt", method=Broken()).run()
    assert "--learning-rate" in str(caught.value)


def test_the_acceptance_length_counts_the_targets_own_token():
    assert HeldOut([0.5, 0.5], [0, 0]).acceptance_length == pytest.approx(1.75)
    assert HeldOut([0.0], [0.0]).acceptance_length == 1.0


# ----------------------------------------------------------------------------------------------------- pruned drafts


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("deep"), num_hidden_layers=5, initializer_range=0.1, tie=True)


@pytest.fixture(scope="module")
def deep(deep_folder):
    return load_tiny(deep_folder)


def make_draft(folder: Path, kept=(0, 2, 4), draft_ids=None) -> DraftTraining:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return DraftTraining(model, model.get_output_embeddings().weight.detach().clone(), kept, draft_ids)


def random_batch(width: int, progress: float = 0.0) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 128, (3, 12), generator=generator)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[:, 0] = False
    mask[1, :5] = False
    mask[2, 9:] = False
    return Batch(ids, mask, torch.randn(3, 12, width, generator=generator), progress)


def test_layers_are_spread_evenly_with_the_first_and_the_last():
    assert spread_layers(6, 30) == [0, 6, 12, 17, 23, 29]
    assert spread_layers(2, 30) == [0, 29]
    assert spread_layers(1, 30) == [0]
    assert spread_layers(29, 30)[0] == 0
    assert len(set(spread_layers(29, 30))) == 29
    for count in (0, 30):
        with pytest.raises(UsageError, match="a draft of"):
            spread_layers(count, 30)


def test_an_untrained_draft_is_made_of_the_named_layers_of_the_target(deep_folder):
    whole = AutoModelForCausalLM.from_pretrained(deep_folder).model.layers
    draft = make_draft(deep_folder, kept=(0, 2, 4)).module.model.layers
    assert len(draft) == 3
    for layer, number in zip(draft, (0, 2, 4), strict=True):
        expected = whole[number].state_dict()
        assert all(torch.equal(x, expected[name]) for name, x in layer.state_dict().items())


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize("progress", [0.0, 0.9])
def test_the_draft_loss_and_its_gradients_equal_the_plain_formula(deep_folder, draft_ids, progress):
    method = make_draft(deep_folder, draft_ids=draft_ids)
    batch = random_batch(64, progress)
    rows = method.head_weight if draft_ids is None else method.head_weight[draft_ids]
    states = method.module.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
    terms = []
    for row in range(3):
        for t in range(11):
            if not batch.mask[row, t + 1]:
                continue
            p = (batch.states[row, t] @ rows.T).softmax(-1)
            log_q = (states[row, t] @ rows.T).log_softmax(-1)
            if progress >= 0.8:
                terms.append(1 - torch.minimum(p, log_q.exp()).sum())
                continue
            term = (p * (p.log() - log_q)).sum()
            token = int(batch.ids[row, t + 1])
            known = draft_ids is None or token in draft_ids
            place = token if draft_ids is None else int(torch.searchsorted(draft_ids, token))
            terms.append(term - 0.1 * log_q[place] if known else term)
    expected = torch.stack(terms).mean()
    trained = [p for p in method.module.parameters() if p.requires_grad]
    plain = torch.autograd.grad(expected, trained)
    loss = method.loss(batch)
    ours = torch.autograd.grad(loss, trained)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_embedding_and_output_head_stay_the_targets(deep_folder, deep):
    method = make_draft(deep_folder)
    batches = greedy_corpus(deep, (5,), batches=3)
    learn(method, batches, epochs=2)
    assert torch.equal(method.module.get_input_embeddings().weight, deep.model.embedding)
    untrained = make_draft(deep_folder).module.state_dict()
    changed = {name for name, x in method.module.state_dict().items() if not torch.equal(x, untrained[name])}
    assert any("layers.2" in name for name in changed)
    assert not any("embed" in name or "lm_head" in name for name in changed)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    return folder, load_calm(folder)


def test_a_draft_learns_and_its_held_out_figures_are_those_of_decoding(calm):
    folder, target = calm
    batches = greedy_corpus(target, (2,))
    method = make_draft(folder, kept=(0,))
    # An exact count: of every greedy draft on the held-out text, the places that follow right ones.
    before = method.evaluate(batches[9:])
    losses = learn(method, batches[:9], epochs=8)
    found = method.evaluate(batches[9:])
    assert losses[-1] < losses[0]
    assert found.overlap[0] > before.overlap[0]
    reached, right = [0] * PLACES, [0] * PLACES
    for batch in batches[9:]:
        logits = method.module(input_ids=batch.ids).logits
        target_logits = batch.states @ method.head_weight.T
        guess, truth = logits.argmax(-1), target_logits.argmax(-1)
        for row in range(len(batch.ids)):
            for t in range(batch.ids.shape[1]):
                for i in range(PLACES):
                    if t + i + 1 >= batch.ids.shape[1] or not batch.mask[row, t + i + 1]:
                        break
                    if i and batch.ids[row, t + i] != truth[row, t + i - 1]:
                        break
                    reached[i] += 1
                    if guess[row, t + i] != truth[row, t + i]:
                        break
                    right[i] += 1
    assert found.acceptance == pytest.approx([a / b for a, b in zip(right, reached, strict=True)])


def test_a_saved_draft_is_a_model_of_transformers_and_drafts_losslessly(deep_folder, deep, tmp_path):
    method = make_draft(deep_folder)
    learn(method, greedy_corpus(deep, (5,), batches=2), epochs=1)
    method.save(tmp_path / "draft")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert loaded.config.num_hidden_layers == 3
    ids = torch.tensor(random_prompts(1))
    torch.testing.assert_close(loaded(ids).logits, method.module(ids).logits)
    draft = load_tiny(tmp_path / "draft")
    step = Step(0, (0,), ids.shape[1], CPU)
    with torch.inference_mode():
        torch.testing.assert_close(
            draft.model.forward(ids, step, KVStore(1, 64)), loaded(ids).logits, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_a_compact_draft_gives_the_trained_logits_and_drafts_losslessly(deep_folder, deep, tmp_path, draft_ids):
    method = make_draft(deep_folder, draft_ids=draft_ids)
    learn(method, greedy_corpus(deep, (5,), batches=2), epochs=1)
    method.save(tmp_path / "c", compact=True, base_model="deep")
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"config.json", "model.safetensors"}
    draft = load_pruned(tmp_path / "c")
    assert draft.kept == (0, 2, 4)
    model = load_pruned_model(deep.model, tmp_path / "c")
    ids = torch.tensor(random_prompts(1, lengths=(40,)))
    with torch.inference_mode():
        ours = model.forward(ids, Step(0, (0,), 40, CPU), KVStore(1, 64))
        whole = method.module(ids).logits
    expected = whole if draft_ids is None else whole[..., draft_ids]
    assert ours.shape == expected.shape
    # The file's int8 matrices: close, and the same choice nearly everywhere.
    assert float((ours - expected).abs().mean() / expected.std()) < 0.05
    prompts = random_prompts(5)
    for sampling in (Sampling(), Sampling(temperature=0.8)):
        run = decode(deep, pruned_drafter(deep.model, draft), prompts, batch=3, sampling=sampling, k=3)
        if sampling.temperature == 0:
            assert tokens_of(run) == [reference(deep, p, 24) for p in prompts]
        assert sum(r.accepted for g in run.generations for r in g.rounds) > 0


def test_a_compact_draft_that_does_not_fit_is_refused_by_name(deep_folder, deep, tiny, tmp_path):
    make_draft(deep_folder).save(tmp_path / "c", compact=True)
    draft = load_pruned(tmp_path / "c")
    other = load_tiny(save_tiny(tmp_path / "wide", hidden_size=32))
    with pytest.raises(UsageError, match="width 64"):
        pruned_model(other.model, draft)
    tensors = {name: x for name, x in draft.tensors.items() if name != "layers.1.mlp.up_proj.weight"}
    save_tensors(tmp_path / "c" / "model.safetensors", tensors)
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        pruned_model(deep.model, load_pruned(tmp_path / "c"))
    save_tensors(tmp_path / "c" / "model.safetensors", tensors | {"token_map": torch.tensor([5, 3])})
    with pytest.raises(UsageError, match="no ascending list"):
        load_pruned(tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text(json.dumps({"spectune_head": "pruned-draft", "kept": [0]}))
    with pytest.raises(UsageError, match="lacks the draft's sizes"):
        load_pruned(tmp_path / "c")


# -------------------------------------------------------------------------------------------------------- layer skip


def test_the_best_k_grows_with_acceptance_and_falls_with_cost():
    assert best_k(0.9, 0.07) > best_k(0.5, 0.07) > best_k(0.5, 0.5) == 1
    assert best_k(1.0, 0.01) == 8


def search(target, path: Path, minutes: float, said: list | None = None) -> Found:
    texts = [Text(tuple(p), len(p) - 4) for p in random_prompts(12, lengths=(20, 30))]
    said = [] if said is None else said
    return LayerSkipSearch(
        target, texts, minutes=minutes, seed=0, path=path, on_progress=lambda done, text: said.append((done, text))
    ).run()


def test_the_search_finds_blocks_that_do_nothing_and_goes_on_after_an_interruption(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "t", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, i in (("self_attn.o_proj", 1), ("mlp.down_proj", 1), ("self_attn.o_proj", 2)):
        model.model.layers[i].get_submodule(name).weight.data.zero_()
    model.save_pretrained(folder)
    target = load_tiny(folder)
    monkeypatch.setattr(layer_skip_module, "_OUTPUT", 6)

    def speed(self, drafter, k):
        """As if time were weights: exact, where a clock is not."""
        if drafter is None:
            return 100.0, 0.0
        real = original(self, drafter, k)[1]
        kept = sum(layer.runs_attention + layer.runs_mlp for layer in drafter.model.layers) / 8
        return 100.0 * (1 + k * real) / (1 + k * kept), real

    original = LayerSkipSearch._speed
    monkeypatch.setattr(LayerSkipSearch, "_speed", speed)
    found = search(target, tmp_path / "search.json", minutes=1)
    assert {name for name, share in found.ranking.items() if share == 1.0} >= {"a1", "m1", "a2"}
    assert set(found.best.blocks) == {"a1", "m1", "a2"}
    assert found.best.acceptance == 1.0
    assert found.best.skip.parts == ["1", "a2"]
    again = Found.read(tmp_path / "search.json")
    assert again.ranking == found.ranking
    assert again.best == found.best
    again.measured, again.ranking = [], {k: v for k, v in found.ranking.items() if k != "m1"}
    again.seconds = 0.0
    again.write(tmp_path / "search.json")
    said: list = []
    assert search(target, tmp_path / "search.json", minutes=1, said=said).best.blocks == found.best.blocks
    assert [text for _, text in said if text.startswith("without")] == ["without m1: 100 % of tokens unchanged"]


def test_a_real_search_measures_real_decoding_within_its_time(deep, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_skip_module, "_OUTPUT", 6)
    found = search(deep, tmp_path / "search.json", minutes=1 / 60)
    assert found.best is not None
    assert found.best.tokens_per_second > 0
    assert 0 <= found.best.acceptance <= 1
    assert len({m.blocks for m in found.measured}) == len(found.measured)
    (tmp_path / "config.json").write_text(json.dumps({"spectune_head": "layer-skip", "skip": found.best.skip.parts}))
    assert read_skip(tmp_path) == found.best.skip
