"""Every import of Transformers: architectures, the attention hook, the cache, loading."""

from __future__ import annotations

import logging
from importlib import metadata

NEWEST_TESTED = (5, 23)
"""Of Transformers, the newest minor version that all tests have run with."""


def warn_if_newer(version: str) -> bool:
    """Logs one sentence if a version of Transformers is newer than what was tested: it changes every week or two."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers <= NEWEST_TESTED:
        return False
    tested = ".".join(map(str, NEWEST_TESTED))
    logging.getLogger(__name__).warning(
        "Transformers %s is newer than %s, the newest that coattn was tested with; if a model fails, install %s.",
        version,
        tested,
        f'"transformers=={tested}.*"',
    )
    return True


warn_if_newer(metadata.version("transformers"))
