"""Local folders in place of the models and data sets that TRL's tests take from the Hub.

`from_pretrained` and `load_dataset` prefer a folder of the working directory to a name of the Hub,
so TRL's tests find these folders, which have the names of the Hub, without any patch. Models are
as small as TRL's and have random weights; chat templates are those of the installed TRL.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

OWNER = "trl-internal-testing"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|finetune_right_pad_id|>", "<|eot_id|>"]
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"]


def _zen_lines() -> list[str]:
    """The first half of every line of the Zen of Python."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").splitlines()[2:]
    return [" ".join(words[: (len(words) + 1) // 2]) for words in map(str.split, lines)]


PROMPTS = _zen_lines()
TRAINING_ROWS = 17

SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "layers_block_type": ["mamba", "attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "mamba_n_groups": 1,
    "ssm_state_size": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "use_mamba_kernels": False,
}
POLICIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "qwen2_5", SMALL),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "qwen3", {**SMALL, "head_dim": 4}),
    "tiny-Qwen3MoeForCausalLM": (
        "Qwen3Moe",
        "qwen3",
        {**SMALL, **EXPERTS, "head_dim": 4, "num_experts": 4, "norm_topk_prob": True},
    ),
    "tiny-Cohere2ForCausalLM": ("Cohere2", "qwen2_5", {**SMALL, "logit_scale": 1.0}),
    "tiny-Gemma2ForCausalLM": ("Gemma2", "gemma", {**SMALL, "head_dim": 4}),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4Moe",
        "qwen2_5",
        {
            **SMALL,
            **EXPERTS,
            "head_dim": 2,
            "n_routed_experts": 4,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "tiny-GptOssForCausalLM": (
        "GptOss",
        "qwen2_5",
        {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-NemotronHForCausalLM-nano": ("NemotronH", "qwen2_5", HYBRID),
}
CLASSIFIERS = {
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "qwen2_5"),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", "qwen3"),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", "qwen2_5"),
}
REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def make(folder: Path) -> None:
    """Write all models and data sets below a folder, once."""
    home = folder / OWNER
    if (home / "done").exists():
        return
    for name, (family, template, sizes) in POLICIES.items():
        _model(home / name, f"{family}ForCausalLM", template, sizes)
    for name, (family, template) in CLASSIFIERS.items():
        sizes = {**SMALL, "hidden_size": 16, "head_dim": 4, "num_labels": 1}
        _model(home / name, f"{family}ForSequenceClassification", template, sizes)
    _remote(home / "tiny-RemoteForCausalLM")
    _zen(home / "zen")
    (home / "done").touch()


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(PROMPTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(TAGS)
    text = files("trl").joinpath("chat_templates", f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = text
    return tokenizer


def _model(folder: Path, kind: str, template: str, sizes: dict[str, Any]) -> None:
    tokenizer = _tokenizer(template)
    architecture: Callable[..., Any] = getattr(transformers, kind)
    config = architecture.config_class(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **sizes,
    )
    torch.manual_seed(0)
    model = architecture(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _remote(folder: Path) -> None:
    """A model that only code of its own folder can load."""
    _model(folder, "LlamaForCausalLM", "qwen2_5", SMALL)
    (folder / "modeling_remote.py").write_text(REMOTE)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    }
    path.write_text(json.dumps(config, indent=2))


def _zen(folder: Path) -> None:
    """Prompts as text and as messages, each cut into train and test."""
    folder.mkdir(parents=True)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    header = ["---", "configs:"]
    for name, column in (
        ("standard_prompt_only", PROMPTS),
        ("conversational_prompt_only", chats),
    ):
        header += [f"- config_name: {name}", "  data_files:"]
        parts = {"train": column[:TRAINING_ROWS], "test": column[TRAINING_ROWS:]}
        for split, rows in parts.items():
            lines = "".join(json.dumps({"prompt": value}) + "\n" for value in rows)
            (folder / f"{name}-{split}.jsonl").write_text(lines)
            header += [f"  - split: {split}", f"    path: {name}-{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*header, "---", ""]))
