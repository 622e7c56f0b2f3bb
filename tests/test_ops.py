"""Every op against Pillow, bit for bit (2.12 no. 1), and the worked vectors of 2.11 and of SemiFL's 2.7."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from sklearn.datasets import load_digits, load_sample_image

from fallow.data import ops

SHAPES = [(8, 8), (28, 28), (32, 32), (33, 33), (31, 20)]  # height, width


@lru_cache
def photo(name: str) -> Image.Image:
    return Image.fromarray(load_sample_image(name))


@lru_cache
def pictures(height: int, width: int, channels: int) -> list[np.ndarray]:
    """Photographs and digits, noise, low contrast, constant, gradient, two levels."""
    rng = np.random.default_rng(height * width + channels)
    mode = "RGB" if channels == 3 else "L"
    size, shape = (width, height), (height, width, 3)[: 2 + (channels == 3)]
    china, flower = (photo(n).convert(mode) for n in ("china.jpg", "flower.jpg"))
    images = [china.resize(size), china.crop((200, 150, 200 + width, 150 + height)), flower.resize(size)]
    images.append(flower.crop((300, 200, 300 + 2 * width, 200 + 2 * height)).resize(size))
    images.append(Image.fromarray((load_digits().images[3] * 15.9).astype(np.uint8)).convert(mode).resize(size))
    arrays = [np.asarray(image) for image in images]
    arrays += [rng.integers(0, 256, shape, dtype=np.uint8), rng.integers(100, 110, shape, dtype=np.uint8)]
    arrays += [np.full(shape, 77, np.uint8), np.where(rng.random(shape) < 0.7, 20, 200).astype(np.uint8)]
    ramp = np.broadcast_to((np.arange(width) * 7 % 256)[None, :], (height, width))
    arrays.append((np.stack([ramp, ramp // 2, 255 - ramp], -1) if channels == 3 else ramp).astype(np.uint8))
    return arrays


def tensor(arrays: list[np.ndarray]) -> torch.Tensor:
    stacked = np.stack([a if a.ndim == 3 else a[..., None] for a in arrays])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def check(op, reference, arguments, shapes=SHAPES):
    """`op(x, arguments [B])` against `reference(image, argument)`, all arguments and pictures in one batch."""
    for height, width in shapes:
        for channels in (1, 3):
            arrays = pictures(height, width, channels)
            pairs = [(array, argument) for array in arrays for argument in arguments]
            x = tensor([array for array, _ in pairs])
            before = x.clone()
            ours = op(x, torch.tensor([float(a) for _, a in pairs], dtype=torch.float64))
            assert ours.dtype == torch.uint8 and ours.shape == x.shape and torch.equal(x, before)
            theirs = tensor([np.asarray(reference(Image.fromarray(a), v)) for a, v in pairs])
            wrong = (ours != theirs).flatten(1).any(1).nonzero().flatten().tolist()
            assert not wrong, f"{height}x{width}x{channels}: arguments {sorted({pairs[i][1] for i in wrong})}"


MC = range(1, 10)
FACTORS = sorted({0.0, 1.0, 1.9, 0.73, 1.27, *(0.05 + 0.09 * v for v in MC), *(0.1 + 0.18 * v for v in MC),
                  *(1 + s * e / 9 * v for s in (-1, 1) for e in (0.3, 0.5, 0.9) for v in range(5))})  # fmt: skip
THRESHOLDS = sorted({0, 128, 256, 178.5, 77.3, *(256 - int(25.6 * v) for v in MC), *np.linspace(256, 231, 10)[:5]})


@pytest.mark.parametrize("name", ["Brightness", "Color", "Contrast", "Sharpness"])
def test_blends(name):
    check(getattr(ops, name.lower()), lambda im, f: getattr(ImageEnhance, name)(im).enhance(f), FACTORS)


@pytest.mark.parametrize("name", ["autocontrast", "equalize", "invert"])
def test_tables_of_the_image(name):
    check(lambda x, _: getattr(ops, name)(x), lambda im, _: getattr(ImageOps, name)(im), [0], [*SHAPES, (64, 64)])


def test_posterize_and_solarize():
    check(ops.posterize, lambda im, bits: ImageOps.posterize(im, int(bits)), range(1, 9))
    check(ops.solarize, ImageOps.solarize, THRESHOLDS)


def transform(matrix, how=Image.Resampling.NEAREST):
    return lambda im, v: im.transform(im.size, Image.Transform.AFFINE, matrix(v), how)


SHEAR = {"x": lambda v: (1, v, 0, 0, 1, 0), "y": lambda v: (1, 0, 0, v, 1, 0)}
SHIFT = {"x": lambda v: (1, 0, v, 0, 1, 0), "y": lambda v: (1, 0, 0, 0, 1, v)}
SLOPES = sorted({0, 0.3, -0.3, 0.09, -0.09, 0.1234, -0.2345, *(s * 0.03 * v for v in MC for s in (-1, 1)),
                 *(s * 0.3 / 9 * v for v in range(5) for s in (-1, 1))})  # fmt: skip
PIXELS = [0, 1, -1, 2, -2, 4, 8, -8, 100, -100, 2.5, -2.5, 0.5, -0.5, 0.71, -2.84, 9.6]


def black(batch):
    return torch.zeros(len(batch))


@pytest.mark.parametrize("axis", ["x", "y"])
def test_shear_and_translate_nearest(axis):
    check(lambda x, v: ops.affine(x, ops.shear_coefficients(v, axis), black(x)), transform(SHEAR[axis]), SLOPES)
    check(lambda x, v: ops.affine(x, ops.translation_coefficients(v, axis), black(x)), transform(SHIFT[axis]), PIXELS)


@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
@pytest.mark.parametrize("axis", ["x", "y"])
def test_shear_and_translate_smooth(axis, how):
    pillow = Image.Resampling[how.upper()]
    zero = torch.zeros_like
    check(lambda x, v: ops.slide(x, v, zero(v), axis, how), transform(SHEAR[axis], pillow), SLOPES[::3])
    check(lambda x, v: ops.slide(x, zero(v), v, axis, how), transform(SHIFT[axis], pillow), PIXELS[::2])


def test_rotate():
    degrees = [0, 30, -30, 9, -9, 90, 180, 270, 40, 80, 120, 160, 12.345, -29.99, *range(-27, 28, 3)]
    rotate = lambda x, v: ops.affine(x, ops.rotation_coefficients(v, x.shape[3], x.shape[2]), black(x))
    square = [shape for shape in SHAPES if shape[0] == shape[1]]
    check(rotate, lambda im, d: im.rotate(d), degrees, square)
    check(rotate, lambda im, d: im.rotate(d), [d for d in degrees if d % 90], [(31, 20)])


def test_rotate_with_a_grey_fill_is_the_composite():
    def composite(image, degrees):
        turned = image.convert("RGBA").rotate(degrees)
        return Image.composite(turned, Image.new("RGBA", turned.size, (128,) * 4), turned).convert(image.mode)

    rotate = lambda x, v: ops.affine(x, ops.rotation_coefficients(v, 32, 32), torch.full((len(x),), 128))
    check(rotate, composite, [0, 40, 80, 120, 160], [(32, 32)])


def test_rotation_coefficients_of_many_angles():
    degrees = np.concatenate([np.arange(-360, 361), np.random.default_rng(0).uniform(-30, 30, 1000)])
    image = np.random.default_rng(1).integers(1, 256, (32, 32), dtype=np.uint8)
    x = torch.from_numpy(image).expand(len(degrees), 1, 32, 32)
    ours = ops.affine(x, ops.rotation_coefficients(torch.from_numpy(degrees), 32, 32), black(degrees))
    theirs = [np.asarray(Image.fromarray(image).rotate(float(d))) for d in degrees]
    assert torch.equal(ours, tensor(theirs))


def test_cutout_paints_pillows_rectangle():
    rng = np.random.default_rng(0)
    for height, width in SHAPES:
        for channels, colour in ((1, [127]), (3, [125, 123, 114])):
            array = pictures(height, width, channels)[0]
            for side in (0, 1, 4, 16, 40, 5.37):
                ux, uy = rng.uniform(0, width), rng.uniform(0, height)
                x0, y0 = int(max(0, ux - side / 2)), int(max(0, uy - side / 2))
                image = Image.fromarray(array)
                box = (x0, y0, int(min(width, x0 + side)), int(min(height, y0 + side)))
                ImageDraw.Draw(image).rectangle(box, tuple(colour) if channels == 3 else colour[0])
                centre = [torch.tensor([u], dtype=torch.float64) for u in (ux, uy)]
                ours = ops.paint(tensor([array]), ops.cutout_box(*centre, side, width, height), torch.tensor([colour]))
                assert torch.equal(ours, tensor([np.asarray(image)]))


def test_identities():
    x = tensor(pictures(32, 32, 3))
    one, zero = torch.ones(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)
    for op in (ops.brightness, ops.color, ops.contrast, ops.sharpness, ops.tensor_color, ops.tensor_sharpness):
        assert torch.equal(op(x, one), x)
    for coefficients in (ops.shear_coefficients(zero, "x"), ops.translation_coefficients(zero, "y"),
                         ops.rotation_coefficients(zero, 32, 32)):  # fmt: skip
        assert torch.equal(ops.affine(x, coefficients, zero), x)
    assert torch.equal(ops.posterize(x, 8 * one), x) and torch.equal(ops.solarize(x, 256 * one), x)
    assert torch.equal(ops.solarize(x, zero), ops.invert(x)) and torch.equal(ops.invert(ops.invert(x)), x)
    small = tensor(pictures(8, 8, 3))
    assert torch.equal(ops.equalize(small), small)


def test_flip_and_crop_is_pad_and_cut():
    rng = np.random.default_rng(0)
    for zero, mode in ((False, "reflect"), (True, "constant")):
        for height, width in SHAPES:
            array = pictures(height, width, 3)[0]
            for pad in (0, 1, 4):
                flip, top, left = rng.integers(0, 2), *rng.integers(0, 2 * pad + 1, 2)
                wide = np.pad(array[:, ::-1] if flip else array, [(pad, pad), (pad, pad), (0, 0)], mode=mode)
                theirs = wide[top : top + height, left : left + width]
                ours = ops.flip_crop(tensor([array]), *(torch.tensor([int(v)]) for v in (flip, top, left)), pad, zero)
                assert np.array_equal(ours[0].permute(1, 2, 0).numpy(), theirs)
                if flip:  # FedDure crops first: the same picture from the mirrored offset
                    wide = np.pad(array, [(pad, pad), (pad, pad), (0, 0)], mode=mode)[top : top + height]
                    assert np.array_equal(wide[:, 2 * pad - left :][:, :width][:, ::-1], theirs)


# --- worked vectors ---

A = np.array([[(200, 100, 50), (10, 20, 30), (255, 0, 128)], [(0, 255, 64), (90, 90, 90), (17, 200, 33)],
              [(120, 130, 140), (5, 250, 7), (66, 77, 88)]], np.uint8)  # fmt: skip
B = np.arange(1, 37, dtype=np.uint8).reshape(6, 6)


def number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def rows(text: str) -> list[list[int]]:
    return [[int(v) for v in row.split()] for row in text.split("/")]


def test_grey_of_a():
    assert ops.grey(tensor([A]))[0, 0].tolist() == rows("124 18 91 / 157 90 126 / 128 149 75")


@pytest.mark.parametrize("factor, corner, centre", [
    (0.14, [(28, 14, 7), (134, 120, 113), (119, 105, 98), (200, 100, 50)],
     [(12, 12, 12), (90, 90, 90), (103, 103, 103), (86, 110, 77)]),
    (0.86, [(172, 86, 43), (189, 103, 60), (186, 100, 57), (200, 100, 50)],
     [(77, 77, 77), (90, 90, 90), (92, 92, 92), (89, 93, 88)]),
    (1.9, [(255, 190, 95), (255, 78, 0), (255, 94, 0), (200, 100, 50)],
     [(171, 171, 171), (90, 90, 90), (75, 75, 75), (93, 68, 102)]),
])  # fmt: skip
def test_blends_of_a(factor, corner, centre):
    for op, first, middle in zip((ops.brightness, ops.color, ops.contrast, ops.sharpness), corner, centre):
        out = op(tensor([A]), number(factor))[0]
        assert (tuple(out[:, 0, 0].tolist()), tuple(out[:, 1, 1].tolist())) == (first, middle)


def test_tables_of_2_11():
    pixel = tensor([A[:1, :1]])
    assert ops.posterize(pixel, number(5)).flatten().tolist() == [200, 96, 48]
    assert ops.solarize(pixel, number(128)).flatten().tolist() == [55, 100, 50]
    stretched = ops.autocontrast(torch.tensor([[[[10, 11, 57, 109, 110]]]], dtype=torch.uint8))
    assert stretched.flatten().tolist() == [0, 2, 119, 252, 255]
    assert ops.autocontrast(torch.tensor([[[[0, 25]]]], dtype=torch.uint8)).flatten().tolist() == [0, 254]
    levels = torch.tensor([10] * 300 + [20] * 300 + [30] * 184, dtype=torch.uint8).view(1, 1, 28, 28)
    assert ops.equalize(levels).unique().tolist() == [0, 150, 255]


def test_affine_of_b():
    x = tensor([B])
    shear = lambda v, axis: ops.affine(x, ops.shear_coefficients(number(v), axis), number(0))[0, 0].tolist()
    assert ops.shear_coefficients(number(0.3), "x")[0, 1:3].tolist() == [19661, 42598]
    assert shear(0.3, "x") == rows("1 2 3 4 5 6 / 7 8 9 10 11 12 / 14 15 16 17 18 0 / 20 21 22 23 24 0 /"
                                   "26 27 28 29 30 0 / 33 34 35 36 0 0")  # fmt: skip
    assert shear(-0.3, "y") == rows("1 2 0 0 0 0 / 7 8 3 4 5 0 / 13 14 9 10 11 6 / 19 20 15 16 17 12 /"
                                    "25 26 21 22 23 18 / 31 32 27 28 29 24")  # fmt: skip
    assert ops.slide(x, number(0.3), number(0), "x", "bilinear")[0, 0].tolist() == rows(
        "1 2 3 4 5 6 / 7 8 9 10 11 12 / 13 14 15 16 17 0 / 20 21 22 23 24 0 / 26 27 28 29 30 0 / 32 33 34 35 0 0")
    shift = lambda v: ops.affine(x, ops.translation_coefficients(number(v), "x"), number(0))[0, 0, 0].tolist()
    assert (shift(2), shift(-2), shift(2.5)) == ([3, 4, 5, 6, 0, 0], [0, 0, 1, 2, 3, 4], [4, 5, 6, 0, 0, 0])
    assert ops.slide(x, number(0), number(2.5), "x", "bilinear")[0, 0, 0].tolist() == [3, 4, 5, 0, 0, 0]
    turn = lambda v: ops.affine(x, ops.rotation_coefficients(number(v), 6, 6), number(0))[0, 0].tolist()
    assert turn(30) == rows("0 3 4 11 12 0 / 2 3 10 11 18 18 / 8 8 15 16 23 24 / 13 14 21 22 29 29 /"
                            "19 19 26 27 34 35 / 0 25 26 33 34 0")  # fmt: skip
    assert turn(-30) == rows("0 7 8 3 4 0 / 13 13 8 9 4 5 / 19 20 15 16 11 11 / 26 26 21 22 17 18 /"
                             "32 33 28 29 24 24 / 0 33 34 29 30 0")  # fmt: skip


def test_cutout_boxes_of_2_11():
    box = lambda x, y: ops.cutout_box(number(x), number(y), 4, 8, 8)[0].tolist()
    assert box(1.0, 6.9) == [0, 4, 4, 8] and box(7.9, 3.5) == [5, 1, 8, 5]


# --- SemiFL's test values (its 2.7) ---


def test_constant_image_of_semifl():
    x = torch.tensor([100, 150, 200], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 32, 32).contiguous()
    f = number(1.9)
    expected = {(190, 255, 255): [ops.brightness(x, f)], (63, 158, 253): [ops.color(x, f), ops.contrast(x, f)],
                (96, 144, 192): [ops.posterize(x, number(4))],
                (155, 105, 55): [ops.invert(x), ops.solarize(x, number(0))],
                (100, 150, 200): [ops.autocontrast(x), ops.equalize(x), ops.sharpness(x, f)],
                (0, 0, 0): [ops.affine(x, ops.translation_coefficients(number(-100), "y"), number(0))]}  # fmt: skip
    for colour, results in expected.items():
        assert all(torch.equal(r, torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 32, 32)) for r in results)


def test_ramp_of_semifl():
    line = torch.arange(0, 256, 8)
    x = torch.stack([line.expand(32, 32), line[:, None].expand(32, 32), torch.full((32, 32), 128)])[None].byte()
    f = number(1.9)
    expected = [(ops.posterize(x, number(4)), (32, 80, 128), 376832), (ops.invert(x), (215, 175, 127), 398336),
                (ops.solarize(x, number(0)), (215, 175, 127), 398336), (ops.equalize(x), (53, 107, 128), 450048),
                (ops.autocontrast(x), (41, 82, 128), 391232), (ops.contrast(x, f), (0, 40, 131), 391168),
                (ops.brightness(x, f), (76, 152, 243), 625536), (ops.color(x, f), (9, 85, 176), 389029),
                (ops.sharpness(x, f), (40, 80, 128), 385024)]  # fmt: skip
    for result, pixel, total in expected:
        assert tuple(result[0, :, 10, 5].tolist()) == pixel and int(result.sum()) == total
    sheared = ops.slide(x, number(0.3), number(0), "x", "bilinear")[0, 0]
    assert sheared[0, :4].tolist() == [1, 9, 17, 25] and sheared[20, :4].tolist() == [49, 57, 65, 73]
    turned = ops.affine(x, ops.rotation_coefficients(number(30), 32, 32), number(0))
    assert float((turned == 0).all(1).double().mean()) == 0.15234375


# --- torchvision's tensor arithmetic (2.4), recomputed with numpy in float32 ---


@pytest.mark.parametrize("factor", [0.73000002, 1.26999998])
def test_tensor_arithmetic(factor):
    f, g = np.float32(factor), np.float32(1 - factor)
    blend = lambda array, other: np.clip(f * array.astype(np.float32) + g * other, 0, 255).astype(np.uint8)
    for array in pictures(32, 32, 3):
        wide = array.astype(np.float32)
        r, green, b = (wide[..., i] for i in range(3))
        grey = np.trunc(np.float32(0.2989) * r + np.float32(0.587) * green + np.float32(0.114) * b)
        smooth = wide.copy()
        windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), (0, 1)).sum((-1, -2)) + 4 * wide[1:-1, 1:-1]
        smooth[1:-1, 1:-1] = np.rint(windows / np.float32(13))
        x = tensor([array])
        assert torch.equal(ops.tensor_color(x, number(factor)), tensor([blend(array, grey[..., None])]))
        mean = np.float32(grey.mean(dtype=np.float64))
        assert torch.equal(ops.tensor_contrast(x, number(factor)), tensor([blend(array, mean)]))
        assert torch.equal(ops.tensor_sharpness(x, number(factor)), tensor([blend(array, smooth)]))
        low, high = wide.min((0, 1)), wide.max((0, 1))
        stretched = (wide - low) * (np.float32(255) / np.maximum(high - low, np.float32(1)))
        assert torch.equal(ops.tensor_autocontrast(x), tensor([np.where(high > low, stretched, wide).astype(np.uint8)]))
        assert (ops.tensor_autocontrast(x).int() - ops.autocontrast(x).int()).abs().max() <= 1
    assert torch.equal(ops.tensor_color(x[:, :1], number(factor)), x[:, :1])
