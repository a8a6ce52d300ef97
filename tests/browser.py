"""A headless browser for tests, controlled over a pipe, with only the standard library.

Chromium's DevTools protocol is JSON with a zero byte after each message, read from descriptor 3 and
written to descriptor 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATIENCE = 60.0


def find() -> str | None:
    """A browser that can be controlled; `LOWTIDE_BROWSER` is tried first."""
    named = os.environ.get("LOWTIDE_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page. `said`: its console messages and exceptions; `asked`: its network requests."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.said.append(f"{found['type']}: {[a.get('value') for a in found['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(found["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(f"{found['entry']['level']}: {found['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(found["request"]["url"])

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it is rendered."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _PATIENCE
        while self.value("document.documentElement?.dataset.ready") != "true":
            assert time.monotonic() < end, f"the page did not draw itself: {self.said}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, name: str) -> None:
        """Press a key."""
        text = name if len(name) == 1 else ""
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def tab() -> Iterator[Tab]:
    """A new browser with one page; raises if no browser is found."""
    browser = find()
    assert browser is not None
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={home}", "--hide-scrollbars",
            "--no-first-run", "about:blank",
        ]  # fmt: skip
        # The shell moves our pipe ends to the descriptors that the browser uses.
        moved = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", moved, "browser", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Tab(process, ours_out, ours_in)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            process.terminate()
            process.wait(timeout=_PATIENCE)
