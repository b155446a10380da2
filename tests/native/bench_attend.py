"""attend's KV GB/s beside the limits of the same run: `python tests/native/bench_attend.py [--threads N] [--gib 2]`.

Blocks of an arena in random order; `cache` is a list that fits the L2 cache, `dram` one that fits no cache. A quick
look at the kernels alone; `coattn bench ops` is the command for users.
"""

import argparse
import time

import torch

from coattn import native


def gbps(element: str, head_size: int, group: int, nbytes: int, seconds: float = 0.4) -> tuple[float, float]:
    """(KV GB/s, million tokens/s) of one sequence with 8 KV heads over `nbytes` of blocks."""
    block, kv_heads = 32, 8
    layout = native.block_layout(element, block, head_size)
    size = kv_heads * layout.bytes
    n = max(nbytes // size, 2)
    arena = native.Arena(size, n * size)
    ids = torch.tensor(arena.allocate(n), dtype=torch.int32)
    blocks = native.Blocks(arena, element, block, kv_heads, head_size)
    rows = torch.randn(2, block, kv_heads, head_size).bfloat16()
    native.write_blocks(rows[0], rows[1], ids[:1].contiguous(), blocks)
    memory = arena.memory()
    memory[1:] = memory[0]
    repeat = max(1, (64 << 20) // (n * size))  # a short list is walked several times a call
    table = torch.cat([ids[torch.randperm(n)] for _ in range(repeat)]).view(1, 1, -1)
    tokens = torch.tensor([[table.shape[2] * block]], dtype=torch.int32)
    call = native.plan_attend(torch.randn(1, kv_heads * group, head_size).bfloat16(), blocks, table, tokens)
    call.run()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        t = time.perf_counter()
        call.run()
        best = min(best, time.perf_counter() - t)
    count = int(tokens) * kv_heads
    return count * layout.bytes / block / best / 1e9, count / best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--isa", nargs="*", default=[s.name for s in native.isas() if not s.reason])
    parser.add_argument("--elements", nargs="*", default=["bf16", "int8", "int4"])
    parser.add_argument("--groups", type=int, nargs="*", default=[1, 4, 5, 8])
    args = parser.parse_args()
    native.set_threads(args.threads)
    big = int(args.gib * (1 << 30))
    n = native.threads()
    empty = sorted(native.empty_job_latency(20_000))
    print(f"{native.cpu_features().name}, {n} threads; empty job {empty[len(empty) // 2] / 1e3:.2f} us median")
    print(f"stream {native.stream_read_gbps(0, big):.1f} GB/s")
    for element in args.elements:
        for head_size in (128, 64):
            size = native.block_layout(element, 32, head_size).bytes
            limit = native.random_gather_gbps(0, size, big)
            print(f"{element} head size {head_size}: random gather of {size} bytes {limit:.1f} GB/s")
            for isa in args.isa:
                with native.forced_isa(isa):
                    for where, nbytes in (("cache", n << 19), ("dram", big)):
                        cells = []
                        for group in args.groups:
                            speed, tokens = gbps(element, head_size, group, nbytes)
                            cells.append(f"{group}: {speed:5.1f} GB/s {tokens:6.1f} Mtok/s")
                        print(f"  {isa:8s}{where:6s}" + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
