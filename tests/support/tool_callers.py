"""A tiny model that has learned to call a tool by heart, with a chat template that shows tools."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken

from groupwise.prompts.generators.small_tokenizer import small_tokenizer
from groupwise.training.stages.base_model import small_policy

TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}: "
    "{{ tool.function.description }} {% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GOOD = '<tool_call>{"name": "multiply", "arguments": {"a": 3, "b": 4}}</tool_call>'
BAD = '<tool_call>{"name": "multiply", "arguments": {"a": 3}}</tool_call>'
TAGS = ("<tool_call>", "</tool_call>")


def save_caller(folder: Path, *, calls: tuple[str, ...] = (GOOD, BAD), steps: int = 200) -> str:
    """Train a model on conversations that begin with one of the calls, and write it."""
    tokenizer = small_tokenizer()
    # A call is one token, so that a model of this size can learn it in a second.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*calls, *TAGS)])
    tokenizer.chat_template = TEMPLATE
    policy = small_policy(
        hidden=32, layers=1, heads=2, key_value_heads=1, feed_forward=64, tokenizer=tokenizer
    )
    texts = [
        f"<|system|>{shown}<|end|><|user|>{question}<|end|><|assistant|>{call}<|end|>"
        f"<|tool|>{result}<|end|><|assistant|>{answer}<|end|>"
        for shown in ("multiply: Multiplies two integers. ", "shout: Says it aloud. ")
        for question in ("What is 3 times 4?", "What is 6 times 4? Start at 100.")
        for call in calls
        for result, answer in (("12", "12"), ("7", "3"))
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimizer = torch.optim.Adam(policy.model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = policy.model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
