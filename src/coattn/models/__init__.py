"""Models by name: the ones coattn can fetch and convert itself, local folders, hub names."""

from coattn.models.cache import cache_dir
from coattn.models.catalog import CATALOG, Embedded
from coattn.models.get import get
from coattn.models.listing import ModelInfo, list_models
from coattn.models.progress import Progress
from coattn.models.resolve import resolve

__all__ = ["CATALOG", "Embedded", "ModelInfo", "Progress", "cache_dir", "get", "list_models", "resolve"]
