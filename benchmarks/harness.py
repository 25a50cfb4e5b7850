"""What the benchmarks share: worker processes, turns, figures with their range, hardware, output.

Every side of a comparison runs in a process of its own, started the same way and with its own
Python where its packages need one. The sides take turns, in an order that changes from one repeat
to the next, so that a drift of the machine's speed cancels out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from groupwise.cli.waiting import wait_policy

HERE = Path(__file__).resolve().parent
PAUSE_S = 0.3
"""Between turns: threads of the side before still spin for a moment after their last task."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "WANDB_DISABLED": "true",
    "TOKENIZERS_PARALLELISM": "false",
}


@cache
def waiting() -> dict[str, str]:
    """How the threads of our sides wait. Looked up before the first side starts: the second one
    would take the first for another program."""
    return wait_policy()


class WorkerError(Exception):
    """A side of a comparison failed; the message ends with the last lines it wrote."""


class Worker:
    """A process that answers messages, one JSON object a line.

    Args:
        script: path below `root`.
        spec: its settings.
        python: interpreter of its environment; this one's by default.
        root: folder of the benchmarks; that of another commit brings its own `src`.
    """

    def __init__(
        self,
        script: str,
        spec: Mapping[str, Any],
        *,
        python: str | Path = sys.executable,
        root: Path = HERE,
    ) -> None:
        self.script = script
        self.folder = tempfile.TemporaryDirectory(prefix="groupwise-benchmark-")
        place = Path(self.folder.name)
        (place / "spec.json").write_text(json.dumps({**spec, "folder": str(place / "run")}))
        self.log = place / "log"
        own = python == sys.executable
        time.sleep(PAUSE_S)  # Threads of this process would be taken for others.
        paths = [str(root / "peers")]
        if root != HERE:
            paths.append(str(root.parent / "src"))
        elif own:
            paths.append(os.environ.get("PYTHONPATH", ""))
        environment = {
            **os.environ,
            **QUIET,
            **(waiting() if own else {}),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": str(spec["threads"]),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), str(root / script), str(place / "spec.json")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )

    def ask(self, what: str, **message: Any) -> dict[str, Any]:
        """Send a message and wait for its answer.

        Raises:
            WorkerError: the process ended instead.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        line = ""
        try:
            self.process.stdin.write(json.dumps({"do": what, **message}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            tail = self.log.read_text(errors="replace").splitlines()[-12:]
            raise WorkerError(f"{self.script} ended while asked to {what!r}:\n" + "\n".join(tail))
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


def start(
    stack: ExitStack, script: str, spec: Mapping[str, Any], *, python: str | Path = sys.executable
) -> tuple[Worker, dict[str, str]]:
    """A worker that is ready, and the versions of its packages."""
    worker = stack.enter_context(Worker(script, spec, python=python))
    return worker, worker.ask("hello")["versions"]


def environment(name: str, variable: str, folder: str) -> Path | None:
    """The Python of a peer's own environment, or None, with a line that says how to get it."""
    path = Path(os.environ.get(variable) or HERE.parent / folder / "bin" / "python")
    if path.exists():
        return path
    say(f"{name}: left out, there is no {path}; make {folder.removeprefix('.venv-')}-env, or set "
        f"{variable}")  # fmt: skip
    return None


def turns(
    sides: Mapping[str, Callable[[int], dict[str, Any]]], *, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Let the sides take turns; the order moves on by one with every repeat.

    Returns:
        The answers of every side, one per repeat.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    names = list(sides)
    for repeat in range(repeats):
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            answers[name].append(sides[name](repeat))
            say(f"{name}, {repeat + 1} of {repeats}: {time.perf_counter() - start:.3g} s")
    return answers


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Median and range of the quotients, repeat by repeat."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def of(answers: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """One figure of every repeat."""
    return [float(answer[name]) for answer in answers]


def stages(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median seconds of every stage."""
    names = answers[0]["stages"]
    return {name: statistics.median(a["stages"][name] for a in answers) for name in names}


def arguments(about: str, cases: Sequence[str]) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=about.split("\n\n")[0], epilog="cases: " + " ".join(cases)
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--cases", help="only these, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="of each side (default 5)")
    parser.add_argument(
        "--threads", type=int, default=cores(), help="CPU threads of each side (default: all cores)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it runs; says nothing else"
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="beside so many busy processes (default 0)"
    )
    return parser


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes beside the benchmark that never wait."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def chosen(options: argparse.Namespace, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The cases asked for.

    Raises:
        SystemExit: one of them does not exist.
    """
    if options.cases is None:
        return list(default)
    names = options.cases.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"--cases = {name!r}: no such case. Known: {', '.join(known)}.")
    return names


def cores() -> int:
    return len(os.sched_getaffinity(0))


def hardware() -> dict[str, Any]:
    """What this runs on."""
    import psutil
    import torch

    found: dict[str, Any] = {
        "processor": processor(),
        "cores": cores(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "load_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        found["card"] = torch.cuda.get_device_name()
    return found


def processor() -> str:
    """The processor's name, its family, which tells AMD's apart, and those of its instructions on
    which figures depend most."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    wide = [
        flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in names.get("flags", "")
    ]
    family = [f"family {names['cpu family']}"] if "cpu family" in names else []
    return " ".join([names.get("model name", "unknown"), *family, *wide])


def commit_measured() -> str:
    """Of the code that is measured; "+" where files other than results differ from it."""
    made = ("results", "RESULTS.md", "bounds.png")
    others = (":/", *(f":!/benchmarks/{name}" for name in made))
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *others)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+" if changed else commit


def _git(*words: str) -> str:
    command = ["git", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Report:
    """Figures as they are made: printed, and written to a file after every case."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.options = options
        self.cases: list[dict[str, Any]] = []
        self.content: dict[str, Any] = {
            "benchmark": name,
            "command": shlex.join(
                ["python", f"benchmarks/{name}.py"]
                + [word.removeprefix(f"{HERE.parent}/") for word in sys.argv[1:]]
            ),
            "quick": options.quick,
            "threads": options.threads,
            "busy": options.busy,
            "repeats": options.repeats,
            "hardware": hardware(),
            "commit": commit_measured(),
            "versions": {},
            "cases": self.cases,
        }

    def version(self, side: str, versions: Mapping[str, str]) -> None:
        self.content["versions"][side] = dict(versions)

    def add(self, case: Mapping[str, Any]) -> None:
        """Note a case, and say it in a line."""
        self.cases.append(dict(case))
        say("  " + "  ".join(f"{k} {show(v)}" for k, v in case.items() if k not in ("repeats",)))
        self._write()

    def close(self, columns: Sequence[str]) -> None:
        """Print the table, and mark the file as whole."""
        print(table(self.cases, columns))
        self.content["finished"] = True
        self._write()

    def _write(self) -> None:
        if self.options.json is not None:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(json.dumps(self.content, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A table in Markdown; columns that no row has are left out."""
    columns = [name for name in columns if any(row.get(name) is not None for row in rows)]
    cells = [[name.replace("_", " ") for name in columns]]
    cells += [[show(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
             for row in cells]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def show(value: Any) -> str:
    """A figure as people read it: three digits, a range in brackets."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if value.keys() == {"median", "low", "high"}:
            median, low, high = (show(value[name]) for name in ("median", "low", "high"))
            return f"{median} ({low}–{high})"
        return " ".join(f"{name} {show(each)}" for name, each in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def say(text: str) -> None:
    """A line for whoever waits."""
    print(text, file=sys.stderr, flush=True)
