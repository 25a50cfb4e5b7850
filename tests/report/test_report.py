"""Reports: reading damaged runs, packing rollouts, and pages that nothing can break out of."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import random
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import RunError, UsageError
from groupwise.evaluation import seed_mean
from groupwise.report import (
    RunData,
    compare_runs,
    results_table,
    write_comparison_report,
    write_png,
    write_run_report,
)
from groupwise.report.curves import evaluation_charts, metric_charts, stage_seconds
from groupwise.report.data import figures_at, read_runs
from groupwise.report.metrics import figure_meaning
from groupwise.report.png import _limits
from groupwise.report.rollouts import payload
from groupwise.report.text import embedded, escaped, number, visible

HOSTILE = "</script><script>owned()</script><img src=x onerror=owned()>\x1b[31m\u202e<!--\ud800'\""


def figure(value):
    return {"value": value, "low": max(0.0, value - 0.05), "high": min(1.0, value + 0.05)}


def evaluation(step, value, split="held_out"):
    return {"step": step, "split": split, "figures": {"greedy": figure(value)}}


def completion(text, *, reward=1.0, **more):
    return {"text": text, "reward": reward, "correct": reward, "advantage": 0.5, **more}


def group(step, texts, *, name="p0", prompt="What is 2 + 2?", **more):
    return {
        "step": step,
        "prompt": {"id": name, "text": prompt, "answer": "4"},
        "completions": [completion(text, **more) for text in texts],
    }


def run_of(label="softrank", seed=0, *, steps=20, end=0.9, rollouts=(), samples=()):
    noise = random.Random(f"{label!a} {seed}")
    metrics = [
        {
            "step": s,
            "accuracy": min(1.0, end * s / steps + noise.uniform(0, 0.1)),
            "entropy": 1.0 / s,
            "seconds": {"rollout": 0.3, "update": 0.2},
        }
        for s in range(1, steps + 1)
    ]
    return RunData(
        label=label,
        algorithm=label,
        seed=seed,
        metrics=metrics,
        evaluations=[evaluation(0, 0.1), evaluation(steps, end)],
        rollouts=rollouts,
        samples=samples,
    )


def write_run(folder, *, metrics=(), evaluations=(), rollouts=None, config=None):
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(metrics))
    if evaluations:
        (folder / "evaluations.jsonl").write_text("\n".join(map(json.dumps, evaluations)))
    for step, rows in (rollouts or {}).items():
        path = folder / "rollouts" / f"step-{step:06d}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
    if config is not None:
        (folder / "config.json").write_text(config)
    return folder


def page_of(runs, tmp_path, **more):
    title = more.pop("title", "Title")
    path = write_comparison_report(runs, title=title, output=tmp_path / "page.html", **more)
    return path.read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Every element and attribute that a browser would see, scripts taken as text."""

    def __init__(self, page):
        super().__init__()
        self.names, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]


@given(st.text())
def test_nothing_breaks_out_of_embedded_json(text):
    found = embedded({text: [text, 1.5]})
    assert not set("<>&") & set(found)
    assert json.loads(found) == {visible(text): [visible(text), 1.5]}
    found.encode("utf-8")


@given(st.text())
def test_escaped_text_holds_no_markup_and_nothing_unseen(text):
    found = escaped(text)
    assert not set("<>\"'") & set(found)
    assert not re.search("[\x00-\x08\x1b\x7f-\x9f\u200b-\u200f\u202a-\u202e\ud800-\udfff]", found)


def test_numbers_are_finite_or_absent():
    assert [number(v) for v in (2, 2.5, True, None, "3", float("nan"), [1])] == [
        *(2.0, 2.5),
        *[None] * 5,
    ]
    assert embedded([float("inf"), 0.1234567, 3.0]) == "[null,0.12346,3]"


def test_reading_skips_and_counts_damaged_lines(tmp_path):
    lines = [
        '{"step": 2, "accuracy": 0.2}\n',
        '{"step": 1, "accuracy": 0.1}\n',
        "[1, 2]\n",
        "not json\n",
        '{"step": 2, "accuracy": 0.7}\n',
        '{"accuracy": 0.5}\n',
        '{"step": 3, "acc',
    ]
    config = json.dumps({"config": {"algorithm": {"name": "grpo"}, "seed": 7}, "versions": {}})
    rows = [group(1, ["a"])]
    folder = write_run(tmp_path / "run", metrics=lines, rollouts={1: rows}, config=config)
    with open(folder / "rollouts" / "step-000001.jsonl", "ab") as file:
        file.write(b'\n{"step": 1, "prom\xff')
    run = RunData.read(folder)
    assert [(row["step"], row["accuracy"]) for row in run.metrics] == [(1, 0.1), (2, 0.7)]
    assert run.skipped == 4  # a list, no JSON, the cut line, the cut rollout
    assert (run.label, run.algorithm, run.seed, len(run.rollouts)) == ("grpo", "grpo", 7, 1)
    page = write_run_report(folder).read_text(encoding="utf-8")
    assert "4 damaged lines" in page


def test_reading_says_what_is_missing(tmp_path):
    with pytest.raises(UsageError, match="the folder does not exist"):
        RunData.read(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="has none of them"):
        RunData.read(tmp_path)
    broken = write_run(tmp_path / "broken", config="{", metrics=['{"step": 1}\n'])
    assert RunData.read(broken).skipped == 1
    assert RunData.read(broken, label="mine").label == "mine"


def test_runs_of_one_algorithm_and_seed_are_called_by_their_folders(tmp_path):
    for name, algorithm, seed in (("cold", "grpo", 0), ("hot", "grpo", 0), ("c", "rloo", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "accuracy": 0.5}\n')
        settings = {"algorithm": {"name": algorithm}, "seed": seed}
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
    folders = [tmp_path / name for name in ("cold", "hot", "c")]
    assert [run.label for run in read_runs(folders)] == ["grpo cold", "grpo hot", "rloo"]
    assert [run.label for run in read_runs(folders[1:])] == ["grpo", "rloo"]
    with pytest.raises(UsageError, match="must be different folders"):
        read_runs([folders[0], tmp_path / "hot" / ".." / "cold"])


def test_only_rollouts_that_fit_are_read(tmp_path, monkeypatch):
    rows = {step: [group(step, ["x" * 2000])] for step in range(1, 12)}
    folder = write_run(tmp_path / "run", rollouts=rows)
    monkeypatch.setattr("groupwise.report.data.READ_LIMIT_BYTES", 9000)
    run = RunData.read(folder)
    steps = [row["step"] for row in run.rollouts]
    # 11 files of 2.2 kB: every second keeps 6, every second of those keeps 4
    assert steps == [1, 5, 9, 11] and run.unread == 7


def test_base_and_last_figures_are_told_apart():
    run = RunData(
        label="a",
        algorithm="a",
        seed=0,
        evaluations=[evaluation(0, 0.1), evaluation(10, 0.5), evaluation(20, 0.8)],
    )
    assert figures_at(run, last=False)["held_out"]["greedy"].value == 0.1
    assert figures_at(run, last=True)["held_out"]["greedy"].value == 0.8
    table = results_table([run])
    assert table.models == ("base", "a")
    untrained = RunData(label="a", algorithm="a", seed=0, evaluations=[evaluation(0, 0.1)])
    assert results_table([untrained]).models == ("base",)
    (chart,) = evaluation_charts([run])
    assert chart.lines[0].low == pytest.approx([0.05, 0.45, 0.75])


def test_curves_of_several_seeds_are_means_with_students_interval():
    runs = [
        RunData(
            label="a",
            algorithm="a",
            seed=s,
            metrics=[{"step": 1, "accuracy": v}],
        )
        for s, v in enumerate((0.2, 0.4, 0.6))
    ]
    (line,) = metric_charts(runs)[0].lines
    expected = seed_mean([0.2, 0.4, 0.6])
    found = (line.mean[0], line.low[0], line.high[0])
    assert found == pytest.approx((expected.value, expected.low, expected.high))
    assert len(line.thin) == 3


def test_curves_smooth_one_seed_and_leave_gaps():
    rows = [{"step": s, "accuracy": v} for s, v in enumerate((0.0, 0.3, 0.6, 0.0), start=1)]
    short = RunData(label="b", algorithm="b", seed=0, metrics=rows[:2])
    chart = metric_charts([RunData(label="a", algorithm="a", seed=0, metrics=rows), short])[0]
    first, second = chart.lines
    assert first.mean == pytest.approx([0.0, 0.3, 0.3, 0.0])  # windows of 1, 3, 3, 1
    assert first.thin[0] == pytest.approx([0.0, 0.3, 0.6, 0.0])
    assert np.isnan(second.mean[2:]).all() and np.isnan(first.low).all()
    assert chart.share


def test_long_runs_are_thinned_and_times_are_averaged():
    run = run_of(steps=3000)
    chart = metric_charts([run])[0]
    assert chart.steps.size <= 400 and (chart.steps[0], chart.steps[-1]) == (1, 3000)
    assert stage_seconds([run]) == {"softrank": pytest.approx({"rollout": 0.3, "update": 0.2})}


def unpack(packed):
    text = packed.text
    if packed.compressed:
        text = gzip.decompress(base64.b64decode(text)).decode("utf-8")
    return json.loads(text)


def test_rollouts_store_every_string_once_and_come_back():
    groups = [group(s, ["same", "other", "same"], parts={"correct": 1.0}) for s in (1, 2)]
    packed = payload([run_of(rollouts=groups)])
    data = unpack(packed)
    assert sorted(set(data["strings"])) == sorted(data["strings"])
    assert [data["strings"][i] for i in data["text"]] == ["same", "other", "same"] * 2
    assert data["parts"] == [[["correct", 1]]] and data["part"] == [0] * 6
    assert [row[-1] for row in data["groups"]] == [3, 3]
    assert (packed.shown, packed.total) == (6, 6)


def test_rollouts_are_thinned_evenly_to_their_budget():
    rng = random.Random(0)
    groups = [group(s, [rng.randbytes(400).hex() for _ in range(4)]) for s in range(100)]
    packed = payload([run_of(rollouts=groups)], budget=60_000)
    steps = [row[1] for row in unpack(packed)["groups"]]
    assert len(packed.text) <= 60_000 and packed.shown < packed.total == 400
    assert steps[0] == 0 and steps[-1] > 80 and max(np.diff(steps)) <= 2 * 100 / len(steps)


def test_rollouts_of_one_seed_per_label_are_shown():
    runs = [run_of("a", s, rollouts=[group(1, [f"a{s}"])]) for s in (3, 1)]
    runs.append(run_of("b", 2, rollouts=[group(1, ["b2"])]))
    packed = payload(runs)
    assert packed.runs == (("a", 1), ("b", 2)) and "a3" not in packed.text
    assert payload([run_of()]) is None


def test_token_surprise_is_a_digit_per_token():
    # −3·logp, rounded down: 0, .3, 3 and 30 (held at 9)
    row = group(1, ["abcdef"], logprobs=[-0.0, -0.1, -1.0, -10.0], pieces=["ab", "c", "de", "f"])
    data = unpack(payload([run_of(rollouts=[row])]))
    assert data["strings"][data["levels"][0]] == "0039"
    assert data["strings"][data["pieces"][0]] == "2121"
    uneven = group(1, ["abcdef"], logprobs=[-1.0], pieces=["abc"])
    data = unpack(payload([run_of(rollouts=[uneven])]))
    assert data["strings"][data["pieces"][0]] == ""


@pytest.mark.parametrize(
    "other", ["plain", "zero\u200bwidth", "a\r\nb", "\x1b[31m\ud800", "\U0001f600"]
)
def test_injected_text_is_marked_in_the_text_that_the_page_shows(other):
    parts = [(f"{other} asks ", False), (f"[\r\n{other}\r\n]", True), (f"{other} answers", False),
             (f"[{other}\r", True), (f"\n{other}", False)]  # fmt: skip
    text, spans = "", []
    for part, injected in parts:
        spans += [[len(text), len(text) + len(part)]] if injected else []
        text += part
    row = group(1, [text], injected=spans)
    data = unpack(payload([run_of(rollouts=[row])]))
    shown = data["strings"][data["text"][0]].encode("utf-16-le")
    places = [span.split("-") for span in data["strings"][data["injected"][0]].split(" ")]
    found = [shown[2 * int(a) : 2 * int(b)].decode("utf-16-le") for a, b in places]
    first, second = visible(parts[1][0]), visible(f"[{other}")
    assert found == [first, second] and text.count(parts[1][0]) == 1


def magnified():
    return {
        "step": 3,
        "prompt": {"text": HOSTILE, "answer": HOSTILE},
        "completions": [completion(HOSTILE, parts={HOSTILE: 1.0}), completion("b", reward=0.0)],
        "advantages": {"softrank": [0.4, 0.0], HOSTILE: [1.0, -1.0]},
    }


def test_hostile_text_adds_no_element_and_no_handler(tmp_path):
    def runs(text):
        sample = {"step": 0, "prompt": {"id": "1", "text": text}, "text": text, "correct": False}
        groups = [group(1, [text], name=text, prompt=text, parts={text: 1.0}, status=text)]
        found = run_of(text, rollouts=groups, samples=[sample, {**sample, "step": 20}])
        odd = {"step": 20, "split": text, "figures": {text: figure(0.5)}}
        metrics = [*found.metrics, {"step": 21, text: 1.0, "seconds": {text: 1.0}}]
        return [
            RunData(
                **{**vars(found), "evaluations": [*found.evaluations, odd], "metrics": metrics}
                | {"config": {"model": {"path": text}, text: text}}
            )
        ]

    bad = Tags(page_of(runs(HOSTILE), tmp_path, title=HOSTILE, magnified=magnified()))
    good = Tags(page_of(runs("plain"), tmp_path, title="plain", magnified=magnified()))
    assert bad.names == good.names
    assert bad.names.count("script") == 3 and "img" not in bad.names
    assert not [key for _, key, _ in bad.attributes if key.startswith("on") or key == "style"]


def test_the_page_reaches_for_nothing_outside(tmp_path):
    page = page_of([run_of(rollouts=[group(1, ["a"])])], tmp_path)
    links = [v for _, key, v in Tags(page).attributes if key in ("src", "href", "srcset", "action")]
    assert links and all(link.startswith("data:") for link in links)
    policy = re.search(r'Security-Policy" content="([^"]+)"', page).group(1)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for name in ("style", "script"):
        text = re.search(rf"<{name}>(.*?)</{name}>", page, flags=re.S).group(1)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg"}


def test_a_page_says_what_computed_and_every_setting_once(tmp_path):
    about = {"kernels": "cpp+onednn", "config": {"group_size": 7, "model": {"kernels": "auto"}}}
    write_run(tmp_path / "run", config=json.dumps(about))
    page = write_run_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "kernels cpp+onednn</p>" in page
    assert page.count("group_size</th>") == page.count("model.kernels</th>") == 1
    damaged = write_run(tmp_path / "damaged", config=json.dumps({"kernels": [{}], "config": []}))
    facts = write_run_report(damaged).read_text(encoding="utf-8").split('class="facts">')[1]
    assert "kernels" not in facts.split("</p>")[0]


def test_settings_that_differ_between_arms_have_a_column_each(tmp_path):
    folders = []
    for name, rate in (("softrank", 0.1), ("grpo", 0.2)):
        config = {"algorithm": {"name": name}, "output": name, "rate": rate, "steps": 3}
        folder = write_run(tmp_path / name, config=json.dumps({"config": config}))
        folders.append(folder)
    page = page_of(read_runs(folders), tmp_path)
    table = page.split("Settings that differ")[1].split("</table>")[0]
    assert '<th scope="row">rate</th><td>0.1</td><td>0.2</td>' in table
    assert '<th scope="row">algorithm.name</th><td>softrank</td><td>grpo</td>' in table
    assert "steps" not in table and "output" not in table
    assert "Settings that differ" not in page_of(read_runs(folders[:1]), tmp_path)


def test_fewer_than_three_seeds_are_marked_as_an_illustration(tmp_path):
    one = [run_of("softrank"), run_of("grpo", end=0.8)]
    page = page_of(one, tmp_path)
    assert "Illustration · one seed" in page and "One seed is an illustration" in page
    two = [run_of(a, s, end=e) for a, e in (("softrank", 0.9), ("grpo", 0.8)) for s in range(2)]
    assert "Illustration · 2 seeds" in page_of(two, tmp_path)
    many = [run_of(a, s, end=e) for a, e in (("softrank", 0.9), ("grpo", 0.8)) for s in range(4)]
    page = page_of(many, tmp_path)
    assert (
        "Illustration ·" not in page
        and "softrank ends at a higher training accuracy than grpo" in page
    )
    assert "contrasts</summary>" in page


def test_comparison_of_runs_pairs_seeds_and_held_out_figures():
    runs = [
        run_of(label, seed, end=end + 0.01 * seed)
        for label, end in (("softrank", 0.7), ("grpo", 0.6))
        for seed in range(3)
    ]
    found = compare_runs(runs)
    assert (found.against, found.seeds) == ("grpo", (0, 1, 2))
    held_out = found.contrasts[-1]
    assert held_out.figure.key == "greedy accuracy (held-out)"
    assert held_out.result.difference.value == pytest.approx(0.1)
    assert compare_runs(runs, against="softrank").contrasts[0].first == "grpo"
    with pytest.raises(UsageError, match="given twice"):
        compare_runs([runs[0], runs[0]])
    with pytest.raises(UsageError, match="at least one"):
        compare_runs([])


def test_samples_are_the_first_prompts_of_the_evaluation(tmp_path):
    samples = [
        {"step": s, "prompt": {"id": f"h{i}", "text": f"question {i}"}, "text": f"said {i} at {s}"}
        for s in (0, 20)
        for i in range(6)
    ]
    page = page_of([run_of(samples=samples)], tmp_path)
    assert "said 0 at 0" in page and "said 0 at 20" in page
    assert "said 4 at 0" not in page


def test_a_reward_that_does_not_say_what_is_right_gets_no_mark(tmp_path):
    sample = {"step": 20, "prompt": {"id": "h", "text": "?"}, "text": "said", "correct": None}
    magnified = {
        "prompt": {"text": "?"},
        "completions": [
            {"text": "paid", "reward": 0.7, "correct": None},
            {"text": "lost", "reward": None, "correct": None, "status": "error"},
        ],
        "advantages": {},
    }
    page = page_of([run_of(samples=[sample])], tmp_path, magnified=magnified)
    assert page.count('title="not judged">?</span>') == 1
    assert '<div class="verdict"><b>0.7</b></div>' in page


def test_one_evaluation_is_no_before_and_after(tmp_path):
    assert "Before and after" in page_of([run_of()], tmp_path)
    run = run_of()
    page = page_of([dataclasses.replace(run, evaluations=run.evaluations[1:])], tmp_path)
    assert "Before and after" not in page and "<h2>After training</h2>" in page


def test_a_run_without_anything_still_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run")
    page = write_run_report(folder, tmp_path / "deep" / "report.html")
    assert page == tmp_path / "deep" / "report.html" and "groupwise" in page.read_text()


def test_files_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        page_of([run_of()], tmp_path / "file")
    with pytest.raises(RunError, match="cannot be written"):
        write_png([run_of()], tmp_path / "file" / "x.png")
    with pytest.raises(UsageError, match="must end in"):
        write_png([run_of()], tmp_path / "x.gif")


def test_pictures_have_curves_and_table_and_repeat_exactly(tmp_path):
    runs = [run_of("softrank", s) for s in range(2)] + [run_of("$grpo_$", s) for s in range(2)]
    png = write_png(runs, tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 20_000
    svg = write_png(runs, tmp_path / "a.svg", title="T").read_text()
    assert ">held-out<" in svg and ">$grpo_$<" in svg and ">greedy %<" in svg
    assert write_png(runs, tmp_path / "b.svg", title="T").read_text() == svg


def test_the_figure_of_the_paper_has_rewards_and_its_table_beside_the_runs(tmp_path):
    runs = [run_of(label, seed, end=end) for label, end in (("softrank", 0.9), ("grpo", 0.8))
            for seed in range(2)]  # fmt: skip
    runs = [
        dataclasses.replace(run, metrics=[{**row, "reward": 7.0} for row in run.metrics])
        for run in runs
    ]
    svg = write_png(runs, tmp_path / "a.svg", figure="paper").read_text()
    assert ">Reward, mean of 2 seeds, 95 % interval<" in svg and ">accuracy %<" in svg
    assert re.findall(r">([\d.]+)<", svg)[-4:] == ["90.0", "80.0", "75.6", "72.4"]
    assert ">base<" not in svg
    drawn = write_png(runs, tmp_path / "b.svg", figure="entropy").read_text()
    assert ">Entropy (nats per token), mean of 2 seeds, 95 % interval<" in drawn
    with pytest.raises(UsageError, match="figure = 'rewards': must be a metric .* mean reward"):
        write_png(runs, tmp_path / "c.svg", figure="rewards")


def test_a_wide_band_does_not_flatten_the_curves_of_a_picture():
    chart = metric_charts([run_of(seed=seed) for seed in range(2)])[1]
    [line] = chart.lines
    far = np.full(line.mean.size, 1e6)
    wild = dataclasses.replace(line, low=-far, high=far)
    low, high = _limits(dataclasses.replace(chart, lines=(wild,)))
    assert low == 0 and 1 <= high < 1.1


def test_figures_of_evaluations_are_explained_where_they_are_shown(tmp_path):
    runs = [run_of()]
    rows = [evaluation(step, 0.1 * step) for step in range(4)]
    [chart] = evaluation_charts([dataclasses.replace(runs[0], evaluations=rows)])
    meaning = "Share of prompts whose most likely answer (temperature 0) is correct."
    assert chart.meaning == meaning == figure_meaning("greedy")
    assert f'class="explained" title="{meaning}">greedy</th>' in page_of(runs, tmp_path)


def test_ten_thousand_long_rollouts_stay_small(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(4000)]
    groups = [
        group(s, [" ".join(rng.choices(words, k=100)) for _ in range(8)]) for s in range(1250)
    ]
    path = write_comparison_report(
        [run_of(rollouts=groups)], title="Long", output=tmp_path / "long.html"
    )
    page = path.read_text(encoding="utf-8")
    assert len(page.encode()) < 8_000_000
    assert "All 10,000 logged" in page and '<script type="application/octet-stream"' in page
