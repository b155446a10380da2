"""The forms in which quantised weights come, each over the same eight bits: how Transformers' quantisers store them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Fp8Linear(nn.Module):
    """Parameters in float8 and a scale in float32, as fine-grained FP8 and compressed-tensors."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax().float() / 400
        self.weight = nn.Parameter((linear.weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale, self.bias = nn.Parameter(scale, requires_grad=False), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.weight.float() * self.scale).to(x.dtype), self.bias)


class BufferLinear(nn.Module):
    """Buffers alone, as GPTQ and AWQ."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax() / 127
        self.register_buffer("qweight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scales", scale.detach().clone())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.qweight
        bias: Any = self.bias
        return functional.linear(x, weight.to(x.dtype) * self.scales, bias)


class Packed(Tensor):
    """A tensor subclass, as torchao: products and `detach` work, nothing else does."""

    packed: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> "Packed":
        return Tensor._make_wrapper_subclass(cls, packed.shape, dtype=scale.dtype, device=packed.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.packed, self.scale = packed, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, *rest = args
            return functional.linear(x, weight.packed.to(x.dtype) * weight.scale, *rest)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Closed(Packed):
    """One that does not say what it is made of."""

    __tensor_flatten__ = property()  # type: ignore[assignment]


def subclass_linear(kind: type[Packed], linear: nn.Linear) -> nn.Linear:
    """The same module with such a weight."""
    scale = (linear.weight.abs().amax() / 127).detach()
    linear.weight = nn.Parameter(kind((linear.weight / scale).round().to(torch.int8), scale), requires_grad=False)
    return linear


FORMS: dict[str, Any] = {
    "fp8": Fp8Linear,
    "buffers": BufferLinear,
    "subclass": lambda linear: subclass_linear(Packed, linear),
}


@torch.no_grad()
def quantise(model: Any, make: Any) -> Any:
    """Replaces every linear module of the layers, in place."""
    for layer in model.get_decoder().layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, make(child))
    return model
