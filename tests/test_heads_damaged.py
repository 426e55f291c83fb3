"""Damaged or foreign files of heads: always one line for people, never a traceback or silent nonsense."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import load_tiny
from decoding_helpers import drafter_of
from eagle_helpers import VARIANTS, randomize
from safetensors.torch import load_file, save_file

from spectune.decoding.loading import Loaded
from spectune.errors import UsageError
from spectune.heads.blockwise import BlockwiseConfig, BlockwiseHeads
from spectune.heads.checkpoint import making_head, read_tensors
from spectune.heads.eagle import EagleHead
from spectune.heads.eagle_layouts import save_eagle
from spectune.heads.exit import ExitConfig, ExitHead
from spectune.heads.medusa import MedusaConfig, MedusaHeads
from spectune.heads.medusa_layouts import save_blockwise, save_exit, save_medusa

IDS = torch.arange(3, 67)


@pytest.fixture(scope="module")
def target(tiny_folder) -> Loaded:
    return load_tiny(tiny_folder)


@pytest.fixture
def folder(tmp_path):
    """A whole head of a kind, to be damaged."""

    def make(kind: str):
        if kind == "eagle":
            head = EagleHead(VARIANTS["eagle"], IDS)
            randomize(head)
            save_eagle(tmp_path, head)
        elif kind == "medusa":
            heads = MedusaHeads(MedusaConfig(64, 128, heads=2), IDS)
            heads.bind(torch.randn(128, 64), torch.randn(128, 64))
            save_medusa(tmp_path, heads)
        elif kind == "blockwise":
            save_blockwise(tmp_path, BlockwiseHeads(BlockwiseConfig(64, 128, 32, 2), IDS))
        else:
            save_exit(tmp_path, ExitHead(ExitConfig(1, 64, 128, 4), IDS))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("medusa", "architectures", 1.5),
        ("medusa", "spectune_head", [1]),
        ("medusa", "rank_accuracy", "x"),
        ("blockwise", "rank_accuracy", 0.5),
        ("eagle", "hidden_size", 1 << 70),
        ("eagle", "draft_vocab_size", float("nan")),
        ("eagle", "rms_norm_eps", "x"),
        ("eagle", "rms_norm_eps", float("nan")),
        ("eagle", "rope_theta", "x"),
        ("eagle", "rope_scaling", "x"),
        ("eagle", "rope_scaling", {"rope_type": "nope"}),
        ("eagle", "rope_scaling", {"rope_type": "yarn"}),
        ("eagle", "transformer_layer_config", 1.5),
        ("eagle", "layer_types", 1.5),
        ("early-exit", "rms_norm_eps", None),
        ("early-exit", "rms_norm_eps", float("inf")),
        ("early-exit", "rms_norm_eps", -1),
    ],
)
def test_a_config_with_a_value_of_another_kind_is_refused(folder, target, kind, key, value):
    where = folder(kind)
    config = json.loads((where / "config.json").read_text())
    drafter_of(target, f"{kind}:{where}")  # as it was
    (where / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UsageError):
        drafter_of(target, f"{kind}:{where}")


@pytest.mark.parametrize("kind", ["eagle", "medusa", "blockwise", "early-exit"])
@pytest.mark.parametrize("damage", [lambda x: x[(0,) * x.dim()], lambda x: x.float() * torch.nan, lambda x: x[None]])
def test_every_tensor_that_is_none_is_refused(folder, target, kind, damage):
    where = folder(kind)
    (file,) = where.glob("*.safetensors")
    whole = load_file(file)
    for name in whole.keys() - {"t2d"}:
        save_file(whole | {name: damage(whole[name]).contiguous()}, file)
        with pytest.raises(UsageError):
            drafter_of(target, f"{kind}:{where}")


def test_a_config_nested_too_deeply_is_refused(folder, target):
    where = folder("medusa")
    (where / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UsageError, match="damaged"):
        drafter_of(target, f"medusa:{where}")


def test_a_pickle_of_unnamed_tensors_is_refused(tmp_path):
    torch.save({1: torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="no table of tensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("error", [TypeError("x"), AttributeError("y"), IndexError("z")])
def test_a_pickle_that_breaks_the_reader_in_any_way_is_damaged(tmp_path, monkeypatch, error):
    def broken(*_, **__):
        raise error

    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    monkeypatch.setattr(torch, "load", broken)
    with pytest.raises(UsageError, match="damaged"):
        read_tensors(tmp_path)


def test_a_full_device_is_no_damaged_head(tmp_path):
    with pytest.raises(torch.OutOfMemoryError), making_head(tmp_path):
        raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize(("kind", "hint"), [("early-exit", "early-exit:"), ("eagle", "eagle:")])
def test_the_hint_for_a_head_of_another_kind_is_a_name_that_works(folder, target, kind, hint):
    where = folder(kind)
    with pytest.raises(UsageError) as caught:
        drafter_of(target, f"medusa:{where}")
    assert caught.value.hint == f"write {hint}{where}"
    drafter_of(target, caught.value.hint.removeprefix("write "))
