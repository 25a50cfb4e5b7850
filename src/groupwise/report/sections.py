"""The sections of a page as HTML; all text of a run passes through `escaped`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.evaluation import Estimate, FigureTable, title_of
from groupwise.evaluation.tables import format_cell
from groupwise.evaluation.verdicts import MIN_SEEDS
from groupwise.report.curves import labels_of, seeds_of, stage_seconds
from groupwise.report.data import Row, RunData, estimate
from groupwise.report.metrics import figure_meaning
from groupwise.report.rollouts import Payload
from groupwise.report.text import escaped, number

COLOURS = 6
MOST_ALERTS = 30
OF_A_RUN = ("command", "output", "seed")
"""Settings that differ between any two runs."""


def accent(labels: Sequence[str], label: str) -> str:
    """The colour class of a label, the same everywhere on the page."""
    return f"a{labels.index(label) % COLOURS}" if label in labels else "base"


def header(title: str, kind: str, runs: Sequence[RunData]) -> str:
    """Title, facts of the runs, and the legend that shows and hides algorithms."""
    labels = labels_of(runs)
    facts = [fact for fact in (_model(runs), _size(runs), _seeds(runs), _kernels(runs)) if fact]
    legend = "".join(
        f'<button type="button" class="key {accent(labels, label)}" data-label="{escaped(label)}" '
        f'aria-pressed="true"><i></i>{escaped(label)}</button>'
        for label in labels
    )
    return (
        f'<header><p class="eyebrow">groupwise <span>{escaped(kind)}</span>'
        '<button type="button" id="theme" aria-label="Switch between light and dark">◐</button></p>'
        f"<h1>{escaped(title)}</h1>"
        f'<p class="facts">{" <b>·</b> ".join(map(escaped, facts))}</p>'
        f'<nav class="legend" aria-label="Algorithms">{legend}</nav></header>'
    )


def findings(comparison: Mapping[str, Any], *, seeds: int) -> str:
    """The verdicts, marked as an illustration where the seeds are too few for a claim."""
    verdicts, note = comparison.get("verdicts") or (), comparison.get("note")
    if not verdicts:
        return ""
    few = "one seed" if seeds == 1 else f"{seeds} seeds"
    mark = f'<p class="mark">Illustration · {few}</p>' if 0 < seeds < MIN_SEEDS else ""
    sentences = "".join(f"<p>{escaped(sentence)}</p>" for sentence in verdicts)
    small = f'<p class="note">{escaped(note)}</p>' if note else ""
    table = _contrasts(comparison.get("contrasts") or ())
    return f'<section class="findings">{mark}{sentences}{small}{table}</section>'


def alerts(runs: Sequence[RunData]) -> str:
    """The alerts that fired, with their steps, the same text once for each run, after a sentence
    that says how many there are and when they began."""
    lines: dict[tuple[str, str], float] = {}
    for run in runs:
        name = f"{run.label}, seed {run.seed}, " if len(runs) > 1 else ""
        for row in run.alerts:
            lines.setdefault((name, str(row.get("text"))), number(row.get("step")) or 0)
    if not lines:
        return ""
    shown = [f"{name}step {step:g}: {text}" for (name, text), step in lines.items()]
    more = [f"{len(shown) - MOST_ALERTS} more in alarms.jsonl"] if len(shown) > MOST_ALERTS else []
    lines_shown = [*shown[:MOST_ALERTS], *more]
    items = "".join(f"<p>{_with_code(line)}</p>" for line in lines_shown)
    many = f"{len(shown)} alert{'s' * (len(shown) > 1)}"
    of_runs = f" in {len({name for name, _ in lines})} of {len(runs)} runs" if len(runs) > 1 else ""
    said = f"{many}{of_runs}, the first at step {min(lines.values()):g}."
    mark = '<p class="mark">Alerts</p>'
    return f'<section class="findings alerts">{mark}<p>{said}</p>{items}</section>'


def _with_code(text: str) -> str:
    """Text whose words in backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped(text))


def chart_places(keys: Sequence[str], *, hero: bool = False) -> str:
    """Empty frames for the charts, which the script of the page draws."""
    kind = "chart hero" if hero else "chart"
    return "".join(f'<figure class="{kind}" data-chart="{escaped(key)}"></figure>' for key in keys)


def results(table: FigureTable, labels: Sequence[str]) -> str:
    """Final figures with intervals, as a table and as dots with whiskers."""
    if not table.rows:
        return ""
    heads = "".join(
        f'<th scope="col" class="{accent(labels, model)}"><i></i>{escaped(model)}</th>'
        for model in table.models
    )
    body, current = "", None
    for split, figure in table.rows:
        if split != current:
            span = len(table.models) + 2
            body += f'<tr class="split"><th colspan="{span}">{escaped(title_of(split))}</th></tr>'
            current = split
        percent = table.percent(figure)
        cells = {model: table.cells.get((model, split, figure)) for model in table.models}
        meaning = figure_meaning(figure)
        told = f' class="explained" title="{escaped(meaning)}"' if meaning else ""
        body += f'<tr><th scope="row"{told}>{escaped(title_of(figure))}</th>'
        body += "".join(_cell(cell, percent) for cell in cells.values())
        body += f'<td class="plot">{_whiskers(cells, labels) if percent else ""}</td></tr>'
    several = max(table.seeds.values(), default=1) > 1
    how = "over the evaluation prompts, one seed"
    if several:
        how = "Student's t over seeds; over prompts for one seed or equal seeds"
    axis = '<th scope="col" class="plot"><div><i>0</i><i>50</i><i>100 %</i></div></th>'
    title = "Before and after" if "base" in table.models else "After training"
    return (
        f'<section id="results"><h2>{title}</h2><div class="scroll"><table class="results">'
        f"<thead><tr><td></td>{heads}{axis}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="note">Shares in percent with 95 % intervals ({how}).</p></section>'
    )


def magnifier(magnified: Mapping[str, Any] | None, labels: Sequence[str]) -> str:
    """One group: prompt, completions, rewards, and the advantages of each algorithm."""
    if not magnified:
        return ""
    prompt = magnified.get("prompt")
    prompt = prompt if isinstance(prompt, Mapping) else {"text": prompt}
    given = magnified.get("advantages")
    advantages = {str(k): list(v) for k, v in given.items()} if isinstance(given, Mapping) else {}
    scale = {
        name: max((abs(number(v) or 0) for v in values), default=0) or 1.0
        for name, values in advantages.items()
    }
    rows = ""
    for place, completion in enumerate(magnified.get("completions") or ()):
        bars = "".join(
            _advantage(name, values[place] if place < len(values) else None, scale[name], labels)
            for name, values in advantages.items()
        )
        rows += (
            f'<li class="sample"><div class="verdict">{_judged(completion)}</div>'
            f'<div class="text">{escaped(completion.get("text", ""))}</div>'
            f'<div class="bars">{bars}</div></li>'
        )
    step = number(magnified.get("step"))
    when = "" if step is None else f" from step {step:g}"
    caption = magnified.get("caption") or (
        f"One group{when}: the advantages that each algorithm computes from the same completions "
        "and rewards. Bars are scaled per algorithm, numbers are not."
    )
    return (
        '<section id="magnifier"><h2>One group in detail</h2>'
        f'<p class="lead">{escaped(caption)}</p><div class="card">'
        f'<div class="prompt">{escaped(prompt.get("text") or "")}{_answer(prompt)}</div>'
        f'<ol class="samples">{rows}</ol></div></section>'
    )


def before_after(runs: Sequence[RunData]) -> str:
    """Answers of the base model and of every trained model to the same prompts."""
    labels = labels_of(runs)
    chosen = {
        label: min((run for run in runs if run.label == label), key=lambda run: run.seed)
        for label in labels
    }
    first = {label: _answers(run, last=False) for label, run in chosen.items()}
    last = {label: _answers(run, last=True) for label, run in chosen.items()}
    base = next((answers for answers in first.values() if answers), {})
    cards = ""
    for key in list(base)[:4]:
        prompt = base[key].get("prompt") or {}
        columns = _spoken("base", base[key], labels)
        columns += "".join(_spoken(n, last[n][key], labels) for n in labels if key in last[n])
        cards += (
            f'<div class="card"><div class="prompt">{escaped(prompt.get("text", ""))}'
            f'{_answer(prompt)}</div><div class="columns">{columns}</div></div>'
        )
    if not cards:
        return ""
    return (
        '<section id="samples"><h2>Answers before and after</h2><p class="lead">The first prompts '
        "of the evaluation, in order; none was selected.</p>" + cards + "</section>"
    )


def browser(packed: Payload | None, unread: int) -> str:
    """The frame of the rollout browser, which the script of the page fills."""
    if packed is None:
        return ""
    seeds = ", ".join(f"{label} (seed {seed})" for label, seed in packed.runs)
    some = f"{packed.shown:,} of {packed.total:,}" if packed.shown < packed.total else "All"
    total = "" if packed.shown < packed.total else f" {packed.total:,}"
    note = f"{some}{total} logged completions of {seeds}."
    note += f" {unread} rollout files were omitted, evenly over the run." if unread else ""
    return (
        '<section id="rollouts"><h2>Rollouts</h2>'
        f'<p class="lead">{escaped(note)}</p>'
        '<div class="controls"></div><p class="count" aria-live="polite"></p>'
        '<div class="groups"></div></section>'
    )


def timings(runs: Sequence[RunData]) -> str:
    """Seconds per stage of a step, one bar per algorithm."""
    stages = stage_seconds(runs)
    if not stages:
        return ""
    longest = max(sum(parts.values()) for parts in stages.values()) or 1.0
    names = list(dict.fromkeys(name for parts in stages.values() for name in parts))
    rows = ""
    for label, parts in stages.items():
        left, bars = 0.0, ""
        for name, seconds in parts.items():
            width = 100 * seconds / longest
            bars += (
                f'<rect class="s{names.index(name) % 8}" x="{left:.2f}" y="0" height="10" '
                f'width="{max(0.0, width):.2f}">'
                f"<title>{escaped(name)}: {seconds:.3g} s</title></rect>"
            )
            left += width
        rows += (
            f'<div class="stage"><span>{escaped(label)}</span><svg viewBox="0 0 100 10" '
            f'preserveAspectRatio="none" role="img" aria-label="Seconds per stage">{bars}</svg>'
            f"<span>{sum(parts.values()):.2f} s</span></div>"
        )
    keys = "".join(
        f'<span class="s{place % 8}"><i></i>{escaped(title_of(name))}</span>'
        for place, name in enumerate(names)
    )
    return f'<section id="time"><h2>Time per step</h2>{rows}<p class="stages">{keys}</p></section>'


def footer(runs: Sequence[RunData]) -> str:
    """What differs between the arms, the settings of the first run, and the number of damaged
    lines."""
    skipped = sum(run.skipped for run in runs)
    lost = f"<p>{skipped} damaged lines of the run files were skipped.</p>" if skipped else ""
    config = _dotted(runs[0].config) if runs else {}
    rows = "".join(
        f'<tr><th scope="row">{escaped(key)}</th><td>{escaped(value)}</td></tr>'
        for key, value in config.items()
    )
    table = f'<div class="scroll"><table class="config">{rows}</table></div>'
    whose = f" of {runs[0].label}, seed {runs[0].seed}" if len(runs) > 1 else ""
    details = f"<details><summary>Settings{escaped(whose)}</summary>{table}</details>"
    return f"<footer>{lost}{_differences(runs)}{details if rows else ''}</footer>"


def _differences(runs: Sequence[RunData]) -> str:
    """Settings that are not the same in all arms, a column for each arm."""
    first: dict[str, dict[str, object]] = {}
    for run in runs:
        if run.config:
            first.setdefault(run.label, _dotted(run.config))
    labels, settings = [*first], [*first.values()]
    if len(labels) < 2:
        return ""
    keys = dict.fromkeys(key for each in settings for key in each if key not in OF_A_RUN)
    rows = ""
    for key in keys:
        values = [each.get(key) for each in settings]
        if any(value != values[0] for value in values):
            cells = "".join(f"<td>{escaped('–' if v is None else v)}</td>" for v in values)
            rows += f'<tr><th scope="row">{escaped(key)}</th>{cells}</tr>'
    heads = "".join(f'<th scope="col">{escaped(label)}</th>' for label in labels)
    if not rows:
        return '<p class="note">The settings of all arms are the same.</p>'
    return (
        '<details open><summary>Settings that differ</summary><div class="scroll">'
        f'<table class="config"><thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody>'
        "</table></div></details>"
    )


def _contrasts(contrasts: Sequence[Mapping[str, Any]]) -> str:
    """All tested contrasts, not only significant ones."""
    rows = ""
    for row in contrasts:
        cell, unit = estimate(row.get("difference")), str(row.get("unit") or "")
        scale = 100 if unit == "pp" else 1
        size = "–"
        if cell is not None:
            size = f"{scale * cell.value:+.3g}"
            size += f" [{scale * cell.low:+.3g}, {scale * cell.high:+.3g}]" if cell.known else ""
        effect = number(row.get("effect"))
        figures = (
            f"{size} {unit}".replace("-", "−"),
            *(_probability(number(row.get(key))) for key in ("p", "p_holm")),
            "–" if effect is None else f"{effect:+.2f}".replace("-", "−"),
        )
        told = ' class="told"' if row.get("distinct") else ""
        name = f"{row.get('first')} − {row.get('second')}: {row.get('name') or row.get('figure')}"
        rows += f'<tr><th scope="row"{told}>{escaped(name)}</th>'
        rows += "".join(f"<td>{escaped(text)}</td>" for text in figures) + "</tr>"
    heads = "".join(
        f'<th scope="col">{head}</th>'
        for head in ("figure", "difference, 95 % interval", "p", "Holm p", "effect")
    )
    return (
        ""
        if not rows
        else (
            f'<details><summary>All {len(contrasts)} contrasts</summary><div class="scroll">'
            f'<table class="contrasts"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
            "</div></details>"
        )
    )


def _probability(value: float | None) -> str:
    return "–" if value is None else "< .001" if value < 0.001 else f"{value:.3f}"


def _cell(cell: Estimate | None, percent: bool) -> str:
    value, interval = format_cell(cell, percent=percent)
    return f'<td class="figure"><b>{value}</b> <span>{interval}</span></td>'


def _whiskers(cells: Mapping[str, Estimate | None], labels: Sequence[str]) -> str:
    marks, height = "", 9 * len(cells) + 3
    for place, (model, cell) in enumerate(cells.items()):
        if cell is None:
            continue
        y = 6 + 9 * place
        line = ""
        if cell.known:
            low, high = (200 * min(1.0, max(0.0, end)) for end in (cell.low, cell.high))
            line = f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
        dot = f'<circle cx="{200 * cell.value:.1f}" cy="{y}" r="3.2"/>'
        marks += f'<g class="{accent(labels, model)}">{line}{dot}</g>'
    grid = "".join(
        f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height}"/>' for x in (0, 100, 200)
    )
    return f'<svg viewBox="-5 0 210 {height}" aria-hidden="true">{grid}{marks}</svg>'


def _advantage(name: str, value: object, scale: float, labels: Sequence[str]) -> str:
    found = number(value)
    size = 0.0 if found is None else 48 * max(-1.0, min(1.0, found / scale))
    left = 50 + min(0.0, size)
    shown_value = "–" if found is None else f"{found:+.3f}".replace("-", "−")
    return (
        f'<div class="{accent(labels, name)}"><span>{escaped(name)}</span>'
        f'<svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<line x1="50" x2="50" y1="0" y2="8"/>'
        f'<rect x="{left:.1f}" y="1" width="{abs(size):.1f}" height="6"/></svg>'
        f"<b>{shown_value}</b></div>"
    )


def _judged(completion: Row) -> str:
    """Correctness, reward, and the parts of the reward."""
    reward = number(completion.get("reward"))
    status = str(completion.get("status") or "ok")
    given = completion.get("parts")
    parts = "".join(
        f"<small>{escaped(name)} {number(part):g}</small>"
        for name, part in (given.items() if isinstance(given, Mapping) else ())
        if number(part) is not None
    )
    value = escaped(status) if reward is None or status != "ok" else f"{reward:g}"
    return f"{_tick(completion)}<b>{value}</b>{parts}"


def _tick(answer: Row) -> str:
    """Right, wrong or not judged; empty where no reward defines correctness."""
    correct = answer.get("correct")
    value = float(correct) if isinstance(correct, bool) else number(correct)
    if (answer.get("status") or "ok") != "ok":
        return '<span class="unknown" title="not judged">?</span>'
    if value is None:
        return ""
    if value >= 0.5:
        return '<span class="right" title="right">✓</span>'
    return '<span class="wrong" title="wrong">✗</span>'


def _answer(prompt: Mapping[str, Any]) -> str:
    answer = prompt.get("answer")
    return "" if answer is None else f'<span class="answer">answer {escaped(answer)}</span>'


def _answers(run: RunData, *, last: bool) -> dict[str, Row]:
    """A run's stored answers by prompt, before training (step 0) or at its last evaluation."""
    steps = [number(sample.get("step")) or 0.0 for sample in run.samples]
    wanted = max(steps, default=0.0) if last else 0.0
    found = {}
    for sample, step in zip(run.samples, steps, strict=True):
        prompt = sample.get("prompt")
        if step == wanted and (step > 0) is last and isinstance(prompt, Mapping):
            found.setdefault(str(prompt.get("id")), sample)
    return found


def _spoken(name: str, sample: Row, labels: Sequence[str]) -> str:
    return (
        f'<div class="{accent(labels, name)}"><h3><i></i>{escaped(name)} '
        f"{_tick(sample)}</h3>"
        f'<div class="text">{escaped(sample.get("text", ""))}</div></div>'
    )


def _model(runs: Sequence[RunData]) -> str:
    model = runs[0].config.get("model") if runs else None
    name = model.get("path") if isinstance(model, Mapping) else model
    return "" if not isinstance(name, str) else f"model {name}"


def _size(runs: Sequence[RunData]) -> str:
    steps = max(
        (number(run.metrics[-1].get("step")) or 0 for run in runs if run.metrics), default=0
    )
    config = runs[0].config if runs else {}
    prompts, group = number(config.get("prompts_per_step")), number(config.get("group_size"))
    known = prompts and group and runs[0].axis == "steps"
    size = f" of {prompts:g} prompts × {group:g} completions" if known else ""
    return f"{round(steps, 1):g} {runs[0].axis}{size}" if steps else ""


def _seeds(runs: Sequence[RunData]) -> str:
    seeds = sorted({run.seed for run in runs})
    if seeds_of(runs) <= 1:
        return f"one seed ({seeds[0]})" if len(seeds) == 1 else ""
    return f"seeds {', '.join(map(str, seeds))}"


def _kernels(runs: Sequence[RunData]) -> str:
    """What computed; rounding depends on it."""
    used = [run.config.get("kernels") for run in runs]
    names = sorted({name for name in used if isinstance(name, str)})
    return f"kernels {', '.join(names)}" if names else ""


def _dotted(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Settings by dotted name, without those that are empty."""
    rows: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and len(prefix) < 100:
            rows |= _dotted(value, f"{prefix}{key}.")
        elif value not in (None, [], ()):
            rows[f"{prefix}{key}"] = value
    return rows
