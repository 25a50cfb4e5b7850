"""Scripts for TRL on groupwise: what they may say, what they get, what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer, TrainerCallback

from groupwise.errors import RewardError, UsageError
from groupwise.integrations.trl import GRPOTrainer, data, rewards
from groupwise.prompts.templates import render
from groupwise.rundir.files import read_lines
from small_runs import tiny
from trl_scripts import QUESTIONS, Notebook, arguments, letters
from vllm_peer import saved_policy, served

BLOG = """
from datasets import load_dataset
from groupwise.integrations.trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files=PROMPTS, split="train", cache_dir=CACHE)


def reward_format(completions, **kwargs):
    scores = []
    for c in completions:
        if c.strip().startswith("정답") and "옳다." in c:
            scores.append(1.0)
        else:
            scores.append(0.0)
    return scores


training_args = GRPOConfig(
    output_dir="malpyeong-grpo",
    per_device_train_batch_size=2,
    num_train_epochs=3,
    num_generations=4,
    learning_rate=1e-5,
    gradient_accumulation_steps=2,
    logging_steps=20,
)

trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[reward_format],
    train_dataset=dataset,
    args=training_args,
)

trainer.train()
"""
"""The script of a blog: its import, the place of its data and its model are ours."""


def test_the_script_of_the_blog_runs(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in QUESTIONS[:3]]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    script = BLOG.replace("logging_steps=20,", "logging_steps=20, max_completion_length=8,")
    given = {"PROMPTS": str(data), "CACHE": str(tmp_path / "cache"), "MODEL": model}
    ran: dict[str, Any] = dict(given)
    exec(compile(script, "script.py", "exec"), ran)
    # one prompt of four completions per step, three epochs over three prompts
    assert ran["trainer"].state.global_step == 9
    rows = (tmp_path / "malpyeong-grpo" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 9
    assert (tmp_path / "malpyeong-grpo" / "final" / "model.safetensors").exists()


def test_variables_of_the_chat_template_are_those_of_the_settings(
    tmp_path: Path, model: str
) -> None:
    given = arguments(tmp_path, model, chat_template_kwargs={"thinking": False})
    tokenizer = given["processing_class"] = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}"
        "{% if thinking is defined and not thinking %} at once{% endif %}"
    )
    given["train_dataset"] = [{"prompt": [{"role": "user", "content": "2 + 3"}]}] * 4
    trainer = GRPOTrainer(**given)
    assert tokenizer.decode(render(trainer.prompts[0], tokenizer)) == "2 + 3 at once"


def test_a_run_trains_and_logs_by_trls_names(tmp_path: Path, model: str) -> None:
    trainer = GRPOTrainer(**arguments(tmp_path, model, beta=0.1, max_steps=3))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    out = trainer.train()
    assert out.global_step == 3
    assert math.isfinite(out.training_loss)
    after = list(trainer.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [row["step"] for row in trainer.state.log_history] == [1, 2, 3, 3]
    first = trainer.state.log_history[0]
    assert {
        "loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time",
        "reward", "reward_std", "frac_reward_zero_std", "entropy", "kl",
        "rewards/letters/mean", "rewards/letters/std",
        "completions/mean_length", "completions/min_length", "completions/max_length",
        "completions/clipped_ratio", "completions/mean_terminated_length",
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    } <= first.keys()  # fmt: skip
    assert first["reward"] == pytest.approx(first["rewards/letters/mean"])
    assert first["epoch"] == pytest.approx(1 / 7)
    # linear decay over three steps
    rates = [row["learning_rate"] for row in trainer.state.log_history[:3]]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    assert "train_loss" in trainer.state.log_history[-1]


def test_rollouts_are_written_by_the_vllm_that_trls_settings_name(tmp_path: Path) -> None:
    """In training and in an evaluation after it, which meets the server with the last weights."""
    folder = saved_policy(tmp_path / "model").model.name_or_path
    with served(folder) as server:
        place = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        trainer = GRPOTrainer(**arguments(tmp_path, folder, max_steps=2, **place))
        trainer.train()
        rows = [*read_lines(tmp_path / "run" / "metrics.jsonl")]
        assert len(rows) == 2 and all(row["canary_gap"] < 1e-4 for row in rows)
        assert server.said.count("/v1/completions") > 0
        found = trainer.evaluate([{"prompt": text} for text in QUESTIONS[:2]])
        assert math.isfinite(found["eval_reward"])


def test_rewards_get_what_trl_gives_them(tmp_path: Path, model: str) -> None:
    seen: list[dict[str, Any]] = []

    def judged(prompts, completions, completion_ids, level, **kwargs):
        seen.append({"prompts": prompts, "completions": completions, "level": level, **kwargs})
        kwargs["log_metric"]("letters", len(completions[0][0]["content"]))
        kwargs["log_extra"]("level", level)
        return [float(len(ids)) for ids in completion_ids]

    async def sometimes(completions, **kwargs):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    chat = [[{"role": "user", "content": text}] for text in QUESTIONS]
    given = arguments(tmp_path, model, reward_weights=[1.0, 10.0], log_completions=True)
    given["reward_funcs"] = [judged, sometimes]
    given["train_dataset"] = [{"prompt": p, "level": i} for i, p in enumerate(chat)]
    trainer = GRPOTrainer(**given)
    trainer.train()
    one = seen[0]
    assert one["prompts"] == [chat[one["level"][0]]] * 4
    assert one["completions"][0][0]["role"] == "assistant"
    assert one["trainer_state"] is trainer.state
    assert "completion_ids" not in one
    first = trainer.state.log_history[0]
    assert first["rewards/sometimes/mean"] == 1.0
    # judged alone where `sometimes` says nothing
    wanted = first["rewards/judged/mean"] + 5.0
    assert first["reward"] == pytest.approx(wanted)
    assert "letters" in first
    extra = (tmp_path / "run" / "extra.jsonl").read_text().splitlines()
    assert json.loads(extra[0])["column"] == "level"
    assert list((tmp_path / "run" / "rollouts").glob("*.jsonl"))


def test_special_tokens_are_left_out_of_what_rewards_read(tmp_path: Path, model: str) -> None:
    texts: list[str] = []

    def reader(completions, **kwargs):
        texts.extend(completions)
        return [1.0] * len(completions)

    given = arguments(tmp_path, model, max_completion_length=64)
    given["reward_funcs"] = reader
    GRPOTrainer(**given).train()
    assert texts
    assert not any("<|" in text for text in texts)


def test_equal_rewards_do_not_end_a_run(tmp_path: Path, model: str) -> None:
    def nothing(completions, **kwargs):
        return [0.0] * len(completions)

    given = arguments(tmp_path, model, max_steps=5)
    given["reward_funcs"] = nothing
    trainer = GRPOTrainer(**given)
    trainer.train()
    assert trainer.state.global_step == 5
    assert trainer.state.log_history[0]["frac_reward_zero_std"] == 1.0


def test_a_reward_that_raises_ends_the_run(tmp_path: Path, model: str) -> None:
    def broken(completions, **kwargs):
        return [text[99] for text in completions]

    given = arguments(tmp_path, model)
    given["reward_funcs"] = broken
    with pytest.raises(RewardError, match=r"broken: IndexError: .*\(test_trl_dropin.py, line"):
        GRPOTrainer(**given).train()


def test_callbacks_are_told_in_order(tmp_path: Path, model: str) -> None:
    given = arguments(
        tmp_path, model, max_steps=2, eval_strategy="steps", eval_steps=2, save_steps=1,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    notebook = Notebook()
    held_out = given["train_dataset"].select(range(2))
    GRPOTrainer(**given, callbacks=[notebook], eval_dataset=held_out).train()
    assert notebook.told == [
        "begin",
        *("step 0", "end 1", "log loss", "save step-000001"),
        *("step 1", "end 2", "log loss", "log eval_completions/mean_length", "evaluate"),
        *("save step-000002", "epoch", "log train_runtime", "over"),
    ]


def test_a_callback_can_stop_a_run(tmp_path: Path, model: str) -> None:
    notebook = Notebook(stop=2)
    trainer = GRPOTrainer(**arguments(tmp_path, model, max_steps=6), callbacks=[notebook])
    assert trainer.train().global_step == 2
    assert notebook.told[-1] == "over"


def test_several_optimizer_steps_per_generation(tmp_path: Path, model: str) -> None:
    notebook = Notebook()
    given = arguments(tmp_path, model, steps_per_generation=2, num_iterations=2, max_steps=8)
    trainer = GRPOTrainer(**given, callbacks=[notebook])
    trainer.train()
    ends = [told for told in notebook.told if told.startswith("end")]
    assert ends == [f"end {n}" for n in range(1, 9)]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert trainer.config.update.epochs == 2
    assert trainer.config.update.minibatches == 2
    assert trainer.config.steps == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    first = trainer.state.log_history[0]
    assert first["loss"] == pytest.approx(rows[0]["loss"] / 4)
    assert first["step_time"] == pytest.approx(rows[0]["seconds"] / 4)
    losses = [row["loss"] for row in trainer.state.log_history if "train_loss" not in row]
    assert losses == pytest.approx([rows[0]["loss"] / 4] * 4 + [rows[1]["loss"] / 4] * 4)


def test_steps_after_the_last_logging_window_are_logged(tmp_path: Path, model: str) -> None:
    trainer = GRPOTrainer(**arguments(tmp_path, model, max_steps=3, logging_steps=2))
    trainer.train()
    history = trainer.state.log_history
    assert [(row["step"], row["loss"] is None) for row in history] == [(2, False), (3, False)]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert history[1]["loss"] == pytest.approx(rows[2]["loss"])
    assert history[1]["reward"] == pytest.approx(rows[2]["reward"])
    assert history[1].keys() >= {"train_loss", "rewards/letters/mean", "rewards/letters/std"}


class Logs(TrainerCallback):
    """Asks for a log that is not due, right after one."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_log = True

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        control.should_log = True


def test_no_row_is_logged_without_a_step_in_it(tmp_path: Path, model: str) -> None:
    given = arguments(tmp_path, model, max_steps=-1, num_train_epochs=1)
    given["train_dataset"] = given["train_dataset"].select(range(2))
    trainer = GRPOTrainer(**given, callbacks=[Logs])
    trainer.train()
    assert [row.get("loss") is None for row in trainer.state.log_history] == [False, False, True]


def test_evaluations_on_several_data_sets_are_named(tmp_path: Path, model: str) -> None:
    """Streams too; the figures reach the callbacks, the history and the trackers of the run."""
    rows = datasets.Dataset.from_dict({"prompt": QUESTIONS[:2]})
    sets = datasets.DatasetDict({"easy": rows})
    given = arguments(tmp_path, model, max_steps=1, eval_strategy="steps", eval_steps=1)
    given["args"].report_to = "tensorboard"
    trainer = GRPOTrainer(
        **given, eval_dataset={**sets, "hard": rows.select([0]).to_iterable_dataset()}
    )
    trainer.train()
    wanted = {"eval_easy_reward", "eval_hard_reward", "eval_easy_loss", "eval_hard_loss"}
    assert wanted <= {name for row in trainer.state.log_history for name in row}
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert wanted <= set(events.Tags()["scalars"])
    one = trainer.evaluate("hard")
    assert math.isfinite(one["eval_loss"] or 0.0)
    assert trainer.evaluate({"new": rows.to_iterable_dataset()}).keys() >= {"eval_new_reward"}


def test_an_endless_stream_to_evaluate_on_is_refused(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "LONGEST_STREAM", 3)
    read = []

    def endless():
        while True:
            read.append(1)
            yield {"prompt": "1 + 1 ="}

    stream = datasets.IterableDataset.from_generator(endless)
    given = arguments(tmp_path, model)
    with pytest.raises(UsageError, match=r"more than 3 rows.*eval_dataset\['a'\]\.take\(500\)"):
        GRPOTrainer(**given, eval_dataset={"a": stream})
    assert len(read) == 4
    assert GRPOTrainer(**given, eval_dataset=stream.take(3)).eval_prompts.keys() == {""}


def test_settings_are_assigned_and_attributes_read_as_in_trls_scripts(
    tmp_path: Path, model: str
) -> None:
    given = arguments(tmp_path, model)
    given["args"].model_init_kwargs = {
        "revision": "main", "device_map": None, "attn_implementation": None,
        "quantization_config": None, "dtype": None,
    }  # fmt: skip
    rows = [{"prompt": "2 + 3"}] * 2
    trainer = GRPOTrainer(**given, eval_dataset=rows)
    assert trainer.eval_dataset is rows and trainer.train_dataset is given["train_dataset"]
    assert trainer.processing_class is trainer.policy.tokenizer
    assert trainer.callback_handler.callbacks
    for wrong, said in (
        ({"revision": "other"}, "model.revision = 'other': .* is a folder"),
        ({"attn_implementation": "sdpa"}, "'attn_implementation' = 'sdpa' is not supported"),
    ):
        given["args"].model_init_kwargs = wrong
        with pytest.raises(UsageError, match=said):
            GRPOTrainer(**given)
    given["args"].model_init_kwargs = None
    given["args"].use_liger_kernel = True  # refused, though assigned after construction
    with pytest.raises(UsageError, match="GRPOConfig.use_liger_kernel = True"):
        GRPOTrainer(**given)


def test_a_run_resumes_as_if_it_had_never_stopped(tmp_path: Path, model: str) -> None:
    whole = GRPOTrainer(**arguments(tmp_path / "a", model, max_steps=4, save_steps=2))
    whole.train()
    cut = arguments(tmp_path / "b", model, max_steps=4, save_steps=2)
    GRPOTrainer(**cut, callbacks=[Notebook(stop=2)]).train()
    again = GRPOTrainer(**cut)
    with pytest.raises(UsageError, match="already contains a run"):
        again.train()
    again.train(resume_from_checkpoint=True)
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    told = [
        [row["reward"] for row in t.state.log_history if "reward" in row] for t in (whole, again)
    ]
    assert told[0] == told[1]
    assert whole.state.num_input_tokens_seen == again.state.num_input_tokens_seen


def test_a_lost_checkpoint_takes_its_history_along(tmp_path: Path, model: str) -> None:
    whole = GRPOTrainer(**arguments(tmp_path / "a", model, max_steps=3))
    whole.train()
    given = arguments(tmp_path / "b", model, max_steps=3, save_steps=1)
    GRPOTrainer(**given, callbacks=[Notebook(stop=2)]).train()
    shutil.rmtree(tmp_path / "b" / "run" / "checkpoints" / "step-000002")
    again = GRPOTrainer(**given)
    again.train(resume_from_checkpoint=True)
    assert [row["step"] for row in again.state.log_history] == [1, 2, 3, 3]
    assert again.state.num_input_tokens_seen == whole.state.num_input_tokens_seen


def test_an_adapter_is_trained_and_saved(tmp_path: Path, model: str) -> None:
    from peft import LoraConfig, PeftModel

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = GRPOTrainer(**arguments(tmp_path, model, beta=0.1), peft_config=config)
    assert isinstance(trainer.model, PeftModel)
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if "lora_B" in n and bool(p.any())}
    assert len(moved) == 2
    (tmp_path / "saved").mkdir()
    card = tmp_path / "saved" / "README.md"
    card.write_text("---\ntags:\n- groupwise\n---\n# of earlier weights")
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    assert "earlier weights" not in card.read_text()
    given = arguments(tmp_path, model, beta=0.1)
    given["model"] = trainer.model
    with pytest.raises(UsageError, match="trained already"):
        GRPOTrainer(**given, processing_class=trainer.processing_class)
    merged = trainer.model.merge_and_unload()
    merged.peft_config = {"default": config}  # some versions of peft leave it there
    given["model"] = merged
    again = GRPOTrainer(**given, processing_class=trainer.processing_class)
    assert again.model is merged and not hasattr(merged, "get_base_model")


def test_a_model_at_hand_and_an_evaluation(tmp_path: Path) -> None:
    policy = tiny()
    given = arguments(tmp_path, "unused")
    given["model"] = policy.model
    held_out = [{"prompt": text} for text in QUESTIONS[:2]]
    trainer = GRPOTrainer(**given, processing_class=policy.tokenizer, eval_dataset=held_out)
    found = trainer.evaluate()
    assert found == {
        **trainer.evaluate(),
        **{k: found[k] for k in found if "per_s" in k or "run" in k},
    }
    assert found["eval_reward"] == pytest.approx(found["eval_rewards/letters/mean"])
    assert trainer.state.log_history[0].keys() >= {"eval_reward", "eval_completions/clipped_ratio"}
    assert trainer.train().global_step == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": [print]}, "tools: print: cannot be described"),
        ({"rollout_func": print}, "rollout_func: is not taken"),
        ({"optimizers": (1, None)}, "optimizers: is not taken; the optimizer is AdamW"),
        ({"environment_factory": list}, "list has no method reset"),
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"train_dataset": [{"question": "?"}]}, "has no column 'prompt'"),
        ({"train_dataset": [{"prompt": [{"role": "user"}]}]}, "row 0: the prompt must be text"),
        ({"train_dataset": {"train": []}}, "pass one of them"),
        ({"train_dataset": [{"prompt": "a", "image": 1}]}, "only text is supported"),
        ({"reward_funcs": None}, "reward_funcs must be"),
        ({"reward_funcs": [3]}, "3 is neither"),
        ({"args": object()}, "import GRPOConfig from"),
    ],
)
def test_what_is_not_taken_is_refused(
    tmp_path: Path, model: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        GRPOTrainer(**{**arguments(tmp_path, model), **given})
    with pytest.raises(TypeError, match="no argument 'reward_fns'"):
        GRPOTrainer(**arguments(tmp_path, model), reward_fns=[letters])


def test_too_few_prompts_and_weights_are_refused(tmp_path: Path, model: str) -> None:
    given = arguments(tmp_path, model, max_steps=-1, per_device_train_batch_size=32)
    with pytest.raises(UsageError, match="has 7 prompts, and a generation takes 8"):
        GRPOTrainer(**given)
    with pytest.raises(UsageError, match="one per reward function, of which there are 1"):
        GRPOTrainer(**arguments(tmp_path, model, reward_weights=[1.0, 2.0]))
    with pytest.raises(UsageError, match="no eval_dataset"):
        GRPOTrainer(**arguments(tmp_path, model, eval_strategy="steps"))


def test_a_classifier_can_be_a_reward(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=600, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    judge = Qwen2ForSequenceClassification(config)
    judge.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "judge")
    given = arguments(tmp_path, model)
    given["reward_funcs"] = [str(tmp_path / "judge")]
    trainer = GRPOTrainer(**given)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/judge/std"] > 0
    monkeypatch.setattr(rewards, "best_device", lambda: torch.device("meta"))
    loaded = Qwen2ForSequenceClassification.from_pretrained(tmp_path / "judge")
    rewards._classifier(loaded, None)
    assert loaded.device.type == "meta", "it is moved to the card"
    monkeypatch.undo()
    judge.model.save_pretrained(tmp_path / "judge")  # without its head
    with pytest.raises(UsageError, match=r"reward_funcs = .*missing: score\.weight"):
        GRPOTrainer(**given)
