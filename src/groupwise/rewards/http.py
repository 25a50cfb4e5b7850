"""Requests to servers that may be slow or unavailable, or send too much."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from urllib.parse import SplitResult

from groupwise.errors import GroupwiseError

_TRIES = 3
_PAUSE = 0.25  # seconds before the second try, doubled before each further one
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_MOST_BYTES = 4 << 20


class Ending:
    """Ends the requests of a run at once, and keeps it from making others."""

    def __init__(self) -> None:
        self._lock, self._over = threading.Lock(), False
        self._pending: set[Callable[[], None]] = set()

    def end(self) -> None:
        with self._lock:
            self._over, pending = True, list(self._pending)
        for hang_up in pending:
            hang_up()

    @contextlib.contextmanager
    def during(self, hang_up: Callable[[], None]) -> Iterator[None]:
        """Raises TimeoutError if the run has ended; `hang_up` is called when it ends."""
        with self._lock:
            if self._over:
                raise TimeoutError
            self._pending.add(hang_up)
        try:
            yield
        finally:
            with self._lock:
                self._pending.discard(hang_up)


ENDING: ContextVar[Ending | None] = ContextVar("ENDING", default=None)
"""What ends the requests of the run that this thread works for. Threads inherit it by `threads`."""


def threads(count: int, ending: Ending | None) -> ThreadPoolExecutor:
    """Threads whose requests end with a run."""
    return ThreadPoolExecutor(count, initializer=ENDING.set, initargs=(ending,))


class HttpError(GroupwiseError):
    """A server cannot be reached, refused a request, or sent an unexpected reply."""


def post(
    address: SplitResult,
    headers: Mapping[str, str],
    body: bytes,
    *,
    timeout: float,
    where: str,
) -> bytes:
    """The content of a reply with status 200, after as many retries as the time allows. Redirects
    are not followed and proxies of the environment not used.

    Args:
        timeout: seconds for all tries together.
        where: names the server in messages.

    Raises:
        TimeoutError: the time is over, or the run has ended.
        HttpError: the server cannot be reached, refuses, or sends more than 4 MiB.
    """
    deadline, problem = time.monotonic() + timeout, ""
    for attempt in range(_TRIES):
        try:
            status, reason, content = _once(address, headers, body, deadline=deadline)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            problem = f"{where}: cannot be reached ({error or type(error).__name__})."
        else:
            if len(content) > _MOST_BYTES:
                raise HttpError(f"{where}: replied more than {_MOST_BYTES >> 20} MiB.")
            if status == 200:
                return content
            problem = f"{where}: replied {status} {reason}."
            if status not in _RETRIED:
                break
        pause = _PAUSE * 2**attempt
        if attempt + 1 == _TRIES or time.monotonic() + pause >= deadline:
            break
        time.sleep(pause)
    raise HttpError(problem)


def _once(
    address: SplitResult, headers: Mapping[str, str], body: bytes, *, deadline: float
) -> tuple[int, str, bytes]:
    """Status, reason and content of one request. A server that sends a byte at a time renews the
    time-out of a socket with each, so a timer ends the connection."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    secure = address.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(address.hostname or "", address.port, timeout=left)
    over, sockets = threading.Event(), list[socket.socket]()

    def hang_up() -> None:
        over.set()
        for each in sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    timer = threading.Timer(left, hang_up)
    timer.daemon = True
    timer.start()
    ending = ENDING.get()
    try:
        with ending.during(hang_up) if ending else contextlib.nullcontext():
            connection.connect()
            sockets.append(connection.sock)
            if over.is_set():
                raise TimeoutError
            path = f"{address.path}?{address.query}" if address.query else address.path
            connection.request("POST", path, body, dict(headers))
            response = connection.getresponse()
            content = response.read(_MOST_BYTES + 1)
    except (OSError, http.client.HTTPException):
        if over.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
        connection.close()
    if over.is_set():
        raise TimeoutError
    return response.status, response.reason, content
