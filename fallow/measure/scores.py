"""How good predictions are, beyond the share that is right: pure formulas of tensors; docs/measure.md has each in words.

What has no value for want of samples (the accuracy of a class that does not occur) is NaN here, and None in what `brief`
and `full` give.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

EACH_TEST = ("balanced_accuracy", "macro_f1", "calibration_error")  # AUROC sorts, which each test need not pay for
BINS = 15  # of confidences
MATRIX_CLASSES = 256  # more of them have no confusion matrix: nobody could look at it
AT_ONCE = 2**22  # probabilities that are sorted together


class Counts(NamedTuple):
    """By class: samples that are predicted rightly, that are of it, that are predicted to be."""

    hits: Tensor
    actual: Tensor
    predicted: Tensor


def counts(predicted: Tensor, truth: Tensor, classes: int) -> Counts:
    tally = lambda labels: torch.bincount(labels, minlength=classes)
    return Counts(tally(truth[predicted == truth]), tally(truth), tally(predicted))


def confusion(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """How often each class (rows) was predicted to be each (columns).

    >>> confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    return torch.bincount(truth * classes + predicted, minlength=classes**2).view(classes, classes)


def class_accuracy(n: Counts) -> Tensor:
    """The share of each class's samples that is predicted rightly: its recall."""
    return n.hits.double() / n.actual


def balanced_accuracy(n: Counts) -> Tensor:
    """The mean of the classes' accuracies; classes without samples do not count.

    >>> float(balanced_accuracy(counts(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1]), 3)))
    0.5
    """
    return class_accuracy(n).nanmean()


def macro_f1(n: Counts) -> Tensor:
    """The mean of 2 hits / (samples + predictions) over classes that have a sample or a prediction.

    >>> float(macro_f1(counts(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 1, 1]), 3)))
    0.3333333333333333
    """
    return (2 * n.hits.double() / (n.actual + n.predicted)).nanmean()


def class_auroc(p: Tensor, truth: Tensor) -> Tensor:
    """By class: how often one of its samples has more of its probability than a sample of another class; a tie counts half.

    Of `p` [N, classes] only the order in each column matters. A class that has all samples, or none, has no such pair.
    """
    step = max(1, AT_ONCE // max(1, len(p)))
    parts = [_column_auroc(p[:, c : c + step].T.contiguous(), truth, c) for c in range(0, p.shape[1], step)]
    return torch.cat(parts)


def _column_auroc(columns: Tensor, truth: Tensor, first: int) -> Tensor:
    """By ranks (Mann and Whitney): those of a class's samples, ties at their mean, less the least sum that they could have."""
    n = columns.shape[1]
    ordered, which = columns.sort(1)
    place = torch.arange(1, n + 1, device=columns.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)  # a run of ties
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ends = begins.roll(-1, 1)  # the first begins one, so the last ends one
    low, high = torch.where(begins, place, 0).cummax(1).values, torch.where(ends, place, n).flip(1).cummin(1).values.flip(1)
    mine = truth[which] == torch.arange(first, first + len(columns), device=truth.device)[:, None]
    positive = mine.sum(1).double()
    ranks = ((low + high) * mine).sum(1).double() / 2
    return (ranks - positive * (positive + 1) / 2) / (positive * (n - positive))


def auroc(p: Tensor, truth: Tensor) -> Tensor:
    """The mean of the classes' areas under the ROC curve, each class against the others.

    >>> float(auroc(torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.4, 0.6], [0.2, 0.8]]), torch.tensor([0, 0, 1, 1])))
    0.875
    """
    return class_auroc(p, truth).nanmean()


class Calibration(NamedTuple):
    """By bin of confidence: samples, their mean confidence, the share of them that is right."""

    samples: Tensor
    confidence: Tensor
    accuracy: Tensor


def calibration(p: Tensor, truth: Tensor, bins: int = BINS) -> Calibration:
    """Bins of one width, each with its upper edge: (0, 1/15], (1/15, 2/15], ..."""
    confidence, predicted = p.max(1)
    places = (confidence * bins).ceil().long().clamp(1, bins) - 1
    member = places == torch.arange(bins, device=p.device)[:, None]
    samples = member.sum(1)
    of = lambda values: (member * values.double()).sum(1) / samples  # in one order on every device, as atomic sums are not
    return Calibration(samples, of(confidence), of(predicted == truth))


def calibration_error(c: Calibration) -> Tensor:
    """The mean over samples of their bin's |share right - mean confidence|."""
    return (c.samples * (c.accuracy - c.confidence).abs()).nansum() / c.samples.sum()


def by_group(right: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """By group: how many samples, and the share of them that is right."""
    count = torch.bincount(group, minlength=groups)
    return count, torch.bincount(group[right], minlength=groups).double() / count


# -- as plain numbers --------------------------------------------------------------------------------------------------
def brief(logits: Tensor, truth: Tensor) -> dict[str, float | None]:
    """The scores that are one number and cost next to nothing, read from the device all at once."""
    n = counts(logits.argmax(1), truth, logits.shape[1])
    error = calibration_error(calibration(logits.double().softmax(1), truth))
    return dict(zip(EACH_TEST, listed(torch.stack([balanced_accuracy(n), macro_f1(n), error]))))


def full(logits: Tensor, truth: Tensor) -> dict[str, Any]:
    """All scores, those by class and by bin too."""
    classes, predicted, p = logits.shape[1], logits.argmax(1), logits.double().softmax(1)
    return {
        "samples": len(truth),
        "accuracy": listed((predicted == truth).double().mean()),
        **brief(logits, truth),
        "auroc": listed(auroc(p, truth)),
        "class_accuracy": listed(class_accuracy(counts(predicted, truth, classes))),
        "confusion": confusion(predicted, truth, classes).tolist() if classes <= MATRIX_CLASSES else None,
        "calibration": {name: listed(values) for name, values in calibration(p, truth)._asdict().items()},
    }


def listed(values: Tensor) -> Any:
    """A number, or a list of them, with None for NaN."""
    found = values.tolist()
    if isinstance(found, list):
        return [None if math.isnan(v) else v for v in found]
    return None if math.isnan(found) else found
