"""How long to wait before the next look for something: a tenth of the time for which there has been nothing.

So what comes soon is found at once, and a long wait costs few looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 10


class Looks:
    def __init__(self, least: float, most: float, now: Callable[[], float] = time.monotonic):
        self.least, self.most, self.now = least, most, now
        self.found()

    def found(self) -> None:
        """There was something just now."""
        self._since = self.now()

    def wait(self) -> float:
        """Seconds until the next look."""
        return min(self.most, max(self.least, (self.now() - self._since) / SHARE))
