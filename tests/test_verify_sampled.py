"""The distribution test passes what is lossless and finds what is not: biased rules, lying drafters, wrong settings."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import drafter_of
from verify_helpers import prompts_of, put_drafter, save_near, spec_of, tiny_engine

from spectune.decoding import rules, verification
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.random import CounterCoins, Stream, pick, uniform
from spectune.decoding.sampling import probabilities
from spectune.sweeping.cell import Sampling
from spectune.verifying.conclude import conclude
from spectune.verifying.exact import forced_logits
from spectune.verifying.record import IdentityCheck
from spectune.verifying.sampled import check_distribution, favoured

ALPHA = 1e-5
SAMPLES = 1500


@pytest.fixture(scope="module")
def near(tmp_path_factory, tiny_folder):
    return str(save_near(tmp_path_factory.mktemp("near"), tiny_folder))


@pytest.fixture(scope="module")
def engine(tiny_folder):
    return tiny_engine(tiny_folder)


def check(engine, drafter, *, samples=SAMPLES, **changes):
    spec = spec_of(engine, drafter, **changes)
    found = check_distribution(engine, spec, prompts_of(), samples=samples, alpha=ALPHA, on_tokens=lambda count: None)
    return spec, found


def seeded_ok() -> IdentityCheck:
    return IdentityCheck(kind="seeded", requests=4, identical=4, tokens=96, drafted=40, accepted=20)


def verdict(spec, found) -> str:
    return conclude(spec, seeded_ok(), found)[0]


@pytest.mark.parametrize(
    ("drafter", "changes"),
    [
        ("near", {}),
        ("near", {"rule": "block", "k": 3, "batch": 3}),
        ("ngram", {"batch": 4}),
        ("early-exit:1", {"batch": 1, "sampling": Sampling(temperature=0.8, top_k=20, top_p=0.9)}),
        ("near", {"sampling": Sampling(temperature=1.2, min_p=0.02, repetition_penalty=1.3)}),
    ],
)
def test_lossless_rules_are_consistent_and_the_power_is_stated(engine, near, drafter, changes):
    spec, found = check(engine, near if drafter == "near" else drafter, **changes)
    assert verdict(spec, found) == "consistent", found
    assert found.tokens >= SAMPLES
    assert 0 < found.detectable < 0.1
    assert found.rounding < 1e-4  # float32
    assert found.prompts == 4


def test_bfloat16_is_consistent_and_its_rounding_is_allowed_for(tiny_folder):
    engine = tiny_engine(tiny_folder, "bfloat16")
    spec, found = check(engine, str(tiny_folder), sampling=Sampling(temperature=0.9, top_p=0.95))
    assert verdict(spec, found) == "consistent", found
    assert 1e-4 < found.rounding < 0.05
    assert found.tolerance == 2 * found.rounding


def test_match_has_no_favoured_tokens_since_its_draft_sees_the_coins(engine, near):
    _, found = check(engine, near, rule="match", samples=600)
    assert {s.name for s in found.sets} == {"likely"}
    assert not found.rejected


def test_stop_tokens_end_continuations_and_bias_nothing(engine, near):
    spec, found = check(engine, near, ignore_eos=False, max_new_tokens=48)
    assert verdict(spec, found) == "consistent", found


def from_p(_):
    """After a rejection, draw from p and not from the residual."""
    return lambda p, q, accepted, counts, weight: rules._row(p, accepted)


def accept_all(_):
    return lambda tokens, counts, p, q, coins: rules.Verdict(counts, coins.draw(rules._row(p, counts)))


def lenient(good):
    """Accept with min(1, 3 p / q): Leviathan's lenience."""
    return lambda tokens, counts, p, q, coins: good(tokens, counts, p, q / 3, coins)


@pytest.mark.parametrize(
    ("name", "broken"), [("_residual", from_p), ("speculative", accept_all), ("speculative", lenient)]
)
def test_a_biased_rule_fails(engine, near, monkeypatch, name, broken):
    monkeypatch.setattr(rules, name, broken(getattr(rules, name)))
    spec, found = check(engine, near)
    assert verdict(spec, found) == "FAIL"
    assert "favoured tokens" in found.rejected
    assert found.measured > found.detectable


class Sharpened(ModelDrafter):
    """Draws at half the temperature and records the distribution of the whole one."""

    def _choose(self, logits, before, round_, place):
        q = probabilities(logits, round_.sampling)
        sharp = probabilities(logits, round_.sampling.model_copy(update={"temperature": 0.5}))
        return pick(sharp, round_.draft_coins(place, logits.device)), q


class Greedy(ModelDrafter):
    """Draws nothing, takes the best token, and records a distribution all the same."""

    def _choose(self, logits, before, round_, place):
        return logits.argmax(-1), probabilities(logits, round_.sampling)


class Honest(ModelDrafter):
    """Takes the best token and says so."""

    def _choose(self, logits, before, round_, place):
        return logits.argmax(-1), None


@pytest.mark.parametrize(("kind", "expected"), [(Sharpened, "FAIL"), (Greedy, "FAIL"), (Honest, "consistent")])
@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_a_drafter_that_records_another_q_than_it_draws_from_fails(engine, near, kind, expected, rule):
    model = drafter_of(engine.loaded, near).model
    name = put_drafter(engine, kind.__name__, kind(model, shared_vocab=128, target_vocab=128))
    spec, found = check(engine, name, rule=rule)
    assert verdict(spec, found) == expected, found


def test_a_verification_at_another_temperature_fails(engine, near, monkeypatch):
    def cooler(logits, sampling):
        return probabilities(logits, sampling.model_copy(update={"temperature": 0.8 * sampling.temperature}))

    monkeypatch.setattr(verification, "probabilities", cooler)
    spec, found = check(engine, near)
    assert verdict(spec, found) == "FAIL"
    assert "likely tokens" in found.rejected


def test_tokens_outside_of_top_k_fail_even_if_they_are_few(engine, near, monkeypatch):
    calls = []

    def leaking(logits, sampling):
        calls.append(0)
        off = {"top_k": 0} if len(calls) % 3 == 0 else {}
        return probabilities(logits, sampling.model_copy(update=off))

    monkeypatch.setattr(verification, "probabilities", leaking)
    spec, found = check(engine, near, sampling=Sampling(temperature=1.0, top_k=30))
    assert verdict(spec, found) == "FAIL"
    assert "impossible tokens" in found.rejected


def test_a_coin_that_is_used_twice_fails(engine, monkeypatch):
    """Each token alone follows the target; only neighbours show it."""

    class Reused(CounterCoins):
        def draw(self, weights):
            pairs = self.positions // 2
            return pick(weights, uniform(self.seeds, Stream.TARGET, pairs, torch.zeros_like(pairs)))

    monkeypatch.setattr(verification, "CounterCoins", Reused)
    _, found = check(engine, "ngram:9")  # drafts nearly nothing: every token is a draw from the target
    assert "independence" in found.rejected, found


def test_a_cache_that_keeps_rejected_tokens_fails(engine, near, monkeypatch):
    """The verification reads keys of another text from the second round on."""
    step = verification.Step

    def late(first_row, starts, query, device, tail=None):
        shifted = starts if query > 8 or first_row or min(starts) < 2 else tuple(s - 1 for s in starts)
        return step(first_row, shifted, query, device, tail)

    monkeypatch.setattr(verification, "Step", late)
    spec, found = check(engine, near)
    assert verdict(spec, found) == "FAIL"


def test_too_few_tokens_cannot_be_judged_and_the_number_that_can_is_named(engine, near):
    spec, found = check(engine, near, samples=100)
    assert not found.rejected
    told, reason = conclude(spec, seeded_ok(), found)
    assert told == "cannot judge"
    enough = int(reason.rpartition(" ")[2])
    assert 500 < enough < 3000
    spec, found = check(engine, near, samples=enough)
    assert verdict(spec, found) == "consistent"


def test_nothing_drafted_cannot_be_judged(engine):
    class Nothing:
        taps = ()
        device = None

        def start(self, rows, capacity): ...
        def admit(self, index, row, states): ...
        def propose(self, round_): ...
        def keep(self, rows, kept): ...
        def move(self, source, destination): ...

    name = put_drafter(engine, "nothing", Nothing())
    spec, found = check(engine, name, samples=200)
    assert verdict(spec, found) == "cannot judge"


def test_a_lossy_rule_is_lossy_and_its_distance_is_measured(engine, near):
    spec, found = check(engine, near, rule="typical")
    told, reason = conclude(spec, seeded_ok(), found)
    assert told == "lossy"
    assert found.measured > 0.05
    assert f"{found.measured:.3f}" in reason


def test_the_same_call_gives_the_same_numbers(engine, near):
    assert check(engine, near, samples=300)[1] == check(engine, near, samples=300)[1]


def test_favoured_tokens_are_those_that_a_draw_from_p_after_a_rejection_makes_likelier():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 50, 9, generator=generator, dtype=torch.float64) ** 3
    p[:, :2], q[:, 2:4] = 0.0, 0.0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    both = torch.minimum(p, q)
    biased = both + (1 - both.sum(-1, keepdim=True)) * p
    assert torch.equal(favoured(p, q), (biased > p + 1e-15) & (p > 0))
    # Their excess is then the whole distance.
    excess = ((biased - p) * favoured(p, q)).sum(-1)
    assert torch.allclose(excess, (biased - p).abs().sum(-1) / 2)


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_forced_logits_are_those_of_one_token_at_a_time(engine, penalty):
    sampling = Sampling(temperature=1.0, repetition_penalty=penalty)
    prompt, outputs = [5, 6, 7], [[9, 10, 5, 11, 9], [12, 7, 13]]
    whole = forced_logits(engine.loaded.model, prompt, outputs, sampling)
    assert whole.shape == (2, 5, 128)
    for row, output in zip(whole, outputs, strict=True):
        for t in range(len(output)):
            alone = forced_logits(engine.loaded.model, [*prompt, *output[:t]], [[0]], sampling)[0, 0]
            assert torch.allclose(row[t], alone, atol=1e-4)
    for width, copies in ((1, 1), (2, 3)):
        again = forced_logits(engine.loaded.model, prompt, outputs, sampling, width=width, copies=copies)
        assert torch.allclose(again[0], whole[0], atol=1e-4)
