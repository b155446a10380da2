"""How much of prompts is read between two decode steps: so much that the promised time between tokens holds."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

from coattn.errors import ConfigError
from coattn.kernels.prompt.kernels import TILES
from coattn.part import check_count, check_number

DEFAULT_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 2048, 8192
"""Prompt tokens of a step where nothing else decides; on a GPU, where larger steps are faster, when nobody decodes."""

FIRST_CHUNK_TOKENS, MIN_CHUNK_TOKENS = 512, 64
"""Tokens before anything is known, and however slow they are: prompts must get through."""
SLOWDOWN, CROWDED_SLOWDOWN = 2.5, 40.0
"""The time between tokens while a prompt is read, and while several are or wait to be, as multiples of that without,
where no time was promised. Most steps take about so long; for one prompt the longest should not take three times as
long. Of several, each has to wait for those before it, and those that decode then are in a small batch: about one
step for each of the largest chunks, a fortieth of the time."""
MEDIAN_SAMPLES = 5
"""Observations of which the median counts: one step that was captured or swapped in changes nothing."""
CHUNK_SIZES = {8192: 1.0, 6144: 0.98, 4096: 0.96, 2048: 0.9}
"""Chunks that decode steps run between the layers of, and about how fast tokens are in them: for tiles."""
REMEASURE_STEPS = 32
"""Decode steps after which one runs without reading before it, so that its own time stays known."""


@dataclass(frozen=True)
class ChunkConfig:
    """Tokens of prompts in one step, or the time between two tokens that holds while prompts are read; or neither."""

    chunk: int | None = None
    target_ms: float | None = None

    def __post_init__(self) -> None:
        if self.target_ms is not None:
            check_number("target_ms", self.target_ms, 0, above=True)
            if self.chunk is not None:
                raise ConfigError("Both chunk and target_ms are given.", "Leave one out.")
        check_count("chunk", self.chunk, 1, unset=True)

    def policy(self, exact: bool, on_gpu: bool, layers: int | None) -> ChunkPolicy:
        """What follows from it on this device.

        layers: how many there are, where decode steps are captured and run between them: a step that reads is not, and
            its launches take longer than many decode steps.
        """
        # what lossy methods forget of a prompt may depend on where it is cut, which should not depend on a clock
        lossy = self.target_ms is None and self.chunk is None and not exact
        fixed = (DEFAULT_CHUNK_TOKENS if layers is None else GPU_CHUNK_TOKENS) if lossy else self.chunk
        most = GPU_CHUNK_TOKENS if on_gpu else DEFAULT_CHUNK_TOKENS
        policy = ChunkPolicy(fixed, None if self.target_ms is None else self.target_ms / 1e3, most)
        policy.tile = TILES[-1] if on_gpu else 1
        if layers is not None:
            policy.layers = layers
        elif on_gpu and self.target_ms is None:
            # fewer tokens save little time next to the launches of a step that is not captured
            policy.least = FIRST_CHUNK_TOKENS
        return policy


class ChunkPolicy:
    """A fixed number of tokens, or one that follows a target. Knows times alone, no tensors.

    The time from one decode step to the next is that of the decode step and of what was read before it. Steps without
    reading tell the first; the others, less the first, tell what a token of a prompt costs at the moment.

    A chunk may be larger than what is read between two decode steps where these can run between its layers.
    """

    def __init__(self, fixed: int | None = None, target_s: float | None = None, most: int = 8192) -> None:
        self.fixed, self.target_s, self.most, self.least = fixed, target_s, most, MIN_CHUNK_TOKENS
        self.crowded = False
        """Whether several prompts are read or wait to be: set by who knows."""
        self.tile = 1
        """Where a prompt is cut, it is after a multiple of so many tokens, if chunks are larger than that."""
        self.layers = 1
        """Pieces that a chunk can be left in for a decode step: the model's layers, or one."""
        self._alone: deque[float] = deque(maxlen=MEDIAN_SAMPLES)
        self._token: deque[float] = deque(maxlen=MEDIAN_SAMPLES)
        self._since = 0
        """Decode steps since one without reading."""

    def budget(self, decoding: bool) -> int:
        """Prompt tokens of the next chunk; 0: a decode step comes first. decoding: whether anybody waits for one."""
        if self.fixed is not None:
            return self.fixed
        if not decoding:
            return self.most
        if self.layers == 1 and self.unsure:
            return 0
        room = self.room()
        if room is None:
            return self.most if self.layers > 1 else min(FIRST_CHUNK_TOKENS, self.most)
        fits = [size for size in CHUNK_SIZES if size <= min(room * self.layers, self.most)] if self.layers > 1 else []
        if fits:
            # by the tokens of whole layers of such chunks that are read between two decode steps
            return max(fits, key=lambda size: CHUNK_SIZES[size] * (room * self.layers // size * size))
        return min(self.most, _round(max(self.least, int(min(room * self.layers, self.most)))))

    def room(self) -> float | None:
        """Prompt tokens between two decode steps, of all layers; None: not known yet."""
        if not self._alone or not self._token:
            return None
        alone = statistics.median(self._alone)
        slower = CROWDED_SLOWDOWN if self.crowded else SLOWDOWN
        target = slower * alone if self.target_s is None else self.target_s
        return (target - alone) / max(statistics.median(self._token), 1e-9)

    @property
    def unsure(self) -> bool:
        """Whether a decode step should come right after another one: what it takes by itself is not known any more."""
        return (not self._alone and self._since > 0) or self._since >= REMEASURE_STEPS

    def note(self, tokens: float, seconds: float) -> None:
        """From one decode step to the next it took so long, with so many prompt tokens read between them."""
        if not tokens:
            self._alone.append(seconds)
            self._since = 0
            return
        self._since += 1
        if self._alone:
            self._token.append(max(0.0, seconds - statistics.median(self._alone)) / tokens)


class StepTimer:
    """Tells the chunk policy what steps take. A decode step is due when what was read has taken the promised time."""

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy = policy
        self.spent = 0.0
        """Tokens read since the last decode step."""
        self.passed = 0.0
        """Of these, what the layers have passed of the running chunk, which is not done."""
        self._decoded: float | None = None
        """When the last decode step ended, unless nobody has decoded since."""

    def stop(self) -> None:
        """Nobody is here: how long that takes says nothing."""
        self._decoded = None

    def clear(self) -> None:
        """Nobody waits for a decode step."""
        self._decoded, self.spent = None, 0.0

    def choose(self) -> None:
        """No chunk is running."""
        self.passed = 0.0

    def layer(self, tokens: int) -> None:
        """Another layer of a chunk of so many tokens has begun."""
        share = tokens / self._policy.layers
        self.spent += share
        self.passed += share

    def late(self, tokens: int) -> bool:
        """Whether a decode step comes before the next layer of a chunk of so many tokens."""
        room = self._policy.room()
        return self.spent > 0 and (room is None or self.spent + tokens / self._policy.layers > room)

    def read(self, tokens: int) -> None:
        """The running chunks, of so many tokens together, are done."""
        self.spent = self.spent - self.passed + tokens
        self.passed = 0.0

    def decode(self) -> None:
        """A decode step is done."""
        now = time.perf_counter()
        if self._decoded is not None:
            self._policy.note(self.spent, now - self._decoded)
        self._decoded, self.spent = now, 0.0


def _round(count: int) -> int:
    """The largest multiple of 64 that is not larger; from 2,048 on, of 2,048, 3,072, 4,096, 6,144, ..: for tiles."""
    if count < 2048:
        return count // 64 * 64
    power = 1 << (count.bit_length() - 1)
    return power * 3 // 2 if count >= power * 3 // 2 else power
