"""Checks that a model is available on the hub before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from groupwise.errors import UsageError, first_line

TIMEOUT_S = 10.0
"""Seconds that the hub may take to answer."""


def check_on_hub(name: str, *, revision: str | None = None) -> None:
    """Check within seconds that a name that is not a folder is a model on the hub or in its cache;
    the libraries that load it would retry for a minute.

    Args:
        name: as in `model.path`, no folder here.
        revision: commit, tag or branch; None is the default branch.

    Raises:
        UsageError: it is no such name, or it is not in the cache and the hub has no such model, may
            not be asked (HF_HUB_OFFLINE) or cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=TIMEOUT_S)
    except EntryNotFoundError:
        return  # a model of another form, which loading has more to say about
    except Exception as error:  # of whatever transport the hub's library uses
        said = first_line(error).rstrip(".")
        raise UsageError(
            f"model.path = {name!r}: is not a folder, and no model of that name "
            + (f"with model.revision = {revision!r} " if revision else "")
            + f"was found on the hub ({said})."
        ) from error


def commit_in_cache(name: str, *, revision: str | None = None) -> str | None:
    """The commit of a model in the cache of the hub; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def current_commit(name: str, *, revision: str | None = None) -> str | None:
    """The commit that a revision of a model on the hub stands for now; None where it is not known.
    Tokenizer and weights that are loaded with it belong together."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json", revision=revision)
    except Exception:  # of whatever transport the hub's library uses; loading says more
        return None
    return commit_in_cache(name, revision=revision)
