"""When a generation ends: stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A character may be split over four byte-level tokens on either side of a stop string.
_SPLIT_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop tokens end a generation and belong to it; a stop string ends it with the token that completes it.

    Args:
        token_ids: any of these ends the generation.
        strings: stop strings; `decode` must then be given.
        decode: token ids -> text.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def reason(self, tokens: Sequence[int], new: int) -> str | None:
        """Why the newest of the delivered tokens ends the generation: a stop string, "" for a stop token, or None.

        `new` says how many tokens the last round delivered; 0 of them cannot end anything.
        """
        if new == 0:
            return None
        if tokens[-1] in self.token_ids:
            return ""
        return self._completed(tokens)

    def find(self, before: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Index of the first of `tokens` that ends the generation, given what came `before`."""
        for i, token in enumerate(tokens):
            if token in self.token_ids:
                return i
            if self.strings and self._completed([*before, *tokens[: i + 1]]) is not None:
                return i
        return None

    def _completed(self, tokens: Sequence[int]) -> str | None:
        """The stop string that the last token completed."""
        if not self.strings or self.decode is None:
            return None
        # Every token carries at least one byte, so the string cannot reach further back than its byte length.
        reach = max(len(s.encode()) for s in self.strings) + _SPLIT_CHARACTER
        tail = self.decode(tokens[-reach:])
        return next((s for s in self.strings if s in tail), None)
