"""Models by name: the one that coattn fetches itself, local folders, GGUF files, hub names."""

from coattn.hf.models.fetch import CATALOG, Embedded, get_model, list_models
from coattn.hf.models.resolve import resolve

__all__ = ["CATALOG", "Embedded", "get_model", "list_models", "resolve"]
