"""Drive a headless Chromium over its debugging pipe: no package and no port is needed.

Source: the Chrome DevTools Protocol; ``--remote-debugging-pipe`` reads commands from descriptor 3
and writes answers to 4, each a JSON text that ends with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 60.0  # seconds


def find() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page; a context that ends it."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        ours, theirs = os.pipe(), os.pipe()
        self._in, self._out = theirs[0], ours[1]
        options = (
            "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            f"--remote-debugging-pipe --user-data-dir={self._folder.name}"
        )
        shell = f'exec "$0" {options} about:blank 3<&{ours[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._left = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None

    def __enter__(self) -> Browser:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its result; what happens meanwhile goes to ``events``."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path, *, width: int, height: int = 900) -> None:
        """Show a file in a window of a width, and wait until it is there."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """Return the whole page as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser was silent for {_PATIENCE:.0f} s")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise EOFError(f"the browser ended with {self._process.wait()}")
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message
