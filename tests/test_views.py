"""The named views: distributions, independence of batch and order, and whole views recomputed with Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from scipy.stats import chisquare
from sklearn.datasets import load_sample_image

from fallow import draws
from fallow.data.normalisation import PRESETS, normalisation
from fallow.data.randaugment import _KERNEL, APPLY, BOX_X, BOX_Y, FLIP, LEFT, LEVEL, OP, PICKS, SIGN, STRONG, TOP, RandAugment
from fallow.data.samples import ROLES
from fallow.data.views import Views, view_names
from fallow.errors import UserError


def crops(count: int, size: int, channels: int) -> torch.Tensor:
    photo = Image.fromarray(load_sample_image("china.jpg")).convert("RGB" if channels == 3 else "L")
    rng = np.random.default_rng(0)
    corners = zip(rng.integers(0, 640 - size, count), rng.integers(0, 427 - size, count))
    arrays = [np.asarray(photo.crop((x, y, x + size, y + size))).reshape(size, size, channels) for x, y in corners]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()


def noise(count: int, size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (count, channels, size, size), dtype=np.uint8))


def keys_of(count: int, seed: int = 7) -> torch.Tensor:
    return draws.bits(seed, torch.arange(count))


def make(size: int = 32, channels: int = 3, flip: bool = True, **names) -> Views:
    return Views(size=size, channels=channels, mean=[0.4] * channels, std=[0.2] * channels, flip=flip, **names)


STRONG_BASE = 64 * ROLES.index("strong")
WEAK_BASE = 64 * ROLES.index("weak")


# --- no dependence on batch, order or neighbours (2.12 nos. 2 and 8) ---


@pytest.mark.parametrize("name", view_names())
def test_together_equals_one_by_one_in_any_order(name):
    for size, channels in ((32, 3), (33, 1)):
        images, keys, views = crops(40, size, channels), keys_of(40), make(size, channels, strong=name)
        together = views("strong", images, keys)
        assert together.dtype == torch.float32 and together.shape == images.shape
        alone = torch.cat([views("strong", images[i : i + 1], keys[i : i + 1]) for i in range(40)])
        assert torch.equal(together, alone)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
        assert torch.equal(views("strong", images[order], keys[order]), together[order])


def test_a_call_of_several_chunks_equals_its_parts(monkeypatch):
    images, keys, views = crops(50, 32, 3), keys_of(50), make()
    whole = views("strong", images, keys)
    monkeypatch.setattr(Views, "_chunks", lambda self, x: (slice(i, i + 7) for i in range(0, len(x), 7)))
    assert torch.equal(views("strong", images, keys), whole)


@pytest.mark.parametrize("name", view_names())
def test_types_shapes_and_untouched_input(name):
    for size in (8, 28, 32, 64, 96):
        for channels in (1, 3):
            images = crops(12, size, channels)
            before = images.clone()
            out = make(size, channels, strong=name).uint8("strong", images, keys_of(12))
            assert out.dtype == torch.uint8 and out.shape == images.shape and torch.equal(images, before)


def test_an_empty_batch_is_an_empty_view():
    assert make()("strong", noise(0), keys_of(0)).shape == (0, 3, 32, 32)


def test_equal_keys_share_one_draw():
    image, key = crops(1, 32, 3), keys_of(1)
    for name in view_names():
        views = make(strong=name)
        shared = views("strong", image.expand(16, -1, -1, -1), key.expand(16))
        assert torch.equal(shared, shared[:1].expand_as(shared))
        if name != "plain":
            apart = views("strong", image.expand(16, -1, -1, -1), keys_of(16))
            assert len({row.numpy().tobytes() for row in apart}) > 8


def test_roles_draw_independently():
    images, keys, views = crops(30, 32, 3), keys_of(30), make(strong="weak")
    same = (views("weak", images, keys) == views("strong", images, keys)).flatten(1).all(1)
    assert same.sum() <= 3
    assert torch.equal(views.uint8("plain", images, keys), images)


# --- the weak view (2.2, 2.12 no. 6) ---


def numpy_weak(image: np.ndarray, key: torch.Tensor, base: int, pad: int, flip: bool) -> np.ndarray:
    """Flip, reflect-pad and cut, from the lanes of the sample."""
    if flip and int(draws.integers(key, base + FLIP, 2)):
        image = image[:, ::-1]
    wide = np.pad(image, [(pad, pad), (pad, pad), (0, 0)], mode="reflect")
    i, j = (int(draws.integers(key, base + lane, 2 * pad + 1)) for lane in (TOP, LEFT))
    return wide[i : i + image.shape[0], j : j + image.shape[1]]


@pytest.mark.parametrize("size, flip", [(8, True), (28, False), (32, True), (33, True)])
def test_weak_is_flip_pad_and_cut(size, flip):
    images, keys = crops(50, size, 3), keys_of(50)
    ours = make(size, flip=flip).uint8("weak", images, keys).permute(0, 2, 3, 1).numpy()
    for image, key, view in zip(images.permute(0, 2, 3, 1).numpy(), keys, ours):
        assert np.array_equal(view, numpy_weak(image, key, WEAK_BASE, int(0.125 * size), flip))


def test_offsets_and_flips_are_uniform():
    column = torch.arange(32, dtype=torch.uint8).expand(1, 1, 32, 32)
    grid = torch.cat([column, column.transpose(2, 3)], 1).expand(9000, 2, 32, 32).contiguous()
    out = make(channels=2).uint8("weak", grid, keys_of(9000))[:, :, 16, 16].int()
    top, left = out[:, 1] - 12, out[:, 0]
    straight = make(channels=2, flip=False).uint8("weak", grid, keys_of(9000))[:, 0, 16, 16].int()
    flipped = left != straight
    assert 0.48 < flipped.double().mean() < 0.52
    assert torch.equal(left[flipped], 31 - straight[flipped])
    both = top * 9 + straight - 12
    assert chisquare(np.bincount(top, minlength=9)).pvalue > 1e-3
    assert chisquare(np.bincount(straight - 12, minlength=9)).pvalue > 1e-3
    assert chisquare(np.bincount(both, minlength=81)).pvalue > 1e-3


def test_weak_without_room_or_flip_is_the_image():
    images = crops(5, 7, 3)
    assert torch.equal(make(7, flip=False).uint8("weak", images, keys_of(5)), images)


def test_normalisation_of_a_view():
    images, keys = crops(6, 32, 3), keys_of(6)
    views = Views(size=32, channels=3, mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7], flip=True)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]))
    expected = (views.uint8("strong", images, keys).float() / 255 - mean) / std
    assert torch.equal(views("strong", images, keys), expected)


@pytest.mark.parametrize("cutout, half", [("auto", 8), (6, 3), (None, 0)])
def test_weak_zero_cutout(cutout, half):
    images, keys = noise(300) // 2 + 100, keys_of(300)
    out = make(labelled="weak-zero-cutout", cutout=cutout, flip=False)("labelled", images, keys)
    base = 64 * ROLES.index("labelled")
    for image, key, view in zip(images, keys, out):
        wide = np.pad(image.numpy(), [(0, 0), (4, 4), (4, 4)])
        i, j = (int(draws.integers(key, base + lane, 9)) for lane in (TOP, LEFT))
        expected = (torch.from_numpy(wide[:, i : i + 32, j : j + 32]).float() / 255 - 0.4) / 0.2
        x, y = (int(draws.integers(key, base + lane, 32)) for lane in (BOX_X, BOX_Y))
        expected[:, max(0, y - half) : y + half, max(0, x - half) : x + half] = 0
        assert torch.allclose(view, expected, atol=1e-6) and torch.equal(view == 0, expected == 0)


# --- whole strong views a second way: Pillow, from the same lanes ---


def pillow_op(image: Image.Image, op: str, v: int, sign: int) -> Image.Image:
    """RA-MC's table (2.5.1) in Pillow's own words, level v of 1..9."""
    plain = {"Identity": lambda im: im, "AutoContrast": ImageOps.autocontrast, "Equalize": ImageOps.equalize}
    if op in plain:
        return plain[op](image)
    if op in ("Brightness", "Color", "Contrast", "Sharpness"):
        return getattr(ImageEnhance, op)(image).enhance(v * 0.9 / 10 + 0.05)
    if op == "Posterize":
        return ImageOps.posterize(image, int(v * 4 / 10) + 4)
    if op == "Solarize":
        return ImageOps.solarize(image, 256 - int(v * 256 / 10))
    if op == "Rotate":
        return image.rotate(sign * int(v * 30 / 10))
    shear, move = sign * v * 0.3 / 10, int(sign * v * 0.3 / 10 * image.size[0])
    matrix = {"ShearX": (1, shear, 0, 0, 1, 0), "ShearY": (1, 0, 0, shear, 1, 0),
              "TranslateX": (1, 0, move, 0, 1, 0), "TranslateY": (1, 0, 0, 0, 1, move)}[op]  # fmt: skip
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


RA_MC = ["AutoContrast", "Brightness", "Color", "Contrast", "Equalize", "Identity", "Posterize", "Rotate", "Sharpness",
         "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY"]  # fmt: skip


def pillow_ra_mc(image: np.ndarray, key: torch.Tensor, flip: bool) -> np.ndarray:
    size, base = image.shape[0], STRONG_BASE
    weak = numpy_weak(image, key, base, int(0.125 * size), flip)
    picture = Image.fromarray(np.ascontiguousarray(weak.squeeze(2) if weak.shape[2] == 1 else weak))
    for pick in range(2):
        lane = base + PICKS + 8 * pick
        op = RA_MC[int(draws.integers(key, lane + OP, 14))]
        if float(draws.uniform(key, lane + APPLY)) < 0.5:
            level, sign = 1 + int(draws.integers(key, lane + LEVEL, 9)), 1 - 2 * int(draws.integers(key, lane + SIGN, 2))
            picture = pillow_op(picture, op, level, sign)
    side = int(0.5 * size)
    ux, uy = (float(draws.uniform(key, base + lane)) * size for lane in (BOX_X, BOX_Y))
    x0, y0 = int(max(0, ux - side / 2)), int(max(0, uy - side / 2))
    box = (x0, y0, min(size, x0 + side), min(size, y0 + side))
    ImageDraw.Draw(picture).rectangle(box, 127 if picture.mode == "L" else (127, 127, 127))
    return np.asarray(picture).reshape(image.shape)


@pytest.mark.parametrize("size, channels, count", [(32, 3, 1000), (28, 1, 400), (8, 1, 400), (33, 3, 200), (96, 3, 60)])
def test_ra_mc_is_pillows(size, channels, count):
    images, keys = crops(count, size, channels), keys_of(count, size)
    ours = make(size, channels).uint8("strong", images, keys).permute(0, 2, 3, 1).numpy()
    for image, key, view in zip(images.permute(0, 2, 3, 1).numpy(), keys, ours):
        assert np.array_equal(view, pillow_ra_mc(image, key, True))


def test_ra_mc_translations_worked_numbers():
    listed = {32: [0, 1, 2, 3, 4, 5, 6, 7, 8], 28: [0, 1, 2, 3, 4, 5, 5, 6, 7], 64: [1, 3, 5, 7, 9, 11, 13, 15, 17],
              96: [2, 5, 8, 11, 14, 17, 20, 23, 25], 8: [0, 0, 0, 0, 1, 1, 1, 1, 2]}  # fmt: skip
    assert {size: list(RandAugment("ra-mc", size, 3).pool["TranslateX"][0]) for size in listed} == listed


def test_pools_worked_numbers():
    pool = {name: RandAugment(name, 32, 3).pool for name in STRONG}
    assert {name: len(p) for name, p in pool.items()} == {
        "ra-mc": 14, "ra-semifl": 15, "ra-semifl-scaled": 15, "ra-torchvision": 14, "ra-torchvision-tensor": 14,
        "ra-fedmatch": 13, "ra-usb": 14, "ra-fixmatch": 14}  # fmt: skip
    assert list(pool["ra-mc"]) == RA_MC
    mc, tv, fm, fix = (pool[n] for n in ("ra-mc", "ra-torchvision", "ra-fedmatch", "ra-fixmatch"))
    assert np.allclose(mc["Color"][0], [0.14, 0.23, 0.32, 0.41, 0.50, 0.59, 0.68, 0.77, 0.86])
    assert mc["Posterize"][0] == [4, 4, 5, 5, 6, 6, 6, 7, 7]
    assert mc["Solarize"][0] == [231, 205, 180, 154, 128, 103, 77, 52, 26]
    pixels = {s: abs(RandAugment("ra-torchvision", s, 3).pool["TranslateY"][0][0]) for s in (8, 28, 32, 64, 96)}
    assert pixels == {8: 1, 28: 3, 32: 4, 64: 8, 96: 13}
    assert tv["Contrast"] == ([1 + float(np.float32(0.26999998))], [1 - float(np.float32(0.26999998))])
    assert np.allclose(fm["ShearX"][0], [0, 0.0333, 0.0667, 0.1, 0.1333], atol=1e-4)
    assert np.allclose(fm["TranslateX"][1], -32 * np.array([0, 0.0222, 0.0444, 0.0667, 0.0889]), atol=2e-3)
    assert fm["Rotate"][1] == [0, 40, 80, 120, 160] and fm["Posterize"][0] == [8, 8, 7, 7, 6]
    assert np.allclose(fm["Solarize"][0], [256, 253.22, 250.44, 247.67, 244.89], atol=6e-3)
    assert np.allclose(fm["Contrast"][1], 1 - np.array([0, 0.0556, 0.1111, 0.1667, 0.2222]), atol=1e-4)
    assert fix["Posterize"][0] == [4, 4, 3, 3, 2, 2, 2, 1, 1] and fix["TranslateX"][1] == [-i for i in range(1, 10)]


# --- distributions (2.12 nos. 4, 5, 10; SemiFL's 2.6 and 2.8) ---


def test_ra_mc_levels_and_apply_rate():
    keys, lane = keys_of(20000), STRONG_BASE + PICKS
    policy = RandAugment("ra-mc", 32, 3)
    level = policy._level(keys, STRONG_BASE, lane)
    assert chisquare(np.bincount(level, minlength=9)).pvalue > 1e-3 and len(np.bincount(level)) == 9
    first, second = policy.steps(keys, STRONG_BASE)
    changed = (first.kernel != 0).double().mean()
    assert abs(changed - 0.5 * 13 / 14) < 0.015
    assert abs(((first.kernel == 0) & (second.kernel == 0)).double().mean() - (1 - 0.5 * 13 / 14) ** 2) < 0.015
    for number in (_KERNEL["color"], _KERNEL["equalize"]):
        assert abs((first.kernel == number).double().mean() - 0.5 / 14) < 0.006


def test_fedmatch_levels():
    keys = keys_of(40000)
    level = RandAugment("ra-fedmatch", 32, 3)._level(keys, STRONG_BASE, STRONG_BASE + PICKS)
    share = np.bincount(level, minlength=5) / len(level)
    assert np.allclose(share, [0.3208, 0.3208, 0.1958, 0.1125, 0.05], atol=0.01)


def test_torchvision_always_applies():
    steps = list(RandAugment("ra-torchvision", 32, 3).steps(keys_of(14000), STRONG_BASE))
    for step in steps:  # only Identity, 1 of 14, leaves the image alone
        assert abs((step.kernel == 0).double().mean() - 1 / 14) < 0.01


def test_usb_values_fill_their_ranges():
    policy = RandAugment("ra-usb", 32, 3)
    step = next(policy.steps(keys_of(28000), STRONG_BASE))
    factor = step.argument[step.kernel == _KERNEL["color"], 0]
    assert 0.05 <= factor.min() < 0.06 and 0.94 < factor.max() <= 0.95 and abs(factor.mean() - 0.5) < 0.02
    bits = step.argument[step.kernel == _KERNEL["posterize"], 0].long()
    assert chisquare(np.bincount(bits, minlength=8)[4:]).pvalue > 1e-3


def test_ra_mc_always_has_its_box():
    base, keys = STRONG_BASE, keys_of(3000)
    box = RandAugment("ra-mc", 32, 3).closing_box(keys, base, "auto").long()
    views = make().uint8("strong", noise(3000), keys)
    for view, (x0, y0, x1, y1) in zip(views[:300], box[:300].tolist()):
        assert (view[:, y0 : y1 + 1, x0 : x1 + 1] == 127).all()
    sides = box[:, 2:].clamp(max=31) - box[:, :2] + 1
    assert sides.min() == 9 and sides.max() == 17
    assert abs(sides.prod(1).double().mean() - 252) < 3


def test_cutout_key():
    images, keys = noise(50) // 4, keys_of(50)
    whole = make(cutout=None).uint8("strong", images, keys)
    assert (whole == 127).flatten(1).sum(1).max() < 3 * 81  # the smallest box is 9 x 9
    small = make(cutout=4).uint8("strong", images, keys)
    box = RandAugment("ra-mc", 32, 3).closing_box(keys, STRONG_BASE, 4).long()
    assert all((v[:, y0 : y1 + 1, x0 : x1 + 1] == 127).all() for v, (x0, y0, x1, y1) in zip(small, box.tolist()))
    assert (box[:, 2:] - box[:, :2]).max() == 4


def test_semifl_constant_views():
    out = make(strong="ra-semifl").uint8("strong", noise(10000), keys_of(10000)).flatten(2)
    constant = (out == out[:, :, :1]).all(2).all(1).double().mean()
    assert abs(constant - 0.1555) < 0.01


def test_semifl_ops_are_equally_often_applied():
    steps = list(RandAugment("ra-semifl", 32, 3).steps(keys_of(15000), STRONG_BASE))
    kernels = torch.cat([s.kernel for s in steps])
    count = lambda name: int((kernels == _KERNEL[name]).sum()) / 15000
    for name in ("autocontrast", "brightness", "paint", "equalize", "invert", "solarize", "x-bilinear", "posterize"):
        assert abs(count(name) - 1 / 15) < 0.01, name
    assert abs(count("affine") - 3 / 15) < 0.015  # Rotate and both translations
    assert abs(count("identity") - 1) < 0.02


def test_semifl_cutout_is_the_lower_right_and_translation_is_black():
    policy, keys = RandAugment("ra-semifl", 32, 3), keys_of(20000)
    step = next(policy.steps(keys, STRONG_BASE))
    box = step.argument[step.kernel == _KERNEL["paint"], :4]
    assert (box[:, 2:] == 32).all() and abs((box[:, :2] == 0).all(1).double().mean() - (21 / 32) ** 2) < 0.05
    assert {abs(v) for v in policy.pool["TranslateX"][0]} == {100}
    scaled = RandAugment("ra-semifl-scaled", 32, 3)
    assert scaled.pool["TranslateX"] == ([9], [-9]) and scaled.pool_side == 16


def test_fedmatch_starts_from_the_raw_image():
    images = crops(400, 32, 3)
    views = make(strong="ra-fedmatch").uint8("strong", images, keys_of(400))
    difference = (views.int() - images.int()).abs().double().mean((1, 2, 3))
    unchanged = (difference < 8).double().mean()
    assert unchanged > 0.02  # six weak or inert picks leave some images in place; a crop would not


# --- names, errors, normalisation ---


def test_unknown_names_are_told_with_a_remedy():
    with pytest.raises(UserError, match="did you mean 'ra-semifl'"):
        make(strong="ra_semifl")
    with pytest.raises(UserError, match="did you mean 'semifl'"):
        normalisation("semifl2", "cifar10", 3)
    with pytest.raises(ValueError, match="not uint8"):
        make()("weak", torch.zeros(2, 3, 28, 28, dtype=torch.uint8), keys_of(2))


def test_normalisation_presets():
    assert normalisation(None, "cifar10", 3) == PRESETS["semifl:cifar10"] == normalisation("feddb", "cifar10", 3)
    assert normalisation("none", "cifar10", 3) == ((0, 0, 0), (1, 1, 1)) == normalisation("fedloke", "svhn", 3)
    assert normalisation("fedrgd", "svhn", 3)[1] == (0.2471, 0.2435, 0.2616)
    assert normalisation(None, "emnist:balanced", 1) == ((0.1307,), (0.3081,))
    assert normalisation(None, "cinic10", 3) == PRESETS["feddure:cinic10"]
    assert normalisation(None, "digits", 1) == ((0.5,), (0.5,))
    assert normalisation(None, "folder:/x", 3) == ((0.5,) * 3, (0.5,) * 3)
    assert normalisation(None, "mnist", 3) == ((0.1307,) * 3, (0.3081,) * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", view_names())
def test_cuda_equals_cpu_and_never_waits(name):
    for size, channels in ((32, 3), (28, 1), (33, 3), (8, 1)):
        images, keys, views = crops(600, size, channels), keys_of(600), make(size, channels, strong=name)
        there = images.cuda()
        views("strong", there, keys)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = views("strong", there, keys)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out.cpu(), views("strong", images, keys))


@pytest.mark.parametrize("name", [*STRONG, "weak", "weak-zero-cutout", "plain"])
def test_any_memory_format(name):
    """What a view writes into is its own, contiguous memory, whatever it is given."""
    views, images, keys = make(strong=name), noise(6), keys_of(6)
    for given in (images.contiguous(memory_format=torch.channels_last), images.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)):
        before = given.clone()
        assert not given.is_contiguous() and torch.equal(views("strong", given, keys), views("strong", images, keys))
        assert torch.equal(views.uint8("strong", given, keys), views.uint8("strong", images, keys)) and torch.equal(given, before)
