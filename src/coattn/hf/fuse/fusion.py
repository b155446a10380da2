"""The fused forms of one model: found and checked once, active while a step is captured.

Nothing is assumed from names alone: a fused form is used only after it gave what the module itself gives, on the
module's own weights. What does not fit stays as Transformers computes it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from coattn.cache.states import StateStore
from coattn.hf.experts import holds_experts, is_experts, is_router, top_of
from coattn.hf.forward import Session
from coattn.hf.fuse.experts import by_size, expert_form, router_forms, router_input, safe_form
from coattn.hf.fuse.forms import act_of, is_plain_linear, norm_of, replaced, rotary_form, same, weight_of
from coattn.hf.fuse.layer import LayerForm, layer_forms
from coattn.hf.fuse.mixers import delta_step, scratch, tried
from coattn.hf.fuse.siblings import Siblings, find_siblings
from coattn.hf.invariant import check_modules, row_invariant
from coattn.hf.logits import head
from coattn.hf.mixers import MixerForm, States
from coattn.hf.stored import first_of
from coattn.hf.waits import waits
from coattn.kernels.linear import linear
from coattn.kernels.streams import current
from coattn.step.running import RunningStep
from coattn.types import Phase, Step

ROTARY = "apply_rotary_pos_emb"
DRAWS = 3
"""Random inputs of which a layer with experts must get one right."""


class Fusion:
    """`active` while a step is captured; `close` gives the projections their own weights back."""

    def __init__(self, session: Session) -> None:
        self.session, self.model, self.shape = session, session.model, session.layers[0]
        self.summary: dict[str, int] = {"rotary": 0}
        """How many of each kind are fused."""
        self._forms: list[tuple[Any, str, Callable[..., Any]]] = []
        """Whose attribute is replaced by what."""
        modules = list(self.model.modules())
        self._siblings = {module: siblings for module in modules if (siblings := find_siblings(module))}
        self._members = {member for each in self._all_siblings() for member in each.members}
        for home in {sys.modules[type(module).__module__] for module in modules if hasattr(module, "q_proj")}:
            self._fuse_rotary(home)
        within: set[nn.Module] = set()
        for module in modules:
            if module not in within:
                within |= self._fuse(module)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model's modules run in their fused form inside this block."""
        with ExitStack() as undo:
            for each in self._all_siblings():
                undo.enter_context(each.active())
            for owner, name, form in self._forms:
                undo.enter_context(replaced(owner, form, name))
            yield

    def close(self) -> None:
        for each in self._all_siblings():
            each.part()
        self._siblings.clear()

    def _all_siblings(self) -> list[Siblings]:
        return [each for siblings in self._siblings.values() for each in siblings]

    def check_invariant(self, most: int) -> None:
        """Raises UnsupportedError where rows of a step in the fused forms might depend on each other. most: of them."""
        check_modules(self.model)
        with self.active(), self.session.through(), row_invariant(most):
            head(self.model, self._step(None))

    def waits(self, states: StateStore | None = None) -> str | None:
        """Why a step of the model in its fused forms cannot be captured, or None. states: those of a model that has
        some; a row of padding changes."""
        if states is not None:
            states.plan(())
        try:
            with self.active(), self.session.through():
                return waits(lambda: self._step(states))
        except Exception:  # a model that needs more than an attention: only a capture can tell
            return None

    def _step(self, states: StateStore | None) -> Tensor:
        """A step of one token, up to the model's head."""
        ids = torch.zeros(1, dtype=torch.int64, device=self.session.device)
        return self.session.hidden(_Pretend(states), _decoding(1), ids, ids)

    def _fuse(self, module: Any) -> set[nn.Module]:
        """Finds the form of a module -> what nobody calls any more."""
        from coattn.kernels.triton.model import gated, rms_norm

        hidden, norm = int(self.model.config.hidden_size), norm_of(module)
        for whole in layer_forms(module, self._siblings):
            # an attention that anybody can compute: the cache has nothing to attend to yet
            with self.session.calling(*self._pretended(whole)):
                if self._use("layers", module, whole, hidden):
                    x = self._random(whole.norms[0][0].device, 1, 3, hidden)
                    whole.bare = whole.bare and same(partial(whole.mlp, x), partial(whole.composed, x))
                    return whole.inside
        if norm is not None:
            self._use("norms", module, lambda x: rms_norm(x, *norm), len(module.weight))
        elif isinstance(mixer := vars(module).get("forward"), MixerForm):
            self._fuse_mixer(mixer, module)
        elif is_experts(module):
            self._fuse_experts(module)
        elif is_router(module):
            given = router_input(module, self._random(module.weight.device, 3, module.weight.shape[1]))
            any(self._fits("routers", module, form, [given]) for form in router_forms(module))
        elif is_plain_linear(module) and module not in self._members:
            self._use("linears", module, lambda x: linear(x, weight_of(module), module.bias), module.in_features)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")) and (act := act_of(module)):

            def gate(x: Tensor) -> Tensor:
                return cast("Tensor", module.down_proj(gated(module.gate_proj(x), module.up_proj(x), act)))

            self._use("gates", module, gate, hidden)
        return set()

    def _pretended(self, whole: LayerForm) -> tuple[_Pretend, RunningStep | None]:
        """What a layer is tried under: three tokens of one sequence, or of three where it has a state."""
        if whole.qkv is not None:
            return _Pretend(), None
        mixer: MixerForm = whole.attn.forward
        own = cast("Tensor", first_of(whole.attn))
        return _Pretend(scratch(mixer, 3, own.device, self.shape.dtype)), _decoding(3)

    def _fuse_mixer(self, mixer: MixerForm, module: Any) -> None:
        """The form of its decode step: checked with three sequences."""
        step, own = delta_step(mixer, module, self._siblings.get(module, ())), first_of(module)
        if step is None or own is None:
            return
        x = self._random(own.device, 1, 3, int(self.model.config.hidden_size))
        made = [partial(tried, each, scratch(mixer, 3, own.device, x.dtype), x) for each in (mixer.decode, step)]
        with current(own.device):
            if same(*made):
                self._forms.append((mixer, "decode", step))
                self.summary["mixers"] = self.summary.get("mixers", 0) + 1

    def _fuse_experts(self, module: Any) -> None:
        """The form for experts: checked with one token and with several. Others are at least made safe to capture."""
        form, device = expert_form(module), module.down_proj.device
        count, top = len(module.down_proj), top_of(self.model) or 1
        given = []
        for tokens in (1, 3):
            index = torch.rand(tokens, count, device=device).argsort(-1)[:, :top]
            x = self._random(device, tokens, int(self.model.config.hidden_size))
            given.append([x, index, self._random(device, tokens, top)])
        if form is None or not self._fits("experts", module, form, given):
            self._forms.append((module, "forward", safe_form(module)))

    def _use(self, kind: str, module: nn.Module, form: Callable[..., Any], width: int) -> bool:
        """Checks a form where the module lies."""
        own, options = first_of(module), {}
        device = self.session.device if own is None else own.device
        if kind == "layers":
            options = {"position_embeddings": self._angles(device), "attention_mask": None, "position_ids": None}
        # where one of two experts that are as likely comes in, another rounding takes the other
        draws = DRAWS if any(map(holds_experts, module.modules())) else 1
        return any(
            self._fits(kind, module, form, [[self._random(device, 1, 3, width)]], **options) for _ in range(draws)
        )

    def _fits(self, kind: str, module: Any, form: Callable[..., Any], given: list[Any], **options: Any) -> bool:
        """Checks a form with every one of these arguments, and keeps it if it gives what the module does."""
        compared = partial(by_size, module.weight.dtype) if kind == "routers" else None
        for args in given:
            with current(args[0].device):
                if not same(partial(module, *args, **options), partial(form, *args, **options), compared):
                    return False
        self._forms.append((module, "forward", form))
        self.summary[kind] = self.summary.get(kind, 0) + 1
        return True

    def _fuse_rotary(self, home: Any) -> None:
        """home: a Python module of Transformers."""
        device, shape, own = self.session.device, self.shape, getattr(home, ROTARY, None)
        d = shape.head_dim
        if own is None or d & (d - 1) or list(inspect.signature(own).parameters)[:4] != ["q", "k", "cos", "sin"]:
            return
        given = [self._random(device, 1, heads, 3, d) for heads in (shape.q_heads, shape.kv_heads)]
        given += self._angles(device)
        if same(partial(own, *given), partial(rotary_form, *given)):
            self._forms.append((home, ROTARY, rotary_form))
            self.summary["rotary"] += 1

    def _angles(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of random angles, of as many channels as the model turns."""
        turned = getattr(getattr(self.session.decoder, "rotary_emb", None), "inv_freq", None)
        angle = self._random(device, 1, 3, self.shape.head_dim // 2 if turned is None else len(turned)).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    def _random(self, device: torch.device, *shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(self.shape.dtype)


def _decoding(seqs: int) -> RunningStep:
    """A decode step that nobody has begun."""
    nobody: Any = None
    step = Step(Phase.DECODE, tuple(range(seqs)), (0,) * seqs, (1,) * seqs)
    return RunningStep(step, nobody, nobody, eager=False)


class _Pretend:
    """Stands for a runtime: an attention in which queries, keys and values all matter, and nothing is stored."""

    def __init__(self, states: States | None = None) -> None:
        self.states = states

    def attend(self, _running: Any, _layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q * scale + (k - 2 * v).repeat_interleave(group, 1)
