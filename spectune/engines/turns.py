"""Decoders that take turns, round by round; one alone just decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spectune.decoding.decoder import Decoder, Run
from spectune.decoding.generation import RoundTrace
from spectune.engines.engine import Request


def take_turns(
    decoders: Sequence[Decoder],
    requests: Sequence[Request],
    batch: int,
    *,
    room: int = 0,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Run]:
    """Decode the requests with every decoder; the one with the fewest tokens so far has the next round.

    So all are busy over the same stretch of time, whatever their speeds, and a slow spell of the machine slows all of
    them. Two decoders of the same target prefill each prompt once: the second one takes over what the first one
    computed, and the seconds that it took. The decoders must not share recordings.
    """
    tokens = [0] * len(decoders)

    def count(index: int) -> Callable[[Decoder, RoundTrace], None]:
        def on_round(_: Decoder, trace: RoundTrace) -> None:
            tokens[index] += trace.emitted
            if on_tokens:
                on_tokens(trace.emitted)

        return on_round

    for index, decoder in enumerate(decoders):
        decoder.on_round = count(index)
    if len(decoders) == 2:
        decoders[0].peer, decoders[1].peer = decoders[1], decoders[0]
    running = {index: decoder.steps(requests, batch, room=room) for index, decoder in enumerate(decoders)}
    runs: dict[int, Run] = {}
    while running:
        index = min(running, key=lambda i: tokens[i])
        run = next(running[index], None)
        if run is None:
            del running[index]
        else:
            runs[index] = run
    return [runs[index] for index in range(len(decoders))]
