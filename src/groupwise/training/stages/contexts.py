"""Candidate contexts for every question: which of many rules may decide it, as a column."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args

from groupwise.config import Config
from groupwise.config.connect import load_to_answer
from groupwise.config.data import load_eval, load_train
from groupwise.environments.retrieval.corpus import Passage, read_corpus
from groupwise.environments.retrieval.index import Index
from groupwise.errors import UsageError, suggest
from groupwise.rewards.builtin.contexts import rank_contexts, scorer_of
from groupwise.rewards.builtin.korean import split_answer
from groupwise.rundir.files import append_text
from groupwise.rundir.provenance import digest, fingerprint, write_origin
from groupwise.training.monitor.progress import Progress, show_progress
from groupwise.training.stages.blocks import begun, data_hashes, whole_blocks
from groupwise.training.stages.rows import line
from groupwise.types import Prompt

Method = Literal["perplexity", "search"]
WORDING = (
    "{question}\n\n참고할 규정:\n{contexts}\n\n알맞은 규정의 번호를 먼저 "
    "<context>번호</context> 꼴로 쓰고, 이어서 답을 <answer>와 </answer> 사이에 쓰십시오."
)
"""The prompt template with candidates, for the rewards `context_pick` and `korean_exact_match`."""

Find = Callable[[str, str], Sequence[tuple[int, float]]]
"""Places and scores of the rules for a question and its answer, best first."""


def find_contexts(
    config: Config,
    rules: str | Path | None,
    output: str | Path,
    *,
    model: str | Path | None = None,
    by: Method = "perplexity",
    count: int = 5,
    rule: str = "rule",
    wording: str = WORDING,
    split: str = "train",
    progress: Progress | None = None,
) -> Path:
    """Write the questions of a recipe with the rules that may decide each.

    A row has the columns of its prompt, `id`, `question`, `answer`, `candidates` (texts, in an
    order drawn from the id), `scores`, `gold` (the number of the right candidate, from 1),
    `prompt`: the question with the numbered candidates, and, where candidate and answer are known,
    `completion`, which supervised training learns. An interrupted call continues after its last
    row.

    Args:
        config: of the recipe: its data, and how its model is loaded.
        rules: one rule per line (.txt), or a file as `read_corpus` reads it; None takes the
            reasons that the training answers give, each once.
        output: the file to write.
        model: scores answers by "perplexity"; None takes the recipe's.
        by: "perplexity" ranks by how much a rule raises the probability of the reference answer,
            see `rank_contexts`. It needs the answer, so it labels training data only. "search"
            ranks by the words shared with the question (BM25), which works for new questions.
        count: candidates per question, at most.
        rule: column with the text of the rule that decides a question. Where rows have it, it is
            always among the candidates of "perplexity", and `gold` is its number; elsewhere `gold`
            is the best one by perplexity, and None by search.
        wording: of the prompt, with {question} and {contexts}.
        split: "train" or "eval".
        progress: shows the questions under the name "contexts", and is closed; None shows them on
            standard error.

    Returns:
        The file.

    Raises:
        UsageError: no rules, a question without a reference, or a file of other settings.

    Source: Korean_QA_RAG_2025: five candidates of 142 rules by perplexity, and a policy picks.
    """
    _check(by, count, wording)
    texts = _reasons(config) if rules is None else read_rules(rules)
    prompts = load_train(config) if split == "train" else load_eval(config)
    path, chosen = Path(output), str(model or config.model.path)
    settings = _settings(
        config, rules, chosen, by=by, count=count, rule=rule, wording=wording, split=split
    )
    finished = begun(path, settings)
    kept = whole_blocks(path, [1] * len(prompts))
    with closing(progress or show_progress({"contexts": len(prompts)})) as showing:
        find = _finder(config, texts, chosen, by) if kept < len(prompts) else None
        for number, prompt in enumerate(prompts[kept:], start=kept + 1):
            assert find is not None
            row = _row(prompt, texts, find, by=by, count=count, rule=rule, wording=wording)
            append_text(path, line(row))
            showing.step("contexts", number, {})
    if not finished:
        write_origin(path, settings | {"finished": True, "rows": len(prompts)})
    return path


def read_rules(source: str | Path) -> list[str]:
    """The rules of a file, each once: the lines of a .txt file, or passages.

    Raises:
        UsageError: no such file, or nothing in it.
    """
    path = Path(source).expanduser()
    if path.suffix != ".txt":
        return [passage.contents for passage in read_corpus(str(source))]
    try:
        lines = [text.strip() for text in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"rules = {str(source)!r}: cannot be read ({error}).") from None
    found = list(dict.fromkeys(text for text in lines if text))
    if not found:
        raise UsageError(f"rules = {str(source)!r}: contains no rules.")
    return found


def _reasons(config: Config) -> list[str]:
    """The distinct reasons of the training answers, in the form of the Korean orthography task."""
    reasons = [split_answer(str(prompt.answer))[1] for prompt in load_train(config)]
    found = list(dict.fromkeys(each for each in reasons if each))
    if not found:
        raise UsageError("rules: must be given, as the training answers name no reasons.")
    return found


def _check(by: str, count: int, wording: str) -> None:
    if by not in get_args(Method):
        raise UsageError(f"by = {by!r}: {suggest(by, get_args(Method))}")
    if count < 1:
        raise UsageError(f"count = {count}: must be at least 1.")
    if "{question}" not in wording or "{contexts}" not in wording:
        raise UsageError(f"wording = {wording!r}: must contain {{question}} and {{contexts}}.")


def _finder(config: Config, rules: Sequence[str], model: str, by: Method) -> Find:
    if by == "search":
        index = Index([Passage("", text) for text in rules])
        places = {text: place for place, text in enumerate(rules)}
        return lambda question, _: [
            (places[hit.passage.text], hit.score)
            for hit in index.search(question, top_k=len(rules))
        ]
    policy = load_to_answer(config, model)
    score = scorer_of(policy.model, policy.tokenizer)
    return lambda question, answer: [
        (gain.index, gain.log)
        for gain in rank_contexts(question, answer, rules, score, top=len(rules))
    ]


def _row(
    prompt: Prompt,
    rules: Sequence[str],
    find: Find,
    *,
    by: Method,
    count: int,
    rule: str,
    wording: str,
) -> dict[str, Any]:
    question = question_of(prompt)
    if by == "perplexity" and not prompt.answer:
        raise UsageError(
            f"question {prompt.id!r}: has no reference answer, which candidates by perplexity "
            "need; by = 'search' does without."
        )
    ranked = list(find(question, str(prompt.answer)))
    scores = dict(ranked)
    chosen = [place for place, _ in ranked[:count]]
    decisive = prompt.columns.get(rule)
    gold = rules.index(decisive) if decisive in rules else None
    if by == "perplexity":
        if gold is not None and gold not in chosen:
            chosen = [*chosen[: count - 1], gold]
        gold = gold if gold is not None or not chosen else chosen[0]
    random.Random(prompt.id).shuffle(chosen)
    texts = [rules[place] for place in chosen]
    number = chosen.index(gold) + 1 if gold in chosen else None
    right = {"completion": picked(number, prompt.answer)} if number and prompt.answer else {}
    return {
        **prompt.columns,
        "id": prompt.id,
        "question": question,
        "answer": prompt.answer,
        "candidates": texts,
        "scores": [round(scores[place], 6) if place in scores else None for place in chosen],
        "gold": number,
        "prompt": numbered(question, texts, wording),
        **right,
    }


def numbered(question: str, contexts: Sequence[str], wording: str = WORDING) -> str:
    """A question with numbered candidates.

    Example:
        >>> numbered("Which?", ["this", "that"], "{question} {contexts}")
        'Which? 1. this\\n2. that'
    """
    listed = "\n".join(f"{number}. {text}" for number, text in enumerate(contexts, start=1))
    return wording.replace("{contexts}", listed).replace("{question}", question)


def picked(number: int, answer: str) -> str:
    """A completion that names a candidate and answers.

    Example:
        >>> picked(2, "yes")
        '<context>2</context><answer>yes</answer>'
    """
    return f"<context>{number}</context><answer>{answer}</answer>"


def question_of(prompt: Prompt) -> str:
    """The question alone: the column `question`, or the last message."""
    if isinstance(found := prompt.columns.get("question"), str):
        return found
    return prompt.text if prompt.text is not None else str(prompt.messages[-1]["content"])


def _settings(
    config: Config, rules: str | Path | None, model: str, **settings: Any
) -> dict[str, Any]:
    data = config.model_dump(mode="json", exclude_defaults=True, include={"data"})
    given = {**settings, "recipe": data, "rules": "" if rules is None else fingerprint(rules)}
    model_hash = fingerprint(model) if settings["by"] == "perplexity" else ""
    data_hash = data_hashes(config)
    return {
        "made_by": "contexts",
        "model": model,
        "model_hash": model_hash,
        "data_hash": data_hash,
        "settings": given,
        "digest": digest(given | {"model": model_hash, "data": data_hash}),
    }
