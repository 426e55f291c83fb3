"""Host facts, the fingerprint and the doctor."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from spectune.cli.doctor import doctor
from spectune.measuring import doctor as checks
from spectune.measuring import host
from spectune.measuring.doctor import Check, examine, usable
from spectune.measuring.fingerprint import fingerprint, fingerprint_id, installed_version

# The host

X86 = "processor: 0\nmodel name\t: Fast CPU 9000\nflags\t\t: fpu avx2 avx512f avx512_bf16 secret_flag\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\n"


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


def test_the_processor_is_read_from_cpuinfo(cpuinfo: Path) -> None:
    cpuinfo.write_text(X86)
    assert host.cpu_model() == "Fast CPU 9000"
    assert host.cpu_flags() == ("avx2", "avx512_bf16", "avx512f")
    assert host.has_fast_bf16()


def test_arm_names_no_model_but_its_features(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo.write_text(ARM)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert host.cpu_model() == "aarch64"
    assert host.cpu_flags() == ("bf16", "sve")
    assert host.has_fast_bf16()


def test_without_cpuinfo_nothing_fails(cpuinfo: Path) -> None:
    assert host.cpu_model()
    assert host.cpu_flags() == ()
    assert not host.has_fast_bf16()


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 3), ("5000 100000", 1), ("broken", 8)],
)
def test_a_container_quota_limits_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert host.usable_cores() == cores


def test_shared_caches_are_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, size in ((0, "32K"), (3, "16M")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "size").write_text(size + "\n")
            (folder / "shared_cpu_list").write_text(shared)
    monkeypatch.setattr(host, "CACHES", tmp_path)
    assert host.last_level_cache_bytes() == 32 << 20
    monkeypatch.setattr(host, "CACHES", tmp_path / "nothing")
    assert host.last_level_cache_bytes() is None


def test_containers_and_wsl_are_recognised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "CONTAINER_MARKS", ())
    monkeypatch.setattr(host, "CGROUP_OF_INIT", tmp_path / "cgroup")
    assert not host.in_container()
    (tmp_path / "cgroup").write_text("0::/kubepods/burstable/pod1")
    assert host.in_container()
    monkeypatch.setattr(platform, "release", lambda: "5.15.0-microsoft-standard-WSL2")
    assert host.in_wsl()


# The fingerprint


def test_a_fingerprint_is_json_and_names_the_software() -> None:
    environment = fingerprint("cpu")
    assert json.loads(json.dumps(environment)) == environment
    assert environment["torch"] == torch.__version__
    assert environment["torch_threads"] == torch.get_num_threads()
    assert environment["transformers"] == installed_version("transformers")
    assert installed_version("no-such-package") is None


def test_a_fingerprint_says_nothing_about_the_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    said = json.dumps(fingerprint("cpu"))
    private = ["hf_secret", str(Path.home()), str(Path.cwd()), sys.prefix]
    # Short names may occur in other words.
    private += [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 6]
    assert [word for word in private if word in said] == []


def test_the_id_changes_with_what_changes_timings_only() -> None:
    environment = fingerprint("cpu")
    same = {**environment, "spectune": "99", "kernel": "x", "memory_bytes": 1, "gpus": [{"name": "unused"}]}
    assert fingerprint_id(environment) == fingerprint_id(same)
    assert len(fingerprint_id(environment)) == 12
    for key in ("cpu", "torch", "torch_threads", "usable_cores", "transformers"):
        assert fingerprint_id(environment) != fingerprint_id({**environment, key: "other"})
    assert fingerprint_id({**environment, "python": "3.12.1"}) == fingerprint_id({**environment, "python": "3.12.9"})


# The doctor


def by_name() -> dict[str, Check]:
    return {check.name: check for check in examine("cpu")}


def run_doctor(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout


def test_a_healthy_machine_is_usable() -> None:
    found = by_name()
    assert found["torch"].status == found["transformers"].status == "ok"
    assert found["gpu readings"].detail == "the device is cpu, not a GPU"
    assert usable(found.values())


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_a_missing_library_ends_with_exit_code_4(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    code, said = run_doctor("--json")
    assert code == 4
    report = json.loads(said)
    assert report["usable"] is False
    (check,) = [check for check in report["checks"] if check["name"] == library]
    assert check["status"] == "missing"
    assert "cannot be imported" in check["detail"]
    assert check["hint"]


def test_an_old_transformers_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed_version", lambda name: "4.57.1")
    found = by_name()
    assert found["transformers"].detail == "4.57.1, but spectune needs >=5.16"
    assert not usable(found.values())


def test_more_threads_than_cores_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    check = by_name()["threads"]
    assert (check.status, check.detail) == ("warn", "torch uses 64 threads on 3 usable cores")
    assert "OMP_NUM_THREADS=3" in (check.hint or "")


def test_a_cpu_without_bf16_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: ("avx2",))
    assert by_name()["cpu bf16"].status == "warn"


def test_the_demo_model_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "DEMO_PACKAGE", "spectune_demo_stub")
    assert by_name()["demo model"].status == "missing"
    package = tmp_path / "spectune_demo_stub"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "without its GGUF file" in by_name()["demo model"].detail
    (package / "model.gguf").write_bytes(b"x" * 2_000_000)
    check = by_name()["demo model"]
    assert (check.status, check.detail) == ("ok", "model.gguf, 2 MB")


@pytest.mark.parametrize(("value", "word"), [("1", "offline"), ("true", "offline"), ("0", "not set")])
def test_the_hub_mode_is_told(monkeypatch: pytest.MonkeyPatch, value: str, word: str) -> None:
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert by_name()["hub"].detail.replace("offline mode is ", "").startswith(word)


def test_a_folder_that_cannot_be_written_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert by_name()["disk"].detail == "cannot write here: Permission denied"


def test_the_interpreter_of_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in by_name()["triton"].detail
    monkeypatch.setitem(sys.modules, "triton", None)
    assert by_name()["triton"].status == "missing"


def test_the_table_shows_every_check_and_takes_brackets_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = (Check("alpha", "ok", "[red]1.0[/red]"), Check("beta", "missing", "gone", "install it"))
    monkeypatch.setattr(checks, "examine", lambda **_: shown)
    code, said = run_doctor()
    assert code == 0
    for word in ("alpha", "[red]1.0[/red]", "beta", "missing", "install it"):
        assert word in said
