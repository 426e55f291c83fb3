"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spectune.cli.completion import runs

RunArgument = Annotated[
    Path | None,
    typer.Argument(help="Run directory; the newest below ./runs if left out.", autocompletion=runs),
]
