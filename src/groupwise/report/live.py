"""A run's report as a local page that follows the run while it trains."""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from groupwise.errors import GroupwiseError, UsageError
from groupwise.report.page import content_hash, write_run_report

WATCHED = ("metrics.jsonl", "evaluations.jsonl", "final")
"""Files that change when there is something new to show."""
EVERY_MS = 2000
HOSTS = ("127.0.0.1", "localhost")
"""Names of this machine under which the page is served."""
FOLLOW = """
(() => {
  const shown = %s;
  setInterval(async () => {
    try {
      const now = await (await fetch("/version")).json();
      if (now !== shown) location.reload();
    } catch { /* the command was ended; the page stays */ }
  }, %d);
})();
"""
WAITING = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{name}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<style>
  body {{ font: 1rem/1.5 system-ui; margin: 4rem auto; max-width: 36rem; padding: 0 1rem }}
</style>
<h1>{name}</h1><p>Nothing to show yet. This page becomes the report after the first step.</p>
<p><small>{said}</small></p>
"""
"""The page of a run without a step."""


class LivePage:
    """The newest report of a run.

    Args:
        run_dir: the run directory, which is only read.

    Raises:
        UsageError: there is no such folder.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir)
        if not self.folder.is_dir():
            raise UsageError(
                f"run = {str(run_dir)!r}: must be a run directory; the folder does not exist."
            )
        self._lock = Lock()
        self._made: tuple[str, str] = ("", "")

    def version(self) -> str:
        """Changes with every step and evaluation of the run."""
        found = []
        for name in WATCHED:
            with suppress(OSError):
                about = (self.folder / name).stat()
                found.append(f"{name}:{about.st_size}:{about.st_mtime_ns}")
        return " ".join(found)

    def page(self) -> str:
        """The report, which reloads itself when the run has got further."""
        with self._lock:
            version = self.version()
            if version != self._made[0] or not version:
                self._made = (version, self._built(version))
            return self._made[1]

    def _built(self, version: str) -> str:
        code = FOLLOW % (json.dumps(version), EVERY_MS)
        follow = f"<script>{code}</script>"
        with tempfile.TemporaryDirectory() as folder:
            try:
                path = write_run_report(self.folder, Path(folder) / "report.html")
            except GroupwiseError as error:
                begun = (self.folder / "metrics.jsonl").exists()
                said = html.escape(str(error)) if begun else ""
                return WAITING.format(name=html.escape(self.folder.name), said=said) + follow
            text = path.read_text(encoding="utf-8")
        # The report's content security policy allows its own script alone, and no connections.
        allowed = f"connect-src 'self'; script-src '{content_hash(code)}' '"
        head, end, tail = text.replace("script-src '", allowed, 1).rpartition("</body>")
        return f"{head}{follow}{end}{tail}"


def serve(page: LivePage, *, port: int, started: Callable[[str], None]) -> None:
    """Serve the page on this machine until the process is interrupted.

    Args:
        port: 0 takes a free one.
        started: called with the address.

    Raises:
        UsageError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page elsewhere may let its own name stand for this machine (DNS rebinding) and so
            # read what is served here; its requests still carry that name.
            if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS:
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            elif self.path == "/version":
                self._answer(json.dumps(page.version()), "application/json")
            elif self.path == "/":
                self._answer(page.page(), "text/html; charset=utf-8")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _answer(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--port = {port}: cannot be used ({error}); 0 chooses a free port."
        ) from None
    with server:
        server.daemon_threads = True
        started(f"http://127.0.0.1:{server.server_address[1]}/")
        server.serve_forever()
