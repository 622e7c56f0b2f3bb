"""Pillow's image operations as batched tensor code: the same bits, one argument per image, on any device.

Images are uint8 [B, C, H, W]; an argument is a tensor [B] on the images' device. Nothing here waits for the device.
The `tensor_` ones are torchvision's on tensors, which round otherwise than Pillow's on images.

>>> posterize(torch.tensor([[[[200, 100, 50]]]], dtype=torch.uint8), torch.tensor([5])).flatten().tolist()
[200, 96, 48]
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _each(argument: Tensor) -> Tensor:
    return argument.view(-1, 1, 1, 1)


def _merge(inside: Tensor, mask: Tensor, outside: Tensor) -> Tensor:
    """`inside` where the uint8 mask is 255, `outside` where it is 0 (bit operations: five times `where` on a CPU)."""
    return inside.bitwise_and(mask).bitwise_or_(outside & ~mask)


def grey(x: Tensor) -> Tensor:
    """Pillow's mode L, int32 [B, 1, H, W]."""
    if x.shape[1] == 1:
        return x.int()
    wide = x.int()
    return (wide[:, 0:1] * 19595 + wide[:, 1:2] * 38470 + wide[:, 2:3] * 7471 + 32768) >> 16


# --- point operations ---


def invert(x: Tensor) -> Tensor:
    return ~x


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    dropped = 2 ** (8 - bits.long().clamp(min=1))
    return x & _each(256 - dropped).to(torch.uint8)


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """Inverts the values from `threshold` (0 to 256, may be a fraction) on."""
    first = _each(threshold.ceil()).to(torch.int16)
    return x ^ (x >= first).view(torch.uint8) * 255


def autocontrast(x: Tensor) -> Tensor:
    flat = x.flatten(2)
    low, high = flat.amin(2, keepdim=True).double(), flat.amax(2, keepdim=True).double()
    several = high > low
    # A 0-dimensional CPU divisor would be turned into a product with its reciprocal on CUDA; a tensor is not.
    scale = torch.where(several, torch.full_like(high, 255.0) / (high - low).clamp(min=1.0), 1.0)
    offset = torch.where(several, -low * scale, 0.0)
    return flat.double().mul_(scale).add_(offset).to(torch.uint8).view(x.shape)


def equalize(x: Tensor) -> Tensor:
    pixels = x.shape[2] * x.shape[3]
    flat = x.reshape(-1, pixels)
    rows = flat.shape[0]
    value = flat.long()
    place = value + torch.arange(0, rows * 256, 256, device=x.device)[:, None]
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    counts = torch.zeros(rows * 256, dtype=torch.int32, device=x.device)
    counts = counts.scatter_add_(0, place.view(-1), one.expand(place.numel())).view(rows, 256)
    brightest = counts.gather(1, flat.amax(1, keepdim=True).long())
    step = (pixels - brightest) // 255
    below = counts.cumsum(1, dtype=torch.int32) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp_(max=255)
    unchanged = torch.arange(256, dtype=torch.int32, device=x.device)
    table = torch.where(step > 0, table, unchanged).to(torch.uint8)
    return table.gather(1, value).view(x.shape)


# --- blends ---


def _blend(degenerate: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    # Two roundings, as in Pillow: a fused multiply-add (lerp, addcmul) changes one value in 70,000.
    scaled = (x.float() - degenerate).mul_(_each(factor).float())
    return scaled.add_(degenerate).clamp_(0, 255).to(torch.uint8)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    return x.float().mul_(_each(factor).float()).clamp_(0, 255).to(torch.uint8)


def color(x: Tensor, factor: Tensor) -> Tensor:
    return x.clone() if x.shape[1] == 1 else _blend(grey(x).float(), x, factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    pixels = x.shape[2] * x.shape[3]
    mean = (2 * grey(x).sum((1, 2, 3)) + pixels) // (2 * pixels)
    return _blend(_each(mean).float(), x, factor)


def _smooth(x: Tensor, total_to_value: Callable[[Tensor], Tensor]) -> Tensor:
    """Inner pixels from the sum over their 3x3 window, the centre five times; the border as it is.

    The sums run over the flat memory, which is wrong only at the border: long vectors are several times faster.
    """
    flat, width = x.float().view(-1), x.shape[3]
    across = flat.clone()
    across[1:] += flat[:-1]
    across[:-1] += flat[1:]
    total = flat * 4 + across
    total[width:] += across[:-width]
    total[:-width] += across[width:]
    smooth = total_to_value(total).view(x.shape)
    for line in (0, -1):
        smooth[:, :, line], smooth[..., line] = x[:, :, line], x[..., line]
    return smooth


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    # total / 13 + 1/2 is at least 1/26 away from an integer, so float32 truncates it rightly.
    return _blend(_smooth(x, lambda total: total.mul_(1 / 13).add_(0.5).floor_()), x, factor)


# --- affine operations ---


def _fixed(value: Tensor) -> Tensor:
    return torch.floor(value * 65536 + 0.5)


def _matrix(*columns: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*columns), -1)


def affine_coefficients(matrix: Tensor) -> Tensor:
    """Pillow's matrices a..f, float64 [..., 6] on the host, as the 16.16 coefficients `affine` takes."""
    a, b, c, d, e, f = matrix.unbind(-1)
    return _matrix(*map(_fixed, (a, b, c + 0.5 * a + 0.5 * b, d, e, f + 0.5 * d + 0.5 * e)))


def shear_coefficients(slope: Tensor, axis: str) -> Tensor:
    zero, one = torch.zeros_like(slope), torch.ones_like(slope)
    rows = (one, slope, zero, zero, one, zero) if axis == "x" else (one, zero, zero, slope, one, zero)
    return affine_coefficients(_matrix(*rows))


def translation_coefficients(pixels: Tensor, axis: str) -> Tensor:
    """Pillow takes translations in floating point: a shift by whole pixels, floor(pixels + 1/2)."""
    zero, one = torch.zeros_like(pixels), torch.full_like(pixels, 65536.0)
    shift = torch.floor(pixels + 0.5) * 65536
    return _matrix(one, zero, shift, zero, one, zero) if axis == "x" else _matrix(one, zero, zero, zero, one, shift)


def rotation_coefficients(degrees: Tensor, width: int, height: int) -> Tensor:
    """Counter-clockwise about the centre, degrees float64 on the host."""
    turn = -torch.deg2rad(degrees % 360)
    cos, sin = (torch.round(v * 1e15) / 1e15 for v in (torch.cos(turn), torch.sin(turn)))
    cx, cy = width / 2, height / 2
    c = cos * -cx + sin * -cy + cx
    f = -sin * -cx + cos * -cy + cy
    return affine_coefficients(_matrix(cos, sin, c, -sin, cos, f))


def affine(x: Tensor, coefficients: Tensor, fill: Tensor) -> Tensor:
    """NEAREST: output pixel (x, y) comes from ((A2 + x A0 + y A1) >> 16, (A5 + x A3 + y A4) >> 16)."""
    batch, channels, height, width = x.shape
    a0, a1, a2, a3, a4, a5 = coefficients.to(torch.int32).view(batch, 6, 1, 1).unbind(1)
    across = torch.arange(width, dtype=torch.int32, device=x.device)
    down = torch.arange(height, dtype=torch.int32, device=x.device)[:, None]
    column = ((a2 + across * a0) + down * a1) >> 16
    row = ((a5 + across * a3) + down * a4) >> 16
    outside = column | row | (width - 1 - column) | (height - 1 - row)  # its sign bit
    mask = (~(outside >> 31)).to(torch.uint8).view(batch, 1, -1)
    source = row.mul_(width).add_(column).clamp_(0, height * width - 1).long().view(batch, 1, -1)
    moved = x.flatten(2).gather(2, source.expand(-1, channels, -1))
    return _merge(moved, mask, fill.to(torch.uint8).view(-1, 1, 1)).view(x.shape)


def _bilinear(taps: list[Tensor], t: Tensor) -> Tensor:
    a, b = taps
    return (b - a).mul_(t).add_(a)


def _bicubic(taps: list[Tensor], t: Tensor) -> Tensor:
    a, b, c, d = taps
    p2, p3, p4 = c - a, (a - b).mul_(2).add_(c).sub_(d), (b - a).sub_(c).add_(d)
    return p4.mul_(t).add_(p3).mul_(t).add_(p2).mul_(t).add_(b).clamp_(0, 255)


def slide(x: Tensor, slope: Tensor, shift: Tensor, axis: str, resample: str) -> Tensor:
    """Shear and translation along one axis with BILINEAR or BICUBIC, black outside.

    The other axis' offset is exactly 0 there, so Pillow's two-dimensional interpolation is this one-dimensional one.
    """
    batch, channels, height, width = x.shape
    column = torch.arange(width, device=x.device)
    row = torch.arange(height, device=x.device)[:, None]
    along, other, size = (column, row, width) if axis == "x" else (row, column, height)
    slope, shift = slope.view(-1, 1, 1), shift.view(-1, 1, 1)
    place = (along + 0.5).double() + slope * (other + 0.5).double() + shift
    mask = ((place >= 0) & (place < size)).view(torch.uint8) * 255
    place = place - 0.5
    left = torch.floor(place)
    offset, first = (place - left).view(batch, 1, -1), left.long()
    reach, interpolate = ((0, 1), _bilinear) if resample == "bilinear" else ((-1, 0, 1, 2), _bicubic)
    taps = []
    for k in reach:
        near = (first + k).clamp_(0, size - 1)
        source = near + row * width if axis == "x" else near * width + column
        taps.append(x.flatten(2).gather(2, source.view(batch, 1, -1).expand(-1, channels, -1)).double())
    return interpolate(taps, offset).to(torch.uint8).view(x.shape).bitwise_and_(mask[:, None])


# --- boxes, flip and crop ---


def paint(x: Tensor, box: Tensor, colour: Tensor) -> Tensor:
    """Fills columns x0..x1 and rows y0..y1, ends included; box [B, 4] is x0 y0 x1 y1, colour [B or 1, C]."""
    height, width = x.shape[2:]
    x0, y0, x1, y1 = box.to(torch.int32).view(-1, 4, 1, 1, 1).unbind(1)
    across = torch.arange(width, dtype=torch.int32, device=x.device)
    down = torch.arange(height, dtype=torch.int32, device=x.device)[:, None]
    columns = ((across >= x0) & (across <= x1)).view(torch.uint8) * 255
    rows = ((down >= y0) & (down <= y1)).view(torch.uint8) * 255
    return _merge(x, ~(rows & columns), colour.to(torch.uint8)[:, :, None, None])


def cutout_box(centre_x: Tensor, centre_y: Tensor, side: Tensor | float, width: int, height: int) -> Tensor:
    """CutoutAbs' box, float64 [..., 4]: shifted at the left and top, clipped at the right and bottom."""
    x0, y0 = ((c - side / 2).clamp(min=0).trunc() for c in (centre_x, centre_y))
    x1, y1 = (x0 + side).clamp(max=width).trunc(), (y0 + side).clamp(max=height).trunc()
    return torch.stack((x0, y0, x1, y1), -1)


def _crop_lines(start: Tensor, size: int, pad: int) -> Tensor:
    return start[:, None] + torch.arange(-pad, size - pad, device=start.device)


def _reflect(line: Tensor, size: int) -> Tensor:
    return (size - 1) - ((size - 1) - line.abs()).abs()


def flip_crop(x: Tensor, flip: Tensor, top: Tensor, left: Tensor, pad: int, zero: bool = False) -> Tensor:
    """Mirrors the images whose `flip` is 1, pads by reflection (or zeros), and cuts at (top, left): one gather."""
    batch, channels, height, width = x.shape
    rows, columns = _crop_lines(top, height, pad), _crop_lines(left, width, pad)
    source_row, source_column = _reflect(rows, height), _reflect(columns, width)
    source_column = source_column + flip[:, None] * (width - 1 - 2 * source_column)
    source = (source_row[:, :, None] * width + source_column[:, None, :]).view(batch, 1, -1)
    moved = x.flatten(2).gather(2, source.expand(-1, channels, -1)).view(x.shape)
    if not zero:
        return moved
    keep_rows, keep_columns = (
        ((line >= 0) & (line < size)).view(torch.uint8) * 255 for line, size in ((rows, height), (columns, width))
    )
    return moved.bitwise_and_((keep_rows[:, :, None] & keep_columns[:, None, :])[:, None])


def _between(size: int, larger: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `larger` lines the two of `size` it lies between, and the second one's share in 2 * larger parts."""
    place = ((2 * torch.arange(larger, dtype=torch.int32, device=device) + 1) * size - larger).clamp_(min=0)
    first = torch.div(place, 2 * larger, rounding_mode="floor")
    return first.long(), (first + 1).clamp_(max=size - 1).long(), place - first * (2 * larger)


def _larger(x: Tensor, height: int, width: int) -> Tensor:
    """Images made larger, bilinearly, in whole numbers: every device gives the same pixels."""
    above, below, down = _between(x.shape[2], height, x.device)
    before, after, across = _between(x.shape[3], width, x.device)
    wide, down = x.to(torch.int32), down[:, None]
    wide = wide[..., before] * (2 * width - across) + wide[..., after] * across
    wide = wide[:, :, above] * (2 * height - down) + wide[:, :, below] * down
    return wide.add_(2 * height * width).div_(4 * height * width, rounding_mode="floor").to(torch.uint8)


def resize_crop(x: Tensor, flip: Tensor, top: Tensor, left: Tensor, more: int) -> Tensor:
    """Images made larger by `more` pixels, bilinearly (Pillow's differs by 1 at most), mirrored where `flip` is 1, cut at (top, left)."""
    batch, channels, height, width = x.shape
    large = _larger(x, height + more, width + more)
    rows, columns = top[:, None] + torch.arange(height, device=x.device), left[:, None] + torch.arange(width, device=x.device)
    columns = columns + flip[:, None] * (width + more - 1 - 2 * columns)
    source = (rows[:, :, None] * (width + more) + columns[:, None, :]).view(batch, 1, -1)
    return large.flatten(2).gather(2, source.expand(-1, channels, -1)).view(x.shape)


# --- torchvision's tensor arithmetic where it differs from Pillow's ---


def _tensor_blend(degenerate: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    own, other = _each(factor).float(), _each(1.0 - factor.double()).float()
    return (x.float().mul_(own) + degenerate * other).clamp_(0, 255).to(torch.uint8)


def _tensor_grey(x: Tensor) -> Tensor:
    if x.shape[1] == 1:
        return x.float()
    wide = x.float()
    return (wide[:, 0:1] * 0.2989 + wide[:, 1:2] * 0.587 + wide[:, 2:3] * 0.114).floor_()


def tensor_color(x: Tensor, factor: Tensor) -> Tensor:
    return x.clone() if x.shape[1] == 1 else _tensor_blend(_tensor_grey(x), x, factor)


def tensor_contrast(x: Tensor, factor: Tensor) -> Tensor:
    total = _tensor_grey(x).sum((1, 2, 3), dtype=torch.float64)
    mean = total / torch.full_like(total, math.prod(x.shape[2:]))
    return _tensor_blend(_each(mean).float(), x, factor)


def tensor_sharpness(x: Tensor, factor: Tensor) -> Tensor:
    if min(x.shape[2:]) <= 2:
        return x.clone()
    return _tensor_blend(_smooth(x, lambda total: (total / 13).round_()), x, factor)


def tensor_autocontrast(x: Tensor) -> Tensor:
    flat = x.flatten(2)
    low, high = flat.amin(2, keepdim=True).float(), flat.amax(2, keepdim=True).float()
    several = high > low
    scale = torch.where(several, torch.full_like(high, 255.0) / (high - low).clamp(min=1.0), 1.0)
    return ((flat - torch.where(several, low, 0.0)) * scale).clamp_(0, 255).to(torch.uint8).view(x.shape)
