"""Who is shown the progress of a run that Python started: a terminal or a notebook, nobody else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from fallow import launched

Watch = Callable[[str, Any], None]
PAUSE = 0.2  # seconds between two updates of a notebook's cell


@contextmanager
def watching(quiet: bool | None, watch: Watch | None) -> Iterator[Watch | None]:
    """A watcher that shows progress and tells `watch`, too. Without a word on `quiet` nothing is shown beside a `watch`
    of the user's own, nor where there is neither terminal nor notebook."""
    if quiet or launched.rank() or (quiet is None and watch is not None):
        yield watch
        return
    with _shown(quiet is False) as shown:
        yield watch if shown is None else shown if watch is None else _both(watch, shown)


def _both(one: Watch, other: Watch) -> Watch:
    def told(event: str, what: Any) -> None:
        one(event, what)
        other(event, what)

    return told


@contextmanager
def _shown(everywhere: bool) -> Iterator[Watch | None]:
    from fallow.progress import Bar
    from fallow.said import Speaker

    if in_notebook():
        with Cell() as cell:
            yield cell
        return
    console = Speaker(stderr=True)  # standard output is the script's
    if not console.is_terminal and not everywhere:
        yield None
        return
    if not console.is_terminal:
        console = Speaker(stderr=True, width=200)
    with Bar(console) as bar:
        yield bar


def in_notebook() -> bool:
    """Whether this is a cell of Jupyter, Colab or an editor's notebook, and not a terminal's IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Cell:
    """The output of a notebook's cell, updated in place: a bar with round, scores and time left."""

    def __init__(self) -> None:
        self.run: Any = None
        self.rounds = self.first = 0
        self.started = self.updated = 0.0
        self._display: Any = None
        self._warned: list[str] = []

    def __enter__(self) -> Cell:
        return self

    def __call__(self, event: str, what: Any) -> None:
        from fallow.progress import headline, words
        from fallow.runs.data import sentences

        if event == "start":
            self.run, self.rounds, self.first = what, what.options.rounds, what.done
            self.started = time.monotonic()
            self.about = " ".join([headline(what), *sentences(what.options, what.source)])
            self._show(what.done, "")
        elif event == "round":
            self._show(what["round"], words(what))
        elif event == "warning":
            self._warned.append(str(what))
            self._show(self.run.done, self.words, now=True)
        elif event == "end":
            self._show(what["rounds"], self.words, now=True)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None and self.run is not None:
            how = "interrupted" if issubclass(kind, KeyboardInterrupt | SystemExit) else "ended"
            self._show(self.run.done, f"{how}; go on with fallow.resume({str(self.run.folder.path)!r})", now=True)

    def _show(self, done: int, words: str, now: bool = False) -> None:
        self.words = words
        if not now and done > self.first + 1 and time.monotonic() - self.updated < PAUSE:
            return
        self.updated = time.monotonic()
        line = "  ".join(filter(None, [f"round {done}/{self.rounds}", words, "" if now else self._left(done)]))
        bar = f'<progress value="{done}" max="{self.rounds}" style="width: 16em; vertical-align: middle"></progress>'
        page = f'<div style="opacity: .75">{escape(self.about)}</div><div>{bar} {escape(line)}</div>'
        page += "".join(f"<div>⚠ {escape(sentence)}</div>" for sentence in self._warned)
        self._send({"text/plain": "\n".join([self.about, line, *self._warned]), "text/html": page})

    def _left(self, done: int) -> str:
        if done == self.first or done == self.rounds:
            return ""
        seconds = (time.monotonic() - self.started) / (done - self.first) * (self.rounds - done)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"

    def _send(self, bundle: dict[str, str]) -> None:
        from IPython.display import display

        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._display.update(bundle, raw=True)
