"""The page of runs that go on, served on loopback: it asks for news and gains rounds without being reloaded."""

from __future__ import annotations

import errno
import hashlib
import json
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fallow.errors import UserError
from fallow.report import payload
from fallow.report.page import page
from fallow.runs import finding, warned
from fallow.said import warn

LOOPBACK = "127.0.0.1"
CONNECTIONS, SECONDS = 64, 10.0  # at a time; for a request to come
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
FILES = ("config.yaml", "metrics.jsonl", "summary.json", "federation.npz", warned.FILE)


class Watch:
    """A server of the page, from construction on; `serve` answers until it is interrupted."""

    def __init__(self, paths: Sequence[str | Path], port: int | None = None):
        self.paths = list(paths)
        for sentence in self.data()["left_out"]:  # what cannot be read is told here rather than in the browser
            warn(sentence)
        watch = self

        class Handler(Answers):
            shown = watch

        try:
            self.server = Server((LOOPBACK, port or 0), Handler)
        except OSError as e:
            cause = "is taken" if e.errno == errno.EADDRINUSE else f"cannot be used ({e.strerror})"
            raise UserError(f"port {port} {cause}", "choose another with --port, or leave it out for a free one") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server.server_port}"

    def serve(self) -> None:
        with suppress(KeyboardInterrupt):  # the way it is ended
            self.server.serve_forever(poll_interval=0.2)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.server.server_close()

    def state(self) -> str:
        """Changes whenever one of the files does, or a run appears."""
        marks = [_mark(run / name) for run in finding.found(self.paths) for name in FILES]
        return hashlib.sha256(" ".join(marks).encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def data(self) -> dict[str, Any]:
        state = self.state()  # taken first: what is written meanwhile is news the next time
        return payload.payload(finding.found(self.paths), live=True) | {"live": True, "state": state}


def _mark(file: Path) -> str:
    try:
        found = file.stat()
    except OSError:
        return f"{file} -"
    return f"{file} {found.st_mtime_ns} {found.st_size}"


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"these runs cannot be shown ({type(error).__name__}: {error}); restore their files."


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, *given: Any):
        self.free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.settimeout(0.2)
            request.sendall(BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Answers(BaseHTTPRequestHandler):
    shown: Watch
    protocol_version = "HTTP/1.1"
    timeout = SECONDS  # of silence

    def handle_one_request(self) -> None:
        """A request that comes byte by byte is cut off as well as one that does not come."""
        self.late = threading.Timer(SECONDS, self._cut)
        self.late.daemon = True
        self.late.start()
        try:
            super().handle_one_request()
        finally:
            self.late.cancel()

    def _cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self.late.cancel()  # it is here
        asked = urlsplit(self.path)
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in (LOOPBACK, "localhost"):  # a page of another site that had its name lead here
            self._send(403, "text/plain", "This server answers to 127.0.0.1 only.")
        elif asked.path == "/":
            self._page()
        elif asked.path == "/runs.json":
            self._news(parse_qs(asked.query).get("have", [""])[0])
        else:
            self._send(404, "text/plain", "There is only the page at /.")

    def _page(self) -> None:
        try:
            self._send(200, "text/html", page(self.shown.data()))
        except Exception as e:  # whatever a run's files hold, the server stands
            self._send(500, "text/plain", _why(e))

    def _news(self, have: str) -> None:
        try:
            told = "" if have and have == self.shown.state() else json.dumps(self.shown.data(), allow_nan=False)
        except Exception as e:
            told = json.dumps({"error": _why(e)})
        self._send(200 if told else 204, "application/json", told)

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """A line for each request would bury the address."""
