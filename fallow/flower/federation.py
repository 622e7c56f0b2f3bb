"""A federation on this machine's side: its keys, its SuperLink, its runs; and a folder for each node to copy to its machine."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fallow import disk
from fallow.errors import UserError
from fallow.flower import pki
from fallow.flower.processes import BIN, Processes, environment, free_port
from fallow.paths import user_path
from fallow.trees import read_yaml, shown

NAME = "federation.yaml"
COUNTS = {"clients": 10_000, "port": 65_535, "link": 65_535}  # the most of each
HOST = re.compile("[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}")
APP = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fallow-node"
version = "1.0.0"
description = "Hands Flower's messages to the Fallow that is installed on the machine"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fallow"

[tool.flwr.app.components]
serverapp = "fallow_node.server:app"
clientapp = "fallow_node.client:app"

[tool.flwr.app.config]
folder = ""
""",
    "fallow_node/__init__.py": "",
    "fallow_node/server.py": "from fallow.flower.server_app import app\n\n__all__ = [\"app\"]\n",
    "fallow_node/client.py": "from flwr.clientapp import ClientApp\n\napp = ClientApp()  # Flower wants one; a node runs its own Fallow\n",
}


class Federation:
    def __init__(self, folder: Path, tell: Callable[[str], None] = print):
        self.folder, self.tell = folder.absolute(), tell
        if not (self.folder / NAME).is_file():
            raise UserError(f"there is no federation in {folder}", f"make one with `fallow federation init {folder} --clients N`")
        keys = read_yaml(self.folder / NAME)
        for name in (*COUNTS, "host", "bind"):
            if name not in keys:
                raise UserError(f"{self.folder / NAME} lacks a key", "make the federation anew")
            _check(name, keys[name], f"{self.folder / NAME} has ")
        self.clients, self.port, self.link = (int(keys[name]) for name in COUNTS)
        self.host, self.bind = keys["host"], keys["bind"]
        self.processes = Processes(self.folder, tell)
        self.env = environment(self.folder / "home")
        self.pki = self.folder / "pki"

    # -- init ----------------------------------------------------------------------------------------------------------
    @staticmethod
    def init(folder: Path, clients: int, host: str = "127.0.0.1", port: int | None = None, bind: str = "127.0.0.1", tell: Callable[[str], None] = print) -> Federation:
        """Makes what is missing; what is there stays, keys above all."""
        folder = user_path(folder).absolute()
        for name, value in (("clients", clients), ("host", host), ("bind", bind), *([] if port is None else [("port", port)])):
            _check(name, value, "")
        with disk.errors_as_user_errors(folder, "choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            there = sorted(path.name for path in folder.iterdir() if not path.name.endswith(".part"))
            if there and NAME not in there:
                raise UserError(f"{folder} is no federation, but {there[0]} lies there", "choose a folder of its own")
            folder.chmod(0o700)
        if not (folder / NAME).exists():
            link = free_port()
            port = port or (link if _is_loopback(host) else 443)
            keys = {"clients": clients, "host": host, "port": port, "bind": bind, "link": port if host == bind else link}
            disk.write(folder / NAME, yaml.safe_dump(keys, sort_keys=False))
        found = Federation(folder, tell)
        if found.clients != clients:
            raise UserError(f"the federation in {folder} has {found.clients} nodes, not {clients}", "make another one in a folder of its own")
        found._make()
        return found

    def _make(self) -> None:
        for name in ("pki", "home", "keys", "server", "runs", "nodes", "logs"):
            (self.folder / name).mkdir(exist_ok=True)
        if not (self.pki / "ca.pem").exists():
            pki.make_authority(self.pki)
        if not (self.pki / "server.pem").exists():
            pki.make_server(self.pki, [self.host, self.bind])
        where = f'address = "{self.bind}:{self.link}"\nroot-certificates = "{self.pki / "ca.pem"}"\n'
        disk.write(self.folder / "home" / "config.toml", f'[superlink]\ndefault = "fed"\n\n[superlink.fed]\n{where}')
        for name, text in APP.items():
            (self.folder / "app" / name).parent.mkdir(parents=True, exist_ok=True)
            disk.write(self.folder / "app" / name, text)
        if not (self.folder / "server" / "server.yaml").exists():
            disk.write(self.folder / "server" / "server.yaml", "# data: FOLDER, FILE.csv or FILE.npz, with the test set; see docs/deploy.md\n")
        for client in range(self.clients):
            self._make_node(client)

    def _make_node(self, client: int) -> None:
        folder, public = self.node_folder(client), self.folder / "keys" / f"node-{client}.pub"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not public.exists() or not (folder / "node.key").exists():
            disk.write(public, pki.make_node(folder))
        shutil.copyfile(self.pki / "ca.pem", folder / "ca.pem")
        keys = read_yaml(folder / "node.yaml") if (folder / "node.yaml").exists() else {}
        keys = {"client": client, "server": f"{self.host}:{self.port}"} | keys
        disk.write(folder / "node.yaml", yaml.safe_dump(keys, sort_keys=False))

    def share(self, run: Path) -> None:
        """Gives server and nodes what they hold in a simulated run, to try a federation out."""
        from fallow.data.federate import Federation as Held
        from fallow.flower import share
        from fallow.runs.data import load_source
        from fallow.runs.folder import RunFolder
        from fallow.runs.settings import stored

        there = RunFolder.existing(run)
        _, options = stored(there.config)
        held, source = Held.load(there.federation), load_source(options)
        if len(held.clients) != self.clients:
            raise UserError(f"the run {run} has {len(held.clients)} clients, and the federation {self.clients} nodes", "make a federation of as many")
        for client in range(self.clients):
            share.write_client(self.node_folder(client), client, source, held)
        share.write_server(self.folder / "server", source, held)

    def node_folder(self, client: int) -> Path:
        return self.folder / "nodes" / f"node-{client}"

    # -- up and down ---------------------------------------------------------------------------------------------------
    def up(self, here: bool = False, patience: float = 60.0) -> None:
        """Starts the SuperLink and lets the nodes' keys in; `here` starts the nodes on this machine, too."""
        if not _is_loopback(self.bind):
            told = f"{self.bind} can be reached from outside, and Flower's Control API, which runs code here and orders all nodes, asks nobody who he is"
            raise UserError(told, "set bind: 127.0.0.1 and put the reverse proxy of docs/deploy.md in front, which lets only nodes' traffic in")
        if self.processes.alive("superlink"):
            self.tell("the SuperLink is up")
        else:
            if not (self.folder / "superlink.db").exists():  # which knows the keys
                disk.remove(self.folder / "registered.json")
            self._start_link(patience)
        self._register()
        if here:
            self._start_nodes(patience)

    def _start_link(self, patience: float) -> None:
        command = [
            str(BIN / "flower-superlink"), "--host", self.bind, "--port", str(self.link), "--disable-runtime-dependency-installation",
            "--ssl-ca-certfile", str(self.pki / "ca.pem"), "--ssl-certfile", str(self.pki / "server.pem"), "--ssl-keyfile", str(self.pki / "server.key"),
            "--enable-supernode-auth", "--database", str(self.folder / "superlink.db"),
        ]  # fmt: skip
        self.processes.start("superlink", command, self.env)
        context, until = ssl.create_default_context(cafile=str(self.pki / "ca.pem")), time.monotonic() + patience
        while True:
            with suppress(OSError), urllib.request.urlopen(f"https://{self.bind}:{self.link}/health", timeout=2, context=context) as answer:
                if answer.status == 200:
                    return
            if not self.processes.alive("superlink") or time.monotonic() > until:
                self.processes.stop("superlink")
                raise UserError(f"the SuperLink did not start ({self.processes.last_words('superlink')})", f"look into {self.processes.log_file('superlink')}")
            time.sleep(0.2)

    def _register(self) -> None:
        """Lets each node's public key in, once."""
        file = self.folder / "registered.json"
        known = self.known() if (self.folder / "superlink.db").exists() else {}
        new = [k for k in range(self.clients) if self.public(k) not in known]
        with ThreadPoolExecutor(4) as pool:
            for client, told in zip(new, pool.map(self._register_one, new)):
                known[self.public(client)] = told
        disk.write(file, json.dumps(known, indent=1))

    def known(self) -> dict[str, str]:
        """The public keys that were let in, and Flower's numbers of their nodes; none where the list is damaged."""
        try:
            found = json.loads(disk.read(self.folder / "registered.json"))
        except (UserError, ValueError, RecursionError):
            return {}
        return {str(key): str(number) for key, number in found.items()} if isinstance(found, dict) else {}

    def public(self, client: int) -> str:
        path = self.folder / "keys" / f"node-{client}.pub"
        words = disk.read(path).decode(errors="replace").split()
        if len(words) < 2:
            raise UserError(f"{path} is damaged", "take the node's folder and this file away, and make them anew with `fallow federation init`")
        return words[1]

    def _register_one(self, client: int) -> str:
        told = self.flwr("supernode", "register", str(self.folder / "keys" / f"node-{client}.pub"), "fed", "--name", f"client-{client}")
        if told.get("success"):
            return str(told["node-id"])
        if "already in use" in str(told.get("error-message")):
            return "known"
        raise UserError(f"the key of node {client} was not let in ({told.get('error-message')})", "look into logs/superlink.log")

    def _start_nodes(self, patience: float) -> None:
        from fallow.flower.starting import IN

        names = []
        for client in range(self.clients):
            name = f"node-{client}"
            if not self.processes.alive(name):
                self.processes.start(name, [sys.executable, "-m", "fallow", "node", "start", str(self.node_folder(client))], os.environ)
                names.append(name)
        until = time.monotonic() + patience + 10.0 * len(names)
        while not all(IN in self.processes.said(name) for name in names):
            dead = [name for name in names if not self.processes.alive(name)]
            if dead or time.monotonic() > until:
                late = dead[0] if dead else next(name for name in names if IN not in self.processes.said(name))
                raise UserError(f"{late} did not start ({self.processes.last_words(late)})", f"look into {self.processes.log_file(late)}")
            time.sleep(0.2)

    def down(self) -> None:
        """Stops the runs, then the nodes of this machine, then the SuperLink; whatever is not there is no mistake."""
        alive = self.processes.noted()
        if "superlink" in alive:
            with suppress(UserError):
                for run in self.runs():
                    if not str(run.get("status")).startswith("finished"):
                        self.flwr("stop", str(run["run-id"]), "fed")
        self.processes.stop(*(name for name in alive if name != "superlink"))
        self.processes.stop("superlink")

    # -- flwr ----------------------------------------------------------------------------------------------------------
    def flwr(self, *words: str, patience: float = 60.0) -> dict[str, Any]:
        """What the `flwr` command answers, which may be that it failed."""
        command = [str(BIN / "flwr"), *words, *(["--format", "json"])]
        self.tell(" ".join(command))
        try:
            done = subprocess.run(command, env=self.env, cwd=self.folder, text=True, capture_output=True, timeout=patience)
        except subprocess.TimeoutExpired:
            raise UserError(f"`flwr {words[0]}` did not end within {patience:g} s", "look into logs/superlink.log") from None
        with suppress(ValueError):
            found = json.loads(done.stdout)
            if isinstance(found, dict):
                return found
        told = " ".join((done.stdout + done.stderr).split())[-300:]
        raise UserError(f"`flwr {words[0]}` failed ({told})", "see `fallow federation status`")

    def runs(self, run: str | None = None) -> list[dict[str, Any]]:
        return list(self.flwr("list", *(["--run-id", run] if run else []), "fed").get("runs") or [])

    def online(self) -> list[dict[str, Any]]:
        return list(self.flwr("supernode", "list", "fed").get("nodes") or [])

    def submit(self, folder: Path) -> str:
        """Has the run whose order lies in a folder carried out; Flower's number of it."""
        told = self.flwr("run", str(self.folder / "app"), "fed", "--run-config", f"folder='{folder}'")
        if not told.get("run-id"):
            raise UserError(f"the run was not taken ({told.get('error-message')})", "see `fallow federation status`")
        return str(told["run-id"])


def _check(name: str, value: Any, where: str) -> None:
    """Refuses what is no count of nodes, no port, no name of a machine."""
    most = COUNTS.get(name)
    good = type(value) is int and 1 <= value <= most if most else isinstance(value, str) and HOST.fullmatch(value) is not None
    if not good:
        wanted = f"a number from 1 to {most:,}" if most else "a name or an address, such as fl.example.org"
        raise UserError(f"{where}{name}: {shown(value) or 'nothing'}", f"give {wanted}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
