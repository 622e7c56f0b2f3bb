"""Signals that wait while a finished round takes effect and is written down."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interrupts:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever, but between `hold` and `release` only at the release.

    Likewise SIGTERM raises `terminated`, if that is given: torchrun sends it when one of its processes has ended.
    """

    def __init__(self, terminated: BaseException | None = None) -> None:
        self._raises: dict[int, BaseException] = {signal.SIGINT: KeyboardInterrupt()}
        if terminated is not None:
            self._raises[signal.SIGTERM] = terminated
        self._held, self._pending = False, 0
        self._ours: list[int] = []

    def __enter__(self) -> Interrupts:
        for number in self._raises:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                try:
                    signal.signal(number, self._interrupted)
                    self._ours.append(number)
                except ValueError:  # not the main thread, which alone is interrupted
                    pass
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for number in self._ours:
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
            else:  # what is being told on the way out must not be cut off
                signal.signal(number, signal.SIG_DFL if kind is None else signal.SIG_IGN)

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
