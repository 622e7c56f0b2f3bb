"""The progress of a run: round, accuracy, pseudo-label rate, clients of the round that have ended, time left."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from fallow import launched
from fallow.data import validation
from fallow.runs.automatic import amounts
from fallow.said import Speaker


class Bar:
    """A watcher of a run that draws a bar on a terminal, and lines where there is none."""

    def __init__(self, console: Speaker, quiet: bool = False):
        self.console, self.quiet, self.started = console, quiet, False
        self.rounds = 0
        self.run: Any = None
        self._task: TaskID | None = None
        self._files: Files | None = None
        self._bar = Progress(
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[words]}"),
            _Clients(self),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )

    def __enter__(self) -> Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._close_files()
        self._bar.__exit__(kind, error, trace)
        if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit) and self.run is not None:
            path = self.run.folder.path
            self.console.say(f"interrupted after round {self.run.done}; go on with: fallow resume {path}")

    def __call__(self, event: str, what: Any) -> None:
        if event == "start":
            self.started, self.run, self.rounds = True, what, what.options.rounds
            self._task = self._bar.add_task("", total=self.rounds, completed=what.done, words="")
            if not self.quiet:
                self.console.say(headline(what))
                self.console.say(amounts(what.options, what.federation))
                for sentence in validation.sentences(what.federation):
                    self.console.say(sentence)
        elif event == "round" and self._task is not None:
            self._bar.update(self._task, advance=1, words=words(what, "labels"))
            if not self.quiet and not self.console.is_terminal:
                self.console.say(f"round {what['round']}/{self.rounds}  {words(what)}")
        elif event in ("data", "note") and not self.quiet:
            self.console.say(what)
        elif event == "reading":
            self._read(*what)
        elif event == "warning" and not self.quiet:
            self.console.warn(str(what))

    def _read(self, done: int, count: int) -> None:
        """A bar of its own takes the place of the rounds' while images are decoded."""
        if self._files is None:
            self._bar.stop()
            self._files = Files(self.console, self.quiet).__enter__()
        self._files(done, count)
        if done == count:
            self._close_files()
            self._bar.start()

    def _close_files(self) -> None:
        if self._files is not None:
            self._files.__exit__(None, None, None)
            self._files = None


class _Clients(ProgressColumn):
    """How many clients of the round have ended: a round may take minutes."""

    def __init__(self, bar: Bar):
        super().__init__()
        self.bar = bar

    def render(self, task: Task) -> Text:
        run = self.bar.run
        alone = run is not None and launched.count() == 1  # another rank's clients are not counted here
        return Text(f"{run.kit.finished}/{run.options.active_count} clients" if alone else "")


class Files:
    """A bar over files on a terminal, nothing where there is none."""

    def __init__(self, console: Speaker, quiet: bool = False):
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} images"),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=0)

    def __enter__(self) -> Files:
        self._bar.__enter__()
        return self

    def __exit__(self, *end: Any) -> None:
        self._bar.__exit__(*end)

    def __call__(self, done: int, count: int) -> None:
        self._bar.update(self._task, completed=done, total=count)


def headline(run: Any) -> str:
    """What a run is, on one line."""
    o, f = run.options, run.federation
    labelled = sum(len(c.labelled) for c in f.clients) + len(f.server.labelled)
    unlabelled = sum(len(c.unlabelled) for c in f.clients)
    return (
        f"{o.method} on {o.data}: {o.clients} clients ({o.active_count} a round), {labelled} labelled and "
        f"{unlabelled} unlabelled images, {o.model} on {run.kit.device}; run {run.folder.path}"
    )


def words(row: dict[str, Any], labelled: str = "pseudo-labelled") -> str:
    """The scores of a round."""
    parts = []
    if row.get("accuracy") is not None:
        parts.append(f"accuracy {100 * row['accuracy']:5.2f} %")
    if row.get("label_ratio") is not None:
        parts.append(f"{labelled} {100 * row['label_ratio']:3.0f} %")
    return "  ".join(parts)
