"""The fused forms of one model: found and checked once, active while a step is captured."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coattn.hf.forward import Session
from coattn.hf.fuse.forms import eps_of, gate_form, linear_form, norm_form, rotary_form
from coattn.hf.fuse.layer import LayerForm, layer_form
from coattn.hf.fuse.same import is_plain_linear, replaced, same
from coattn.hf.fuse.siblings import Siblings, find_siblings
from coattn.hf.stored import first_of
from coattn.kernels.current import current

ROTARY = "apply_rotary_pos_emb"


class Fusion:
    """`active` while a step is captured; `close` gives the projections their own weights back."""

    def __init__(self, session: Session) -> None:
        self.session, self.model = session, session.model
        self._siblings: dict[nn.Module, dict[str, Siblings]] = {}
        self._forms: dict[nn.Module, Callable[..., Any]] = {}
        self._rotary: list[Any] = []
        self.summary: dict[str, int] = {}
        """How many of each kind are fused."""
        self.dtype = session.layers[0].dtype
        self._probe: Tensor = self.model.get_input_embeddings().weight
        for module in list(self.model.modules()):
            found = find_siblings(module)
            if found:
                self._siblings[module] = found
        self._find_rotary()
        within: set[nn.Module] = set()
        for module in list(self.model.modules()):
            if module in within:
                continue
            self._find(module)
            if isinstance(self._forms.get(module), LayerForm):
                within.update(module.modules())  # nobody calls the parts of a layer that is fused as a whole

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model's modules run in their fused form inside this block."""
        with ExitStack() as undo:
            for each in self._all_siblings():
                undo.enter_context(each.active())
            for module, form in self._forms.items():
                undo.enter_context(replaced(module, form))
            for home in self._rotary:
                undo.callback(setattr, home, ROTARY, getattr(home, ROTARY))
                setattr(home, ROTARY, rotary_form)
            yield

    def close(self) -> None:
        for each in self._all_siblings():
            each.part()
        self._siblings.clear()

    def _all_siblings(self) -> list[Siblings]:
        return [each for found in self._siblings.values() for each in found.values()]

    def _find(self, module: nn.Module) -> None:
        eps = eps_of(module)
        weight = getattr(module, "weight", None)
        whole = layer_form(module, self._siblings)
        if whole is not None and self._layer_fits(module, whole):
            self._use("layers", module, whole)
        elif eps is not None and isinstance(weight, Tensor):
            self._try("norms", module, norm_form(weight, eps), weight.shape[0])
        elif isinstance(module, nn.Linear) and is_plain_linear(module):
            if not any(module in each.members for each in self._all_siblings()):
                self._try("linears", module, linear_form(module), module.in_features)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            self._try("gates", module, gate_form(module), int(self.model.config.hidden_size))

    def _try(self, kind: str, module: nn.Module, form: Callable[..., Any], width: int) -> None:
        with self._beside(module):
            x = self._random(1, 3, width)
            if same(partial(module, x), partial(form, x)):
                self._use(kind, module, form)

    def _use(self, kind: str, module: nn.Module, form: Callable[..., Any]) -> None:
        self._forms[module] = form
        self.summary[kind] = self.summary.get(kind, 0) + 1

    def _layer_fits(self, module: nn.Module, form: LayerForm) -> bool:
        """Checked with an attention that anybody can compute, since the cache has nothing to attend to yet."""
        with self._beside(module), self.session.calling(_Pretend(), None):
            x = self._random(1, 3, int(self.model.config.hidden_size))
            cos, sin = self._angles()
            options = {"position_embeddings": (cos, sin), "attention_mask": None, "position_ids": None}
            return same(partial(module, x, **options), partial(form, x, **options))

    def _find_rotary(self) -> None:
        homes = {sys.modules[type(module).__module__] for module in self.model.modules() if hasattr(module, "q_proj")}
        cos, sin = self._angles()
        d = cos.shape[-1]
        q, k = self._random(1, self._heads, 3, d), self._random(1, self._kv_heads, 3, d)
        for home in homes:
            own = getattr(home, ROTARY, None)
            if own is None or list(inspect.signature(own).parameters)[:4] != ["q", "k", "cos", "sin"]:
                continue
            if d & (d - 1) == 0 and same(partial(own, q, k, cos, sin), partial(rotary_form, q, k, cos, sin)):
                self._rotary.append(home)
        self.summary["rotary"] = len(self._rotary)

    @contextmanager
    def _beside(self, module: nn.Module) -> Iterator[None]:
        """Random numbers are on the module's device inside this block, which may be another than the first layers'."""
        before, own = self._probe, first_of(module)
        self._probe = before if own is None else own
        try:
            with current(self._probe.device):
                yield
        finally:
            self._probe = before

    @property
    def _heads(self) -> int:
        return int(self.model.config.num_attention_heads)

    @property
    def _kv_heads(self) -> int:
        return int(getattr(self.model.config, "num_key_value_heads", None) or self._heads)

    def _angles(self) -> tuple[Tensor, Tensor]:
        config = self.model.config
        d = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        angle = self._random(1, 3, d // 2)
        cos, sin = (torch.cat([x, x], -1) for x in (angle.cos(), angle.sin()))
        return cos, sin

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._probe.device, dtype=torch.float32).to(self.dtype)


class _Pretend:
    """Stands for a runtime: an attention in which queries, keys and values all matter, and nothing is stored."""

    def attend(self, _running: Any, _layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q * scale + (k - 2 * v).repeat_interleave(group, 1)
