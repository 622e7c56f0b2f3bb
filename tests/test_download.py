"""Downloads against a server on this machine that truncates, corrupts, refuses and forgets."""

from __future__ import annotations

import hashlib
import http.server
import re
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from fallow.data import download, sources
from fallow.data.download import REMOTES, Remote, fetch
from fallow.errors import UserError

BODY = bytes(range(256)) * 40
MD5 = hashlib.md5(BODY).hexdigest()


class Server:
    """Serves BODY at any path; `cuts` says after how many bytes each coming answer breaks off."""

    def __init__(self) -> None:
        self.body, self.ranges, self.status, self.told_length = BODY, True, 200, True
        self.cuts: list[int | None] = []
        self.asked: list[str | None] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *_: object) -> None: ...

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/set.bin"

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        self.asked.append(asked)
        if self.status != 200:
            handler.send_error(self.status)
            return
        start = int(re.findall(r"\d+", asked)[0]) if asked and self.ranges else 0
        if start >= len(self.body):
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(self.body)}")
            handler.end_headers()
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.body) - 1}/{len(self.body)}")
        if self.told_length:
            handler.send_header("Content-Length", str(len(self.body) - start))
        handler.end_headers()
        cut = self.cuts.pop(0) if self.cuts else None
        handler.wfile.write(self.body[start:] if cut is None else self.body[start : start + cut])


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def test_whole(server, tmp_path):
    target = tmp_path / "new" / "set.bin"
    assert fetch(server.url, target, md5=MD5, sha256=hashlib.sha256(BODY).hexdigest()) == target
    assert target.read_bytes() == BODY
    assert [path.name for path in target.parent.iterdir()] == ["set.bin"]


def test_without_a_length(server, tmp_path):
    server.told_length = False
    assert fetch(server.url, tmp_path / "set.bin", md5=MD5).read_bytes() == BODY


def test_truncated_body_is_continued_at_once(server, tmp_path):
    server.cuts = [1000, 2000]
    assert fetch(server.url, tmp_path / "set.bin", md5=MD5, pause=0).read_bytes() == BODY
    assert server.asked == [None, "bytes=1000-", "bytes=3000-"]


def test_truncated_for_good_is_told_and_resumed_by_the_next_call(server, tmp_path):
    server.cuts = [1000, 0, 0, 0]
    with pytest.raises(UserError, match=r"stopped after 1,000 of 10,240 bytes.*go on where it stopped"):
        fetch(server.url, tmp_path / "set.bin", md5=MD5, pause=0)
    assert [path.name for path in tmp_path.iterdir()] == ["set.bin.part"]
    server.asked.clear()
    assert fetch(server.url, tmp_path / "set.bin", md5=MD5, pause=0).read_bytes() == BODY
    assert server.asked == ["bytes=1000-"]


def test_server_without_ranges_starts_again(server, tmp_path):
    server.ranges, server.cuts = False, [1000]
    assert fetch(server.url, tmp_path / "set.bin", md5=MD5, pause=0).read_bytes() == BODY
    assert server.asked == [None, "bytes=1000-"]


def test_corrupted_body_is_deleted(server, tmp_path):
    server.body = b"x" + BODY[1:]
    with pytest.raises(UserError, match=f"arrived damaged: its MD5 is .*, not {MD5}"):
        fetch(server.url, tmp_path / "set.bin", md5=MD5)
    assert not list(tmp_path.iterdir())


def test_part_that_is_already_whole(server, tmp_path):
    (tmp_path / "set.bin.part").write_bytes(BODY)
    assert fetch(server.url, tmp_path / "set.bin", md5=MD5).read_bytes() == BODY


def test_part_longer_than_the_file_is_dropped(server, tmp_path):
    (tmp_path / "set.bin.part").write_bytes(BODY + b"more")
    assert fetch(server.url, tmp_path / "set.bin", md5=MD5, pause=0).read_bytes() == BODY


@pytest.mark.parametrize(("status", "asked"), [(404, 1), (503, 3)])
def test_refusals(server, tmp_path, status, asked):
    server.status = status
    with pytest.raises(UserError, match=f"could not be downloaded .*{status}.*put the file at {tmp_path}/set.bin"):
        fetch(server.url, tmp_path / "set.bin", pause=0)
    assert len(server.asked) == asked


def test_nobody_listens(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(UserError, match=r"could not be downloaded \(.*refused.*check the network"):
        fetch(f"http://127.0.0.1:{port}/set.bin", tmp_path / "set.bin", pause=0)


def test_target_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        fetch(server.url, tmp_path / "file" / "set.bin", pause=0)


def test_load_downloads_only_if_asked_and_only_what_is_missing(server, tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    for part in ("train", "t10k"):
        images = struct.pack(">4B3I", 0, 0, 8, 3, 3, 2, 2) + bytes(range(12))
        (tmp_path / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">4BI3B", 0, 0, 8, 1, 3, 7, 8, 9))
    gone = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    server.body = gone.read_bytes()
    gone.unlink()
    files = [
        f"mnist/{p}-ubyte" for p in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    ]
    monkeypatch.setitem(download.REMOTES, "mnist", tuple(Remote(server.url, file) for file in files))
    with pytest.raises(UserError, match="incomplete"):
        sources.load("mnist", tmp_path)
    assert not server.asked
    assert sources.load("mnist", tmp_path, download=True).test.labels.tolist() == [7, 8, 9]
    assert len(server.asked) == 1


def test_table_is_well_formed():
    for name, remotes in REMOTES.items():
        for remote in remotes:
            assert re.fullmatch(r"https?://\S+", remote.url), name
            assert remote.md5 is None or re.fullmatch("[0-9a-f]{32}", remote.md5), name
    sums = [remote.md5 for remotes in REMOTES.values() for remote in remotes if remote.md5]
    assert len(set(sums)) == len(sums)


def test_bar_on_a_terminal(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    fetch(server.url, tmp_path / "set.bin", md5=MD5)
    assert "set.bin" in capsys.readouterr().err
