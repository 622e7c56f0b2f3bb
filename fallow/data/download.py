"""Fetches public files: resumed where a transfer stopped, checked against their official sums, never half-written."""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from fallow.errors import UserError

CHUNK = 1 << 20
TRIES = 3  # in a row without a byte of progress
TIMEOUT = 30.0
NETWORK = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


@dataclass(frozen=True)
class Remote:
    """A public file and where it belongs under data_dir."""

    url: str
    path: str
    md5: str | None = None


def _idx(base: str, folder: str, sums: tuple[str, str, str, str]) -> tuple[Remote, ...]:
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(Remote(f"{base}{p}-ubyte.gz", f"{folder}/{p}-ubyte.gz", md5) for p, md5 in zip(parts, sums))


def _medmnist(sums: dict[str, str]) -> dict[str, tuple[Remote, ...]]:
    base = "https://zenodo.org/records/10519652/files"
    return {
        f"medmnist:{name}": (Remote(f"{base}/{name}.npz?download=1", f"medmnist/{name}.npz", md5),)
        for name, md5 in sums.items()
    }


_KRIZ = "https://www.cs.toronto.edu/~kriz"
_SVHN = "http://ufldl.stanford.edu/housenumbers"
REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (
        Remote(f"{_KRIZ}/cifar-10-python.tar.gz", "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    ),
    "cifar100": (
        Remote(f"{_KRIZ}/cifar-100-python.tar.gz", "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
    ),
    "svhn": (
        Remote(f"{_SVHN}/train_32x32.mat", "svhn/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Remote(f"{_SVHN}/test_32x32.mat", "svhn/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "mnist",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "fashion-mnist",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "emnist": (
        Remote(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "emnist/gzip.zip",
            "58c8d27c78d21e728a6bc7b3cc06412e",
        ),
    ),
    "stl10": (
        Remote(
            "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
            "stl10_binary.tar.gz",
            "91f7769df0f17e558f3565bffb0c7dfb",
        ),
    ),
    "cinic10": (
        Remote(
            "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
            "CINIC-10.tar.gz",
            "6ee4d0c996905fe93221de577967a372",
        ),
    ),
    "tinyimagenet": (
        Remote(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
        ),
    ),
    **_medmnist(
        {
            "pathmnist": "a8b06965200029087d5bd730944a56c1",
            "dermamnist": "0744692d530f8e62ec473284d019b0c7",
            "octmnist": "c68d92d5b585d8d81f7112f81e2d0842",
            "pneumoniamnist": "28209eda62fecd6e6a2d98b1501bb15f",
            "retinamnist": "bd4c0672f1bba3e3a89f0e4e876791e4",
            "breastmnist": "750601b1f35ba3300ea97c75c52ff8f6",
            "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
            "tissuemnist": "ebe78ee8b05294063de985d821c1c34b",
            "organamnist": "866b832ed4eeba67bfb9edee1d5544e6",
            "organcmnist": "0afa5834fb105f7705a7d93372119a21",
            "organsmnist": "e5c39f1af030238290b9557d9503af9d",
        }
    ),
}


def fetch_set(name: str, data_dir: Path) -> None:
    """Every public file of the set that is not there yet."""
    for remote in REMOTES[name]:
        target = data_dir / remote.path
        unzipped = data_dir / remote.path.removesuffix(".gz")  # the readers take idx files either way
        if not target.exists() and not unzipped.exists():
            fetch(remote.url, target, md5=remote.md5)


def fetch(
    url: str,
    target: Path,
    *,
    md5: str | None = None,
    sha256: str | None = None,
    quiet: bool = False,
    pause: float = 1.0,
) -> Path:
    """The file at `url` as `target`; what is unfinished waits in `target.part` for the next call."""
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _progress(target.name, quiet) as progress:
            _complete(url, part, progress, pause)
        _verify(url, part, md5=md5, sha256=sha256)
        os.replace(part, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror or error})",
            "free some space there or choose another data_dir",
        ) from error
    return target


def _complete(url: str, part: Path, progress: Progress, pause: float) -> None:
    """Goes on until the file is whole; gives up after a few tries in a row that brought nothing."""
    fruitless, furthest = 0, _size(part)
    while True:
        try:
            total = _continue(url, part, progress)
            reason = f"the server stopped after {_size(part):,} of {total or 0:,} bytes"
            if total is None or _size(part) == total:
                return
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"the server answered {error.code} {error.reason}"
            if error.code == 416:  # the part is longer than the file: it is not a part of it
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise _unreachable(url, part, reason) from error
        except NETWORK as error:
            reason = str(getattr(error, "reason", None) or error or type(error).__name__)
        fruitless = 0 if _size(part) > furthest else fruitless + 1
        furthest = max(furthest, _size(part))  # a server that starts anew each time makes no progress
        if fruitless == TRIES:
            raise _unreachable(url, part, reason)
        time.sleep(pause * fruitless)


def _continue(url: str, part: Path, progress: Progress) -> int | None:
    """Appends what the server still has; the length of the whole file, None if the server does not say it."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "fallow", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            error.close()
            return have
        raise
    with response:
        resumed = response.status == 206 and (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        start = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length and length.isdigit() else None
        with part.open("ab" if resumed else "wb") as out:
            _copy(response, out, progress, start, total)
    return total


def _copy(response: Any, out: IO[bytes], progress: Progress, done: int, total: int | None) -> None:
    while chunk := response.read(CHUNK):
        out.write(chunk)
        done += len(chunk)
        progress(done, total)
    out.flush()
    os.fsync(out.fileno())


def _verify(url: str, part: Path, **expected: str | None) -> None:
    for kind, wanted in expected.items():
        if wanted is None:
            continue
        with part.open("rb") as file:
            found = hashlib.file_digest(file, kind).hexdigest()
        if found != wanted.lower():
            part.unlink()
            raise UserError(
                f"{url} arrived damaged: its {kind.upper()} is {found}, not {wanted}, so it was deleted",
                "run the same command again, or fetch the file by hand",
            )


def _unreachable(url: str, part: Path, reason: str) -> UserError:
    kept = "run the same command again to go on where it stopped" if _size(part) else "check the network"
    return UserError(f"{url} could not be downloaded ({reason})", f"{kept}, or put the file at {part.with_suffix('')}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Progress(Protocol):
    def __call__(self, done: int, total: int | None) -> None: ...


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[Progress]:
    """A bar on a terminal, silence elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
