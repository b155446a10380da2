"""Files that hold a few tensors of every layer, made from a text that the model has read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from coattn.errors import ConfigError
from coattn.kernels.quantise.file import read_file, same_mark, write_file
from coattn.types import LayerShape


@dataclass(frozen=True)
class TextOrigin:
    """What a file says of itself."""

    model: str
    text: str
    text_sha256: str
    tokens: int
    marks: tuple[float | None, ...]
    """One number of each layer's own weights, by which another model is told apart."""


@dataclass(frozen=True)
class LayerFile:
    """One kind of file. noun: what it is, in the words of people; command: makes one; layer: a NamedTuple of what it
    holds of a layer, whose first tensor begins `[kv_heads, head_dim]`."""

    form: str
    noun: str
    command: str
    layer: Any

    def save(self, path: Path, layers: Mapping[int, Any], origin: TextOrigin) -> None:
        """Writes layers `0 .. n - 1`."""
        named = ((f"{name}.{i}", x) for i, each in layers.items() for name, x in each._asdict().items())
        write_file(path, {name: x.contiguous() for name, x in named}, self.form, origin)

    def read_origin(self, path: str) -> TextOrigin:
        """What a file says of itself. Raises ConfigError where it is not of this kind."""
        hint = f"Make one with `{self.command}`."
        return TextOrigin(**read_file(path, self.form, f"{self.noun} file", self.noun, hint))

    def load(self, path: str, layers: Mapping[int, LayerShape]) -> dict[int, Any]:
        """What it holds of these layers, on their devices. Raises ConfigError for another model's."""
        origin, found = self.read_origin(path), {}
        with safe_open(path, "pt") as file:
            for i, shape in layers.items():
                known = i < len(origin.marks) and same_mark(shape.mark, origin.marks[i])
                made = [file.get_tensor(f"{name}.{i}") for name in self.layer._fields] if known else None
                if made is None or made[0].shape[:2] != (shape.kv_heads, shape.head_dim):
                    raise ConfigError(
                        f"The {self.noun} file {path} was made for {origin.model} ({len(origin.marks)} layers), not "
                        "for the model in use.",
                        f"Make one for this model with `{self.command}`.",
                    )
                found[i] = self.layer(*(x.to(shape.device) for x in made))
        return found
