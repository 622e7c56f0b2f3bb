"""Commands that put runs beside each other: compare, table, report, watch, figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fallow import targets
from fallow.cli.app import DataDir, Download, Force, Trust, app, as_list, console
from fallow.cli.printing import print_comparison, print_forecast
from fallow.errors import UserError


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
    listed, left_out = run_rows(paths, as_list(scores))
    if 1 < len(listed) <= LONGEST + 1 and (out or not form):
        console.rows(listed)
        if len(listed) == 2 and not out:
            for sentence in (*left_out, *standing.against(paths)):
                console.warn(sentence)
            return
        console.print()
    found = compared(paths, statistic, as_list(rows), as_list(columns), against)
    if form and not out:
        console.print(written.FORMATS[form](found), soft_wrap=True, end="")
        return
    print_comparison(found)
    for sentence in standing.against(paths):
        console.warn(sentence)
    if form and out:
        written.write(written.FORMATS[form](found), Path(out), force)
        console.say(f"written: {out}")



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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what its runs would be, their memory and time; run nothing.")] = False,
) -> None:
    """Run a paper's table, or one of your own.

    What is finished is not run again.
    """
    from fallow import disk
    from fallow.report import written
    from fallow.report.table import Table as Printed
    from fallow.runs.interrupts import Stopped, stopping
    from fallow.runs.settled import Settled
    from fallow.tables import lines, running
    from fallow.tables.grids import Grids

    form = written.format_of(format, Path(file) if file else None)
    if file:
        targets.file(Path(file), "table", force)
    grids = Grids(paper, name, only or (), [*(given or ()), *([f"data_dir={data_dir}"] if data_dir else [])], trust=trust)
    place, failures = Path(source or out or "runs"), []
    if source and not place.is_dir():
        raise UserError(f"there is no folder {source}", "give one with results or runs, such as results")
    grids.check_targets(place, Path(out or place) if out or not source else None, Path(collect) if collect else None, seeds, force)
    if dry_run:
        settled = Settled(download)
        if todo := running.planned(grids, place, seeds, console.say, settled)[0]:
            print_forecast(todo, settled)
        return
    if not source:
        try:
            with stopping():
                failures = running.run(grids, place, seeds, jobs, console.say, download)
        except (KeyboardInterrupt, Stopped):
            console.say("stopped; the same command goes on from the last checkpoints")
            raise
    shown = Printed(grids, lines.read(grids, place, seeds if source else seeds or grids.grid.seeds, failures))
    if form and not file:
        console.print(shown.FORMATS[form](shown), soft_wrap=True, end="")
    else:
        console.say(shown.caption())
        for rows in shown.printed():
            console.rows(rows)
        for sentence in shown.below():
            console.say(sentence)
    if form and file:
        disk.write(Path(file), shown.FORMATS[form](shown), "choose another with -o")
        console.say(f"written: {file}")
    if out or not source:
        console.say(f"written: {shown.write(Path(out or place))}/table.md, table.tex, table.csv")
    if collect:
        console.say(f"collected: {len(lines.collect(grids, place, Path(collect)))} runs, {collect}")
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
def figure(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See `fallow list figures`.")],
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

    caption = figure(name, paths, out, width=width, names=as_list(names), parts=as_list(parts), force=force)
    console.say(caption)
    console.say(f"figure: {out}")
