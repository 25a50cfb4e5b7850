"""The report in a real browser: fast, quiet, readable on a phone, and deaf to hostile text."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

from browser import NEEDS_BROWSER, Browser
from groupwise.report import RunData, write_comparison_report
from groupwise.report.live import LivePage, serve

pytestmark = [NEEDS_BROWSER, pytest.mark.slow]

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def run_of(label, *, steps=40, prompts=16, size=8, text=""):
    rng = random.Random(label)
    metrics, rollouts = [], []
    for step in range(1, steps + 1):
        share = step / steps
        metrics.append({"step": step, "accuracy": share, "reward": share, "entropy": 1 - share})
        for p in range(prompts):
            total = random.Random(step * 1000 + p).randint(10, 99)
            completions = [
                {
                    "text": f"{text}<reasoning>{'Think ' * 30}{rng.random()}</reasoning> {total}",
                    "reward": float(rng.random() < share),
                    "correct": float(rng.random() < share),
                    "parts": {"correct": 1.0},
                    "advantage": rng.uniform(-1, 1),
                    "finish": "stop",
                    "tokens": 12,
                    "logprobs": [-rng.random() for _ in range(12)],
                }
                for _ in range(size)
            ]
            prompt = {"id": f"{step}-{p}", "text": f"{text}Sum to {total}?", "answer": str(total)}
            rollouts.append({"step": step, "prompt": prompt, "completions": completions})
    figures = {name: {"value": 0.9, "low": 0.85, "high": 0.95} for name in ("greedy", "sampled")}
    evaluations = [{"step": s, "split": "held_out", "figures": figures} for s in (0, steps)]
    return RunData(
        label=label,
        algorithm=label,
        seed=0,
        metrics=metrics,
        evaluations=evaluations,
        rollouts=rollouts,
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    runs = [run_of("softrank"), run_of("grpo")]
    return write_comparison_report(runs, title="Two algorithms", output=path)


def test_ten_thousand_rollouts_open_in_two_seconds(browser, page):
    assert page.stat().st_size < 8_000_000
    assert 'type="application/octet-stream" id="rollout-data"' in page.read_text("utf-8")
    # The machine may be busy: the best of three counts.
    assert min(browser.open(page) for _ in range(3)) < 2000
    assert browser.value("document.querySelector('#rollouts .lead').textContent").startswith(
        "All 10,240 logged completions"
    )
    assert browser.complaints() == []


def test_charts_are_drawn_and_answer_to_the_pointer(browser, page):
    browser.open(page)
    assert browser.value("document.querySelectorAll('.hero path.bold').length") == 2
    box = browser.value(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        "(document.querySelector('.hero svg').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    tip = browser.wait("document.querySelector('.hero .tip').textContent")
    assert " steps" in tip and "softrank" in tip and "%" in tip
    browser.value("document.querySelector('.key').click()")
    assert browser.value("document.querySelectorAll('.hero path.bold').length") == 1
    assert browser.complaints() == []


def test_rollouts_are_browsed_filtered_and_searched(browser, page):
    browser.open(page)
    count = "document.querySelector('#rollouts .count').textContent"
    assert browser.value(count) == "16 prompts at step 40"
    columns = "document.querySelector('#rollouts .columns').children.length"
    assert browser.value(columns) == 2
    browser.value("document.querySelectorAll('.tabs button')[1].click()")
    assert browser.value(columns) == 1
    browser.value(
        "(s => { s.value = 0; s.dispatchEvent(new Event('input')); })"
        "(document.getElementById('step'))"
    )
    assert browser.value(count) == "16 groups at step 1"
    browser.value(
        "(s => { s.value = 'right and wrong'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#rollouts select'))"
    )
    browser.value(
        "(s => { s.value = 'sum to 42?'; s.dispatchEvent(new Event('input')); })"
        "(document.querySelector('#rollouts input[type=search]'))"
    )
    browser.wait(f"{count}.includes('match “sum to 42?”')")
    prompts = "[...document.querySelectorAll('#rollouts .prompt')].map(p => p.textContent)"
    found = browser.value(prompts)
    assert found and all("Sum to 42?" in text for text in found)
    browser.value("document.querySelector('.check input').click()")
    assert browser.value("document.querySelectorAll('#rollouts .surprise').length") > 0
    assert browser.complaints() == []


def test_two_runs_are_told_apart_answer_by_answer(browser, tmp_path):
    runs = [run_of(label, steps=2, prompts=2, size=2) for label in ("softrank", "grpo")]
    said = [["So 3+4=7 it is.", "The same."], ["So 3+4=8 it is.", "The same."]]
    for run, texts in zip(runs, said, strict=True):
        for group in run.rollouts:
            for completion, text in zip(group["completions"], texts, strict=True):
                completion["text"] = text
    path = write_comparison_report(runs, title="Apart", output=tmp_path / "apart.html")
    for width in (1280, 390):
        browser.open(path, width=width)
        assert browser.value("document.querySelectorAll('#rollouts mark').length") == 0
        boxes = "[...document.querySelectorAll('#rollouts .check')]"
        browser.value(
            f"{boxes}.find(l => l.textContent.includes('differences')).firstChild.click()"
        )
        marked = "[...document.querySelectorAll('#rollouts .card:first-child mark')]"
        assert browser.value(f"{marked}.map(m => m.textContent)") == ["7", "8"]
        texts = "[...document.querySelectorAll('#rollouts .card:first-child .text')]"
        assert browser.value(f"{texts}.map(t => t.textContent)") == [
            "So 3+4=7 it is.", "So 3+4=8 it is.", "The same.", "The same.",
        ]  # fmt: skip
        note = "document.querySelector('#rollouts .card .note').textContent"
        assert browser.value(note) == "1 of 2 answers differ."
        assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []


def test_equal_completions_of_a_group_are_one_row_with_their_number(browser, tmp_path):
    run = run_of("softrank", steps=1, prompts=1, size=4)
    first, *rest = run.rollouts[0]["completions"]
    rest[:2] = [dict(first), dict(first)]
    unlike = {**first, "reward": 1.0 - first["reward"]}
    run.rollouts[0]["completions"] = [first, unlike, *rest[:2]]
    browser.open(write_comparison_report([run], title="Equal", output=tmp_path / "equal.html"))
    rows = "[...document.querySelectorAll('#rollouts .sample .verdict')].map(v => v.textContent)"
    folded, single = browser.value(rows)
    assert "3 times" in folded and "times" not in single
    assert browser.complaints() == []


def test_a_phone_shows_the_page_without_sideways_scrolling(browser, page):
    browser.open(page, width=390)
    assert browser.value("document.documentElement.scrollWidth") <= 390
    assert browser.value("document.querySelector('.hero svg').getBoundingClientRect().width") <= 390


def test_dark_follows_the_system_and_the_button_overrides_it(browser, page):
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    browser.open(page)
    light = browser.value(colour)
    browser.open(page, dark=True)
    dark = browser.value(colour)
    assert dark != light
    browser.value("document.getElementById('theme').click()")
    assert browser.value(colour) == light


def test_hostile_text_is_shown_and_never_run(browser, tmp_path):
    run = run_of(f"x{HOSTILE}", steps=3, prompts=2, text=f"{HOSTILE}\x1b[31m\u202e")
    path = write_comparison_report(
        [run], title=f"Title {HOSTILE}", output=tmp_path / "hostile.html"
    )
    browser.open(path)
    time.sleep(0.2)
    assert browser.value("document.title").startswith("Title </script>")
    assert browser.value("document.images.length") == 0
    text = browser.value("document.querySelector('#rollouts .text').textContent")
    assert text.startswith(HOSTILE) and "␛[31m⟨U+202E⟩" in text
    assert browser.complaints() == []


def test_the_page_of_a_run_in_progress_follows_it(browser, tmp_path):
    started, addresses = threading.Event(), []

    def note(address):
        addresses.append(address)
        started.set()

    def write_steps(count):
        (tmp_path / "config.json").write_text(json.dumps({"config": {"steps": 9, "seed": 0}}))
        rows = [{"step": n, "reward": n / 10, "accuracy": n / 10} for n in range(1, count + 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    arguments = {"port": 0, "started": note}
    threading.Thread(
        target=serve, args=(LivePage(tmp_path),), kwargs=arguments, daemon=True
    ).start()
    assert started.wait(10)
    (address,) = addresses
    for width, dark in ((390, False), (1280, True)):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        browser.visit(address, width=width, dark=dark)
        assert "Nothing to show yet" in browser.value("document.body.innerText")
        for count in (2, 3):
            browser.value("window.before = true")
            write_steps(count)
            browser.wait("!window.before && document.querySelector('.hero path') && true")
            assert browser.value("document.documentElement.scrollWidth") <= width
        assert [found for found in browser.complaints(address) if "favicon" not in str(found)] == []
