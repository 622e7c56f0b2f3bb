"""A party's coming steps: streams, numbers, and which function each step calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fallow.data.samples import Array, Samples, Stream
from fallow.errors import UserError
from fallow.methods.state import is_plain

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
        if step is not None and not callable(step):
            raise UserError(f"a plan's steps are to call {step!r}", "give a function of a slot and a batch first, columns by name")
        streams, numbers = _sorted(columns)
        self.segments: tuple[Segment, ...] = (Segment(step, streams, numbers),) if streams else ()

    def __add__(self, other: Plan) -> Plan:
        out = Plan()
        out.segments = self.segments + other.segments
        return out

    def having(self, **columns: Column) -> Plan:
        """This plan with further columns."""
        out = Plan()
        streams, numbers = _sorted(columns)
        out.segments = tuple(Segment(s.step, s.streams | streams, s.numbers | numbers) for s in self.segments)
        return out

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)


def on_host(tensor: torch.Tensor) -> Array:
    """Its numbers as numpy has them, which knows neither gradients nor bfloat16."""
    if not is_plain(tensor):
        raise UserError("a tensor whose numbers are not all there is read on the host", "make it dense: tensor.to_dense()")
    there = tensor.detach().cpu()
    return (there.float() if there.dtype == torch.bfloat16 else there).numpy()


def _sorted(columns: Mapping[str, Column]) -> tuple[dict[str, Stream], dict[str, Numbers | ByNet]]:
    """Those that are streams, and those that are numbers."""
    for name, value in columns.items():
        if isinstance(value, Samples):
            raise UserError(f"column {name!r} of a plan is a set of samples", "make batches of it: .batches(size, view, epochs=1)")
    numbers = {k: v for k, v in columns.items() if not isinstance(v, Stream) and v is not None}
    return {k: v for k, v in columns.items() if isinstance(v, Stream)}, numbers


def column(name: str, value: Numbers | ByNet, length: int, wide: type[np.floating] = np.float32) -> torch.Tensor:
    """A column of numbers as a tensor whose first axis is the step: int64, or `wide`."""
    array = on_host(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UserError(f"column {name!r} of a plan is not made of numbers", "give a number, or one for each step")
    if array.ndim == 0:
        array = np.broadcast_to(array, (length,))
    if len(array) < length:
        raise UserError(
            f"column {name!r} of a plan has {len(array)} entries for {length} steps", "make it as long as the plan"
        )
    kind = np.int64 if np.issubdtype(array.dtype, np.integer) else wide
    return torch.from_numpy(np.ascontiguousarray(array[:length].astype(kind)))
