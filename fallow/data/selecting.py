"""Which samples are labelled: how many, how balanced, chosen in all data or at each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator

from fallow.data.dealing import Ints, PartitionError, class_lists
from fallow.errors import suggest

if TYPE_CHECKING:
    from fallow.data.federate import Spec
    from fallow.data.partitions import Partition

SCENARIOS = ("server", "clients", "some", "all")


@dataclass(frozen=True)
class Labelling:
    """The selection rule: one of count, ratio, per_class, or `given` (every known label)."""

    count: int | None = None
    ratio: float | None = None
    per_class: int | None = None
    given: bool = False
    balanced: bool = False
    first: bool = False
    joint: bool = False  # chosen at each client after one split of all data
    strict: bool = True  # a client without any label is an error
    holders: int = 1  # per_class is for each of them

    def about(self) -> dict[str, Any]:
        return {
            "label_count": self.count,
            "label_ratio": self.ratio,
            "label_per_class": self.per_class,
            "label_balance": "balanced" if self.balanced else "random",
        }


def truncated(ratio: float, size: int) -> int:
    """int(ratio · size), but 0.29 of 100 is 29."""
    return int(ratio * size + 1e-9)


def labelling(labels: Ints, classes: int, spec: Spec, partition: Partition, other: Partition) -> Labelling:
    """The rule of a spec, with the defaults: all known labels if some are unknown, else a tenth."""
    check_words(spec)
    known = int((labels >= 0).sum())
    natural = partition.name == "natural"
    count, ratio, per_class = spec.label_count, spec.label_ratio, spec.label_per_class
    silent = count is None and ratio is None and per_class is None
    given = silent and known < len(labels)
    if given and not natural and spec.labels != "server":
        given, count = False, known
    elif silent and not given:
        one_split = natural or partition.tie == "joint" or (spec.labels == "all" and str(partition) == str(other))
        ratio = (1.0 if spec.labels == "all" else 0.1) if one_split else None
        count = None if one_split else max(known // 10, 1)
    if spec.labels == "server" and ratio is not None:
        count, ratio = truncated(ratio, known), None
    joint = natural or partition.tie == "joint" or ratio is not None
    if joint and spec.labels != "server":
        check_joint(partition, other)
    if partition.tie == "same-q" and other.name != "dirichlet-client":
        cause = f"tie=same-q with {other.name} for the unlabelled"
        raise PartitionError("tie_conflict", cause, "use dirichlet-client for both, or leave unlabelled_partition out")
    if silent and known < len(labels):
        balanced = False
    elif spec.label_balance is None:
        balanced = ratio is None and not (silent and too_few_to_balance(labels, classes, count or 0))
    else:
        balanced = spec.label_balance == "balanced"
    return Labelling(count, ratio, per_class, given, balanced, spec.label_pick == "first", joint, strict=not natural)


def too_few_to_balance(labels: Ints, classes: int, count: int) -> bool:
    return not 0 < count // classes <= np.bincount(labels, minlength=classes).min()


def check_words(spec: Spec) -> None:
    for key, value, words in (
        ("labels", spec.labels, SCENARIOS),
        ("label_balance", spec.label_balance or "balanced", ("balanced", "random")),
        ("label_pick", spec.label_pick, ("random", "first")),
        ("labelled_pick", spec.labelled_pick, ("random", "cover")),
    ):
        if value not in words:
            raise PartitionError("bad_option", f"{key}={value} is not known", suggest(value, words))
    amounts = {k: getattr(spec, k) for k in ("label_count", "label_ratio", "label_per_class")}
    told = [key for key, value in amounts.items() if value is not None]
    if len(told) > 1:
        raise PartitionError("label_keys", f"{' and '.join(told)} say the same thing", "give one of them")
    for key in told:
        if key == "label_ratio" and not 0 <= amounts[key] <= 1:
            raise PartitionError("bad_option", f"label_ratio={amounts[key]:g}", "use a number from 0 to 1")
        if key != "label_ratio" and (amounts[key] < 1 or amounts[key] != int(amounts[key])):
            raise PartitionError("no_labelled", f"{key}={amounts[key]:g}", "use a whole number of at least 1")


def check_joint(partition: Partition, other: Partition) -> None:
    if str(partition) != str(other):
        cause = f"all data is split once, by {partition}, so {other} for the unlabelled has no place"
        remedy = "use label_count or label_per_class, which split both pools apart, or leave unlabelled_partition out"
        raise PartitionError("tie_conflict", cause, remedy)


def select_in_all(rule: Labelling, labels: Ints, classes: int, rng: Generator) -> Ints:
    """Positions of the labelled, class by class if balanced; never one whose label is unknown."""
    known = np.flatnonzero(labels >= 0)
    if rule.given:
        return known
    order = known if rule.first else rng.permutation(known)
    if rule.count is not None and rule.count > len(known):
        cause = f"{rule.count} labels are asked for but only {len(known)} samples have one"
        raise PartitionError("not_enough_labelled", cause, "ask for fewer")
    if rule.per_class is None and not rule.balanced:
        assert rule.count is not None
        if not rule.count:
            raise PartitionError("no_labelled", "no sample would be labelled", "ask for more labels")
        return order[: rule.count]
    each = rule.per_class * rule.holders if rule.per_class is not None else (rule.count or 0) // classes
    if not each:
        cause = f"{rule.count} labels are fewer than the {classes} classes"
        raise PartitionError("no_labelled", cause, "ask for more labels, or use label_balance=random")
    by_class = order[np.argsort(labels[order], kind="stable")]
    own = np.split(by_class, np.cumsum(np.bincount(labels[known], minlength=classes))[:-1])
    for k, members in enumerate(own):
        if len(members) < each:
            cause = f"class {k} has {len(members)} samples, {each} asked for"
            raise PartitionError("not_enough_labelled", cause, "ask for fewer labels, or use label_balance=random")
    return np.concatenate([members[:each] for members in own])


def rank_in_class(labels: Ints) -> Ints:
    """How many earlier samples have the same label."""
    ranks = np.empty(len(labels), np.int64)
    for members in class_lists(labels, int(labels.max(initial=-1)) + 1, np.arange(len(labels))):
        ranks[members] = np.arange(len(members))
    return ranks


def select_in_client(rule: Labelling, labels: Ints) -> np.ndarray:
    """Which of a client's samples, in the order given, are labelled."""
    known = np.flatnonzero(labels >= 0)
    mask = np.zeros(len(labels), bool)
    if rule.given:
        mask[known] = True
    elif rule.per_class is not None:
        mask[known[rank_in_class(labels[known]) < rule.per_class]] = True
    else:
        assert rule.ratio is not None
        wanted = truncated(rule.ratio, len(known))
        if rule.strict and rule.ratio and not wanted:
            cause = f"{rule.ratio:g} of a client's {len(known)} samples is less than one label"
            raise PartitionError("no_labelled", cause, "use a larger label_ratio or fewer clients")
        if rule.balanced:
            known = known[np.lexsort((labels[known], rank_in_class(labels[known])))]
        mask[known[:wanted]] = True
    return mask
