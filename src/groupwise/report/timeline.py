"""What each process did in the last steps, as bars over time."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.report.data import Row, RunData
from groupwise.report.text import escaped, number

STEPS = 8
"""Steps that are shown."""
KINDS = ("sampling", "judging", "updating", "transferring")

Bar = tuple[str, str, float, float]


def timeline(run: RunData) -> str:
    """The section of the last steps; empty where the run wrote no timeline."""
    rows = list(run.timeline)[-STEPS - 1 :]
    spans = [bar for row in rows for bar in _bars(row)]
    if len(rows) < 2 or not spans:
        return ""
    ends = [max((bar[3] for bar in _bars(row)), default=0.0) for row in rows]
    begin, end = ends[0], max(ends)
    shown = [bar for bar in spans if bar[3] > begin]
    if not shown or end <= begin:
        return ""
    marks = [100 * (at - begin) / (end - begin) for at in ends[1:]]
    names = sorted({bar[0] for bar in shown}, key=_order)
    lines = "".join(_line(name, shown, marks, begin=begin, end=end) for name in names)
    keys = "".join(
        f'<span class="s{place}"><i></i>{kind}</span>'
        for place, kind in enumerate(KINDS)
        if any(bar[1] == kind for bar in shown)
    )
    first, last = (f"{number(row.get('step')) or 0:g}" for row in (rows[1], rows[-1]))
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return (
        '<section id="timeline"><h2>What each process does</h2>'
        f'<p class="note">{steps.capitalize()}, {end - begin:.3g} s. A vertical line marks the '
        "end of a step. The number on the right is the share of time in which the process was "
        f"idle.</p>{lines}"
        f'<div class="stage scale"><span></span><p><span>0 s</span><span>{end - begin:.3g} s'
        f'</span></p><span>idle</span></div><p class="stages">{keys}</p>{_queue(run, rows[-1])}'
        "</section>"
    )


def idle_share(spans: Sequence[Bar], *, begin: float, end: float) -> float:
    """The share of a time that no span covers.

    Example:
        >>> idle_share([("a", "x", 0, 2), ("a", "y", 1, 3)], begin=0, end=4)
        0.25
    """
    busy, upto = 0.0, begin
    for _, _, start, stop in sorted(spans, key=lambda bar: bar[2]):
        busy += max(0.0, min(stop, end) - max(start, upto))
        upto = max(upto, min(stop, end))
    return 1 - busy / (end - begin)


def _line(
    name: str, shown: Sequence[Bar], marks: Sequence[float], *, begin: float, end: float
) -> str:
    own = [bar for bar in shown if bar[0] == name]
    bars = ""
    for _, what, start, stop in own:
        left, right = (100 * (max(at, begin) - begin) / (end - begin) for at in (start, stop))
        bars += (
            f'<rect class="s{KINDS.index(what)}" x="{left:.3f}" y="0" height="10" '
            f'width="{max(0.15, right - left):.3f}"><title>{what}: {stop - start:.3g} s</title>'
            "</rect>"
        )
    bars += "".join(f'<line x1="{x:.3f}" x2="{x:.3f}" y1="0" y2="10"/>' for x in marks)
    idle = idle_share(own, begin=begin, end=end)
    return (
        f'<div class="stage"><span>{escaped(name)}</span><svg viewBox="0 0 100 10" '
        f'preserveAspectRatio="none" role="img" aria-label="Timeline of {escaped(name)}, '
        f'idle {100 * idle:.0f} %">{bars}</svg><span>{100 * idle:.0f} %</span></div>'
    )


def _queue(run: RunData, row: Row) -> str:
    """The state of the groups at the end of the last step, the memory of the processes, and the age
    of its tokens."""
    queue = row.get("queue")
    counts = queue if isinstance(queue, dict) else {}
    said = [f"{number(count) or 0:g} {escaped(name)}" for name, count in counts.items()]
    parts = [f"Groups after the last step: {', '.join(said)}."] if said else []
    parts += _memory(row)
    newest = run.metrics[-1] if run.metrics else {}
    age, most = (number(newest.get(name)) for name in ("token_age", "token_age_max"))
    if age is not None:
        oldest = "" if most is None else f", {most:g} at most"
        parts.append(f"Age of its tokens: {age:.3g} steps on average{oldest}.")
    return f'<p class="note">{" ".join(parts)}</p>' if parts else ""


def _memory(row: Row) -> list[str]:
    """The peak memory of each process."""
    given = row.get("memory_mb")
    known = {name: number(mb) for name, mb in given.items()} if isinstance(given, dict) else {}
    names = sorted((name for name, mb in known.items() if mb), key=_order)
    said = [f"{escaped(name)} {(known[name] or 0) / 1024:.3g} GB" for name in names]
    return [f"Peak memory: {', '.join(said)}."] if said else []


def _bars(row: Row) -> list[Bar]:
    """The spans of a step; what has another form is left out."""
    found = []
    for span in row.get("spans") or ():
        if isinstance(span, list) and len(span) == 4 and span[1] in KINDS:
            start, end = number(span[2]), number(span[3])
            if start is not None and end is not None:
                found.append((str(span[0]), str(span[1]), start, end))
    return found


def _order(name: str) -> tuple[int, int, str]:
    """Replicas by number, then those who judge and who learn."""
    head, _, place = name.rpartition(" ")
    last = ("sampler", "scorer", "learner")
    return (
        last.index(name) + 1 if name in last else 0,
        int(place) if head and place.isdecimal() else 0,
        name,
    )
