"""The CPU core: typed access to the extension `coattn._native` (worker pool, kernels, arena, limits).

Importing this module starts nothing: the pool is created by the first call that needs it. Every call releases the
GIL. Tensors are on the CPU; pointers and strides are handed over, nothing is copied.

Terms: a *block* is `block` tokens of all KV heads; one (block, head) holds `[K rows | V rows]`, see `block_layout`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from coattn.errors import CoattnError

try:
    _native: Any = importlib.import_module("coattn._native")
except ImportError as error:
    raise ImportError("coattn's C++ core is not built; install the package or run scripts/build_native.sh") from error


class NativeError(CoattnError, RuntimeError):
    """A refusal of the C++ core: `sentence` says what is wrong, `hint` what to do next."""


_native.set_error_type(NativeError)

ELEMENTS: tuple[str, ...] = tuple(_native.elems)
"""Element types of blocks: `f32`, `bf16`, `f16`, `int8`, `int4`."""

_ELEMENT_OF_DTYPE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_T = TypeVar("_T")


def element_of(dtype: torch.dtype) -> str:
    """The element type of a float tensor's dtype."""
    try:
        return _ELEMENT_OF_DTYPE[dtype]
    except KeyError:
        raise NativeError(f"The CPU kernels do not take {dtype}.", "Use float32, bfloat16 or float16.") from None


def _elem(element: str) -> int:
    if element not in _native.elems:
        raise NativeError(f"There is no element type {element!r}.", f"Use one of {', '.join(ELEMENTS)}.")
    return int(_native.elems[element])


def _check(ok: bool, sentence: str, hint: str) -> None:
    if not ok:
        raise NativeError(sentence, hint)


def _check_tensor(name: str, x: Tensor, shape: Sequence[int | None], dtype: torch.dtype | None = None) -> None:
    """`None` in `shape` matches any size; every dimension but the last may be strided unless `dtype` is given."""
    fits = x.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, x.shape, strict=False))
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    _check(fits, f"{name} has shape {list(x.shape)} where {wanted} is needed.", "See the docstring for the shapes.")
    _check(x.device.type == "cpu", f"{name} lies on {x.device}.", "The CPU kernels read CPU tensors.")
    if dtype is not None:
        _check(x.dtype == dtype, f"{name} is {x.dtype} where {dtype} is needed.", f"Convert it: {name}.to({dtype}).")
        _check(x.is_contiguous(), f"{name} is not contiguous.", f"Call {name}.contiguous().")
    else:
        element_of(x.dtype)
        _check(
            x.shape[-1] == 1 or x.stride(-1) == 1,
            f"The last dimension of {name} is not contiguous.",
            f"Call {name}.contiguous().",
        )


# -- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuFeatures:
    """What the CPU and the operating system let kernels use; `amx_reason` says why `amx` is false."""

    name: str
    avx2: bool
    avx512: bool
    avx512_bf16: bool
    avx512_vnni: bool
    amx: bool
    amx_reason: str


class IsaStatus(NamedTuple):
    """One set of kernels; `reason` says why this machine cannot run it and is empty where it can."""

    name: str
    reason: str


def cpu_features() -> CpuFeatures:
    """Detected once."""
    return CpuFeatures(**_native.cpu_features())


def isas() -> list[IsaStatus]:
    """Every set of kernels, from the plainest to the best."""
    return [IsaStatus(name, reason) for name, reason in _native.isas()]


def isa() -> str:
    """The set of kernels in use."""
    return str(_native.isa())


def force_isa(name: str | None) -> None:
    """Use the named kernels from the next call on; None returns to the best. Refuses what the machine lacks."""
    _native.force_isa(name or "")


@contextmanager
def forced_isa(name: str | None) -> Iterator[None]:
    """`force_isa` for the body of a with statement; afterwards the best kernels are used again."""
    force_isa(name)
    try:
        yield
    finally:
        force_isa(None)


def attend_kernel_name(element: str, q_dtype: torch.dtype, group: int, head_size: int = 128) -> str:
    """The kernel `attend` uses for these types, `group` queries per KV head and this head size."""
    return str(_native.attend_kernel_name(_elem(element), _elem(element_of(q_dtype)), group, head_size))


def set_threads(threads: int) -> None:
    """Size of the pool from the next call on; 0 means one thread per core the process may use."""
    _native.set_threads(threads)


def threads() -> int:
    """Threads of the pool, the calling one included. Starts the pool."""
    return int(_native.threads())


def default_threads() -> int:
    """Cores the process may use: its CPU set, less a cgroup's CPU quota."""
    return int(_native.default_threads())


def worker_cpus() -> list[int]:
    """The CPU each worker is pinned to; -1 for the calling thread, which is worker 0 and is not pinned."""
    return list(_native.worker_cpus())


def set_spin_us(us: int) -> None:
    """How long idle workers spin before they sleep. Longer wakes faster, shorter leaves the cores to others."""
    _native.set_spin_us(us)


def fail_on_worker(worker: int) -> None:
    """A job that throws on one worker, for tests of how errors travel."""
    _native.fail_on_worker(worker)


# -- asynchronous calls ----------------------------------------------------------------------------------------------


class Call(Generic[_T]):
    """A planned call: shapes checked, results allocated. `run` it, or `submit` it and `wait`; as often as wanted.

    It keeps its tensors alive. Changing what they hold between runs is allowed, changing it during one is not.
    """

    def __init__(self, name: str, job: Any, result: _T, keep: Any, blocks: Blocks | None = None) -> None:
        self._run: Callable[[Any], None] = getattr(_native, name)
        self._submit: Callable[[Any], Any] = getattr(_native, f"submit_{name}")
        self._job, self._result, self._keep, self._blocks = job, result, keep, blocks

    def _ready(self) -> Any:
        if self._blocks is not None:  # an arena may have grown since the call was planned
            getattr(self._job, "source", self._job).num_blocks = self._blocks.num_blocks
        return self._job

    def run(self) -> _T:
        """Computes on the calling thread and the pool."""
        self._run(self._ready())
        return self._result

    def submit(self) -> Pending[_T]:
        """Returns at once; the pool computes after what was submitted before."""
        return Pending(self, self._submit(self._ready()))


class Pending(Generic[_T]):
    """A submitted call. Its results may be read after `wait`."""

    def __init__(self, call: Call[_T], ticket: Any) -> None:
        self._call, self._ticket = call, ticket

    def done(self) -> bool:
        return bool(self._ticket.done())

    def wait(self) -> _T:
        """Sleeps until the call is done; raises what it raised. Once per submitted call."""
        self._ticket.wait()
        return self._call._result


# -- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockLayout:
    """Byte offsets within one (block, KV head): key rows, value rows, then float16 scales (int8, int4 only).

    k_scale, k_min: `[head_size]`; v_scale, v_min: `[v_groups, block]`. A code c stands for min + scale * c. An int4
    byte j of a row holds channel j in its low and channel j + head_size / 2 in its high half.
    """

    row_bytes: int
    k: int
    v: int
    k_scale: int
    k_min: int
    v_scale: int
    v_min: int
    v_groups: int
    bytes: int


def block_layout(element: str, block: int, head_size: int) -> BlockLayout:
    """Layout of one (block, KV head). Refuses head sizes that are not multiples of 8."""
    return BlockLayout(**_native.block_layout(_elem(element), block, head_size))


def cuda_unavailable(device: int = 0) -> str | None:
    """Why host memory cannot be registered with this CUDA device, or None where it can."""
    return str(_native.cuda_unavailable(device)) or None


@dataclass(frozen=True)
class ArenaStats:
    """Counters of an arena. `huge_bytes` is what the kernel backs with huge pages."""

    block_bytes: int
    budget_bytes: int
    committed_bytes: int
    registered_bytes: int
    huge_bytes: int
    capacity_blocks: int
    committed_blocks: int
    used_blocks: int
    peak_blocks: int
    touch_seconds: float
    register_seconds: float


class Arena:
    """Fixed-size blocks of DRAM under one budget, at addresses that never change.

    Memory is mapped as it is needed, on huge pages where allowed, touched by the whole pool, and registered with
    `cuda_device` if one is given. Blocks are 64-byte aligned.
    """

    def __init__(self, block_bytes: int, budget_bytes: int, cuda_device: int | None = None) -> None:
        self._arena = _native.Arena(block_bytes, budget_bytes, -1 if cuda_device is None else cuda_device)

    @property
    def base(self) -> int:
        """Address of block 0; block b lies at base + b * block_bytes."""
        return int(self._arena.base)

    @property
    def block_bytes(self) -> int:
        return int(self._arena.block_bytes)

    def committed_blocks(self) -> int:
        """Blocks that are mapped, and so may be read."""
        return int(self._arena.committed_blocks())

    def grow(self, nbytes: int) -> None:
        """Maps, touches and registers at least `nbytes` of the budget now rather than on demand."""
        self._arena.grow(nbytes)

    def allocate(self, n: int) -> list[int]:
        """Ids of n blocks. Refuses past the budget."""
        return list(self._arena.allocate(n))

    def free(self, ids: Sequence[int]) -> None:
        """Gives blocks back. Refuses ids that are not in use."""
        self._arena.free(list(ids))

    def check_integrity(self) -> None:
        """Raises where free list, ownership and counters disagree."""
        self._arena.check_integrity()

    def stats(self) -> ArenaStats:
        return ArenaStats(**self._arena.stats())

    def memory(self) -> Tensor:
        """`[committed blocks, block_bytes]` uint8 over the mapped blocks; keeps the arena alive."""
        n = self.committed_blocks()
        if n == 0:
            return torch.empty(0, self.block_bytes, dtype=torch.uint8)
        buffer: Any = (ctypes.c_uint8 * (n * self.block_bytes)).from_address(self.base)
        buffer.arena = self  # torch.frombuffer keeps the buffer, the buffer keeps the arena
        return torch.frombuffer(buffer, dtype=torch.uint8).view(n, self.block_bytes)


@dataclass(frozen=True)
class Blocks:
    """Where KV blocks lie: head h of block b at base + b * block_stride + h * head_stride (bytes).

    `memory` is the arena or the tensor `[num_blocks, block bytes]` uint8 that holds them; it is kept alive.
    """

    memory: Arena | Tensor
    element: str
    block: int
    kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        need = self.kv_heads * self.layout.bytes
        if isinstance(self.memory, Arena):
            have = self.memory.block_bytes
        else:
            _check_tensor("memory", self.memory, [None, None], torch.uint8)
            have = self.memory.shape[1]
        _check(
            have >= need,
            f"A block of {have} bytes is too small for {self.kv_heads} heads of {self.layout.bytes} bytes.",
            f"Make blocks {need} bytes long.",
        )

    @property
    def layout(self) -> BlockLayout:
        return block_layout(self.element, self.block, self.head_size)

    @property
    def block_bytes(self) -> int:
        """Bytes between two blocks."""
        return self.memory.block_bytes if isinstance(self.memory, Arena) else self.memory.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.memory.committed_blocks() if isinstance(self.memory, Arena) else self.memory.shape[0]

    def fill(self, job: Any) -> None:
        """Writes base, strides and sizes into one of the extension's job structs."""
        job.base = self.memory.base if isinstance(self.memory, Arena) else self.memory.data_ptr()
        job.block_stride = self.block_bytes
        job.head_stride = self.layout.bytes
        job.num_blocks = self.num_blocks
        job.block = self.block
        job.elem = _elem(self.element)


# -- attend ----------------------------------------------------------------------------------------------------------


class Attended(NamedTuple):
    """Attention over a set: `out [.., q_heads, head_size]` and `lse [.., q_heads]` float32, `weights` or None."""

    out: Tensor
    lse: Tensor
    weights: Tensor | None


def _attend_job(
    q: Tensor, kv_heads: int, scale: float | None, softcap: float, sinks: Tensor | None, max_tokens: int | None
) -> tuple[Any, Attended]:
    _check(q.dim() in (3, 4), f"q has {q.dim()} dimensions.", "[seqs, q_heads, head_size] or with q_tokens second.")
    _check_tensor("q", q, [None] * q.dim())
    q4 = q if q.dim() == 4 else q.unsqueeze(1)
    seqs, q_tokens, q_heads, head_size = q4.shape
    _check(
        kv_heads > 0 and q_heads % kv_heads == 0,
        f"{q_heads} query heads cannot share {kv_heads} KV heads.",
        "q_heads must be a multiple of kv_heads.",
    )
    out = torch.empty(q.shape, dtype=torch.float32)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32)
    weights = None if max_tokens is None else torch.empty(*q.shape[:-1], max_tokens, dtype=torch.float32)
    job = _native.AttendJob()
    job.seqs, job.q_tokens, job.q_heads, job.kv_heads, job.head_size = seqs, q_tokens, q_heads, kv_heads, head_size
    job.q, job.q_elem = q.data_ptr(), _elem(element_of(q.dtype))
    job.q_seq, job.q_token, job.q_head = q4.stride(0), q4.stride(1), q4.stride(2)
    job.scale = head_size**-0.5 if scale is None else scale
    _check(softcap >= 0, f"softcap {softcap} is negative.", "Use 0 for none.")
    job.softcap = softcap
    if sinks is not None:
        _check_tensor("sinks", sinks, [q_heads], torch.float32)
        job.sinks = sinks.data_ptr()
    job.out, job.lse = out.data_ptr(), lse.data_ptr()
    if weights is not None:
        job.weights, job.max_tokens = weights.data_ptr(), weights.shape[-1]
    return job, Attended(out, lse, weights)


def plan_attend(
    q: Tensor,
    blocks: Blocks,
    table: Tensor,
    tokens: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    weights: bool = False,
) -> Call[Attended]:
    """Attention of each sequence's queries over its list of blocks.

    q: `[seqs, q_heads, head_size]`, or `[seqs, q_tokens, q_heads, head_size]` where all q_tokens see the whole list;
    float32, bfloat16 or float16. table: `[seqs, table_heads, max_blocks]` int32 block ids, table_heads 1 (all KV heads
    share a list) or kv_heads. tokens: `[seqs, table_heads]` int32; only the last block of a list is partly filled.
    scale: None means head_size ** -0.5. softcap: cap * tanh(score / cap), 0 for none. sinks: `[q_heads]` float32
    logits that take part in the denominator only. weights: also return the softmax over the list,
    `[seqs, (q_tokens,) q_heads, max_blocks * block]`, zero past its end.

    The result is float32, normalised, with natural-log lse; an empty list gives (0, -inf). Repeated runs on a pool of
    the same size are bit-identical. Cost: each key and value is read once.
    """
    seqs = q.shape[0]
    _check(table.dim() == 3, f"table has {table.dim()} dimensions.", "[seqs, table_heads, max_blocks].")
    _check_tensor("table", table, [seqs, None, None], torch.int32)
    heads, max_blocks = table.shape[1], table.shape[2]
    _check_table_heads(heads, blocks.kv_heads)
    _check_tensor("tokens", tokens, [seqs, heads], torch.int32)
    _check_head_size(q.shape[-1], blocks.head_size)
    job, result = _attend_job(q, blocks.kv_heads, scale, softcap, sinks, max_blocks * blocks.block if weights else None)
    blocks.fill(job)
    job.table, job.table_heads, job.max_blocks = table.data_ptr(), heads, max_blocks
    job.tokens = tokens.data_ptr()
    return Call("attend", job, result, (q, table, tokens, sinks), blocks)


def attend(
    q: Tensor,
    blocks: Blocks,
    table: Tensor,
    tokens: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    weights: bool = False,
) -> Attended:
    """`plan_attend(...).run()`: see there for shapes."""
    return plan_attend(q, blocks, table, tokens, scale=scale, softcap=softcap, sinks=sinks, weights=weights).run()


def plan_attend_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    weights: bool = False,
) -> Call[Attended]:
    """Attention over runs of contiguous rows: windows (a ring is two or three runs) and compacted entries.

    q: as in `plan_attend`. k, v: `[seqs, kv_heads, rows, head_size]` of one float dtype, any strides but the last.
    runs: `[seqs, run_heads, max_runs, 2]` int32 of (first row, count), run_heads 1 or kv_heads; an unused run has
    count 0. Weights come in the order of the runs, `[.., q_heads, rows]`. Everything else as in `plan_attend`.
    """
    seqs = q.shape[0]
    _check_tensor("k", k, [seqs, None, None, q.shape[-1]])
    _check_tensor("v", v, list(k.shape))
    _check(k.dtype == v.dtype, f"k is {k.dtype} and v is {v.dtype}.", "Keys and values share an element type.")
    _check(runs.dim() == 4, f"runs has {runs.dim()} dimensions.", "[seqs, run_heads, max_runs, 2].")
    _check_tensor("runs", runs, [seqs, None, None, 2], torch.int32)
    kv_heads, rows = k.shape[1], k.shape[2]
    _check_table_heads(runs.shape[1], kv_heads)
    job, result = _attend_job(q, kv_heads, scale, softcap, sinks, rows if weights else None)
    job.elem = _elem(element_of(k.dtype))
    _fill_rows(job, k, v)
    job.runs, job.run_heads, job.max_runs = runs.data_ptr(), runs.shape[1], runs.shape[2]
    return Call("attend", job, result, (q, k, v, runs, sinks))


def attend_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    weights: bool = False,
) -> Attended:
    """`plan_attend_runs(...).run()`: see there for shapes."""
    return plan_attend_runs(q, k, v, runs, scale=scale, softcap=softcap, sinks=sinks, weights=weights).run()


def _check_table_heads(heads: int, kv_heads: int) -> None:
    _check(
        heads in (1, kv_heads),
        f"Lists for {heads} heads do not fit {kv_heads} KV heads.",
        "Give one list for all heads, or one for each KV head.",
    )


def _check_head_size(have: int, want: int) -> None:
    _check(have == want, f"q has head size {have}, the blocks {want}.", "Use queries and blocks of one model.")


def _fill_rows(job: Any, k: Tensor, v: Tensor) -> None:
    size = k.element_size()
    job.k, job.v, job.rows = k.data_ptr(), v.data_ptr(), k.shape[2]
    job.k_seq, job.k_head, job.k_row = (n * size for n in k.stride()[:3])
    job.v_seq, job.v_head, job.v_row = (n * size for n in v.stride()[:3])


# -- chosen entries --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entries:
    """Entries of sequences, addressed by position: blocks with a `table`, or rows `k`, `v`.

    table: `[seqs, table_heads, max_blocks]` int32. k, v: `[seqs, kv_heads, rows, head_size]`.
    """

    blocks: Blocks | None = None
    table: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None

    def source(self) -> tuple[Any, int, int]:
        """The extension's description, the number of KV heads and the head size."""
        source = _native.EntrySource()
        if self.blocks is not None and self.table is not None:
            _check_tensor("table", self.table, [None, None, None], torch.int32)
            _check_table_heads(self.table.shape[1], self.blocks.kv_heads)
            self.blocks.fill(source)
            source.table, source.table_heads = self.table.data_ptr(), self.table.shape[1]
            source.max_blocks = self.table.shape[2]
            kv_heads, head_size = self.blocks.kv_heads, self.blocks.head_size
        else:
            if self.k is None or self.v is None:
                raise NativeError("Entries name neither blocks nor rows.", "Give blocks and table, or k and v.")
            _check_tensor("k", self.k, [None, None, None, None])
            _check_tensor("v", self.v, list(self.k.shape))
            _check(self.k.dtype == self.v.dtype, "k and v differ in dtype.", "Convert one of them.")
            source.elem = _elem(element_of(self.k.dtype))
            _fill_rows(source, self.k, self.v)
            kv_heads, head_size = self.k.shape[1], self.k.shape[3]
        source.kv_heads, source.head_size = kv_heads, head_size
        return source, kv_heads, head_size

    @property
    def seqs(self) -> int:
        first = self.table if self.table is not None else self.k
        return 0 if first is None else first.shape[0]


def plan_weighted_sum(weights: Tensor, index: Tensor, count: Tensor, entries: Entries) -> Call[Tensor]:
    """Sum of the chosen entries' values under given weights -> `[seqs, q_heads, head_size]` float32.

    weights: `[seqs, q_heads, max_entries]` float32. index: `[seqs, kv_heads, max_entries]` int32 positions.
    count: `[seqs, kv_heads]` int32 entries in use. Bit-identical between runs.
    """
    source, kv_heads, head_size = entries.source()
    _check_tensor("index", index, [entries.seqs, kv_heads, None], torch.int32)
    _check_tensor("count", count, [entries.seqs, kv_heads], torch.int32)
    _check_tensor("weights", weights, [entries.seqs, None, index.shape[2]], torch.float32)
    q_heads = weights.shape[1]
    _check(q_heads % kv_heads == 0, f"{q_heads} query heads cannot share {kv_heads} KV heads.", "Use a multiple.")
    out = torch.empty(entries.seqs, q_heads, head_size)
    job = _native.WeightedSumJob()
    job.source, job.seqs, job.q_heads = source, entries.seqs, q_heads
    job.index, job.count, job.max_entries = index.data_ptr(), count.data_ptr(), index.shape[2]
    job.weights, job.out = weights.data_ptr(), out.data_ptr()
    return Call("weighted_sum", job, out, (weights, index, count, entries), entries.blocks)


def weighted_sum(weights: Tensor, index: Tensor, count: Tensor, entries: Entries) -> Tensor:
    """`plan_weighted_sum(...).run()`: see there for shapes."""
    return plan_weighted_sum(weights, index, count, entries).run()


def plan_compact(index: Tensor, count: Tensor, entries: Entries, k_out: Tensor, v_out: Tensor) -> Call[None]:
    """Copies chosen entries into contiguous runs; rows past `count` stay as they were.

    index: `[seqs, kv_heads, max_entries]` int32 positions. count: `[seqs, kv_heads]` int32.
    k_out, v_out: `[seqs, kv_heads, max_entries, head_size]` of one float dtype; elements are converted.
    """
    source, kv_heads, head_size = entries.source()
    _check_tensor("index", index, [entries.seqs, kv_heads, None], torch.int32)
    _check_tensor("count", count, [entries.seqs, kv_heads], torch.int32)
    _check_tensor("k_out", k_out, [entries.seqs, kv_heads, index.shape[2], head_size])
    _check_tensor("v_out", v_out, list(k_out.shape))
    _check(k_out.dtype == v_out.dtype, "k_out and v_out differ in dtype.", "Convert one of them.")
    size = k_out.element_size()
    job = _native.CompactJob()
    job.source, job.seqs = source, entries.seqs
    job.index, job.count, job.max_entries = index.data_ptr(), count.data_ptr(), index.shape[2]
    job.out_elem = _elem(element_of(k_out.dtype))
    job.k_out, job.v_out = k_out.data_ptr(), v_out.data_ptr()
    job.k_seq, job.k_head, job.k_row = (n * size for n in k_out.stride()[:3])
    job.v_seq, job.v_head, job.v_row = (n * size for n in v_out.stride()[:3])
    return Call("compact", job, None, (index, count, entries, k_out, v_out), entries.blocks)


def compact(index: Tensor, count: Tensor, entries: Entries, k_out: Tensor, v_out: Tensor) -> None:
    """`plan_compact(...).run()`: see there for shapes."""
    plan_compact(index, count, entries, k_out, v_out).run()


def plan_score_digest(q: Tensor, digest: Tensor, table: Tensor, count: Tensor, *, scale: float = 1.0) -> Call[Tensor]:
    """Scores of blocks by their digests -> `[seqs, q_heads, max_blocks]` float32, -inf past each list's end.

    q: `[seqs, q_heads, head_size]`. digest: `[blocks, kv_heads, 2, head_size]` of (min, max) keys, which bounds the
    block's scores by the sum over channels of max(q * min, q * max), or `[blocks, kv_heads, head_size]` of mean keys,
    which gives q . mean. table: `[seqs, table_heads, max_blocks]` int32. count: `[seqs, table_heads]` int32 blocks.
    """
    _check_tensor("q", q, [None, None, None])
    _check(digest.dim() in (3, 4), f"digest has {digest.dim()} dimensions.", "[blocks, kv_heads, (2,) head_size].")
    two_sided = digest.dim() == 4
    shape: list[int | None] = [None, None, 2, q.shape[2]] if two_sided else [None, None, q.shape[2]]
    _check_tensor("digest", digest, shape)
    _check(
        not two_sided or digest.stride(2) == digest.shape[3],
        "The (min, max) rows of a digest do not follow each other.",
        "Call digest.contiguous().",
    )
    kv_heads = digest.shape[1]
    _check_tensor("table", table, [q.shape[0], None, None], torch.int32)
    _check_table_heads(table.shape[1], kv_heads)
    _check_tensor("count", count, [q.shape[0], table.shape[1]], torch.int32)
    _check(q.shape[1] % kv_heads == 0, f"{q.shape[1]} query heads cannot share {kv_heads} KV heads.", "Use a multiple.")
    _check(q.shape[2] % 8 == 0, f"Head size {q.shape[2]} is not a multiple of 8.", "Pad the heads with zeros.")
    out = torch.empty(q.shape[0], q.shape[1], table.shape[2])
    job = _native.ScoreDigestJob()
    job.seqs, job.q_heads, job.head_size = q.shape
    job.kv_heads, job.two_sided, job.scale = kv_heads, two_sided, scale
    job.q, job.q_elem, job.q_seq, job.q_head = q.data_ptr(), _elem(element_of(q.dtype)), q.stride(0), q.stride(1)
    job.elem, job.base, job.num_blocks = _elem(element_of(digest.dtype)), digest.data_ptr(), digest.shape[0]
    job.block_stride, job.head_stride = (n * digest.element_size() for n in digest.stride()[:2])
    job.table, job.table_heads, job.max_blocks = table.data_ptr(), table.shape[1], table.shape[2]
    job.count, job.out = count.data_ptr(), out.data_ptr()
    return Call("score_digest", job, out, (q, digest, table, count))


def score_digest(q: Tensor, digest: Tensor, table: Tensor, count: Tensor, *, scale: float = 1.0) -> Tensor:
    """`plan_score_digest(...).run()`: see there for shapes."""
    return plan_score_digest(q, digest, table, count, scale=scale).run()


# -- rows and blocks -------------------------------------------------------------------------------------------------


def _block_rows_job(k: Tensor, v: Tensor, blocks: Blocks) -> Any:
    _check_tensor("k", k, [None, blocks.kv_heads, blocks.head_size])
    _check_tensor("v", v, list(k.shape))
    _check(k.dtype == v.dtype, f"k is {k.dtype} and v is {v.dtype}.", "Convert one of them.")
    job = _native.BlockRowsJob()
    blocks.fill(job)
    job.k, job.v, job.row_elem = k.data_ptr(), v.data_ptr(), _elem(element_of(k.dtype))
    job.k_token, job.k_head = k.stride()[:2]
    job.v_token, job.v_head = v.stride()[:2]
    job.tokens, job.kv_heads, job.head_size = k.shape
    return job


def write_rows(k: Tensor, v: Tensor, slots: Tensor, blocks: Blocks) -> None:
    """Writes single tokens into float blocks, converting the element type.

    k, v: `[tokens, kv_heads, head_size]`. slots: `[tokens]` int64, block id * block + row.
    """
    job = _block_rows_job(k, v, blocks)
    _check_tensor("slots", slots, [k.shape[0]], torch.int64)
    job.slots = slots.data_ptr()
    _native.write_rows(job)


def write_blocks(k: Tensor, v: Tensor, ids: Tensor, blocks: Blocks) -> None:
    """Writes whole blocks of any element type; int8 and int4 are quantised on the way.

    k, v: `[tokens, kv_heads, head_size]`. ids: `[ceil(tokens / block)]` int32. The last block may be partly filled.
    """
    job = _block_rows_job(k, v, blocks)
    _check_tensor("ids", ids, [None], torch.int32)
    job.blocks, job.block_count = ids.data_ptr(), ids.shape[0]
    _native.write_blocks(job)


def read_blocks(ids: Tensor, tokens: int, blocks: Blocks, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values `[tokens, kv_heads, head_size]` of blocks; int8 and int4 are dequantised.

    ids: `[ceil(tokens / block)]` int32.
    """
    _check_tensor("ids", ids, [None], torch.int32)
    k = torch.empty(tokens, blocks.kv_heads, blocks.head_size, dtype=dtype)
    v = torch.empty_like(k)
    job = _block_rows_job(k, v, blocks)
    job.blocks, job.block_count = ids.data_ptr(), ids.shape[0]
    _native.read_blocks(job)
    return k, v


# -- limits of the machine -------------------------------------------------------------------------------------------


def stream_read_gbps(threads: int = 0, nbytes: int = 1 << 30, repeats: int = 5) -> float:
    """GB/s of reading memory front to back, best of `repeats`; threads 0 uses the pool's."""
    return float(_native.stream_read_gbps(threads, nbytes, repeats))


def random_gather_gbps(threads: int = 0, block_bytes: int = 16384, nbytes: int = 1 << 30, repeats: int = 5) -> float:
    """GB/s of reading blocks in random order with the next one prefetched, best of `repeats`."""
    return float(_native.random_gather_gbps(threads, block_bytes, nbytes, repeats))


def empty_job_latency(n: int, threads: int = 0) -> list[int]:
    """Nanoseconds of n round trips of an empty job, in order."""
    return list(_native.empty_job_latency(threads, n))


def busy_job_latency(n: int, us: float, threads: int = 0) -> list[int]:
    """Nanoseconds of n round trips of a job that keeps every worker busy for `us` microseconds, in order."""
    return list(_native.busy_job_latency(threads, n, us))
