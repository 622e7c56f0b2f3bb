"""How labelled and unlabelled batches go together: the modes of `unlabelled_batch` (methods chapter 6.7)."""

from __future__ import annotations

import math

import numpy as np

from fallow.data.samples import Array, Stream, Tail
from fallow.errors import UserError
from fallow.methods.interface import Party


def matched(labelled: int, unlabelled: int, batch: int, floor: bool = False) -> tuple[int, int]:
    """(steps, unlabelled batch) so that both sets end together; `floor` is FedDure's form of the rule (14.2.7)."""
    steps = max(1, round(labelled / batch))
    if not floor:
        return steps, max(1, math.ceil(unlabelled / steps))
    steps = 4 if steps <= 2 else steps
    size = unlabelled // steps or unlabelled
    return steps, max(1, size // 4 if size >= 400 else size)


def paired(
    party: Party, labelled_view: str, unlabelled_views: tuple[str, ...], mode: int | str | None = None, **columns: Array | None
) -> tuple[Stream, Stream]:
    """The labelled and the unlabelled stream of a party, by the key `unlabelled_batch`; `columns` go with the latter."""
    x, u, B = party.labelled, party.unlabelled.having(**columns), party.batch
    mode = party.options.unlabelled_batch if mode is None else mode
    epochs, steps = party.epochs, party.steps

    def streams(size: int | None, count: int | None, tail: Tail = "keep") -> tuple[Stream, Stream]:
        return x.batches(B, labelled_view, steps=count), u.batches(size, *unlabelled_views, steps=count, tail=tail)

    if not len(u):
        return x.batches(B, labelled_view, epochs=epochs, steps=steps), u.batches(1, *unlabelled_views)
    if mode == "full":
        return x.batches(None, labelled_view, steps=_count(1, epochs, steps)), u.batches(None, *unlabelled_views, steps=_count(1, epochs, steps))
    if not len(x):
        size = mode if isinstance(mode, int) else B
        return x.batches(B, labelled_view), u.batches(size, *unlabelled_views, epochs=epochs, steps=steps)
    if isinstance(mode, str) and mode.startswith("match-steps"):
        floor = mode.endswith(":floor")
        n, size = matched(len(x), len(u), B or len(x), floor)
        return streams(size, _count(n, epochs, steps), tail="drop" if floor else "keep")
    if mode == "equal" or isinstance(mode, int) or mode.startswith("ratio:"):
        each = B or len(x)
        size = each if mode == "equal" else mode if isinstance(mode, int) else int(mode.partition(":")[2]) * each
        return streams(size, _count(max(1, len(u) // size), epochs, steps))
    raise UserError(
        f"unlabelled_batch={mode!r} is not known", "use a count, match-steps, match-steps:floor, equal, ratio:N or full"
    )


def progress(party: Party, steps: int) -> Array:
    """The share of the run's steps that is done at each of this round's `steps`."""
    return (party.round + np.arange(steps) / max(1, steps)) / party.options.rounds


def _count(per_epoch: int, epochs: float | None, steps: int | None) -> int:
    if steps is not None:
        return steps
    assert epochs is not None
    return math.ceil(per_epoch * epochs - 1e-9) if epochs <= 1 else per_epoch * math.ceil(epochs)
