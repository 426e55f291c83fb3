"""The documentation against the program: its commands, its links, its example and its definitions.

Every command of a ```console block is read by the real command line, so a renamed option is found here. Commands that
only read results are also run, on a part of the example run, and sweeps of hub models on tiny ones.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from decoding_helpers import decode, random_prompts, tokens_of
from synthetic_run import cell, write_run
from test_import_command import FAST, PLAIN

from spectune.cli.app import app
from spectune.recommending.exports.export import ENGINES
from spectune.recommending.objective import parse_objective
from spectune.reporting.summary import recommendation_document, summarise
from spectune.speedup.devices import device
from spectune.sweeping.cell import Sampling
from spectune.sweeping.config import settings
from spectune.sweeping.counts import parse_counts
from spectune.sweeping.drafter_names import KINDS
from spectune.training.options import METHODS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ROOT / "reports" / "examples" / "smollm2-demo"
ON_A_RUN = ("recommend", "report", "fit", "predict", "export")
SHIPPED = ("smollm2", "smollm2-1l", "smollm2-4l")
RUN_HERE = (*ON_A_RUN, "import", "suites")

# What stands in for models and heads of the hub, and for the size of a sweep: the last of an option counts.
TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
SMALL_MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "shape:tiny.json",
    "meta-llama/Llama-3.2-1B-Instruct": "shape:tiny.json",
    "shape:llama-3.1-8b": "shape:tiny.json",
    "shape:llama-3.2-1b": "shape:tiny.json",
    "eagle3:drafts/eagle3": "eagle3:shape",
    "tree:eagle3:drafts/eagle3": "tree:eagle3:shape",
}
SMALL = shlex.split(
    "--k 4 --batch 2 --prompts 2 --max-new-tokens 4 --repeats 1 --device cpu --peak-bandwidth 10 --quiet"
)


def commands_of(text: str) -> list[list[str]]:
    """The words of every command; where a block has prompts, the other lines of it are output."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found += [words for line in lines if (words := shlex.split(line, comments=True))]
    return found


COMMANDS = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)}")
    for page in PAGES
    for words in commands_of(page.read_text())
]


def leaves() -> dict[str, object]:
    """Every command by the words behind `spectune`."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {n}": c for n, c in inner.items()} if inner else {name: command}
    return found


def understood(words: list[str]) -> tuple[str, dict]:
    """A command's name and values as the command line reads them; nothing is run."""
    root = typer.main.get_command(app)
    seen: dict[str, object] = {}

    def replace(command, name: str) -> None:
        for n, inner in getattr(command, "commands", {}).items():
            replace(inner, f"{name} {n}".strip())
        if not hasattr(command, "commands"):
            command.callback = lambda **values: seen.update(name=name, values=values)

    replace(root, "")
    root.main(words[1:], prog_name="spectune", standalone_mode=False)
    return seen["name"], seen["values"]


def check_values(name: str, values: dict) -> None:
    """What a command itself checks of its values, without a model."""
    drafts = values.get("draft") or ()
    for draft in [drafts] if isinstance(drafts, str) else drafts:
        kind = draft.partition(":")[0]
        assert kind in (*KINDS, "shape", "grown", *SHIPPED) or "/" in draft, draft
    if name == "sweep":
        given = {k: v for k, v in values.items() if k not in ("config", "as_json")}
        settings(given, ROOT / values["config"] if values["config"] else None)
    elif name == "train":
        assert values["method"] in METHODS
    elif name == "recommend":
        assert values["engine"] in (None, *ENGINES)
        parse_objective(values["objective"], values["slo"])
    elif name in ("predict", "verify"):
        parse_counts(values["k"], "--k")
        parse_counts(values["batch"], "--batch")
        if values.get("gpu"):
            device(values["gpu"])


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_is_one_that_the_program_understands(words):
    if words[0] == "make":
        goals = [w for w in words[1:] if "=" not in w]
        assert all(re.search(rf"^{goal}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for goal in goals)
        return
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2])
        return
    assert words[0] == "spectune"
    check_values(*understood(words))


def test_a_renamed_option_and_a_wrong_value_are_found():
    with pytest.raises(Exception, match="--drafts"):
        understood(shlex.split("spectune sweep --drafts ngram"))
    with pytest.raises(Exception, match="h1000"):
        check_values(*understood(shlex.split("spectune predict runs/x --gpu h1000")))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> Path:
    """The cells of three drafters of the example run."""
    folder = tmp_path_factory.mktemp("docs") / "run"
    (folder / "cells").mkdir(parents=True)
    shutil.copy(EXAMPLE / "run.json", folder)
    for path in (EXAMPLE / "cells").glob("*.json"):
        if json.loads(path.read_bytes())["spec"]["drafter"] in ("ngram", "eagle3:demo", "smollm2-4l"):
            shutil.copy(path, folder / "cells")
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A current folder with the files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-prompts.jsonl").write_text('{"prompt": "Write a loop."}\n{"prompt": "Sum 1 to 9."}\n')
    sweep = tmp_path / "results" / "sweep" / "SERVE-a"
    for folder in (sweep, tmp_path / "server"):
        folder.mkdir(parents=True)
    (sweep / "summary.json").write_text(json.dumps([FAST]))
    (tmp_path / "server" / "k4.json").write_text(json.dumps(FAST))
    for folder in (tmp_path, tmp_path / "server"):
        (folder / "plain.json").write_text(json.dumps(PLAIN))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_only_read_results_run(spectune, short_run, workplace, page):
    for words in commands_of(page.read_text()):
        if words[0] != "spectune" or words[1] not in RUN_HERE:
            continue
        words = [w.replace("my-prompts=", "math=") for w in words]  # a suite that the run has
        if words[1] in ON_A_RUN and not (run := workplace / words[2]).exists():
            shutil.copytree(short_run, run)
        code, out, err = spectune(*words[1:])
        assert (code, err) == (0, ""), words
        assert out, words


SWEEPS = [c for c in COMMANDS if c.values[0][:2] == ["spectune", "sweep"] and set(c.values[0]) & set(SMALL_MODELS)]


@pytest.mark.parametrize("words", SWEEPS)
def test_sweeps_of_hub_models_run_on_tiny_models(spectune, workplace, words):
    (workplace / "tiny.json").write_text(json.dumps(TINY))
    suite = [] if "--suite" in words else ["--suite", "my-prompts.jsonl"]
    code, out, err = spectune(*(SMALL_MODELS.get(w, w) for w in words[1:]), *SMALL, *suite)
    assert code == 0, err
    assert out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), target


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [p.name for p in PAGES[1:] if f"({p.name})" not in index and p.name != "README.md"] == []


@pytest.mark.parametrize("name", leaves())
def test_every_help_has_an_example_that_the_program_understands(name):
    example = re.search(r"Example: (spectune .*)", leaves()[name].help)
    assert example
    words = shlex.split(example[1])
    assert " ".join(words[1:]).startswith(name)
    check_values(*understood(words))


def test_the_readme_lists_every_command():
    text = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^\| `spectune (\w+)", text, re.MULTILINE))
    assert listed == set(typer.main.get_command(app).commands)


def first_cells(path: Path) -> set[str]:
    """The words of the first column of all tables."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return {word for line in lines for word in re.findall(r"\w+", line.split("|")[1])}


def test_every_column_and_every_key_of_an_answer_is_defined(tmp_path):
    summary = summarise(write_run(tmp_path / "run", [cell()]))
    definitions, columns = ROOT / "docs" / "definitions.md", ROOT / "reports" / "README.md"
    assert "(../reports/README.md)" in definitions.read_text()
    assert set(recommendation_document(summary)) <= first_cells(definitions)
    assert set(summary.rows[0]) <= first_cells(definitions) | first_cells(columns)


def test_the_drafter_of_the_contributors_page_is_lossless(tiny):
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "add-a-drafter.md").read_text(), re.M | re.S)
    names: dict = {}
    exec(compile(block, "add-a-drafter.md", "exec"), names)
    prompts = random_prompts(5)
    for sampling in (Sampling(), Sampling(temperature=0.8)):
        plain = tokens_of(decode(tiny, None, prompts, k=0, batch=2, sampling=sampling))
        for k, batch in ((1, 1), (3, 4)):
            run = decode(tiny, names["RepeatDrafter"](), prompts, k=k, batch=batch, rule="match", sampling=sampling)
            assert tokens_of(run) == plain
            assert sum(r.drafted for g in run.generations for r in g.rounds) > 20


@pytest.mark.parametrize(("command", "table"), [("sweep", "[sweep]"), ("gate", "[gate]"), ("gate", "[code]<30")])
def test_brackets_in_help_are_printed(spectune, command, table):
    assert table in spectune(command, "--help")[1]
