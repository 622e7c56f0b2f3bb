"""Whether a run learns: what stands against it, judged from its metrics alone, each with what to try.

A warning that is wrong is worse than none: whoever has seen one does not read the next. So each rule waits for several
rounds, asks for a distance that chance does not give, and falls silent when what it saw has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]
PLAINLY_NONE = 2.0  # a threshold up to here is there to accept nothing; a larger one may be meant in per cent
LEAST = 3  # rounds, or tests, from which anything is concluded
SHORTEST = 5  # rounds of a run that is judged at all; a shorter one is there to see whether it runs
PART = 10  # a rule looks at the last tenth of the run's rounds
FEW_STEPS = 100  # in a whole run; with one step a round
SIGMAS = 3.0  # of the binomial distribution of test hits, above chance
FALL = 0.08  # of accuracy that is lost
LEVELS = 20  # in which confidences are counted


@dataclass(frozen=True)
class Finding:
    """What stands against a run."""

    kind: str
    since: int  # the round from which on it holds
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.sentence}; {self.remedy}"

    def as_dict(self) -> Row:
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """What the rules must know of a run beside its metrics."""

    rounds: int
    classes: int
    tested: int  # images in the test set
    chance: float  # the accuracy of naming the most frequent class of the test set always
    share: tuple[float, ...] = ()  # of each class among the clients' images, where it is known
    names: tuple[str, ...] = ()  # of the classes
    bound: str | None = None  # the key by which labels are accepted: threshold, or entropy
    value: float | None = None  # of this key
    lr: float | None = None
    labels_alone: tuple[str, float] | None = None  # a run on labels alone on the same federation, and its accuracy

    @property
    def window(self) -> int:
        """How many rounds a rule looks back."""
        return max(LEAST, -(-self.rounds // PART))

    @property
    def nothing_wanted(self) -> bool:
        """Whether the bound is one that no label can reach, on purpose."""
        return self.value is not None and (1 < self.value <= PLAINLY_NONE if self.bound == "threshold" else self.bound == "entropy" and not self.value)

    @property
    def near_chance(self) -> float:
        """Accuracies up to here are what guessing may give."""
        return self.chance + SIGMAS * math.sqrt(self.chance * (1 - self.chance) / max(1, self.tested))


def findings(rows: Sequence[Row], facts: Facts) -> list[Finding]:
    """All that stands against a run after these rounds, the worst first."""
    if not rows:
        return []
    if rows[-1]["round"] < LEAST or facts.rounds < SHORTEST:
        return list(_idle(rows, facts))
    rules: tuple[Callable[[Sequence[Row], Facts], Iterator[Finding]], ...] = (
        _idle, _lost_loss, _still, _at_chance, _nothing_accepted, _one_class, _few_steps, _falling, _labels_alone,
    )  # fmt: skip
    return [finding for rule in rules for finding in rule(rows, facts)]


# -- looking -----------------------------------------------------------------------------------------------------------
def _tests(rows: Sequence[Row]) -> list[tuple[int, float]]:
    return [(r["round"], r["accuracy"]) for r in rows if r.get("accuracy") is not None]


def _since(rows: Sequence[Row], holds: Callable[[Row], bool | None]) -> int | None:
    """The first round of the last stretch in which it holds; rounds of which nothing is known do not count."""
    since = None
    for row in reversed(rows):
        known = holds(row)
        if known is False:
            return since
        if known:
            since = row["round"]
    return since


def _last(rows: Sequence[Row], rounds: int) -> list[Row]:
    """The last so many rounds; none before there are enough."""
    first = rows[-1]["round"] - rounds
    return [r for r in rows if r["round"] > first] if first >= 0 else []


def _sums(rows: Sequence[Row], column: str) -> list[int]:
    having = [r[column] for r in rows if r.get(column)]
    return [sum(values) for values in zip(*having)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def percent(share: float) -> str:
    """A share for people.

    >>> percent(0.094), percent(0.3149), percent(0.0004), percent(0.0)
    ('9.4 %', '31 %', '0.04 %', '0 %')
    """
    value = 100 * share
    digits = 0 if value >= 20 or value == 0 or value == 100 else 1 if value >= 0.1 else 2
    return f"{value:.{digits}f} %"


# -- the rules ---------------------------------------------------------------------------------------------------------
def _idle(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    if all(r.get("descended") is False for r in rows):
        remedy = "call one of them with the loss, or hold nets that stay as they are with Net(train=False)"
        yield Finding("no-descend", rows[0]["round"], "no step has called s.descend or s.apply, so nothing is trained", remedy)
    for name in rows[0].get("outside") or ():
        said = f"the method's code changes {name} as it runs, which the next run of this process finds changed, and a resumed one does not"
        yield Finding("outside", rows[0]["round"], said, "keep it in server[...], or in a held thing with keep=True")
    for name in rows[0].get("unused") or ():
        yield Finding("unused", rows[0]["round"], f"the method holds {name!r}, which no hook used in the first round", f"take it out of `holds`, or use s.{name} in the step")


def _lost_loss(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    since = _since(rows, lambda r: None if "loss" not in r else r["loss"] is None)
    if since and any(r.get("loss") is not None for r in rows) and rows[-1]["round"] - since + 1 >= LEAST:
        lr = f"lower lr (now {facts.lr:g})" if facts.lr else "lower lr"
        yield Finding("loss", since, f"the loss has been no finite number since round {since}", f"{lr}, or set clip=1")


def _still(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    tested = [(r["round"], r["accuracy"], r.get("test_loss")) for r in rows if r.get("accuracy") is not None]
    same = [t for t in tested if t[1:] == tested[-1][1:]]
    if len(tested) < LEAST or tested[-1][2] is None or same != tested[-len(same) :] or len(same) < LEAST:
        return
    first, last = same[0][0], same[-1][0]
    if last - first < facts.window - 1:
        return
    why = "no client sent an update" if not any(r.get("clients") for r in rows) else "its weights do not move"
    remedy = "see that the method's step calls s.descend, that lr is not 0, and that somebody has labels"
    yield Finding("still", first, f"the model has not changed since round {first} ({why})", remedy)


def _at_chance(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    tested, last = _tests(rows), rows[-1]["round"]
    spans = [k for k, (n, _) in enumerate(tested) if tested[-1][0] - n >= LEAST - 1 and last - n >= facts.window - 1]
    if not spans or max(a for _, a in tested[spans[-1] :]) > facts.near_chance:
        return
    since = _since(rows, lambda r: None if r.get("accuracy") is None else r["accuracy"] <= facts.near_chance)
    said = f"test accuracy stands at chance, {percent(tested[-1][1])} with {facts.classes} classes, after {rows[-1]['round']} of {facts.rounds} rounds"
    yield Finding("chance", since or 1, said, _against_chance(rows, facts))


def _against_chance(rows: Sequence[Row], facts: Facts) -> str:
    steps, losses = _steps(rows), [r["loss"] for r in rows[-facts.window :] if r.get("loss") is not None]
    if steps is not None and steps <= 2:
        return f"let clients make more steps a round, steps=20 for example (they make {steps:g})"
    if losses and facts.lr and _mean(losses) > 2 * math.log(facts.classes):
        return f"the loss is high ({_mean(losses):.2f}; guessing has {math.log(facts.classes):.2f}): lower lr (now {facts.lr:g}), or set clip=1"
    first = "see with method=fedavg whether the labels suffice, then try" if any(r.get("label_ratio") is not None for r in rows) else "try"
    return f"{first} another lr{f' (now {facts.lr:g})' if facts.lr else ''}, more steps a round, or more labels"


def _steps(rows: Sequence[Row]) -> float | None:
    """Steps that a client makes in a round, in the mean."""
    found = [r["client_steps"] for r in rows if r.get("client_steps") is not None]
    return _mean(found) if found else None


def _nothing_accepted(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    patience = 2 * facts.window  # many a run accepts its first labels late, and learns
    recent = [r for r in _last(rows, min(patience, facts.rounds)) if r.get("label_ratio") is not None]
    if len(recent) < LEAST or any(r["label_ratio"] for r in recent) or facts.nothing_wanted:
        return
    since = _since(rows, lambda r: None if r.get("label_ratio") is None else r["label_ratio"] == 0) or 1
    said = f"no pseudo-label has been accepted since round {since}, so the unlabelled images do nothing"
    if facts.bound:
        said += f" ({facts.bound}={facts.value:g})"
    counts = _sums(recent, "label_confidences")
    yield Finding("none-accepted", since, said + _below(counts, facts), _other_bound(counts, recent, facts))


def _reaching(counts: Sequence[int]) -> list[float]:
    """The share of confidences that reach each level."""
    return [sum(counts[k:]) / sum(counts) for k in range(len(counts))]


def _bound_at(level: int, facts: Facts) -> float:
    """The key's value that accepts the confidences from a level on; of entropies confidence is 1 - H / ln C."""
    share = level / LEVELS
    return share if facts.bound != "entropy" else round((1 - share) * math.log(facts.classes), 2)


def _below(counts: Sequence[int], facts: Facts) -> str:
    if not counts or not facts.bound:
        return ""
    reaching = _reaching(counts)
    level = next((k for k, share in enumerate(reaching) if share <= 0.05), LEVELS - 1)
    if facts.bound == "entropy":
        return f": {percent(1 - reaching[level])} of the entropies are above {_bound_at(level, facts):g}"
    return f": {percent(1 - reaching[level])} of the confidences are below {_bound_at(level, facts):g}"


def _other_bound(counts: Sequence[int], recent: Sequence[Row], facts: Facts) -> str:
    """Another value that accepts a fifth, unless the labels are no better than guesses."""
    learn = "train longer on the labels first, with more steps a round or more labels"
    right = [r["label_accuracy_all"] for r in recent if r.get("label_accuracy_all") is not None]
    if right and _mean(right) < 2 / facts.classes:
        return f"{learn} (only {percent(_mean(right))} of its labels would be right)"
    if not counts or not facts.bound:
        return f"accept labels more easily, or {learn}"
    reaching = _reaching(counts)
    level = max((k for k, share in enumerate(reaching) if share >= 0.2), default=0)
    if level / LEVELS <= 1.5 / facts.classes:
        return f"{learn} (no label is sure yet)"
    other = f"{facts.bound}={_bound_at(level, facts):g} would accept {percent(reaching[level])}"
    if not right:
        return other
    correct = f"of all labels {percent(_mean(right))} are right"
    return f"{other}, {correct}" if _mean(right) >= 0.5 else f"{learn} ({other}, but {correct})"


def _one_class(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    recent = _last(rows, facts.window)
    counts = _sums(recent, "label_classes")
    if facts.classes < 2 or sum(counts) < 20 * facts.classes:
        return
    most = max(range(len(counts)), key=counts.__getitem__)
    expected = facts.share[most] if most < len(facts.share) else facts.chance
    if not _nearly_all(counts, most, expected):
        return
    right = [r["label_accuracy"] for r in recent if r.get("label_accuracy") is not None]
    if right and _mean(right) > 0.5:
        return
    since = _since(rows, lambda r: _nearly_all(r["label_classes"], most, expected) if sum(r.get("label_classes") or ()) else None) or 1
    name = facts.names[most] if most < len(facts.names) else str(most)
    said = f"{percent(counts[most] / sum(counts))} of the accepted pseudo-labels are of one class, {name}, which has {percent(expected)} of the images"
    some = [r["label_ratio"] for r in recent if r.get("label_ratio") is not None and r["label_ratio"] < 0.99]
    stricter = f"accept fewer of them ({facts.bound} is {facts.value:g}), or " if some and facts.bound else ""
    yield Finding("one-class", since, said, f"{stricter}train longer on the labels first, with more steps a round or more labels")


def _nearly_all(counts: Sequence[int], most: int, expected: float) -> bool:
    """The other classes have less than a tenth of what they should have."""
    return 1 - counts[most] / sum(counts) < (1 - expected) / 10


def _few_steps(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    steps, tested = _steps(rows), _tests(rows)
    if steps is None or steps > 1 or steps * facts.rounds >= FEW_STEPS or (tested and tested[-1][1] > (1 + facts.chance) / 2):
        return
    said = f"clients make one step a round, {facts.rounds} in the whole run" if steps == 1 else "clients make no more than one step a round"
    yield Finding("few-steps", 1, said, f"steps=20 would make {20 * facts.rounds}; smaller batches make more of them, too")


def _falling(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    tested = _tests(rows)
    width = max(LEAST, len(tested) // PART)
    if len(tested) < 2 * width:
        return
    sums = [0.0]
    for _, accuracy in tested:
        sums.append(sums[-1] + accuracy)
    means = [(sums[k + width] - sums[k]) / width for k in range(len(tested) - width + 1)]
    best = max(range(len(means)), key=means.__getitem__)
    top, end, now = means[best], tested[best + width - 1][0], means[-1]
    noise = SIGMAS * math.sqrt(0.25 / max(1, facts.tested * width)) * math.sqrt(2)
    if top - now < max(FALL, noise) or rows[-1]["round"] - end < 2 * facts.window or top <= facts.near_chance:
        return
    said = f"test accuracy has fallen from {percent(top)} around round {end} to {percent(now)}"
    yield Finding("falling", end, said, _against_falling(facts))


def _against_falling(facts: Facts) -> str:
    lower = f"lower lr (now {facts.lr:g}) or set schedule=cosine" if facts.lr else "lower lr"
    if facts.bound is None:
        return f"{lower}, or stop earlier"
    stricter = "lower" if facts.bound == "entropy" else "raise"
    return f"{lower}, {stricter} {facts.bound} (now {facts.value:g}) so that fewer wrong labels are learnt, or stop earlier"


def _labels_alone(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Beside a run without unlabelled images on the same federation; on validation images where both have them."""
    if facts.labels_alone is None:
        return
    where, reached = facts.labels_alone
    scores = [r["validation_accuracy"] for r in rows if r.get("validation_accuracy") is not None] or [a for _, a in _tests(rows)]
    noise = SIGMAS * math.sqrt(2 * reached * (1 - reached) / max(1, facts.tested))
    if scores and reached - scores[-1] > noise:
        said = f"labels alone do better: {percent(reached)} ({where}) against {percent(scores[-1])}"
        yield Finding("labels-alone", rows[-1]["round"], said, "the pseudo-labels do harm here: raise threshold, lower weight, or use method=fedavg")
