"""The run directory: who ran what where, one line of metrics per step, rollouts, evaluations.

Every file is complete after every step. A killed run leaves at most its last line half-written,
which is dropped on reading and resuming.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.errors import RunError, UsageError
from groupwise.types import Completion, ScoredGroups, Scores

PACKAGES = ("groupwise", "torch", "transformers", "tokenizers", "peft", "datasets")
METRICS, SAVED = "metrics.jsonl", "checkpoints"
"""A folder with one of these files holds a run."""

MARK = ".checkpointed"
"""Empty file in the directory of a run that has written a checkpoint."""

EXPERIMENT = "experiment.toml"
"""The plan of an experiment, in the folder that holds its runs and its report."""

RUN_FILES = (
    "config.json",
    METRICS,
    "rollouts",
    "evaluations.jsonl",
    "alarms.jsonl",
    "timeline.jsonl",
    "suspects",
    "journal",
    SAVED,
    "best",
    "final",
    "upload",
    "report.html",
    "trackers.json",
)
"""What a run writes into its directory and, when it starts again, replaces or deletes there."""

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class RunLog:
    """Writes the files of one run.

    config.json          settings, versions, hardware, commit
    metrics.jsonl        one line per step
    rollouts/            step-000010.jsonl: one line per group
    evaluations.jsonl    one line per evaluation
    alarms.jsonl         one line per alert that fired
    timeline.jsonl       one line per step: what each process did, and when
    suspects/            step-000010.json: completions of a step whose gradient was not finite

    Args:
        folder: the run directory; created if it does not exist.
        settings: the resolved configuration.
        resume_at: the step that a resumed run continues from; lines after it are dropped. None
            starts a new run, which refuses a folder that holds one.

    Raises:
        UsageError: the folder holds a run and `resume_at` is None, or cannot be made.
        RunError: the disk is full or the folder went away.
    """

    def __init__(
        self, folder: str | Path, *, settings: Mapping[str, Any], resume_at: int | None = None
    ) -> None:
        self.folder, self.resume_at = Path(folder), resume_at
        if resume_at is None and any((self.folder / name).exists() for name in (METRICS, SAVED)):
            raise UsageError(
                f"output = {str(folder)!r}: already contains a run; continue it with --resume, "
                "or choose another folder with --set output=FOLDER."
            )
        _made(self.folder)
        if resume_at is None:
            # Verdicts of a run that ended in its first step; the rewards may be others by now.
            shutil.rmtree(self.folder / "journal", ignore_errors=True)
            (self.folder / "trackers.json").unlink(missing_ok=True)
        mark = self.folder / MARK
        if not resume_at and mark.is_file() and mark.stat().st_size == 0:
            mark.unlink()
        about = {"config": settings, **surroundings()}
        self._fresh: set[Path] = set()
        text = without_secrets(json.dumps(_plain(about), indent=2))
        self._replace(self.folder / "config.json", text + "\n")
        _made(self.folder / "rollouts")
        self._rewind(resume_at or 0)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; NaN and infinity are written as null."""
        self._append(METRICS, {"step": step, **metrics})

    def evaluation(self, step: int, *results: Mapping[str, Any]) -> None:
        """Append the results of an evaluation, of all splits at once: a kill leaves all or none."""
        self._append("evaluations.jsonl", *({"step": step, **each} for each in results))

    def rollouts(
        self,
        step: int,
        scored: ScoredGroups,
        advantages: Float[Tensor, "prompt group"] | None = None,
    ) -> None:
        """Write every completion of a step, with its reward, parts, status and advantage."""
        lines = (
            json.dumps(_plain(_group_line(step, row, scored, advantages)), ensure_ascii=False)
            for row in range(len(scored.groups))
        )
        path = self.folder / "rollouts" / f"step-{step:06d}.jsonl"
        self._replace(path, "".join(line + "\n" for line in lines))

    def alert(self, step: int, name: str, text: str) -> None:
        """Append an alert that fired."""
        self._append("alarms.jsonl", {"step": step, "alarm": name, "text": text})

    def timeline(
        self,
        step: int,
        spans: Sequence[tuple[str, str, float, float]],
        queue: Mapping[str, int],
        memory: Mapping[str, float],
    ) -> None:
        """Append what processes did since the last step.

        Args:
            spans: process, what it did, start and end in seconds since 1970.
            queue: groups that are being sampled, by where they stand.
            memory: peak of each process, in MB.
        """
        rows = [[who, what, round(start, 3), round(end, 3)] for who, what, start, end in spans]
        row = {"step": step, "spans": rows, "queue": queue, "memory_mb": memory}
        self._append("timeline.jsonl", row)

    def suspects(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write the completions suspected of causing a step without a finite gradient."""
        path = self.folder / "suspects" / f"step-{step:06d}.json"
        _made(path.parent)
        self._replace(path, json.dumps(_plain(list(completions)), ensure_ascii=False, indent=2))

    def files(self) -> list[Path]:
        """The files that were written to since the last call."""
        fresh, self._fresh = sorted(self._fresh), set()
        return fresh

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        text = "".join(json.dumps(_plain(line), ensure_ascii=False) + "\n" for line in lines)
        append_text(self.folder / name, text)
        self._fresh.add(self.folder / name)

    def _replace(self, path: Path, text: str) -> None:
        replace_text(path, text)
        self._fresh.add(path)

    def _rewind(self, step: int) -> None:
        """Drop what was written after a step, so that a resumed run repeats no line."""
        for name in (METRICS, "evaluations.jsonl", "alarms.jsonl", "timeline.jsonl"):
            path = self.folder / name
            if path.exists():
                kept = _lines_until(step, path)
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
                self._replace(path, text)
        for path in (self.folder / "rollouts").glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > step:
                path.unlink(missing_ok=True)


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSON-lines file; a last line that was cut off by a kill is left out.

    Raises:
        RunError: a line before the last one is damaged.
    """
    damaged = None
    for number, line in _parsed(path):
        if damaged is not None:
            raise RunError(f"{path}, line {damaged}: is not JSON; the file is damaged.")
        if line is None:
            damaged = number
        else:
            yield line


def _lines_until(step: int, path: Path) -> list[dict[str, Any]]:
    """The lines of the steps up to one. After a power cut, later lines may hold anything; those up
    to a checkpoint are intact, because they were on disk before it.
    """
    kept, damaged = [], None
    for number, line in _parsed(path):
        if line is None:
            damaged = damaged or number
        elif line["step"] <= step:
            if damaged is not None:
                raise RunError(f"{path}, line {damaged}: is not JSON; the file is damaged.")
            kept.append(line)
    return kept


def _parsed(path: str | Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each line of a JSON-lines file with its number; None for a line without a step."""
    # Only \n ends a line: model text may hold other characters that str.splitlines would split at.
    lines = Path(path).read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        whole = isinstance(found, dict) and isinstance(found.get("step"), int)
        yield number, found if whole else None


def printable(text: str) -> str:
    """Text of a model as it may be shown on a terminal: control characters become visible.

    Line breaks and tabs stay. Escape sequences that would move the cursor, change the title or
    colour the screen lose their first character, and so do marks that reverse the direction.

    Example:
        >>> printable("red: \\x1b[31m")
        'red: \\\\x1b[31m'
    """
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)


def surroundings() -> dict[str, Any]:
    """Kernels, versions, hardware and commit, on which a result depends as well."""
    from groupwise.kernels import active

    cuda = torch.cuda.is_available()
    return {
        "kernels": active().description(torch.device("cuda" if cuda else "cpu")),
        "versions": {"python": platform.python_version()}
        | {name: version for name in PACKAGES if (version := _version(name))},
        "hardware": {
            "system": platform.platform(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            if cuda
            else [],
        },
        "commit": _commit(),
        "command": sys.argv,
    }


def without_secrets(text: str) -> str:
    """Text in which no value of the environment that looks like a secret is left.

    The variable's name decides: one with KEY, TOKEN, SECRET, PASSWORD or CREDENTIAL in it
    and a value of at least eight characters is replaced by `<its name>`.
    """
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, f"<{name}>").replace(json.dumps(value)[1:-1], f"<{name}>")
    return text


def _made(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output = {str(folder)!r}: cannot be made ({error.strerror}).") from None


def replace_text(path: Path, text: str) -> None:
    """Write a whole file next to its old version and swap them: a kill leaves one or the other, and
    a link in its place is replaced instead of followed.

    Raises:
        RunError: the disk is full or cannot be written.
    """
    replace_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Like `replace_text`, for content of any kind.

    Raises:
        RunError: the disk is full or cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with open(new, "xb", opener=no_link) as file:
            file.write(content)
        new.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None


def no_link(name: str, flags: int) -> int:
    """An `opener` for `open` that follows no link."""
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


def append_text(path: Path, text: str) -> None:
    """Append to a file of a run directory, not through a link.

    Raises:
        RunError: the disk is full or cannot be written.
    """
    # A lone surrogate in model text becomes its JSON escape. Links are not followed: a run
    # directory may come from somebody else.
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=no_link) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None


def _group_line(
    step: int, row: int, scored: ScoredGroups, advantages: Tensor | None
) -> dict[str, Any]:
    """One group as a line of a rollout file."""
    group, scores = scored.groups[row], scored.scores
    return {
        "step": step,
        "prompt": {
            "id": group.prompt.id,
            "text": str(group.prompt),
            "answer": group.prompt.answer,
        },
        "completions": [
            {
                "text": completion.text,
                "reward": float(scores.total[row, i]),
                "parts": {name: float(part[row, i]) for name, part in scores.parts.items()},
                "correct": float(scores.correct[row, i]),
                "status": scores.status[row][i].value,
                **_why(scores, row, i),
                "keep": bool(scored.keep[row, i]),
                "advantage": None if advantages is None else float(advantages[row, i]),
                "finish": completion.finish,
                "tokens": completion.own_tokens,
                **_told(completion),
                **({"versions": completion.versions} if len(completion.versions) > 1 else {}),
                "logprobs": [round(float(value), 4) for value in completion.logprobs],
            }
            for i, completion in enumerate(group.completions)
        ],
    }


def _why(scores: Scores, row: int, place: int) -> dict[str, str]:
    """Why a completion was not judged; nothing where it was, or where that is not known."""
    reason = scores.reasons[row][place] if scores.reasons else None
    return {} if reason is None else {"error": reason}


def _told(completion: Completion) -> dict[str, Any]:
    """What an environment did in a completion; nothing without one."""
    if not completion.values:
        return {}
    return {"injected": completion.injected, "values": dict(completion.values)}


def _plain(value: Any) -> Any:
    """Values as JSON has them: no NaN, no infinity, no tuples, no tensors of one number."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The name of the processor, where the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = re.findall(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit of the checkout that groupwise runs from, with "+" where it has changes."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    head = _git("rev-parse", "HEAD")
    return head and head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    """What git prints about this file's folder; None where that fails."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
