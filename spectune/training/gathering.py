"""The text that a training asks for, from the cache, from the target, or from the user's file."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from spectune.decoding.demo import cache_folder
from spectune.decoding.loading import Loaded
from spectune.errors import UsageError
from spectune.suites.prompt import Prompt
from spectune.training.corpus import (
    Busy,
    Corpus,
    CorpusSettings,
    Progress,
    TextRow,
    corpus_folder,
    corpus_manifest,
    read_corpus,
    require_tokenizer,
    write_corpus,
)
from spectune.training.options import TrainOptions
from spectune.training.progress import Listener
from spectune.training.prompts import expand, training_book
from spectune.training.text_file import read_text_file

_TOKENS = {"cpu": 60_000, "cuda": 1_000_000}
_SEARCH_TOKENS = 4_000
_BATCH = {"cpu": 96, "cuda": 256}
_READY = 1 << 30  # numbers of rows that came with the user's file begin here
_WAIT_SECONDS = 10.0


def gather_rows(
    options: TrainOptions, target: Loaded, listener: Listener, known: list[int] | None = None
) -> list[TextRow]:
    """Rows with about as many answer tokens as are asked for.

    Args:
        known: numbers of the rows that an earlier session of this training took.

    Raises:
        UsageError: a target without a tokenizer, a file that gives no text, or rows of `known` that are gone.
    """
    require_tokenizer(target)
    device = target.model.device
    wanted = options.tokens or (_SEARCH_TOKENS if options.method == "layer-skip" else _TOKENS.get(device.type, 60_000))
    ready: list[TextRow] = []
    prompts: Iterable[Prompt]
    if options.text is None:
        book = training_book(options.mix)
        settings = CorpusSettings(seed=options.seed)
        prompts, digest = expand(book, seed=options.seed), book.digest
    else:
        file = read_text_file(Path(options.text).expanduser())
        settings = CorpusSettings(seed=options.seed)
        prompts, digest = file.asked, file.digest
        ready = file.rows(target, _READY)
        ready = _first(ready, options.tokens)
        wanted = max(0, wanted - sum(len(row.output) for row in ready)) if file.asked else 0
    corpus = _written(target, prompts, digest, settings, wanted, listener) if wanted else None
    rows = {row.index: row for row in (*(corpus.ordered() if corpus else ()), *ready)}
    if known is not None:
        if missing := [number for number in known if number not in rows]:
            raise UsageError(
                f"{len(missing)} of the texts that this training began with are gone",
                "was the cache folder (SPECTUNE_CACHE) changed? Start afresh with another --output",
            )
        return [rows[number] for number in known]
    taken = [*(corpus.take(wanted) if corpus else ()), *ready]
    tokens = sum(len(row.output) for row in taken)
    listener.note(f"{len(taken)} texts with {tokens} tokens to learn from" + (f" in {corpus.folder}" if corpus else ""))
    return taken


def _written(
    target: Loaded,
    prompts: Iterable[Prompt],
    digest: str,
    settings: CorpusSettings,
    wanted: int,
    listener: Listener,
) -> Corpus:
    """The cached corpus with at least `wanted` tokens, if the prompts yield so many."""
    manifest = corpus_manifest(target, digest, settings)
    folder = corpus_folder(cache_folder(), manifest)

    def show(progress: Progress) -> None:
        detail = f"{progress.tokens} of {progress.wanted} tokens, {progress.speed:.0f}/s"
        listener.advance("text by the target", progress.tokens / progress.wanted, detail, progress.seconds_left)

    while True:
        # Another process may be writing more than is needed here.
        if (folder / "manifest.json").exists() and (corpus := read_corpus(folder)).tokens >= wanted:
            return corpus
        try:
            return write_corpus(
                target,
                prompts,
                folder,
                manifest,
                tokens=wanted,
                settings=settings,
                batch=_BATCH.get(target.model.device.type, 32),
                on_progress=show,
            )
        except Busy:
            corpus = read_corpus(folder)
            detail = f"{corpus.tokens} of {wanted} tokens, written by another process"
            listener.advance("text by the target", min(1.0, corpus.tokens / wanted), detail, None)
            time.sleep(_WAIT_SECONDS)


def _first(rows: list[TextRow], tokens: int | None) -> list[TextRow]:
    """The first rows with about so many tokens."""
    taken: list[TextRow] = []
    count = 0
    for row in rows:
        if tokens is not None and count >= tokens:
            break
        taken.append(row)
        count += len(row.output)
    return taken
