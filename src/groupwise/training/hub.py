"""Uploads to the Hugging Face hub, of a finished model and of one that is still training."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from groupwise.errors import GroupwiseError, RunError, UsageError
from groupwise.settings import HubSettings
from groupwise.training.callbacks import Callback
from groupwise.training.checkpoint.files import replace_folder
from groupwise.training.trainer import Trainer
from groupwise.types import StepResult


def push(
    folder: Path, name: str, *, setting: str = "--push", private: bool = True, message: str = ""
) -> str:
    """Upload a model folder to the Hugging Face hub.

    Args:
        name: of the repository, as owner/model.
        setting: what named the repository, for error messages.
        private: whether a repository that does not exist yet is created as a private one.
        message: of the commit; empty uses the hub's default.

    Returns:
        The address of the repository.

    Raises:
        UsageError: the name is not a valid repository name, or nobody is logged in.
        RunError: the hub cannot be reached or rejects the upload.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message=message or None
        )
    except HFValidationError as error:
        raise UsageError(f"{setting} = {name!r}: {error}") from error
    except LocalTokenNotFoundError as error:
        raise UsageError(
            f"{setting} = {name!r}: nobody is logged in; run `hf auth login`."
        ) from error
    except Exception as error:  # What a network raises differs between versions.
        said = " ".join(str(error).split())
        raise RunError(
            f"{setting} = {name!r}: could not be uploaded ({said}). The model is in {folder}; "
            f"hf upload {name} {folder} tries again."
        ) from error
    return repository.url


def check_login(settings: HubSettings | None) -> None:
    """Raise an error before the start of a run whose uploads would fail.

    Raises:
        UsageError: there is no token for the hub.
    """
    from huggingface_hub import get_token

    if settings is not None and get_token() is None:
        raise UsageError(f"hub.name = {settings.name!r}: nobody is logged in; run `hf auth login`.")


def push_final(settings: HubSettings | None, final: Path) -> None:
    """Upload the final model of a run, if settings name a repository.

    Raises:
        UsageError, RunError: as `push`.
    """
    if settings is not None:
        _push(settings, final, "final")


class HubUploads(Callback):
    """Uploads the model every few steps in the background. Training neither waits for an upload nor
    stops if one fails. An upload that would begin during another one is skipped.

    Args:
        settings: repository and interval.
        folder: the model is written here before it is uploaded.
        write: writes the model with its card to a folder.
        log: shows a line.
    """

    def __init__(
        self,
        settings: HubSettings,
        *,
        folder: Path,
        write: Callable[[str], None],
        log: Callable[[str], None],
    ) -> None:
        self.settings, self.folder, self.write, self.log = settings, folder, write, log
        self._upload = threading.Thread()

    def on_step(self, step: int, result: StepResult) -> None:
        """Start an upload if one is due."""
        every = self.settings.every_steps
        if not every or step % every:
            return
        if self._upload.is_alive():
            self.log(f"the upload to {self.settings.name} has not finished; step {step} is skipped")
            return
        replace_folder(self.folder, self.write)
        self._upload = threading.Thread(target=self._upload_step, args=(step,), daemon=True)
        self._upload.start()

    def finish(self) -> None:
        """Wait for a running upload, and remove the files written for it."""
        if self._upload.ident is not None:
            self._upload.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _upload_step(self, step: int) -> None:
        try:
            _push(self.settings, self.folder, f"step {step}")
        except GroupwiseError as error:
            self.log(str(error))


def _push(hub: HubSettings, folder: Path, message: str) -> str:
    return push(folder, hub.name, setting="hub.name", private=hub.private, message=message)


def uploads(settings: HubSettings | None, trainer: Trainer) -> list[HubUploads]:
    """The callbacks that upload the model of a trainer; empty without settings."""
    if settings is None or trainer.folder is None:
        return []
    folder, write = trainer.folder / "upload", trainer.write_model
    return [HubUploads(settings, folder=folder, write=write, log=trainer.monitor.log)]
