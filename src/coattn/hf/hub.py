"""Ask the model hub once, briefly, whether a name is there: its own client retries for most of a minute."""

from __future__ import annotations

import difflib

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from coattn.errors import ModelError
from coattn.hf.models.catalog import CATALOG

SECONDS = 10.0


def reachable(name: str) -> bool:
    """Whether the hub answers for model `name`; if not, only its cache here can serve.

    Raises ModelError when the hub answers that it has no such model. One request, at most `SECONDS`.
    """
    try:
        HfApi().model_info(name, timeout=SECONDS)
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no model folder {name} here and no public model {name} on the hub.", hint(name)
        ) from error
    except HfHubHTTPError as error:
        return error.response.status_code < 500  # it answers: let the download itself say what is wrong
    except (OfflineModeIsEnabled, OSError):
        return False
    except Exception as error:  # the client's transport library differs between its releases
        if "connect" in type(error).__name__.lower() or "timeout" in type(error).__name__.lower():
            return False
        raise
    return True


def hint(name: str) -> str:
    """What to do when hub model `name` cannot be had."""
    close = difflib.get_close_matches(name, CATALOG, n=1)
    meant = f"Did you mean {close[0]}? " if close else ""
    return f"{meant}Check the name and the network, or use a local folder, or {', '.join(sorted(CATALOG))}."
