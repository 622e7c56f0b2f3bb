"""The command line: parse, call, print; no logic."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fallow.errors import UserError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
silent = os.environ.get("RANK", "0") != "0"  # under torchrun rank 0 speaks for all
console = Console(highlight=False, quiet=silent)
if not console.is_terminal:
    console = Console(highlight=False, width=200, quiet=silent)  # a file or a pipe has no edge to wrap at
debug = False

Words = Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", show_default=False)]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Where the data sets lie.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the data set if it is not there.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that the folder or the recipe names, with your rights.")]


def main() -> None:
    """Runs the command; a user's mistake ends in one sentence and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)  # typer's own word for Ctrl-C is 130
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as e:
        if debug:
            raise
        Console(stderr=True, highlight=False, soft_wrap=True, quiet=silent).print(f"[red]error:[/red] {escape(str(e))}")
        sys.exit(0 if silent else 2)  # a rank that ended with 2 would make torchrun stop rank 0 before it has spoken
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as e:
        if hasattr(e, "format_message") and hasattr(e, "exit_code"):  # click's own: a wrong flag, a missing argument
            cause = e.format_message().rstrip(". ")
            told = cause if cause.endswith("?") else f"{cause}; see `fallow --help`."
            Console(stderr=True, highlight=False, soft_wrap=True, quiet=silent).print(f"[red]error:[/red] {escape(told)}")
            sys.exit(2)
        raise


@app.callback()
def common(show: Annotated[bool, typer.Option("--debug", help="Show the traceback of a user's mistake.")] = False) -> None:
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
    trust: Trust = False,
    show_help: Annotated[bool, typer.Option("--help", help="Show this, and the keys of the method.")] = False,
) -> None:
    """Train: `fallow run`, `fallow run method=semifl data=cifar10`, `fallow run RECIPE key=value`."""
    recipe, keys = _words(words)
    if show_help:
        _print_keys(recipe, keys, trust)
        return
    from fallow import runs
    from fallow.progress import Bar
    from fallow.runs.interrupts import stopping

    if data_dir:
        keys["data_dir"] = data_dir
    with stopping(), Bar(console, quiet) as bar:
        result = runs.run(recipe, out=out, name=name, stop_after=stop_after, download=download, watch=bar, trust=trust, **keys)
    _print_result(result)


@app.command()
def resume(
    path: Annotated[str, typer.Argument(metavar="RUN")],
    stop_after: Annotated[int | None, typer.Option(help="Checkpoint after this round and stop.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    trust: Trust = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Go on although data, settings or own code have changed.")] = False,
) -> None:
    """Go on with a run that was stopped or killed, to the same end as if it had not been."""
    from fallow import runs
    from fallow.progress import Bar
    from fallow.runs.interrupts import stopping

    with stopping(), Bar(console, quiet) as bar:
        result = runs.resume(path, stop_after=stop_after, watch=bar, trust=trust, anyway=anyway)
    if not bar.started:
        console.print(f"The run {result.path} is finished; nothing to do.")
    _print_result(result)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|datasets|models|partitions|recipes|views|figures")],
    data_dir: DataDir = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="Recipes without the time they take on this machine.")] = False,
) -> None:
    """What there is."""
    from fallow.listing import TIMES, rows

    times = what == "recipes" and not no_time
    with console.status("measuring how fast this machine trains (once)") if times else nullcontext():
        found = rows(what, data_dir, times)
    _print_table(found)
    if times:
        console.print(f"\n{TIMES}", soft_wrap=True)


@app.command()
def split(
    words: Words = None,
    data_dir: DataDir = None,
    download: Download = False,
    picture: Annotated[str | None, typer.Option(help="File for the picture (PNG or SVG).")] = None,
    save: Annotated[str | None, typer.Option(help="File for the federation (.npz).")] = None,
    trust: Trust = False,
) -> None:
    """Who holds what: print the federation of these settings and draw its picture."""
    from fallow import disk, runs
    from fallow.data.federate import table
    from fallow.data.picture import picture as draw

    recipe, keys = _words(words)
    if data_dir:
        keys["data_dir"] = data_dir
    _, options, source, federation = runs.prepare(recipe, keys, download=download, trust=trust)
    labels, classes = source.train.labels.numpy(), len(source.classes)
    rows, summary = table(federation, labels, source.classes)
    _print_table([tuple(rows[0]), *[tuple("" if v is None else str(v) for v in row.values()) for row in rows]])
    for name, value in summary.items():
        console.print(f"{name.replace('_', ' ')}: {escape(str(value))}", soft_wrap=True)
    where = Path(picture or f"split-{options.partition.replace(':', '-').replace(',', '-')}-seed{options.seed_of('split')}.png")
    with disk.told(where, "make its folder first, or choose another with --picture"):
        draw(federation, labels, classes, where, class_names=source.classes)
    console.print(f"picture: {where}")
    if save:
        with disk.told(Path(save), "make its folder first, or choose another with --save"):
            federation.save(Path(save))
        console.print(f"federation: {save}")


@app.command()
def compare(paths: Annotated[list[str], typer.Argument(metavar="RUN...")]) -> None:
    """Runs side by side."""
    from fallow.listing import compared

    _print_table(compared(paths))


@app.command()
def table(
    paper: Annotated[str, typer.Argument(help="A paper with recipes: semifl, fedrgd, fedloke, feddure, feddb.")],
    name: Annotated[str, typer.Argument(metavar="TABLE", help="1, II, fig7, ...")],
    only: Annotated[list[str] | None, typer.Option(help="key=value; a part of it (also method=ROW, setting=...).")] = None,
    given: Annotated[list[str] | None, typer.Option("--set", help="key=value; a further key for every run.")] = None,
    source: Annotated[str | None, typer.Option("--from", help="Read results from this folder; run nothing.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for runs and the table (default: runs).")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds (default: the paper's).", min=1)] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time.", min=1)] = 1,
    collect: Annotated[str | None, typer.Option(help="Then thin the finished runs into this folder.")] = None,
    data_dir: DataDir = None,
    download: Download = False,
) -> None:
    """Run a paper's table and print it beside the published figures; what is finished is not run again."""
    from fallow.report import grid
    from fallow.report.table import Table as Printed

    grids = grid.Grids(paper, name, only or (), [*(given or ()), *([f"data_dir={data_dir}"] if data_dir else [])])
    place, failures = Path(source or out or "runs"), []
    if source and not place.is_dir():
        raise UserError(f"there is no folder {source}", "give one with results or runs, such as results")
    if not source:
        failures = grid.run(grids, place, seeds, jobs, lambda text: console.print(escape(text), soft_wrap=True), download)
    shown = Printed(grids, grid.read(grids, place, seeds if source else seeds or grids.grid.seeds, failures))
    console.print(escape(shown.caption()), soft_wrap=True)
    _print_table([shown.title(), *shown.rows()])
    if any(shown.near(line) for line in shown.lines):
        console.print(shown.FOOT, soft_wrap=True)
    if out or not source:
        console.print(f"written: {shown.write(Path(out or place))}/table.md, table.tex, table.csv", soft_wrap=True)
    if collect:
        console.print(f"collected: {len(grid.collect(grids, place, Path(collect)))} runs, {collect}", soft_wrap=True)
    if failures:
        raise typer.Exit(1)


@app.command()
def report(
    paths: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders with runs below them.")],
    out: Annotated[str, typer.Option("--out", "-o", help="File for the page.")] = "report.html",
) -> None:
    """One page about runs to look at in a browser; it needs no network."""
    from fallow.report import page

    path, runs = page.write(paths, out)
    console.print(f"page of {runs} run{'s' if runs > 1 else ''}: {escape(str(path))} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)


@app.command()
def watch(
    paths: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders with runs below them.")],
    port: Annotated[int | None, typer.Option(help="Port on this machine (default: a free one).", min=1, max=65535)] = None,
) -> None:
    """The same page while runs go on, for a browser on this machine; Ctrl-C ends it."""
    from fallow.report.watch import Watch

    with Watch(paths, port) as server:
        console.print(f"open {server.address} in a browser; Ctrl-C ends it", soft_wrap=True)
        server.serve()


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder for it (default: RUN/export).")] = None,
    format: Annotated[str, typer.Option(help="safetensors, torch-export, onnx, or all that can be had.")] = "all",
    trust: Trust = False,
) -> None:
    """The trained model with a model card: weights, and graphs that need no Fallow."""
    from fallow.export import export

    done = export(run, out, format, trust=trust)
    for sentence in done.left_out:
        console.print(escape(sentence), soft_wrap=True)
    console.print(f"written: {done.path}/ ({', '.join(done.files)})", soft_wrap=True)


@app.command()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Images, in folders or not.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The CSV.")] = "predictions.csv",
    probabilities: Annotated[bool, typer.Option("--probabilities", help="A column per class as well.")] = False,
    batch: Annotated[int | None, typer.Option(help="Images per batch (default: the run's eval_batch).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    trust: Trust = False,
) -> None:
    """Label a folder of images with a run's model and write a CSV."""
    from fallow.export.predict import predict
    from fallow.progress import Files

    with Files(console, quiet) as tell:
        done = predict(run, folder, out, probabilities=probabilities, batch=batch, device=device, tell=tell, trust=trust)
    if done.by_batch:
        console.print("batch norm used each batch's own statistics, as in the run: predictions depend on which images share a batch", soft_wrap=True)
    if done.unreadable:
        console.print(f"{len(done.unreadable)} of {done.images} files could not be read; the column error says why ({escape(done.unreadable[0])} is the first)", soft_wrap=True)
    console.print(f"labelled {done.images - len(done.unreadable)} images: {escape(str(done.path))}", soft_wrap=True)


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="See `fallow list figures`.")],
    paths: Annotated[list[str], typer.Argument(metavar="RUN...")],
    out: Annotated[str, typer.Option("--out", "-o", help="File: .png, .svg or .pdf.")],
    width: Annotated[float, typer.Option(help="Inches; 3.5 is a column of a two-column page.")] = 3.5,
    names: Annotated[str | None, typer.Option(help="What to call the lines, commas between, in the order of the runs.")] = None,
    parts: Annotated[str | None, typer.Option(help="Of bias and diversity: which, commas between.")] = None,
) -> None:
    """A figure for a paper; runs that differ only in their seed are one line with a band."""
    from fallow.report.figures import figure

    caption = figure(name, paths, out, width=width, names=_list(names), parts=_list(parts))
    console.print(escape(caption), soft_wrap=True)
    console.print(f"figure: {escape(out)}", soft_wrap=True)


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
    from fallow.config import described
    from fallow.runs import settings

    console.print("usage: fallow run [RECIPE] [KEY=VALUE]... [--data-dir DIR] [--download] [--out DIR] [--name NAME]")
    console.print("                  [--stop-after N] [--quiet] [--trust]\n")
    method, options = settings.resolve(settings.recipe(recipe) if recipe else {}, keys, trust)
    console.print(f"Keys of method [bold]{escape(options.method)}[/bold] ({escape((method.__doc__ or '').splitlines()[0])})\n")
    _print_table([("key", "default", "symbol", "takes", "meaning"), *described(method.Options)])


def _print_table(rows: list[tuple[str, ...]]) -> None:
    title, *body = rows
    table = Table(*title, box=None, header_style="bold", pad_edge=False)
    for row in body:
        table.add_row(*[escape(c) for c in row])
    console.print(table)


def _print_result(result: Any) -> None:
    if silent:
        return
    s = result.summary
    if s["last"] is not None:
        console.print(f"accuracy {100 * s['last']:.2f} % after round {s['rounds']} (best {100 * s['best']:.2f} % in round {s['best_round']})")
    if s["status"] != "finished":
        console.print(f"stopped after round {s['rounds']}; go on with: fallow resume {result.path}")
    console.print(f"run: {result.path}", soft_wrap=True)
