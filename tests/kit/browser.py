"""A real headless Chromium, driven over its debugging socket."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.kit import web
from tests.kit.processes import process
from tests.kit.wait import WITHIN_S, until

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--no-first-run", "--remote-debugging-port=0"),
)

# Contrast of two colours as the accessibility guidelines (WCAG) define it.
CONTRAST = """
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
"""
LOW_CONTRAST = f"""
(() => {{{CONTRAST}
  const ground = (node) => {{
    for (; node; node = node.parentElement) {{
      const color = getComputedStyle(node).backgroundColor;
      if (parse(color)[3] !== 0) return parse(color);
    }}
    return [255, 255, 255];
  }};
  const poor = [];
  for (const node of document.querySelectorAll("main *:not(svg *)")) {{
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.disabled || !node.getClientRects().length) continue;
    const ratio = contrast(parse(getComputedStyle(node).color), ground(node));
    if (ratio < 4.5) poor.push(`${{node.tagName}} ${{node.textContent.slice(0, 30)}} ${{ratio.toFixed(2)}}`);
  }}
  return poor;
}})()
"""
"""Texts that WCAG calls too faint to read."""


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One browser tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        """Errors that the page's console reported."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1200, dark: bool = False) -> None:
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Waits until the value of `script` is true, and returns it."""
        return until(lambda: self.evaluate(script), script)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES[key], **text)

    def move(self, x: float, y: float) -> None:
        """Moves the mouse to this place of the window, in pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path) -> None:
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=WITHIN_S))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case "Page.javascriptDialogOpening":
                number = next(self._numbers)
                accept = {"id": number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
                self._socket.send(json.dumps(accept))


@contextmanager
def running(folder: Path) -> Iterator[Browser]:
    """Runs a browser with one tab, whose profile is in `folder`."""
    binary = chromium()
    assert binary is not None
    profile = folder / "chromium"
    command = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with process(command, folder / "chromium.log") as chromium_process:
        address = _address(chromium_process, profile / "DevToolsActivePort")
        with connect(address, max_size=None, open_timeout=WITHIN_S, ping_timeout=None) as socket:
            yield Browser(socket)


def _address(chromium_process: subprocess.Popen[bytes], port_file: Path) -> str:
    """Address of the tab's debugging socket."""

    def port_is_known() -> bool:
        assert chromium_process.poll() is None, "Chromium ended at start"
        return port_file.exists() and bool(port_file.read_text().strip())

    until(port_is_known, "Chromium listens")
    port = port_file.read_text().splitlines()[0]
    targets = web.get(f"http://127.0.0.1:{port}/json/list").json()
    return next(str(target["webSocketDebuggerUrl"]) for target in targets if target["type"] == "page")


_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
