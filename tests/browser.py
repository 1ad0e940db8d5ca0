"""A headless Chromium without an extra package: the DevTools protocol over two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 120.0  # seconds to wait for an answer, on a busy machine


def find_chromium() -> str | None:
    """The path of Chromium; None if it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page in Chromium.

    Attributes:
        messages: What the console said, with errors and warnings of the browser.
        requests: The addresses that the page asked for.
    """

    def __init__(self, path: str, folder: Path) -> None:
        to_browser, self.output = os.pipe()
        self.input, from_browser = os.pipe()
        command = [
            path,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        # Chromium reads from descriptor 3 and writes to 4; the shell moves the pipes there
        moved = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", moved, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number = b"", 0
        self.messages: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def send(self, method, session=None, **parameters):
        """Send a command and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def call(self, method, **parameters):
        """Send a command to the page."""
        return self.send(method, self.session, **parameters)

    def _read(self):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.input], [], [], TIMEOUT)
            assert ready, "Chromium does not answer"
            part = os.read(self.input, 1 << 20)
            assert part, "Chromium ended"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        name, content = event.get("method"), event.get("params", {})
        if name == "Runtime.consoleAPICalled":
            self.messages.append(str([each.get("value") for each in content["args"]]))
        elif name == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(content["exceptionDetails"]))
        elif name == "Log.entryAdded":
            self.messages.append(content["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])

    def open(self, page, width, height=900, scheme="light"):
        """Open a file, or an address, in a window of this size."""
        self.messages.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait_for("document.documentElement !== null")  # it is, for a moment

    def evaluate(self, expression):
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression):
        """Wait until an expression is true."""
        deadline = time.monotonic() + TIMEOUT
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (expression, self.messages)
            time.sleep(0.1)

    def hover(self, x, y):
        """Move the mouse to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start, end):
        """Press the left button at a place, move to another and release it."""
        at = dict(zip("xy", start, strict=True))
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        self.call(
            "Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **at
        )
        at = dict(zip("xy", end, strict=True))
        if start != end:
            self.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **at)
        self.call(
            "Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **at
        )

    def click(self, selector):
        """Click the middle of an element, as a person would: what lies over it is hit instead."""
        self.drag(self.middle(selector), self.middle(selector))

    def middle(self, selector):
        """Scroll an element into sight and return the place of its middle in the window."""
        return self.evaluate(
            f"""(() => {{
              const found = document.querySelector({json.dumps(selector)});
              found.scrollIntoView({{ block: "center", behavior: "instant" }});
              const box = found.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )

    def press(self, key):
        """Press a key, such as "ArrowDown", "Tab" or "+"."""
        codes = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
        codes |= {"ArrowDown": 40, " ": 32}
        pressed = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        if len(key) == 1 or key == "Enter":
            pressed["text"] = "\r" if key == "Enter" else key
        self.call("Input.dispatchKeyEvent", type="keyDown", **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def screenshot(self, path):
        """Write a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self):
        """End the browser."""
        self.process.kill()
        self.process.wait()
        os.close(self.input)
        os.close(self.output)
