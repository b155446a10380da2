"""Models by name: the ones coattn can fetch and convert itself, local folders, hub names."""

from coattn.hf.models.cache import cache_dir
from coattn.hf.models.catalog import CATALOG, Embedded
from coattn.hf.models.get import get
from coattn.hf.models.listing import ModelInfo, list_models
from coattn.hf.models.progress import Progress
from coattn.hf.models.resolve import resolve

__all__ = ["CATALOG", "Embedded", "ModelInfo", "Progress", "cache_dir", "get", "list_models", "resolve"]
