"""The application of the command line: what all commands have in common."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from fallow import launched
from fallow.cli.commands import Commands
from fallow.errors import UserError
from fallow.said import Speaker

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["--help", "-h"]})
silent = launched.is_mute()
console = Speaker(quiet=silent)
if not console.is_terminal:
    console = Speaker(width=200, quiet=silent)  # a file or a pipe has no edge to wrap at
mode = SimpleNamespace(debug=False)


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    from fallow.cli import completion

    return completion.words(list(ctx.params.get("words") or ()), incomplete)


Words = Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", show_default=False, autocompletion=_complete)]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Where the data sets lie.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that Fallow did not make.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the data set if it is not there.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Go on without image files that cannot be read.")]
BestRound = Annotated[bool, typer.Option("--best", help="The weights of the best round by validation, not of the last.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that the folder or the recipe names, with your rights.")]



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
    mode.debug = show


def words_of(words: list[str] | None, runs: bool = False) -> tuple[str | None, dict[str, Any]]:
    """A recipe, if the first word is no key=value, and the keys. With `runs` the folder of a run stands for a recipe, too."""
    from fallow.recipes.reading import place
    from fallow.trees import parse_pairs

    words = list(words or [])
    recipe = words.pop(0) if words and "=" not in words[0] else None
    if recipe is not None and not (runs and os.path.isfile(os.path.join(recipe, "config.yaml"))):
        place(recipe)
    keys = parse_pairs(words)
    for flag in ("out", "name", "stop_after", "download", "watch", "trust"):
        if flag in keys:
            raise UserError(f"{flag} is no key of a run", f"write --{flag.replace('_', '-')} before its value")
    return recipe, keys


def as_list(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []
