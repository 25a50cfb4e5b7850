"""TRL's `GRPOTrainer`, run by groupwise."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_utils import TrainOutput

from groupwise.algorithms import bind
from groupwise.config import Config
from groupwise.config.connect import best_device, configured_engine, connect
from groupwise.errors import UsageError
from groupwise.integrations.trl import figures, loading, rewards, settings
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.data import held_out, prompts
from groupwise.integrations.trl.flow import Flow
from groupwise.integrations.trl.tools import NO_PROMPT, toolset
from groupwise.integrations.trl.turns import ToolTurns
from groupwise.models import Policy
from groupwise.prompts.templates import fix_variables, render, render_all
from groupwise.training.checkpoint.files import newest
from groupwise.training.monitor.progress import NoProgress, Progress, show_progress
from groupwise.training.prepare import Prepared, prepare
from groupwise.types import Engine, Group, Prompt, Request, ScoredGroups, Stream
from groupwise.updates import sequences

NOT_HERE = {
    "optimizers": "the optimizer is AdamW; set learning_rate and its kin in GRPOConfig",
    "quantization_config": 'use groupwise.train(…, model={"quantization": "nf4", "adapter": {}})',
    "rollout_func": "rollouts are written by the engine; give groupwise an Engine of your own",
}
LOG = logging.getLogger(__name__)
STREAM = -1
"""The step that keys the random streams of evaluations, so that training shares none of them."""


class GRPOTrainer:
    """Trains with TRL's arguments.

    Args:
        model: a name or folder, or a model of transformers, with an adapter or without.
        reward_funcs: TRL's reward functions, sequence classifiers, or names of such. Each is called
            once per group; one that raises ends the run.
        args: the settings; None takes TRL's defaults.
        train_dataset: rows with a column `prompt`, text or messages.
        eval_dataset: the same, for `evaluate`; several by name are evaluated one after the other.
        processing_class: the tokenizer; None takes the model's own.
        reward_processing_classes: tokenizers of the sequence classifiers among the rewards.
        callbacks: `TrainerCallback`s, or their classes.
        peft_config: of a new adapter.
        tools: functions that the model may call, with type hints and docstrings.
        environment_factory: makes an environment for each completion, whose public methods are
            tools; or several, by the name in the column `environment`.
        others: further arguments of TRL's, which are refused with what to do instead.

    Attributes:
        args, state, callback_handler: as in TRL; `state.log_history` has the logged metrics.
        train_dataset, eval_dataset, reward_processing_classes: as given.
        model, processing_class: the model, trained in place, and its tokenizer.

    Raises:
        UsageError: an argument or a setting that would have no effect; nothing was started.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        **others: Any,
    ) -> None:
        _refuse(others)
        name = model if isinstance(model, str) else model.config._name_or_path
        short = str(name).rstrip("/").rpartition("/")[2] or "model"
        args = GRPOConfig(output_dir=f"{short}-GRPO") if args is None else args
        if not isinstance(args, GRPOConfig):
            raise UsageError(
                f"args = {type(args).__module__}.{type(args).__name__}: import GRPOConfig from "
                "groupwise.integrations.trl too."
            )
        args.validate()
        for text in settings.warnings_of(args):
            LOG.warning(text)
        loading.check_place(args)
        self.args = args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.toolset = toolset(tools, environment_factory, seed=args.seed)
        self.functions = self._functions(reward_funcs, reward_processing_classes)
        readers = reward_processing_classes
        self.reward_processing_classes = rewards.readers_of(self.functions, readers)
        self._read(train_dataset, eval_dataset)
        self.policy: Policy = loading.policy(
            model, args, tokenizer=processing_class, peft_config=peft_config
        )
        fix_variables(self.processing_class, settings.table(args, "chat_template_kwargs"))
        self.router_aux_loss_coef = loading.router_aux_loss(self.model, args)
        self.turns = self._turns()
        self.config: Config = self._configured(str(name) or short)
        table = Path(self.config.output) / "extra.jsonl" if args.log_completions else None
        self.notes = rewards.Notes(table=table)
        self.state = TrainerState(max_steps=self.max_steps)
        self.state.num_train_epochs = math.ceil(self.max_steps / self.epoch_steps)
        self.state.compute_steps(args, self.max_steps)
        if args.eval_steps is None:
            self.state.eval_steps = self.state.logging_steps
        self.control = TrainerControl()
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *(callbacks or ())], self.model, self.processing_class, None, None
        )
        self.scorer().close()
        self.prepared: Prepared | None = None
        self.flow: Flow | None = None
        self._tell("on_init_end")

    def _functions(self, given: Any, tokenizers: Any) -> list[Callable[..., Any]]:
        """The reward functions; there may be none where environments reward."""
        if not given and self.toolset is not None and self.toolset.rewards:
            return []
        return rewards.functions_of(given, tokenizers)

    def _turns(self) -> ToolTurns | None:
        if self.toolset is None:
            if self.args.max_tool_calling_iterations is not None:
                raise settings.wrong(
                    self.args, "max_tool_calling_iterations", "there are no tools; remove it"
                )
            return None
        return ToolTurns(
            self.toolset,
            self.policy,
            max_tokens=self.args.max_completion_length or 1,
            max_calls=self.args.max_tool_calling_iterations,
        )

    def _read(self, train_dataset: Any, eval_dataset: Any) -> None:
        """The prompts of the data sets, and how many steps they make."""
        args = self.args
        cut = settings.batches(args)
        limit = args.max_steps * cut.prompts if args.max_steps > 0 else None
        if train_dataset is None and self.toolset is not None and None in self.toolset.factories:
            if limit is None:
                raise settings.wrong(args, "max_steps", "must say when to end without data")
            train_dataset = [{}] * limit
        elif train_dataset is None and self.toolset is not None and self.toolset.factories:
            raise UsageError(
                "environment_factory: more than one environment requires a `train_dataset`, whose "
                "column 'environment' names that of each row."
            )
        known = hasattr(train_dataset, "__len__")
        self.prompts = self._prompts(train_dataset, "train_dataset", None if known else limit)
        self.eval_prompts: dict[str, list[Prompt]] = {}
        if eval_dataset is not None:
            self.eval_prompts = held_out(eval_dataset, self._prompts)
        elif args.eval_strategy != "no":
            raise settings.wrong(args, "eval_strategy", "there is no eval_dataset to evaluate on")
        self.epoch_steps = settings.epoch_steps(args, len(self.prompts))
        steps = settings.optimizer_steps(args, len(self.prompts))
        self.max_steps = math.ceil(steps / cut.updates) * cut.updates

    def _prompts(self, data: Any, where: str, limit: int | None = None) -> list[Prompt]:
        """The prompts of a data set, with the tools that they show."""
        owned = self.toolset is not None and bool(self.toolset.factories)
        found = prompts(
            data,
            where=where,
            limit=limit,
            alone=bool(self.args.remove_unused_columns),
            default=NO_PROMPT if owned else None,
        )
        return found if self.toolset is None else self.toolset.prompts(found, where=where)

    def _configured(self, name: str) -> Config:
        rows = render_all(self.prompts, self.processing_class, limit=1 << 30)
        config = settings.configuration(
            self.args,
            steps=self.max_steps,
            model=name,
            card=loading.computes_in_bf16(),
            longest=max(map(len, rows.tokens)),
            weights=dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True)),
            router_aux_loss=self.router_aux_loss_coef,
        )
        say = config.guards.model_copy(update={"silent_rewards": "say"})
        return config.model_copy(update={"guards": say})

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self.policy.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.policy.tokenizer

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The functions that the model may call, those of environments included."""
        return [] if self.toolset is None else self.toolset.known

    @property
    def reward_funcs(self) -> list[Callable[..., Any]]:
        """The reward functions, those of environments last."""
        return [*self.functions, *(self.toolset.rewards if self.toolset is not None else ())]

    @property
    def reward_func_names(self) -> list[str]:
        """Names of the reward functions in logs, each once."""
        return rewards.labels(self.reward_funcs)

    @property
    def reward_weights(self) -> Tensor:
        """Weights of the reward functions; environments have 1."""
        given = rewards.weights_of(self.functions, self.args.reward_weights)
        return torch.tensor([*given, *[1.0] * (len(self.reward_funcs) - len(given))])

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the load-balancing loss of a mixture of experts is added to the loss."""
        return self.router_aux_loss_coef != 0

    def scorer(self) -> rewards.TrlScorer:
        """A scorer of the reward functions."""
        return rewards.make_scorer(
            self.reward_funcs,
            weights=self.reward_weights.tolist(),
            tokenizer=self.processing_class,
            state=self.state,
            notes=self.notes,
            turns=self.turns,
        )

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, given by itself or by its class."""
        self.callback_handler.remove_callback(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the last step, and leave the model in `output_dir`/final as well.

        Args:
            resume_from_checkpoint: True, or the path of the newest checkpoint of `output_dir`,
                resumes from it.

        Raises:
            UsageError: `output_dir` holds a run and is not to be resumed, or holds none and is.
            RewardError: a reward function raised or broke its contract.
        """
        resume = self._resumes(resume_from_checkpoint)
        start, folder = time.monotonic(), Path(self.config.output)
        progress: Progress = NoProgress()
        if not self.args.disable_tqdm:
            progress = show_progress({folder.name: self.config.steps})
        flow = self._following()
        try:
            self.prepared = prepare(
                self.config,
                progress=progress,
                callbacks=[flow],
                name=folder.name,
                policy=self.policy,
                scorer=self.scorer(),
                prompts=self.prompts,
                eval_prompts=[],
                resume=resume,
                connector=connect if self.turns is None else self.turns.connect,
            )
            try:
                flow.attach(self.prepared.trainer)
                if resume:
                    flow.resume(folder)
                self._tell("on_train_begin")
                if self.args.eval_on_start and not resume:
                    self.evaluate()
                self.prepared.trainer.run()
                self.prepared.trainer.finish()
            finally:
                self.prepared.close()
                self.prepared = None
        finally:
            progress.close()
        return self._finished(flow, seconds=time.monotonic() - start)

    def _following(self) -> Flow:
        self.flow = Flow(
            args=self.args,
            state=self.state,
            control=self.control,
            handler=self.callback_handler,
            updates=settings.batches(self.args).updates,
            epoch_steps=self.epoch_steps,
            notes=self.notes,
            evaluate=self.evaluate,
        )
        return self.flow

    def _finished(self, flow: Flow, *, seconds: float) -> TrainOutput:
        losses = flow.losses or [math.nan]
        summary = {
            "train_runtime": round(seconds, 4),
            "train_steps_per_second": round(self.state.global_step / seconds, 3),
            "train_loss": sum(losses) / len(losses),
        }
        flow.log_end(summary)
        flow.save_state()
        self._tell("on_train_end")
        return TrainOutput(self.state.global_step, summary["train_loss"], summary)

    def _resumes(self, asked: bool | str | None) -> bool:
        """Whether to continue the run of the output directory."""
        folder = Path(self.config.output)
        begun = (folder / "metrics.jsonl").exists()
        if not asked:
            if begun:
                raise UsageError(
                    f"output_dir = {str(folder)!r}: already contains a run; continue it with "
                    "train(resume_from_checkpoint=True), or choose another folder."
                )
            return False
        found, _ = newest(folder / "checkpoints")
        if found is None:
            raise UsageError(
                f"resume_from_checkpoint = {asked!r}: {folder}/checkpoints contains no checkpoint."
            )
        last = folder / "checkpoints" / f"step-{found.step:06d}"
        places = {path.resolve() for path in (folder, folder / "checkpoints", last)}
        if isinstance(asked, str) and Path(asked).resolve() not in places:
            raise UsageError(
                f"resume_from_checkpoint = {asked!r}: a run resumes from its newest checkpoint, "
                f"{last}; pass True."
            )
        return True

    def evaluate(
        self, eval_dataset: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float | None]:
        """Sample answers to held-out prompts, judge them, and log the figures.

        Args:
            eval_dataset: None takes the trainer's; a string takes the one of that name.
            metric_key_prefix: in front of every name; the name of a data set follows it where there
                are several.

        Raises:
            UsageError: there are no prompts to evaluate on.
        """
        sets = self.eval_prompts
        if isinstance(eval_dataset, str) and eval_dataset in sets:
            sets = {"": sets[eval_dataset]}
        elif eval_dataset is not None:
            sets = held_out(eval_dataset, self._prompts)
        if not sets:
            raise UsageError("eval_dataset = None: there is nothing to evaluate on.")
        found: dict[str, float | None] = {}
        for name, rows in sets.items():
            found |= self._evaluated(rows, "_".join(filter(None, (metric_key_prefix, name))))
        return found

    def _evaluated(self, rows: Sequence[Prompt], prefix: str) -> dict[str, float | None]:
        """Evaluate on one data set; log the figures, also to the trackers of a run."""
        start, noted = time.monotonic(), dict(self.notes.metrics)
        self.notes.metrics.clear()
        scored = self._answered(rows)
        seconds = time.monotonic() - start
        found = figures.of_rollouts(scored, scale=str(self.args.scale_rewards))
        found |= {"loss": self._loss(scored)}
        found |= {"runtime": seconds, "samples_per_second": len(rows) / seconds}
        every = {**{name: [value] for name, value in found.items()}, **self.notes.metrics}
        logs = figures.averaged({f"{prefix}_{k}": v for k, v in every.items()})
        self.notes.metrics.clear()
        self.notes.metrics.update(noted)
        if self.prepared is not None:
            known = {name: value for name, value in logs.items() if value is not None}
            for tracker in self.prepared.trainer.monitor.trackers:
                tracker.log(self.state.global_step, known)
        flow = self.flow or self._following()
        flow.log(logs)
        flow.control = self.callback_handler.on_evaluate(
            self.args,  # pyright: ignore[reportArgumentType]
            self.state,
            flow.control,
            metrics=logs,
        )
        return logs

    def _loss(self, scored: ScoredGroups) -> float:
        """The loss of an evaluation; NaN if it has a KL term and the run has ended, because its
        reference model is gone by then. Before the run, the model is its own reference."""
        algorithm = bind(self.config.algorithm.name, self.config.algorithm.overrides())
        batch = sequences(scored)
        if "ref_logp" not in algorithm.needs or not self.state.global_step:
            return figures.loss(scored, algorithm, reference=batch.sampler_logp)
        if self.prepared is None:
            return math.nan
        found = self.prepared.trainer.policy.evaluate(batch, {"ref_logp"})
        return figures.loss(scored, algorithm, reference=found["ref_logp"])

    def _answered(self, asked: Sequence[Prompt]) -> ScoredGroups:
        args, tokenizer = self.args, self.processing_class
        count = args.num_generations_eval or self.config.group_size
        requests = [
            Request(
                prompt=prompt,
                tokens=render(prompt, tokenizer),
                group=count,
                stream=Stream(args.seed, STREAM, 0, place),
            )
            for place, prompt in enumerate(asked)
        ]
        size = max(1, args.per_device_eval_batch_size // count)
        sampling = self.config.sampling
        groups: dict[int, Group] = {}
        with self._engine() as engine, self.scorer() as scorer:
            for first in range(0, len(requests), size):
                for group in engine.generate(requests[first : first + size], sampling):
                    groups[group.stream.place] = group
            ordered = tuple(groups[place] for place in range(len(requests)))
            scores = scorer.gather([scorer.submit(group) for group in ordered])
        return ScoredGroups(groups=ordered, scores=scores, keep=scores.valid, drawn=len(ordered))

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        """The engine of the run; outside of one, an engine for as long as it is needed."""
        if self.prepared is not None:
            yield self.prepared.engine
            return
        self.model.to(best_device())
        plain = configured_engine(self.config, self.policy)
        with closing(plain if self.turns is None else self.turns.around(plain)) as engine:
            yield engine

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model, or its adapter, and the tokenizer in Hugging Face form."""
        from groupwise.report.card import remove_own_card, write_model_card

        folder = Path(output_dir or self.config.output)
        folder.mkdir(parents=True, exist_ok=True)
        had_card = remove_own_card(folder)  # PEFT would extend it
        self.model.save_pretrained(folder)
        self.processing_class.save_pretrained(folder)
        if had_card and Path(self.config.output, "config.json").is_file():
            write_model_card(self.config.output, folder)

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output directory."""
        folder = Path(self.config.output)
        folder.mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Refused: nothing is uploaded on its own.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "push_to_hub: call trainer.model.push_to_hub(name), and likewise for the tokenizer."
        )

    def _tell(self, event: str) -> None:
        call: Callable[..., TrainerControl] = getattr(self.callback_handler, event)
        control = self.control if self.flow is None else self.flow.control
        self.control = call(self.args, self.state, control)
        if self.flow is not None:
            self.flow.control = self.control


def _refuse(others: Mapping[str, Any]) -> None:
    """Arguments that TRL's trainer has and this one has not; unset ones are fine.

    Raises:
        UsageError: what to do instead.
        TypeError: TRL has no such argument either.
    """
    for name, value in others.items():
        if name not in NOT_HERE:
            raise TypeError(f"GRPOTrainer has no argument {name!r}")
        if value not in (None, (None, None), []):
            raise UsageError(f"{name}: is not taken; {NOT_HERE[name]}.")
