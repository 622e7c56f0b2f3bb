"""`fallow check`: what it counts, what it finds wrong, where it writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fallow.data import check_picture, checking, sources
from fallow.data.checking import by_class, by_site, by_size, check, facts
from fallow.data.readers.opening import ORIENTATION


def noise(seed: int, height: int = 8, width: int = 8) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def save(path: Path, image: Image.Image, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **how)
    return path


def sites(home: Path) -> Path:
    """At oslo 6 cats and 5 dogs, at bern 5 dogs and 2 without a label, 5 of each to test with."""
    seeds = iter(range(1000))
    for place, count in {"oslo/cat": 6, "oslo/dog": 5, "bern/dog": 5, "bern/unlabelled": 2, "test/cat": 5, "test/dog": 5}.items():
        for i in range(count):
            save(home / place / f"{i}.png", noise(next(seeds)))
    return home


def told(home: Path, **how: Any) -> list[str]:
    return [f"{cause}; {remedy}." for cause, remedy in check(f"folder:{home}", **how).problems()]


def test_counts(tmp_path: Path) -> None:
    home = sites(tmp_path)
    save(home / "oslo" / "cat" / "wide.png", noise(77, 20, 60).convert("L"))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    save(home / "bern" / "dog" / "turned.png", noise(78, 10, 30), exif=exif)  # seen 30 high and 10 wide
    c = check(f"folder:{home}")
    assert c.problems() == [] and c.said[0].endswith("2 sites (bern, oslo) with the classes cat, dog")
    assert by_site(c) == [("site", "labelled", "unlabelled", "test", "classes"), ("bern", "6", "2", "0", "1"), ("oslo", "12", "0", "0", "2"), ("(none)", "0", "0", "10", "2")]
    assert [row[:5] for row in by_class(c)] == [("class", "labelled", "test", "at bern", "at oslo"), ("cat", "7", "5", "0", "7"), ("dog", "11", "5", "6", "5")]
    assert [len(row[5]) for row in by_class(c)[1:]] == [round(30 * 7 / 11), 30]
    assert by_size(c)[1:] == [("width", "8", "8", "60"), ("height", "8", "8", "30"), ("width / height", "0.33", "1.00", "3.00")]
    assert facts(c) == ["channels: 1 grey, 29 colour (all are read as colour)", "turned upright by EXIF: 1"]


def test_the_same_image_twice(tmp_path: Path) -> None:
    home = sites(tmp_path)
    exact = (home / "oslo" / "cat" / "0.png").read_bytes()
    (home / "oslo" / "cat" / "copy.png").write_bytes(exact)
    assert told(home) == ["1 image is there more than once (oslo/cat/0.png = oslo/cat/copy.png); keep one of each."]
    Image.open(home / "oslo" / "cat" / "1.png").save(home / "oslo" / "dog" / "of_a_cat.bmp")  # the same pixels in another file
    Image.open(home / "oslo" / "dog" / "1.png").save(home / "bern" / "dog" / "elsewhere.bmp")
    Image.open(home / "bern" / "dog" / "2.png").save(home / "test" / "dog" / "leak.bmp")
    Image.open(home / "bern" / "unlabelled" / "1.png").save(home / "test" / "cat" / "leak.bmp")
    assert told(home) == [
        "2 images are both in the training and in the test set, 2 of them as other files with the same pixels (bern/dog/2.png = test/dog/leak.bmp is the first);"
        " remove them from one of the two, or the accuracy is too high.",
        "1 image has different labels in different places, 1 of them as other files with the same pixels (oslo/cat/1.png = oslo/dog/of_a_cat.bmp); keep the right one.",
        "1 image is at more than one site, 1 of them as other files with the same pixels (bern/dog/elsewhere.bmp = oslo/dog/1.png);"
        " keep each at one site, unless the sites really share them.",
        "1 image is there more than once (oslo/cat/0.png = oslo/cat/copy.png); keep one of each.",
    ]
    almost = np.asarray(Image.open(home / "oslo" / "cat" / "5.png")).copy()
    almost[0, 0, 0] ^= 1
    save(home / "oslo" / "cat" / "almost.png", Image.fromarray(almost))
    assert len(told(home)) == 4


def test_turned_by_exif_it_is_the_same_picture(tmp_path: Path) -> None:
    home, picture, exif = sites(tmp_path), noise(5000, 10, 30), Image.Exif()
    exif[ORIENTATION] = 6
    save(home / "oslo" / "cat" / "camera.png", picture, exif=exif)
    save(home / "oslo" / "cat" / "upright.png", picture.transpose(Image.Transpose.ROTATE_270))
    assert told(home)[0].startswith("1 image is there more than once, 1 of them as other files with the same pixels (oslo/cat/camera.png = oslo/cat/upright.png)")


def test_files_that_are_not_right(tmp_path: Path) -> None:
    home = sites(tmp_path)
    (home / "oslo" / "cat" / "0.png").write_bytes(b"")
    (home / "test" / "cat" / "0.png").write_bytes((home / "test" / "cat" / "0.png").read_bytes()[:80])
    for name in ("oslo/cat/logo.svg", "oslo/film.mp4", "notes.txt", "oslo/list.csv"):
        (home / name).write_text("x")
    save(home / "loose.png", noise(9000))
    found = told(home)
    assert found[0].startswith("2 of 28 files cannot be read (oslo/cat/0.png: is empty; test/cat/0.png: is truncated or not an image")
    assert found[0].endswith("replace or remove them, or run with --skip-bad.")
    assert found[1] == "2 files are in no format that Fallow reads (1 .svg, 1 .mp4; oslo/cat/logo.svg is the first); save them as PNG or JPEG, or remove them."
    assert found[2].startswith("1 image lies outside of the folders that count (loose.png is the first); ")
    assert found[3] == "1 of 2 classes has fewer than 5 test images (cat has 4); move some there, or trust no accuracy of the class." and len(found) == 4
    assert any(fact == "other files: 1 .txt, 1 .csv" for fact in facts(check(f"folder:{home}")))
    skipping = check(f"folder:{home}", skip_bad=True)
    assert len(skipping.problems()) == 3 and "left out, since they cannot be read: 2 (oslo/cat/0.png, test/cat/0.png)" in facts(skipping)


def test_names_that_differ_by_case_and_few_images(tmp_path: Path) -> None:
    home = sites(tmp_path)
    save(home / "oslo" / "Dog" / "x.png", noise(9100))
    save(home / "oslo" / "cat" / "A.png", noise(9101))
    save(home / "oslo" / "cat" / "a.png", noise(9102))
    if len(os.listdir(home / "oslo")) < 3:
        pytest.skip("this disk does not tell case")
    found = told(home)
    assert found[0] == "2 names differ only by case (oslo/Dog and oslo/dog are the first); rename them: on some disks they are one."
    assert found[1].startswith("1 of 3 classes has fewer than 5 labelled training images (Dog has 1); ")
    assert found[2].startswith("1 of 3 classes has fewer than 5 test images (Dog has 0); ")


def test_a_csv_and_data_that_are_no_files(tmp_path: Path) -> None:
    for i in range(12):
        save(tmp_path / f"{i}.png", noise(i))
    rows = [f"{i}.png,{'ab'[i % 2]},{'n' if i < 6 else 's'},{'test' if i > 9 else ''}" for i in range(12)]
    (tmp_path / "list.csv").write_text("\n".join(["file,label,client,split", *rows, "3.png,b,s,"]))
    c = check(str(tmp_path / "list.csv"))
    assert by_site(c)[1:] == [("n", "6", "0", "0", "2"), ("s", "5", "0", "2", "2")]
    assert next(cause for cause, _ in c.problems()) == "1 image is at more than one site (3.png = 3.png)"
    digits = check("digits")
    assert by_site(digits)[1] == ("all", "1,500", "0", "297", "10") and digits.problems() == [] and facts(digits) == ["channels: 1,797 grey, 0 colour"]
    source = sources.load("digits")
    pixels = np.concatenate([source.train.images.numpy()[:20], source.train.images.numpy()[:1]])
    np.savez(tmp_path / "own.npz", images=pixels[:, 0], labels=np.zeros(21, int), test_images=pixels[:6, 0], test_labels=np.zeros(6, int))
    assert check(str(tmp_path / "own.npz")).problems()[0][0] == "6 images are both in the training and in the test set (train/0 = train/20 = test/0 is the first)"


@pytest.mark.parametrize("end", ["png", "svg"])
def test_the_command(end: str, tmp_path: Path, fallow_cli: Any) -> None:
    sites(tmp_path / "photos")
    told = fallow_cli("check", "photos", "--picture", f"p.{end}")
    assert told.code == 0 and told.out.startswith("photos: 2 sites (bern, oslo) with the classes cat, dog\n") and "no problem found" in told.out and "█" in told.out
    assert Path(f"p.{end}").stat().st_size > 5000
    Path("photos/oslo/cat/0.png").write_bytes(b"")
    broken = fallow_cli("check", "data=photos", "--picture", f"p.{end}")  # over its own picture
    assert broken.code == 1 and "problem 1 of 1: 1 of 28 files cannot be read (oslo/cat/0.png: is empty); replace or remove them, or run with --skip-bad." in broken.out
    assert fallow_cli("check", "photos", "--skip-bad").code == 0 and fallow_cli("check", "photos", "skip_bad=true", "layout=sites").code == 0
    assert Path("check-photos.png").is_file()
    Path("mine.png").write_bytes(b"mine")
    assert fallow_cli("check", "photos", "--picture", "mine.png").sentence.startswith("mine.png is there and was not made by `fallow check`; ")
    assert Path("mine.png").read_bytes() == b"mine"
    assert fallow_cli("check").sentence == "no data set is named; write for example fallow check photos."
    assert fallow_cli("check", "photos", "rounds=3").sentence == "rounds is no key of fallow check; known are layout, skip_bad, data_dir."
    assert fallow_cli("check", "photo").sentence.startswith("there is no data set, folder or file 'photo'; did you mean the folder 'photos'?")
    assert fallow_cli("check", "photos", "--picture", "p.pdf").sentence.startswith("a picture cannot be written as 'p.pdf'; ")


def test_pipes_are_never_opened_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    home = sites(tmp_path)
    os.mkfifo(home / "oslo" / "cat" / "pipe.png")
    assert check(f"folder:{home}").problems() == [] and "no plain files and are left out (pipe.png is the first)" in caplog.text
    monkeypatch.setattr(checking.images, "LARGE", 10)
    monkeypatch.setattr("fallow.limits.available", lambda: 1 << 20)
    monkeypatch.setattr(checking.images, "COPIES", 1 << 20)
    from fallow.errors import UserError

    with pytest.raises(UserError, match=r"cannot be used: decoding 8x8 pixels takes 64.0 MiB"):
        check(f"folder:{home}")


def test_few_labels_are_seen_beside_many_images_without(tmp_path: Path) -> None:
    """The classes' bars have a scale of their own, and a number is never under the mark of the test images."""
    from matplotlib.figure import Figure

    home = sites(tmp_path)
    for i in range(90):
        save(home / "bern" / "unlabelled" / f"more{i}.png", noise(2000 + i))
    for i in range(5):
        save(home / "test" / "cat" / f"more{i}.png", noise(3000 + i))
    axis = Figure().subplots()
    check_picture._counts(axis, check(f"folder:{home}"))
    assert 10 < axis.get_xlim()[1] < 15  # 6 and 10 labelled, 10 and 5 to test with, 92 without a label
    assert [(text.get_text(), text.xy[0]) for text in axis.texts] == [("6", 6), ("10", 10)]
    assert check_picture.NUMBER * axis.get_xlim()[1] < 10 - 6


def test_how_many_images_have_a_size_is_seen_where_there_are_few_sizes(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    home = sites(tmp_path)
    for i, (height, width) in enumerate(((20, 60), (30, 40), (40, 30), (50, 50))):
        save(home / "oslo" / "cat" / f"size{i}.png", noise(4000 + i, height, width))
    axis = Figure().subplots()
    check_picture._sizes(axis, check(f"folder:{home}"))
    areas = dict(zip(map(tuple, axis.collections[0].get_offsets().tolist()), axis.collections[0].get_sizes()))
    assert areas[8, 8] - 12 == pytest.approx(28 * (areas[60, 20] - 12)) and len(areas) == 5  # 28 images of 8x8
    assert axis.get_title("left").startswith("sizes: 8x8, ") and axis.get_title("left").endswith(" and 3 more")


def test_names_of_pictures() -> None:
    assert [checking.plain(name) for name in ("folder:a/b c", "photos", "emnist:digits", "csv:x/list.csv")] == ["b-c", "photos", "emnist-digits", "list.csv"]
