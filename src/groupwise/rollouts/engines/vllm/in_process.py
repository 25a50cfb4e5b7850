"""vLLM in this process, if it is installed in the same environment as the trainer."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from groupwise.errors import RunError, UsageError, install_command
from groupwise.models import Policy, is_adapted
from groupwise.rollouts.engines.vllm.base import (
    Answer,
    CompletionOutput,
    CompletionRequest,
    EngineUnavailable,
    Weights,
    WeightSync,
)
from groupwise.rollouts.engines.vllm.process import arguments_of
from groupwise.rollouts.engines.vllm.versions import check_version
from groupwise.settings import EngineSettings


class InProcess:
    """`vllm.LLM` beside the learner.

    Args:
        policy: what is trained.
        settings: memory share, sleep and further arguments.
        max_rows: completions written at the same time.
        length: tokens of the longest prompt with its completion; None is the model's context.

    Raises:
        UsageError: vLLM is not installed here, or is too old.
    """

    def __init__(
        self,
        policy: Policy,
        settings: EngineSettings,
        *,
        max_rows: int,
        length: int | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UsageError(
                "engine.name = 'vllm': vLLM is not installed in this environment; give the Python "
                "of one where it is (engine.python), or the address of a server (engine.server), "
                f"or {install_command('vllm')}."
            )
        from vllm import __version__  # pyright: ignore[reportMissingImports]

        check_version(__version__, where="engine.name = 'vllm'")
        self.policy, self.settings = policy, settings
        self.max_rows, self.length = max_rows, length
        self.context = 0
        self._llm: Any = None
        self._adapter: Any = None

    @property
    def ways(self) -> tuple[WeightSync, ...]:
        adapts = is_adapted(self.policy.model)
        return ("adapter", "restart") if adapts else ("reload", "restart")

    def start(self, weights: Weights) -> None:
        """Load the model again."""
        from vllm import LLM, EngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.utils.argparse_utils import (  # pyright: ignore[reportMissingImports]
            FlexibleArgumentParser,
        )

        self.close()
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        given = arguments_of(weights, self.settings, max_rows=self.max_rows, length=self.length)
        arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", weights.model, *given]))
        try:
            self._llm = LLM.from_engine_args(arguments)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"engine.name = 'vllm': cannot be started ({error}).") from error
        self.context = int(self._llm.llm_engine.model_config.max_model_len)
        if weights.base is not None:
            self.renew(weights, "adapter")

    def answer(self, asks: Iterable[CompletionRequest | None]) -> Iterator[tuple[int, Answer]]:
        """All current requests at once: vLLM itself schedules what runs together."""
        source, count = iter(asks), 0
        while batch := [ask for ask in iter(partial(next, source, None), None)]:
            yield from enumerate(self._answer(batch), count)
            count += len(batch)

    def _answer(self, asks: Sequence[CompletionRequest]) -> list[Answer]:
        from vllm import SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
        )

        if self._llm is None:
            raise EngineUnavailable("engine.name = 'vllm': does not run.")
        try:
            outputs = self._llm.generate(
                [TokensPrompt(prompt_token_ids=list(ask.tokens)) for ask in asks],
                [SamplingParams(**ask.params) for ask in asks],
                use_tqdm=False,
                lora_request=self._adapter,
            )
        except EngineDeadError as error:
            raise EngineUnavailable(
                f"engine.name = 'vllm': its process has died ({error})."
            ) from error
        return [_answer(output) for output in outputs]

    def renew(self, weights: Weights, way: WeightSync) -> None:
        if way == "restart":
            self.start(weights)
            return
        if way == "adapter":
            from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

            before = self._adapter
            number = 1 if before is None else before.lora_int_id + 1
            self._adapter = LoRARequest(f"groupwise-{number}", number, str(weights.folder))
            if before is not None:
                self._llm.llm_engine.remove_lora(before.lora_int_id)
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights.folder)})
        if not self._llm.reset_prefix_cache():
            raise RunError("engine.name = 'vllm': will not reset its prefix cache.")

    def sleep(self) -> None:
        self._llm.sleep(level=1)

    def wake(self) -> None:
        self._llm.wake_up()

    def close(self) -> None:
        if self._llm is None:
            return
        core = getattr(self._llm.llm_engine, "engine_core", None)
        if core is not None:
            core.shutdown()
        self._llm = self._adapter = None
        gc.collect()


def _answer(output: Any) -> Answer:
    """Convert a `RequestOutput` of vLLM."""
    prompt = output.prompt_logprobs or ()
    return Answer(
        written=tuple(
            CompletionOutput(
                tokens=list(one.token_ids),
                logprobs=[
                    found[token].logprob
                    for token, found in zip(one.token_ids, one.logprobs, strict=True)
                ],
                finish=str(one.finish_reason),
            )
            for one in output.outputs
        ),
        prompt_logprobs=tuple(
            found[token].logprob
            for token, found in zip(output.prompt_token_ids, prompt, strict=False)
            if found is not None
        ),
    )
