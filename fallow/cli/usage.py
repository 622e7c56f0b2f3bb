"""What is said to words that make no command: what is missing or not known, and how the command is written."""

from __future__ import annotations

import difflib
from typing import Any

from fallow.errors import UserError
from fallow.names import METHODS, recipes


def is_page(error: Any) -> bool:
    """Whether a group of commands was named and none of its commands: the error is its help then."""
    return type(error).__name__ == "NoArgsIsHelpError"


def mistake(error: Any) -> UserError:
    """What the parser of the command line found, with a remedy that can be typed."""
    cause = error.format_message().rstrip(". ")
    path = " ".join(["fallow", *_path(error.ctx)])
    if word := _unknown_command(cause):
        return UserError(f"there is no command {word!r}", _instead(word, path, list(error.ctx.command.commands)))
    if type(error).__name__ == "MissingParameter" and error.param is not None:
        named = error.param.metavar or error.param.opts[0]
        shown = _usage(error.ctx.command) + ("" if error.param.param_type_name == "argument" else f" {named} ...")
        return UserError(f"{named} is missing", f"write {path} {shown} (`{path} --help` says more)")
    return UserError(cause, f"see `{path} --help`")


def _path(context: Any) -> list[str]:
    """The commands down to the one that was meant: `federation up`."""
    return [] if context is None or context.parent is None else [*_path(context.parent), context.info_name]


def _usage(command: Any) -> str:
    return " ".join(p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument")


def _unknown_command(cause: str) -> str:
    start = "No such command "
    return cause.removeprefix(start).partition("'")[2].partition("'")[0] if cause.startswith(start) else ""


def _instead(word: str, path: str, commands: list[str]) -> str:
    if near := difflib.get_close_matches(word, commands, n=1, cutoff=0.7):
        return f"did you mean `{path} {near[0]}`?"
    if path == "fallow" and word in METHODS:
        return f"{word} is a method; write `fallow run method={word}`"
    if path == "fallow" and (word in recipes() or word.partition("=")[1]):
        return f"write `fallow run {word}`"
    return f"`{path} --help` lists them"
