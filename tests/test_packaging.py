"""The package installs and imports as promised: light commands, and no clash with Hugging Face's `kernels`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_python(code: str, *, cwd: Path = ROOT, path: Path | None = None) -> str:
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    if path:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


USES_TRANSFORMERS = """
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))
import spectune.kernels.copy
print(is_kernels_available(), spectune.kernels.copy.__name__)
"""


def test_transformers_imports_from_the_repository_root_without_hugging_face_kernels():
    hide = """
import importlib.metadata, importlib.util
real = importlib.metadata.version
def version(name):
    if name == "kernels":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
"""
    assert run_python(hide + USES_TRANSFORMERS) == "False spectune.kernels.copy"


def test_transformers_imports_from_the_repository_root_with_hugging_face_kernels(tmp_path):
    """A stand-in distribution named `kernels`, whose module has whatever is asked of it, must win over our folder."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    takes_all = lambda self, *a, **k: None\n"
        "    decorates = lambda self, target=None, *a, **k: target\n"
        "    return type(name, (), {'__init__': takes_all, '__call__': decorates})\n"
    )
    info = tmp_path / "kernels-0.18.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    out = run_python(
        "import kernels\nassert kernels.__file__, 'our folder shadows the package'\n" + USES_TRANSFORMERS,
        path=tmp_path,
    )
    assert out.endswith("spectune.kernels.copy")


def test_the_kernels_folder_is_a_namespace():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()
    for name in ("kernels", "workloads", "reports"):
        assert (ROOT / "spectune" / name).is_symlink()
        assert os.readlink(ROOT / "spectune" / name) == f"../{name}"


@pytest.mark.parametrize(
    "module",
    [
        "spectune",
        "spectune.cli",
        "spectune.sweeping.cell",
        "spectune.speedup.run",
        "spectune.importing.registry",
        "spectune.gating.gate",
    ],
)
def test_light_modules_import_neither_torch_nor_transformers_nor_pandas(module):
    code = (
        f"import {module}, sys\n"
        "print([m for m in ('torch', 'transformers', 'pandas', 'matplotlib', 'scipy') if m in sys.modules])"
    )
    assert run_python(code) == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        *(
            [c]
            for c in (
                "sweep",
                "recommend",
                "report",
                "fit",
                "export",
                "import",
                "gate",
                "baseline",
                "generate",
                "suites",
                "probe",
                "doctor",
            )
        ),
    ],
)
def test_help_of_every_command_works_without_torch_and_shows_an_example(arguments):
    code = (
        "import sys\n"
        f"sys.argv = ['spectune', *{arguments!r}, '--help']\n"
        "from spectune.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    out = run_python(code)
    assert "Usage: spectune" in out
    if arguments:
        assert "spectune " + arguments[0] in out.replace("Usage: spectune", "", 1)


def test_the_wheel_carries_kernels_suites_and_templates(tmp_path):
    """Built from a copy of the tree through an sdist, as an index would; the links must have become folders."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    build = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"
    run_python(build.format("sdist", str(tmp_path)), cwd=tree)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (source,) = (tmp_path / "unpacked").iterdir()
    run_python(build.format("wheel", str(tmp_path)), cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "spectune/kernels/copy.py" in names
    assert "spectune/workloads/code.jsonl" in names
    assert "spectune/py.typed" in names
    assert any(n.startswith("spectune/reports/report.html") for n in names)
    parts = ("answer.html", "macros.html", "measured.html", "report.css", "report.js")
    assert {f"spectune/reports/{part}" for part in parts} <= set(names)
    assert not any(n.startswith("kernels/") for n in names)


def test_no_make_target_uses_a_variable_that_is_not_set():
    text = (ROOT / "Makefile").read_text("utf-8")
    used = set(re.findall(r"\$\((\w+)\)", text))
    known = set(re.findall(r"^(?:export )?(\w+) *[:?]?=", text, re.MULTILINE)) | {"CURDIR", "MAKE", "origin", "method"}
    assert used <= known, used - known
