"""Chat with a model through the engine and chat template that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from groupwise.environments import Showing
from groupwise.errors import UsageError
from groupwise.models import Policy, load_policy
from groupwise.prompts.sources import worded
from groupwise.prompts.templates import render, shows_tools
from groupwise.rollouts.engines.registry import make_engine
from groupwise.rollouts.tools import ToolEngine
from groupwise.types import Engine, Prompt, Request, Sampling, Stream


def chat(
    model: str,
    questions: Iterable[str],
    *,
    system: str | None = None,
    wording: str = "{question}",
    plain: bool = False,
    sampling: Sampling,
    seed: int = 0,
    trust_remote_code: bool = False,
    tools: Callable[[Policy], Engine] | None = None,
) -> Iterator[str]:
    """The answers of a model to a sequence of messages.

    A model with a chat template sees the conversation so far; one without sees each message alone.
    When the conversation exceeds the model's context, its oldest turns are dropped.

    Args:
        model: folder, hub name, or "bundled".
        questions: messages of the user, read one at a time.
        system: message in front of the conversation.
        wording: of each message, as `data.wording` of a recipe.
        plain: each message is a prompt of its own, as with `data.chat = false` of a recipe.
        sampling: temperature 0, or the same seed, gives the same answers every time.
        tools: makes an engine with an environment for the policy; None answers without one.

    Yields:
        The text of each answer, special tokens and replies of an environment included.

    Raises:
        UsageError: a wording of several columns, no such model, or a message that alone is too
            long for it.
    """
    worded(wording, "")  # raises before the model is loaded
    policy = load_policy(model, trust_remote_code=trust_remote_code)
    engine = make_engine(policy) if tools is None else tools(policy)
    plain = plain and not system
    remembers = bool(policy.tokenizer.chat_template) and not plain
    schemas = _schemas(engine) if shows_tools(policy.tokenizer) else ()
    start: list[Mapping[str, str]] = [{"role": "system", "content": system}] if system else []
    turns: list[Mapping[str, str]] = []
    for number, question in enumerate(questions):
        question = worded(wording, question)
        turns = [*(turns if remembers else []), {"role": "user", "content": question}]
        prompt = Prompt(id=f"chat-{number}", messages=(*start, *turns), tools=schemas)
        if plain:
            prompt = Prompt(id=prompt.id, text=question)
        tokens = render(prompt, policy.tokenizer)
        while len(tokens) + sampling.max_tokens > policy.context:
            if len(turns) == 1:
                raise UsageError(
                    f"message: has {len(tokens)} tokens, and {policy.context - sampling.max_tokens}"
                    " leave room for an answer; shorten it, or lower --max-tokens."
                )
            turns = turns[2:]
            prompt = replace(prompt, messages=(*start, *turns))
            tokens = render(prompt, policy.tokenizer)
        request = Request(prompt=prompt, tokens=tokens, group=1, stream=Stream(seed, number))
        (group,) = engine.generate([request], sampling)
        answer = group.completions[0].text
        if (failure := group.completions[0].failure) is not None:
            answer += f" [{failure[0].value}: {failure[1]}]"
        turns = [*turns, {"role": "assistant", "content": answer}]
        yield answer


def _schemas(engine: Engine) -> tuple[Mapping[str, Any], ...]:
    """The functions that the environment of an engine shows."""
    environment = engine.environment if isinstance(engine, ToolEngine) else None
    return environment.schemas if isinstance(environment, Showing) else ()
