"""Mean and standard deviation of the channels, by paper and data set."""

from __future__ import annotations

from fallow.errors import UserError, suggest

Constants = tuple[tuple[float, ...], tuple[float, ...]]
_DURE_CIFAR: Constants = (0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768)
_RGD_CIFAR: Constants = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
_MNIST: Constants = (0.1307,), (0.3081,)
PRESETS: dict[str, Constants] = {
    "semifl:cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "semifl:cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "semifl:svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "semifl:stl10": ((0.4409, 0.4279, 0.3868), (0.2683, 0.2610, 0.2687)),
    "semifl:mnist": _MNIST,
    "semifl:fashion-mnist": ((0.2860,), (0.3530,)),
    "feddure:cifar10": _DURE_CIFAR,
    "feddure:cifar100": _DURE_CIFAR,
    "feddure:tinyimagenet": _DURE_CIFAR,
    "feddure:cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
    "fedrgd:cifar10": _RGD_CIFAR,
    "fedrgd:svhn": _RGD_CIFAR,
    "fedrgd:cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "fedrgd:emnist": _MNIST,
    "sage": _RGD_CIFAR,
    "usb:cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "usb:cifar100": ((129.3 / 255, 124.1 / 255, 112.4 / 255), (68.2 / 255, 65.4 / 255, 70.4 / 255)),
    "usb:svhn": ((0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744)),
}
_ORDER = ("semifl", "feddure", "fedrgd", "usb", "sage")
_ALIASES = {"feddb": "semifl", "fedloke": "none", "fedmatch": "none"}


def normalisation(preset: str | None, data: str, channels: int) -> Constants:
    """Mean and std (after /255) of a data set by a paper's preset; `none`: only /255.

    Where the preset has no row for the data (sage has one for all), the first of semifl, feddure, fedrgd, usb that has one; else
    1/2 and 1/2, which maps 0..255 to -1..1. One channel asked of three is their average, three of one are three copies.

    >>> normalisation(None, "digits", 1)
    ((0.5,), (0.5,))
    """
    name = _ALIASES.get(preset or "semifl", preset or "semifl")
    if name == "none":
        return (0.0,) * channels, (1.0,) * channels
    if name not in _ORDER:
        raise UserError(f"image.normalise={preset} is no preset", suggest(name, {*_ORDER, *_ALIASES, "none"}))
    of = f":{data.split(':')[0]}"
    rows = (name + of, name, *(first + of for first in _ORDER))
    mean, std = next((PRESETS[row] for row in rows if row in PRESETS), ((0.5,), (0.5,)))
    if len(mean) == channels:
        return mean, std
    return (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
