"""A party's coming steps: streams, numbers, and which function each step calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fallow.data.samples import Array, Stream
from fallow.errors import UserError

MOST_STEPS = 10**7  # of one kind, in a round
StepFunction = Callable[..., None]  # of a slot and a batch
Numbers = float | Sequence[float] | Array | torch.Tensor  # one for all steps, or one for each
ByNet = Mapping[str, Numbers]  # of the column `lr`
Column = Stream | Numbers | ByNet | None


@dataclass(frozen=True)
class Segment:
    """A run of steps of one kind."""

    step: StepFunction | None
    streams: dict[str, Stream]
    numbers: dict[str, Numbers | ByNet]

    def __len__(self) -> int:
        present = [s for s in self.streams.values() if s]
        if not present:
            return 0
        ends = [len(s) for s in present if not s.endless]
        if not ends:
            raise UserError(
                "every stream of a plan is endless, so the plan has no end", "give one of them `epochs` or `steps`"
            )
        if min(ends) > MOST_STEPS:
            raise UserError(f"a party would make {min(ends):,} steps in a round", "lower steps or epochs")
        return min(ends)


class Plan:
    """`Plan(step=None, **columns)`; plans add up. A column is a stream, a number, or an array over the steps.

    >>> import numpy as np
    >>> from fallow import Plan
    >>> from fallow.data.samples import Samples
    >>> labelled = Samples.of(np.arange(100), np.zeros(100))  # in a method's `plan`: party.labelled
    >>> plan = Plan(x=labelled.batches(32, "weak", epochs=1), pull=0.5)
    >>> len(plan), len(plan + plan)
    (4, 8)
    """

    def __init__(self, step: StepFunction | None = None, **columns: Column):
        streams = {k: v for k, v in columns.items() if isinstance(v, Stream)}
        numbers = {k: v for k, v in columns.items() if not isinstance(v, Stream) and v is not None}
        self.segments: tuple[Segment, ...] = (Segment(step, streams, numbers),) if streams else ()

    def __add__(self, other: Plan) -> Plan:
        out = Plan()
        out.segments = self.segments + other.segments
        return out

    def having(self, **columns: Column) -> Plan:
        """This plan with further columns."""
        out = Plan()
        streams = {k: v for k, v in columns.items() if isinstance(v, Stream)}
        numbers = {k: v for k, v in columns.items() if not isinstance(v, Stream) and v is not None}
        out.segments = tuple(Segment(s.step, s.streams | streams, s.numbers | numbers) for s in self.segments)
        return out

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)


def column(name: str, value: Numbers | ByNet, length: int, wide: type[np.floating] = np.float32) -> torch.Tensor:
    """A column of numbers as a tensor whose first axis is the step: int64, or `wide`."""
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.ndim == 0:
        array = np.broadcast_to(array, (length,))
    if len(array) < length:
        raise UserError(
            f"column {name!r} of a plan has {len(array)} entries for {length} steps", "make it as long as the plan"
        )
    kind = np.int64 if np.issubdtype(array.dtype, np.integer) else wide
    return torch.from_numpy(np.ascontiguousarray(array[:length].astype(kind)))
