"""Commands that show what is there: list, split, check, cache."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fallow import targets
from fallow.cli.app import DataDir, Download, Force, SkipBad, Trust, Words, app, console, words_of


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

    recipe, keys = words_of(words)
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
    with disk.errors_as_user_errors(where, "choose another with --picture"):
        draw(federation, labels, classes, where, class_names=source.classes)
    console.say(f"picture: {where}")
    if save:
        with disk.errors_as_user_errors(Path(save), "choose another with --save"):
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
    with disk.errors_as_user_errors(where, "choose another with --picture"):
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
