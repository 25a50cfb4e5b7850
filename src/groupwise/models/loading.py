"""Models and tokenizers from a folder, a hub name, or the one that ships with the package."""

from __future__ import annotations

import importlib.resources
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
)

from groupwise.errors import UsageError, first_line, install_command
from groupwise.kernels import FourBits
from groupwise.models.adapters import SavedAdapter, folder_fingerprint, new_adapter
from groupwise.models.hub import check_on_hub, commit_in_cache, current_commit
from groupwise.models.policy import Policy, make_policy, without_bars
from groupwise.settings import AdapterSettings, ModelSettings

BUNDLED = {"bundled": "word-problems-base", "bundled:search": "search-base"}
"""Models that ship with the package: name → folder among its assets."""
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*")
"""File names of tokenizers."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def resolve(path: str | Path) -> str:
    """The folder of a bundled model, folders in full, hub names unchanged."""
    if str(path) in BUNDLED:
        return str(importlib.resources.files("groupwise") / "assets" / BUNDLED[str(path)])
    return str(Path(path).absolute()) if Path(path).exists() else str(path)


def place_fingerprint(place: str) -> str | None:
    """What distinguishes the weights of a folder, or of a hub name in the cache, from others of
    that name; None where neither is there.

    Args:
        place: from `resolve`.
    """
    if Path(place).is_dir():
        return folder_fingerprint(place)
    try:
        commit = commit_in_cache(place)
    except ValueError:  # no name of the hub
        return None
    return f"commit:{commit}" if commit else None


def load_policy(
    path: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    adapter: AdapterSettings | None = None,
    quantization: str | None = None,
    attention: str = "auto",
    head_dtype: str = "model",
) -> Policy:
    """Load a causal language model and its tokenizer.

    Args:
        path: a folder in Hugging Face form, a hub name, "bundled" or "bundled:search". The folder
            of an adapter gives the model that it belongs to with the adapter, which alone is
            trained.
        revision: commit, tag or branch of a hub name; None takes the default branch.
        dtype: of the weights: float32, bfloat16, float16 or float64.
        trust_remote_code: run Python code that comes with the model. Off unless asked for.
        adapter: train this adapter and leave the weights as they are.
        quantization: "nf4" holds the weights in 4 bits, doubly quantised (QLoRA, 2305.14314).
        attention: of `transformers`, where groupwise does not attend itself; "auto" leaves the
            choice to it.
        head_dtype: "float32" computes logits in float32 whatever the model's type.

    Raises:
        UsageError: no such model, a folder without tokenizer, a tokenizer that cannot be used, or
            an adapter of another model.
    """
    source = ModelSource.at(path, revision=revision)
    _check_attention(attention)
    tokenizer = source.tokenizer(trust_remote_code=trust_remote_code)
    model, loaded = source.read(
        AutoModelForCausalLM,
        dtype=DTYPES[dtype],
        trust_remote_code=trust_remote_code,
        quantization_config=four_bits(DTYPES[dtype]) if quantization == "nf4" else None,
        attn_implementation=None if attention == "auto" else attention,
    )
    check_weights(loaded, path)
    check_four_bits(model, path)
    if quantization is not None:
        release_file(model)
    if head_dtype != "model":
        model.config.head_dtype = head_dtype
    policy = make_policy(model, tokenizer)
    if source.adapter is not None:
        return replace(policy, model=source.adapter.attached(model, adapter))
    return policy if adapter is None else with_adapter(policy, adapter)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model and its tokenizer are read from.

    Attributes:
        path: as it was given, for messages.
        home: the folder or hub name of the weights; of an adapter, those it belongs to.
        words: the folder or hub name of the tokenizer.
        adapter: the adapter that `path` holds, if it holds one.
        revision: commit, tag or branch of `home` on the hub; None is the default branch.
    """

    path: str | Path
    home: str
    words: str
    adapter: SavedAdapter | None
    revision: str | None

    @classmethod
    def at(cls, path: str | Path, *, revision: str | None = None) -> ModelSource:
        """The source that a path stands for.

        Raises:
            UsageError: no such model, a folder without tokenizer, or the revision of a folder.
        """
        place = resolve(path)
        saved = SavedAdapter.at(Path(place))
        home = place if saved is None else resolve(saved.base)
        _check_folder(path, home, revision)
        words = _with_tokenizer(place, home)
        if not Path(home).exists():
            revision = current_commit(home, revision=revision) or revision
        return cls(path=path, home=home, words=words, adapter=saved, revision=revision)

    def tokenizer(self, *, trust_remote_code: bool) -> Any:
        """The tokenizer.

        Raises:
            UsageError: none can be loaded.
        """
        revision = self.revision if self.words == self.home else None
        return _tokenizer(
            self.path, self.words, trust_remote_code=trust_remote_code, **_at(revision)
        )

    def read(self, kind: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
        """The model, without its adapter, and what transformers says of its weights.

        Args:
            kind: one of the Auto classes of transformers.
            settings: of its `from_pretrained`.

        Raises:
            UsageError: the model cannot be loaded.
        """
        try:
            with without_bars():
                model, loaded = kind.from_pretrained(
                    self.home,
                    output_loading_info=True,
                    use_safetensors=True,
                    **_at(self.revision),
                    **settings,
                )
        except Exception as error:  # safetensors and transformers may raise anything
            raise UsageError(
                f"model.path = {str(self.path)!r}: cannot be loaded ({first_line(error)})."
            ) from error
        if not Path(self.home).exists():
            # Newer versions of transformers do not say which commit they loaded.
            model.config._commit_hash = commit_in_cache(self.home, revision=self.revision)
        return model, loaded


def configuration(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The sizes of a model, without its weights; of an adapter, those of the model it belongs to.

    Args:
        path, revision, trust_remote_code: as in `load_policy`.

    Raises:
        UsageError: they are not there.
    """
    saved = SavedAdapter.at(Path(resolve(path)))
    place = resolve(path if saved is None else saved.base)
    _check_place(path, place, revision)
    try:
        return AutoConfig.from_pretrained(
            place, trust_remote_code=trust_remote_code, **_at(revision)
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"model.path = {str(path)!r}: no config.json could be read ({first_line(error)})."
        ) from error


def with_adapter(policy: Policy, adapter: AdapterSettings) -> Policy:
    """The policy with a fresh low-rank adapter, float32, that alone is trained.

    Raises:
        UsageError: the targets are not modules of this model.
    """
    return replace(policy, model=new_adapter(policy.model, adapter))


def with_settings(policy: Policy, settings: ModelSettings) -> Policy:
    """A policy of a loaded model with the settings of [model] that can still be applied.

    Raises:
        UsageError: a setting that would need the model to be loaded again.
    """
    model = policy.model
    for name, has in (("dtype", str(model.dtype).removeprefix("torch.")), ("quantization", None)):
        wanted = getattr(settings, name)
        if name in settings.model_fields_set and wanted != has:
            raise UsageError(
                f"model.{name} = {wanted!r}: cannot be applied to a model that is already loaded; "
                "load it that way, or give its name or folder instead."
            )
    if settings.head_dtype != "model":
        model.config.head_dtype = settings.head_dtype
    return policy if settings.adapter is None else with_adapter(policy, settings.adapter)


def _at(revision: str | None) -> dict[str, str]:
    """The argument of transformers for a revision, if there is one."""
    return {} if revision is None else {"revision": revision}


def _check_place(path: str | Path, place: str, revision: str | None) -> None:
    """Check that a model is available, and that only a hub name has a revision."""
    if not Path(place).exists():
        check_on_hub(place, revision=revision)
    elif revision is not None:
        raise UsageError(
            f"model.revision = {revision!r}: {str(path)!r} is a folder, and only models of the hub "
            "have revisions; remove it."
        )


def _check_folder(path: str | Path, place: str, revision: str | None) -> None:
    folder = Path(place)
    _check_place(path, place, revision)
    if (folder / "final" / "config.json").exists():
        raise UsageError(
            f"model.path = {str(path)!r}: is a run directory; its model is {Path(path) / 'final'}."
        )
    if folder.exists() and not (folder / "config.json").exists():
        raise UsageError(
            f"model.path = {str(path)!r}: is not a model folder, as it has no config.json."
        )
    if folder.is_dir() and not _has_tokenizer(folder):
        # transformers would make an empty tokenizer of the model's kind.
        raise UsageError(
            f"model.path = {str(path)!r}: has no tokenizer; the folder must contain the "
            "tokenizer's files beside the weights."
        )


def check_weights(
    loaded: Mapping[str, Any], path: str | Path, *, where: str = "model.path"
) -> None:
    """Check that no weights are missing: transformers initialises missing ones, other than tied
    ones, at random.

    Args:
        loaded: what transformers says of the weights.
        path: of the model.
        where: the setting that names it.

    Raises:
        UsageError: weights are missing or unexpected.
    """
    kinds = {"missing": loaded["missing_keys"], "unexpected": loaded["unexpected_keys"]}
    wrong = [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]
    if wrong:
        raise UsageError(
            f"{where} = {str(path)!r}: the weights are not those that config.json describes "
            f"({'; '.join(wrong)}); copy or download the model again."
        )


def _listed(names: Collection[str]) -> str:
    """The first of many names, and how many more there are."""
    first = sorted(names)[:3]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def _check_attention(name: str) -> None:
    from transformers.utils.import_utils import is_flash_attn_2_available

    if name == "flash_attention_2" and not is_flash_attn_2_available():
        raise UsageError(
            f"model.attention = {name!r}: the package flash-attn is not installed, or does not "
            "work on this machine; pip install flash-attn, or keep 'auto'. Grouped attention "
            "uses PyTorch's fused kernels either way."
        )


def _has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES)


def _with_tokenizer(place: str, home: str) -> str:
    """An adapter's own tokenizer, or that of its model."""
    return place if place == home or _has_tokenizer(Path(place)) else home


def _tokenizer(path: str | Path, place: str, **settings: Any) -> Any:
    try:
        return AutoTokenizer.from_pretrained(place, **settings)
    except Exception as error:  # tokenizers raises nothing more precise
        raise UsageError(
            f"model.path = {str(path)!r}: no tokenizer could be loaded ({first_line(error)}); its "
            "files must be beside the weights."
        ) from error


def four_bits(compute: torch.dtype) -> Any:
    """QLoRA's storage: normal-float 4 with doubly quantised scales."""
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            f"model.quantization = 'nf4': needs bitsandbytes; {install_command('quant')}."
        ) from error
    except Exception as error:  # Its library is loaded here and may raise any error.
        raise UsageError(
            f"model.quantization = 'nf4': bitsandbytes does not work on this machine "
            f"({first_line(error)}); remove the setting and set model.dtype = 'bfloat16'."
        ) from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def release_file(model: Any) -> None:
    """Copy the weights that a model reads from its file, so that the file is no longer mapped.

    A quantised model reads only a few weights from it, mostly the embedding, but they would keep
    the whole file in memory.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def check_four_bits(model: Any, path: str | Path) -> None:
    """Check that 4-bit layers compute on this device and propagate gradients."""
    for name, layer in model.named_modules():
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            continue
        # The layout that bitsandbytes uses in evaluation mode on such a CPU propagates no gradient.
        setattr(layer, "support_avx512bf16_for_cpu", False)  # noqa: B010
        # If rows share a block of 64, its CPU kernel silently uses a wrong scale.
        if layer.weight.device.type == "cpu" and layer.in_features % FourBits.BLOCK:
            raise UsageError(
                f"model.quantization = 'nf4': on a CPU, bitsandbytes computes wrong results for "
                f"matrices whose row length is not a multiple of {FourBits.BLOCK}, and {name} of "
                f"{str(path)!r} has rows of {layer.in_features}; remove the setting, or use "
                "another model."
            )
