"""Commands that train: run, resume, check-method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fallow.cli.app import DataDir, Download, SkipBad, Trust, Words, app, console, words_of
from fallow.cli.printing import print_comparison, print_forecast, print_result
from fallow.errors import UserError


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": False})
def run(
    words: Words = None,
    data_dir: DataDir = None,
    download: Download = False,
    out: Annotated[str, typer.Option(help="Folder for runs.")] = "runs",
    name: Annotated[str | None, typer.Option(help="Name of the run's folder.")] = None,
    stop_after: Annotated[int | None, typer.Option(help="Checkpoint after this round and stop.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
    skip_bad: SkipBad = False,
    trust: Trust = False,
    jobs: Annotated[int | None, typer.Option(help="Of a grid: runs at a time at most (default: as the machine allows).", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would be, and its memory and time; run nothing.")] = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", help="Show this, and the keys of the method.")] = False,
) -> None:
    """Train a federation.

    For example `fallow run`, `fallow run method=semifl data=cifar10`, `fallow run RECIPE key=value`.

    A key with several values makes a grid: `method=fedavg,fixmatch seed=0,1,2` is six runs, of which those are made that are missing.
    """
    recipe, keys = words_of(words)
    if show_help:
        _print_keys(recipe, keys, trust)
        return
    from fallow import runs
    from fallow.progress import Bar
    from fallow.runs import sweep
    from fallow.runs.interrupts import stopping

    if data_dir:
        keys["data_dir"] = data_dir
    if skip_bad:
        keys["skip_bad"] = True
    if grid := sweep.grid(recipe, keys):
        if stop_after is not None:
            raise UserError("--stop-after is for one run, and these keys ask for several", "leave it out; Ctrl-C stops all, and the same command goes on")
        planned = sweep.plan(recipe, grid, Path(out), name, download, trust)
        for sentence in () if quiet else planned.notes:
            console.say(sentence)
        print_forecast(planned.jobs, planned.settled) if dry_run else _sweep(planned, jobs, quiet)
        return
    if dry_run:
        _rehearse(recipe, keys, download, trust)
        return
    with stopping(), Bar(console, quiet) as bar:
        result = runs.run(recipe, out=out, name=name, stop_after=stop_after, download=download, watch=bar, trust=trust, **keys)
    print_result(result, quiet)


def _rehearse(recipe: str | None, keys: dict[str, Any], download: bool, trust: bool) -> None:
    from fallow.progress import Bar
    from fallow.runs import rehearsal

    with Bar(console) as bar:
        told = rehearsal.lines(recipe, keys, download, trust, bar)
    for line in told:
        console.say(line)


def _sweep(planned: Any, jobs: int | None, quiet: bool) -> None:
    """Makes the runs of a grid and prints their table."""
    from fallow.board import Board
    from fallow.report.comparison import compared
    from fallow.runs import sweep
    from fallow.runs.interrupts import stopping

    if not quiet:
        console.say(planned.about())
    with stopping(), Board(console, quiet) as board:
        failures = sweep.run(planned, board, board.watch, jobs)
    failed = [failure.job.path for failure in failures]
    if there := [job.path for job in planned.jobs if job.path not in failed]:
        console.print()
        print_comparison(compared(there))
    if failures:
        console.say(f"{len(failures)} of {len(planned.jobs)} runs failed: {', '.join(failure.job.name for failure in failures)}")
        raise typer.Exit(1)


def _print_keys(recipe: str | None, keys: dict[str, Any], trust: bool) -> None:
    from fallow.cli import helping
    from fallow.recipes.reading import recipe as keys_of
    from fallow.runs.settings import resolve

    method, options = resolve(keys_of(recipe) if recipe else {}, keys, trust)
    command: Any = typer.main.get_command(app)
    console.print(helping.run(command.commands["run"], method, options.method), soft_wrap=True)





@app.command()
def resume(
    path: Annotated[str, typer.Argument(metavar="RUN")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[rounds=N]", show_default=False)] = None,
    stop_after: Annotated[int | None, typer.Option(help="Checkpoint after this round and stop.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
    trust: Trust = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Go on although data, settings or own code have changed.")] = False,
) -> None:
    """Go on with a run that was stopped or killed.

    It comes to the same end as if it had not been. With `rounds=N` it is made longer, a finished one too.
    """
    from fallow import runs
    from fallow.progress import Bar
    from fallow.runs.interrupts import stopping

    with stopping(), Bar(console, quiet) as bar:
        result = runs.resume(path, rounds=_rounds(words), stop_after=stop_after, watch=bar, trust=trust, anyway=anyway)
    if not bar.started:
        console.say(f"The run {result.path} is finished; nothing to do.")
    print_result(result, quiet)


def _rounds(words: list[str] | None) -> Any:
    from fallow.trees import parse_pairs

    keys = parse_pairs(words or ())
    for key in keys:
        if key != "rounds":
            raise UserError(f"{key} cannot be changed on resume", "only rounds can, to make the run longer; start a new run for other keys")
    return keys.get("rounds")


@app.command("check-method")
def check_method(
    method: Annotated[str, typer.Argument(metavar="FILE.py:Class")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
) -> None:
    """Try out a method of one's own on tiny data: each hook and scenario, capture, determinism, resume."""
    from fallow.runs.trial import tried

    with console.status("trying it out on a few digits"):
        trial = tried(method, words_of([f"method={method}", *(words or [])])[1])
    console.rows(trial.rows())
    for sentence in trial.sentences:
        console.say(f"FAILS {sentence}")
    if not trial.passed:
        raise typer.Exit(1)
