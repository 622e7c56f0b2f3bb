"""The one place where texts are printed: names and paths come out as they are, never as markup."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

CONTROL = {c: repr(chr(c))[1:-1] for c in (*range(32), *range(127, 160))}  # a name must not steer the terminal
LINES = {c: shown for c, shown in CONTROL.items() if chr(c) != "\n"}
LONGEST = 2500  # characters of a sentence


class Speaker(Console):
    """A console that takes no text for markup or emoji, and prints whatever a name can hold."""

    def __init__(self, **how: Any):
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | how)

    def print(self, *objects: Any, **how: Any) -> None:
        _takes_everything(self.file)
        super().print(*[printable(o, LINES) if isinstance(o, str) else o for o in objects], **how)

    def say(self, text: str) -> None:
        """A text on one line, however long."""
        self.print(printable(text), soft_wrap=True)

    def complain(self, sentence: str) -> None:
        """A user's mistake, on one line."""
        if len(sentence) > LONGEST:  # somebody typed a novel
            sentence = f"{sentence[: LONGEST // 2]} ... {sentence[-LONGEST // 2 :]}"
        self.print(Text.assemble(("error:", "red"), f" {printable(sentence)}"), soft_wrap=True)

    def warn(self, sentence: str) -> None:
        """What stands against a run, on one line."""
        self.print(Text.assemble(("warning:", "yellow"), f" {printable(sentence)}"), soft_wrap=True)

    def rows(self, rows: list[tuple[str, ...]]) -> None:
        """A title row and the rows below it."""
        title, *body = rows
        table = Table(*title, box=None, header_style="bold", pad_edge=False)
        for row in body:
            table.add_row(*[printable(cell) for cell in row])
        self.print(table)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def printable(text: str, control: dict[int, str] = CONTROL) -> str:
    """A text with its control characters written out.

    >>> printable("two\\nlines, a [bold] \\x1b[31mname")
    'two\\\\nlines, a [bold] \\\\x1b[31mname'
    """
    return text.translate(control)


def warn(sentence: str) -> None:
    """One line on stderr beside what a command does."""
    print(f"warning: {printable(sentence)}", file=sys.stderr)


def _takes_everything(file: Any) -> None:
    """What the file's encoding lacks (half a surrogate pair, of a name that is no UTF-8) is written out, too."""
    if isinstance(file, io.TextIOWrapper) and file.errors in ("strict", "surrogateescape"):
        file.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Has the output written now, so that a full disk or a closed pipe is heard of; afterwards nobody flushes again."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        mute()
        raise


def mute() -> None:
    """Standard output goes nowhere from now on: what is left in it cannot be written, and Python would try at the end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # it is no file at all
        sys.stdout = None  # type: ignore[assignment]
