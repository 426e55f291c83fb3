"""`recommend` and `fit` on a folder of imported results."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from spectune.errors import UsageError
from spectune.importing.documents import fit_document, recommendation_document
from spectune.importing.record import load_imported


def show(path: Path, command: Literal["recommend", "fit"], *, as_json: bool, unserved: str | None) -> None:
    """Print what the command can say of the folder `path`.

    Raises UsageError where its file is damaged, or where `unserved`, an option, was given that needs a run.
    """
    if unserved is not None:
        raise UsageError(f"{unserved} needs a run that `spectune sweep` measured; {path} holds imported results")
    from spectune.reporting.summary import as_json as to_json

    found = load_imported(path)
    if as_json:
        print(to_json(recommendation_document(found) if command == "recommend" else fit_document(found)))
        return
    from spectune.importing.terminal import print_fit, print_recommendation

    (print_recommendation if command == "recommend" else print_fit)(found)
