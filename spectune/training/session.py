"""One `spectune train` from options to a folder that a sweep can use.

    text of the target (cached) -> its states (cached) -> training (checkpointed) -> weights and training.json

The output folder holds `run.json` (what is trained on what), while it lasts `checkpoint.pt` (a search for layers to
skip: `search.json`), and at the end the weights and `training.json`. Each step finds what an earlier run left behind,
so an interrupted training goes on where it was.
"""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spectune.decoding.demo import cache_folder
from spectune.decoding.head_drafters import head_folder
from spectune.decoding.loading import Loaded, load, pick_device, pick_dtype
from spectune.errors import UsageError
from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.sweep import Interrupted
from spectune.training.data import TrainingData
from spectune.training.gathering import gather_rows
from spectune.training.layer_skip import LayerSkipSearch
from spectune.training.loop import Loop, LoopSettings, Report, Stopped
from spectune.training.methods import check_sizes, choose_vocabulary, make_method
from spectune.training.options import TrainOptions, flag
from spectune.training.progress import Listener, Silent
from spectune.training.record import about, of_search, of_start, of_training
from spectune.training.signals import Stop
from spectune.training.states import StateProgress, StateStore
from spectune.training.text import Text, texts_digest, texts_of

RUN, CHECKPOINT, SEARCH, RESULT = "run.json", "checkpoint.pt", "search.json", "training.json"
_EPOCHS = 10
_CPU_MINUTES = 30.0  # of training, unless the user says otherwise
_SEARCH_MINUTES = 10.0
_MAY_CHANGE = ("threads", "device", "compact")  # when a training is resumed
_BATCH_TOKENS = {"cpu": 512, "cuda": 16_384}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished training; `result` is what training.json holds."""

    folder: Path
    result: dict[str, Any] = field(default_factory=dict)


def train(
    options: TrainOptions,
    output: Path,
    *,
    command: tuple[str, ...] = (),
    resume: bool = False,
    listener: Listener | None = None,
) -> Outcome:
    """Train a drafter for a target into `output`.

    Raises:
        UsageError: options, a target, a text file or an output folder that do not fit.
        SpectuneError: the disk is full.
        Interrupted: Ctrl-C or SIGTERM; everything done so far is kept.
    """
    listener = listener or Silent()
    check_output(output, resume=resume)
    if (output / RESULT).exists():
        check_same(options, output)
        return Outcome(output, _read(output / RESULT, "options", "target"))
    stop = Stop()
    try:
        with stop.listening():
            return _Session(options, output, command, listener, stop).run()
    except (KeyboardInterrupt, Stopped):
        raise Interrupted(
            "interrupted; the text, the states and the training so far are kept", "the same command with --resume"
        ) from None
    finally:
        listener.end()


def check_output(output: Path, *, resume: bool) -> None:
    """Refuse a folder that holds something else, or a training without `resume`."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file", "choose a folder with --output")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / RUN).exists():
        raise UsageError(f"{output} is not empty and holds no training", "choose another folder with --output")
    if not resume:
        raise UsageError(f"{output} holds a training already", "add --resume to go on, or choose another --output")


def check_same(options: TrainOptions, output: Path) -> None:
    """Refuse to go on with other options than those that the training in `output` was begun with."""
    begun = _read(output / RUN, "options", "rows")["options"]
    for name, value in asdict(options).items():
        if name not in _MAY_CHANGE and begun.get(name) != value:
            raise UsageError(
                f"{output} was begun with {flag(name)} {begun.get(name)}, not {value}",
                "repeat that run's options, or choose another --output",
            )


def _read(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON object of ours with these keys. Raises UsageError for a damaged file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or any(not content.get(key) for key in keys):
        raise UsageError(f"{path} is damaged", "choose another --output")
    return content


class _Session:
    def __init__(
        self, options: TrainOptions, output: Path, command: tuple[str, ...], listener: Listener, stop: Stop
    ) -> None:
        self.options = options
        self.output = output
        self.command = command
        self.listener = listener
        self.stop = stop
        self.seconds: dict[str, float] = {}

    def run(self) -> Outcome:
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        device = pick_device(self.options.device)
        target = load(
            self.options.target,
            device=device,
            dtype=pick_dtype(self.options.dtype, device),
            revision=self.options.revision,
            trust_remote_code=self.options.trust_remote_code,
        )
        check_sizes(self.options, target)
        # Read now: hours later the folder may hold another head.
        start = {} if self.options.start is None else of_start(head_folder(self.options.method, self.options.start))
        texts = self._texts(target)
        if self.options.method == "layer-skip":
            return self._search(target, texts)
        vocabulary = choose_vocabulary(self.options, target, texts)
        if vocabulary.ids is not None:
            self.listener.note(
                f"draft vocabulary: {vocabulary.size} of {target.model.vocab_size} ids, "
                f"{100 * vocabulary.coverage:.1f} % of the held-out text"
            )
        method = make_method(self.options, target, vocabulary)
        store = self._states(target, texts, method.taps)
        tokens = _BATCH_TOKENS.get(device.type, 512)
        data = TrainingData(texts, store, batch_tokens=tokens, device=device, seed=self.options.seed)
        digest = texts_digest(texts)
        loop = Loop(
            method,
            data,
            self._settings(device, method.learning_rate),
            self.output / CHECKPOINT,
            self.options.fingerprint(target.info.digest, digest),
            on_report=self._on_report,
            should_stop=lambda: self.stop.asked,
        )
        # Norms keep float32 weights under autocast; that they are not fused costs nothing here.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        trained = sum(p.numel() for p in loop.parameters)
        self.listener.note(f"training {trained / 1e6:.2f} million weights on {len(data.training)} texts")
        with self.stop.deferred():
            found = loop.run()
        method.save(self.output, compact=self.options.compact)  # type: ignore[attr-defined]
        if self.options.method == "draft" and not self.options.compact and target.tokenizer is not None:
            target.tokenizer.save_pretrained(self.output)
        record = of_training(data, digest, vocabulary, trained, self.seconds, loop.curves, found)
        return self._finish(target, start | record)

    def _search(self, target: Loaded, texts: list[Text]) -> Outcome:
        """Find the blocks that the target can skip."""
        minutes = self.options.minutes or _SEARCH_MINUTES
        search = LayerSkipSearch(
            target,
            texts,
            minutes=minutes,
            seed=self.options.seed,
            path=self.output / SEARCH,
            on_progress=lambda done, said: self.listener.advance("search", done, said, (1 - done) * minutes * 60),
        )
        found = search.run()
        assert found.best is not None, "one set at least is measured"
        config = {"spectune_head": "layer-skip", "skip": found.best.skip.parts}
        write_atomically(self.output / "config.json", json.dumps(config, indent=2) + "\n")
        return self._finish(target, of_search(found))

    def _finish(self, target: Loaded, record: dict[str, Any]) -> Outcome:
        result = about(self.options, self.command, target) | record
        write_atomically(self.output / RESULT, json.dumps(result, indent=2) + "\n")
        (self.output / CHECKPOINT).unlink(missing_ok=True)
        (self.output / SEARCH).unlink(missing_ok=True)
        return Outcome(self.output, result)

    def _texts(self, target: Loaded) -> list[Text]:
        """The text to train on: what run.json of an earlier session names, else what there is now."""
        began = time.monotonic()
        self.output.mkdir(parents=True, exist_ok=True)
        path = self.output / RUN
        known = None
        if path.exists():
            check_same(self.options, self.output)
            known = _read(path, "rows")
        rows = gather_rows(self.options, target, self.listener, known["rows"] if known else None)
        texts = texts_of(rows)
        if known is None:
            content = {"options": asdict(self.options), "rows": [row.index for row in rows]}
            write_atomically(path, json.dumps(content) + "\n")
        self.seconds["text"] = time.monotonic() - began
        return texts

    def _states(self, target: Loaded, texts: list[Text], taps: tuple[int, ...]) -> StateStore:
        began = time.monotonic()
        store = StateStore(cache_folder() / "states" / target.info.digest, taps, target.model.hidden_size)

        def show(progress: StateProgress) -> None:
            detail = f"{progress.tokens} tokens, {progress.tokens / max(progress.seconds, 1e-9):.0f}/s"
            done = progress.texts / max(1, progress.wanted)
            self.listener.advance("states of the target", done, detail, progress.seconds_left)

        store.complete(target.model, texts, show)
        self.seconds["states"] = time.monotonic() - began
        return store

    def _settings(self, device: torch.device, rate: float) -> LoopSettings:
        minutes = self.options.minutes
        if minutes is None and self.options.epochs is None and device.type == "cpu":
            minutes = _CPU_MINUTES
        return LoopSettings(
            learning_rate=self.options.learning_rate or rate,
            epochs=self.options.epochs or _EPOCHS,
            seed=self.options.seed,
            minutes=minutes,
            autocast=pick_dtype("auto", device) == torch.bfloat16,
        )

    def _on_report(self, report: Report) -> None:
        if report.held_out is not None:
            first = report.held_out.acceptance[0]
            self.listener.note(
                f"held out after {report.tokens} tokens: {100 * first:.1f} % of first drafts right, "
                f"acceptance length {report.held_out.acceptance_length:.2f}"
            )
        detail = f"{report.tokens} tokens, loss {report.loss:.3f}"
        self.listener.advance("training", report.progress, detail, report.seconds_left)
