"""What a model is, in a few bytes: files made for one are told by them from another's."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coattn.errors import UnsupportedError
from coattn.hf.stored import stored

VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "use_cache")
"""Of a configuration: what changes nothing that is stored."""
SAMPLE = 256
"""Numbers of each tensor that are hashed in their order; all of them are added up."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def config_fingerprint(model: Any) -> str:
    """Of the configuration: architecture, sizes, rotary embedding."""
    kept = {key: value for key, value in model.config.to_dict().items() if key not in VOLATILE}
    return _hash(json.dumps(kept, sort_keys=True, default=str))


_known: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], str]] = weakref.WeakKeyDictionary()
"""By model: the versions of its weights, and their fingerprint then."""


def weights_fingerprint(model: Any) -> str:
    """Of all weights, bit by bit, and their dtypes: the same while steps run and bring weights in.

    Reads each of them, where it lies; again only when one changed.
    """
    try:
        versions = tuple(weight._version for _, weight in stored(model))
    except RuntimeError:  # weights that were made in inference mode have none
        return _weights(model)
    if _known.get(model, (None, ""))[0] != versions:
        _known[model] = versions, _weights(model)
    return _known[model][1]


def read_by(model: Any) -> str:
    """What keys and values hang on: configuration and weights."""
    return _hash(config_fingerprint(model) + weights_fingerprint(model))


@torch.no_grad()
def _weights(model: Any) -> str:
    lines = []
    for name, weight in sorted(stored(model), key=lambda item: item[0]):
        # a layer's parameters may be staging memory, which holds another layer
        for part, x in _inner(name, getattr(weight, "on_host", weight)):
            lines.append(f"{part} {x.dtype} {list(x.shape)} {'' if x.is_meta else _sums(x)}")
    return _hash("\n".join(lines))


def _inner(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a quantised form that is a tensor subclass; else the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for each in tensor.__tensor_flatten__()[0]:
        yield from _inner(f"{name}.{each}", getattr(tensor, each))


def _tokenizer(tokenizer: Any) -> str:
    """Of the tokenizer: how texts become token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _hash(backend.to_str())
    get = getattr(tokenizer, "get_vocab", None)
    return _hash("none" if get is None else json.dumps(get(), sort_keys=True))


def fingerprints(model: Any, tokenizer: Any) -> dict[str, str]:
    """Everything that stored keys and values hang on, by a name for people."""
    template = getattr(tokenizer, "chat_template", None)
    return {
        "configuration": config_fingerprint(model),
        "weights": weights_fingerprint(model),
        "tokenizer": _tokenizer(tokenizer),
        "chat template": _hash(json.dumps(template, sort_keys=True, default=str)),
    }


def _sums(weight: Tensor) -> str:
    try:
        bits = weight.detach().contiguous().view(BITS[weight.element_size()]).flatten()
    except (NotImplementedError, RuntimeError, TypeError):
        raise UnsupportedError(
            f"Weights of type {type(weight).__name__} cannot be read bit by bit, so files made for the model cannot be "
            "told from another's.",
            "Do without sessions on disk, the disk tier and transfer, or use another quantisation.",
        ) from None
    some = bits[:: max(1, len(bits) // SAMPLE)][:SAMPLE].to(torch.int64)
    order = torch.arange(1, len(some) + 1, device=some.device)
    found = torch.stack([bits.sum(dtype=torch.int64), some.sum(), (some * order).sum()])
    return " ".join(map(str, found.tolist()))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
