"""A language model behind an OpenAI-compatible HTTP endpoint as judge."""

from __future__ import annotations

import json
import math
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from groupwise.errors import RewardError, UsageError
from groupwise.rewards.base import REWARDS, in_process, verifier
from groupwise.rewards.builtin.text import Source, references
from groupwise.rewards.judges.prompt import (
    Judgement,
    Mode,
    judge_prompt,
    judged_parts,
    normalised,
    read_template,
    soft_score,
)


@verifier
@in_process
@REWARDS.register
def judge_endpoint(
    texts: Sequence[str],
    answer: Any,
    prompt: str,
    *,
    endpoint: str,
    model: str,
    template: str = "",
    mode: Mode = "soft",
    yes: str = "Yes",
    no: str = "No",
    normalise: bool = False,
    source: Source = "final",
    timeout: float = 30.0,
    key_variable: str = "OPENAI_API_KEY",
) -> list[float | None]:
    """The judgement of a model behind an OpenAI-compatible HTTP endpoint; the group's questions are
    asked at once.

    How it is gamed: see `judge`.

    Args:
        texts, answer, prompt, template, mode, yes, no, normalise, source: see `judge`.
        endpoint: address up to and including the version, such as "http://127.0.0.1:8000/v1".
        model: its name there.
        timeout: seconds for one judgement.
        key_variable: environment variable that holds the key, ending in _API_KEY or JUDGE_KEY, and
            sent if it is set, only by https or within this machine; the key itself
            never stands in a recipe.

    Returns:
        One score per completion, None without a reference.

    Raises:
        TimeoutError: no judgement in time.
        RewardError: the endpoint refused, or its reply holds no probabilities although `mode` is
            "soft".

    Source: the chat completions interface with `logprobs` and `top_logprobs`, as vLLM and others
        serve it.
    Elsewhere: an endpoint tells only its most probable tokens; a word that is not among them counts
        as 0. Special tokens of a judge that is not at hand cannot be known; those written `<|…|>`,
        `[INST]`, `<s>` and `<start_of_turn>` are broken up.
    """
    golds = references(answer)
    if not golds:
        return [None] * len(texts)
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"endpoint = {endpoint!r}: must begin with http:// or https://.")
    form = read_template(template)
    said = judged_parts(texts, source)

    def score(one: str) -> float:
        if not one:
            return 0.0
        asked = judge_prompt(
            form,
            question=prompt,
            reference=" / ".join(golds),
            answer=one,
            special=_chat_marks((prompt, one, *golds)),
        )
        reply = _ask(
            endpoint,
            {"model": model, "messages": [{"role": "user", "content": asked}]},
            timeout,
            key_variable,
        )
        return soft_score(_judgement(reply, yes=yes, no=no, mode=mode), mode=mode)

    with ThreadPoolExecutor(max_workers=max(len(said), 1)) as pool:
        scores = list(pool.map(score, said))
    return list(normalised(scores) if normalise else scores)


def _chat_marks(texts: Iterable[str]) -> set[str]:
    """Everything in some texts that looks like a special token of a chat model."""
    pattern = re.compile(
        r"<\|[^<>|]{1,40}\|>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<｜[^<>]{1,40}｜>"
    )
    return {mark for text in texts for mark in pattern.findall(text)}


def _check_key(endpoint: str, key_variable: str) -> None:
    """Refuse to send another secret than a key for an API, or a key over a readable connection.

    A recipe names both the address and the variable, so neither may be arbitrary.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]*_API_KEY|[A-Za-z0-9_]*JUDGE_KEY", key_variable):
        raise UsageError(
            f"key_variable = {key_variable!r}: must end in _API_KEY or JUDGE_KEY; other variables "
            "are not sent to a judge."
        )
    address = urllib.parse.urlsplit(endpoint)
    if address.scheme not in ("http", "https"):
        raise UsageError(f"endpoint = {endpoint!r}: must be an http or https address.")
    local = address.hostname in ("localhost", "127.0.0.1", "::1")
    if os.environ.get(key_variable) and address.scheme != "https" and not local:
        raise UsageError(
            f"endpoint = {endpoint!r}: must be https, or on this machine, to send the key in "
            f"{key_variable}."
        )


def _ask(
    endpoint: str, question: Mapping[str, Any], timeout: float, key_variable: str
) -> Mapping[str, Any]:
    """One request; the reply's first choice."""
    body = {**question, "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    headers = {"Content-Type": "application/json"}
    _check_key(endpoint, key_variable)
    if key := os.environ.get(key_variable):
        headers["Authorization"] = f"Bearer {key}"
    url = endpoint.rstrip("/") + "/chat/completions"
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        raise RewardError(f"judge at {endpoint}: replied {error.code} {error.reason}.") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError(f"judge at {endpoint}: no judgement in {timeout:g} s.") from error
        raise RewardError(f"judge at {endpoint}: cannot be reached ({error.reason}).") from error
    except TimeoutError as error:
        raise TimeoutError(f"judge at {endpoint}: no judgement in {timeout:g} s.") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RewardError(
            f"judge at {endpoint}: replied something that is no chat completion."
        ) from error


def _judgement(reply: Mapping[str, Any], *, yes: str, no: str, mode: Mode) -> Judgement:
    """What a reply says of the two words, spelled in any case and with any white space around
    them."""
    logprobs = (reply.get("logprobs") or {}).get("content") or []
    if not logprobs and mode == "soft":
        raise RewardError('judge: the endpoint returns no log-probabilities; use mode = "binary".')
    chances: dict[str, float] = {}
    if logprobs:
        for entry in logprobs[0].get("top_logprobs") or [logprobs[0]]:
            word = str(entry["token"]).strip().lower()
            chances[word] = chances.get(word, 0.0) + math.exp(float(entry["logprob"]))
    else:
        chances[str((reply.get("message") or {}).get("content") or "").strip().lower()] = 1.0
    return Judgement(
        chances.get(yes.lower(), 0.0), chances.get(no.lower(), 0.0), max(chances.values())
    )
