"""Writes the sources of the documentation site: `python docs/pages.py FOLDER`, or `make docs`.

The pages of the repository are copied as they are; the reference (a page for every section of
settings, algorithm, function, reward, environment and command; recipes, metrics, alerts, error
messages) is written from the code. mkdocs then builds the site from the folder.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from command_pages import command_pages, commands
from error_pages import error_pages, errors, with_settings
from markup import anchor, cell, described, file_name, plain

from groupwise.algorithms import ALGORITHMS
from groupwise.algorithms.binding import SLOTS, settings_of
from groupwise.algorithms.describe import SlotSetting, formula, slot_settings, summary
from groupwise.algorithms.describe import table as algorithm_table
from groupwise.config import packaged, read
from groupwise.config.reference import Setting, accepted, reference, sections
from groupwise.config.schema import Config
from groupwise.environments import ENVIRONMENTS
from groupwise.pipelines.plan import packaged_pipelines
from groupwise.registry import Registry
from groupwise.report.metrics import FIGURES, METRICS, metric
from groupwise.rewards import REWARDS
from groupwise.settings import AlertsSettings
from groupwise.training.monitor.alerts import ALERT_RULES

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PICTURES = (".png", ".svg")
STYLES = (".css",)


def write(folder: Path) -> list[Path]:
    """Write every page below a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = [ROOT / name for name in TOP]
    pages += [
        p for p in sorted((ROOT / "docs").rglob("*")) if p.suffix in (".md", *PICTURES, *STYLES)
    ]
    pages += [ROOT / "benchmarks" / name for name in ("RESULTS.md", "bounds.png")]
    known = {page.relative_to(ROOT) for page in pages}
    for page in pages:
        target = folder / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix in (*PICTURES, *STYLES):
            shutil.copyfile(page, target)
        else:
            text = page.read_text(encoding="utf-8")
            target.write_text(described(_whole(_links(text, page, known))), encoding="utf-8")
    for name, text in {**reference_pages(), **indexes()}.items():
        page = folder / "reference" / f"{name}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(described(_whole(text)), encoding="utf-8")
    return sorted(folder.rglob("*.md"))


def indexes() -> dict[str, str]:
    """The pages of the menu."""
    return {
        "settings": settings(),
        "algorithms": algorithms(),
        "functions": parts(),
        "rewards": functions(REWARDS, "Rewards", "The values of `name` under `[[rewards]]`."),
        "environments": functions(
            ENVIRONMENTS,
            "Environments",
            "The values of `environment.name`: tools that reply to the model.",
        ),
        "commands": commands(),
        "recipes": recipes(),
        "metrics": metrics(),
        "alerts": alerts(),
        "errors": errors(),
    }


def reference_pages() -> dict[str, str]:
    """A page for every section of settings, algorithm, registered function and command."""
    pages = {f"settings/{file_name(s)}": section(s) for s in _by_section()}
    pages |= {f"algorithms/{file_name(name)}": algorithm(name) for name in ALGORITHMS}
    for folder, registry in {"rewards": REWARDS, "environments": ENVIRONMENTS}.items():
        kind = folder.removesuffix("s")
        pages |= {f"{folder}/{file_name(n)}": function(registry, n, kind, folder) for n in registry}
    for slot, registry in SLOTS.items():
        pages |= {
            f"functions/{slot}-{file_name(n)}": function(registry, n, slot, "functions")
            for n in registry
        }
    return pages | command_pages() | error_pages()


def settings() -> str:
    """Every setting by its section, with a link to its place."""
    lines = [
        "# Settings",
        "",
        "All settings of a recipe, by section. `groupwise show NAME` prints the same text, and "
        "`--set SECTION.NAME=VALUE` overrides a setting.",
    ]
    about = sections()
    for name, inside in _by_section().items():
        links = [f"[`{key}`](settings/{file_name(name)}.md#{anchor(key)})" for key in inside]
        title = f"[{name or 'Top level'}](settings/{file_name(name)}.md)"
        lines += ["", f"## {title} {{ #{file_name(name)} }}", "", about.get(name, ""), ""]
        lines += [" · ".join(links)]
    return "\n".join(lines) + "\n"


def section(name: str) -> str:
    """The settings of a section: meaning, values, default, and the recipes that set it.

    The site's search ranks them above prose, and sections that every run has above others.
    """
    top, *inner = name.split(".")
    optional = bool(top) and Config.model_fields[top].default is None
    about = sections().get(name) or OF_SLOT.format(name.rpartition(".")[2])
    boost = 2.5 / (1 + len(inner) + optional)
    lines = [
        *("---", f"search: {{boost: {boost:g}}}", "---", ""),
        f"# {name or 'Top level'}",
        "",
        " · ".join(filter(None, (f"[Settings](../settings.md#{file_name(name)})", about))),
    ]
    for key, setting in _by_section()[name].items():
        of_slot = isinstance(setting, list)
        path = f"{name}.{key}".lstrip(".")
        lines += ["", f"## {key} {{ #{anchor(key)} }}", ""]
        lines += [*_of_slot(setting)] if of_slot else [*_described(setting)]
        if set_by := _recipes_that_set(path):
            lines += ["", f"Recipes: {set_by}."]
    return "\n".join(lines) + "\n"


OF_SLOT = (
    "Settings of the functions that can fill the slot `{}`; each has an effect only with the "
    "functions listed below it."
)
"""The description of a section whose settings are those of functions."""


def _by_section() -> dict[str, dict[str, Any]]:
    """Settings by section and name; those of the functions of a slot are lists."""
    found: dict[str, dict[str, Any]] = {}
    for path, setting in {**reference(), **slot_settings()}.items():
        section, _, name = path.rpartition(".")
        found.setdefault(section, {})[name] = setting
    order = [*dict.fromkeys(path.rpartition(".")[0] for path in reference())]
    place = order.index("algorithm") + 1
    order[place:place] = [name for name in found if name not in order]
    return {name: found[name] for name in order}


def _described(setting: Setting) -> Iterator[str]:
    yield plain(setting.about)
    yield ""
    yield f"* Values: {plain(setting.legal)}"
    yield f"* Default: `{setting.default}`"
    yield f"* Command line: `--set {setting.path.replace('.N', '.0')}=…`"
    if setting.may_change:
        yield "* Can be changed when a run is resumed."
    if setting.trust:
        yield f"* {setting.trust.capitalize()}: a recipe file needs `--trust-recipe` to set it."


def _of_slot(settings: Sequence[SlotSetting]) -> Iterator[str]:
    for each in settings:
        page = f"../functions/{each.slot}-{file_name(each.function)}.md"
        yield f"* [`{each.function}`]({page}): {plain(each.about)} "
        default = each.default_text
        said = default if default == "required" else f"default `{default}`"
        yield f"  Values: {plain(accepted(each.annotation))}; {said}."
        rows = [
            f"[{row}](../algorithms/{file_name(row)}.md)"
            + ("" if value == each.default else f" (`{json.dumps(value, default=str)}`)")
            for row, value in each.rows.items()
        ]
        if rows:
            yield f"  Algorithms: {', '.join(rows)}."


@functools.cache
def _set_by() -> dict[str, dict[str, Any]]:
    """By the path of a setting, the packaged recipes that set it and their values."""
    found: dict[str, dict[str, Any]] = {}

    def walk(value: Any, path: str, recipe: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}".lstrip("."), recipe)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for inner in value:
                walk(inner, f"{path}.N", recipe)
        else:
            found.setdefault(path, {}).setdefault(recipe, value)

    for name, file in sorted(packaged().items()):
        walk(read(file), "", name)
    return found


def _recipes_that_set(path: str) -> str:
    users = _set_by().get(path, {})
    some = itertools.islice(users.items(), 6)
    shown = [f"{_recipe(name)} `{_short(value)}`" for name, value in some]
    more = len(users) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _recipe(name: str) -> str:
    """A link to a packaged recipe from the page of a single name."""
    return f"[{name}](../recipes.md#{anchor(name)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _short(value: Any) -> str:
    text = " ".join(_json(value).split()).replace("`", "'")
    return text if len(text) <= 40 else text[:39] + "…"


def algorithms() -> str:
    """The rows of the table with their papers."""
    lines = [
        "# Algorithms",
        "",
        "The values of `algorithm.name`. `groupwise algorithms` prints this table, and "
        "`groupwise algorithms NAME` one algorithm with its differences from the paper.",
        "",
        "| name | advantage | paper |",
        "|---|---|---|",
    ]
    for row in algorithm_table():
        name = f"[{row['name']}](algorithms/{file_name(row['name'])}.md)"
        lines.append(f"| {name} | `{cell(row['advantage'])}` | {cell(row['paper'])} |")
    return "\n".join(lines) + "\n"


def algorithm(name: str) -> str:
    """A row: the function in each slot with its formula, and known differences."""
    row = ALGORITHMS.get(name)
    lines = [f"# {name}", "", f"[Algorithms](../algorithms.md) · {plain(row.paper)}", ""]
    lines += ["```toml", "[algorithm]", f'name = "{name}"', "```"]
    for slot, registry in SLOTS.items():
        chosen = getattr(row, slot)
        part = registry.get(chosen.name)
        link = f"[`{chosen.name}`](../functions/{slot}-{file_name(chosen.name)}.md)"
        values = settings_of(registry, chosen).items()
        given = ", ".join(f"`{key} = {json.dumps(value, default=str)}`" for key, value in values)
        more = f" with {given}" if given else ""
        if slot == "divergence" and chosen.name != "none":
            more += f", coefficient {row.divergence_coefficient:g}, in the {row.divergence_in}"
        lines += ["", f"## {slot.capitalize()}", "", f"{link}{more}. {plain(summary(part))}"]
        if said := formula(part):
            lines += ["", "```text", said, "```"]
    lines += ["", "## Entropy", "", f"Coefficient of the bonus: {row.entropy:g}."]
    if row.differs:
        lines += ["", "## Differences", "", *(f"* {plain(each)}" for each in row.differs)]
    return "\n".join(lines) + "\n"


def parts() -> str:
    """The functions of all slots."""
    lines = [
        "# Functions of the slots",
        "",
        "The functions that fill the slots of an algorithm. "
        "`--set algorithm.SLOT.name=NAME` puts another function into a slot.",
    ]
    for slot, registry in SLOTS.items():
        lines += [
            "",
            f"## {slot.capitalize()} {{ #{slot} }}",
            "",
            "| name | what it is |",
            "|---|---|",
        ]
        for name in registry:
            link = f"[{name}](functions/{slot}-{file_name(name)}.md)"
            lines.append(f"| {link} | {cell(plain(summary(registry.get(name))))} |")
    return "\n".join(lines) + "\n"


def functions(registry: Registry, title: str, about: str) -> str:
    """Every function of a registry with the first sentence of its docstring."""
    lines = [f"# {title}", "", about, "", "| name | what it is |", "|---|---|"]
    for name in registry:
        said = inspect.cleandoc(registry.get(name).__doc__ or "").partition("\n\n")[0]
        link = f"[{name}]({title.lower()}/{file_name(name)}.md)"
        lines.append(f"| {link} | {cell(plain(said))} |")
    return "\n".join(lines) + "\n"


def function(registry: Registry, name: str, kind: str, index: str) -> str:
    """A registered function: docstring and settings."""
    own = registry.get(name)
    anchor = f"#{kind}" if index == "functions" else ""
    lines = [f"# {name}", "", f"[{index.capitalize()}](../{index}.md{anchor}) · {kind}", ""]
    lines += [*prose(inspect.cleandoc(own.__doc__ or ""))]
    rows = [
        f"| `{key}` | {cell(plain(accepted(p.annotation)))} | "
        f"{'required' if p.default is p.empty else f'`{cell(_json(p.default))}`'} |"
        for key, p in registry.settings(name).items()
    ]
    if rows:
        lines += ["", "## Settings", "", "| setting | values | default |", "|---|---|---|", *rows]
    if kind in SLOTS:
        users = [row for row in ALGORITHMS if getattr(ALGORITHMS.get(row), kind).name == name]
        links = ", ".join(f"[{row}](../algorithms/{file_name(row)}.md)" for row in users)
        lines += ["", f"Algorithms: {links}." if users else "No algorithm of the table uses it."]
    elif set_by := [n for n in _set_by()[NAMED_BY[kind]] if _names(kind, n, name)]:
        lines += ["", f"Recipes: {', '.join(map(_recipe, set_by))}."]
    return "\n".join(lines) + "\n"


NAMED_BY = {"reward": "rewards.N.name", "environment": "environment.name"}
"""By kind of function, the setting that names it."""


def _names(kind: str, recipe: str, name: str) -> bool:
    """Whether a packaged recipe names a function of this kind."""
    values = read(packaged()[recipe])
    if kind == "environment":
        return values["environment"].get("name") == name
    return any(each.get("name") == name for each in values["rewards"])


def prose(docstring: str) -> Iterator[str]:
    """A docstring as Markdown: formulas and examples as blocks, arguments as a list."""
    docstring = re.sub(r"\n(?=(?:Source|Elsewhere): )", "\n\n", docstring)
    for paragraph in re.split(r"\n{2,}", docstring):
        head, _, body = paragraph.partition("\n")
        if head in ("Args:", "Returns:", "Raises:"):
            yield f"**{HEADINGS[head]}**"
            yield ""
            each = r"\n(?= {4}\S)" if head != "Returns:" else r"\Z"
            for entry in re.split(each, "\n" + body):
                names, colon, about = " ".join(entry.split()).partition(": ")
                if entry.strip():
                    listed = f"`{names}`: {plain(about)}" if colon and head != "Returns:" else ""
                    yield f"* {listed or plain(' '.join(entry.split()))}"
        elif head == "Example:":
            yield from ("**Example**", "", "```pycon", textwrap.dedent(body), "```")
        elif paragraph.startswith(("    ", ">>>")):
            language = "pycon" if ">>>" in paragraph else "text"
            yield from (f"```{language}", textwrap.dedent(paragraph), "```")
        else:
            label, colon, rest = " ".join(paragraph.split()).partition(": ")
            labelled = colon and label in ("Source", "Elsewhere", "How it is gamed", "Warns")
            yield f"**{label}:** {plain(rest)}" if labelled else plain(" ".join(paragraph.split()))
        yield ""


HEADINGS = {"Args:": "Arguments", "Returns:": "Returns", "Raises:": "Errors"}


def recipes() -> str:
    """Every packaged recipe and pipeline with the comment that it begins with."""
    lines = [
        "# Recipes",
        "",
        "`groupwise show NAME` prints a recipe, `groupwise config NAME` all of its settings.",
    ]
    for title, known in {"Recipes": packaged(), "Pipelines": packaged_pipelines()}.items():
        lines += ["", f"## {title}"]
        before = "pipeline-" if title == "Pipelines" else ""  # both may have a name
        for name, path in sorted(known.items()):
            head = itertools.takewhile(
                lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()
            )
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in head)
            # A sentence that starts a line is a paragraph, and so is an item of a list.
            sentences = re.sub(r"\.\n(?=[A-Z]|\d+\. )", ".\n\n", text)
            lines += ["", f"### {name} {{ #{before}{anchor(name)} }}", "", *prose(sentences)]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every metric of `metrics.jsonl`."""
    lines = ["# Metrics", "", "Keys of `metrics.jsonl`, one line per step.", ""]
    lines += ["| key | title | meaning |", "|---|---|---|"]
    lines += [f"| `{key}` | {cell(m.title)} | {cell(m.meaning)} |" for key, m in METRICS.items()]
    for key in (
        "seconds.rollout",
        "tool_found",
        "accuracy_after_2_calls",
        "reward_exact_answer",
        "critic.loss",
    ):
        if known := metric(key):
            lines.append(f"| like `{key}` | {cell(known.title)} | {cell(known.meaning)} |")
    lines += ["", "## Figures of evaluations", "", "Names in `evaluations.jsonl` and tables.", ""]
    lines += ["| figure | meaning |", "|---|---|"]
    for name, meaning in FIGURES.items():
        lines.append(f"| `{name}` | {cell(meaning.format('k'))} |")
    return "\n".join(lines) + "\n"


def alerts() -> str:
    """Every alert with its threshold, likely causes and what to try."""
    thresholds = AlertsSettings()
    lines = [
        "# Alerts",
        "",
        "Messages about metrics that look wrong, in the terminal, the report and `alarms.jsonl`. "
        "The setting `alerts.NAME` is the threshold; `null` switches the alert off.",
    ]
    for rule in ALERT_RULES:
        setting = f"[`alerts.{rule.threshold}`](settings/alerts.md#{anchor(rule.threshold)})"
        fires = AlertsSettings.model_fields[rule.threshold].description or ""
        lines += [
            "",
            f"## {rule.threshold}",
            "",
            f"{rule.means[0].upper()}{rule.means[1:]}. {fires} {setting} is "
            f"{getattr(thresholds, rule.threshold):g} by default. Likely causes:",
            "",
            *(f"{n}. {with_settings(each, 'settings')}" for n, each in enumerate(rule.causes, 1)),
            "",
            f"Try {with_settings(rule.attempt, 'settings')}.",
        ]
    return "\n".join(lines) + "\n"


def _whole(text: str) -> str:
    """A page in which no line ends after the "--" of a short option or before a "%"."""
    fenced = r"(^```.*?^```|^ {4}[^\n]*$)"
    pieces = re.split(fenced, text, flags=re.DOTALL | re.MULTILINE)
    option = r"(?<!`)`([^`\n]{0,20}--[a-z][^`\n]{0,18})`(?!`)"
    pieces[::2] = [re.sub(option, r"`\1`{ .whole }", piece) for piece in pieces[::2]]
    percent = r"(`[^`\n]*`)|(?<=[\d\]]) %"
    pieces[::2] = [re.sub(percent, lambda m: m[1] or "\u00a0%", piece) for piece in pieces[::2]]
    return "".join(pieces)


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


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site-source"))
