"""Checksums of what a run's folder holds, in JSON files that begin with the checksum of their own bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from fallow import disk
from fallow.disk import sha256
from fallow.errors import UserError
from fallow.runs.settings import settings_sha256

Manifest = dict[str, Any]
NAME = "manifest.json"
HEAD, TAIL = b'{"sha256": "', b'", '
RESTORE = "restore it from a copy, or start the run again with `fallow run`"


def sealed(body: Manifest) -> bytes:
    """JSON of `body` whose first entry is the SHA-256 of all bytes behind it."""
    rest = json.dumps(body)[1:].encode()
    return HEAD + sha256(rest).encode() + TAIL + rest


def unsealed(path: Path) -> Manifest:
    """What `sealed` wrote; a UserError where one bit of it is another."""
    data = disk.read(path, RESTORE)
    start = len(HEAD) + 64 + len(TAIL)
    if data[:start] != HEAD + sha256(data[start:]).encode() + TAIL:
        if data.startswith(b'{"round"'):
            cause = f"{path} was written by an older version of Fallow, which kept no checksums of a run's state"
            raise UserError(cause, "go on with the version that began the run, or start it again with `fallow run`")
        raise damaged(path)
    return json.loads(b"{" + data[start:])


def seal(folder: Path, files: Mapping[str, bytes | str]) -> None:
    """A manifest of an export, by which it can be read in the run's place."""
    digests = {name: sha256(data.encode() if isinstance(data, str) else data) for name, data in files.items()}
    body = {"export": True, "config": settings_sha256(folder / "config.yaml"), "files": digests}
    disk.write(folder / NAME, sealed(body))
    disk.sync(folder)


def damaged(path: Path, remedy: str = RESTORE) -> UserError:
    return UserError(f"{path} is damaged", remedy)


def check_files(root: Path, files: Mapping[str, str], remedy: str = RESTORE) -> None:
    """Every file must be there with the bytes that were noted."""
    for name, expected in files.items():
        if sha256(disk.read(root / name, remedy)) != expected:
            raise damaged(root / name, remedy)


def check_settings(config: Path, expected: str | None, alike: Set[str] = frozenset()) -> None:
    """The keys of config.yaml that change a result must be those the run was begun with; digests that are `alike` are of one run."""
    if expected is not None and (has := settings_sha256(config)) != expected and not {has, expected} <= alike:
        remedy = "restore it, and start a new run for other keys (those of device, memory, data_dir, track and checkpoint_every may be changed)"
        raise UserError(f"{config} is damaged, or was changed after the run was begun", remedy)
