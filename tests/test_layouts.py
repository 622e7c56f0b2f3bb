"""Folders of one's own images: classes or sites, train and test above or within, and who the clients then are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from PIL import Image

import fallow
from fallow.data.sources import Source, in_full, load
from fallow.errors import UserError
from fallow.runs import prepare
from fallow.runs.data import sentences
from fallow.runs.settings import config_hash, resolve


def write(home: Path, *names: str) -> Path:
    """An image under each name; every one has another grey, so that it can be told from the others."""
    for grey, name in enumerate(names, 1):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), grey).save(home / name)
    return home


def held(source: Source, names: list[str]) -> dict[str, tuple[str | None, str | None]]:
    """For each file of `write` its class (None: no label) and its site, `test:` before the name of a test image."""
    found = {}
    for part, split in (("", source.train), ("test:", source.test)):
        for i in range(len(split)):
            label = int(split.labels[i])
            site = split.clients[i] if split.clients else None
            found[part + names[int(split.images[i].flatten()[0]) - 1]] = (None if label < 0 else source.classes[label], site)
    return found


def many(*folders: str, count: int = 5) -> list[str]:
    return [f"{folder}/{i}.png" for folder in folders for i in range(count)]


def test_sites_with_classes_and_unlabelled(tmp_path: Path) -> None:
    names = many("oslo/cat", "oslo/dog", "bern/dog") + ["oslo/unlabelled/u.png", "rome/unlabeled/v.png", "bern/unlabelled/deep/w.png"]
    source = load(f"folder:{write(tmp_path, *names)}")
    assert source.classes == ("cat", "dog") and source.train.clients is not None
    found = held(source, names)
    assert {n.removeprefix("test:"): f for n, f in found.items() if f[0]} == {n: (n.split("/")[1], n.split("/")[0]) for n in names[:15]}
    assert {n: f for n, f in found.items() if f[0] is None} == {
        "oslo/unlabelled/u.png": (None, "oslo"), "rome/unlabeled/v.png": (None, "rome"), "bern/unlabelled/deep/w.png": (None, "bern"),
    }  # fmt: skip
    assert sorted(n.split("/")[1] for n in found if n.startswith("test:")) == ["cat", "dog", "dog"]  # a fifth of five, and of ten
    assert source.said == (f"{tmp_path}: 3 sites (bern, oslo, rome) with the classes cat, dog",)


def test_sites_without_unlabelled_by_the_classes_they_share(tmp_path: Path) -> None:
    source = load(f"folder:{write(tmp_path, *many('oslo/cat', 'oslo/dog', 'bern/dog', 'bern/cat', 'rome/cat'))}")
    assert source.classes == ("cat", "dog") and set(source.train.clients or ()) == {"oslo", "bern", "rome"}
    assert source.said[0].endswith("3 sites (bern, oslo, rome) with the classes cat, dog; layout=classes takes the sites for classes")
    other = load(f"folder:{tmp_path}", layout="classes")
    assert other.classes == ("bern", "oslo", "rome") and other.train.clients is None


@pytest.mark.parametrize("folders", [("cat", "dog"), ("cat/2021", "cat/2022", "dog"), ("cat/siam", "cat/persian", "dog/poodle"), ("cat/images", "dog/images")])
def test_classes_with_and_without_folders_in_them(folders: tuple[str, ...], tmp_path: Path) -> None:
    names = many(*folders)
    source = load(f"folder:{write(tmp_path, *names)}")
    assert source.classes == ("cat", "dog") and source.train.clients is None and source.test.clients is None
    assert all(f == (n.removeprefix("test:").split("/")[0], None) for n, f in held(source, names).items())
    deep = any("/" in folder for folder in folders)
    assert ("layout=sites takes them" in source.said[0]) is deep and "2 classes: cat, dog" in source.said[0]


@pytest.mark.parametrize("names", [
    many("cat/2021", "cat/2022-03", "dog/2021", "dog/2022-03"), many("a/cat", "a/dog", "b/cat"), many("only/cat", "only/dog"),
    many("a/x", "a/y", "b/x", "b/y") + ["a/loose.png"], many("a/unlabelled", "b/cat") + ["b/loose.png"], many("a/x", "a/y", "b/x", "b/y", "c/z"),
])  # fmt: skip
def test_what_is_unclear_is_asked_for_in_a_sentence(names: list[str], tmp_path: Path) -> None:
    write(tmp_path, *names)
    with pytest.raises(UserError) as told:
        load(f"folder:{tmp_path}")
    tops = sorted({n.split("/")[0] for n in names})
    assert str(told.value).startswith(f"{tmp_path} can be read in two ways: {', '.join(tops)} as classes, or as sites with the classes ")
    inner = f", or give the folder {tmp_path / tops[0]} if the sites lie in there" if len(tops) == 1 else ""
    assert told.value.remedy == "say layout=classes or layout=sites" + inner
    if len(tops) > 1:
        assert load(f"folder:{tmp_path}", layout="classes").classes == tuple(tops)
    if not any("loose" in n for n in names):
        assert set(load(f"folder:{tmp_path}", layout="sites").train.clients or ()) == set(tops)


@pytest.mark.parametrize("test", ["test", "test/oslo"])
def test_train_and_test_above_sites(test: str, tmp_path: Path) -> None:
    names = [*many("train/oslo/cat", "train/oslo/dog", "train/bern/cat", "train/bern/dog"), "train/bern/unlabelled/u.png", f"{test}/cat/t.png", f"{test}/dog/t.png"]
    found = held(load(f"folder:{write(tmp_path, *names)}"), names)
    site = "oslo" if "oslo" in test else None
    assert {n: f for n, f in found.items() if n.startswith("test:")} == {f"test:{test}/{c}/t.png": (c, site) for c in ("cat", "dog")}
    assert found["train/bern/unlabelled/u.png"] == (None, "bern") and found["train/oslo/dog/0.png"] == ("dog", "oslo") and len(found) == len(names)


def test_train_and_test_within_sites(tmp_path: Path) -> None:
    names = ["oslo/train/cat/1.png", "oslo/test/cat/2.png", "oslo/unlabelled/3.png", "oslo/train/unlabelled/4.png", "bern/dog/5.png", "bern/test/dog/6.png", "rome/train/dog/7.png"]
    assert held(load(f"folder:{write(tmp_path, *names)}"), names) == {
        "oslo/train/cat/1.png": ("cat", "oslo"), "test:oslo/test/cat/2.png": ("cat", "oslo"), "oslo/unlabelled/3.png": (None, "oslo"),
        "oslo/train/unlabelled/4.png": (None, "oslo"), "bern/dog/5.png": ("dog", "bern"), "test:bern/test/dog/6.png": ("dog", "bern"),
        "rome/train/dog/7.png": ("dog", "rome"),
    }  # fmt: skip


def test_one_test_set_beside_sites_and_beside_classes(tmp_path: Path) -> None:
    names = ["a/cat/1.png", "a/unlabelled/2.png", "b/cat/3.png", "test/cat/4.png"]
    found = held(load(f"folder:{write(tmp_path / 'sites', *names)}"), names)
    assert found["test:test/cat/4.png"] == ("cat", None) and found["b/cat/3.png"] == ("cat", "b") and len(found) == 4
    names = ["cat/1.png", "dog/2.png", "test/dog/3.png"]
    assert set(held(load(f"folder:{write(tmp_path / 'classes', *names)}"), names)) == {"cat/1.png", "dog/2.png", "test:test/dog/3.png"}
    names = many("train", "test0", "test")  # classes of these names, with images in them, are classes
    with pytest.raises(UserError, match="train holds no class folders"):
        load(f"folder:{write(tmp_path / 'both', *names)}")
    assert load(f"folder:{write(tmp_path / 'one', *names[5:])}").classes == ("test", "test0")


@pytest.mark.parametrize(("names", "words"), [
    (["a/cat/1.png", "a/unlabelled/2.png", "a/3.png", "b/cat/4.png"], "layout=classes or layout=sites"),
    (["a/train/cat/1.png", "a/dog/2.png", "a/unlabelled/3.png"], "a/dog lies beside .*a/train; move it into train"),
    (["a/unlabelled/1.png", "b/unlabelled/2.png"], "holds no class folders; make one folder of images per class at the sites"),
    (["a/cat/1.png", "a/unlabelled/2.png", "test/dog/3.png"], "test/dog has no counterpart among the training classes"),
    (["a/cat/1.png", "a/unlabelled/2.png", "test/cat/3.png", "test/unlabelled/4.png"], "holds test images without a label"),
])  # fmt: skip
def test_sites_that_are_not_whole(names: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        load(f"folder:{write(tmp_path, *names)}")


def test_images_beside_the_folders_of_a_site(tmp_path: Path) -> None:
    write(tmp_path, "a/cat/1.png", "a/2.png", "a/3.png", "b/cat/4.png")
    with pytest.raises(UserError, match=r"the site .*/a has 2 images outside of its folders \(2.png is the first\); move them into the folder of a class, or into .*/a/unlabelled"):
        load(f"folder:{tmp_path}", layout="sites")


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    names = [*many("train/cat", "train/dog"), "test/cat/1.png", "valid/cat/2.png", "loose.png"]
    write(tmp_path, *names)
    for name in ("train/cat/logo.svg", "train/cat/notes", "test/film.MP4", "test/film2.mp4", "train/.hidden.svg"):
        (tmp_path / name).write_text("x")
    assert load(f"folder:{tmp_path}").said[1:] == (
        f"{tmp_path}: 2 images outside of these folders are left out (loose.png is the first)",
        f"{tmp_path}: 4 files that are no images Fallow reads are left out (2 .mp4, 1 .svg, 1 without ending; test/film.MP4 is the first)",
    )


# -- clients ---------------------------------------------------------------------------------------------------------------
def prepared(**keys: Any) -> tuple[Any, Source, Any]:
    return prepare(None, {"method": "fedavg", "image": {"size": 8, "fit": "resize"}, **keys})[1:]


def test_sites_are_the_clients(tmp_path: Path) -> None:
    write(tmp_path, *many("oslo/cat", "oslo/dog", "bern/dog", "bern/unlabelled"))
    options, source, federation = prepared(data=str(tmp_path))
    assert federation.names == ("bern", "oslo") and (options.clients, options.partition) == (2, "natural")
    assert options.data == f"folder:{tmp_path}" and options.label_ratio is None  # images without a label are there: the others are used
    assert sentences(options, source) == [f"{tmp_path}: 2 sites (bern, oslo) with the classes cat, dog; each of these is a client (partition=natural)"]
    options, source, federation = prepared(data=str(tmp_path), partition="iid", clients=3)
    assert federation.names == ("0", "1", "2") and "they are mixed, clients are made by partition=iid" in sentences(options, source)[0]
    with pytest.raises(UserError, match=r"clients=3, but the data of .* lies at 2 sites; leave clients out, or mix the sites with partition=iid"):
        prepared(data=str(tmp_path), clients=3)
    assert prepared(data=str(tmp_path), clients=2)[2].names == ("bern", "oslo")


def test_images_of_no_site(tmp_path: Path) -> None:
    write(tmp_path, *many("oslo/cat", "oslo/unlabelled", "bern/cat", "unlabelled"))
    with pytest.raises(UserError, match="belongs to no client"):
        prepared(data=str(tmp_path))
    options, _, federation = prepared(data=str(tmp_path), partition="natural,unassigned=drop")
    assert options.clients == 2 and len(federation.dropped) == 5
    options, _, federation = prepared(data=str(tmp_path), partition="natural,unassigned=drop,min_total=9,small_clients=merge")
    assert options.clients == 1 and set(federation.names[0].split("+")) == {"bern", "oslo"}


def test_a_server_among_the_sites(tmp_path: Path) -> None:
    write(tmp_path, *many("server/cat", "server/dog", "oslo/unlabelled", "bern/unlabelled", "bern/cat"))
    options, _, federation = prepared(data=str(tmp_path), labels="server", method="fixmatch")
    assert federation.names == ("bern", "oslo") and options.clients == 2 and len(federation.server.labelled) == 8


def test_a_csv_with_clients(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(100)]
    rows = [f"{n},{'ab'[i % 2]},{('north', 'south')[i // 50]}" for i, n in enumerate(names)]
    write(tmp_path, *names)
    (tmp_path / "list.csv").write_text("\n".join(["file,label,client", *rows]))
    options, source, federation = prepared(data=str(tmp_path / "list.csv"))
    assert federation.names == ("north", "south") and options.partition == "natural" and options.label_ratio == 0.05
    assert sentences(options, source) == [f"{tmp_path}/list.csv: 2 clients (north, south) with the classes a, b; each of these is a client (partition=natural)"]
    assert prepared(data=f"csv:{tmp_path / 'list.csv'}", partition="iid", clients=4, label_count=8)[2].names == tuple("0123")


# -- names -----------------------------------------------------------------------------------------------------------------
def test_a_path_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, *many("photos/cat", "photos/dog", "mnist/a"))
    Path("list.csv").write_text("file,label\nphotos/cat/0.png,x\nphotos/cat/1.png,x\n")
    Path("own.NPZ").write_bytes(b"")
    assert [in_full(n) for n in ("photos", "./photos", "list.csv", "own.NPZ", "mnist", "digits", "nothing", "folder:photos")] == [
        "folder:photos", "folder:./photos", "csv:list.csv", "numpy:own.NPZ", "mnist", "digits", "nothing", "folder:photos",
    ]  # fmt: skip
    assert load("photos").name == "folder:photos" and load("list.csv").classes == ("x",)
    for name, words in {
        "photo": "there is no data set, folder or file 'photo'; did you mean the folder 'photos'?",
        "phtos/": "there is no data set, folder or file 'phtos/'; did you mean the folder 'photos'?",
        "lst.csv": "there is no data set, folder or file 'lst.csv'; did you mean the file 'list.csv'?",
        "pictures/x": "there is no folder or file 'pictures/x'; check the path; known sets are listed by `fallow list datasets`.",
        "pictures/": "there is no folder or file 'pictures/'; check the path; known sets are listed by `fallow list datasets`.",
        "./pictures": "there is no folder or file './pictures'; check the path; known sets are listed by `fallow list datasets`.",
        "zebras": "there is no data set, folder or file 'zebras'; give the path of your images, or one of the sets that `fallow list datasets` shows.",
        "mnits": "there is no data set, folder or file 'mnits'; did you mean the folder 'mnist', or the set 'mnist'?",
        "cifr10": "there is no data set 'cifr10'; did you mean 'cifar10'?",
    }.items():
        with pytest.raises(UserError) as told:
            load(name)
        assert str(told.value) == words


def test_what_is_typed_and_what_is_printed(tmp_path: Path, fallow_cli: Any) -> None:
    write(tmp_path, *many("photos/oslo/cat", "photos/oslo/dog", "photos/bern/dog", "photos/bern/cat", "photos/bern/unlabelled"))
    words = [f"{k}={v}" for k, v in TINY.items() if k not in ("data", "clients", "active", "label_count")]
    told = fallow_cli("run", "data=photos", "method=fedavg", *words)
    assert told.code == 0, told.err
    assert told.out.startswith("photos: 2 sites (bern, oslo) with the classes cat, dog; each of these is a client (partition=natural)\n")
    assert "fedavg on folder:photos: 2 clients" in told.out
    assert fallow_cli("split", "data=photos").out.startswith("photos: 2 sites (bern, oslo)")
    assert fallow_cli("run", "data=photo").sentence == "there is no data set, folder or file 'photo'; did you mean the folder 'photos'?"


# -- runs of before --------------------------------------------------------------------------------------------------------
def test_new_keys_leave_old_hashes_as_they_were() -> None:
    """The hash of a run that has no such keys, worked out from what is dumped."""
    from fallow.runs.settings import KERNELS, NEWER, UNHASHED

    options = resolve({}, {"method": "fedavg"})[1]
    dumped = {k: v for k, v in options.model_dump(mode="json").items() if k not in UNHASHED and k not in KERNELS and k not in NEWER}
    assert {"layout", "skip_bad"} <= set(NEWER) and not {"rounds", "image"} & set(NEWER)
    assert config_hash(options) == hashlib.sha256(json.dumps(dumped, sort_keys=True).encode()).hexdigest()[:16]
    assert config_hash(resolve({}, {"method": "fedavg", "layout": "sites"})[1]) != config_hash(options)


def test_runs_begun_without_the_key_go_on(tmp_path: Path) -> None:
    run = fallow.run(out=tmp_path, stop_after=1, **TINY | {"method": "fedavg"}).path
    for name in ("config.yaml", "origin.json"):
        text = (run / name).read_text()
        assert "layout" in text
    from fallow.runs.origin import Origin

    origin = Origin.read(run)
    assert origin is not None
    del origin.settings["layout"]
    now = fallow.load(run).config
    origin.check_settings(now, set())
    with pytest.raises(UserError, match=r"config.yaml has layout=sites where the run was begun with layout=auto"):
        origin.check_settings(now.model_copy(update={"layout": "sites"}), set())
