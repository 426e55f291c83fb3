"""Text written by the target itself, kept in a folder that grows and survives kills.

A drafter imitates the target, so it learns from what the target writes. The text is decoded by our own decoder in
large batches, part of it greedily and part of it sampled, and is stored in shards that are written atomically: a
kill costs the rows that were still being written and nothing else. Rows are numbered by their prompt, so a corpus
reads the same however often its making was interrupted, and it may be read while it grows.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.loading import Loaded
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.errors import UsageError
from spectune.suites.prompt import Prompt
from spectune.suites.render import render
from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.cell import Sampling

FORMAT = 1
_SHARD_ROWS = 32
_SHARD_SECONDS = 60.0
_BLOCK_ROWS = 512  # prompts decoded by one call: long, since slots stand idle only at the end of a call
_TYPICAL_LENGTH = 150  # tokens of an answer, before any is known


class Busy(UsageError):
    """Another process is writing this corpus."""


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """How the target answers. Each prompt gets one of the temperatures, by a hash of its id."""

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.8)
    seed: int = 0

    def temperature(self, prompt_id: str) -> float:
        return self.temperatures[_number(f"temperature:{prompt_id}") % len(self.temperatures)]


@dataclass(frozen=True, slots=True)
class TextRow:
    """A prompt and its answer as token ids; the answer ends with the stop token, if one ended it.

    `temperature` is None for an answer that came with the user's file.
    """

    index: int
    id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    temperature: float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the writing is; `written` tokens and `seconds` count from the start of this process's work."""

    tokens: int
    wanted: int
    written: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.written / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        return max(0, self.wanted - self.tokens) / self.speed if self.speed else None


@dataclass(slots=True)
class Corpus:
    """The rows in a folder. `manifest` says where they come from."""

    folder: Path
    manifest: dict[str, Any]
    rows: dict[int, TextRow] = field(default_factory=dict)
    shards: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(row.output) for row in self.rows.values())

    def ordered(self) -> list[TextRow]:
        return [self.rows[i] for i in sorted(self.rows)]

    def take(self, tokens: int | None) -> list[TextRow]:
        """The first rows that hold so many answer tokens; all rows for None."""
        taken: list[TextRow] = []
        count = 0
        for row in self.ordered():
            if tokens is not None and count >= tokens:
                break
            taken.append(row)
            count += len(row.output)
        return taken

    def add(self, rows: Sequence[TextRow]) -> None:
        """Write a shard."""
        if not rows:
            return
        lines = [json.dumps(asdict(row), separators=(",", ":")) for row in rows]
        write_atomically(self.folder / f"shard-{self.shards:05d}.jsonl", "\n".join(lines) + "\n")
        self.shards += 1
        self.rows |= {row.index: row for row in rows}


def corpus_manifest(target: Loaded, prompts_digest: str, settings: CorpusSettings) -> dict[str, Any]:
    """What decides the rows of a corpus; folders are named after its hash."""
    return {
        "format": FORMAT,
        "target": target.info.name,
        "target_digest": target.info.digest,
        "prompts_digest": prompts_digest,
        "settings": asdict(settings) | {"temperatures": list(settings.temperatures)},
    }


def corpus_folder(cache: Path, manifest: dict[str, Any]) -> Path:
    """The place of a corpus in the cache folder."""
    decisive = {name: value for name, value in manifest.items() if name != "target"}
    key = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
    return cache / "corpus" / key


def read_corpus(folder: Path) -> Corpus:
    """Read a corpus, which may still be growing. Raises UsageError where there is none or a shard is damaged."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"no corpus in {folder}") from error
    corpus = Corpus(folder, manifest)
    for path in sorted(folder.glob("shard-*.jsonl")):
        try:
            for line in path.read_text("utf-8").splitlines():
                row = json.loads(line)
                row |= {"prompt": tuple(row["prompt"]), "output": tuple(row["output"])}
                corpus.rows[row["index"]] = TextRow(**row)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is damaged", "remove it; its rows are then written again") from error
        corpus.shards = int(path.stem.removeprefix("shard-")) + 1
    return corpus


def write_corpus(
    target: Loaded,
    prompts: Iterable[Prompt],
    folder: Path,
    manifest: dict[str, Any],
    *,
    tokens: int,
    settings: CorpusSettings,
    batch: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> Corpus:
    """Let the target answer prompts until the folder holds `tokens` answer tokens, or the prompts end.

    What the folder holds already is kept; rows are written while the target decodes. Interrupted by
    KeyboardInterrupt, all finished rows are kept.

    Raises:
        Busy: another process is writing this corpus.
        UsageError: no prompt can be answered.
        SpectuneError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise Busy(f"another process is writing the corpus in {folder}", "wait for it to end") from None
    try:
        if not (folder / "manifest.json").exists():
            write_atomically(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        writer = _Writer(target, read_corpus(folder), settings, tokens, batch, on_progress)
        writer.run(enumerate(prompts))
    finally:
        lock.release()
    if not writer.corpus.rows:
        raise UsageError("none of the prompts fits the target's context")
    return writer.corpus


class _Writer:
    """Decodes what a corpus lacks and keeps each row as soon as it is finished."""

    def __init__(
        self,
        target: Loaded,
        corpus: Corpus,
        settings: CorpusSettings,
        wanted: int,
        batch: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.target = target
        self.corpus = corpus
        self.settings = settings
        self.wanted = wanted
        self.batch = batch
        self.on_progress = on_progress
        self.began = self.saved = time.monotonic()
        self.written = 0
        self.finished: list[TextRow] = []
        self.running: dict[str, list[int]] = {}
        self.prompts: dict[str, tuple[int, float]] = {}  # index and temperature of a request

    def run(self, stream: Iterator[tuple[int, Prompt]]) -> None:
        done, rows = 0, 0
        while done < self.wanted:
            typical = done / rows if rows else _TYPICAL_LENGTH
            count = max(self.batch, min(_BLOCK_ROWS, round((self.wanted - done) / typical)))
            block = list(islice(stream, count))
            if not block:
                return
            try:
                self._answer(block)
            finally:
                self._save()
            indices = [index for index, _ in block if index in self.corpus.rows]
            rows += len(indices)
            done += sum(len(self.corpus.rows[index].output) for index in indices)

    def _answer(self, block: Sequence[tuple[int, Prompt]]) -> None:
        missing = [(index, prompt) for index, prompt in block if index not in self.corpus.rows]
        for temperature in self.settings.temperatures:
            requests = [
                request
                for index, prompt in missing
                if self.settings.temperature(prompt.id) == temperature
                and (request := self._request(index, prompt, temperature)) is not None
            ]
            if requests:
                settings = DecodeSettings(KSchedule.constant(0), "speculative", Sampling(temperature=temperature))
                decoder = Decoder(self.target.model, None, settings, StopRule(self.target.stop_ids))
                decoder.decode(requests, self.batch, self._on_tokens)

    def _request(self, index: int, prompt: Prompt, temperature: float) -> Request | None:
        ids = render(prompt, self.target.tokenizer)
        room = self.target.model.max_context - len(ids)
        if room < 1:
            return None
        wanted = min(prompt.max_new_tokens or self.settings.max_new_tokens, self.settings.max_new_tokens, room)
        name = f"{index}:{prompt.id}"
        self.prompts[name] = index, temperature
        return Request(name, tuple(ids), wanted, _number(f"{self.settings.seed}:{prompt.id}"))

    def _on_tokens(self, request: Request, tokens: list[int], _: object) -> None:
        output = self.running.setdefault(request.id, [])
        output += tokens
        self.written += len(tokens)
        if output[-1] in self.target.stop_ids or len(output) >= request.max_new_tokens:
            index, temperature = self.prompts[request.id]
            name = request.id.partition(":")[2]
            row = TextRow(index, name, request.token_ids, tuple(self.running.pop(request.id)), temperature)
            self.finished.append(row)
            if len(self.finished) >= _SHARD_ROWS or time.monotonic() - self.saved > _SHARD_SECONDS:
                self._save()

    def _save(self) -> None:
        self.corpus.add(self.finished)
        self.finished = []
        self.saved = time.monotonic()
        if self.on_progress:
            tokens = min(self.corpus.tokens, self.wanted)
            self.on_progress(Progress(tokens, self.wanted, self.written, self.saved - self.began))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def require_tokenizer(target: Loaded) -> Any:
    """The target's tokenizer. Raises UsageError where it has none."""
    if target.tokenizer is None:
        raise UsageError(f"{target.info.name!r} has no tokenizer", "put its tokenizer files beside the model")
    return target.tokenizer
