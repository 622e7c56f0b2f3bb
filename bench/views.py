"""Images per second of each view beside the same pipeline in Pillow, one image at a time, in one run.

python -m bench.views [--device cuda] [--size 32] [--images 2048] [--out results/bench/views.json]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from fallow import draws
from fallow.data.randaugment import STRONG, RandAugment
from fallow.data.views import Views, view_names

Point = Callable[[Image.Image, float], Image.Image]


def _affine(*matrix: Callable[[float], float], how: Image.Resampling) -> Point:
    return lambda im, v: im.transform(im.size, Image.Transform.AFFINE, [f(v) for f in matrix], how)


def pillow_ops(shear: Image.Resampling) -> dict[str, Point]:
    one, zero, arg = (lambda v: 1.0), (lambda v: 0.0), (lambda v: v)
    nearest = Image.Resampling.NEAREST
    return {
        "AutoContrast": lambda im, v: ImageOps.autocontrast(im),
        "Equalize": lambda im, v: ImageOps.equalize(im),
        "Invert": lambda im, v: ImageOps.invert(im),
        "Identity": lambda im, v: im,
        "Posterize": lambda im, v: ImageOps.posterize(im, int(v)),
        "Solarize": lambda im, v: ImageOps.solarize(im, v),
        "Rotate": lambda im, v: im.rotate(v),
        "Cutout": cutout,
        "ShearX": _affine(one, arg, zero, zero, one, zero, how=shear),
        "ShearY": _affine(one, zero, zero, arg, one, zero, how=shear),
        "TranslateX": _affine(one, zero, arg, zero, one, zero, how=nearest),
        "TranslateY": _affine(one, zero, zero, zero, one, arg, how=nearest),
        **{
            n: (lambda im, v, n=n: getattr(ImageEnhance, n)(im).enhance(v))
            for n in ("Brightness", "Color", "Contrast", "Sharpness")
        },
    }


def cutout(image: Image.Image, side: float) -> Image.Image:
    width, height = image.size
    x0 = int(max(0, random.uniform(0, width) - side / 2))
    y0 = int(max(0, random.uniform(0, height) - side / 2))
    box = (x0, y0, int(min(width, x0 + side)), int(min(height, y0 + side)))
    image = image.copy()
    ImageDraw.Draw(image).rectangle(box, (127,) * len(image.getbands()) if image.mode == "RGB" else 127)
    return image


def pillow_crop(image: Image.Image, pad: int, flip: bool) -> Image.Image:
    if flip and random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    array = np.asarray(image)
    wide = np.pad(array, [(pad, pad), (pad, pad), (0, 0)][: array.ndim], mode="reflect")
    i, j = random.randint(0, 2 * pad), random.randint(0, 2 * pad)
    return Image.fromarray(wide[i : i + array.shape[0], j : j + array.shape[1]])


def pillow_view(name: str, views: Views) -> Callable[[Image.Image], np.ndarray]:
    """The same work per image, with Python's random numbers, ending in the normalised float32 array."""
    size, pad = views.size, int(0.125 * views.size)
    channel_last = [np.array(v, dtype=np.float32) for v in (views.mean, views.std)]
    variant = STRONG.get(name)
    pool = list(RandAugment(name, size, views.channels).pool.items()) if variant else []
    resampling = Image.Resampling[variant.shear.upper()] if variant else Image.Resampling.NEAREST
    functions = pillow_ops(resampling)

    def make(image: Image.Image) -> np.ndarray:
        if name != "plain" and (variant is None or variant.crop):
            image = pillow_crop(image, pad, views.flip)
        for _ in range(variant.picks if variant else 0):
            op, pair = random.choice(pool)
            values = random.choice(pair)
            value = random.uniform(values[0], values[-1]) if variant.continuous else random.choice(values)
            if random.random() < variant.apply:
                image = functions[op](image, 40.0 if op == "Cutout" else value)
        if variant and variant.cutout != "none":
            image = cutout(image, int(0.5 * size))
        array = np.asarray(image, dtype=np.float32).reshape(size, size, views.channels)
        array = (array / np.float32(255) - channel_last[0]) / channel_last[1]
        if name == "weak-zero-cutout":
            y, x = random.randrange(size), random.randrange(size)
            half = size // 4
            array[max(0, y - half) : y + half, max(0, x - half) : x + half] = 0
        return array.transpose(2, 0, 1)

    return make


def seconds(function: Callable[[], object], device: str, repeats: int = 5) -> float:
    """The best of a few runs, the first left out; on one thread the process' own time, whoever else uses the CPU."""
    own = device == "cpu" and torch.get_num_threads() == 1
    best, clock = float("inf"), time.process_time if own else time.perf_counter
    for attempt in range(repeats + 1):
        start = clock()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        if attempt:
            best = min(best, clock() - start)
    return best


def natural(count: int, size: int, channels: int) -> torch.Tensor:
    from sklearn.datasets import load_sample_image

    photo = Image.fromarray(load_sample_image("china.jpg")).resize((320, 214))
    photo = photo.convert("RGB" if channels == 3 else "L")
    rng = random.Random(0)
    corners = [(rng.randrange(320 - size), rng.randrange(214 - size)) for _ in range(count)]
    crops = [np.asarray(photo.crop((x, y, x + size, y + size))).reshape(size, size, channels) for x, y in corners]
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).contiguous()


def measure(name: str, images: torch.Tensor, device: str, batches: list[int]) -> dict[str, object]:
    channels, size = images.shape[1:3]
    views = Views(size=size, channels=channels, mean=[0.5] * channels, std=[0.25] * channels, flip=True, strong=name)
    keys, there = draws.bits(1, torch.arange(len(images))), images.to(device)
    rate = len(images) / seconds(lambda: views("strong", there, keys), device)
    small = {n: 1e3 * seconds(lambda: views("strong", there[:n], keys[:n]), device, 20) for n in batches}
    make, some = pillow_view(name, views), [image.permute(1, 2, 0).squeeze(2) for image in images[:512]]
    pictures = [Image.fromarray(image.contiguous().numpy()) for image in some]
    theirs = len(pictures) / seconds(lambda: [make(picture) for picture in pictures], "cpu", 3)
    return {"view": name, "images_per_s": rate, "pillow_images_per_s": theirs, "ratio": rate / theirs, "small_ms": small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.ones(7 * 2**20)  # glibc keeps freed memory for reuse only once a large block was freed, as training does
    images = natural(options.images, options.size, options.channels)
    rows = []
    print(f"{options.images} images {options.channels}x{options.size}x{options.size}, {options.device}, "
          f"{options.threads} thread(s)")  # fmt: skip
    print(f"{'view':24}{'images/s':>12}{'Pillow/s':>12}{'ratio':>8}{'10 in ms':>10}{'32 in ms':>10}")
    for name in view_names():
        row = measure(name, images, options.device, [10, 32])
        rows.append(row)
        small = row["small_ms"]
        print(f"{name:24}{row['images_per_s']:12,.0f}{row['pillow_images_per_s']:12,.0f}{row['ratio']:8.1f}"
              f"{small[10]:10.2f}{small[32]:10.2f}")  # fmt: skip
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        record = {**vars(options), "out": None, "device": device, "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
