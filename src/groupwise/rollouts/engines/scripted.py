"""An engine that says what it is told to: for tests, of groupwise and of whoever builds on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from groupwise.types import Completion, Group, Metrics, Prompt, Request, Sampling, WeightsRef


class ScriptedEngine:
    """Answers of a function instead of a model.

    Args:
        answer: from a prompt and a sample's index to the text of the completion.
        encode: from a text to token ids; one token per UTF-8 byte by default.

    Example:
        >>> from groupwise.types import Prompt, Request, Sampling, WeightsRef
        >>> engine = ScriptedEngine(lambda prompt, sample: f"{prompt.text}{sample}")
        >>> request = Request(prompt=Prompt(id="a", text="x"), tokens=[1], group=2)
        >>> [c.text for c in next(engine.generate([request], Sampling())).completions]
        ['x0', 'x1']
    """

    def __init__(
        self,
        answer: Callable[[Prompt, int], str],
        *,
        encode: Callable[[str], Sequence[int]] = lambda text: list(text.encode()),
    ) -> None:
        self.answer, self.encode, self.version = answer, encode, 0

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Group]:
        """Yield the groups in the order asked for; texts longer than the budget are cut, with
        finish "length"."""
        for request in requests:
            completions = tuple(
                self._complete(request, sample, sampling) for sample in range(request.group)
            )
            yield Group(
                prompt=request.prompt,
                prompt_tokens=request.tokens,
                completions=completions,
                stream=request.stream,
            )

    def _complete(self, request: Request, sample: int, sampling: Sampling) -> Completion:
        text = self.answer(request.prompt, sample)
        ids = list(self.encode(text))
        whole = len(ids) <= sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return Completion(
            tokens=ids,
            mask=[True] * len(ids),
            logprobs=[0.0] * len(ids),
            text=text,
            finish="stop" if whole else "length",
            versions=((0, self.version),),
        )

    def publish(self, weights: WeightsRef) -> Metrics:
        """Stamp what follows with the new version."""
        self.version = weights.version
        return {}

    def close(self) -> None:
        """Nothing is held."""
