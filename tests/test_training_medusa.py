"""Training Medusa, blockwise and exit heads: the loss, what is learnt, held-out figures against direct counts."""

from __future__ import annotations

import json

import pytest
import torch
from heads_helpers import LENGTH, greedy_corpus, learn, load_calm

from spectune.heads.medusa_layouts import load_exit, load_medusa
from spectune.training import distillation
from spectune.training.blockwise import BlockwiseTraining
from spectune.training.distillation import soft_cross_entropy
from spectune.training.exit import PLACES, ExitTraining
from spectune.training.loop import Batch
from spectune.training.medusa import MedusaTraining

H, V, LAYERS = 12, 40, 2
DRAFT_IDS = torch.arange(0, V, 2)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_batch(taps: int = 1) -> Batch:
    """Three rows: one whole, one with a long prompt, one padded."""
    ids = torch.randint(0, V, (3, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 14, dtype=torch.bool)
    mask[:, 0] = False
    mask[1, :6] = False
    mask[2, 9:] = False
    return Batch(ids, mask, noise(3, 14, taps * H, seed=2))


def scramble(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(0.3 * noise(*parameter.shape, seed=i))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_calm(tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def corpus(tiny):
    """Text to learn from and text held out, with the states of all taps."""
    batches = greedy_corpus(tiny, (0, 1, LAYERS))
    return batches[:9], batches[9:]


def tapped(batches, *taps: int):
    """The corpus with only some of its taps (0, 1, 2)."""
    width = batches[0].states.shape[-1] // 3
    return [
        b._replace(states=torch.cat([b.states[..., t * width : (t + 1) * width] for t in taps], -1)) for b in batches
    ]


@pytest.mark.parametrize("own", [False, True])
def test_the_chunked_loss_and_its_gradients_equal_the_plain_formula(own, monkeypatch):
    monkeypatch.setattr(distillation, "_LOGITS_AT_ONCE", 3 * 2 * 7)  # 3 places at once
    states, teacher, rows = noise(11, 2, H), noise(11, H, seed=1), noise(7, H, seed=2)
    weight = noise(2, 7, H, seed=3) if own else noise(7, H, seed=3)
    scale = torch.rand(11, 2, generator=torch.Generator().manual_seed(4))
    plain = [x.clone().requires_grad_() for x in (states, weight)]
    ours = [x.clone().requires_grad_() for x in (states, weight)]
    logits = torch.einsum("cnh,ndh->cnd" if own else "cnh,dh->cnd", *plain)
    p = (teacher @ rows.T).softmax(-1)
    expected = (-(p[:, None] * logits.log_softmax(-1)).sum(-1) * scale).sum()
    expected.backward()
    got = soft_cross_entropy(*ours, teacher, rows, scale)
    (2 * got).backward()
    torch.testing.assert_close(got, expected)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, 2 * b.grad)


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize("own", [False, True])
def test_head_i_learns_the_targets_distribution_after_its_own_place(own, draft_ids):
    """Position t, head i: the teacher stands at t + 1 + i, and all tokens from t + 1 to there are the target's."""
    weight, batch = noise(V, H, seed=5), random_batch()
    method = MedusaTraining(weight, LAYERS, draft_ids, heads=3, own_heads=own)
    scramble(method.module)
    rows = weight if draft_ids is None else weight[draft_ids]
    log_q = method.module(batch.states).log_softmax(-1)
    p = (batch.states @ rows.T).softmax(-1)
    expected = torch.zeros(())
    for i in range(3):
        terms = [
            -(p[b, t + 1 + i] * log_q[b, t, i]).sum()
            for b in range(3)
            for t in range(14 - 1 - i)
            if all(batch.mask[b, t + 1 : t + 2 + i])
        ]
        expected = expected + 0.8**i * torch.stack(terms).mean()
    torch.testing.assert_close(method.loss(batch), expected)


def test_the_exit_learns_the_targets_distribution_at_its_own_place():
    weight, batch = noise(V, H, seed=5), random_batch(taps=2)
    method = ExitTraining(weight, LAYERS, torch.ones(H), 1e-5, 1, DRAFT_IDS, rank=3)
    assert method.taps == (1, LAYERS)
    scramble(method.module)
    log_q = method.module(batch.states[..., :H]).log_softmax(-1)
    p = (batch.states[..., H:] @ weight[DRAFT_IDS].T).softmax(-1)
    terms = [-(p[b, t] * log_q[b, t]).sum() for b in range(3) for t in range(13) if batch.mask[b, t + 1]]
    torch.testing.assert_close(method.loss(batch), torch.stack(terms).mean())


def test_only_the_heads_learn():
    weight, batch = noise(V, H, seed=5), random_batch()
    for method in (MedusaTraining(weight, LAYERS, heads=2), BlockwiseTraining(weight, LAYERS, heads=2)):
        scramble(method.module)
        method.loss(batch).backward()
        assert weight.grad is None
        assert not method.module.head_weight().requires_grad
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in method.module.parameters())


def test_training_runs_in_float32_whatever_the_target_is_in():
    batch = random_batch()
    batch = batch._replace(states=batch.states.bfloat16())
    method = MedusaTraining(noise(V, H).bfloat16(), LAYERS, DRAFT_IDS, heads=2)
    assert {p.dtype for p in method.module.parameters()} == {torch.float32}
    assert method.loss(batch).dtype == torch.float32
    method.evaluate([batch])


def test_the_loss_may_be_computed_in_bfloat16():
    batch = random_batch()
    method = MedusaTraining(noise(V, H), LAYERS, DRAFT_IDS, heads=2, own_heads=True)
    scramble(method.module)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        method.module.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            loss = method.loss(batch)
        loss.backward()
        gradients.append([float(loss.detach()), *(p.grad.clone() for p in method.module.parameters())])
    for exact, rough in zip(*gradients, strict=True):
        torch.testing.assert_close(torch.as_tensor(rough), torch.as_tensor(exact), rtol=0.05, atol=0.02)


def make(kind: str, tiny, draft_ids=None):
    head = tiny.model.head_rows(None).detach()
    if kind == "medusa":
        return MedusaTraining(head, LAYERS, draft_ids)
    if kind == "medusa-own":
        return MedusaTraining(head, LAYERS, draft_ids, own_heads=True)
    if kind == "blockwise":
        return BlockwiseTraining(head, LAYERS, draft_ids)
    norm = tiny.model.model.model.norm
    return ExitTraining(head, LAYERS, norm.weight.detach(), norm.variance_epsilon, 1, draft_ids, rank=32)


@pytest.mark.parametrize("kind", ["medusa", "medusa-own", "blockwise", "exit"])
def test_training_lowers_the_loss_and_raises_held_out_acceptance(tiny, corpus, kind):
    taps = (1, 2) if kind == "exit" else (2,)
    train, held_out = (tapped(part, *taps) for part in corpus)
    method = make(kind, tiny)
    before = method.evaluate(held_out)
    losses = learn(method, train)
    after = method.evaluate(held_out)
    assert sum(losses[-9:]) < 0.9 * sum(losses[:9])  # what the target itself leaves open cannot be learnt
    assert after.acceptance[0] > before.acceptance[0] + 0.1
    assert after.overlap[0] > before.overlap[0] + 0.1


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, 128, 2)])
def test_the_held_out_acceptance_is_what_a_count_along_greedy_text_gives(tiny, corpus, draft_ids):
    train, held_out = (tapped(part, 2) for part in corpus)
    method = make("medusa", tiny, draft_ids)
    learn(method, train, epochs=4)
    figures = method.evaluate(held_out)
    heads, (batch,) = method.module.heads, held_out
    guesses = method.module(batch.states).argsort(-1, descending=True)
    if draft_ids is not None:
        guesses = draft_ids[guesses]
    reached, right = [0] * heads, [0] * heads
    ranks = torch.zeros(heads, 10)
    judged = [0] * heads
    p = (batch.states @ tiny.model.head_rows(None).T).softmax(-1)
    for row in range(len(batch.ids)):
        for t in range(LENGTH):
            alive = True
            for i in range(heads):
                # The target's choice behind the last token of the text is known too, from its own state.
                if t + 1 + i >= LENGTH or not batch.mask[row, t + 1]:
                    break
                truth = int(p[row, t + 1 + i].argmax())
                if t + 2 + i < LENGTH:
                    assert truth == int(batch.ids[row, t + 2 + i])
                judged[i] += 1
                ranks[i] += guesses[row, t, i, :10] == truth
                reached[i] += alive
                alive = alive and int(guesses[row, t, i, 0]) == truth
                right[i] += alive
    assert right[1] > 0
    assert figures.acceptance == pytest.approx([a / max(b, 1) for a, b in zip(right, reached, strict=True)], abs=1e-6)
    expected = ranks / torch.tensor(judged)[:, None]
    torch.testing.assert_close(torch.tensor(method.module.rank_accuracy), expected, atol=2e-5, rtol=0)


def test_acceptance_is_judged_only_where_the_text_is_greedy(monkeypatch):
    """Where the text goes another way than the target would, nobody knows what it would do behind its own choice."""
    ids = torch.tensor([[0, 1, 2, 3, 4, 5]])
    # The target's choices: the text's next token everywhere but behind token 2, where the text was sampled.
    chosen = torch.tensor([1, 2, 5, 4, 5, 0])
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), 9 * torch.eye(6)[chosen][None])
    method = BlockwiseTraining(torch.eye(6), LAYERS, heads=2, inner_size=1)
    # Head 0 is judged from t = 0, 1, 3, 4 (not from 2), head 1 from t = 0 and 3: behind t = 1 stands the sampled token.
    guesses = torch.tensor([[2, 5], [3, 0], [4, 4], [5, 0], [1, 1], [0, 0]])  # by t and head
    monkeypatch.setattr(method.module, "head_states", lambda x: 9 * torch.eye(6)[guesses][None])
    # Head 0 against the choices 2, 5, 5, 0: right at t = 0 and 3. Head 1 behind those against 5 and 0: right twice.
    assert method.evaluate([batch]).acceptance == [0.5, 1.0]
    guesses[3, 1] = 3
    assert method.evaluate([batch]).acceptance == [0.5, 0.5]
    guesses[4, 0] = 0  # no token behind the text's end is judged for head 1
    assert method.evaluate([batch]).acceptance == [0.75, 0.5]
    guesses[2, 0] = 1
    assert method.evaluate([batch]).acceptance == [0.75, 0.5]
    guesses[1, 0] = 5  # right, but what would follow is not known: the text went on with another token
    assert method.evaluate([batch]).acceptance == [1.0, 0.5]


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, 128, 3)])
def test_the_overlap_is_the_mean_of_what_both_distributions_share(tiny, corpus, draft_ids):
    _, (batch,) = corpus[0], tapped(corpus[1], 2)
    method = make("blockwise", tiny, draft_ids)
    figures = method.evaluate([batch])
    p = (batch.states @ tiny.model.head_rows(None).T).softmax(-1)
    q = method.module(batch.states).softmax(-1).detach()
    ids = torch.arange(128) if draft_ids is None else draft_ids
    for i in range(4):
        shared = [
            torch.minimum(p[b, t + 1 + i, ids], q[b, t, i]).sum()
            for b in range(len(batch.ids))
            for t in range(5, LENGTH - 1 - i)
        ]
        assert figures.overlap[i] == pytest.approx(float(torch.stack(shared).mean()), abs=1e-5)


def test_the_exits_acceptance_is_what_a_count_along_greedy_text_gives(tiny, corpus):
    _, (batch,) = corpus[0], tapped(corpus[1], 1, 2)
    method = make("exit", tiny)
    learn(method, tapped(corpus[0], 1, 2), epochs=4)
    figures = method.evaluate([batch])
    guess = method.module(batch.states[..., :64]).argmax(-1)
    truth = (batch.states[..., 64:] @ tiny.model.head_rows(None).T).argmax(-1)
    reached, right = [0] * PLACES, [0] * PLACES
    for row in range(len(batch.ids)):
        for t in range(5, LENGTH - 1):
            for i in range(PLACES):
                if t + i >= LENGTH - 1:
                    break
                reached[i] += 1
                if guess[row, t + i] != truth[row, t + i]:
                    break
                right[i] += 1
    assert right[1] > 0
    assert figures.acceptance == pytest.approx([a / max(b, 1) for a, b in zip(right, reached, strict=True)], abs=1e-6)


def test_the_figures_do_not_depend_on_how_the_work_is_cut(tiny, corpus, monkeypatch):
    held_out = tapped(corpus[1], 2)
    method = make("blockwise", tiny)
    whole = method.evaluate(held_out)
    ranks = method.module.rank_accuracy
    monkeypatch.setattr(distillation, "_LOGITS_AT_ONCE", 5000)
    assert method.evaluate(held_out).acceptance == whole.acceptance
    assert method.module.rank_accuracy == ranks
    (batch,) = held_out
    rows = [Batch(batch.ids[[i]], batch.mask[[i]], batch.states[[i]]) for i in range(len(batch.ids))]
    assert method.evaluate(rows).acceptance == pytest.approx(whole.acceptance)


def test_saved_heads_carry_their_measured_rank_accuracy(tiny, corpus, tmp_path):
    method = MedusaTraining(tiny.model.head_rows(None).detach(), LAYERS, torch.arange(64), base_model="tiny")
    method.evaluate(tapped(corpus[1], 2))
    method.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    stored = config["rank_accuracy"]
    assert len(stored) == 4
    assert {len(row) for row in stored} == {10}
    heads = load_medusa(tmp_path)
    heads.bind(tiny.model.embedding, tiny.model.head_rows(None))
    assert heads.rank_accuracy == method.module.rank_accuracy
    x = noise(3, 64)
    torch.testing.assert_close(heads(x), method.module(x))


def test_a_saved_exit_comes_back(tiny, corpus, tmp_path):
    method = make("exit", tiny, torch.arange(64))
    learn(method, tapped(corpus[0], 1, 2), epochs=1)
    method.save(tmp_path)
    head = load_exit(tmp_path)
    head.bind(tiny.model.embedding, tiny.model.head_rows(None))
    x = noise(3, 64)
    torch.testing.assert_close(head(x), method.module(x))
