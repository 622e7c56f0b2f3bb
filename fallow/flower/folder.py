"""What the YAML in a party's folder may say. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fallow.errors import UserError, suggest
from fallow.trees import read_yaml, shown

KEYS = {"client", "server", "data", "name", "flip", "device"}
Keys = dict[str, Any]


def settings(path: Path) -> Keys:
    """The keys of a node's or the server's YAML."""
    keys = read_yaml(path)
    for key in keys:
        if key not in KEYS:
            raise UserError(f"{path} has a key {shown(key)}", suggest(str(key), KEYS))
    if not isinstance(keys.get("data", ""), str):
        raise UserError(f"{path} has data: {shown(keys['data'])}", "give the path of a folder, a .csv or an .npz")
    client = keys.get("client")
    if client is not None and (not isinstance(client, int) or isinstance(client, bool) or client < 0):
        raise UserError(f"{path} has client: {shown(client)}", "give the client's number in the federation, from 0")
    return keys
