"""One request as its caller sees it: an answer that grows, until it is done or cancelled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from coattn.engine.request import Request, RequestOutput, TokenLogprobs
from coattn.engine.sampling.detokenise import TextStream
from coattn.engine.sampling.logits import Draws, Guide
from coattn.engine.sampling.sampler import Drawn
from coattn.errors import EngineError


class Handle:
    """Made by `LLM.submit`. Iterate it for what is new, or ask `result` for the whole answer.

    Both drive the engine while they wait, so no thread of its own is needed; several threads may wait at once.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Any,
        ends: frozenset[int],
        streams: bool,
        notify: Callable[[], None] | None,
        step: Callable[[], bool],
        cancel: Callable[[Handle, bool], None],
        guide: Guide | None = None,
    ) -> None:
        self.request = request
        self.draws = Draws(request.params, request.prompt, ends, guide)
        self.text = TextStream(tokenizer, request.params.stop, not request.params.skip_special_tokens)
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self._ends, self._notify, self._step, self._cancel = ends, notify, step, cancel
        self._deltas: deque[RequestOutput] | None = deque() if streams else None
        self.owner: object = None
        """Kept alive as long as the handle is."""
        self._shown = 0
        """Tokens of the answer that deltas have shown."""

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def done(self) -> bool:
        return self.request.finished

    @property
    def feeding(self) -> bool:
        """Whether the next token is known beforehand."""
        return self.draws.fed > 0

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer so far."""
        return max(0, len(self.request.output) - len(self.request.params.feed))

    def cancel(self, later: bool = False) -> None:
        """Ends the request at the next border between steps. Safe from any thread; harmless when it is done.

        later: leaves it to the thread that steps, and does nothing here even if no step runs; for an event loop.
        """
        self._cancel(self, later)

    def result(self) -> RequestOutput:
        """The whole answer, once it is done."""
        while not self.done:
            self._drive()
        return self.output()

    def poll(self) -> list[RequestOutput]:
        """What came since the last look, without waiting."""
        deltas = []
        while self._deltas:
            deltas.append(self._deltas.popleft())
        return deltas

    def __iter__(self) -> Iterator[RequestOutput]:
        """Parts as they come, the last with its finish_reason. Each is given once."""
        ended = False
        while not ended:
            for delta in self.poll():
                ended = delta.finish_reason is not None
                yield delta
            if self.done and not self._deltas:
                return
            if not ended:
                self._drive()

    def stream(self) -> Iterator[RequestOutput]:
        """The same; stopping early cancels the request."""
        try:
            yield from self
        finally:
            self.cancel()

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._output(self.text.text, 0)

    def take(self, drawn: Drawn) -> bool:
        """Adds a token. True when it ends the answer."""
        request = self.request
        if self.feeding:
            request.output.append(request.params.feed[len(request.output)])
            self.draws.fed -= 1
            return False
        request.output.append(drawn.token)
        if self.logprobs is not None and drawn.logprobs is not None:
            self.logprobs.append(drawn.logprobs)
        if request.first is None:
            request.first = time.perf_counter()
        if self.draws.guide is not None:
            self.draws.guide.accept(drawn.token)
        piece = ""
        if drawn.token in self._ends:
            request.finish_reason = "stop"
        else:
            if request.params.min_new_tokens:
                self.text.stop.counts = self.new_tokens >= request.params.min_new_tokens
            piece = self.text.push(drawn.token)
            if self.text.stop.stopped:
                request.finish_reason = "stop"
            elif request.total >= request.limit:
                request.finish_reason = "length"
        if request.finish_reason is None:
            self._tell(piece)
            return False
        self.close(piece)
        return True

    def close(self, piece: str = "") -> None:
        """The request has its finish_reason: hands out what text is left."""
        self.request.ended = time.perf_counter()
        self._tell(piece + self.text.flush())

    def _tell(self, piece: str) -> None:
        if self._deltas is not None:
            self._deltas.append(self._output(piece, self._shown))
            self._shown = self.new_tokens
        elif not self.done:
            return
        if self._notify is not None:
            self._notify()

    def _output(self, text: str, start: int) -> RequestOutput:
        """The answer's tokens from `start` on, without those that were fed, and their text."""
        request = self.request

        def since(mark: float | None) -> float | None:
            return None if mark is None else mark - request.arrived

        return RequestOutput(
            request.id,
            text,
            token_ids=tuple(request.output[len(request.params.feed) + start :]),
            logprobs=None if self.logprobs is None else tuple(self.logprobs[start:]),
            prompt_logprobs=None if request.scored is None else tuple(request.scored),
            finish_reason=request.finish_reason,
            stop_string=self.text.stop.matched,
            error=request.error,
            prompt_tokens=len(request.prompt),
            new_tokens=self.new_tokens,
            preemptions=request.preemptions,
            cached_tokens=request.cached or 0,
            waited_s=since(request.started),
            first_token_s=since(request.first),
            total_s=since(request.ended),
            audit=request.audit() if self.done else None,
        )

    def _drive(self) -> None:
        if not self._step() and not self.done:
            raise EngineError(f"Request {self.id} is not in this engine any more.", "Submit it again.")
