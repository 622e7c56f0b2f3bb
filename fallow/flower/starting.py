"""A node on its own machine: joins its federation from its folder, and joins again when it was thrown out."""

from __future__ import annotations

import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from fallow.errors import UserError
from fallow.flower import folder as folders
from fallow.flower.looks import Looks
from fallow.flower.processes import LOG, bounded, end, environment, free_port, said_since, with_parent
from fallow.flower.worker import Worker

IN = "the node is in"
POLL = 0.2, 1.0  # seconds between looks for a message that the SuperNode has, soon after the last one and later
PATIENCE = 90.0  # a killed node is taken for alive for up to 60 s, and its successor refused
REASONS = {  # what Flower says, and what it means
    "[code: 2001]": ("the server does not know this node's key", "copy the node's folder from the server anew"),
    "[code: 2004]": ("the server does not know this node's key, or still takes it for alive", "wait a minute; else copy the node's folder from the server anew"),
    "CERTIFICATE_VERIFY_FAILED": ("the server's certificate is not of this federation's authority", "copy ca.pem from the server, and compare `server:` in node.yaml"),
    "Connection attempt failed": ("the server cannot be reached", "start it with `fallow federation up`, and compare `server:` in node.yaml"),
}  # fmt: skip


def settings(folder: Path) -> dict[str, Any]:
    """What a node's folder says, if nothing is missing."""
    for name in ("node.yaml", "node.key", "ca.pem"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}", "copy the node's whole folder from the server, nodes/node-N of its federation")
    keys = folders.settings(folder / "node.yaml")
    host, _, port = str(keys.get("server", "")).rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{folder / 'node.yaml'} does not say where the server is", "write `server: HOST:PORT`")
    if not keys.get("data"):
        raise UserError(f"{folder / 'node.yaml'} does not say where its images are", "write `data: FOLDER`, FILE.csv or FILE.npz")
    if (folder / "node.key").stat().st_mode & 0o077:
        raise UserError(f"others may read {folder / 'node.key'}", f"`chmod 600 {folder / 'node.key'}`")
    return keys


def command(folder: Path, port: int, secret: Path) -> list[str]:
    """What starts a SuperNode from its folder: node.yaml, node.key, ca.pem. It hands its messages, on that port, to who knows the secret."""
    keys = settings(folder)
    return [
        sys.executable, "-m", "fallow.flower.supernode", "--superlink", str(keys["server"]), "--root-certificates", str(folder / "ca.pem"),
        "--auth-supernode-private-key", str(folder / "node.key"), "--host", "127.0.0.1", "--port", str(port),
        "--isolation", "process", "--superexec-auth-secret-file", str(secret),
    ]  # fmt: skip


def ready(log: str) -> bool:
    """Whether a SuperNode's log says that the server has let it in."""
    return "SuperNode ID:" in log


def reason(log: str) -> UserError | None:
    """Why a SuperNode has ended, as far as its log says."""
    return next((UserError(*told) for sign, told in REASONS.items() if sign in log), None)


def greet(folder: Path, seconds: float = 10.0) -> None:
    """Whether the server is there, and who it says it is."""
    keys = settings(folder)
    host, _, port = str(keys["server"]).rpartition(":")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    try:
        with socket.create_connection((host, int(port)), timeout=seconds) as plain, context.wrap_socket(plain, server_hostname=host):
            pass
    except ssl.SSLCertVerificationError as e:
        told = REASONS["CERTIFICATE_VERIFY_FAILED"]
        raise UserError(f"{told[0]} ({e.verify_message})", told[1]) from None
    except ssl.SSLError:
        raise UserError(f"{keys['server']} does not speak TLS", "compare `server:` in node.yaml; a federation never runs in plain text") from None
    except OSError as e:
        raise UserError(f"the server {keys['server']} cannot be reached ({e.strerror or e})", REASONS["Connection attempt failed"][1]) from None


def keep_up(folder: Path, tell: Callable[[str], None], patience: float = PATIENCE) -> None:
    """Runs the node until it is told to end; what throws it out for longer is told."""
    folder = folder.absolute()
    settings(folder)  # what is missing, or cannot be read, is told at once
    until, asked = time.monotonic() + patience, Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        with Worker(folder, asked.is_set) as worker:
            worker.check()
            while not asked.is_set():
                try:
                    greet(folder)
                    why = _once(folder, worker, tell, asked)
                    until = time.monotonic() + patience if why is None else until  # it was in
                except UserError as e:
                    why = e
                if asked.is_set():
                    return
                why = why or UserError("the node has ended", f"look into {folder / LOG}")
                if time.monotonic() > until or "authority" in why.cause:
                    raise why
                tell(f"{why.cause}; trying again")
                asked.wait(min(10.0, patience / 5))
    finally:
        signal.signal(signal.SIGTERM, before)


def _once(folder: Path, worker: Worker, tell: Callable[[str], None], asked: Event) -> UserError | None:
    """One life of the SuperNode, whose messages the worker answers; why it was not let in, None if it was."""
    from fallow.flower import pki
    from fallow.flower.porter import Porter

    port, file, home = free_port(), folder / LOG, folder / "home"
    home.mkdir(exist_ok=True)
    secret = secrets.token_bytes(32)
    pki.write_secret(home / "porter.key", secret)
    words = command(folder, port, home / "porter.key")
    tell(" ".join(words))
    with file.open("ab") as log:
        start = log.tell()
        made = subprocess.Popen(
            words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment(home), start_new_session=True, preexec_fn=with_parent
        )
    porter, looks, told = Porter(f"127.0.0.1:{port}", secret, worker.answer), Looks(*POLL), False
    try:
        while made.poll() is None and not asked.is_set():
            if not told and ready(said_since(file, start)):
                told = True
                tell(IN)
            if porter.carry():
                looks.found()
            else:
                bounded(file)
                asked.wait(looks.wait())
    finally:
        end([made.pid], 12.0, made.poll)
        porter.close()
    said = said_since(file, start)
    return None if told or ready(said) else reason(said) or UserError(f"the node ended with exit code {made.returncode}", f"look into {file}")
