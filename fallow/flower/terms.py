"""How the server waits for nodes, and which updates it leaves out. Nothing of it changes what a round of all nodes comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fallow.config import Section, key, validate


class Terms(Section):
    round_timeout: float = key(600.0, "seconds that a node has for its part of a round", gt=0, le=1e6)
    node_timeout: float = key(300.0, "seconds to wait for nodes before the first round", gt=0, le=1e6)
    min_replies: float = key(1, "replies without which a round does not count: a count, or a share below 1", gt=0)
    round_retries: int = key(3, "how often those who did not reply are asked again where there are fewer", ge=0, le=1000)
    over_select: int = key(0, "clients asked beyond those a round needs; the first replies count, so runs differ", ge=0)
    update_norm_limit: float | None = key(100.0, "an update is left out that is so many times as long as the median one", gt=1)

    def least(self, asked: int) -> int:
        """How many replies a round needs of so many."""
        return max(1, min(asked, math.ceil(self.min_replies * asked) if self.min_replies < 1 else int(self.min_replies)))

    @staticmethod
    def parted(keys: Mapping[str, Any]) -> tuple[Terms, dict[str, Any]]:
        """The terms among some keys, and the rest, which are a run's."""
        own = {k: v for k, v in keys.items() if k in Terms.model_fields}
        return validate(Terms, own), {k: v for k, v in keys.items() if k not in own}
