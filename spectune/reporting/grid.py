"""Tables on a terminal, plain and of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectune.reporting.format import visible

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def grid(title: str, columns: Sequence[str], *, left: Sequence[str]) -> Table:
    """An empty table; the columns named in `left` hold text, the others numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(Text(column), justify="left" if column in left else "right", overflow="fold")
    return table


def cell(text: str) -> Text:
    """Text, not str: a name may hold [brackets], which are not ours to interpret."""
    from rich.text import Text

    return Text(visible(text))
