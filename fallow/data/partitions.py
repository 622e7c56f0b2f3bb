"""The partitions by name: `dirichlet-capped:0.3,min_size=1` -> a function that shares a pool of samples out.

The algorithms are in `dealing`, `dirichlets` and `skews`; `natural` in `federate`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator

from fallow.data import dealing, dirichlets, skews
from fallow.data.dealing import Deal, Ints, Options, PartitionError, Pool
from fallow.errors import suggest

Splitter = Callable[[Pool, Generator, Options], Deal]


@dataclass(frozen=True)
class Option:
    """One option of a partition: how its text is read, what it is when not given."""

    default: Any
    kind: type = str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    code: str = "bad_option"
    help: str = ""

    def read(self, name: str, text: str, where: str) -> Any:
        def wrong(expected: str) -> PartitionError:
            return PartitionError(self.code, f"{name}={text} of the partition {where!r} is not {expected}", "change it")

        if self.choices:
            if text not in self.choices:
                raise PartitionError(self.code, f"{name}={text} of {where!r} is not known", suggest(text, self.choices))
            return text
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise wrong("true or false")
            return text.lower() == "true"
        try:
            value = self.kind(text)
        except ValueError:
            raise wrong("a whole number" if self.kind is int else "a number") from None
        if not self.low <= value <= self.high:
            raise wrong(f"between {self.low:g} and {self.high:g}" if self.high < math.inf else f"at least {self.low:g}")
        return value


REQUIRED = object()
TIE = Option("none", choices=("none", "joint"), help="joint: one split of all data, labels chosen at each client")
SHUFFLE_CLIENTS = Option(True, bool, help="client ids in random order, the same for both pools")


def shuffle(default: bool) -> Option:
    return Option(default, bool, help="shuffle within each class before cutting")


def alpha() -> Option:
    return Option(REQUIRED, float, low=1e-4, high=1e6, code="bad_alpha", help="concentration; smaller is more skewed")


@dataclass(frozen=True)
class Kind:
    """A partition as `fallow list partitions` shows it, and how it is made."""

    name: str
    line: str
    paper: str
    example: str
    split: Splitter | None = field(repr=False)
    value: str | None = None  # the option that stands behind the colon
    options: dict[str, Option] = field(default_factory=dict, repr=False)
    needs_labels: bool = True


def _kinds() -> list[Kind]:
    return [
        Kind(
            "iid", "equal random parts; iid:stratified has equal classes too, iid:spread drops nothing",
            "all; stratified: FedMatch, FedDure; spread: FedDure's code", "iid:stratified", dealing.split_iid, "kind",
            {"kind": Option("random", choices=("random", "stratified", "spread")),
             "leftover": Option("drop", choices=("drop", "spread"), help="stratified: what N_k mod M becomes")},
            needs_labels=False,
        ),
        Kind(
            "shards", "at most S classes per client, in equal shards", "SemiFL (K=2)", "shards:2",
            dealing.split_shards, "classes",
            {"classes": Option(REQUIRED, int, low=1, code="shards_too_many", help="S, shards per client"),
             "distinct": Option(False, bool, help="never two shards of one class at a client"),
             "allow_uneven": Option(False, bool, help="classes may differ by one shard"), "shuffle": shuffle(True)},
        ),
        Kind(
            "dirichlet-capped", "each class by Dir(alpha) over clients, none for those who have N/M already",
            "SemiFL, FedDure, FedDB's code", "dirichlet-capped:0.3", dirichlets.split_capped, "alpha",
            {"alpha": alpha(), "shuffle": shuffle(False),
             "min_size": Option(None, int, low=0, help="default 10; in small pools a fifth of the mean, at least 1"),
             "max_tries": Option(1000, int, low=1)},
        ),
        Kind(
            "dirichlet-equal", "equal sizes, each client's class mix by Dir(alpha) while classes last",
            "FedLoKe", "dirichlet-equal:0.5", dirichlets.split_equal, "alpha",
            {"alpha": alpha(), "fill": Option("class-order", choices=("class-order", "proportional")),
             "last": Option("leftover", choices=("leftover", "dirichlet"))},
        ),
        Kind(
            "dirichlet-client", "equal sizes, class mix by Dir(alpha·K·prior), the missing refilled by the mix",
            "FedDB's text; Hsu et al.", "dirichlet-client:0.1", dirichlets.split_client, "alpha",
            {"alpha": alpha(), "concentration": Option("per-class", choices=("per-class", "total")),
             "tie": Option("none", choices=("none", "joint", "same-q"), help="same-q: one mix for both pools")},
        ),
        Kind(
            "dirichlet-pairs", "equal sizes: blocks dealt by Dir(alpha) between two clients each, in one row, cut anew",
            "SAGE, ProxyFL", "dirichlet-pairs:0.1", dirichlets.split_pairs, "alpha",
            {"alpha": alpha(), "max_tries": Option(1000, int, low=1)},
        ),
        Kind(
            "skew", "equal sizes, class mixes R apart (mean total variation between clients)",
            "FedRGD", "skew:0.4", skews.split_skew, "r",
            {"r": Option(REQUIRED, float, low=0, high=1, code="bad_r", help="wanted R, 0 to 1"),
             "r_kind": Option("measured", choices=("measured", "nominal")),
             "rule": Option("keep-and-deal", choices=("keep-and-deal", "a2"), help="a2: FedRGD's appendix, nominal R"),
             "drop": Option(False, bool, help="leave samples out where equal sizes prevent R"),
             "shuffle_clients": SHUFFLE_CLIENTS},
        ),
        Kind(
            "class-pairs", "two consecutive classes per client, dealt round robin",
            "FedRGD's released labels at clients", "class-pairs", skews.split_pairs, None,
            {"shuffle_clients": SHUFFLE_CLIENTS},
        ),
        Kind(
            "batch-non-iid", "ten client types: half of one class, 15 % of its neighbours, a little of the rest",
            "FedMatch", "batch-non-iid", dealing.split_types, None,
            {"types": Option("fedmatch", choices=("fedmatch", "generic")),
             "short": Option("allow", choices=("allow", "refill"))},
        ),
        Kind(
            "natural", "the clients the data came with", "your own data", "natural", None, None,
            {"min_labelled": Option(0, int, low=0), "min_unlabelled": Option(0, int, low=0),
             "min_total": Option(1, int, low=1),
             "small_clients": Option("error", choices=("error", "drop", "merge")),
             "unassigned": Option("error", choices=("error", "drop"))},
            needs_labels=False,
        ),
    ]  # fmt: skip


PARTITIONS: dict[str, Kind] = {kind.name: kind for kind in _kinds()}


@dataclass(frozen=True)
class Partition:
    """A partition with its options, all of them resolved."""

    kind: Kind
    options: Options

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def needs_labels(self) -> bool:
        return self.kind.needs_labels or self.options.get("kind") == "stratified"

    @property
    def tie(self) -> str:
        return self.options.get("tie", "none")

    def __str__(self) -> str:
        """The shortest text that reads back as this partition."""
        known = self.options_of()
        given = {k: v for k, v in self.options.items() if k in known and v != known[k].default}
        first = given.pop(self.kind.value, None) if self.kind.value else None
        shown = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items()]
        return ",".join([self.name + (f":{first:g}" if isinstance(first, float) else f":{first}" if first else ""), *shown])

    def options_of(self) -> dict[str, Option]:
        return options_of(self.kind)

    def __call__(self, pool: Pool, rng: Generator, **more: Any) -> Deal:
        """Shares the pool out; positions in the pool come back."""
        check(pool, self)
        assert self.kind.split is not None, "natural clients are made by federate()"
        return self.kind.split(pool, rng, {**self.options, **more})


def options_of(kind: Kind) -> dict[str, Option]:
    return kind.options if kind.name == "natural" else {"tie": TIE, **kind.options}


def parse(text: str) -> Partition:
    """Reads `name`, `name:value` and `name:value,option=value,...`.

    >>> str(parse("dirichlet-capped:0.30,min_size=1"))
    'dirichlet-capped:0.3,min_size=1'
    """
    head, *tail = (piece.strip() for piece in str(text).split(","))
    name, colon, value = (piece.strip() for piece in head.partition(":"))
    if name.lower() not in PARTITIONS:
        raise PartitionError("unknown_partition", f"the partition {name!r} is not known", suggest(name, PARTITIONS))
    kind = PARTITIONS[name.lower()]
    if colon and kind.value is None:
        raise PartitionError("bad_option", f"{kind.name} takes no value after a colon", f"write {kind.example}")
    known = options_of(kind)
    options = {key: option.default for key, option in known.items()}
    pairs = [(kind.value, value)] if colon and kind.value else []
    for piece in tail:
        key, equals, given = piece.partition("=")
        if not equals or key not in known:
            raise PartitionError("bad_option", f"{kind.name} has no option {piece!r}", suggest(key, known))
        pairs.append((key, given))
    for key, given in pairs:
        options[key] = known[key].read(key, given, text)
    for key, option in options.items():
        if option is REQUIRED:
            raise PartitionError(known[key].code, f"{kind.name} needs a number for {key}", f"write {kind.example}")
    return Partition(kind, options)


def check(pool: Pool, partition: Partition) -> None:
    """What every partition asks of its pool."""
    if not len(pool.labels) or pool.clients < 1:
        cause = f"{len(pool.labels)} {pool.what} for {pool.clients} clients"
        raise PartitionError("empty", cause, "at least one of each is needed")
    if pool.clients > len(pool.labels):
        cause = f"{pool.clients} clients but only {len(pool.labels)} {pool.what}"
        raise PartitionError("too_many_clients", cause, "use fewer clients or more samples")
    if not partition.needs_labels:
        return
    unknown = int((pool.labels < 0).sum())
    if unknown:
        cause = f"{partition.name} goes by class and {unknown} {pool.what} have no label"
        raise PartitionError("unknown_labels", cause, "use iid for them (unlabelled_partition=iid), or natural clients")
    missing = np.flatnonzero(pool.counts == 0)
    if len(missing):
        warnings.warn(f"missing_class: no {pool.what} of {_named(missing)}", stacklevel=3)


def _named(classes: Ints) -> str:
    shown = ", ".join(map(str, classes[:5])) + (", ..." if len(classes) > 5 else "")
    return ("class " if len(classes) == 1 else "classes ") + shown
