"""A headless Chromium, driven through chromedriver's HTTP interface."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs chromium and chromedriver (Debian: chromium chromium-driver)"


class Browser:
    def __init__(self, server: str, options: dict[str, Any]):
        self.server = server
        self.session = f"/session/{self._ask('/session', options)['sessionId']}"

    def _ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.server + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as e:
            raise AssertionError(json.load(e)["value"]["message"]) from None

    def close(self) -> None:
        self._ask(self.session, method="DELETE")

    def open(self, address: str) -> None:
        self._ask(self.session + "/url", {"url": address})

    def js(self, script: str, *arguments: Any) -> Any:
        """What a function body returns."""
        return self._ask(self.session + "/execute/sync", {"script": script, "args": list(arguments)})

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self._ask(self.session + "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """Until a function body returns something true; it fails with what it returned last."""
        end = time.monotonic() + seconds
        while not (found := self.js(script, *arguments)):
            assert time.monotonic() < end, f"{script} is still {found!r}"
            time.sleep(0.1)
        return found

    def size(self, width: int, height: int, phone: bool = False) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)

    def scheme(self, name: str) -> None:
        """What the system asks for: light or dark."""
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def click(self, selector: str) -> None:
        found = self._ask(self.session + "/element", {"using": "css selector", "value": selector})
        self._ask(f"{self.session}/element/{next(iter(found.values()))}/click")

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """The mouse over a share of an element."""
        place = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.left + b.width * arguments[1], b.top + b.height * arguments[2]]"
        self.js("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        left, top = self.js(place, selector, x, y)
        self.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)

    def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        return [e["message"] for e in self._ask(self.session + "/se/log", {"type": "browser"}) if e["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> list[str]:
        """What was asked for since the last call."""
        entries = [json.loads(e["message"])["message"] for e in self._ask(self.session + "/se/log", {"type": "performance"})]
        return [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent" and not e["params"]["request"]["url"].startswith("chrome:")]

    def picture(self, path: Path, whole: bool = False) -> None:
        if whole:
            image = self.cdp("Page.captureScreenshot", captureBeyondViewport=True, clip=self._whole())["data"]
        else:
            image = self._ask(self.session + "/screenshot", method="GET")
        path.write_bytes(base64.b64decode(image))

    def _whole(self) -> dict[str, float]:
        width, height = self.js("const d = document.documentElement; return [d.clientWidth, d.scrollHeight]")
        return {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, ended with the block.

    Its processes may write to the profile for a moment after they were told to end, so a file that is left there fails nothing.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [str(DRIVER), "--port=0"]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            found = Browser(f"http://127.0.0.1:{_port(driver)}", _options(profile))
            yield found
            found.close()
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait(30)


def _port(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if found := re.search(r"successfully on port (\d+)", line):
            return int(found[1])
    raise AssertionError("chromedriver did not start")


def _options(profile: str) -> dict[str, Any]:
    flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", f"--user-data-dir={profile}",
             "--disable-background-networking", "--disable-component-update", "--no-first-run", "--hide-scrollbars", "about:blank"]  # fmt: skip
    chrome = {"binary": CHROMIUM, "args": flags}
    logs = {"browser": "ALL", "performance": "ALL"}
    return {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": logs}}}
