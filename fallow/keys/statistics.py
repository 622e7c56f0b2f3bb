"""Who makes batch norm's running statistics, and how static ones are made."""

from __future__ import annotations

from typing import Literal

from fallow.keys.section import Section, key

Statistics = Literal["average", "server", "static", "batch"]


class StatisticsKeys(Section):
    statistics: Statistics = key("average", "batch norm's running statistics: who makes them")
    sbn: Literal["cumulative", "pooled", "federated"] = key("cumulative", "how static statistics are made")
    sbn_data: Literal["all", "active", "server"] = key("all", "whose data static statistics are made of")
    sbn_order: Literal["authors", "shuffled"] = key("authors", "order of the images in that pass")
    sbn_passes: int | Literal["exact"] = key(1, "passes of the federated protocol")
