"""Signals that wait while a finished round takes effect and is written down."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fallow.__main__ import importing

ENDING = (signal.SIGTERM, signal.SIGHUP)  # a scheduler's or the system's word, and a closed terminal's


class Stopped(SystemExit):
    """The process was told to end by a signal; it ends with the code that shells give that."""

    def __init__(self, number: int):
        super().__init__(128 + number)


class Interrupts:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever, but between `hold` and `release` only at the release.

    Likewise SIGTERM and SIGHUP raise Stopped, or `terminated` if that is given: torchrun sends SIGTERM when one of its
    processes has ended. A signal that is ignored, as SIGHUP under nohup, stays so.
    """

    def __init__(self, terminated: BaseException | None = None) -> None:
        self._raises: dict[int, BaseException] = {signal.SIGINT: KeyboardInterrupt()}
        self._raises |= {number: terminated or Stopped(number) for number in ENDING}
        self._held, self._pending = False, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in self._raises:
            before = signal.getsignal(number)
            if before in (signal.default_int_handler, signal.SIG_DFL) or getattr(before, "of_fallow", False):
                try:
                    signal.signal(number, self._interrupted)
                    self._before[number] = before
                except ValueError:  # not the main thread, which alone is interrupted
                    pass
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for number, before in self._before.items():
            telling = kind is not None and getattr(before, "of_fallow", False)  # a command's last words must not be cut off
            signal.signal(number, signal.SIG_IGN if telling else before)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._pending:
            number, self._pending = self._pending, 0
            raise self._raises[number]

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            raise self._raises[number]
        self._pending = number


@contextmanager
def stopping() -> Iterator[None]:
    """A command whose SIGTERM and SIGHUP unwind it as Ctrl-C does; torchrun's processes must die of them at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if importing(frame):
            os._exit(128 + number)
        raise Stopped(number)

    stop.of_fallow = True  # type: ignore[attr-defined]
    ours = [n for n in ENDING if "RANK" not in os.environ and signal.getsignal(n) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, stop)
    except ValueError:  # not the main thread
        ours = []
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
