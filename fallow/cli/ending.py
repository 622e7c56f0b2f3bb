"""How a command ends: with 0, or in one sentence and exit code 2."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

import typer

from fallow import said
from fallow.cli import flags, usage
from fallow.cli.app import app, mode, silent
from fallow.errors import UserError
from fallow.said import Speaker


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
        if mode.debug:
            raise
        speaks = not silent or getattr(e, "unspoken", False)
        _end(str(e), 2 if speaks else 0, not speaks)  # a rank that ended with 2 would make torchrun stop rank 0 before it has spoken
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as e:
        if mode.debug:
            raise
        _end(str(_of_the_machine(e)), 2)
    except Exception as e:
        if (told := _too_much(e)) and not mode.debug:
            _end(str(told), 2)
        if hasattr(e, "format_message") and hasattr(e, "exit_code"):  # click's own: a wrong flag, a missing argument
            if usage.is_page(e):
                Speaker(stderr=True, quiet=silent).print(e.format_message())
                sys.exit(2)
            _end(str(usage.mistake(e)), 2)
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
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return UserError("this machine lets no more processes and threads begin", "end some, or raise the limit (ulimit -u, or the container's)")
    if isinstance(error, RecursionError):
        return UserError("something that was given is nested too deeply", "write it flat")
    return None
