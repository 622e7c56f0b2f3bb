"""Nets from images to logits, by name or by the path of a user's own class.

>>> net = build("small-cnn", classes=10, channels=1)
>>> sum(p.numel() for p in net.parameters())
94186
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn

from fallow import own
from fallow.errors import UserError, suggest
from fallow.models.cnn import VGG11, EmnistCNN, EmnistCNNofRGD, LeNet, SmallCNN
from fallow.models.norms import NORMS, Modes, adopt
from fallow.models.resnet import ResNet8, ResNet9, ResNet18, ResNet18ofImageNet
from fallow.models.tensors import check_tensors
from fallow.models.wrn import WideResNet

__all__ = ["NORMS", "Modes", "adopt", "build", "default_norm", "names"]


class _Entry(NamedTuple):
    make: Callable[..., nn.Module]
    norm: str
    smallest: int  # side in pixels


_MODELS = {
    "small-cnn": _Entry(SmallCNN, "gn", 4),
    "simple-cnn": _Entry(LeNet, "none", 16),
    "resnet8": _Entry(ResNet8, "bn", 1),
    "resnet9": _Entry(ResNet9, "bn", 8),
    "resnet9:fedmatch": _Entry(partial(ResNet9, conv_bias=False, linear_bias=False), "none", 8),
    "resnet18": _Entry(ResNet18, "bn", 1),
    "resnet18:imagenet": _Entry(ResNet18ofImageNet, "bn", 1),
    "wrn-28-2": _Entry(partial(WideResNet, widen=2), "bn", 1),
    "wrn-28-8": _Entry(partial(WideResNet, widen=8), "bn", 1),
    "emnist-cnn": _Entry(EmnistCNN, "none", 6),
    "emnist-cnn:rgd": _Entry(EmnistCNNofRGD, "none", 6),
    "vgg11": _Entry(VGG11, "bn", 1),
}


def names() -> list[str]:
    """The models that come with Fallow."""
    return list(_MODELS)


def default_norm(name: str) -> str | None:
    """The norm a model has unless told otherwise; `None` for a model of one's own."""
    return _MODELS[name].norm if name in _MODELS else None


def build(name: str, classes: int, channels: int, norm: str | None = None, size: int = 32) -> nn.Module:
    """A new net for images of `channels` x `size` x `size`; its first weights are drawn by torch's generator.

    `name` is one of `names()`, or `package.module:Class` or `./file.py:Class` for a model of one's own.
    """
    if norm is not None and norm not in NORMS:
        raise UserError(f"there is no norm {norm!r}", suggest(norm, NORMS))
    if name not in _MODELS:
        return _own(name, {"classes": classes, "channels": channels, "norm": norm, "size": size})
    entry = _MODELS[name]
    if size < entry.smallest:
        raise UserError(
            f"{name} needs images of at least {entry.smallest} pixels, these have {size}",
            "enlarge them with image.size or choose another model",
        )
    return entry.make(classes, channels, norm or entry.norm)


def is_own(name: str) -> bool:
    """Whether a name is that of code outside the package."""
    return name not in _MODELS and ":" in name and name.rpartition(":")[0] not in _MODELS


def _own(name: str, offered: dict[str, int | str | None]) -> nn.Module:
    if not is_own(name):
        raise UserError(f"there is no model {name!r}", suggest(name, _MODELS))
    make, code = own.load(name, "model")
    what = code.attribute
    if not callable(make):
        public = own.public(name, "model")
        remedy = suggest(what, public) if public else "name a class derived from torch.nn.Module after the colon"
        raise UserError(f"{code.shown} has no model {what!r}", remedy)
    with own.told(code):
        given = _arguments(what, make, offered)
        net = make(**given)
    if not isinstance(net, nn.Module):
        raise UserError(f"{code.shown}:{what} gave a {type(net).__name__}", "a model is a torch.nn.Module")
    check_tensors(net, f"the model {code.shown}:{what}")
    return net


def _arguments(what: str, make: Callable[..., object], offered: dict[str, int | str | None]) -> dict[str, object]:
    """Those of classes, channels, norm and size that the signature takes."""
    taken = inspect.signature(make).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    given: dict[str, object] = {
        k: v for k, v in offered.items() if k in taken or (every and k in ("classes", "channels"))
    }
    if "norm" in given and given["norm"] is None:
        del given["norm"]
    missing = [
        n
        for n, p in taken.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and n not in given
    ]
    if missing:
        raise UserError(
            f"{what} wants {', '.join(missing)}", f"a model of one's own is called as {what}(classes=, channels=)"
        )
    if offered["norm"] in ("bn", "gn", "none") and "norm" not in given:
        raise UserError(f"{what} takes no norm", f"leave out norm={offered['norm']} or give {what} an argument norm")
    return given
