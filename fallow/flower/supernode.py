"""Flower's SuperNode, whose loop sleeps for three seconds where no message has come, and has no option for that: here for less soon after the last one."""

from __future__ import annotations

import time
from typing import Any

from flwr.supernode import start_client_internal as loop
from flwr.supernode.cli.flower_supernode import flower_supernode

from fallow.flower.looks import Looks

LEAST = 0.5  # seconds between looks for a message
ANSWER = 0.1  # between looks for its answer, which cost nothing: it is in the same process


class Clock:
    """The module `time` as the loop sees it."""

    def __init__(self) -> None:
        self._looks: Looks | None = None

    def sleep(self, seconds: float) -> None:
        if seconds < 1:  # it has a message, and waits for the answer
            self._looks = None
            time.sleep(min(seconds, ANSWER))
        else:
            self._looks = self._looks or Looks(LEAST, seconds)
            time.sleep(self._looks.wait())

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def main() -> None:
    vars(loop)["time"] = Clock()
    flower_supernode()


if __name__ == "__main__":
    main()
