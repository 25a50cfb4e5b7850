"""Tools inside rollouts: completions that wait in the group engine, against continuing them by
requests and against a barrier per round.

    python benchmarks/tools.py --json benchmarks/results/tools.json

The model is made of noise and asks at any of some single tokens, about twice in a completion; the
replies are the same on both sides, and so are all tokens (this is checked). Cases:

    prompt-24, prompt-300   CPU time of native and continued rollouts, replies at once
    alone-24, alone-300     the same, where every completion is continued by a request of its own
    no-tool                 CPU time of tools that no completion ever asks, against none
    slow-tool               tokens per second where the tool of every eighth prompt takes 100 times
                            as long as the others, against none that does; the engine knows from an
                            earlier rollout how long each takes
    stragglers              tokens per second where 2 % of calls take a second, against rounds in
                            which all completions wait for the slowest call
"""

from __future__ import annotations

import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from groupwise.environments import Reply
from groupwise.environments.by_column import ByColumn
from groupwise.rollouts import GroupEngine
from groupwise.rollouts.rows import EMPTY
from groupwise.rollouts.tools import ToolEngine
from groupwise.rollouts.tools.injection import Injector, extended
from groupwise.settings import EnvironmentSettings
from groupwise.training.stages.base_model import small_policy
from groupwise.types import Group, Limits, Prompt, Request, Requests, Sampling, Stream
from harness import Report, arguments, chosen, ratios

CASES = (
    "prompt-24",
    "prompt-300",
    "alone-24",
    "alone-300",
    "no-tool",
    "slow-tool",
    "stragglers",
)
COLUMNS = ("case", "calls", "native_s_per_1000", "other_s_per_1000", "speedup", "same")
STOPS = tuple(map(chr, range(1, 17)))
"""Characters of one token each: of 512 tokens that are about equally likely, every 32nd asks."""
GROUP, ROWS = 8, 64
SAMPLING = Sampling(max_tokens=64)
SETTINGS = EnvironmentSettings(
    name="noise", workers=64, max_result_tokens=24, max_injected_tokens=240, timeout_s=60.0
)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Replies of 16 tokens that follow from what was asked.

    Attributes:
        seconds: that a call of a prompt takes, by what was asked.
    """

    seconds: Callable[[str, str], float] = lambda prompt, asked: 0.0
    stops: tuple[str, ...] = STOPS

    def begin(self, prompt: Prompt, *, stream: Stream) -> str:
        return prompt.id

    def reply(self, state: str, text: str) -> Reply:
        if wait := self.seconds(state, text):
            time.sleep(wait)
        rng = random.Random(zlib.crc32(f"{state} {text}".encode()))
        return Reply(text="".join(rng.choice("0123456789") for _ in range(16)))


class Continued:
    """The group engine as one in which completions cannot wait.

    Args:
        alone: whether each completion is continued by a request of its own; otherwise those of a
            prompt that can go on at the same time share one, and so the prompt.
    """

    def __init__(self, engine: GroupEngine, *, alone: bool) -> None:
        self.engine, self.exact_continuation = engine, engine.exact_continuation
        self.alone = alone

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        return self.engine.generate(singles(requests) if self.alone else requests, sampling, limits)

    def publish(self, weights: Any) -> dict[str, float]:
        return dict(self.engine.publish(weights))

    def close(self) -> None:
        self.engine.close()


def singles(requests: Requests) -> Iterator[Request | None]:
    """Begun completions one by one."""
    for request in requests:
        if request is None or not request.begun:
            yield request
            continue
        for sample, begun in zip(request.wanted, request.begun, strict=True):
            yield replace(request, samples=(sample,), begun=(begun,))


def requests(count: int, *, length: int) -> list[Request]:
    """Prompts of one length, made of noise."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, 500, (count, length), generator=generator).tolist()
    return [
        Request(prompt=Prompt(id=str(n), text=""), tokens=ids, group=GROUP, stream=Stream(place=n))
        for n, ids in enumerate(tokens)
    ]


def rollout(
    engine: GroupEngine,
    asked: list[Request],
    environment: Noise,
    *,
    native: bool = True,
    alone: bool = False,
) -> list[Group]:
    """The groups, in order."""
    tools = ToolEngine(
        engine if native else Continued(engine, alone=alone),
        environment,
        policy=engine.policy,
        settings=SETTINGS,
        max_rows=ROWS,
    )
    return in_order(tools, asked)


def with_tools(engine: GroupEngine, *, rare_s: float) -> ToolEngine:
    """An engine with two tools, of which the rarer one takes `rare_s` seconds."""
    often, rare = (Noise(seconds=lambda *_, each=each: each) for each in (0.001, rare_s))
    environment = ByColumn({"often": often, "rare": rare}, column="tool")
    return ToolEngine(engine, environment, policy=engine.policy, settings=SETTINGS, max_rows=ROWS)


def in_order(engine: ToolEngine, asked: list[Request]) -> list[Group]:
    return sorted(engine.generate(asked, SAMPLING), key=lambda group: group.stream.place)


def rounds(engine: GroupEngine, asked: list[Request], environment: Noise) -> list[Group]:
    """The same by rounds: every completion is written up to its call, all calls are made at once,
    and nothing goes on before the last of them is answered."""
    policy = engine.policy
    injector = Injector(policy, max_tokens=SETTINGS.max_result_tokens)
    sampling = SAMPLING.model_copy(update={"stop": STOPS})
    written = {(r.prompt.id, n): EMPTY for r in asked for n in range(GROUP)}
    going, pool = set(written), ThreadPoolExecutor(SETTINGS.workers)
    while going:
        open_requests = []
        for request in asked:
            samples = tuple(n for n in range(GROUP) if (request.prompt.id, n) in going)
            begun = tuple(written[request.prompt.id, n] for n in samples)
            if samples:
                open_requests.append(replace(request, samples=samples, begun=begun))
        calls = {}
        for group in engine.generate(open_requests, sampling):
            for sample, one in zip(group.samples, group.completions, strict=True):
                key = (group.prompt.id, sample)
                written[key] = one
                since = list(one.tokens[max((n + 1 for n, own in enumerate(one.mask) if not own),
                                            default=0) :])  # fmt: skip
                text = str(policy.tokenizer.decode(since))
                if one.finish == "stop" and any(stop in text for stop in STOPS):
                    calls[key] = pool.submit(environment.reply, key[0], text)
        for key, call in calls.items():
            written[key] = extended(written[key], injector.encode(call.result()))
        going = set(calls)
    return [
        Group(
            prompt=request.prompt,
            prompt_tokens=request.tokens,
            completions=tuple(written[request.prompt.id, n] for n in range(GROUP)),
            stream=request.stream,
            samples=request.wanted,
        )
        for request in asked
    ]


def tokens(groups: list[Group]) -> list[list[int]]:
    return [list(one.tokens) for group in groups for one in group.completions]


def calls_of(groups: list[Group]) -> float:
    """Calls per completion."""
    return statistics.mean(one.values["calls"] for group in groups for one in group.completions)


def timed(run: Callable[[], list[Group]], clock: Callable[[], float]) -> tuple[list[Group], float]:
    """The groups, and the seconds for 1000 tokens of the policy."""
    start = clock()
    groups = run()
    own = sum(one.own_tokens for group in groups for one in group.completions)
    return groups, 1000 * (clock() - start) / own


def sides(
    engine: GroupEngine, case: str, *, prompts: int
) -> tuple[Callable[[], list[Group]], Callable[[], list[Group]], Callable[[], float]]:
    """What is compared, and by which clock."""
    asked = requests(prompts, length=300 if case.endswith("-300") else 24)
    if case.startswith(("prompt", "alone")):
        alone = case.startswith("alone")
        return (
            lambda: rollout(engine, asked, Noise()),
            lambda: rollout(engine, asked, Noise(), native=False, alone=alone),
            time.process_time,
        )
    if case == "no-tool":
        return (
            lambda: rollout(engine, asked, Noise(stops=("</never>",))),
            lambda: sorted(engine.generate(asked, SAMPLING), key=lambda g: g.stream.place),
            time.process_time,
        )
    if case == "slow-tool":
        asked = [
            replace(
                each, prompt=replace(each.prompt, columns={"tool": "often" if n % 8 else "rare"})
            )
            for n, each in enumerate(asked)
        ]
        slow, fast = (with_tools(engine, rare_s=seconds) for seconds in (0.1, 0.001))
        return lambda: in_order(slow, asked), lambda: in_order(fast, asked), time.perf_counter
    rare = Noise(seconds=lambda _, text: 1.0 if zlib.crc32(text.encode()) % 50 == 0 else 0.0)
    return (
        lambda: rollout(engine, asked, rare),
        lambda: rounds(engine, asked, rare),
        time.perf_counter,
    )


def main() -> None:
    parser = arguments(__doc__ or "", CASES)
    parser.add_argument("--prompts", type=int, default=64, help="of a rollout (default 64)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        options.prompts, options.repeats = 8, 1
    report = Report("tools", options)
    engine = GroupEngine(small_policy(), max_rows=ROWS)
    for case in chosen(options, CASES, CASES):
        native, other, clock = sides(engine, case, prompts=options.prompts)
        found, wanted = native(), other()  # kernels are compiled before anything is timed
        ours, theirs = [], []
        for repeat in range(options.repeats):
            for run, seconds in [(native, ours), (other, theirs)][:: 1 if repeat % 2 else -1]:
                seconds.append(timed(run, clock)[1])
        report.add(
            {
                "case": case,
                "calls": calls_of(found),
                "native_s_per_1000": statistics.median(ours),
                "other_s_per_1000": statistics.median(theirs),
                "speedup": ratios(theirs, ours),
                "same": tokens(found) == tokens(wanted),
            }
        )
    report.close(COLUMNS)


if __name__ == "__main__":
    main()
