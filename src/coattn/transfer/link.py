"""A connection to a process that reads prompts: owns the memory, asks, and believes what it can check."""

import logging
import os
import traceback
from collections.abc import Sequence

import torch

from coattn.cache import available
from coattn.cache.ledger import PLACE
from coattn.engine.llm import LLM
from coattn.errors import BudgetError, CoattnError, InputError, TransferError
from coattn.hf.fingerprint import read_by
from coattn.hf.prefilled import Prefilled
from coattn.transfer.address import Address
from coattn.transfer.channel import Channel, ChannelError, Frame, RefusedError
from coattn.transfer.layout import Layout, introduce, raw
from coattn.transfer.lease import WAKE, Watch
from coattn.transfer.transport import make_shared, take_parts

log = logging.getLogger("coattn.transfer")


class Link:
    """A connection to one address, made when it is first needed, and again after it was lost."""

    def __init__(self, address: Address, key: bytes, llm: LLM) -> None:
        self.address, self._key, self._llm = address, key, llm
        self._shapes = llm.runner.runtime.layers
        self._channel: Channel | None = None
        self.asleep = 0.0
        """Until when it is not asked, on the monotonic clock."""

    def open(self, watch: Watch) -> Channel:
        """Raises InputError if the two sides do not fit, TransferError if the address cannot be reached."""
        if self._channel is not None:
            return self._channel
        try:
            channel = Channel(self.address.connect(), self._key, called=False, tick=watch)
        except RefusedError:
            raise InputError(f"{self.address} has another key.", "Give both sides the same key.") from None
        except (OSError, ChannelError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise TransferError(f"{self.address} cannot be reached: {said}.", WAKE) from None
        self._channel = channel
        try:
            channel.send(introduce(self._llm.fingerprints(), self._shapes, self._llm.vocabulary), watch)
            answer = channel.receive(watch)
            if answer["op"] != "opened":
                raise InputError(
                    f"{self.address} does not read for this process: {answer.get('why')}",
                    "Start both sides with the same model, dtype and version.",
                )
        except BaseException:
            self.close()  # what is still said there would be taken for an answer to the first prompt
            raise
        return channel

    def read(self, tokens: Sequence[int], watch: Watch) -> Prefilled:
        """Raises TransferError, InputError or DeadlineError; the memory is given back then."""
        if self._channel is not None:  # it may have ended since the last prompt
            try:
                return self._read(tokens, watch)
            except TransferError as error:
                if self._channel is not None or watch.lease.over:
                    raise
                log.info("%s It is called again.", error.sentence)
        return self._read(tokens, watch)

    def _read(self, tokens: Sequence[int], watch: Watch) -> Prefilled:
        memory: torch.Tensor | None = None
        try:
            channel = self.open(watch)
            layout = Layout(self._shapes, self._llm.vocabulary, len(tokens))
            available.require(layout.size, "A prompt that is read elsewhere", PLACE["host"])
            memory = self._ask(channel, layout, tokens, watch)
            scales = self._receive(channel, layout, memory, watch)
            channel.send({"op": "release"}, watch)
        except FailedError:
            raise
        except BaseException as error:
            self.close()  # in the middle of a frame, or with a writer that may still write
            memory = None
            traceback.clear_frames(error.__traceback__)  # else the memory would live as long as the error
            if isinstance(error, CoattnError) or not isinstance(error, Exception):
                raise
            raise TransferError(f"{self.address} was lost while it read a prompt: {error}.", WAKE) from error
        return layout.prefilled(memory, tokens, scales, read_by(self._llm.model))

    def _ask(self, channel: Channel, layout: Layout, tokens: Sequence[int], watch: Watch) -> torch.Tensor:
        """Has the tokens read -> the memory that the prompt will lie in, which the other side may write to from now."""
        frame = {"op": "read", "tokens": len(tokens), "lease": watch.lease.seconds}
        payload = [raw(torch.tensor(tokens, dtype=torch.int32))]
        if not self.address.shared:
            memory = torch.empty(layout.size, dtype=torch.uint8)
            channel.send(frame, watch, payload)
            return memory
        memory, fd = make_shared(layout.size)
        try:
            channel.send(frame, watch, payload, fd)
        finally:
            os.close(fd)
        return memory

    def close(self) -> None:
        """Afterwards nothing that comes is read into the memory of a prompt."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _receive(self, channel: Channel, layout: Layout, memory: torch.Tensor, watch: Watch) -> list[float]:
        """Takes every row once, in order, each with its digest -> the scales of the layers."""
        tick = watch.beating(channel)
        tokens = [0] * len(layout.shapes)
        while True:
            frame = channel.receive(tick)
            op = frame["op"]
            if op == "layer":
                layer, start, end = _rows(frame, tokens, layout.tokens)
                parts = [span.of(memory) for span in layout.rows(layer, start, end)]
                take_parts(channel, self.address.shared, frame, parts, tick)
                tokens[layer] = end
            elif op == "done":
                if set(tokens) != {layout.tokens}:
                    raise ChannelError("layers are missing")
                take_parts(channel, self.address.shared, frame, [span.of(memory) for span in layout.last()], tick)
                scales = frame.get("scales")
                if not isinstance(scales, list) or len(scales) != len(layout.shapes):
                    raise ChannelError("scales are missing")
                return [float(each) for each in scales]
            elif op == "failed":
                channel.send({"op": "release"}, watch)
                raise FailedError(self.address, frame)
            elif op != "beat":
                raise ChannelError(f"it says {op[:40]!r}")


class FailedError(TransferError):
    """The other side is there, and says in a frame that it could not read the prompt."""

    def __init__(self, where: Address, frame: Frame) -> None:
        super().__init__(f"{where} could not read the prompt: {frame.get('why')}", str(frame.get("hint", "")))
        self.kind: type[CoattnError] = BudgetError if frame.get("budget") is True else TransferError
        """The error to raise for the request."""


def _rows(frame: Frame, tokens: Sequence[int], most: int) -> tuple[int, int, int]:
    """The layer and the tokens that a frame names, if they are what comes next of this layer."""
    match frame:
        case {"layer": int(layer), "rows": [int(start), int(end)]} if 0 <= layer < len(tokens):
            if start == tokens[layer] and start < end <= most:
                return layer, start, end
    raise ChannelError("rows are out of order")
