"""Ctrl-C that waits while a finished round takes effect and is written down."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interrupts:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever, but between `hold` and `release` only at the release."""

    def __init__(self) -> None:
        self._held = self._pending = self._ours = False

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._interrupted)
                self._ours = True
            except ValueError:  # not the main thread, which alone is interrupted
                pass
        return self

    def __exit__(self, *_: Any) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._pending = True
