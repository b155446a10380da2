"""Windows of text on the engine's steps: packed prefills, then decode steps of all windows together."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.engine.devices import machine_dram
from coattn.engine.runner.capture import choose_runner
from coattn.engine.runner.runner import Runner
from coattn.hf.architectures import PreTrainedModel
from coattn.hf.forward import Session
from coattn.method.row import Method, compose
from coattn.method.table import find_method
from coattn.step.probe import Probe
from coattn.step.runtime import Runtime
from coattn.types import Step
from coattn.units import parse_bytes


class Steps(AbstractContextManager["Steps"]):
    """Windows `[windows, tokens]` under a method: captured steps where there is a GPU, unless probes look on."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Tensor,
        method: str | Method,
        gpu_kv: int | str | None,
        host_kv: int | str | None,
        params: dict[str, Any],
        probes: Sequence[Probe] = (),
    ) -> None:
        self.windows = windows
        self.composed = compose(find_method(method), **params)
        budgets = parse_bytes(gpu_kv, "gpu_kv"), parse_bytes(host_kv, "host_kv")
        self.ledger = Ledger(*budgets, machine_dram(model.device))
        count, length = windows.shape
        with ExitStack() as undo:
            self.session = undo.enter_context(Session(model))
            layers, states, fixed = self.session.layers, self.session.states, not probes
            sizes = count, length, fixed
            self.runtime = Runtime(layers, self.composed, self.ledger, *sizes, probes=probes, states=states)
            undo.callback(self.runtime.release)
            choose = Runner if probes else choose_runner
            self.runner = choose(self.session, self.runtime, count)
            undo.pop_all()

    def prefill(self, tokens: int) -> Tensor:
        """The first tokens of every window, exactly -> hidden `[windows, tokens, hidden_size]`."""
        device = self.session.device
        positions = torch.arange(tokens, device=device)
        hidden = []
        for slot, ids in enumerate(self.windows):
            running = self.runtime.begin(Step.of((slot,), (0,), (tokens,)))
            hidden.append(self.session.hidden(self.runtime, running, ids[:tokens].to(device), positions))
            self.runtime.commit(running)
        return torch.stack(hidden)

    def read(self, tokens: int, chunk: int) -> None:
        """The first tokens of every window, one window after another, `chunk` tokens a step."""
        for slot, ids in enumerate(self.windows):
            prompt = ids[:tokens].tolist()
            for start in range(0, tokens, chunk):
                self.runner.extend(slot, prompt[start : start + chunk], start, start + chunk >= tokens)

    def decode(self, at: int) -> Tensor:
        """Token `at` of every window as a decode step -> logits `[windows, vocabulary]`, valid until the next."""
        count = len(self.windows)
        return self.runner.decode(range(count), self.windows[:, at].tolist(), [at] * count)

    def report(self) -> dict[str, Any]:
        """The method, whether it is exact, its KV bytes, and what the last step attended to, per sequence."""
        count, length = self.windows.shape
        last = Step.of(tuple(range(count)), (length - 1,) * count, (1,) * count)
        gpu, host = (entries / count for entries in self.runtime.attended(last))
        report = {**self.composed.describe(), **self.ledger.describe(), **self.runtime.report(last)}
        return report | {"attended_gpu": gpu, "attended_host": host}

    def __exit__(self, *_: object) -> None:
        """Gives every byte back and leaves the model as it was."""
        self.runner.close()
