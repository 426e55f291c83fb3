"""`spectune.generate` and `spectune generate`: the same decoder for one prompt."""

from __future__ import annotations

import json

import pytest
from conftest import save_tiny
from test_decoder_greedy import with_tokenizer
from typer.testing import CliRunner

import spectune
from spectune.cli.app import app
from spectune.decoding.text import split_text
from spectune.engines.native import NativeEngine
from spectune.errors import UsageError
from spectune.sweeping.cell import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(with_tokenizer(save_tiny(tmp_path_factory.mktemp("named"), vocab_size=128), 128))


@pytest.fixture(scope="module")
def engine(folder):
    return NativeEngine(folder, dtype="float32", device="cpu")


PROMPT = "w5 w9 w12"


def run(engine, prompt=PROMPT, **settings):
    return spectune.generate(prompt, engine=engine, chat=False, max_new_tokens=16, ignore_eos=True, **settings)


def test_drafting_changes_the_rounds_and_not_the_text(engine, folder):
    plain, drafted = run(engine, draft=None), run(engine, draft=folder)
    assert drafted.text == plain.text
    assert drafted.token_ids == plain.token_ids
    assert plain.rounds == 15
    assert drafted.rounds == 3
    assert drafted.acceptance_length == 5.0
    assert plain.acceptance_length == 1.0


def test_pieces_spell_the_text_and_say_where_tokens_came_from(engine, folder):
    result = run(engine, draft=folder)
    assert "".join(p.text for p in result.pieces) == result.text
    assert [p.origin for p in result.pieces] == ["prefill", *(["draft"] * 4 + ["bonus"]) * 3]


def test_streamed_text_is_the_text(engine):
    streamed: list[str] = []
    result = run(engine, on_text=lambda text, origin: streamed.append(text))
    assert "".join(streamed) == result.text


def test_several_prompts_come_back_in_order_and_equal_their_own_runs(engine, folder):
    prompts = [PROMPT, "w7", "w1 w2 w3 w4 w5 w6"]
    together = run(engine, prompts, draft=folder, batch=2)
    assert [r.text for r in together] == [run(engine, p, draft=folder).text for p in prompts]


def test_a_stop_string_is_left_out_of_the_text(engine):
    whole = run(engine, draft="ngram")
    word = whole.text.split()[6]
    cut = run(engine, draft="ngram", stop=[word])
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(word)]


def test_the_seed_repeats_a_sampled_text(engine, folder):
    sampling = Sampling(temperature=1.0)
    texts = [run(engine, draft=folder, sampling=sampling, seed=s).text for s in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"k": -1}, "k must be"),
        ({"draft": "early-exit:9"}, "2 layers"),
        ({"draft": "layer-skip:x"}, "whole number"),
        ({"draft": "ngram:5-2"}, "MIN <= MAX"),
        ({"draft": "./missing"}, "no model folder"),
    ],
)
def test_wrong_settings_are_one_line(engine, settings, words):
    with pytest.raises(UsageError, match=words):
        run(engine, **settings)


def test_text_of_split_characters_waits_until_it_is_whole():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    ids = list("aé€b".encode())
    pieces = split_text(Bytes(), ids)
    assert "".join(pieces) == "aé€b"
    assert pieces == ["a", "", "é", "", "", "€", "b"]
    long = list(("xé" * 200).encode())
    assert "".join(split_text(Bytes(), long)) == "xé" * 200


def test_the_command_prints_json_and_nothing_else(folder):
    result = CliRunner().invoke(
        app,
        ["generate", PROMPT, "--target", folder, "--no-chat", "--max-new-tokens", "8", "--json", "--device", "cpu"],
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["output_tokens"] == len(document["token_ids"]) == len(document["origins"])


def test_the_command_prints_the_text_and_a_line_of_counts(folder):
    command = ["generate", "-", "--target", folder, "--draft", folder, "--no-chat", "--max-new-tokens", "11"]
    result = CliRunner().invoke(app, [*command, "--ignore-eos", "--dtype", "float32"], input=PROMPT)
    assert result.exit_code == 0, result.output
    line = " ".join(result.stdout.split())
    assert "11 tokens in 2 rounds, 8 of 8 drafted tokens accepted, acceptance length 5.00" in line


def test_a_mistyped_drafter_gets_the_right_name_at_once(engine):
    with pytest.raises(UsageError, match="no drafter 'ngrm'") as error:
        run(engine, draft="ngrm")
    assert "ngram" in error.value.hint
