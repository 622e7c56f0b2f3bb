"""A node on this machine: the command that joins its federation, kept alive while it is wanted."""

from __future__ import annotations

import sys
from pathlib import Path

from fallow.errors import UserError
from fallow.flower import share
from fallow.flower.processes import free_port


def command(folder: Path) -> list[str]:
    """What starts a SuperNode from its folder: node.yaml, node.key, ca.pem."""
    folder = folder.absolute()
    for name in ("node.yaml", "node.key", "ca.pem"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}", "copy the node's whole folder from the server, nodes/node-N of its federation")
    keys = share.settings(folder / "node.yaml")
    if not keys.get("server"):
        raise UserError(f"{folder / 'node.yaml'} does not say where the server is", "write `server: HOST:PORT`")
    if not keys.get("data"):
        raise UserError(f"{folder / 'node.yaml'} does not say where its images are", "write `data: FOLDER`, FILE.csv or FILE.npz")
    return [
        str(Path(sys.executable).parent / "flower-supernode"), "--superlink", str(keys["server"]), "--root-certificates", str(folder / "ca.pem"),
        "--auth-supernode-private-key", str(folder / "node.key"), "--host", "127.0.0.1", "--port", str(free_port()),
        "--node-config", f"folder='{folder}'",
    ]  # fmt: skip


def ready(log: str) -> bool:
    """Whether a SuperNode's log says that the server has let it in."""
    return "SuperNode ID:" in log
