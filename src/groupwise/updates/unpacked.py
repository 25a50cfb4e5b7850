"""Log-probabilities of models that cannot be packed: whole sequences through the whole model.

Slower and larger than the packed form (the prompt is computed for every completion, and every
logit exists at once), but it assumes nothing of the model beyond causality.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.types import Batch


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A microbatch of rows padded on the right.

    Attributes:
        rows: which rows of the batch it computes.
        tokens, seen: prompt and completion of each row, and which of them are no padding.
        place: for every predicted token, the position whose logits predict it.
        target: the predicted tokens.
        row, time: where they stand in `batch.rows(rows)`.
    """

    rows: Int[Tensor, "rows"]
    tokens: Int[Tensor, "rows time"]
    seen: Bool[Tensor, "rows time"]
    place: Int[Tensor, "predicted"]
    target: Int[Tensor, "predicted"]
    row: Int[Tensor, "predicted"]
    time: Int[Tensor, "predicted"]


def pad(batch: Batch, rows: Int[Tensor, "rows"], *, device: torch.device) -> Padded:
    """Lay some rows of a batch out one below the other."""
    own = batch.rows(rows)
    prompts = [batch.prompts[int(group)] for group in own.group]
    before = torch.tensor([len(prompt) for prompt in prompts])
    whole = before + own.length
    tokens = torch.zeros(len(rows), int(whole.max()), dtype=torch.long)
    for place, prompt in enumerate(prompts):
        tokens[place, : len(prompt)] = prompt
        tokens[place, len(prompt) : whole[place]] = own.tokens[place, : own.length[place]]
    row, time = own.mask.nonzero(as_tuple=True)
    return Padded(
        rows=rows,
        tokens=tokens.to(device),
        seen=(torch.arange(tokens.shape[1]) < whole[:, None]).to(device),
        place=(before[row] + time - 1).to(device),
        target=own.tokens[row, time].to(device),
        row=row.to(device),
        time=time.to(device),
    )


def padded_logprobs(
    model: Any,
    padded: Padded,
    *,
    temperature: float,
    entropy: bool = False,
    kept: Bool[Tensor, "predicted vocab"] | None = None,
) -> tuple[Float[Tensor, "predicted"], Float[Tensor, "predicted"] | None]:
    """log π(target) and, if asked for, the entropy, as `token_logprobs` gives them."""
    out = model(input_ids=padded.tokens, attention_mask=padded.seen.long(), use_cache=False)
    z = out.logits[padded.row, padded.place]
    z = (z if z.dtype == torch.float64 else z.float()) / temperature
    if kept is not None:
        z = z.masked_fill(~kept, float("-inf"))
    logs = z.log_softmax(-1)
    logp = logs.gather(-1, padded.target[:, None]).squeeze(-1)
    if not entropy:
        return logp, None
    finite = logs if kept is None else logs.masked_fill(~kept, 0.0)
    return logp, -(logs.exp() * finite).sum(-1)
