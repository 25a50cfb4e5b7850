"""The report in a real browser: fast, quiet, readable on a phone, and deaf to hostile text."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import time

import pytest

from groupwise.report import RunData, write_comparison_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs chromium, which is not installed"),
    pytest.mark.slow,
]

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--remote-debugging-pipe"
).split()

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)


class Browser:
    """A headless browser, spoken to over its debugging pipe (one JSON message per NUL)."""

    def __init__(self, profile):
        # The browser reads at 3 and writes at 4; ends above 10 cannot collide with those.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (*os.pipe(), *os.pipe())]
        inward, self.outward, self.inbox, outward = ends

        def arrange():
            os.dup2(inward, 3)
            os.dup2(outward, 4)

        self.process = subprocess.Popen(
            [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=arrange,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inward)
        os.close(outward)
        self.count, self.buffer, self.events, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.outward, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def receive(self):
        while b"\0" not in self.buffer:
            chunk = os.read(self.inbox, 1 << 20)
            assert chunk, "the browser closed its pipe"
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(line)

    def value(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression, seconds=20.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.value(expression):
                return found
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}")

    def open(self, path, *, width=1280, dark=False):
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # By way of a blank page, so that what is found is not of the page before.
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.call("Page.navigate", url=path.as_uri())
        ready = f"location.href === '{path.as_uri()}' && document.documentElement?.dataset.ready"
        return int(self.wait(ready))

    def complaints(self):
        """Exceptions, errors in the log, and requests for anything but the page itself."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"])
            if event.get("method") == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    found.append(url)
        return found

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.outward)
        os.close(self.inbox)


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
