"""vLLM beside `full` on one GPU: decode steps, a long prompt, a stream of requests, in one visit of the machine.

    python lab/scripts/beside_vllm.py OUT [--vllm FOLDER] [--shapes qwen3-8b | --model FOLDER] [--minutes 7]

OUT is a folder: a file for each measurement, and `table.md`. What is there is not measured again, so a run that was cut
off, or that ended with 3 because `--minutes` were over, goes on with the same command. Both systems get the same shapes
with random weights (or the same folder of a model), the same random tokens, as much of the GPU as `--share`, no prefix
caching and greedy sampling without an end. Each runs in a process of its own, one after the other, coattn in the first
two fifths of the time; a process that outlasts the time by half a minute is ended. Neither needs a network. What is
cheap is measured first. Where vLLM measures nothing with compiled kernels and graphs, it is tried once more without
them, and its files say `eager`.

`decode`: milliseconds of an engine's step in which every sequence gets a token, scheduling and sampling included: the
median and the 99th percentile. `prompt`: seconds from submission to the first token, after a prompt of the same length
that is not timed. `requests`: the 24 requests of `coattn-lab bench requests`, all at once, 16 at a time.
--vllm names a folder that is put in front of Python's path; where vLLM cannot be imported one sentence says so, and
coattn alone is measured.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import click

from coattn.provenance import provenance
from coattn_lab.bench.requests import prompts_of, spread
from coattn_lab.bench.stream import Item, draw
from coattn_lab.evaluate.results import write_json
from coattn_lab.evaluate.tasks.table import markdown

SYSTEMS = ("coattn", "vllm")
ABSENT, UNFINISHED = 4, 3
"""How a system's process ends that cannot be imported; how the command ends where its time was over."""
GRACE = 30.0
"""Seconds after its time in which a system may end what it has begun."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its steps are timed from outside
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled
}


class Engine(Protocol):
    """What is measured: requests go in, a step says who got how many tokens."""

    vocabulary: int

    def submit(self, name: int, ids: list[int], new: int) -> None: ...

    def step(self) -> dict[int, int]:
        """Runs a step -> by request, its new tokens."""


class Coattn:
    """`full` of coattn."""

    def __init__(self, options: dict[str, Any], most: int, batch: int) -> None:
        import torch

        from coattn.engine.llm import LLM
        from coattn.hf.load import choose_device, choose_dtype, load
        from coattn_lab.bench.random_model import random_model

        device = choose_device(options["device"])
        if options["model"]:
            model: Any = load(options["model"], dtype=options["dtype"], device=device).model
        else:
            model = random_model(options["shapes"], device, choose_dtype(options["dtype"], device))
        self.vocabulary = int(model.config.vocab_size)
        room = None
        if device.type == "cuda":
            weights = sum(each.nbytes for each in model.parameters())
            room = int(options["share"] * torch.cuda.get_device_properties(device).total_memory) - weights
        sizes = sorted({*options["batch"], batch})
        self.llm = LLM((model, None), "full", gpu_kv=room, max_batch=batch, max_length=most, reuse=False, sizes=sizes)
        self.llm.warm_up()
        self._handles: dict[int, Any] = {}
        self._seen: dict[int, int] = {}

    def submit(self, name: int, ids: list[int], new: int) -> None:
        from coattn.engine.sampling.params import SamplingParams

        self._handles[name] = self.llm.submit(ids, SamplingParams(max_new_tokens=new, ignore_eos=True))
        self._seen[name] = 0

    def step(self) -> dict[int, int]:
        self.llm.step()
        got = {}
        for name, handle in list(self._handles.items()):
            if handle.new_tokens > self._seen[name]:
                got[name], self._seen[name] = handle.new_tokens - self._seen[name], handle.new_tokens
            if handle.done:
                handle.output()  # raises what it failed with
                del self._handles[name]
        return got


class Vllm:
    """vLLM's engine, in this process."""

    def __init__(self, options: dict[str, Any], most: int, batch: int) -> None:
        os.environ.update(OFFLINE)
        try:
            from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]
        except Exception as error:  # a library that it needs may be missing, or be another version
            print(f"vLLM cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            sys.exit(ABSENT)
        folder = options["model"] or _config_folder(options["shapes"])
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        self.vocabulary, self._params = int(config["vocab_size"]), SamplingParams
        sizes = sorted({*options["batch"], batch})
        graphs = (
            {"enforce_eager": True} if options["eager"] else {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        )
        self._engine = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="auto" if options["model"] else "dummy",
            dtype=options["dtype"],
            max_model_len=most,
            max_num_seqs=batch,
            gpu_memory_utilization=options["share"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            generation_config="vllm",
            **graphs,
        ).llm_engine
        self._seen: dict[str, int] = {}

    def submit(self, name: int, ids: list[int], new: int) -> None:
        params = self._params(max_tokens=new, ignore_eos=True, temperature=0.0, detokenize=False)
        self._seen[str(name)] = 0
        self._engine.add_request(str(name), {"prompt_token_ids": ids}, params)

    def step(self) -> dict[int, int]:
        got = {}
        for output in self._engine.step():
            now, name = len(output.outputs[0].token_ids), output.request_id.split("-")[0]
            if now > self._seen[name]:
                got[int(name)], self._seen[name] = now - self._seen[name], now
        return got


def _config_folder(shapes: str) -> Path:
    """A folder with a config in these shapes, and nothing else."""
    from coattn_lab.bench.random_model import config_of

    folder = Path(tempfile.mkdtemp(prefix="shapes-"))
    config = config_of(shapes)
    names = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
    architecture = names.get(config["model_type"], "TransformersForCausalLM")
    given = {"architectures": [architecture], "torch_dtype": "bfloat16", **config}
    (folder / "config.json").write_text(json.dumps(given), encoding="utf-8")
    return folder


def decode(engine: Engine, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Sequences of one length: the steps in which all get exactly one token, but for the first three."""
    prompts = prompts_of([Item(0, context, steps)] * batch, engine.vocabulary, batch + context)
    for name, ids in enumerate(prompts):
        engine.submit(name, ids, steps + 4)
    taken, left = [], dict.fromkeys(range(batch), steps + 4)
    while left:
        started = time.perf_counter()
        got = engine.step()
        if len(got) == batch and set(got.values()) == {1}:
            taken.append(time.perf_counter() - started)
        left = {name: count - got.get(name, 0) for name, count in left.items() if count > got.get(name, 0)}
    taken = sorted(taken[3:])
    return {
        "ms_per_step": 1e3 * statistics.median(taken),
        "p99_ms": 1e3 * taken[int(0.99 * (len(taken) - 1))],
        "steps": len(taken),
    }


def prompt(engine: Engine, tokens: int) -> dict[str, Any]:
    """The second of two prompts of one length, of other tokens."""
    for seed in range(2):
        engine.submit(seed, prompts_of([Item(0, tokens, 1)], engine.vocabulary, seed)[0], 1)
        started = time.perf_counter()
        while not engine.step():
            pass
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens_per_s": tokens / seconds}


def requests(engine: Engine, items: Sequence[Item]) -> dict[str, Any]:
    """All at once; seconds from the start to each token."""
    prompts, begin = prompts_of(items, engine.vocabulary, 0), time.perf_counter()
    for name, (item, ids) in enumerate(zip(items, prompts, strict=True)):
        engine.submit(name, ids, item.new_tokens)
    left, times = {name: item.new_tokens for name, item in enumerate(items)}, [list[float]() for _ in items]
    while left:
        got, now = engine.step(), time.perf_counter() - begin
        for name, count in got.items():
            times[name] += [now] * count
            left[name] -= count
        left = {name: count for name, count in left.items() if count > 0}
    gaps = [b - a for own in times for a, b in pairwise(own)]
    total = max(own[-1] for own in times)
    first = {f"ttft_{name}": value for name, value in spread([own[0] for own in times]).items()}
    between = {f"between_{name}": value for name, value in spread(gaps).items()}
    return {"seconds": total, "tokens_per_s": sum(map(len, times)) / total, **first, **between}


def plan(options: dict[str, Any]) -> dict[str, Callable[[Engine], dict[str, Any]]]:
    """By name, what is measured of a system: what reads the fewest tokens first."""
    found: dict[str, tuple[int, Callable[[Engine], dict[str, Any]]]] = {}
    for context in options["context"]:
        for batch in options["batch"]:
            found[f"decode_{batch}x{context}"] = (
                batch * context,
                lambda engine, b=batch, c=context: decode(engine, b, c, options["steps"]),  # type: ignore[misc]
            )
    found[f"prompt_{options['prompt']}"] = 2 * options["prompt"], lambda engine: prompt(engine, options["prompt"])
    items = stream(options)
    tokens = sum(item.prompt_tokens for item in items)
    found[f"requests_{len(items)}"] = tokens, lambda engine: requests(engine, items)
    return {name: run for name, (_, run) in sorted(found.items(), key=lambda each: each[1][0])}


def stream(options: dict[str, Any]) -> list[Item]:
    """The requests, as `coattn-lab bench requests` draws them."""
    return draw(options["count"], options["lengths"], "fixed:64", "burst", 0)


def measure(system: str, folder: Path, options: dict[str, Any], until: float) -> bool:
    """What the folder lacks of one system, in this process -> whether nothing is left. Begins none after `until`, of
    `time.time`, but for the first."""
    todo = {name: run for name, run in plan(options).items() if not (folder / f"{system}_{name}.json").exists()}
    if not todo:
        return True
    most = max(*options["context"], options["prompt"], *(item.prompt_tokens for item in stream(options)))
    engine: Any = {"coattn": Coattn, "vllm": Vllm}[system](options, most + 64 + options["steps"], max(options["batch"]))
    for i, (name, run) in enumerate(todo.items()):
        if i and time.time() > until:
            return False
        asked = {key: options[key] for key in ("shapes", "model", "dtype", "share", "steps", "eager")}
        found = {"system": system, "measured": name, **run(engine), **asked, **provenance()}
        write_json(folder / f"{system}_{name}.json", found)
        print(f"{system} {name}: {found.get('ms_per_step') or 1e3 * found['seconds']:.2f} ms", file=sys.stderr)
    return True


def table(folder: Path, options: dict[str, Any]) -> str:
    """Both systems side by side; how many times vLLM's time coattn takes."""
    lines = []
    for name in plan(options):
        files = [folder / f"{system}_{name}.json" for system in SYSTEMS]
        found = [json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in files]
        times = [each.get("ms_per_step") or 1e3 * each.get("seconds", 0) for each in found]
        ratio = f"{times[0] / times[1]:.2f}" if all(times) else ""
        lines.append([name.replace("_", " "), *(f"{ms:,.2f}" if ms else "" for ms in times), ratio])
    head = (
        "measured, random weights" if not options["model"] else "measured",
        "coattn, ms",
        "vLLM, ms",
        "coattn / vLLM",
    )
    return markdown(head, lines)


def ended(command: list[str], env: dict[str, str], until: float) -> int:
    """Runs a process and whatever it starts -> how it ended; UNFINISHED where it was ended at `until`."""
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        return process.wait(max(1.0, until - time.time()))
    except subprocess.TimeoutExpired:
        return UNFINISHED
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _numbers(_context: Any, _parameter: Any, text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--vllm", "path", help="The folder in which vLLM lies.")
@click.option("--shapes", default="qwen3-8b", show_default=True)
@click.option("--model", help="A folder of a model, instead of shapes.")
@click.option("--batch", default="1,4,16", show_default=True, callback=_numbers)
@click.option("--context", default="8192,32768", show_default=True, callback=_numbers)
@click.option("--prompt", default=32768, show_default=True)
@click.option("--count", default=24, show_default=True)
@click.option("--lengths", default="uniform:4096:30720", show_default=True)
@click.option("--steps", default=64, show_default=True)
@click.option("--share", default=0.9, show_default=True, help="Of the GPU's memory, weights included.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--minutes", default=7.0, show_default=True)
@click.option("--eager", is_flag=True, help="vLLM without compiled kernels and graphs.")
@click.option("--system", type=click.Choice(SYSTEMS), hidden=True)
@click.option("--until", type=float, hidden=True)
def main(out: Path, path: str | None, system: str | None, until: float | None, minutes: float, **options: Any) -> None:
    """See above. With --system, which the command gives its own processes: one system."""
    out.mkdir(parents=True, exist_ok=True)
    if system is not None:
        assert until is not None
        sys.exit(0 if measure(system, out, options, until) else UNFINISHED)
    begin, end, codes = time.time(), time.time() + 60 * minutes, {}
    for each in SYSTEMS:
        env = dict(os.environ)
        if each == "vllm" and path:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(path).resolve()), env.get("PYTHONPATH"))))
        last = end if each == "vllm" else begin + 0.4 * (end - begin)
        given = [sys.executable, *sys.argv, "--system", each, "--until", str(last)]
        codes[each] = ended(given, env, last + GRACE)
        failed = codes[each] not in (0, UNFINISHED, ABSENT) and not list(out.glob("vllm_*.json"))
        if each == "vllm" and failed and not options["eager"] and time.time() < end:
            print("vLLM failed with compiled kernels and graphs; now without them.", file=sys.stderr)
            codes[each] = ended([*given, "--eager"], env, last + GRACE)
        (out / "table.md").write_text(table(out, options), encoding="utf-8")
    print(table(out, options), end="")
    if codes["vllm"] == ABSENT:
        print("vLLM could not be imported, so coattn alone was measured.")
        codes["vllm"] = 0
    sys.exit(max(codes.values()))


if __name__ == "__main__":
    main()
