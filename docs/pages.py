"""Writes the sources of the documentation site: `python docs/pages.py FOLDER`, or `make docs`.

The pages of the repository are copied as they are; the reference (settings, algorithms, rewards,
environments, commands, recipes, metrics, alerts) is written from the code. mkdocs then builds the
site from the folder.
"""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from groupwise.algorithms import ALGORITHMS, describe
from groupwise.algorithms.describe import table as algorithm_table
from groupwise.cli import app
from groupwise.config import packaged
from groupwise.config.reference import reference, sections
from groupwise.environments import ENVIRONMENTS
from groupwise.pipelines.plan import packaged_pipelines
from groupwise.registry import Registry
from groupwise.report.metrics import METRICS, metric
from groupwise.rewards import REWARDS
from groupwise.settings import AlertsSettings
from groupwise.training.monitor.alerts import ALERT_RULES

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PICTURES = (".png", ".svg")


def write(folder: Path) -> list[Path]:
    """Write every page below a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = [ROOT / name for name in TOP]
    pages += [p for p in sorted((ROOT / "docs").rglob("*")) if p.suffix in (".md", *PICTURES)]
    pages.append(ROOT / "benchmarks" / "RESULTS.md")
    known = {page.relative_to(ROOT) for page in pages}
    for page in pages:
        target = folder / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix in PICTURES:
            shutil.copyfile(page, target)
        else:
            text = page.read_text(encoding="utf-8")
            target.write_text(_links(text, page, known), encoding="utf-8")
    made = {
        "settings": settings(),
        "algorithms": algorithms(),
        "rewards": functions(REWARDS, "Rewards", "What a recipe may name under `[[rewards]]`."),
        "environments": functions(
            ENVIRONMENTS, "Environments", "What answers a model that calls a tool."
        ),
        "commands": commands(),
        "recipes": recipes(),
        "metrics": metrics(),
        "alerts": alerts(),
    }
    (folder / "reference").mkdir()
    for name, text in made.items():
        (folder / "reference" / f"{name}.md").write_text(text, encoding="utf-8")
    return sorted(folder.rglob("*.md"))


def settings() -> str:
    """Every setting by its section."""
    by_section: dict[str, list[str]] = {}
    for path, setting in reference().items():
        section, _, name = path.rpartition(".")
        notes = " A resumed run may change it." if setting.may_change else ""
        notes += " A recipe file must be trusted to set it." if setting.runs_code else ""
        row = f"| `{name}` | {_cell(setting.legal)} | `{_cell(setting.default)}` | "
        by_section.setdefault(section, []).append(row + _cell(setting.about) + notes + " |")
    about = sections()
    lines = [
        "# Settings",
        "",
        "Every setting that a recipe may have, written from the code. `groupwise show NAME` prints "
        "the same; `--set SECTION.NAME=VALUE` overrides one.",
    ]
    for section, rows in by_section.items():
        lines += ["", f"## {section or 'Top level'}", "", about.get(section, ""), ""]
        lines += ["| setting | values | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def algorithms() -> str:
    """The table, then every row with formulas and differences."""
    head = ("name", "advantage", "surrogate", "weighting", "paper")
    lines = [
        "# Algorithms",
        "",
        "`groupwise algorithms NAME` prints the same. Every row says where it differs from its "
        "paper.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for row in algorithm_table():
        cells = [f"[{row['name']}](#{_anchor(row['name'])})", *(_cell(row[k]) for k in head[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    for name in ALGORITHMS:
        text = describe(name)
        lines += ["", f"## {name} {{ #{_anchor(name)} }}", "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def functions(registry: Registry, title: str, about: str) -> str:
    """Every function of a registry with its docstring and settings."""
    lines = [f"# {title}", "", about]
    for name in registry:
        function = registry.get(name)
        said = inspect.cleandoc(function.__doc__ or "")
        first, _, rest = said.partition("\n\n")
        lines += ["", f"## {name}", "", " ".join(first.split())]
        rows = [
            f"| `{key}` | `{_type(p)}` | "
            f"{'required' if p.default is p.empty else f'`{_cell(repr(p.default))}`'} |"
            for key, p in registry.settings(name).items()
        ]
        if rows:
            lines += ["", "| setting | type | default |", "|---|---|---|", *rows]
        if rest:
            lines += ["", "```text", rest, "```"]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command with its options."""
    lines = ["# Commands", "", "`groupwise COMMAND --help` prints the same."]
    for name, command in _commands(typer.main.get_command(app), "groupwise"):
        lines += ["", f"## {name}", "", " ".join((command.help or "").split())]
        rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["", "| argument or option | default | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def recipes() -> str:
    """Every packaged recipe and pipeline with the comment that it begins with."""
    lines = [
        "# Recipes",
        "",
        "`groupwise show NAME` prints a recipe, `groupwise config NAME` all of its settings.",
    ]
    for title, known in {"Recipes": packaged(), "Pipelines": packaged_pipelines()}.items():
        lines += ["", f"## {title}"]
        for name, path in sorted(known.items()):
            head = itertools.takewhile(
                lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()
            )
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in head)
            lines += ["", f"### {name}", "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every metric of `metrics.jsonl`."""
    lines = ["# Metrics", "", "Keys of `metrics.jsonl`, one line per step.", ""]
    lines += ["| key | title | meaning |", "|---|---|---|"]
    lines += [f"| `{key}` | {_cell(m.title)} | {_cell(m.meaning)} |" for key, m in METRICS.items()]
    for key in ("seconds.rollout", "tool_found", "reward_exact_answer", "critic.loss"):
        if known := metric(key):
            lines.append(f"| as `{key}` | {_cell(known.title)} | {_cell(known.meaning)} |")
    return "\n".join(lines) + "\n"


def alerts() -> str:
    """Every alert with its threshold, likely causes and what to try."""
    thresholds = AlertsSettings()
    lines = [
        "# Alerts",
        "",
        "What a run says about itself, in the terminal, the report and `alarms.jsonl`. "
        "A threshold is the setting `alerts.NAME`; `null` switches an alert off.",
    ]
    for rule in ALERT_RULES:
        side = "below" if rule.below else "above"
        lines += [
            "",
            f"## {rule.threshold}",
            "",
            f"{rule.means[0].upper()}{rule.means[1:]}: `{rule.metric}` is {side} "
            f"{getattr(thresholds, rule.threshold):g}. Likely causes:",
            "",
            *(f"{number}. {cause}" for number, cause in enumerate(rule.causes, start=1)),
            "",
            f"Try {rule.attempt}.",
        ]
    return "\n".join(lines) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inside: Mapping[str, Any] = getattr(command, "commands", {})
    if not inside or command.params:
        yield name, command
    for key, each in inside.items():
        yield from _commands(each, f"{name} {key}")


def _parameter(parameter: Any) -> str:
    names = (
        ", ".join(parameter.opts)
        if parameter.param_type_name == "option"
        else (parameter.metavar or (parameter.name or "").upper())
    )
    known = parameter.default not in (None, False, ()) and not callable(parameter.default)
    default = f"`{_cell(str(parameter.default))}`" if known else ""
    default = "required" if parameter.required else default
    return f"| `{_cell(names)}` | {default} | {_cell(getattr(parameter, 'help', None) or '')} |"


def _links(text: str, page: Path, known: Iterable[Path]) -> str:
    """A page whose links to files that are not part of the site are names only."""
    pages = {*known}

    def kept(match: re.Match[str]) -> str:
        words, place = match[1], match[2].partition("#")[0]
        if re.match(r"[a-z]+:", match[2]) or not place:
            return match[0]
        target = Path(*(page.parent / place).resolve().relative_to(ROOT).parts)
        if target.suffix in PICTURES or target in pages:
            return match[0]
        return words if words.startswith("`") else f"{words} (`{target}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", kept, text)


def _type(parameter: inspect.Parameter) -> str:
    """The type of a setting, as it is written."""
    return _cell(inspect.formatannotation(parameter.annotation).strip("'"))


def _cell(text: str) -> str:
    """Text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site-source"))
