"""SoftRank-GRPO with Unsloth's 4-bit training: Unsloth's TRL trainer with another advantage.

Not tested here: it needs a CUDA GPU, `pip install unsloth trl groupwise`, and Unsloth's own
versions of both. `with_advantage` itself is tested on TRL 1.16. Unsloth must be imported first,
because it patches TRL when it is imported.

The adapter and the KL term are those of the recipe gsm8k-softrank-qwen2.5-3b. The loss is not: TRL
has no mean over the tokens of one prompt's answers, so `dapo` takes the mean over all tokens of a
step. The reward is correctness alone.
"""

import re

from unsloth import FastLanguageModel  # isort: skip
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from groupwise.integrations.trl import with_advantage

MODEL = "unsloth/Qwen2.5-3B-Instruct"
TASK = "Think between <reasoning> tags, then give the number between <answer> tags.\n\n"


def exact(completions, answer, **_):
    """1 for the right number between the answer tags, else 0: SoftRank wants no negative reward."""
    texts = [completion[0]["content"] for completion in completions]
    found = [re.search(r"<answer>\s*(-?[\d.,]+)\s*</answer>", text) for text in texts]
    given = [match.group(1).replace(",", "") if match else None for match in found]
    return [float(a == b) for a, b in zip(given, answer, strict=True)]


def main() -> None:
    """Train on GSM8K."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        MODEL, max_seq_length=1024, load_in_4bit=True, fast_inference=True, max_lora_rank=64
    )
    model = FastLanguageModel.get_peft_model(
        model, r=64, lora_alpha=64, use_gradient_checkpointing="unsloth"
    )
    data = load_dataset("openai/gsm8k", "main", split="train").map(
        lambda row: {
            "prompt": [{"role": "user", "content": TASK + row["question"]}],
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
        }
    )
    SoftRankTrainer = with_advantage(GRPOTrainer, "softrank", tau=0.5)
    trainer = SoftRankTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[exact],
        train_dataset=data,
        args=GRPOConfig(
            output_dir="softrank-unsloth",
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            max_completion_length=512,
            learning_rate=5e-6,
            max_steps=250,
            beta=0.04,
            loss_type="dapo",
            use_vllm=True,
        ),
    )
    trainer.train()
    model.save_lora("softrank-unsloth/adapter")


if __name__ == "__main__":
    main()
