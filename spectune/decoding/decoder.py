"""The decoder: one loop for plain and speculative decoding.

    prefill rows -> repeat: draft = drafter.propose(K)        tokens, counts, q
                            p     = target.verify(draft)      one forward over the newest token and the draft's nodes
                            kept  = rule(draft, p, q)         per row
                            stop tokens, limits, refill of free slots

Plain decoding is the same loop with nothing drafted, so a speedup compares like with like.

State of a row with n known tokens: the target's cache holds n - 1 of them, the newest is in no cache yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step, send
from spectune.decoding.drafter import Draft, Drafter, DraftsAhead, Kept, Recordable, Round, Row, SharesCache, no_draft
from spectune.decoding.generation import Generation, Origin, RoundTrace
from spectune.decoding.graphs import Graphs, HostCopy
from spectune.decoding.sampling import History, is_greedy
from spectune.decoding.schedule import Schedule
from spectune.decoding.stopping import StopRule
from spectune.decoding.synthetic import SyntheticAcceptance
from spectune.decoding.verification import OnVerdict, Verified, Verifier, accept
from spectune.engines.engine import Request
from spectune.errors import SpectuneError, UsageError
from spectune.measuring.clock import Mark, RoundClock, make_clock
from spectune.sweeping.cell import Rule, Sampling
from spectune.sweeping.recording import recorded

OnTokens = Callable[[Request, list[int], list[Origin]], None]


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How to decode. `rule` is ignored for temperature 0, which is always greedy."""

    schedule: Schedule
    rule: Rule = "speculative"
    sampling: Sampling = field(default_factory=Sampling)
    synthetic: tuple[float, ...] | None = None  # conditional acceptance rates that override the rule's verdict
    graphs: bool | None = None  # record each round's computations (see `graphs`); None: where the device gains by it


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prompt's forward gave beside its keys and values."""

    logits: Tensor  # [1, 1, V] of the prompt's last token
    states: Tensor | None  # [1, n, taps * h] of all its tokens
    taps: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class Slot:
    """A running request."""

    row: Row
    request: Request
    generation: Generation
    limit: int  # most output tokens
    started: float
    first_token_at: float = 0.0
    prefill: Prefill | None = None  # kept until the peer has borrowed it

    @property
    def remaining(self) -> int:
        return self.limit - len(self.generation.tokens)


@dataclass(slots=True)
class Run:
    """Everything one call of `decode` produced."""

    generations: list[Generation]
    trace: list[RoundTrace] = field(default_factory=list)
    target_forwards: int = 0
    wall_seconds: float = 0.0


class Decoder:
    """Decodes requests in B slots.

    Args:
        target: the model whose distribution is kept.
        drafter: proposes tokens; None for plain decoding.
        stop: stop tokens and stop strings.
        graphs: recordings to go on with, of an earlier decoder with the same models and settings.
    """

    def __init__(
        self,
        target: CausalModel,
        drafter: Drafter | None,
        settings: DecodeSettings,
        stop: StopRule,
        graphs: Graphs | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.settings = settings
        self.stop = stop
        self.graphs = graphs
        self.records = recorded(str(target.device), settings.graphs)
        self.rule: Rule = "greedy" if is_greedy(settings.sampling) else settings.rule
        if self.rule == "greedy" and not is_greedy(settings.sampling):
            raise UsageError("the greedy rule needs temperature 0", "choose --rule speculative, block or match")
        self.synthetic = SyntheticAcceptance(settings.synthetic, target.device) if settings.synthetic else None
        self.store = KVStore(0, 0)
        self.history = History(0, 0, 1.0, target.device)
        self.slots: list[Slot] = []
        self.stop_ids = torch.tensor(sorted(stop.token_ids), dtype=torch.long, device=target.device)
        self.ahead: tuple[Mark, Mark] | None = None  # around a draft that was begun ahead
        self.paused = 0.0  # seconds to leave out: while another decoder ran, less what a prefill of the peer's took
        self.peer: Decoder | None = None  # takes turns with this one over the same requests (see `take_turns`)
        self.on_round: Callable[[Decoder, RoundTrace], None] | None = None
        # Sampled chains only: p [B, K + 1, V], q [B, K, V], counts [B], accepted [B].
        self.on_verdict: OnVerdict | None = None  # for chains under speculative sampling; not called by recordings

    def decode(
        self,
        requests: Sequence[Request],
        batch: int,
        on_tokens: OnTokens | None = None,
        *,
        room: int = 0,
        rounds: int | None = None,
    ) -> Run:
        """`steps` to their end."""
        *_, run = self.steps(requests, batch, on_tokens, room=room, rounds=rounds)
        return run

    @torch.inference_mode()
    def steps(
        self,
        requests: Sequence[Request],
        batch: int,
        on_tokens: OnTokens | None = None,
        *,
        room: int = 0,
        rounds: int | None = None,
    ) -> Iterator[Run]:
        """Decode all requests, `batch` at a time; a finished row's slot is refilled at once.

        Yields the same run after each round, and last when it is complete. The time between two rounds is not counted,
        so that several decoders without recordings may take turns.

        Args:
            room: make the caches long enough for requests of so many tokens, prompt and output, even if these are
                shorter: a later run can then use the same.
            rounds: end after so many, whatever is unfinished.

        Raises:
            UsageError: an empty prompt, a prompt that fills the context, or a token id outside the vocabulary.
        """
        if batch < 1:
            raise UsageError(f"batch must be 1 or more, not {batch}")
        began = self._now()
        run = Run([Generation(r.id, len(r.token_ids)) for r in requests])
        waiting = deque(zip(requests, run.generations, strict=True))
        limits = [self._limit(request) for request in requests]
        width = self.settings.schedule.largest if self.drafter else 0
        capacity = max([room, *(len(r.token_ids) + n for r, n in zip(requests, limits, strict=True))])
        rows = min(batch, len(requests))
        if not self.records:
            self.graphs = None
        elif self.graphs is None or self.graphs.rows != rows:
            self.graphs = Graphs(self.target.device, rows)
        # A round writes up to K slots behind a row's last possible token.
        capacity += width + 1
        self.store = self.graphs.store("target", rows, capacity) if self.graphs else KVStore(rows, capacity)
        self.history = History(
            rows, self.target.vocab_size, self.settings.sampling.repetition_penalty, self.target.device
        )
        if self.drafter:
            if isinstance(self.drafter, Recordable):
                self.drafter.record_with(self.graphs if self.drafter.device == self.target.device else None)
            self.drafter.start(rows, capacity)
            if isinstance(self.drafter, SharesCache):
                self.drafter.adopt(self.store)
        self.slots = []
        clock = make_clock(self.target.device, self.drafter.device if self.drafter else None)
        while (waiting or self.slots) and len(run.trace) != rounds:
            while waiting and len(self.slots) < rows:
                self._admit(*waiting.popleft(), on_tokens)
            if not self.slots:
                continue
            trace = self._round(clock, full=len(self.slots) == batch, on_tokens=on_tokens)
            run.trace.append(trace)
            run.target_forwards += 1
            if self.on_round:
                self.on_round(self, trace)
            left = time.perf_counter()
            yield run
            self.paused += time.perf_counter() - left
        run.wall_seconds = self._now() - began
        # A decoder may be kept; the caches of a finished run need not be, unless recordings use them.
        self.store = KVStore(0, 0)
        if self.drafter:
            if isinstance(self.drafter, Recordable):
                self.drafter.record_with(None)
            self.drafter.start(0, 0)
        yield run

    def _now(self) -> float:
        """Seconds of this decoder's own clock, which stands still between rounds."""
        return time.perf_counter() - self.paused

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's states that the drafter reads."""
        return self.drafter.taps if self.drafter else ()

    @property
    def captures(self) -> int:
        """Computations recorded so far."""
        return self.graphs.captures if self.graphs else 0

    def _limit(self, request: Request) -> int:
        """Output tokens that fit: the request's own limit, cut by the context."""
        length = len(request.token_ids)
        if length == 0:
            raise UsageError(f"request {request.id!r} has an empty prompt")
        if length >= self.target.max_context:
            raise UsageError(
                f"request {request.id!r} has {length} prompt tokens; the context is {self.target.max_context}"
            )
        if max(request.token_ids) >= self.target.vocab_size or min(request.token_ids) < 0:
            raise UsageError(f"request {request.id!r} has a token id outside the vocabulary")
        return min(request.max_new_tokens, self.target.max_context - length)

    def _admit(
        self,
        request: Request,
        generation: Generation,
        on_tokens: OnTokens | None,
    ) -> None:
        """Prefill a request into the next free row and choose its first token."""
        started = self._now()
        index = len(self.slots)
        prompt = list(request.token_ids)
        borrowed = self._borrow(request, index)
        prefill = borrowed or self._prefill(prompt, index)
        self.history.reset(index, prompt)
        row = Row(prompt, request.seed)
        token = self._choose_first(prefill.logits, row, index)
        slot = Slot(row, request, generation, self._limit(request), started)
        if self.peer and borrowed is None:
            slot.prefill = prefill
        slot.first_token_at = self._now()
        generation.ttft_seconds = slot.first_token_at - started
        generation.origins.append("prefill")
        generation.tokens.append(token)
        row.tokens.append(token)
        self.history.add(index, [token])
        if on_tokens:
            on_tokens(request, [token], generation.origins[-1:])
        if self._finished(slot, [token]):
            return
        if self.drafter:
            self.drafter.admit(index, row, None if prefill.states is None else prefill.states[0])
        self.slots.append(slot)

    def _prefill(self, prompt: list[int], index: int) -> Prefill:
        """The target's forward over a prompt, with the states that a drafter reads, this one's or the peer's."""
        began = time.perf_counter()
        ids = torch.tensor([prompt], device=self.target.device)
        step = Step(index, (0,), len(prompt), self.target.device)
        states = None
        if taps := self.taps or (self.peer.taps if self.peer else ()):
            logits, states = self.target.forward_with_states(ids, step, self.store, taps, last_only=True)
        else:
            logits = self.target.forward(ids, step, self.store, last_only=True)
        return Prefill(logits, states, taps, time.perf_counter() - began)

    def _borrow(self, request: Request, index: int) -> Prefill | None:
        """The prefill of a request that the peer is decoding, if it can serve here.

        The clock goes on by what it took there, so that no figure depends on who came first.
        """
        if self.peer is None:
            return None
        began = time.perf_counter()
        for row, slot in enumerate(self.peer.slots):
            prefill = slot.prefill
            if slot.request is request and prefill is not None and self.taps in ((), prefill.taps):
                self.store.copy(self.peer.store, row, index, len(request.token_ids))
                slot.prefill = None
                self.paused += time.perf_counter() - began - prefill.seconds
                return prefill
        return None

    def _choose_first(self, logits: Tensor, row: Row, index: int) -> int:
        """First token of a row from its prefill logits [1, 1, V]: what closes a round without a draft."""
        seen, device = self.history.seen, logits.device
        history = History.of(None if seen is None else seen[index : index + 1], self.history.penalty)
        round_ = Round([row], [0], 0, 0, self.rule, self.settings.sampling, history, self.stop_ids, device)
        return _token(int(accept(logits, no_draft(1, device), round_).token))

    def _verify(self, newest: Tensor, draft: Draft | None, round_: Round) -> Verified:
        """One target forward over the newest tokens [B, 1] and the draft, and the rule."""
        verifier = Verifier(self.target, self.store, self.taps, self.graphs, self.synthetic, self.on_verdict)
        return verifier.verify(newest, draft, round_)

    def _round(
        self,
        clock: RoundClock,
        *,
        full: bool,
        on_tokens: OnTokens | None,
    ) -> RoundTrace:
        """Draft, verify, accept, and hand out the tokens."""
        began = time.perf_counter()
        device = self.target.device
        rows = [slot.row for slot in self.slots]
        context = sum(row.length - 1 for row in rows) / len(rows)
        # The last token of a row comes from the target itself, so a row drafts one less than it may still emit.
        k = self.settings.schedule.at(len(rows))
        limits = [min(k, slot.remaining - 1) for slot in self.slots]
        starts = tuple(row.length - 1 for row in rows)
        round_ = Round(
            rows,
            limits,
            max(limits),
            k,
            self.rule,
            self.settings.sampling,
            self.history,
            self.stop_ids,
            device,
            fixed=self.graphs is not None,
        )
        start = clock.mark()
        draft = self.drafter.propose(round_) if self.drafter and max(limits) > 0 else None
        drafted = clock.mark()
        newest = send([[row.tokens[-1]] for row in rows], device)
        verified = self._verify(newest, draft, round_)
        end = clock.mark()
        # The round's only copy to the host: [B, 4 + D] of counts and tokens. Meanwhile the next draft may begin.
        copy = HostCopy(verified.summary)
        earlier, self.ahead = self.ahead, None
        if draft is not None and self.graphs is not None and isinstance(self.drafter, DraftsAhead):
            before = clock.mark()
            self.drafter.draft_ahead(round_, newest, draft.tokens, verified.summary[:, 2], verified.summary[:, 3])
            self.ahead = before, clock.mark()
        summary = copy.rows()
        accepted_in_all = []
        done = []
        emitted_in_all = 0
        for index, (slot, (depth, nodes, accepted, closing, *proposal)) in enumerate(
            zip(self.slots, summary, strict=True)
        ):
            tokens = [*proposal[:accepted], _token(closing)]
            kept = self._cut(slot, tokens)
            slot.row.tokens += kept
            self.history.add(index, kept)
            # Behind a stop token nothing was offered and nothing is kept.
            cut = len(kept) <= accepted
            delivered = len(kept) if cut else accepted
            accepted_in_all.append(delivered)
            slot.generation.add_round(delivered if cut else depth, delivered, kept, nodes)
            emitted_in_all += len(kept)
            if on_tokens:
                on_tokens(slot.request, kept, slot.generation.origins[-len(kept) :])
            if self._finished(slot, kept):
                done.append(index)
        if draft is not None and draft.tree is not None and self.graphs is None:
            self.store.compact(starts, verified.path, accepted_in_all)
        if self.drafter:
            self.drafter.keep(rows, Kept(accepted_in_all, verified.path, verified.states))
        seconds = time.perf_counter() - began
        draft_seconds, verify_seconds = clock.seconds(start, drafted), clock.seconds(drafted, end)
        if draft is not None and draft.ahead and earlier is not None:
            draft_seconds += clock.seconds(*earlier)
        for slot in self.slots:
            if full:
                slot.generation.full_seconds += seconds
                slot.generation.full_rounds += 1
                slot.generation.full_tokens += slot.generation.rounds[-1].emitted
        trace = RoundTrace(
            rows=len(rows),
            full=full,
            drafted=sum(row[0] for row in summary),
            nodes=sum(row[1] for row in summary),
            emitted=emitted_in_all,
            draft_steps=draft.steps if draft else 0,
            context=context,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            overhead_seconds=max(0.0, seconds - draft_seconds - verify_seconds),
        )
        for index in reversed(done):
            self._free(index)
        return trace

    def _cut(self, slot: Slot, tokens: list[int]) -> list[int]:
        """The part of a round's tokens that is delivered: up to a stop or the limit."""
        kept = tokens[: slot.remaining]
        end = self.stop.find(slot.generation.tokens, kept)
        return kept if end is None else kept[: end + 1]

    def _finished(self, slot: Slot, new: list[int]) -> bool:
        """Close the generation if its newest tokens end it."""
        generation = slot.generation
        stopped = self.stop.reason(generation.tokens, len(new))
        if stopped is None and slot.remaining > 0:
            return False
        if stopped is not None:
            generation.finish_reason = "stop"
            generation.stop_string = stopped or None
        else:
            generation.finish_reason = "length" if slot.limit == slot.request.max_new_tokens else "context"
        generation.decode_seconds = self._now() - slot.first_token_at
        return True

    def _free(self, index: int) -> None:
        """Take a finished row out; the last row moves into its place, so that rows stay packed."""
        last = len(self.slots) - 1
        if index != last:
            self.store.move(last, index)
            self.history.move(last, index)
            if self.drafter:
                self.drafter.move(last, index)
            self.slots[index] = self.slots[last]
        self.slots.pop()


def _token(closing: int) -> int:
    """A round's closing token. Raises SpectuneError where the distributions it comes from are none."""
    if closing < 0:
        raise SpectuneError("the models' outputs are not finite numbers", "try another --dtype, such as bfloat16")
    return closing
