"""What the server takes of a node's answer to a question: numbers, in the form that the question asks for, of no more samples than the node has."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fallow.engine.finite import sound
from fallow.engine.kit import Kit
from fallow.engine.statistics import Found, moments_between, order
from fallow.flower.checks import Refused
from fallow.methods.state import State

NEAR = 0.05  # how far from 1 the sum of half-precision shares may be


class Answers:
    """Knows each question's form by what the run's model is."""

    def __init__(self, kit: Kit):
        self.kit = kit

    def checked(self, question: str, answer: Any, about: Mapping[str, Any], samples: int) -> Any:
        """The answer of a node that has so many samples; None is one, too: it has none to tell of."""
        if answer is None:
            return None
        try:
            fits = getattr(self, f"_{question}")(answer, samples, **about)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError):
            fits = False
        if not fits:
            raise Refused(f"its answer about its {question.replace('_', ' ')} is not of the form that is asked for")
        if not bool(sound(answer)):
            raise Refused(f"its answer about its {question.replace('_', ' ')} has numbers that are NaN or infinite")
        return answer

    def _gradient(self, answer: Any, samples: int) -> bool:
        return isinstance(answer, State) and answer.layout == self.kit.layouts()["model"] and answer.groups.keys() == {"parameters"}

    def _mean_prediction(self, answer: Any, samples: int) -> bool:
        return _is_real(answer, self.kit.classes) and not bool(((answer < 0) | (answer > 1 + NEAR)).any()) and not abs(float(answer.sum()) - 1) > NEAR

    def _label_accuracies(self, answer: Any, samples: int, nets: Any) -> bool:
        return isinstance(answer, list) and len(answer) == len(nets) and all(type(a) is float and 0 <= a <= 1 for a in answer)

    def _moments(self, answer: Any, samples: int, done: int, end: int) -> bool:
        if answer.keys() != set(range(done, end)):
            return False
        for layer, (count, mean, squares) in answer.items():
            area, channels = self._layers[layer]
            if not (_is_real(mean, channels) and _is_real(squares, channels)) or bool((squares < 0).any()) or bool(torch.isinf(torch.stack([mean, squares])).any()):
                return False
            if type(count) is not int or count < 1 or count % area:
                return False
            if count > samples * area:
                raise Refused(f"its statistics are of {count // area} samples, and it has {samples}")
        return True

    @cached_property
    def _layers(self) -> list[tuple[int, int]]:
        """Of each batch norm layer, how many values an image has for each channel, and the channels."""
        net, two = self.kit.net(), self.kit.blank(2)
        with torch.no_grad():
            norms = order(net, two)
            found = moments_between(net, norms, 0, len(norms), [two])
        return [(found[layer][0] // 2, len(found[layer][1])) for layer in range(len(norms))]


def _is_real(thing: Any, length: int) -> bool:
    return isinstance(thing, Tensor) and thing.is_floating_point() and list(thing.shape) == [length]


def large(found: Mapping[int, Found], limit: float | None) -> dict[int, str]:
    """Whose statistics are, in some layer, so many times as large as the median party's; by party."""
    sizes = {party: {layer: _size(*moments) for layer, moments in of.items()} for party, of in sorted(found.items()) if of}
    out: dict[int, str] = {}
    if limit is None or len(sizes) < 2:
        return out
    for layer in sorted(set.intersection(*map(set, sizes.values()))):
        moving = [of[layer] for of in sizes.values() if of[layer]]
        median = statistics.median_low(moving) if moving else math.inf
        for party, of in sizes.items():
            if of[layer] > limit * median:
                out.setdefault(party, f"its statistics are {of[layer] / median:.3g} times as large as the median ones (update_norm_limit={limit:g})")
    return out


def _size(count: int, mean: Tensor, squares: Tensor) -> float:
    """The root of the mean square of a layer's inputs."""
    return math.sqrt(float((mean.double().square() + squares.double() / count).mean()))
