"""One row over prompts that were read: all of them through one engine, both modes side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coattn.engine.handle import Handle
from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.hf.architectures import describe_layers
from coattn.hf.load import Loaded
from coattn_lab.evaluate.tasks.budget import Size, limit_of, reading_bytes
from coattn_lab.evaluate.tasks.following import Reference, compare
from coattn_lab.evaluate.tasks.prompts import Prompt
from coattn_lab.evaluate.tasks.reading import Held, kv_bytes
from coattn_lab.evaluate.tasks.row import Row
from coattn_lab.evaluate.tasks.rules import GROWING, is_decided, score

LOOK = 16
"""A trace is taken every so many steps."""


@dataclass
class Running:
    """What it took at one length: KV bytes per tier and sequence, bytes read in a step, milliseconds of a full step."""

    length: int
    batch: int
    most: int
    """Tokens that the longest sequence may have."""
    gpu_kv: int = 0
    host_kv: int = 0
    whole: int = 0
    """KV bytes of a sequence of `most` tokens, all in one place."""
    read_shares: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    captured: bool = False
    preemptions: int = 0
    seconds: float = 0.0
    reading: int = 0
    """GPU bytes for a prompt while it is read, of all sequences together; not in `gpu_kv`."""
    answer_kl: dict[str, Any] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds: engine opened, KL measured, prompts stored, steps run."""

    def took(self, phase: str, since: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - since

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "length": self.length,
            "batch": self.batch,
            "max_length": self.most,
            "gpu_kv_bytes": self.gpu_kv,
            "host_kv_bytes": self.host_kv,
            "kv_bytes": self.whole,
            "gpu_share": self.gpu_kv / self.whole,
            "read_share": statistics.fmean(self.read_shares) if self.read_shares else None,
            "ms_per_step": statistics.median(self.steps_ms) if self.steps_ms else None,
            "captured": self.captured,
            "preemptions": self.preemptions,
            "seconds": round(self.seconds, 2),
            "phases": {name: round(value, 2) for name, value in self.phases.items()},
            "reading_bytes": self.reading,
            "answer_kl": self.answer_kl,
        }


def ask_name(prompt: Prompt, mode: str) -> str:
    """A prompt in a mode, as results name it."""
    return f"{prompt.name}#{mode}"


def run_row(
    loaded: Loaded,
    row: Row,
    wanted: Sequence[tuple[Held, str]],
    *,
    batch: int,
    most: int,
    whole: bool = False,
    note: Callable[[Running], None] = lambda _: None,
    compared: Callable[[Running], None] = lambda _: None,
    reference: Reference | None = None,
) -> Iterator[dict[str, Any]]:
    """Answers, as they finish. wanted: prompts and modes. most: tokens of the longest sequence.

    reference: what full attention said; the row's predictions are compared with it first, and its steps are timed.
    compared: hears of that at once; note: of all, at the end.

    whole: answers run to their end; else they end where nothing could change their score any more. On a GPU one batch
    size is captured: a row opens dozens of engines, and a capture takes longer than the steps it would make cheaper.
    """
    batch = min(batch, len(wanted))
    found = Running(wanted[0][0].ask.prompt.length, batch, most, whole=kv_bytes(loaded.model, most))
    size = Size(describe_layers(loaded.model), batch, most)
    budget = limit_of(row.composed, row.gpu_share, row.budget is not None, size)
    started = time.perf_counter()
    with LLM(
        loaded,
        row.composed.method,
        gpu_kv=budget,
        max_batch=batch,
        max_length=most,
        chunk=batch * most,  # a batch is filled before its first step
        sizes=(batch,),
        reuse=False,  # every row does all of its own work
        **row.composed.params,
    ) as llm:
        found.took("open", started)
        begun = time.perf_counter()
        if reference is not None:
            found.answer_kl = compare(llm.runner, reference, batch)
            found.took("kl", begun)
            compared(found)
            yield from _followed(wanted, found.answer_kl)
        asked = ((held, mode) for held, mode in wanted if not held.ask.follows)
        handles = [(held, mode, _submit(llm, held, mode)) for held, mode in asked]
        try:
            while handles:
                _step(llm, found, batch)
                left = []
                for held, mode, handle in handles:
                    prompt = held.ask.prompt
                    if not handle.done and (whole or not _is_over(prompt, handle)):
                        left.append((held, mode, handle))
                        continue
                    yield _judge(prompt, mode, handle, llm.tokenizer)
                    handle.cancel()
                handles = left
        finally:
            for _, _, handle in handles:
                handle.cancel()
        report = llm.report()
        found.reading = reading_bytes(llm.runner.runtime)
        gpu, host = (int(report[f"{tier}_kv_peak"]) for tier in ("gpu", "host"))
        found.gpu_kv, found.host_kv = (gpu - found.reading) // batch, host // batch
        found.captured, found.preemptions = bool(report["captured"]), int(report["preemptions"])
    found.seconds = time.perf_counter() - started
    note(found)


def _followed(wanted: Sequence[tuple[Held, str]], compared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Texts have no answer: the score is how often the row would go on as full attention does."""
    for held, mode in wanted:
        own = compared["by_prompt"].get(held.ask.prompt.name)
        if held.ask.follows and own is not None:
            yield {
                **judge(held.ask.prompt, mode, "", (), None), "score": own["top1"], "tokens": compared["steps"],
            }  # fmt: skip


def _submit(llm: LLM, held: Held, mode: str) -> Handle:
    given = held.read if mode == "read" else held.fed
    question = held.ask.ids[held.ask.split :] if mode == "fed" else ()
    return llm.submit(given, SamplingParams(held.ask.prompt.new_tokens, feed=question))


def _is_over(prompt: Prompt, handle: Handle) -> bool:
    return handle.new_tokens > 0 and is_decided(prompt.rule, handle.text.text, prompt.outputs)


def _judge(prompt: Prompt, mode: str, handle: Handle, tokenizer: Any) -> dict[str, Any]:
    output = handle.output()
    if output.error is not None:
        raise output.error
    return judge(prompt, mode, output.text, output.token_ids, tokenizer)


def judge(prompt: Prompt, mode: str, text: str, ids: Sequence[int], tokenizer: Any) -> dict[str, Any]:
    """An answer as JSON has it."""
    points = score(prompt.rule, text, prompt.outputs)
    return {
        "item": ask_name(prompt, mode),
        "benchmark": prompt.benchmark,
        "task": prompt.task,
        "length": prompt.length,
        "mode": mode,
        "score": points,
        "tokens": len(ids),
        "found_at": found_at(prompt, ids, tokenizer) if points == 1 and prompt.rule in GROWING else None,
        "answer": text,
    }


def found_at(prompt: Prompt, ids: Sequence[int], tokenizer: Any) -> int:
    """Tokens of an answer after which its score was full."""
    low, high = 1, len(ids)
    while low < high:  # what is found stays found
        middle = (low + high) // 2
        text = tokenizer.decode(list(ids[:middle]), skip_special_tokens=True)
        low, high = (low, middle) if score(prompt.rule, text, prompt.outputs) == 1 else (middle + 1, high)
    return low


def _step(llm: LLM, found: Running, batch: int) -> None:
    """One step of the engine; a decode step of a full batch is timed, and now and then traced."""
    counts = llm.engine.counts
    decoded, reads, full = counts["decode_steps"], counts["prefill_steps"], len(llm.engine.scheduler.running) == batch
    started = time.perf_counter()
    llm.step()
    found.took("steps" if counts["prefill_steps"] == reads else "prompts", started)
    # a step that reads a prompt too, with decode steps between its layers, is no decode step
    if counts["decode_steps"] == decoded or counts["prefill_steps"] != reads or not full:
        return
    found.steps_ms.append(1000 * (time.perf_counter() - started))
    if counts["decode_steps"] % LOOK == LOOK // 2 and len(llm.engine.scheduler.running) == batch:
        step = llm.trace()
        if step is not None:
            tokens = sum(request.stored for request in llm.engine.scheduler.running)
            read = step.hbm_bytes - step.weight_bytes + step.dram_bytes
            found.read_shares.append(min(1.0, read / kv_bytes(llm.model, tokens)))
