"""The mix: which share of the decoded tokens each suite has in the user's own workload."""

from __future__ import annotations

import math
from collections.abc import Iterable

from spectune.errors import UsageError

Mix = dict[str, float]  # suite -> share; the shares add up to 1

_EXAMPLE = "write for instance --mix code=0.5,chat=0.5"


def parse_mix(text: str, suites: Iterable[str], where: str = "in this run") -> Mix:
    """Shares from `code=3,chat=1`, scaled to add up to 1. Raises UsageError for anything else or an unknown suite."""
    known = list(dict.fromkeys(suites))
    found: Mix = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        name = name.strip()
        try:
            share = float(number)
        except ValueError:
            equals, share = "", 0.0
        if not equals or not name or not 0 < share < math.inf:
            raise UsageError(f"--mix takes SUITE=SHARE with a share above 0, not {part!r}", _EXAMPLE)
        if name in found:
            raise UsageError(f"--mix names {name} twice", _EXAMPLE)
        if name not in known:
            raise UsageError(f"--mix: no suite {name!r} {where}", f"there are {', '.join(known)}")
        found[name] = share
    total = math.fsum(found.values())
    return {name: share / total for name, share in found.items()}
