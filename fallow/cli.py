"""The command line: parse, call, print; no logic."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fallow import flags, said, targets
from fallow.commands import Commands
from fallow.errors import UserError
from fallow.said import Speaker

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
silent = os.environ.get("RANK", "0") != "0"  # under torchrun rank 0 speaks for all
console = Speaker(quiet=silent)
if not console.is_terminal:
    console = Speaker(width=200, quiet=silent)  # a file or a pipe has no edge to wrap at
debug = False



def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    from fallow import completion

    return completion.words(list(ctx.params.get("words") or ()), incomplete)


Words = Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", show_default=False, autocompletion=_complete)]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Where the data sets lie.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that Fallow did not make.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the data set if it is not there.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Go on without image files that cannot be read.")]
BestRound = Annotated[bool, typer.Option("--best", help="The weights of the best round by validation, not of the last.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that the folder or the recipe names, with your rights.")]


def main() -> None:
    """Runs the command; a user's mistake ends in one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # file names may hold bytes that are no text
    try:
        _check_words(sys.argv[1:])
        words = flags.understood(sys.argv[1:] or ["--help"], typer.main.get_command(app))
        code = app(words, standalone_mode=False)  # typer's own word for Ctrl-C is 130
        said.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as e:
        if debug:
            raise
        speaks = not silent or getattr(e, "unspoken", False)
        _end(str(e), 2 if speaks else 0, not speaks)  # a rank that ended with 2 would make torchrun stop rank 0 before it has spoken
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as e:
        if debug:
            raise
        _end(str(_of_the_machine(e)), 2)
    except Exception as e:
        if (told := _too_much(e)) and not debug:
            _end(str(told), 2)
        if hasattr(e, "format_message") and hasattr(e, "exit_code"):  # click's own: a wrong flag, a missing argument
            cause = e.format_message().rstrip(". ")
            _end(cause if cause.endswith("?") else f"{cause}; see `fallow --help`.", 2)
        raise


def _end(sentence: str, code: int, quiet: bool = silent) -> NoReturn:
    """The last word, if there is anyone to hear it."""
    with suppress(OSError, ValueError):
        Speaker(stderr=True, quiet=quiet).complain(sentence)
    with suppress(OSError, ValueError):
        said.flush()
    sys.exit(code)


def _check_words(words: list[str]) -> None:
    for word in words:
        if "\0" in word:
            raise UserError(f"{word!r} has a NUL character in it, which no name can have", "leave it out")


def _of_the_machine(error: OSError) -> UserError:
    """What a disk, a pipe or a terminal refused."""
    why = error.strerror or str(error) or type(error).__name__
    if isinstance(error, BrokenPipeError) and error.filename is None:
        said.mute()
        return UserError("the output was closed by who was reading it", "a run that was going on continues with `fallow resume`")
    if error.filename is None:
        return UserError(f"the machine refused to read or write ({why})", "look after its disk, then give the command again")
    return UserError(f"{os.fsdecode(error.filename)} cannot be read or written ({why})", "check the path and the disk it lies on")


def _too_much(error: BaseException) -> UserError | None:
    """What is more than this machine can hold; None for every other error."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return UserError("the memory of this machine is not enough for that", "ask for less, or take smaller images or batches")
    if isinstance(error, RecursionError):
        return UserError("something that was given is nested too deeply", "write it flat")
    return None


def _version(asked: bool) -> None:
    if asked:
        from fallow import __version__

        console.say(f"fallow {__version__}")
        raise typer.Exit


@app.callback()
def common(
    show: Annotated[bool, typer.Option("--debug", help="Show the traceback of a user's mistake.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)] = False,
) -> None:
    """Federated semi-supervised learning: one model over many clients when almost none of the data has labels."""
    global debug
    debug = show


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
    show_help: Annotated[bool, typer.Option("--help", help="Show this, and the keys of the method.")] = False,
) -> None:
    """Train a federation.

    For example `fallow run`, `fallow run method=semifl data=cifar10`, `fallow run RECIPE key=value`.

    A key with several values makes a grid: `method=fedavg,fixmatch seed=0,1,2` is six runs, of which those are made that are missing.
    """
    recipe, keys = _words(words)
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
        if dry_run:
            raise UserError("--dry-run is for one run, and these keys ask for several", "give one value to each key")
        _sweep(sweep.plan(recipe, grid, Path(out), name, download, trust), jobs, quiet)
        return
    if dry_run:
        _rehearse(recipe, keys, download, trust)
        return
    with stopping(), Bar(console, quiet) as bar:
        result = runs.run(recipe, out=out, name=name, stop_after=stop_after, download=download, watch=bar, trust=trust, **keys)
    _print_result(result, quiet)


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

    for sentence in () if quiet else (planned.about(), *planned.notes):
        console.say(sentence)
    with stopping(), Board(console, quiet) as board:
        failures = sweep.run(planned, board, board.watch, jobs)
    failed = [failure.job.path for failure in failures]
    if there := [job.path for job in planned.jobs if job.path not in failed]:
        console.print()
        _print_comparison(compared(there))
    if failures:
        console.say(f"{len(failures)} of {len(planned.jobs)} runs failed: {', '.join(failure.job.name for failure in failures)}")
        raise typer.Exit(1)


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
    _print_result(result, quiet)


def _rounds(words: list[str] | None) -> Any:
    from fallow.config import parse_pairs

    keys = parse_pairs(words or ())
    for key in keys:
        if key != "rounds":
            raise UserError(f"{key} cannot be changed on resume", "only rounds can, to make the run longer; start a new run for other keys")
    return keys.get("rounds")


def _kinds() -> list[str]:
    from fallow.listing import KINDS

    return list(KINDS)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|datasets|models|partitions|recipes|views|figures", autocompletion=_kinds)],
    data_dir: DataDir = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="Recipes without the time they take on this machine.")] = False,
) -> None:
    """What there is."""
    from fallow.listing import TIMES, rows

    times = what == "recipes" and not no_time
    with console.status("measuring how fast this machine trains (once)") if times else nullcontext():
        found = rows(what, data_dir, times)
    console.rows(found)
    if times:
        console.print()
        console.say(TIMES)


@app.command()
def split(
    words: Words = None,
    data_dir: DataDir = None,
    download: Download = False,
    picture: Annotated[str | None, typer.Option(help="File for the picture (PNG or SVG).")] = None,
    save: Annotated[str | None, typer.Option(help="File for the federation (.npz).")] = None,
    force: Force = False,
    skip_bad: SkipBad = False,
    trust: Trust = False,
) -> None:
    """Show who holds what: a table and a picture.

    The federation is that of a run with these settings.
    """
    from fallow import disk, runs
    from fallow.data.federate import table
    from fallow.data.picture import lines
    from fallow.data.picture import picture as draw
    from fallow.progress import Bar

    recipe, keys = _words(words)
    if picture:
        targets.file(Path(picture), "split", force, "--picture")
    if save:
        targets.file(Path(save), "split --save", force, "--save")
    if data_dir:
        keys["data_dir"] = data_dir
    if skip_bad:
        keys["skip_bad"] = True
    with Bar(console) as bar:
        _, options, source, federation = runs.prepare(recipe, keys, download=download, trust=trust, watch=bar)
    labels, classes = source.train.labels.numpy(), len(source.classes)
    rows, summary = table(federation, labels, source.classes)
    console.rows([tuple(rows[0]), *[tuple("" if v is None else str(v) for v in row.values()) for row in rows]])
    for line in lines(summary):
        console.say(line)
    where = Path(picture or f"split-{options.partition.replace(':', '-').replace(',', '-')}-seed{options.seed_of('split')}.png")
    targets.file(where, "split", force, "--picture")
    with disk.told(where, "make its folder first, or choose another with --picture"):
        draw(federation, labels, classes, where, class_names=source.classes)
    console.say(f"picture: {where}")
    if save:
        with disk.told(Path(save), "make its folder first, or choose another with --save"):
            federation.save(Path(save))
        console.say(f"federation: {save}")


@app.command()
def check(
    words: Annotated[list[str] | None, typer.Argument(metavar="DATA [KEY=VALUE]...", show_default=False)] = None,
    data_dir: DataDir = None,
    download: Download = False,
    picture: Annotated[str | None, typer.Option(help="File for the picture (PNG or SVG).")] = None,
    force: Force = False,
    skip_bad: SkipBad = False,
) -> None:
    """Look at every image of a data set.

    What is there, and what is wrong. Ends with exit code 1 if a problem is found.
    """
    from fallow import disk
    from fallow.data import check_picture, checking
    from fallow.progress import Files

    data, keys = checking.asked(words or [])
    where = check_picture.writable(Path(picture or f"check-{checking.plain(data)}.png"), force)
    with Files(console) as tell:
        found = checking.check(data, data_dir or keys.data_dir, keys.layout, skip_bad or keys.skip_bad, download, tell)
    for line in found.said[:1]:
        console.say(line)
    for rows in (checking.by_site(found), checking.by_class(found), checking.by_size(found)):
        console.print()
        console.rows(rows)
    console.print()
    for line in checking.facts(found):
        console.say(line)
    with disk.told(where, "make its folder first, or choose another with --picture"):
        check_picture.picture(found, where)
    console.say(f"picture: {where}")
    problems = found.problems()
    for number, (cause, remedy) in enumerate(problems, 1):
        console.say(f"problem {number} of {len(problems)}: {cause}; {remedy}.")
    if problems:
        raise typer.Exit(1)
    console.say("no problem found")


@app.command()
def cache(clear: Annotated[bool, typer.Option("--clear", help="Remove all of them.")] = False) -> None:
    """Decoded images that later runs map from disk: what is kept where."""
    from fallow.listing import cached

    if clear:
        from fallow.data.readers import kept

        console.say(f"removed: {kept.clear()}")
        return
    console.rows(cached())


@app.command()
def compare(
    paths: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders with runs below them.")],
    statistic: Annotated[str, typer.Option(help="last, best, mean_last_10, or another number of the summaries.")] = "last",
    rows: Annotated[str | None, typer.Option(help="Keys that tell rows apart, commas between (default: by what differs).")] = None,
    columns: Annotated[str | None, typer.Option(help="Keys that tell columns apart.")] = None,
    scores: Annotated[str | None, typer.Option(help="Numbers beside each run, commas between: macro_f1, auroc, balanced_accuracy, calibration_error, validation.best.")] = None,
    against: Annotated[str | None, typer.Option(help="The row that differences are to (default: FedAvg, or the first).")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="File for the table: .md, .csv or .tex.")] = None,
    format: Annotated[str | None, typer.Option(help="md, csv or tex, printed unless there is a file for it.")] = None,
    force: Force = False,
) -> None:
    """Compare runs, and methods over their seeds.

    Runs side by side, and methods by settings: mean and standard deviation over seeds.
    """
    from fallow.listing import LONGEST, run_rows
    from fallow.report import against as standing
    from fallow.report import written
    from fallow.report.comparison import compared

    form = written.format_of(format, Path(out) if out else None)
    if out:
        targets.file(Path(out), "compare", force)
    listed = run_rows(paths, _list(scores))
    if 1 < len(listed) <= LONGEST + 1 and (out or not form):
        console.rows(listed)
        if len(listed) == 2 and not out:
            for sentence in standing.against(paths):
                console.warn(sentence)
            return
        console.print()
    found = compared(paths, statistic, _list(rows), _list(columns), against)
    if form and not out:
        console.print(written.FORMATS[form](found), soft_wrap=True, end="")
        return
    _print_comparison(found)
    for sentence in standing.against(paths):
        console.warn(sentence)
    if form and out:
        written.write(written.FORMATS[form](found), Path(out), force)
        console.say(f"written: {out}")


def _print_comparison(found: Any) -> None:
    from fallow.report import written

    console.say(found.caption())
    console.rows(written.printed(found))
    if gaps := written.differences(found):
        console.print()
        console.rows(gaps)
    for sentence in found.below():
        console.say(sentence.replace("Marked", "Marked *", 1))


@app.command()
def table(
    paper: Annotated[str, typer.Argument(metavar="PAPER|FILE.yaml", help="A paper with recipes (semifl, fedrgd, fedloke, feddure, feddb), or a file.")],
    name: Annotated[str | None, typer.Argument(metavar="[TABLE]", help="1, II, fig7, ...; of a file: its folder's name.", show_default=False)] = None,
    only: Annotated[list[str] | None, typer.Option(help="key=value; a part of it (also method=ROW, setting=...).")] = None,
    given: Annotated[list[str] | None, typer.Option("--set", help="key=value; a further key for every run.")] = None,
    source: Annotated[str | None, typer.Option("--from", help="Read results from this folder; run nothing.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for runs and the table (default: runs).")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds (default: the paper's).", min=1, max=10_000)] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time.", min=1)] = 1,
    collect: Annotated[str | None, typer.Option(help="Then thin the finished runs into this folder.")] = None,
    file: Annotated[str | None, typer.Option("-o", help="A further file for the table: .md, .csv or .tex.")] = None,
    format: Annotated[str | None, typer.Option(help="md, csv or tex, printed unless there is a file for it.")] = None,
    force: Force = False,
    data_dir: DataDir = None,
    download: Download = False,
    trust: Trust = False,
) -> None:
    """Run a paper's table, or one of your own.

    What is finished is not run again.
    """
    from fallow import disk
    from fallow.report import grid, written
    from fallow.report.table import Table as Printed

    form = written.format_of(format, Path(file) if file else None)
    if file:
        targets.file(Path(file), "table", force)
    grids = grid.Grids(paper, name, only or (), [*(given or ()), *([f"data_dir={data_dir}"] if data_dir else [])], trust=trust)
    place, failures = Path(source or out or "runs"), []
    if source and not place.is_dir():
        raise UserError(f"there is no folder {source}", "give one with results or runs, such as results")
    grids.check_targets(place, Path(out or place) if out or not source else None, Path(collect) if collect else None, seeds, force)
    if not source:
        failures = grid.run(grids, place, seeds, jobs, console.say, download)
    shown = Printed(grids, grid.read(grids, place, seeds if source else seeds or grids.grid.seeds, failures))
    if form and not file:
        console.print(shown.FORMATS[form](shown), soft_wrap=True, end="")
    else:
        console.say(shown.caption())
        for rows in shown.printed():
            console.rows(rows)
        for sentence in shown.below():
            console.say(sentence)
    if form and file:
        disk.write(Path(file), shown.FORMATS[form](shown), "make its folder first, or choose another with -o")
        console.say(f"written: {file}")
    if out or not source:
        console.say(f"written: {shown.write(Path(out or place))}/table.md, table.tex, table.csv")
    if collect:
        console.say(f"collected: {len(grid.collect(grids, place, Path(collect)))} runs, {collect}")
    if failures:
        raise typer.Exit(1)


@app.command()
def report(
    paths: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders with runs below them.")],
    out: Annotated[str, typer.Option("--out", "-o", help="File for the page.")] = "report.html",
    force: Force = False,
) -> None:
    """Write one page about runs, for a browser.

    It needs no network.
    """
    from fallow.report import page

    path, runs = page.write(paths, out, force)
    console.say(f"page of {runs} run{'s' if runs > 1 else ''}: {path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command()
def watch(
    paths: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders with runs below them.")],
    port: Annotated[int | None, typer.Option(help="Port on this machine (default: a free one).", min=1, max=65535)] = None,
) -> None:
    """Show that page while runs go on.

    It is for a browser on this machine; Ctrl-C ends it.
    """
    from fallow.report.watch import Watch

    with Watch(paths, port) as server:
        console.say(f"open {server.address} in a browser; Ctrl-C ends it")
        server.serve()


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder for it (default: RUN/export).")] = None,
    format: Annotated[str, typer.Option(help="safetensors, torch-export, onnx, or all that can be had.")] = "all",
    best: BestRound = False,
    force: Force = False,
    trust: Trust = False,
) -> None:
    """Write the trained model with a model card.

    Weights, and graphs that need no Fallow.
    """
    from fallow.export import export

    done = export(run, out, format, force, trust=trust, best=best)
    for sentence in done.left_out:
        console.say(sentence)
    console.say(f"written: {done.path}/ ({', '.join(done.files)})")


@app.command()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    folder: Annotated[str, typer.Argument(metavar="IMAGES", help="A folder of images, in folders or not; or one image.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The CSV.")] = "predictions.csv",
    probabilities: Annotated[bool, typer.Option("--probabilities", help="A column per class as well.")] = False,
    batch: Annotated[int | None, typer.Option(help="Images per batch (default: the run's eval_batch).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    best: BestRound = False,
    force: Force = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    trust: Trust = False,
) -> None:
    """Label images with a run's model.

    Of a folder a CSV is written; of one image the classes are printed, the likeliest first.
    """
    from fallow.export.predict import predict
    from fallow.progress import Files

    if not Path(folder).is_dir() and Path(folder).suffix:
        from fallow.export.labelling import told

        console.rows(told(folder, run, device, trust, best))
        return
    with Files(console, quiet) as tell:
        done = predict(run, folder, out, probabilities=probabilities, batch=batch, device=device, tell=tell, force=force, trust=trust, best=best)
    if done.by_batch:
        console.say("batch norm used each batch's own statistics, as in the run: predictions depend on which images share a batch")
    if done.unreadable:
        console.say(f"{len(done.unreadable)} of {done.images} files could not be read; the column error says why ({done.unreadable[0]} is the first)")
    console.say(f"labelled {done.images - len(done.unreadable)} images: {done.path}")


@app.command("check-method")
def check_method(
    method: Annotated[str, typer.Argument(metavar="FILE.py:Class")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
) -> None:
    """Try out a method of one's own on tiny data: each hook and scenario, capture, determinism, resume."""
    from fallow.runs.trial import tried

    with console.status("trying it out on a few digits"):
        trial = tried(method, _words([f"method={method}", *(words or [])])[1])
    console.rows(trial.rows())
    for sentence in trial.sentences:
        console.say(f"FAILS {sentence}")
    if not trial.passed:
        raise typer.Exit(1)


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="See `fallow list figures`.")],
    paths: Annotated[list[str], typer.Argument(metavar="RUN...")],
    out: Annotated[str, typer.Option("--out", "-o", help="File: .png, .svg or .pdf.")],
    width: Annotated[float, typer.Option(help="Inches; 3.5 is a column of a two-column page.")] = 3.5,
    names: Annotated[str | None, typer.Option(help="What to call the lines, commas between, in the order of the runs.")] = None,
    parts: Annotated[str | None, typer.Option(help="Of bias and diversity: which, commas between.")] = None,
    force: Force = False,
) -> None:
    """Draw a figure for a paper.

    Runs that differ only in their seed are one line with a band.
    """
    from fallow.report.figures import figure

    caption = figure(name, paths, out, width=width, names=_list(names), parts=_list(parts), force=force)
    console.say(caption)
    console.say(f"figure: {out}")


def _list(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def _words(words: list[str] | None) -> tuple[str | None, dict[str, Any]]:
    """A recipe, if the first word is no key=value, and the keys."""
    from fallow.config import parse_pairs

    words = list(words or [])
    recipe = words.pop(0) if words and "=" not in words[0] else None
    keys = parse_pairs(words)
    for flag in ("out", "name", "stop_after", "download", "watch", "trust"):
        if flag in keys:
            raise UserError(f"{flag} is no key of a run", f"write --{flag.replace('_', '-')} before its value")
    return recipe, keys


def _print_keys(recipe: str | None, keys: dict[str, Any], trust: bool) -> None:
    from fallow import helping
    from fallow.runs import settings

    method, options = settings.resolve(settings.recipe(recipe) if recipe else {}, keys, trust)
    command: Any = typer.main.get_command(app)
    console.print(helping.run(command.commands["run"], method, options.method), soft_wrap=True)


def _print_result(result: Any, quiet: bool = False) -> None:
    from fallow.measure import told
    from fallow.runs import warned

    if silent:
        return
    s = result.summary
    if s["last"] is not None:
        console.say(f"accuracy {100 * s['last']:.2f} % after round {s['rounds']} (best {100 * s['best']:.2f} % in round {s['best_round']})")
    for sentence in [] if quiet else told.sentences(s):
        console.say(sentence)
    for sentence in warned.sentences(s):
        console.warn(sentence)
    if s["status"] != "finished":
        console.say(f"stopped after round {s['rounds']}; go on with: fallow resume {result.path}")
    console.say(f"run: {result.path}")
