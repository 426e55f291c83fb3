"""Settings: command line over file over default, and the command that gives them again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.errors import UsageError
from spectune.sweeping.command import resume_command, sweep_command
from spectune.sweeping.config import settings
from spectune.sweeping.options import SweepOptions


@pytest.fixture
def write(tmp_path):
    def write_config(text: str) -> Path:
        path = tmp_path / "sweep.toml"
        path.write_text(text)
        return path

    return write_config


def test_command_line_over_file_over_default(write):
    config = write('[sweep]\nk = "1-3"\nbatch = [1, 4]\nmax-new-tokens = 32\ntemperature = 1\nquiet = true\n')
    merged = settings({"k": "8", "draft": ["small", "ngram"], "suite": None, "quiet": None}, config)
    assert merged.options == SweepOptions(
        ks=(8,), batches=(1, 4), max_new_tokens=32, temperature=1.0, drafts=("small", "ngram")
    )
    assert merged.quiet


def test_a_flag_on_the_command_line_can_switch_off_what_the_file_switches_on(write):
    config = write("[sweep]\nignore_eos = true\nchat = true\n")
    assert settings({}, config).options.ignore_eos
    merged = settings({"ignore_eos": False, "chat": False}, config)
    assert not merged.options.ignore_eos
    assert merged.options.chat is False


def test_single_values_stand_for_lists(write):
    merged = settings({}, write('[sweep]\nk = 4\ndraft = "small"\nsuite = "code"\n'))
    assert merged.options == SweepOptions(ks=(4,), drafts=("small",), suites=("code",))


def test_tables_of_other_commands_are_left_alone(write):
    assert settings({}, write("[recommend]\nfoo = 1\n[sweep]\nseed = 3\n")).options.seed == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sweep]\nbatchs = 4\n", "no option 'batchs'.*did you mean batch"),
        ("[sweep]\nzzz = 4\n", "known are .*max_new_tokens"),
        ('[sweep]\nseed = "one"\n', "seed must be a whole number, not 'one'"),
        ("[sweep]\nseed = true\n", "seed must be a whole number, not True"),
        ("[sweep]\nignore-eos = 1\n", "ignore_eos must be true or false, not 1"),
        ("[sweep]\nk = 1.5\n", "k must be counts"),
        ("[sweep]\nk = [1, 1.5]\n", "k takes counts"),
        ('[sweep]\ndraft = ["ngram", 3]\n', "draft must be a text or a list of texts"),
        ("[sweep]\ntop-k = 1\ntop_k = 2\n", "top_k stands there twice"),
        ("k = 4\n", r"no \[sweep\] table"),
        ("[sweep\n", "sweep.toml: "),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_its_name(write, text, said):
    with pytest.raises(UsageError, match=said) as caught:
        settings({}, write(text))
    assert "sweep.toml" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        settings({}, tmp_path / "none.toml")


options_of_any_kind = st.builds(
    SweepOptions,
    target=st.sampled_from(["smollm2", "a model/with 'quotes'"]),
    drafts=st.sampled_from([("ngram",), ("small one", "ngram")]),
    ks=st.sets(st.integers(1, 16), min_size=1).map(tuple),
    prompts=st.none() | st.integers(1, 99),
    temperature=st.none() | st.floats(0.01, 2),
    chat=st.none() | st.booleans(),
    ignore_eos=st.booleans(),
    threads=st.none() | st.integers(1, 8),
)


@given(options_of_any_kind)
def test_the_resume_command_gives_the_same_options(options):
    words = shlex.split(resume_command(options, Path("runs/a b")))
    assert words[:2] == ["spectune", "sweep"]
    given_back, switches = {}, {"--chat": True, "--no-chat": False, "--ignore-eos": True, "--resume": True}
    rest = iter(words[2:])
    for word in rest:
        key = word.removeprefix("--no-").removeprefix("--").replace("-", "_")
        if word in switches:
            given_back[key] = switches[word]
        elif key in ("draft", "suite"):
            given_back.setdefault(key, []).append(next(rest))
        else:
            text = next(rest)
            number = {"prompts": int, "threads": int, "temperature": float}.get(key, str)
            given_back[key] = number(text)
    merged = settings(given_back, None)
    assert merged.options == options
    assert merged.resume
    assert merged.output == "runs/a b"


def test_the_command_leaves_defaults_out():
    assert sweep_command(SweepOptions(), Path("r")) == ("spectune", "sweep", "--output", "r")


def test_a_grown_pair_makes_the_target_from_the_first_draft():
    made = settings({"draft": ["shape:smollm2-135m", "ngram"], "grown_pair": "4:0.1"}, None).options
    assert made.target == "grown:shape:smollm2-135m:4:0.1"
    for options, message in (
        ({"grown_pair": "4:0.1"}, "first --draft"),
        ({"draft": ["ngram", "d"], "grown_pair": "4:0"}, "'ngram': it is no model"),
        ({"draft": ["d"], "grown_pair": "4:0", "target": "t"}, "makes the target"),
    ):
        with pytest.raises(UsageError, match=message):
            settings(options, None)
