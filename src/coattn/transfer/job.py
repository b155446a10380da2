"""One prompt on its way to a caller: each layer is sent while the next ones compute."""

import contextlib
import logging
import queue
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.errors import BudgetError, CoattnError
from coattn.step.probe import Probe
from coattn.transfer.channel import TICK_S, Channel, ChannelError, Frame, GoneError
from coattn.transfer.layout import Layout, Span
from coattn.transfer.lease import BEATS, Lease
from coattn.transfer.transport import send_parts
from coattn.types import Step

log = logging.getLogger("coattn.transfer")

AHEAD = 4
"""Layers that may wait to be sent, while later ones compute."""


class Part(NamedTuple):
    """What is to be sent: a frame, the tensors it names, and what they wait for on a GPU."""

    frame: Frame
    parts: list[tuple[Span, Tensor]]
    ready: Any = None


class Job:
    """One prompt for one caller. shared: memory that both map, if any."""

    def __init__(self, channel: Channel, shared: Tensor | None, tokens: Tensor, layout: Layout, lease: Lease) -> None:
        self.channel, self.shared, self.tokens, self.layout, self.lease = channel, shared, tokens, layout, lease
        self._parts: queue.Queue[Part] = queue.Queue(AHEAD)
        self._streams: dict[torch.device, Any] = {}
        self._unsent = False
        """Whether it failed on its way: nothing more is to be read."""
        self.read = threading.Event()
        """Set when the model is no longer used for it."""

    def check(self, _: int = 0) -> None:
        if self._unsent or self.lease.over:
            raise GoneError

    def put(self, part: Part) -> None:
        """Hands something to the thread that sends; waits while too much waits there. Raises GoneError."""
        while True:
            self.check()
            with contextlib.suppress(queue.Full):
                return self._parts.put(part, timeout=TICK_S)

    def send(self) -> None:
        """On a thread of its own: sends what comes, and heartbeats when nothing does."""
        try:
            while True:
                self.check()
                try:
                    part = self._parts.get(timeout=self.lease.seconds / BEATS)
                except queue.Empty:
                    self.channel.send({"op": "beat"}, self.check)
                    continue
                try:
                    with self._on_side_stream(part.ready):
                        send_parts(self.channel, self.shared, part.frame, part.parts, self.check)
                except (ChannelError, GoneError):
                    raise
                except Exception as error:
                    self.channel.send(failed("It could not be sent", error), self.check)
                    self._unsent = True
                    return
                if part.frame["op"] != "layer":
                    return
        except (ChannelError, GoneError):
            self.lease.drop()
            self.channel.shutdown()

    def _on_side_stream(self, ready: Any) -> contextlib.AbstractContextManager[Any]:
        """Copies from a GPU wait for their own layer alone, not for those that were launched after it."""
        if ready is None:
            return contextlib.nullcontext()
        if ready.device not in self._streams:
            self._streams[ready.device] = torch.cuda.Stream(ready.device)  # type: ignore[no-untyped-call]
        stream = self._streams[ready.device]
        stream.wait_event(ready)
        within: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
        return within


def failed(what: str, error: BaseException) -> Frame:
    """What a caller is told of an error: its sentence and hint, or else `what` and its name; then the log has more."""
    if isinstance(error, CoattnError):
        said = {"why": error.sentence, "hint": error.hint, "budget": isinstance(error, BudgetError)}
    else:
        log.error("A prompt failed. %s.", what, exc_info=error)
        said = {"why": f"{what}: {type(error).__name__}."}
    return {"op": "failed", **said}


class Sends(Probe):
    """Hands every layer's keys and values to a job as soon as they are known, before the layer attends."""

    def __init__(self, job: Job) -> None:
        self.job, self.scales = job, [1.0] * len(job.layout.shapes)
        self.queries: dict[int, Tensor] = {}
        """The last ones of each layer so far."""

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.scales[layer] = scale
        layout = self.job.layout
        (start,) = step.history
        end = start + len(k)
        known = [*([self.queries[layer]] if start else []), q[-layout.queries :]]
        self.queries[layer] = torch.cat(known)[-layout.queries :]
        ready = None
        if k.device.type == "cuda":
            ready = torch.cuda.current_stream(k.device).record_event()
        frame = {"op": "layer", "layer": layer, "rows": [start, end]}
        self.job.put(Part(frame, list(zip(layout.rows(layer, start, end), (k, v), strict=True)), ready))

    def finish(self, logits: Tensor) -> None:
        """Hands over what comes last. logits: float32 `[1, vocabulary]`."""
        last = [*(self.queries[layer].cpu() for layer in range(len(self.scales))), logits.cpu()]
        parts = list(zip(self.job.layout.last(), last, strict=True))
        self.job.put(Part({"op": "done", "scales": self.scales}, parts))
