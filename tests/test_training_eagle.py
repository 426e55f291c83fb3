"""Training EAGLE heads: who sees what, the losses, held-out figures against direct counts, and what is learnt."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import load_tiny, save_tiny
from eagle_helpers import HIDDEN, VOCAB, naive, tiny_config, tiny_head
from heads_helpers import greedy_corpus, learn, load_calm
from torch.nn import functional
from transformers import AutoModelForCausalLM

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.eagle_network import EagleNetwork
from spectune.heads.eagle_layouts import load_eagle
from spectune.training.eagle import PLACES, EagleTraining, unroll
from spectune.training.eagle_start import last_layer, start_head
from spectune.training.loop import Batch

LAYERS = 8
DRAFT_IDS = torch.arange(0, VOCAB, 2)


def random_batch(taps: int, length: int = 12) -> Batch:
    """Three rows: one whole, one with a long prompt, one padded."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (3, length), generator=generator)
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[:, 0] = False
    mask[1, :5] = False
    mask[2, length - 3 :] = False
    return Batch(ids, mask, torch.randn(3, length, taps * HIDDEN, generator=generator), progress=1.0)


def make(version: int, *, draft_ids=DRAFT_IDS, **options) -> EagleTraining:
    head = tiny_head(tiny_config(version, layers=LAYERS), draft_ids=draft_ids)
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9)) * 0.3
    return EagleTraining(head, weight, LAYERS, **options)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("change", [{}, {"norm_output": True}, {"layers": 2}])
def test_every_step_at_every_place_is_what_drafting_from_there_computes(version, change):
    """Training-time test against the head run place by place: true pairs up to i, then its own outputs."""
    if version == 1 and "norm_output" in change:
        change = {"layernorms": True}
    taps = tiny_config(version, layers=LAYERS).taps
    head = tiny_head(tiny_config(version, **({"taps": taps} | change)))
    batch = random_batch(len(taps), length=9)
    with torch.no_grad():
        outputs = list(unroll(head, batch.states, batch.ids, 4))
    for row in (0, 2):
        true = naive(head)
        for i in range(8):
            true_output = true.step(int(batch.ids[row, i + 1]), true.fuse(batch.states[row, i]), i)
            drafting, output = true.fork(), true_output
            for k in range(4):
                if i + k + 1 > 8:
                    break  # the token that step k reads lies behind the text
                if k:
                    output = drafting.step(int(batch.ids[row, i + k + 1]), drafting.following(output), i + k)
                torch.testing.assert_close(outputs[k][row, i].double(), output, rtol=1e-3, atol=1e-3)


def plain_losses(method: EagleTraining, batch: Batch, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy and feature loss by loops over rows, steps and places."""
    head, length = method.module, batch.ids.shape[1]
    width = len(head.config.taps) * HIDDEN
    outputs = list(unroll(head, batch.states[..., :width], batch.ids, steps))
    soft, features = torch.zeros(()), torch.zeros(())
    for k in range(steps):
        entropies, distances = [], []
        for row in range(len(batch.ids)):
            for i in range(length - 2 - k):
                if not bool(batch.mask[row, i + 2 : i + k + 3].all()):
                    continue
                teacher = batch.states[row, i + k + 1, -HIDDEN:]
                p = (teacher @ method.head_weight[DRAFT_IDS].T).softmax(-1)
                log_q = head.logits(outputs[k][row, i]).log_softmax(-1)
                if int(batch.ids[row, i + k + 2]) in DRAFT_IDS:
                    entropies.append(-(p * log_q).sum())
                distances.append(functional.smooth_l1_loss(outputs[k][row, i], teacher))
        soft = soft + 0.8**k * torch.stack(entropies).mean()
        features = features + 0.8**k * torch.stack(distances).mean()
    return soft, features


@pytest.mark.parametrize("steps", [1, 3])
def test_eagle3_loss_is_cross_entropy_over_the_steps(steps):
    method = make(3, steps=steps)
    batch = random_batch(len(method.taps))
    expected, _ = plain_losses(method, batch, steps)
    torch.testing.assert_close(method.loss(batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_eagle_loss_adds_the_distance_of_features(steps):
    method = make(1, steps=steps, feature_noise=0.0, feature_weight=2.0)
    batch = random_batch(1)
    soft, features = plain_losses(method, batch, steps)
    torch.testing.assert_close(method.loss(batch), soft + 2.0 * features, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_parameter_through_the_steps():
    method = make(3, steps=2)
    batch = random_batch(len(method.taps))
    method.loss(batch).backward()
    ours = {name: p.grad.clone() for name, p in method.module.named_parameters()}
    method.module.zero_grad()
    plain_losses(method, batch, 2)[0].backward()
    for name, p in method.module.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-3, atol=1e-5)
        assert float(p.grad.abs().max()) > 0


def test_the_first_step_is_learnt_alone_in_the_first_half():
    method = make(3, steps=3)
    batch = random_batch(len(method.taps))
    for progress, steps in ((0.0, 1), (0.49, 1), (0.5, 3), (1.0, 3)):
        expected, _ = plain_losses(method, batch, steps)
        torch.testing.assert_close(method.loss(batch._replace(progress=progress)), expected, rtol=1e-4, atol=1e-5)


def test_the_output_rows_learn_in_the_second_half_only():
    method = make(3)
    batch = random_batch(len(method.taps))
    method.loss(batch._replace(progress=0.49)).backward()
    assert method.module.lm_head.weight.grad is None
    method.loss(batch._replace(progress=0.5)).backward()
    assert method.module.lm_head.weight.grad is not None


def test_all_of_a_trained_head_learns_from_the_start_and_at_a_lower_rate():
    method = make(3, steps=3, trained=True)
    batch = random_batch(len(method.taps))
    expected, _ = plain_losses(method, batch, 3)
    loss = method.loss(batch._replace(progress=0.0))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    assert float(method.module.lm_head.weight.grad.abs().max()) > 0
    assert method.learning_rate < make(3).learning_rate


@pytest.mark.parametrize("version", [1, 3])
def test_half_precision_products_give_nearly_the_same_loss(version):
    method = make(version, steps=3, feature_noise=0.0)
    batch = random_batch(len(method.taps))
    with torch.autocast("cpu", torch.bfloat16):
        rough = method.loss(batch)
    rough.backward()
    torch.testing.assert_close(rough.detach(), method.loss(batch).detach(), rtol=0.03, atol=0.03)


def test_noise_falls_on_the_features_of_version_1_only():
    batch = random_batch(1)
    noisy, calm = make(1), make(1, feature_noise=0.0)
    assert not torch.equal(noisy.loss(batch), noisy.loss(batch))
    assert torch.equal(calm.loss(batch), calm.loss(batch))
    third = make(3)
    batch = random_batch(len(third.taps))
    assert torch.equal(third.loss(batch), third.loss(batch))


def test_text_shorter_than_a_draft_has_nothing_to_teach():
    method = make(3)
    batch = random_batch(len(method.taps), length=6)
    short = Batch(batch.ids[:, :2], batch.mask[:, :2], batch.states[:, :2])
    assert float(method.loss(short).detach()) == 0.0
    method.evaluate([short])


@pytest.mark.parametrize("version", [1, 3])
def test_held_out_figures_equal_direct_counts(version):
    method = make(version)
    batch = random_batch(len(method.taps), length=30)
    # Text that is greedy now and then, else nothing behind the first place would be judged.
    best = (batch.states[..., -HIDDEN:] @ method.head_weight.T).argmax(-1)
    greedy = torch.rand(3, 30, generator=torch.Generator().manual_seed(2)) < 0.7
    ids = batch.ids.clone()
    ids[:, 1:] = torch.where(greedy[:, 1:], best[:, :-1], ids[:, 1:])
    batch = Batch(ids, batch.mask, batch.states)
    figures = method.evaluate([batch, batch])
    head = method.module
    with torch.no_grad():
        outputs = list(unroll(head, batch.states[..., : len(head.config.taps) * HIDDEN], ids, PLACES))
    for k in range(PLACES):
        reached = right = valid = 0
        shared = 0.0
        for row in range(3):
            for i in range(30 - 2 - k):
                if not bool(batch.mask[row, i + 2 : i + k + 3].all()):
                    continue
                guesses = [int(DRAFT_IDS[head.logits(outputs[j][row, i]).argmax()]) for j in range(k + 1)]
                truth = [int(best[row, i + j + 1]) for j in range(k + 1)]
                p = (batch.states[row, i + k + 1, -HIDDEN:] @ method.head_weight.T).softmax(-1)
                q = torch.zeros(VOCAB)
                q[DRAFT_IDS] = head.logits(outputs[k][row, i]).softmax(-1)
                valid += 1
                shared += float(torch.minimum(p, q).sum())
                follows = all(int(ids[row, i + j + 2]) == truth[j] for j in range(k))
                if follows and guesses[:k] == truth[:k]:
                    reached += 1
                    right += guesses[k] == truth[k]
        assert figures.overlap[k] == pytest.approx(shared / valid, rel=1e-4)
        assert figures.acceptance[k] == pytest.approx(right / max(reached, 1))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return load_calm(tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize("version", [1, 3])
def test_a_new_head_starts_from_its_target(calm, version):
    head = start_head(calm.model, version, DRAFT_IDS)
    layer, norm = last_layer(calm.model)
    attention = head.layers[0].self_attn
    assert torch.equal(attention.q_proj.weight[:, -HIDDEN:], layer["self_attn.q_proj.weight"])
    assert torch.equal(attention.v_proj.weight[:, -HIDDEN:], layer["self_attn.v_proj.weight"])
    # The first version works on normalised states, to which the target's last layer would add far too much.
    down = layer["mlp.down_proj.weight"] if version == 3 else torch.zeros_like(layer["mlp.down_proj.weight"])
    assert torch.equal(head.layers[0].mlp.down_proj.weight, down)
    assert torch.equal(head.fc.weight[:, -HIDDEN:], torch.eye(HIDDEN))
    assert float(head.fc.weight[:, :-HIDDEN].abs().max()) == 0
    if version == 3:
        assert torch.equal(head.norm.weight, norm)
        assert torch.equal(head.layers[0].hidden_norm.weight, layer["input_layernorm.weight"])
        assert torch.equal(head.lm_head.weight, calm.model.head_rows(DRAFT_IDS))


def test_the_last_layer_read_from_packed_weights_is_the_files(tmp_path):
    folder = save_tiny(tmp_path)
    layer, norm = last_layer(load_tiny(folder).model)
    original = AutoModelForCausalLM.from_pretrained(folder).model
    assert torch.equal(norm, original.norm.weight)
    for name, tensor in original.layers[-1].state_dict().items():
        assert torch.equal(layer[name], tensor), name


def new_training(loaded, version, **options) -> EagleTraining:
    model = loaded.model
    return EagleTraining(start_head(model, version), model.head_rows(), model.layers_count, **options)


@pytest.mark.parametrize("version", [1, 3])
def test_training_lowers_the_loss_and_raises_acceptance(calm, version, tmp_path):
    method = new_training(calm, version, steps=3)
    corpus = greedy_corpus(calm, method.taps)
    before = method.evaluate(corpus[9:])
    losses = learn(method, corpus[:9], epochs=8, rate=2e-3, progress=1.0)
    after = method.evaluate(corpus[9:])
    assert sum(losses[-9:]) < 0.8 * sum(losses[:9])
    assert after.acceptance[0] > max(0.4, before.acceptance[0])
    assert after.acceptance[1] > 0.4
    assert after.overlap[0] > before.overlap[0]
    method.save(tmp_path)
    read = load_eagle(tmp_path, calm.model.layers_count)
    read.bind(calm.model.embedding, calm.model.head_rows())
    again = EagleTraining(read, calm.model.head_rows(), calm.model.layers_count).evaluate(corpus[9:])
    assert again.acceptance == after.acceptance


def test_held_out_acceptance_is_what_the_drafter_gets(calm):
    """The figure for the first place, against drafting from every position of the same texts."""
    method = new_training(calm, 3)
    corpus = greedy_corpus(calm, method.taps, batches=3)
    learn(method, corpus[:2], epochs=3)
    figures = method.evaluate(corpus[2:])
    batch = corpus[2]
    network = EagleNetwork(method.module)
    network.make_room(64)
    right = places = 0
    with torch.inference_mode():
        rows, length = batch.ids.shape
        features = network.fuse(batch.states[:, :-1, : len(method.module.config.taps) * HIDDEN])
        step = Step(0, (0,) * rows, length - 1, batch.ids.device)
        guesses = network.logits(network.step(batch.ids[:, 1:], features, step, KVStore(rows, 64))).argmax(-1)
        truth = (batch.states[..., -HIDDEN:] @ calm.model.head_rows().T).argmax(-1)
        for i in range(length - 2):
            written = batch.mask[:, i + 2]
            places += int(written.sum())
            right += int((written & (guesses[:, i] == truth[:, i + 1])).sum())
    assert figures.acceptance[0] == pytest.approx(right / places, abs=1e-6)


def test_training_resumes_from_a_state_dict(calm):
    corpus = greedy_corpus(calm, new_training(calm, 3).taps, batches=2)

    def step(method, optimizer, batch):
        optimizer.zero_grad()
        method.loss(batch).backward()
        optimizer.step()

    whole = new_training(calm, 3)
    optimizer = torch.optim.AdamW(whole.module.parameters(), 1e-3)
    step(whole, optimizer, corpus[0])
    saved = copy.deepcopy((whole.module.state_dict(), optimizer.state_dict()))
    step(whole, optimizer, corpus[1])
    resumed = new_training(calm, 3)
    resumed.module.load_state_dict(saved[0])
    optimizer = torch.optim.AdamW(resumed.module.parameters(), 1e-3)
    optimizer.load_state_dict(saved[1])
    step(resumed, optimizer, corpus[1])
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], tensor), name


def test_training_on_its_own_outputs_is_what_later_places_need(calm):
    figures = {}
    for steps in (1, 3):
        method = new_training(calm, 1, steps=steps)
        corpus = greedy_corpus(calm, method.taps)
        learn(method, corpus[:9], epochs=8, rate=2e-3, progress=1.0)
        figures[steps] = method.evaluate(corpus[9:]).acceptance
    assert figures[3][1] > figures[1][1] + 0.2
