"""Whether a model can be had from the hub, found out before anything is loaded."""

from __future__ import annotations

from groupwise.errors import UsageError, first_line

TIMEOUT_S = 10.0
"""How long the hub may take to say so."""


def check_on_hub(name: str) -> None:
    """See in seconds whether a name that is no folder stands for a model of the hub or its cache;
    the libraries below would try again and again for a minute.

    Args:
        name: as in `model.path`, no folder here.

    Raises:
        UsageError: it is no such name, or it is not in the cache and the hub has no such model, may
            not be asked (HF_HUB_OFFLINE) or cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=TIMEOUT_S)
    except EntryNotFoundError:
        return  # a model of another form, which loading has more to say about
    except Exception as error:  # of whatever transport the hub's library uses
        said = first_line(error).rstrip(".")
        raise UsageError(
            f"model.path = {name!r}: no folder has this path here, and no model of that name "
            f"could be found on the hub ({said})."
        ) from error
