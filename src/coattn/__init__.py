"""coattn: attention over a KV cache that does not fit in GPU memory, shared between GPU and CPU, merged exactly."""

from __future__ import annotations

from coattn._version import __version__ as __version__
from coattn.errors import CoattnError as CoattnError

TYPE_CHECKING = False  # `typing` takes a while, in which Ctrl-C would end in a traceback
if TYPE_CHECKING:
    from typing import Any

    from coattn.engine.llm import LLM as LLM
    from coattn.engine.sampling.params import SamplingParams as SamplingParams
    from coattn.hf.attach import attach as attach
    from coattn.hf.cache import Cache as Cache
    from coattn.hf.models import get_model as get_model
    from coattn.method.row import Method as Method
    from coattn.method.row import compose as compose
    from coattn.state import AttnState as AttnState
    from coattn.state import merge as merge

_LAZY = {
    "LLM": "coattn.engine.llm",
    "SamplingParams": "coattn.engine.sampling.params",
    "attach": "coattn.hf.attach",
    "Cache": "coattn.hf.cache",
    "get_model": "coattn.hf.models",
    "Method": "coattn.method.row",
    "compose": "coattn.method.row",
    "AttnState": "coattn.state",
    "merge": "coattn.state",
}
__all__ = ["CoattnError", "__version__", *_LAZY]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: only those who use them wait
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'coattn' has no attribute {name!r}")
