"""A language model behind an OpenAI-compatible HTTP endpoint as judge."""

from __future__ import annotations

import functools
import ipaddress
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from groupwise.errors import RewardError, UsageError
from groupwise.rewards.base import REWARDS, in_thread, verifier
from groupwise.rewards.builtin.text import Source, references
from groupwise.rewards.http import ENDING, HttpError, post, threads
from groupwise.rewards.judges.prompt import (
    Judgement,
    Mode,
    Token,
    judge_prompt,
    judged_parts,
    normalised_known,
    read_template,
    soft_score,
    spoken_judgement,
)

_MOST_LOGPROB = 1e-3  # rounding may put the logarithm of 1 a little above 0
UNFINISHED = ("length", "content_filter")
"""Why a server ended a reply before its end; its last line is then no verdict."""


@verifier
@in_thread
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
    max_tokens: int = 1,
    timeout: float = 30.0,
    concurrency: int = 64,
    key_variable: str = "GROUPWISE_JUDGE_KEY",
) -> list[float | Exception | None]:
    """The judgement of a model behind an OpenAI-compatible HTTP endpoint; the questions of
    several groups are asked at once.

    How it is gamed: see `judge`.

    Args:
        texts, answer, prompt, template, mode, yes, no, normalise, source: see `judge`.
        endpoint: address up to and including the version, such as "http://127.0.0.1:8000/v1".
        model: its name there.
        max_tokens: 1 for a judge that answers at once; more for one that reasons first, whose
            verdict is the word at the end of its reply.
        timeout: seconds for one judgement, all retries included.
        concurrency: most requests to the endpoint at once.
        key_variable: environment variable that holds the key, sent if it is set; the key itself is
            never part of a recipe. Its name begins with GROUPWISE_, so that a recipe cannot send
            other secrets; OPENAI_API_KEY is sent to api.openai.com and to this machine only.

    Returns:
        One score per completion, None without a reference or where the judge gives no
        verdict, and the exception of a judgement that failed while others did not.

    Raises:
        TimeoutError: no judgement in time.
        RewardError: the endpoint refused, or its reply holds no probabilities although `mode` is
            "soft".
        UsageError: an address, a key variable or a number that is not permitted.

    Source: the chat completions interface with `logprobs` and `top_logprobs`, as vLLM and others
        serve it.
    Elsewhere: redirects are not followed and proxies of the environment not used, so that the key
        reaches no other host. An endpoint tells only its most probable tokens; a word that is not
        among them counts as 0. Special tokens of a remote judge are not known; those written
        `<|…|>`, `[INST]`, `<s>` and `<start_of_turn>` are broken up.
    """
    golds = references(answer)
    if not golds:
        return [None] * len(texts)
    address, headers = _address(endpoint), {"Content-Type": "application/json"}
    if key := _key(address, endpoint, key_variable):
        headers["Authorization"] = f"Bearer {key}"
    if not 0 < timeout < math.inf:
        raise UsageError(f"timeout = {timeout}: must be a positive number of seconds.")
    if max_tokens < 1 or concurrency < 1:
        raise UsageError("max_tokens, concurrency: must be at least 1.")
    form = read_template(template)
    said = judged_parts(texts, source)

    def score(one: str) -> float | Exception | None:
        if not one:
            return 0.0
        asked = judge_prompt(
            form,
            question=prompt,
            reference=" / ".join(golds),
            answer=one,
            special=_chat_marks((prompt, one, *golds)),
        )
        question = {
            "model": model,
            "messages": [{"role": "user", "content": asked}],
            "max_tokens": max_tokens,
        }
        try:
            with _free(address.netloc, concurrency):
                reply = _ask(address, headers, question, timeout=timeout)
            judgement = _judgement(reply, yes=yes, no=no, mode=mode, spoken=max_tokens > 1)
        except (TimeoutError, RewardError) as error:
            return error
        return None if judgement is None else soft_score(judgement, mode=mode)

    with threads(min(max(len(said), 1), concurrency), ENDING.get()) as pool:
        scores = list(pool.map(score, said))
    failures = [score for score in scores if isinstance(score, Exception)]
    if failures and len(failures) == len(scores):
        raise failures[0]
    return normalised_known(scores) if normalise else scores


@functools.cache
def _free(server: str, concurrency: int) -> threading.BoundedSemaphore:
    """Semaphore that limits concurrent requests to a server over all groups."""
    return threading.BoundedSemaphore(concurrency)


def _address(endpoint: str) -> SplitResult:
    """The parts of an address that may be asked.

    Raises:
        UsageError: not an HTTP address.
    """
    try:
        address = urlsplit(endpoint.rstrip("/") + "/chat/completions")
        usable = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        address, usable = None, False
    if address is None or not usable:
        raise UsageError(f"endpoint = {endpoint!r}: must begin with http:// or https://.")
    if address.username is not None or address.password is not None:
        raise UsageError(
            "endpoint: must not contain a user name or password, which are not sent; put "
            "a key into the variable that key_variable names."
        )
    return address


def _key(address: SplitResult, endpoint: str, variable: str) -> str | None:
    """The key to send, if the variable is set.

    Raises:
        UsageError: a variable that is not for judges, or a key that would be sent in the clear.
    """
    host = address.hostname or ""
    here = host == "localhost" or _is_loopback(host)
    known = variable == "OPENAI_API_KEY" and (here or host == "api.openai.com")
    if not (variable == "" or variable.startswith("GROUPWISE_") or known):
        raise UsageError(
            f"key_variable = {variable!r}: must begin with GROUPWISE_, or be OPENAI_API_KEY for "
            "api.openai.com or this machine; other variables may hold other secrets."
        )
    key = (os.environ.get(variable) or "").strip() if variable else ""
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"key_variable = {variable!r}: must contain printable ASCII characters only."
        )
    if key and address.scheme != "https" and not here:
        raise UsageError(
            f"endpoint = {endpoint!r}: must begin with https://, or the key in {variable} would be "
            "sent in the clear; key_variable = '' sends none."
        )
    return key or None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _chat_marks(texts: Iterable[str]) -> set[str]:
    """Everything in some texts that looks like a special token of a chat model."""
    pattern = re.compile(
        r"<\|[^<>|]{1,40}\|>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<｜[^<>]{1,40}｜>"
    )
    return {mark for text in texts for mark in pattern.findall(text)}


def _ask(
    address: SplitResult,
    headers: Mapping[str, str],
    question: Mapping[str, Any],
    *,
    timeout: float,
) -> Mapping[str, Any]:
    """The first choice of the reply, after as many tries as there is time for.

    Raises:
        TimeoutError: the time is over.
        RewardError: the endpoint cannot be reached, refuses, or replies something else.
    """
    where = f"judge at {address.scheme}://{address.netloc}"
    options = {"temperature": 0, "logprobs": True, "top_logprobs": 20}
    body = json.dumps({**question, **options}).encode()
    try:
        return _choice(where, post(address, headers, body, timeout=timeout, where=where))
    except TimeoutError as error:
        raise TimeoutError(f"{where}: no judgement in {timeout:g} s.") from error
    except HttpError as error:
        raise RewardError(str(error)) from error


def _choice(where: str, content: bytes) -> Mapping[str, Any]:
    try:
        choice = json.loads(content)["choices"][0]
        if isinstance(choice, Mapping):
            return choice
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        pass
    raise RewardError(f"{where}: the reply is not a chat completion.")


def _judgement(
    reply: Mapping[str, Any], *, yes: str, no: str, mode: Mode, spoken: bool
) -> Judgement | None:
    """The judgement in a reply, whose words may have any case and white space around them; None
    without one.

    Raises:
        RewardError: no probabilities in mode "soft", or values that are none.
    """
    try:
        tokens = [_token(entry) for entry in (reply.get("logprobs") or {}).get("content") or []]
        message = reply.get("message")
        content = str((message or {}).get("content") or "")
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise RewardError("judge: the log-probabilities of the reply cannot be read.") from None
    if not tokens and mode == "soft":
        raise RewardError('judge: the endpoint returns no log-probabilities; use mode = "binary".')
    if message is not None and not content:
        return None  # The log-probabilities are those of an end token.
    if spoken:
        if reply.get("finish_reason") in UNFINISHED:
            return None
        return spoken_judgement(content, tokens if mode == "soft" else (), yes=yes, no=no)
    chances: dict[str, float] = {}
    for text, chance in tokens[0].top if tokens else [(content, 1.0)]:
        word = text.strip().lower()
        chances[word] = min(chances.get(word, 0.0) + chance, 1.0)
    if not any(chances) and not tokens:
        return None
    return Judgement(
        chances.get(yes.lower(), 0.0), chances.get(no.lower(), 0.0), max(chances.values())
    )


def _token(entry: Mapping[str, Any]) -> Token:
    """A token of a reply with its alternatives.

    Raises:
        RewardError: a value that is not a log-probability.
    """
    tops = entry.get("top_logprobs") or [entry]
    found = [(str(top["token"]), float(top["logprob"])) for top in tops]
    if not all(logprob <= _MOST_LOGPROB for _, logprob in found):
        raise RewardError("judge: a log-probability of the reply is NaN or above 0.")
    return Token(
        str(entry.get("token", "")),
        [(text, math.exp(min(logprob, 0.0))) for text, logprob in found],
    )
