"""`fallow` and `python -m fallow`: hears Ctrl-C before anything heavy is imported, and until Python has ended."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

_heard = False


def main() -> None:
    """Ctrl-C ends with 130 and no traceback, whatever a library makes of a KeyboardInterrupt while it is imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: a job in the background
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from fallow.cli import main as command

        command()
    except BaseException as end:
        if _heard and not isinstance(end, SystemExit):
            sys.exit(130)
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupted:
            _flush()
            signal.signal(signal.SIGINT, _quit)  # while Python ends a KeyboardInterrupt would be printed


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    if importing(frame):
        _quit()
    raise KeyboardInterrupt


def importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: nothing is begun then, and an exception would be swallowed by some of them."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _quit(*_: object) -> None:
    os._exit(130)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a closed pipe
            stream.flush()


_interrupted.of_fallow = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    main()
