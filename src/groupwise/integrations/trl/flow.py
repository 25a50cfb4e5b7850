"""What TRL's trainer does between steps: figures, callbacks, evaluations, checkpoints, the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from groupwise.errors import UsageError
from groupwise.integrations.trl import figures
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.rewards import Notes
from groupwise.integrations.trl.settings import CLIPPED
from groupwise.training.callbacks import Callback
from groupwise.training.trainer import Trainer
from groupwise.types import Metrics, ScoredGroups, StepResult

STATE = "trainer_state.json"


class Flow(Callback):
    """Acts as TRL's trainer does after every optimizer step.

    Where one batch of rollouts feeds several optimizer steps, their callbacks are called one after
    the other when all of them are done.

    Args:
        args: the settings.
        state, control: of TRL's callbacks.
        handler: calls them.
        updates: optimizer steps per batch of rollouts.
        epoch_steps: optimizer steps per epoch.
        notes: what reward functions log.
        evaluate: evaluates, logs and calls the callbacks.
    """

    def __init__(
        self,
        *,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        handler: CallbackHandler,
        updates: int,
        epoch_steps: int,
        notes: Notes,
        evaluate: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.args, self.state, self.control, self.handler = args, state, control, handler
        self.updates, self.epoch_steps = updates, epoch_steps
        self.notes, self.evaluate = notes, evaluate
        self.window: dict[str, list[float]] = {}
        self.newest: Metrics = {}
        self.losses: list[float] = []
        self.trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Save through this trainer."""
        self.trainer = trainer

    def on_step_begin(self, step: int) -> None:
        """Call the callbacks of the beginning of a step."""
        if self.state.global_step % self.epoch_steps == 0:
            self._tell("on_epoch_begin")
        self._tell("on_step_begin")

    def on_step(self, step: int, result: StepResult) -> None:
        """Call the callbacks of the end of a step, and do what they ask for."""
        found = self._note(result.scored, dict(result.metrics))
        ended = False
        for update in range(self.updates):
            # The metrics are those of the whole batch, so each of its optimizer steps has the same.
            for name, value in found.items():
                self.window.setdefault(name, []).append(value)
            if update:
                self._tell("on_step_begin")
            self.state.global_step += 1
            self.state.epoch = self.state.global_step / self.epoch_steps
            self._tell("on_step_end")
            self._act()
            ended = self.state.global_step % self.epoch_steps == 0
            if ended:
                self._tell("on_epoch_end")
                self._act()
        if self.control.should_training_stop and not ended:
            self._tell("on_epoch_end")
            self._act()

    def log(self, logs: dict[str, Any]) -> None:
        """Note figures in the history and tell the callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.handler.on_log(self.args, self.state, self.control, logs)  # pyright: ignore[reportArgumentType]

    def _note(self, scored: ScoredGroups, metrics: Metrics) -> Metrics:
        """The metrics of a batch of rollouts under TRL's names."""
        self.newest = metrics
        self.state.num_input_tokens_seen += figures.tokens(scored)
        loss = metrics["loss"] / self.updates
        self.losses.append(loss)
        clips = self.args.loss_type in CLIPPED
        return {
            "loss": loss,
            **figures.of_rollouts(scored, scale=str(self.args.scale_rewards)),
            **figures.of_update(
                metrics, updates=self.updates, clips=clips, bonus=self.args.entropy_coef
            ),
        }

    def _tell(self, event: str) -> None:
        call = getattr(self.handler, event)
        self.control = call(self.args, self.state, self.control)
        if self.control.should_epoch_stop:
            raise UsageError(
                "control.should_epoch_stop = True: prompts are drawn without end; "
                "set control.should_training_stop."
            )

    def _act(self) -> None:
        """Do what the callbacks ask for."""
        trainer = self.trainer
        if self.control.should_log and self.window:
            self.log(self._means())
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save and trainer is not None:
            trainer.save(wait=True)
            self.save_state()
            self._tell("on_save")

    def should_stop(self, metrics: Metrics) -> bool:
        """Whether a callback asked for the end of the run."""
        return self.control.should_training_stop

    def log_end(self, summary: Mapping[str, float]) -> None:
        """Log the summary of the run, and in the same row, as TRL does, the means of the steps
        after the last full logging window."""
        self.log({**summary, **(self._means() if self.window else {})})

    def _means(self) -> dict[str, Any]:
        """The means since the last log, which begin anew."""
        means = figures.averaged({**self.window, **self.notes.metrics})
        self.window.clear()
        self.notes.metrics.clear()
        return {
            "loss": means.pop("loss", None),
            "grad_norm": self.newest.get("grad_norm"),
            "learning_rate": self.newest.get("learning_rate"),
            "num_tokens": self.state.num_input_tokens_seen,
            **means,
        }

    def save_state(self) -> None:
        """Write the state beside the checkpoints."""
        if self.trainer is not None and self.trainer.folder is not None:
            self.state.save_to_json(str(self.trainer.folder / STATE))

    def resume(self, folder: Path) -> None:
        """Restore the history of a run up to the step where it resumes, and the tokens seen until
        the last save.
        """
        trainer, path = self.trainer, folder / STATE
        self.state.global_step = 0 if trainer is None else trainer.done * self.updates
        self.state.epoch = self.state.global_step / self.epoch_steps
        if not path.exists():
            return
        saved = TrainerState.load_from_json(str(path))
        kept = [row for row in saved.log_history if row["step"] <= self.state.global_step]
        self.state.log_history[:] = kept
        self.state.num_input_tokens_seen = saved.num_input_tokens_seen
        if saved.global_step != self.state.global_step:
            seen = [row["num_tokens"] for row in kept if "num_tokens" in row]
            self.state.num_input_tokens_seen = int(max(seen, default=0))
