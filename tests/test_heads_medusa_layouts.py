"""Files of Medusa, blockwise, MLP and exit heads: public layouts against readers written here, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_heads_medusa import DRAFT_IDS, H, V, scramble
from torch import nn
from torch.nn import functional

from spectune.errors import UsageError
from spectune.heads.blockwise import BlockwiseConfig, BlockwiseHeads
from spectune.heads.checkpoint import detect_family
from spectune.heads.exit import ExitConfig, ExitHead
from spectune.heads.medusa import MedusaConfig, MedusaHeads
from spectune.heads.medusa_layouts import (
    load_blockwise,
    load_exit,
    load_medusa,
    load_mlp,
    save_blockwise,
    save_exit,
    save_medusa,
    save_mlp,
)
from spectune.heads.mlp import MlpConfig, MlpSpeculator

ACCURACY = ((0.5, 0.25), (0.375, 0.125))
HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(8))
X = torch.randn(3, H, generator=torch.Generator().manual_seed(9))


def medusa(*, own: bool = False, ids: torch.Tensor | None = None, layers: int = 2, bias: bool = True) -> MedusaHeads:
    heads = MedusaHeads(
        MedusaConfig(H, V, heads=2, layers=layers, own_heads=own, bias=bias, rank_accuracy=ACCURACY), ids
    )
    heads.start_from(HEAD)
    scramble(heads)
    return heads


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def vllm_logits(folder: Path, x: torch.Tensor) -> torch.Tensor:
    """Logits [n, B, V] as vLLM's Medusa model computes them from a folder; -inf outside the token map.

    Follows vllm/model_executor/models/medusa.py: names, which tensors it looks at, and how it trims.
    """
    config, file = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert config["model_type"] == "medusa"
    trimmed = config["truncated_vocab_size"] < config["vocab_size"]
    token_map = file["token_map"] if trimmed else None
    out = []
    for i in range(config["num_heads"]):
        y = x
        for j in range(config["num_hidden_layers"]):
            bias = file[f"blocks.{i}.layers.{j}.bias"] if config.get("medusa_fc_bias", False) else None
            y = y + functional.silu(functional.linear(y, file[f"blocks.{i}.layers.{j}.weight"], bias))
        weight = file["lm_head.weight"] if config.get("original_lm_head", False) else file[f"lm_heads.{i}.weight"]
        if token_map is not None and len(weight) > len(token_map):
            weight = weight[token_map]
        assert weight.shape == (config["truncated_vocab_size"], config["hidden_size"])
        logits = y @ weight.T
        if token_map is not None:
            logits = torch.full((len(x), config["vocab_size"]), -torch.inf).index_copy(1, token_map, logits)
        out.append(logits)
    return torch.stack(out)


class FasterDecodingHead(nn.Sequential):
    """One head as FasterDecoding's repository builds it."""

    class ResBlock(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.linear = nn.Linear(size, size)

        def forward(self, x):
            return x + functional.silu(self.linear(x))

    def __init__(self, layers: int) -> None:
        super().__init__(*(self.ResBlock(H) for _ in range(layers)), nn.Linear(H, V, bias=False))


def faster(heads: int, layers: int = 1) -> nn.ModuleList:
    module = nn.ModuleList(FasterDecodingHead(layers) for _ in range(heads))
    scramble(module)
    return module


def wide(heads, logits: torch.Tensor) -> torch.Tensor:
    """[B, n, D] of our heads -> [n, B, V] with -inf outside the draft vocabulary."""
    logits = logits.transpose(0, 1)
    if heads.draft_ids is None:
        return logits
    return torch.full((*logits.shape[:2], V), -torch.inf).index_copy(2, heads.draft_ids, logits)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("own", "ids"), [(False, None), (False, DRAFT_IDS), (True, DRAFT_IDS)])
def test_vllm_computes_the_same_from_what_we_save(tmp_path, own, ids, bias):
    heads = medusa(own=own, ids=ids, bias=bias)
    save_medusa(tmp_path, heads)
    torch.testing.assert_close(vllm_logits(tmp_path, X), wide(heads, heads(X)))
    back = load_medusa(tmp_path)
    back.bind(HEAD, HEAD)
    torch.testing.assert_close(back(X), heads(X))
    assert back.rank_accuracy == ACCURACY
    assert detect_family(tmp_path) == "medusa"


def test_whole_own_heads_are_saved_as_fasterdecoding_loads_them(tmp_path):
    heads = medusa(own=True)
    save_medusa(tmp_path, heads, base_model="target")
    theirs = nn.ModuleList(FasterDecodingHead(2) for _ in range(2))
    theirs.load_state_dict(load_file(tmp_path / "medusa_lm_head.safetensors"), strict=True)
    torch.testing.assert_close(torch.stack([head(X) for head in theirs], 1), heads(X))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["base_model_name_or_path"]) == (
        2,
        2,
        "target",
    )
    back = load_medusa(tmp_path)
    torch.testing.assert_close(back(X), heads(X))
    assert back.rank_accuracy == ACCURACY
    assert detect_family(tmp_path) == "medusa"


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_fasterdecoding_heads_are_counted_not_believed(tmp_path, file):
    theirs = faster(heads=5)
    write(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, theirs.state_dict(), file)
    heads = load_medusa(tmp_path)
    assert heads.heads == 5
    heads.bind(HEAD, HEAD)
    torch.testing.assert_close(heads(X), torch.stack([head(X) for head in theirs], 1))


def test_heads_inside_a_full_model_are_found_and_its_backbone_left_out(tmp_path):
    theirs = faster(heads=3, layers=2)
    tensors = {f"medusa_head.{name}": x for name, x in theirs.state_dict().items()}
    backbone = {"model.embed_tokens.weight": torch.zeros(V, H), "lm_head.weight": torch.zeros(V, H)}
    write(tmp_path, {"medusa_num_heads": 3, "medusa_num_layers": 2, "vocab_size": V}, tensors | backbone)
    heads = load_medusa(tmp_path)
    assert heads.heads == 3
    assert not heads.shares_head
    torch.testing.assert_close(heads(X), torch.stack([head(X) for head in theirs], 1))


def vllm_files(own: bool = True, rows: str = "trimmed", bias: bool = False) -> tuple[dict, dict[str, torch.Tensor]]:
    """A checkpoint in vLLM's layout with an unsorted token map."""
    generator = torch.Generator().manual_seed(2)
    token_map = torch.tensor([30, 4, 39, 9, 1])
    config = {
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "truncated_vocab_size": len(token_map),
        "num_heads": 2,
        "num_hidden_layers": 1,
        "medusa_fc_bias": bias,
        "original_lm_head": not own,
    }
    tensors: dict[str, torch.Tensor] = {"token_map": token_map}
    for i in range(2):
        tensors[f"blocks.{i}.layers.0.weight"] = torch.randn(H, H, generator=generator)
        if bias:
            tensors[f"blocks.{i}.layers.0.bias"] = torch.randn(H, generator=generator)
        if own:
            tensors[f"lm_heads.{i}.weight"] = torch.randn(V if rows == "whole" else 5, H, generator=generator)
    if not own:
        tensors["lm_head.weight"] = torch.randn(V if rows == "whole" else 5, H, generator=generator)
    return config, tensors


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ["trimmed", "whole"])
@pytest.mark.parametrize("own", [True, False])
def test_vllms_layout_is_read_with_any_order_of_the_token_map(tmp_path, own, rows, bias):
    write(tmp_path, *vllm_files(own, rows, bias))
    heads = load_medusa(tmp_path)
    heads.bind(HEAD, HEAD)
    assert heads.draft_ids is not None
    assert heads.draft_ids.tolist() == [1, 4, 9, 30, 39]
    torch.testing.assert_close(wide(heads, heads(X)), vllm_logits(tmp_path, X))


def test_vllms_shared_head_may_be_stored_under_the_first_heads_name(tmp_path):
    config, tensors = vllm_files(own=False)
    write(tmp_path / "a", config, tensors)
    expected = vllm_logits(tmp_path / "a", X)
    tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    heads = load_medusa(write(tmp_path / "b", config, {f"medusa_heads.{n}": x for n, x in tensors.items()}))
    assert heads.shares_head
    torch.testing.assert_close(wide(heads, heads(X)), expected)


def test_compact_files_leave_the_targets_rows_to_the_target(tmp_path):
    heads = medusa(ids=DRAFT_IDS)
    save_medusa(tmp_path, heads, compact=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored["blocks.0.layers.0.weight"].dtype == torch.int8
    back = load_medusa(tmp_path)
    back.bind(HEAD, HEAD)
    torch.testing.assert_close(back.head_weight(), HEAD[DRAFT_IDS])
    assert (back(X) - heads(X)).abs().max() < 0.05 * heads(X).abs().max()


@pytest.mark.parametrize("compact", [False, True])
def test_blockwise_heads_come_back(tmp_path, compact):
    heads = BlockwiseHeads(BlockwiseConfig(H, V, inner_size=10, heads=2, rank_accuracy=ACCURACY), DRAFT_IDS)
    heads.bind(HEAD, HEAD)
    scramble(heads)
    save_blockwise(tmp_path, heads, compact=compact)
    assert set(load_file(tmp_path / "model.safetensors")) >= {
        "inner.weight",
        "inner.bias",
        "outer.weight",
        "outer.bias",
    }
    assert not any("head" in name for name in load_file(tmp_path / "model.safetensors"))
    assert detect_family(tmp_path) == "blockwise"
    back = load_blockwise(tmp_path)
    back.bind(HEAD, HEAD)
    assert (back.rank_accuracy, back.heads) == (ACCURACY, 2)
    assert (back(X) - heads(X)).abs().max() <= (0.05 if compact else 1e-6) * heads(X).abs().max()


@pytest.mark.parametrize("compact", [False, True])
def test_exits_come_back(tmp_path, compact):
    head = ExitHead(ExitConfig(7, H, V, rank=3, eps=1e-6), DRAFT_IDS)
    head.bind(HEAD, HEAD)
    scramble(head)
    save_exit(tmp_path, head, compact=compact)
    assert detect_family(tmp_path) == "exit"
    back = load_exit(tmp_path)
    back.bind(HEAD, HEAD)
    assert back.config == head.config
    assert (back(X) - head(X)).abs().max() <= (0.05 if compact else 1e-6) * head(X).abs().max()


def run_mlp(module: MlpSpeculator, tokens: torch.Tensor) -> torch.Tensor:
    state, out = module.start(X), []
    for i, token in enumerate(tokens):
        state = module.advance(i, state, token)
        out.append(module.logits(i, state))
    return torch.stack(out)


@pytest.mark.parametrize("prefix", ["", "speculator."])
@pytest.mark.parametrize("tie", [False, True])
def test_mlp_speculators_come_back(tmp_path, tie, prefix):
    module = MlpSpeculator(MlpConfig(H, 8, V, 3, tie_weights=tie, scale_input=True))
    scramble(module)
    save_mlp(tmp_path, module)
    assert detect_family(tmp_path) == "mlp-speculator"
    stored = load_file(tmp_path / "model.safetensors")
    sets = {f"speculator.{part}.{i}.weight" for part in ("emb", "head", "ln") for i in range(1 if tie else 3)}
    sets |= {f"speculator.proj.{i}.weight" for i in range(2 if tie else 3)}
    assert {name for name in stored if name.endswith("weight")} == sets
    if not prefix:
        plain = {name.removeprefix("speculator."): x for name, x in stored.items()}
        write(tmp_path, json.loads((tmp_path / "config.json").read_text()), plain)
    back = load_mlp(tmp_path)
    assert back.config == module.config
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    torch.testing.assert_close(run_mlp(back, tokens), run_mlp(module, tokens))


def test_an_mlp_file_with_every_tied_copy_is_read(tmp_path):
    """A pickled module list stores a tied module once for each of its places."""
    module = MlpSpeculator(MlpConfig(H, 8, V, 3, tie_weights=True))
    scramble(module)
    save_mlp(tmp_path, module)
    stored = load_file(tmp_path / "model.safetensors")
    for name, x in list(stored.items()):
        last = 1 if ".proj." in name else 0
        for i in range(last + 1, 3):
            stored[name.replace(f".{last}.", f".{i}.")] = x.clone()
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), stored)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    torch.testing.assert_close(run_mlp(load_mlp(tmp_path), tokens), run_mlp(module, tokens))


def broken(kind: str, change) -> tuple[dict, dict[str, torch.Tensor]]:
    config, tensors = vllm_files(own=kind == "own", bias=True)
    change(config, tensors)
    return config, tensors


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "own",
            lambda c, t: t.update({"blocks.1.layers.0.weight": torch.zeros(H, 7)}),
            r"tensor blocks.1.layers.0.weight has shape \[12, 7\], want \[12, 12\]",
        ),
        (
            "own",
            lambda c, t: t.update({"lm_heads.1.weight": torch.zeros(6, H)}),
            r"tensor lm_heads.1.weight has shape \[6, 12\], want \[5, 12\]",
        ),
        (
            "shared",
            lambda c, t: t.update({"lm_head.weight": torch.zeros(5, 3)}),
            r"tensor lm_head.weight has shape \[5, 3\], want \[5, 12\]",
        ),
        ("own", lambda c, t: t.pop("lm_heads.1.weight"), "no tensor lm_heads.1.weight"),
        ("own", lambda c, t: t.pop("blocks.0.layers.0.weight"), "no tensor blocks.0.layers.0.weight"),
        ("own", lambda c, t: t.pop("token_map"), r"tensor lm_heads.0.weight has shape \[5, 12\], want \[40, 12\]"),
        ("own", lambda c, t: t.update(token_map=torch.tensor([1, 1, 2, 3, 4])), "token_map must hold different"),
        ("own", lambda c, t: t.update(token_map=torch.tensor([1, 40, 2, 3, 4])), "token_map must hold .* from 0 to 39"),
        ("own", lambda c, t: c.pop("vocab_size"), "does not say vocab_size"),
        ("own", lambda c, t: c.update(vocab_size="many"), "vocab_size = 'many'"),
    ],
)
def test_broken_medusa_files_get_one_line_that_names_the_tensor(tmp_path, kind, change, message):
    write(tmp_path, *broken(kind, change))
    with pytest.raises(UsageError, match=message) as error:
        load_medusa(tmp_path)
    assert "\n" not in str(error.value)


def test_broken_own_formats_name_the_tensor(tmp_path):
    heads = BlockwiseHeads(BlockwiseConfig(H, V, inner_size=10, heads=2))
    save_blockwise(tmp_path, heads)
    config, stored = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    write(tmp_path, config, stored | {"outer.weight": torch.zeros(25, 10)})
    with pytest.raises(UsageError, match=r"tensor outer.weight has 25 rows, want a multiple of the hidden size 12"):
        load_blockwise(tmp_path)
    write(tmp_path, config, stored | {"inner.bias": torch.zeros(9)})
    with pytest.raises(UsageError, match=r"tensor inner.bias has shape \[9\], want \[10\]"):
        load_blockwise(tmp_path)
    write(tmp_path, config, stored | {"inner.weight": torch.zeros(9)})
    with pytest.raises(UsageError, match=r"tensor inner.weight has shape \[9\], want two dimensions"):
        load_blockwise(tmp_path)


def test_a_broken_mlp_file_names_the_tensor(tmp_path):
    save_mlp(tmp_path, MlpSpeculator(MlpConfig(H, 8, V, 3)))
    config, stored = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    write(tmp_path, config, stored | {"speculator.emb.1.weight": torch.zeros(V, 7)})
    with pytest.raises(UsageError, match=r"tensor emb.1.weight has shape \[40, 7\], want \[40, 8\]"):
        load_mlp(tmp_path)
