"""The search recipes on four published data sets, with a model that is made in minutes.

    python studies/search/real.py DATA OUTPUT [NAME …]

DATA holds the folders `hotpotqa`, `musique`, `squad` and `korquad` with the published files. For
each of them, this writes training and held-out questions, trains a base model of a million
parameters on lists of words and on demonstrations (the question is the query, and the answer
follows the result), trains it by a recipe, and prints held-out figures by number of hops.

The model is too small to read, so few of its answers are right: the table shows what the recipes do
with real questions. Their instructions are left out, because it cannot follow them.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from groupwise.config import Config, load
from groupwise.config.connect import (
    configured_engine,
    load_to_answer,
    make_environment,
    make_scorer,
)
from groupwise.config.data import load_eval, rendered
from groupwise.environments import SEARCH_TAGS, Tags
from groupwise.environments.retrieval import read_corpus
from groupwise.evaluation.measure import measure
from groupwise.models import save_policy
from groupwise.prompts.examples import Example
from groupwise.prompts.generators.small_tokenizer import made_tokenizer
from groupwise.prompts.rows import read_rows
from groupwise.training.stages.base_model import small_policy
from groupwise.training.stages.sft import fit
from groupwise.types import Prompt, Stream

Row = Mapping[str, Any]


class DataSet(NamedTuple):
    """The recipe that trains on a data set, its files, and every how many-th question is used."""

    recipe: str
    questions: str
    corpus: str
    every: int = 1


class Sizes(NamedTuple):
    """Optimizer steps on short and on longer lists of words and on demonstrations, and steps of the
    recipe."""

    short: int = 500
    longer: int = 400
    showing: int = 200
    training: int = 20


SETS = {
    "hotpotqa": DataSet("search-r1", "questions.json", "corpus.json"),
    "musique": DataSet("research", "questions.json", "corpus.json"),
    "squad": DataSet("r1-searcher-answer", "dev-v2.0-part.json", "dev-v2.0-part.json", 7),
    "korquad": DataSet("search-r1", "KorQuAD_v1.0_dev.json", "KorQuAD_v1.0_dev.json", 29),
}
AROUND = {
    "search-r1": ("", "<answer>{answer}</answer>"),
    "research": ("<think></think>", "<answer>\\boxed{{{answer}}}</answer>"),
    "r1-searcher-answer": ("", "</think><answer>{answer}</answer>"),
}
"""What a demonstration writes before the query and after the result."""
THINK_AND_ANSWER = ("<think>", "</think>", "<answer>", "</answer>")
VOCABULARY, CONTEXT = 2048, 1024
SHOWN = 60
"""Characters at its beginning by which a passage is recognised in a completion."""


def rows_of(name: str, folder: Path) -> list[Row]:
    """Questions with `answer`, `hops`, and the beginnings of the passages that they need."""
    rows: list[Row] = []
    for row in read_rows(str(folder / SETS[name].questions)):
        if name == "hotpotqa":
            titles = {title for title, _ in row["supporting_facts"]}
            needed = ["".join(text) for title, text in row["context"] if title in titles]
        elif name == "musique":
            pages = row["paragraphs"]
            needed = [page["paragraph_text"] for page in pages if page["is_supporting"]]
        else:
            needed = [] if row["answer"] == "unknown" else [row["context"]]
        hops = int(row["id"][0]) if name == "musique" else len(needed)
        starts = [text.strip()[:SHOWN] for text in needed]
        asked = {"question": row["question"], "answer": row["answer"]}
        rows.append({**asked, "hops": hops, "needed": starts})
    return rows[:: SETS[name].every]


def settings(name: str, data: Path, output: Path, *, steps: int) -> list[str]:
    """What is changed of the recipe: the data, the model, and sizes."""
    return [
        f"model.path={output / 'base'}",
        f"output={output / 'run'}",
        f"data.train={output / 'train.jsonl'}",
        f"data.eval={output / 'held_out.jsonl'}",
        "data.wording={question}",
        "data.chat=false",
        "data.system=",
        f"environment.corpus={data / name / SETS[name].corpus}",
        "environment.top_k=1",
        "environment.max_result_tokens=192",
        "environment.max_injected_tokens=576",
        "sampling.max_tokens=96",
        f"steps={steps}",
        "prompts_per_step=8",
        "group_size=4",
        "optimizer.learning_rate=1e-4",
        "optimizer.warmup_steps=2",
        "evaluation.every_steps=0",
        "evaluation.prompts=100",
        "evaluation.samples=1",
        "evaluation.validation=0",
        "guards.silent_rewards=say",
        "threads=1",
    ]


def tags_of(config: Config) -> Tags:
    assert config.environment is not None
    return SEARCH_TAGS[config.environment.settings["tags"]]


def tokenizer_of(texts: Sequence[str], tags: Sequence[str]) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer whose merges are those of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator(texts, trainer)
    model = json.loads(learned.to_str())["model"]
    return made_tokenizer(model["vocab"], model["merges"], tags=tags)


def lists_of_words(texts: Sequence[str], tags: Tags, *, most: int, size: int) -> Iterator[Example]:
    """Words in any order as question and query: they teach to copy."""
    words, rng = sorted({word for text in texts for word in text.split()}), random.Random(most)
    for number in range(size):
        text = " ".join(rng.choices(words, k=rng.randint(1, most)))
        query = f"{tags.call[0]}{text}{tags.call[1]}"
        yield Example(prompt=Prompt(id=f"list {number}", text=text), completion=query)


def demonstrations(name: str, config: Config, rows: Sequence[Row]) -> Iterator[Example]:
    """The question as the query, the beginning of the result, and the answer."""
    assert config.environment is not None
    environment, tags = make_environment(config.environment), tags_of(config)
    before, after = AROUND[SETS[name].recipe]
    for number, row in enumerate(rows):
        prompt = Prompt(id=f"question {number}", text=row["question"])
        asked = f"{before}{tags.call[0]}{row['question']}{tags.call[1]}"
        reply = environment.reply(environment.begin(prompt, stream=Stream()), asked)
        result = reply.text[:400] + reply.text[-reply.frame[1] :]
        answer = row["answer"] if isinstance(row["answer"], str) else row["answer"][0]
        yield Example(
            prompt=prompt,
            completion=asked + result + after.format(answer=answer),
            injected=((len(asked), len(asked) + len(result)),),
        )


def make_base(name: str, config: Config, rows: Sequence[Row], output: Path, sizes: Sizes) -> None:
    """Train the base model and write it."""
    assert config.environment is not None
    tags = tags_of(config)
    passages = read_corpus(config.environment.settings["corpus"])
    texts = [*(passage.text for passage in passages), *(row["question"] for row in rows)]
    marks = [*THINK_AND_ANSWER, *(tag.strip() for tag in (*tags.call, *tags.result))]
    policy = small_policy(tokenizer=tokenizer_of(texts, marks), context=CONTEXT)
    phases = (
        (list(lists_of_words(texts, tags, most=4, size=64 * sizes.short)), sizes.short, 64, 4e-3),
        (
            list(lists_of_words(texts, tags, most=16, size=64 * sizes.longer)),
            sizes.longer,
            64,
            4e-3,
        ),
        (list(demonstrations(name, config, rows)), sizes.showing, 8, 1e-3),
    )
    for examples, steps, batch, rate in phases:
        *_, last = fit(
            policy, examples, steps=steps, batch_size=batch, learning_rate=rate, warmup_steps=20
        )
        print(f"{name}: loss {last.loss:.2f} after {steps} steps", flush=True)
    save_policy(policy, output / "base")


def train(name: str, data: Path, output: Path, sizes: Sizes) -> None:
    """Write the questions of a data set, make the base model, and train it by the recipe."""
    output.mkdir(parents=True, exist_ok=True)
    rows = rows_of(name, data / name)
    for file, part in (("train.jsonl", rows[::2]), ("held_out.jsonl", rows[1::2])):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (output / file).write_text("".join(lines), encoding="utf-8")
    changes = settings(name, data, output, steps=sizes.training)
    make_base(name, load(SETS[name].recipe, changes), rows[::2], output, sizes)
    given = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "groupwise", "train", SETS[name].recipe, *given]
    subprocess.run(command, check=True)


def figures(name: str, data: Path, output: Path) -> Iterator[str]:
    """Lines of the table: greedy answers of the trained model to the held-out questions."""
    config = load(SETS[name].recipe, settings(name, data, output, steps=1))
    policy = load_to_answer(config, output / "run" / "final")
    ready = rendered(config, policy, load_eval(config))
    with (
        closing(make_scorer(config)) as scorer,
        closing(configured_engine(config, policy)) as engine,
    ):
        found = measure(
            engine, scorer, ready.prompts, ready.tokens, sampling=config.sampling, samples=1
        )
    (reward,) = found.greedy_parts.values()
    for hops in sorted({prompt.columns["hops"] for prompt in ready.prompts}):
        places = [i for i, prompt in enumerate(ready.prompts) if prompt.columns["hops"] == hops]
        answers = [found.greedy_groups[i].completions[0] for i in places]
        shares = [
            fmean(start in answer.text for start in ready.prompts[i].columns["needed"])
            for i, answer in zip(places, answers, strict=True)
            if hops
        ]
        cells = (
            f"{fmean(answer.values['calls'] for answer in answers):.2f}",
            f"{fmean(shares):.2f}" if shares else "",
            f"{fmean(len(answer.tokens) - answer.own_tokens for answer in answers):.0f}",
            f"{fmean(float(reward[i, 0]) for i in places):.2f}",
            f"{fmean(float(found.greedy[i]) for i in places):.2f}",
        )
        label = f"{name}, {SETS[name].recipe}, {hops} hops ({len(places)})"
        yield f"| {label} | {' | '.join(cells)} |"


def main(data: Path, output: Path, names: Sequence[str]) -> None:
    lines = [
        "| | calls | needed passages read | injected tokens | reward | right |",
        "|---" * 6 + "|",
    ]
    for name in names or SETS:
        train(name, data, output / name, Sizes())
        lines += figures(name, data, output / name)
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
