"""Low-rank adapters: made new, read from a folder, merged into the model they belong to.

A folder with an adapter names the model that it belongs to. A model of that name and shape need not
be the same one, so its fingerprint is kept as well.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import UsageError
from groupwise.models.foreign_code import time_limit
from groupwise.settings import AdapterSettings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model.json"
"""File next to an adapter that holds the fingerprint of its model."""

SCORE_LAYERS = ("score", "classifier")
"""Names that transformers gives the head of a sequence or token classifier."""

MATCH_SECONDS = 10.0
"""Longest time for matching the patterns of an adapter."""

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""Bytes read of every weight file for a fingerprint."""


KINDS = ("LORA", "IA3", "VERA")
"""Kinds of adapters in PEFT that can be loaded from a folder: low-rank ones and factors, which can
be merged."""
_OWN = re.compile("lora_|ia3_|vera_lambda")


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without the warning of `transformers` about an attribute that PEFT reads of every model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield


def is_adapted(model: Any) -> bool:
    """Whether a model is inside an adapter wrapper."""
    return hasattr(model, "get_base_model")  # a merged model may keep `peft_config`


def refuse_virtual_tokens(config: Any, *, where: str) -> None:
    """Refuse prompt tuning and its kin.

    Args:
        config: of an adapter of PEFT, of a model with one, or None.
        where: of the message.

    Raises:
        UsageError: the adapter puts virtual tokens in front of the prompt.
    """
    if getattr(config, "is_prompt_learning", False):
        raise UsageError(
            f"{where} = {type(config).__name__}: puts virtual tokens in front of every prompt, "
            "which the sampler and packed updates do not have; use LoraConfig(task_type="
            "'CAUSAL_LM'), or model={'adapter': {'rank': 16}} of groupwise.train."
        )


def new_adapter(model: Any, adapter: AdapterSettings, *, task: str = "CAUSAL_LM") -> Any:
    """The model with a new float32 low-rank adapter; only the adapter is trained.

    Args:
        task: what the model is for, as PEFT calls it. The head of a classifier ("SEQ_CLS",
            "TOKEN_CLS") has no adapter: it is trained whole and saved with the adapter.

    Raises:
        UsageError: the targets are not modules of this model.
    """
    from peft import LoraConfig, get_peft_model

    from groupwise.models.low_rank import sum_low_rank

    targets: Any = adapter.targets[0] if adapter.targets == ("all-linear",) else adapter.targets
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=adapter.dropout,
        target_modules=targets,
        task_type=task,
        # PEFT leaves the head out for some tasks only.
        exclude_modules=None if task == "CAUSAL_LM" else list(SCORE_LAYERS),
    )
    try:
        with quiet_peft():
            return sum_low_rank(get_peft_model(model, config))
    except ValueError as error:
        known = sorted({name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if name})
        raise UsageError(
            f"model.adapter.targets = {list(adapter.targets)!r}: no such modules in this model. "
            f"Known: {', '.join(known)}."
        ) from error


@dataclass(frozen=True, kw_only=True)
class SavedAdapter:
    """A folder that holds an adapter.

    Attributes:
        folder: where it is.
        base: name or folder of the model that it belongs to.
        settings: its PEFT configuration.
    """

    folder: Path
    base: str
    settings: Mapping[str, Any]

    @classmethod
    def at(cls, folder: Path) -> SavedAdapter | None:
        """The adapter in a folder; None where there is none.

        Raises:
            UsageError: it is damaged, or names no model that could be found.
        """
        if not (folder / CONFIG).is_file():
            return None
        where = f"model.path = {str(folder)!r}: is an adapter"
        try:
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            base = settings["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{where}, and its {CONFIG} cannot be read.") from None
        if not (folder / WEIGHTS).is_file():
            raise UsageError(f"{where} without {WEIGHTS}; other forms of weights are not loaded.")
        if not base or (Path(base).is_absolute() and not Path(base).is_dir()):
            raise UsageError(
                f"{where} of the model {base!r}, which is not there; write the model's folder or "
                f"hub name as base_model_name_or_path into its {CONFIG}."
            )
        return cls(folder=folder, base=str(base), settings=settings)

    def attached(self, model: Any, wanted: AdapterSettings | None) -> Any:
        """The model with this adapter in float32; only the adapter is trained.

        Args:
            wanted: what a recipe says of its adapter; the dropout is taken from there.

        Raises:
            UsageError: the recipe asks for another adapter, or the model is not the adapter's own.
        """
        from peft import LoraConfig, PeftConfig, PeftModel

        from groupwise.models.low_rank import sum_low_rank

        where = f"model.path = {str(self.folder)!r}: is an adapter of {self.base!r}"
        self._check_patterns(model, where)
        config = PeftConfig.from_pretrained(str(self.folder))
        refuse_virtual_tokens(config, where=f"model.path = {str(self.folder)!r}: the adapter")
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in KINDS:
            raise UsageError(
                f"{where} of kind {kind}, which is not supported. Known: {', '.join(KINDS)}; "
                "PEFT's merge_and_unload() makes one plain model of others that can be merged."
            )
        config.inference_mode = False
        if wanted is not None:
            if not isinstance(config, LoraConfig):
                raise UsageError(
                    f"{where} of kind {kind}, and model.adapter describes a LoRA; leave the "
                    "section out to continue training this adapter."
                )
            self._check(wanted)
            config.lora_dropout = wanted.dropout
        known = _noted(self.folder)
        if known is not None and known != fingerprint(model):
            raise UsageError(
                f"{where} as it was when the adapter was trained, and the weights there have "
                "changed since; bring back the model it was trained on, or train a new adapter."
            )
        try:
            with quiet_peft():
                adapted = PeftModel.from_pretrained(
                    model, str(self.folder), is_trainable=True, config=config
                )
        except (ValueError, RuntimeError) as error:
            said = " ".join(str(error).split())[:200]
            raise UsageError(f"{where}, and does not fit the model of that name: {said}") from error
        if different := self._unlike(adapted):
            raise UsageError(
                f"{where}, and does not fit the model of that name: {different} is not in both, "
                "or has another shape."
            )
        return sum_low_rank(adapted)

    def _check_patterns(self, model: Any, where: str) -> None:
        """Match the patterns of the configuration in both ways of PEFT, within a time limit: some
        patterns take exponential time."""
        settings = self.settings
        found = [settings.get(key) for key in ("target_modules", "exclude_modules")]
        found += [*(settings.get("rank_pattern") or ()), *(settings.get("alpha_pattern") or ())]
        for key in ("layers_pattern", "modules_to_save"):
            given = settings.get(key)
            found += given if isinstance(given, list) else [given]
        try:
            with time_limit(MATCH_SECONDS):
                for pattern in (each for each in found if isinstance(each, str)):
                    compiled = re.compile(rf"(?:.*\.)?(?:{pattern})(?:\.|$)")
                    for name, _ in model.named_modules():
                        compiled.match(name)
                        re.fullmatch(pattern, name)
        except (TimeoutError, re.error, RecursionError) as error:
            raise UsageError(
                f"{where}, and a pattern in its {CONFIG} cannot be matched ({error})."
            ) from None

    def _check(self, wanted: AdapterSettings) -> None:
        """A recipe that continues training an adapter must describe that adapter, or none."""
        own: dict[str, Any] = {"rank": self.settings["r"], "alpha": self.settings["lora_alpha"]}
        if wanted.targets != ("all-linear",):
            own["targets"] = tuple(sorted(self.settings["target_modules"]))
        for name, value in own.items():
            asked = getattr(wanted, name)
            if (tuple(sorted(asked)) if name == "targets" else asked) != value:
                raise UsageError(
                    f"model.adapter.{name} = {asked!r}: the adapter {str(self.folder)!r} to "
                    f"continue has {value!r}; use that, or leave the section out, or merge the "
                    "adapter and start a new one (groupwise merge)."
                )

    def _unlike(self, adapted: Any) -> str | None:
        """The first weight of the adapter that file and model do not share."""
        from peft import get_peft_model_state_dict
        from safetensors import safe_open

        with safe_open(str(self.folder / WEIGHTS), "pt") as file:
            saved = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
        state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        own = {name: tuple(weight.shape) for name, weight in state.items()}
        differ = own.items() ^ saved.items()
        return min((name for name, _ in differ if _OWN.search(name)), default=None)


def fingerprint(model: Any) -> str | None:
    """What distinguishes a model from others of its name: the commit of a hub name, or samples of
    the weights in a folder; None where neither is known.

    Args:
        model: a `transformers` model, outside of any adapter.
    """
    commit = getattr(model.config, "_commit_hash", None)
    return f"commit:{commit}" if commit else folder_fingerprint(model.name_or_path)


def folder_fingerprint(folder: str | Path) -> str | None:
    """A hash of samples of the weights in a folder; None where there are none."""
    files = sorted(Path(folder).glob("*.safetensors")) if folder and Path(folder).is_dir() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"


def config_fingerprint(folder: str | Path) -> str | None:
    """A hash of a model folder's config.json, which decides what its weights compute; None where
    there is none."""
    try:
        content = (Path(folder) / "config.json").read_bytes() if folder else None
    except (OSError, ValueError):
        return None
    return None if content is None else f"sha256:{hashlib.sha256(content).hexdigest()}"


def base_fingerprint(model: Any) -> str | None:
    """The fingerprint of a model, or of the one below its adapter."""
    return fingerprint(model.get_base_model() if is_adapted(model) else model)


def note_base(model: Any, folder: str | Path) -> None:
    """Write the fingerprint of an adapter's model beside the adapter."""
    found = base_fingerprint(model)
    if found is not None:
        text = json.dumps({"fingerprint": found})
        (Path(folder) / BASE).write_text(text + "\n", encoding="utf-8")


def _noted(folder: Path) -> str | None:
    try:
        return json.loads((folder / BASE).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
