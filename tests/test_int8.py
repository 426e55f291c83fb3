"""Drafts with weights of 8 bits: close to what they round, and named, counted and exported as what they are."""

from __future__ import annotations

import pytest
import torch
from conftest import load_tiny
from decoding_helpers import decode, drafter_of, random_prompts
from test_adapter import save

from spectune.decoding.drafters import build_drafter
from spectune.decoding.product import Int8Product, Product
from spectune.decoding.stopping import StopRule
from spectune.errors import UsageError
from spectune.recommending.exports.engines import ENGINES, exports
from spectune.recommending.exports.export import Wanted
from spectune.speedup.elsewhere import bytes_read
from spectune.speedup.profile import Config
from spectune.sweeping.drafter_names import drafts_at_once, drafts_trees, has_int8_weights, runs_on_target_cache
from spectune.sweeping.memory import is_part_of, own_kv_bytes, weight_bytes

CPU = torch.device("cpu")


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Deviation per row, in deviations of the expected row; the worst one."""
    return float(((found - expected).std(-1) / expected.std(-1)).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_in_8_bits_is_within_a_few_percent(dtype, bias):
    torch.manual_seed(0)
    weight, x = torch.randn(300, 128, dtype=dtype), torch.randn(2, 3, 128, dtype=dtype)
    added = torch.randn(300, dtype=dtype) if bias else None
    exact = Product(weight, added)
    found = exact.int8()(x)
    assert (found.dtype, found.shape) == (dtype, (2, 3, 300))
    assert 0 < off(found.float(), exact(x).float()) < 0.04
    assert torch.equal(found, Int8Product(weight, added)(x))


def test_large_rows_of_weight_and_input_do_not_round_the_others_away():
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128), torch.randn(3, 128)
    weight[:4] *= 1000
    x[0] *= 1000
    found, expected = Int8Product(weight)(x), x @ weight.T
    assert off(found, expected) < 0.04
    assert off(found[:, 4:], expected[:, 4:]) < 0.04
    packed = Int8Product(weight)._packed
    assert off(torch.ops.quantized.linear_dynamic(x, packed, True)[:, 4:], expected[:, 4:]) > 0.5  # one scale for all


@pytest.mark.parametrize("weight", [torch.ones(4, 8), torch.zeros(3, 5), torch.ones(400, 64) + 1e-4, torch.ones(1, 7)])
def test_even_weights_are_products_like_any_other(weight):
    x = torch.rand(2, weight.shape[1])
    assert torch.allclose(Int8Product(weight)(x), x @ weight.T, atol=0.05 * weight.shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_zeros_give_zeros(dtype):
    weight = torch.randn(8, 16)
    weight[3] = 0
    found = Int8Product(weight)(torch.zeros(2, 16, dtype=dtype))
    assert torch.equal(found, torch.zeros(2, 8, dtype=dtype))
    assert torch.equal(Int8Product(weight)(torch.randn(2, 16))[:, 3], torch.zeros(2))


def test_products_of_the_same_input_are_stacked():
    modules = [torch.nn.Linear(32, n) for n in (5, 7)]
    x = torch.randn(4, 32)
    with torch.inference_mode():
        expected = torch.cat([module(x) for module in modules], -1)
        assert off(Int8Product.of(*modules)(x), expected) < 0.04


def test_a_weight_that_is_not_on_a_cpu_is_refused():
    with pytest.raises(UsageError, match="int8 drafts run on a CPU, not on meta"):
        Int8Product(torch.empty(4, 4, device="meta"))


def test_without_the_operator_the_error_is_one_line(monkeypatch):
    def missing(*arguments):
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack")

    monkeypatch.setattr(torch.ops.quantized, "linear_prepack", missing)
    with pytest.raises(UsageError, match="this torch has no int8 products"):
        Int8Product(torch.randn(4, 4))


def test_wrong_products_are_found_when_the_weight_is_laid_out(monkeypatch):
    good = torch.ops.quantized.linear_dynamic
    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic", lambda *arguments: good(*arguments).flip(-1))
    with pytest.raises(UsageError, match="int8 products are wrong"):
        Int8Product(torch.randn(40, 40))


def accepted(loaded, name: str) -> float:
    run = decode(loaded, drafter_of(loaded, name), random_prompts(5), k=3, batch=2, max_new_tokens=24, stop=StopRule())
    rounds = [r for generation in run.generations for r in generation.rounds]
    return sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)


def test_the_target_in_8_bits_is_mostly_accepted_by_itself(tiny):
    assert accepted(tiny, "int8:target") > 0.8


@pytest.mark.parametrize("name", ["early-exit:1", "layer-skip:m1"])
def test_parts_of_the_target_keep_their_acceptance(tiny, name):
    assert accepted(tiny, f"int8:{name}") == pytest.approx(accepted(tiny, name), abs=0.15)


def test_the_target_keeps_its_own_weights(tiny):
    ids = torch.arange(3, 9)[None]
    from spectune.decoding.cache import KVStore, Step

    def logits():
        with torch.inference_mode():
            return tiny.model.forward(ids, Step(0, (0,), 6, CPU), KVStore(1, 6))

    before = logits()
    drafter_of(tiny, "int8:target")
    assert torch.equal(logits(), before)


def test_a_model_of_another_family_is_refused(tmp_path):
    loaded = load_tiny(save("gpt2", tmp_path))
    with pytest.raises(UsageError, match=r"cannot be stored in 8 bits: only models of these families are, llama"):
        drafter_of(loaded, "int8:target")


def test_facts_about_the_draft_count_8_bits(tiny, other_folder):
    infos = {}
    for name in (f"{other_folder}", f"int8:{other_folder}", f"tree:int8:{other_folder}", "int8:target"):
        built = build_drafter(name, tiny, device=CPU, dtype=torch.float32)
        assert built.info is not None
        assert built.info.name == name
        infos[name] = built.info
    plain, eight, tree, whole = infos.values()
    assert 4 * eight.weight_bytes_per_step == plain.weight_bytes_per_step
    assert (eight.kv_bytes_per_token, eight.dtype, eight.int8) == (plain.kv_bytes_per_token, "float32", True)
    assert len({info.digest for info in infos.values()}) == 4
    assert weight_bytes(tiny.info, [eight]) == weight_bytes(tiny.info, []) + eight.parameters
    # A copy in 8 bits takes room of its own, though it reads the target's cache.
    assert not is_part_of(tiny.info, whole)
    assert [own_kv_bytes(tiny.info, info) > 0 for info in (None, plain, eight, tree, whole)] == [
        False,
        *[True] * 3,
        False,
    ]
    # Elsewhere both are taken to run in bfloat16.
    assert bytes_read(eight) == bytes_read(plain)
    assert tree.weight_bytes_per_step == eight.weight_bytes_per_step


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("int8:target", True),
        ("tree:int8:target", True),
        ("int8:early-exit:8", True),
        ("sequoia:int8:layer-skip:3", True),
        ("int8:targets/model", False),
        ("int8:eagle3:demo", False),
        ("early-exit:8", False),  # that it is a part of the target its digest says
    ],
)
def test_parts_of_the_target_in_8_bits_run_on_its_cache(name, shares):
    assert runs_on_target_cache(name) == shares


def test_names_say_what_the_drafter_behind_them_does():
    assert drafts_at_once("int8:medusa:demo")
    assert not drafts_at_once("int8:eagle3:demo")
    assert drafts_trees("tree:int8:eagle3:demo")
    assert [has_int8_weights(n) for n in ("int8:x", "tree:int8:x", "staged:ngram>int8:x", "./int8", "x/int8-y")] == [
        *[True] * 3,
        *[False] * 2,
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_gets_the_draft_itself_with_a_note(engine):
    def export(drafter):
        (found,) = exports(Wanted(Config(drafter, "greedy", 4), "org/target"), engine=engine)
        return found

    for drafter in ("eagle3:a/b", "a/b", "medusa:a/b", "tree:eagle3:a/b"):
        plain, eight = (
            export(drafter),
            export(drafter.replace("eagle3", "int8:eagle3") if "tree" in drafter else f"int8:{drafter}"),
        )
        assert eight.text == plain.text
        if plain.text:
            assert "8 bits" in "".join(eight.notes)
            assert "8 bits" not in "".join(plain.notes)
    whole = export("int8:target")
    assert whole.text is None
    assert "no int8:target method" in whole.notes[0]
