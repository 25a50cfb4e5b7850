"""A headless Chromium for tests."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NEEDS_BROWSER = pytest.mark.skipif(BROWSER is None, reason="needs chromium, which is not installed")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--remote-debugging-pipe"
).split()


class Browser:
    """A headless browser, spoken to over its debugging pipe (one JSON message per NUL)."""

    def __init__(self, profile):
        # The browser reads at 3 and writes at 4; ends above 10 cannot collide with those.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (*os.pipe(), *os.pipe())]
        inward, self.outward, self.inbox, outward = ends

        def arrange():
            os.dup2(inward, 3)
            os.dup2(outward, 4)

        self.process = subprocess.Popen(
            [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=arrange,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inward)
        os.close(outward)
        self.count, self.buffer, self.events, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.outward, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def receive(self):
        while b"\0" not in self.buffer:
            chunk = os.read(self.inbox, 1 << 20)
            assert chunk, "the browser closed its pipe"
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(line)

    def value(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression, seconds=20.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.value(expression):
                return found
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}")

    def open(self, path, *, width=1280, dark=False):
        """Open a report; return the milliseconds until it was drawn."""
        self.visit(path.as_uri(), width=width, dark=dark)
        return int(self.wait("document.documentElement.dataset.ready"))

    def visit(self, url, *, width=1280, dark=False):
        """Open a page."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # By way of a blank page, so that what is found is not of the page before.
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        if url.startswith("http"):  # the page before may have stored its colours
            origin = "/".join(url.split("/")[:3])
            kind = "local_storage"
            self.call("Storage.clearDataForOrigin", origin=origin, storageTypes=kind)
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === '{url}' && document.readyState === 'complete'")

    def complaints(self, origin="file:"):
        """Exceptions, errors in the log, and requests to anywhere but the origin of the page."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"])
            if event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(params["args"])
            if event.get("method") == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith((origin, "data:", "blob:")):
                    found.append(url)
        return found

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.outward)
        os.close(self.inbox)
