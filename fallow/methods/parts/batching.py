"""How labelled and unlabelled batches go together: the modes of `unlabelled_batch`."""

from __future__ import annotations

import math

import numpy as np

from fallow.config import Config
from fallow.data.samples import Array, Stream, Tail
from fallow.errors import UserError
from fallow.methods.interface import Party
from fallow.schedule import Schedule


def matched(labelled: int, unlabelled: int, batch: int, floor: bool = False) -> tuple[int, int]:
    """(steps, unlabelled batch) so that both sets end together; `floor` is the rule of FedDure's code."""
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
    if size := set_size(mode, B or len(x)):
        return streams(size, _count(max(1, len(u) // size), epochs, steps))
    raise UserError(
        f"unlabelled_batch={mode!r} is not known", "use a count, match-steps, match-steps:floor, equal, ratio:N or full"
    )


def progress(party: Party, steps: int) -> Array:
    """The share of the run's steps that is done at each of this round's `steps`."""
    return (party.round + np.arange(steps) / max(1, steps)) / party.options.rounds


def rates(party: Party, steps: int, lr: float) -> list[float]:
    """Another learning rate by the run's schedule, at each of this round's `steps`."""
    schedule = Schedule.parse(party.options.schedule)
    return [lr * schedule.factor(party.round, step, steps, party.options.rounds) for step in range(steps)]


def set_size(mode: int | str, batch: int) -> int | None:
    """The unlabelled batch where it is a number whatever the sets have."""
    if isinstance(mode, int):
        return mode
    return batch if mode == "equal" else int(mode.partition(":")[2]) * batch if mode.startswith("ratio:") else None


def walk(party: Party) -> int:
    """Steps of one of SAGE's epochs: as many as the unlabelled set has labelled batches."""
    return max(1, (len(party.unlabelled) or len(party.labelled)) // (party.batch or 1))


def walks(party: Party) -> list[int]:
    """A round's steps, epoch by epoch."""
    n = walk(party)
    steps = party.steps or math.ceil(n * (party.epochs or 1) - 1e-9)
    return [n] * (steps // n) + [steps % n] * (steps % n > 0)


def full_batches(party: Party, steps: int, labelled_view: str, unlabelled_views: tuple[str, ...]) -> tuple[Stream, Stream]:
    """Labelled batches drawn with replacement; unlabelled ones in shuffled passes, whose short last batch is left out."""
    x = party.labelled.batches(party.batch, labelled_view, steps=steps, replace=True)
    return x, party.unlabelled.batches(set_size(party.options.unlabelled_batch, party.batch or 1), *unlabelled_views, steps=steps, tail="drop")


def refuse_sets(o: Config) -> None:
    """For methods whose batches have a size, whatever a client has."""
    if o.batch == "full" or set_size(o.unlabelled_batch, o.batch) is None:
        raise UserError(f"{o.method} draws batches of a set size", "set batch to a count, and unlabelled_batch to a count, equal or ratio:N")


def _count(per_epoch: int, epochs: float | None, steps: int | None) -> int:
    if steps is not None:
        return steps
    assert epochs is not None
    return math.ceil(per_epoch * epochs - 1e-9) if epochs <= 1 else per_epoch * math.ceil(epochs)
