"""RandAugment in its variants: from the keys of samples to steps, on the host, and the kernels that carry steps out on the device.

Op choices, magnitudes and boxes are hashes of the sample's key: the same on every machine, in any batch and order. On CUDA
only these small tables travel, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fallow import draws
from fallow.data import ops

# --- the draws of one sample: lane numbers, the same in every variant ---

FLIP, TOP, LEFT, BOX_X, BOX_Y, BOX_SIDE, STRENGTH = range(7)
PICKS = 8  # pick k has the lanes PICKS + 8 k + ...
OP, LEVEL, APPLY, SIGN, PICK_X, PICK_Y = range(6)

# --- what runs on the device: kernels of (images, arguments [n, 7]) ---

Kernel = Callable[[Tensor, Tensor], Tensor]
WIDTH = 7


def _of_factor(op: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    return lambda x, a: op(x, a[:, 0])


def _sliding(axis: str, resample: str) -> Kernel:
    return lambda x, a: ops.slide(x, a[:, 0], a[:, 1], axis, resample)


KERNELS: dict[str, Kernel] = {
    "identity": lambda x, a: x,
    "autocontrast": lambda x, a: ops.autocontrast(x),
    "equalize": lambda x, a: ops.equalize(x),
    "invert": lambda x, a: ops.invert(x),
    **{name: _of_factor(getattr(ops, name)) for name in ("brightness", "color", "contrast", "sharpness")},
    **{f"tensor-{name}": _of_factor(getattr(ops, f"tensor_{name}")) for name in ("color", "contrast", "sharpness")},
    "tensor-autocontrast": lambda x, a: ops.tensor_autocontrast(x),
    "posterize": _of_factor(ops.posterize),
    "solarize": _of_factor(ops.solarize),
    "affine": lambda x, a: ops.affine(x, a[:, :6], a[:, 6]),
    **{f"{axis}-{how}": _sliding(axis, how) for axis in "xy" for how in ("bilinear", "bicubic")},
    "paint": lambda x, a: ops.paint(x, a[:, :4], a[:, 4 : 4 + x.shape[1]]),
}
_KERNEL = {name: number for number, name in enumerate(KERNELS)}


class Step(NamedTuple):
    """One op of each sample, on the host: kernel number [B] and arguments float64 [B, 7]."""

    kernel: Tensor
    argument: Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def apply(x: Tensor, step: Step) -> Tensor:
    """Each kernel on the images that drew it; the grouping is done on the host."""
    x = x.contiguous()  # rows of words are to be views of it
    order = torch.argsort(step.kernel, stable=True)
    sizes = torch.bincount(step.kernel, minlength=len(KERNELS)).tolist()
    where, argument = to_device(order, x.device), to_device(step.argument[order], x.device)
    start = sizes[0]  # the first kernel is the identity
    for kernel, size in list(zip(KERNELS.values(), sizes))[1:]:
        if size:
            mine = where[start : start + size]
            changed = kernel(x.index_select(0, mine), argument[start : start + size])
            _words(x).index_copy_(0, mine, _words(changed))
        start += size
    return x


def _words(x: Tensor) -> Tensor:
    """Images as rows of 8-byte words where they fit: `index_copy_` on a CPU goes entry by entry."""
    rows = x.flatten(1)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows


# --- variants ---

Levels = tuple[Sequence[float], Sequence[float]]  # Pillow's argument at each level, for sign + and sign -


class Variant(NamedTuple):
    """A RandAugment: how many picks, from which ops at which levels, and how it ends."""

    picks: int
    pool: Callable[[int], dict[str, Levels]]  # of the image size
    apply: float = 1.0
    continuous: bool = False  # levels are the ends of a range
    by_strength: bool = False  # FedMatch: levels below an M of 2..5 drawn per image
    crop: bool = True
    shear: str = "nearest"
    fill: int = 0
    rotate_fill: int = 0
    backend: str = ""
    cutout: Literal["none", "shifted", "clipped", "random"] = "none"  # the closing Cutout
    colour: tuple[int, int, int] = (127, 127, 127)


_NONE: Levels = ([0.0], [0.0])


def _plain(values: Sequence[float]) -> Levels:
    return values, values


def _signed(values: Sequence[float]) -> Levels:
    return values, [-v for v in values]


def _around_one(values: Sequence[float]) -> Levels:
    return [1 + v for v in values], [1 - v for v in values]


def _pool(factors: Levels | dict[str, Levels], posterize: Levels, rotate: Levels, shear: Levels, solarize: Levels,
          translate: Levels, *others: str) -> dict[str, Levels]:  # fmt: skip
    if not isinstance(factors, dict):
        factors = dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), factors)
    pool = {"AutoContrast": _NONE, "Equalize": _NONE, "Posterize": posterize, "Rotate": rotate, "ShearX": shear,
            "ShearY": shear, "Solarize": solarize, "TranslateX": translate, "TranslateY": translate}  # fmt: skip
    pool |= factors | dict.fromkeys(others, _NONE)
    return dict(sorted(pool.items()))


def _mc(size: int) -> dict[str, Levels]:
    v = range(1, 10)
    return _pool(
        _plain([0.05 + 0.09 * i for i in v]),
        _plain([int(0.4 * i) + 4 for i in v]),
        _signed([int(3 * i) for i in v]),
        _signed([0.03 * i for i in v]),
        _plain([256 - int(25.6 * i) for i in v]),
        _signed([int(0.3 * i / 10 * size) for i in v]),
        "Identity",
    )


def _semifl(translate: Callable[[int], int]) -> Callable[[int], dict[str, Levels]]:
    return lambda size: _pool(
        _plain([1.9]), _plain([4]), _signed([30]), _signed([0.3]), _plain([0]), _signed([translate(size)]),
        "Cutout", "Invert",
    )  # fmt: skip


def _torchvision(size: int) -> dict[str, Levels]:
    factor = _around_one([float(torch.linspace(0, 0.9, 31)[9])])  # in float32, as there
    pixels = int(150 / 331 * size * 9 / 30)
    return _pool(
        factor, _plain([7]), _signed([9]), _signed([0.09]), _plain([178.5]), _signed([-pixels]), "Identity"
    )  # fmt: skip


def _fedmatch(size: int) -> dict[str, Levels]:
    def to(end: float, start: float = 0) -> list[float]:
        return np.linspace(start, end, 10)[:5].tolist()

    factors = {"Color": to(0.9), "Sharpness": to(0.9), "Contrast": to(0.5), "Brightness": to(0.3)}
    return _pool(
        {name: _around_one(values) for name, values in factors.items()},
        _plain([8, 8, 7, 7, 6]),
        _plain(to(360)),
        _signed(to(0.3)),
        _plain(to(231, 256)),
        _signed([size * v for v in to(0.2)]),
    )


def _usb(size: int) -> dict[str, Levels]:
    return _pool(
        _plain([0.05, 0.95]), _plain([4, 8]), _plain([-30, 30]), _plain([-0.3, 0.3]), _plain([0, 256]),
        _plain([-0.3 * size, 0.3 * size]), "Identity",
    )  # fmt: skip


def _fixmatch(size: int) -> dict[str, Levels]:
    l = range(1, 10)
    return _pool(
        _plain([0.1 + 0.18 * i for i in l]),
        _plain([max(1, 4 - int(0.4 * i)) for i in l]),
        _signed([int(3 * i) for i in l]),
        _signed([0.03 * i for i in l]),
        _plain([256 - int(25.6 * i) for i in l]),
        _signed(list(l)),
        "Identity",
    )


STRONG: dict[str, Variant] = {
    "ra-mc": Variant(2, _mc, apply=0.5, cutout="shifted"),
    "ra-semifl": Variant(2, _semifl(lambda size: 100), apply=0.5, shear="bilinear"),
    "ra-semifl-scaled": Variant(2, _semifl(lambda size: int(0.3 * size)), apply=0.5, shear="bilinear"),
    "ra-torchvision": Variant(2, _torchvision),
    "ra-torchvision-tensor": Variant(2, _torchvision, backend="tensor-"),
    "ra-fedmatch": Variant(6, _fedmatch, by_strength=True, crop=False, shear="bicubic", rotate_fill=128),
    "ra-usb": Variant(3, _usb, continuous=True, cutout="random", colour=(125, 123, 114)),
    "ra-fixmatch": Variant(2, _fixmatch, apply=0.5, fill=127, rotate_fill=127, cutout="clipped"),
}


class RandAugment:
    """A variant at an image size: turns keys into steps."""

    def __init__(self, name: str, size: int, channels: int):
        self.variant, self.size = STRONG[name], size
        self.pool = self.variant.pool(size)
        rgb = torch.tensor(self.variant.colour, dtype=torch.uint8).view(1, 3, 1, 1)
        self.colour = (rgb.flatten() if channels == 3 else ops.grey(rgb).flatten().expand(channels)).double()
        self.pool_side = 40 if name == "ra-semifl" else int(0.5 * size)
        self._tabulate()

    def _encode(self, op: str, value: Tensor) -> tuple[int, Tensor]:
        """Kernel and arguments of one op at Pillow's argument `value` [...]."""
        name, how, argument = op.lower(), self.variant.shear, torch.zeros(*value.shape, WIDTH, dtype=torch.float64)
        if op[:-1] in ("Shear", "Translate"):
            if op[:-1] == "Shear" and how != "nearest":
                argument[..., 0] = value
                return _KERNEL[f"{name[-1]}-{how}"], argument
            coefficients = ops.shear_coefficients if op[:-1] == "Shear" else ops.translation_coefficients
            argument[..., :6], argument[..., 6] = coefficients(value, name[-1]), self.variant.fill
            return _KERNEL["affine"], argument
        if op == "Rotate":
            argument[..., :6] = ops.rotation_coefficients(value, self.size, self.size)
            argument[..., 6] = self.variant.rotate_fill
            return _KERNEL["affine"], argument
        if op == "Cutout":
            argument[..., 4 : 4 + len(self.colour)] = self.colour
            return _KERNEL["paint"], argument
        if op == "Equalize" and self.variant.by_strength:
            name = "identity"  # FedMatch's function returns its input
        argument[..., 0] = value
        return _KERNEL.get(self.variant.backend + name, _KERNEL[name]), argument

    def _tabulate(self) -> None:
        self.levels = max(len(plus) for plus, _ in self.pool.values())
        values = [[list(v) * (self.levels if len(v) == 1 else 1) for v in pair] for pair in self.pool.values()]
        encoded = [self._encode(op, torch.tensor(v, dtype=torch.float64)) for op, v in zip(self.pool, values)]
        self.kernels = torch.tensor([kernel for kernel, _ in encoded])
        self.arguments = torch.stack([argument for _, argument in encoded])  # [op, sign, level, 7]
        self.ends = torch.tensor([(plus[0], plus[-1]) for plus, _ in values], dtype=torch.float64)

    def steps(self, keys: Tensor, base: int) -> Iterator[Step]:
        for pick in range(self.variant.picks):
            yield self._step(keys, base, base + PICKS + 8 * pick)

    def _step(self, keys: Tensor, base: int, lane: int) -> Step:
        op, sign = draws.host_integers(keys, [lane + OP, lane + SIGN], [len(self.pool), 2])
        if self.variant.continuous:
            return self._continuous(op, draws.host_uniform(keys, [lane + LEVEL])[0])
        kernel, argument = self.kernels[op], self.arguments[op, sign, self._level(keys, base, lane)]
        if self.variant.apply < 1:
            kernel = torch.where(draws.host_uniform(keys, [lane + APPLY])[0] < self.variant.apply, kernel, 0)
        if "Cutout" in self.pool:
            x, y = draws.host_uniform(keys, [lane + PICK_X, lane + PICK_Y]) * self.size
            box = ops.cutout_box(x, y, self.pool_side, self.size, self.size)
            argument[:, :4] = torch.where((kernel == _KERNEL["paint"])[:, None], box, argument[:, :4])
        return Step(kernel, argument)

    def _level(self, keys: Tensor, base: int, lane: int) -> Tensor:
        if self.variant.by_strength:
            strength = draws.host_integers(keys, [base + STRENGTH], [4])[0] + 2
            return (draws.host_uniform(keys, [lane + LEVEL])[0] * strength).long()
        return draws.host_integers(keys, [lane + LEVEL], [self.levels])[0]

    def _continuous(self, op: Tensor, place: Tensor) -> Step:
        low, high = self.ends[op].unbind(1)
        value, kernel = low + place * (high - low), self.kernels[op]
        argument = torch.zeros(len(op), WIDTH, dtype=torch.float64)
        argument[:, 0] = value
        for number, name in enumerate(self.pool):
            if self.kernels[number] == _KERNEL["affine"]:
                mine = (op == number).nonzero().flatten()
                argument[mine] = self._encode(name, value[mine])[1]
        return Step(kernel, argument)

    def closing_box(self, keys: Tensor, base: int, side: int | Literal["auto"] | None) -> Tensor | None:
        """The closing Cutout's box, if the variant and the key `cutout` have one."""
        kind, size = self.variant.cutout, self.size
        if kind == "none" or side is None:
            return None
        if kind == "clipped":
            return clipped_box(keys, base, cutout_side(side, size), size)
        x, y = draws.host_uniform(keys, [base + BOX_X, base + BOX_Y]) * size
        if kind == "shifted":
            return ops.cutout_box(x, y, cutout_side(side, size), size, size)
        most = 0.5 * size if side == "auto" else side
        return ops.cutout_box(x, y, draws.host_uniform(keys, [base + BOX_SIDE])[0] * most, size, size)


def cutout_side(side: int | Literal["auto"], size: int) -> int:
    return int(0.5 * size) if side == "auto" else side


def clipped_box(keys: Tensor, base: int, side: int, size: int) -> Tensor:
    """CutoutTensor and CutoutNumpy: a centre on a pixel, clipped on all sides, the end excluded."""
    x, y = draws.host_integers(keys, [base + BOX_X, base + BOX_Y], [size, size])
    half = side // 2
    return torch.stack((x - half, y - half, x + half - 1, y + half - 1), -1)
