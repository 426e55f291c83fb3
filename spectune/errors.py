"""Errors a user can cause or meet. Each becomes one line on stderr and an exit code, never a traceback."""

from __future__ import annotations


class SpectuneError(Exception):
    """The run failed (exit code 4). `hint` says what to do about it."""

    exit_code = 4

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(SpectuneError):
    """Wrong arguments or wrong input files (exit code 2)."""

    exit_code = 2


class CannotJudge(SpectuneError):
    """The data do not allow an answer (exit code 3)."""

    exit_code = 3
