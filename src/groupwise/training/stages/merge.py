"""An adapter and the model that it belongs to, made one plain model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from groupwise.errors import UsageError
from groupwise.models import load_policy, save_policy
from groupwise.models.adapters import SavedAdapter
from groupwise.models.loading import DTYPES, resolve
from groupwise.report.card import write_merged_card, write_model_card


def merge(
    adapter: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the model that an adapter makes of its base as a plain Hugging Face folder with a card.

        W' = W + alpha / rank · B A

    The sum is taken in float32, also where training held W in 4 bits: the merged model then differs
    from the trained one by the error of that storage.

    Args:
        adapter: folder of an adapter, or of a run that trained one.
        output: folder of the merged model; must not exist, or be empty.
        dtype: of the weights written: float32, bfloat16 or float16; None takes that of the base.
        trust_remote_code: run Python code that comes with the base. Off unless asked for.

    Raises:
        UsageError: there is no adapter, its model is not there, or the output is in use.
    """
    source, folder = Path(adapter), Path(output)
    if (source / "final").is_dir():
        source /= "final"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output = {str(folder)!r}: is in use; choose a folder that is not.")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype = {dtype!r}: no such type. Known: {', '.join(DTYPES)}.")
    saved = SavedAdapter.at(source)
    if saved is None:
        raise UsageError(f"{source}: contains no adapter to merge.")
    policy = load_policy(source, trust_remote_code=trust_remote_code)
    base = AutoConfig.from_pretrained(resolve(saved.base), trust_remote_code=trust_remote_code)
    merged = policy.model.merge_and_unload().to(DTYPES[dtype] if dtype else base.dtype)
    save_policy(replace(policy, model=merged), folder)
    if (source.parent / "config.json").is_file() and source.name in ("final", "best"):
        write_model_card(source.parent, folder, merged=True)
    else:
        write_merged_card(source, saved.base, folder)
    return folder
