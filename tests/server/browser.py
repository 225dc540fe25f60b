"""A headless Chromium, driven over two pipes by its own protocol: a test needs the browser and no package.

Source: the Chrome DevTools Protocol.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 60.0

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FOUND = next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)
"""The browser that is installed."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    " ": (32, " "),
    "ArrowDown": (40, ""),
}


class Browser:
    """A running browser; its own folder is its user's data."""

    def __init__(self, folder: Path) -> None:
        assert FOUND is not None
        said, self._to = _pipe()
        self._from, saying = _pipe()
        actions = [
            (os.POSIX_SPAWN_DUP2, said, 3),
            (os.POSIX_SPAWN_DUP2, saying, 4),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        argv = [FOUND, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._pid = os.posix_spawn(FOUND, argv, os.environ, file_actions=actions, setpgroup=0)
        os.close(said)
        os.close(saying)
        self._n = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Return the result of a command."""
        with self._news:
            self._n += 1
            number = self._n
        said = {"id": number, "method": method, "params": params}
        if session is not None:
            said["sessionId"] = session
        os.write(self._to, json.dumps(said).encode() + b"\0")
        with self._news:
            assert self._news.wait_for(lambda: number in self._answers, PATIENCE_S), method
            answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        found: dict[str, Any] = answer["result"]
        return found

    @contextmanager
    def tab(self, width: int = 1280, height: int = 800, *, early: str = "") -> Iterator[Tab]:
        """Open a tab that shares nothing with others; `early` is a script that runs before those of any page."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)
        at = {"targetId": target["targetId"], "flatten": True}
        session = self.ask("Target.attachToTarget", **at)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.ask(f"{domain}.enable")
        if early:
            tab.ask("Page.addScriptToEvaluateOnNewDocument", source=early)
        tab.resize(width, height)
        try:
            yield tab
        finally:
            self.ask("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        """End the browser and all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._thread.join(PATIENCE_S)
        os.close(self._to)
        os.close(self._from)

    def _read(self) -> None:
        rest = b""
        while part := os.read(self._from, 2**16):
            *messages, rest = (rest + part).split(b"\0")
            for message in map(json.loads, messages):
                with self._news:
                    if "id" in message:
                        self._answers[message["id"]] = message
                    elif tab := self._tabs.get(message.get("sessionId", "")):
                        tab.hear(message["method"], message["params"])
                    self._news.notify_all()

    def wait_for(self, is_so: Any) -> None:
        """Return when it is so; it is asked at each message of the browser."""
        with self._news:
            assert self._news.wait_for(is_so, PATIENCE_S)


class Tab:
    """One tab of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self._n_loaded = 0
        self.complaints: list[str] = []
        """Errors of scripts, and what the page's policy has stopped."""

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """Take an event."""
        if method == "Page.loadEventFired":
            self._n_loaded += 1
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["source"] != "network":
            if params["entry"]["level"] in ("warning", "error"):
                self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(params["args"]))

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command to this tab."""
        return self._browser.ask(method, self._session, **params)

    def open(self, url: str) -> None:
        """Go to an address, and wait until it is loaded with its scripts."""
        n_before = self._n_loaded
        answer = self.ask("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self._browser.wait_for(lambda: self._n_loaded > n_before)

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        """Have the window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def js(self, expression: str) -> Any:
        """Return the value of an expression."""
        said = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.ask("Runtime.evaluate", **said)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        loop = (
            "new Promise((tell) => {{ const look = () => {{ let v; try {{ v = ({0}); }} catch {{ v = null; }}"
            " v ? tell(v) : originalTimeout(look, 10); }}; const originalTimeout = window.untracked ?? setTimeout;"
            " look(); }})"
        )
        return self.js(loop.format(expression))

    def until_text(self, selector: str, text: str) -> None:
        """Return once an element has a text in it."""
        self.until(
            f"document.querySelector({json.dumps(selector)}).innerText.includes({json.dumps(text)})"
        )

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Click into the middle of an element, once it is there, with the mouse."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{found}?.checkVisibility()")
        self.js(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.js(
            f"(() => {{ const b = {found}.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; }})()"
        )
        x, y = box[0] + box[2] / 2, box[1] + box[3] / 2
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            at = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.ask("Input.dispatchMouseEvent", type=kind, **at)

    def write(self, text: str) -> None:
        """Write text where the focus is."""
        self.ask("Input.insertText", text=text)

    def fill(self, selector: str, text: str) -> None:
        """Write text in place of a field's own."""
        self.js(
            f"(() => {{ const f = document.querySelector({json.dumps(selector)}); f.focus(); f.select(); }})()"
        )
        self.write(text)

    def choose(self, selector: str, value: str) -> None:
        """Choose one of a list."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{found}.value = {json.dumps(value)}")
        self.js(f"{found}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key and let it go."""
        code, text = KEYS[key]
        said = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **said)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **said)


def _pipe() -> tuple[int, int]:
    """Return a pipe whose ends are not 3 and 4, which the browser reads and writes."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends[0], ends[1]
