"""An exception in the middle of a step, wherever a step can be: who fails, who goes on, and what is left behind.

A case plays one scenario twice on a tiny model, once undisturbed, and compares every answer. As a command, all of it:

    python -m tests.engine.faults --matrix
    python -m tests.engine.faults --fuzz 5000 --seed 0
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tests.cache.integrity import check_blocks
from tests.engine.rows import ROWS, measured, options
from tests.engine.small import tokenizer
from tests.hf.families import FAMILIES as KNOWN
from tests.hf.families import tiny
from tests.hf.test_table import small
from tests.hf.test_wrapped import wrapped

import coattn
from coattn.engine.handle import Handle
from coattn.engine.request import RequestOutput
from coattn.errors import CoattnError
from coattn.hf.load import load
from coattn.hf.prefilled import prefill
from coattn.method.row import compose
from coattn.native.core import extension
from coattn.step.running import RunningStep
from coattn.types import Phase

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES = ("llama", "gemma3", "gpt_oss")
INSIDE = "inside_"
MORE_FAMILIES = ("qwen3_moe", "glm4_moe", "mixtral", "inside_gemma3", "inside_mistral3", "qwen3_5_text", "nemotron_h")
"""Experts, language models inside others, hybrids."""
PHASES = ("first", "later", "mixed", "decode", "session", "prefix", "disk", "remote")
CAPTURED = ("host", "runner", "launched", "between", "staged")
"""Of steps that a GPU replays: the CPU's part fails, the runner does, or whoever is told that the GPU is at work; a
prompt does between whose layers others decode, also with a share of the weights in DRAM."""
STORED = ("session", "prefix", "disk")
"""Phases of a request that begins with what is stored."""
LAYERS = (0, 1, 2)
PUT = -1
"""In place of a layer: where a slot gets what is stored."""
NEW = 8
"""Tokens of an answer."""
NEAR = 2e-3
"""In log-probability: how far an answer may be from an undisturbed one."""
UNCLEAR = 1e-3
"""Where the two likeliest tokens are nearer than this, rounding may swap them: nothing after that is compared."""


class InjectedError(RuntimeError):
    """What is raised."""


@dataclass(frozen=True)
class Case:
    """One exception: under which row and model, in which kind of step, at which layer, before or after its work."""

    row: str
    family: str
    phase: str
    layer: int
    after: bool
    nth: int = 0
    """How many such places are passed by before it is raised."""

    def __str__(self) -> str:
        where = "put" if self.layer == PUT else f"layer {self.layer}"
        return f"{self.row}-{self.family}-{self.phase}-{where}-{'after' if self.after else 'before'}-{self.nth}"


@dataclass
class Played:
    """What came out of a scenario."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    fired: bool = False
    prompts: dict[str, list[int]] = field(default_factory=dict)
    victims: set[str] = field(default_factory=set)
    """Requests of the step that was hit, where it had only one."""


def ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 160, (length,), generator=generator).tolist()


PREFIX = ids(44, 1)
PARAMS = coattn.SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=2)


@cache
def model(family: str) -> Any:
    """A tiny one: of the families of `tests.hf`, of those in the table, or the language model inside another."""
    if family in KNOWN:
        return tiny(family, DEVICE)
    if not family.startswith(INSIDE):
        return small(family, 0).to(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        wrapped(family.removeprefix(INSIDE)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        return load(folder, device=DEVICE.type, dtype="float32").model


@cache
def elsewhere(family: str, length: int, seed: int) -> Any:
    return prefill(model(family), ids(length, seed))


def stages(row: str) -> bool:
    """Whether a share of the weights may lie in DRAM: not where queries are predicted."""
    return ROWS[row].schedule != "layer_ahead"


def matrix(captured: bool = False) -> Iterator[Case]:
    """Every case there is. captured: of steps that a GPU replays."""
    for row, family, phase in product(ROWS, FAMILIES, CAPTURED if captured else ()):
        for layer, after in product(LAYERS if phase in ("between", "staged") else (0,), (False, True)):
            if (phase, after) not in (("host", True), ("launched", True)) and (phase != "staged" or stages(row)):
                yield Case(row, family, phase, layer, after)
    for row, family, phase in product(ROWS, FAMILIES, PHASES):
        for layer, after in product((*LAYERS, PUT) if phase in STORED else LAYERS, (False, True)):
            yield Case(row, family, phase, layer, after)


class Scenario:
    """An engine, the requests of a case, and a trap that raises once."""

    def __init__(self, case: Case, folder: Path, disturbed: bool, variant: str = "") -> None:
        """variant: of a session, what it has stored is forgotten before its turn, or the turn is left out."""
        self.case, self.disturbed, self.variant, self.played = case, disturbed, variant, Played()
        given = {"max_batch": 3, "max_length": 160, "chunk": 24, **options(case.row)}
        given |= measured(case.row, model(case.family))
        self.given = elsewhere(case.family, 70, 5) if case.phase == "remote" else None
        if case.phase == "staged":
            given["weights_on_gpu"] = 0.7
        self.llm = coattn.LLM((model(case.family), None), ROWS[case.row], disk=folder / "disk", **given)
        self.runtime = self.llm.runner.runtime
        self.handles: dict[str, Handle] = {}
        self.armed: str | None = None
        self.running: list[RunningStep] = []
        """Steps that have begun: a prompt's, and a decode step between two of its layers."""
        self._passed = 0

    # the trap

    @contextmanager
    def trap(self) -> Iterator[None]:
        """Raises once, at the case's layer, in a step of the case's phase."""
        attend, import_kv = self.runtime.attend, self.runtime.import_kv
        layouts: list[Any] = [group.cache.gpu for group in self.runtime.groups]
        begin, over = self.runtime.begin, (self.runtime.commit, self.runtime.abort)

        def around(call: Callable[..., Any], due: Callable[..., bool]) -> Callable[..., Any]:
            def called(*args: Any, **more: Any) -> Any:
                now = not self.played.fired and self.disturbed and due(*args)
                if now and self._passed < self.case.nth:
                    self._passed += 1
                    now = False
                if not now:
                    return call(*args, **more)
                self.played.fired = True
                self._note_victims()
                if self.case.after:
                    call(*args, **more)
                raise InjectedError("injected")

            return called

        def begins(*args: Any, **more: Any) -> RunningStep:
            self.running.append(begin(*args, **more))
            return self.running[-1]

        def ends(call: Callable[[RunningStep], None]) -> Callable[[RunningStep], None]:
            def ended(running: RunningStep) -> None:
                call(running)
                if running in self.running:  # else it was given up while it began
                    self.running.remove(running)

            return ended

        self.runtime.begin = begins  # type: ignore[method-assign]
        self.runtime.commit, self.runtime.abort = map(ends, over)  # type: ignore[method-assign]
        remote = self.case.phase == "remote"
        self.runtime.attend = around(attend, lambda running, layer, *_: not remote and self._due(running, layer))  # type: ignore[method-assign]
        self.runtime.import_kv = around(import_kv, lambda _, layer, *__: remote and layer == self.case.layer)  # type: ignore[method-assign]
        for layout in layouts:
            layout.put = around(layout.put, lambda *_: self.case.layer == PUT and self.armed is not None)
        runner, phase, undo = self.llm.runner, self.case.phase, ExitStack()

        def replaces(name: str, due: Callable[..., bool]) -> None:
            setattr(runner, name, around(getattr(runner, name), due))
            undo.callback(delattr, runner, name)

        replayed = hasattr(runner, "_replay")  # else steps of this row run layer by layer, and none of this occurs
        if phase == "host" and replayed:
            replay = runner._replay
            runner._replay = self._failing_workers(replay)
            undo.callback(delattr, runner, "_replay")
        elif phase == "runner" and replayed:  # before the step is launched, or once the GPU is done with it
            replaces("_wait" if self.case.after else "_write_inputs", lambda *_: self._replays())
        elif phase == "launched":
            runner.launched = around(lambda: None, lambda *_: self._replays())
            undo.callback(setattr, runner, "launched", None)
        try:
            with undo:
                yield
        finally:
            for name in ("attend", "import_kv", "begin", "commit", "abort"):
                delattr(self.runtime, name)
            for layout in layouts:
                del layout.put

    def _replays(self) -> bool:
        return self.armed is not None and bool(self.running) and self.running[-1].step.seqs > 1

    def _failing_workers(self, replay: Callable[..., None]) -> Callable[..., None]:
        def replays(running: RunningStep, captured: Any, rows: int, host: bool) -> None:
            asks = host and any(group.executor.asynchronous for group in self.runtime.groups)
            if self.disturbed and not self.played.fired and asks and self._replays():
                self.played.fired = True
                extension.inject_fault("throw")
            replay(running, captured, rows, host)

        return replays

    def _due(self, running: RunningStep, layer: int) -> bool:
        step, co_step, phase = running.step, running.co_step, self.case.phase
        if layer != self.case.layer or self.armed is None:
            return False
        reads = step.phase is not Phase.DECODE
        if phase == "decode":
            return not reads and co_step is None and step.seqs > 1
        if phase == "mixed":
            return co_step is not None and any(co_step.new)
        slot = self.handles[self.armed].request.slot if self.armed in self.handles else None
        part = step if reads else co_step
        if part is None or slot not in part.slots:
            return False
        history = part.history[part.slots.index(slot)]
        if phase in (*STORED, "between", "staged"):
            return True
        return reads and (not history if phase == "first" else history > 0)

    def _note_victims(self) -> None:
        """Whoever may fail: a request that is alone in its step, or that is given what is stored."""
        if self.case.layer == PUT or self.case.phase == "remote":
            self.played.victims = {str(self.armed)}
            return
        slots = {slot for part in self.running[-1].parts for slot in part.slots}
        if len(slots) == 1:
            self.played.victims = {n for n, h in self.handles.items() if not h.done and h.request.slot in slots}

    # the scenario

    def play(self) -> Played:
        """Runs it all, and looks at what is left."""
        try:
            with self.trap():
                self._play()
        except Exception as error:
            self.played.problems.append(f"the engine raised {type(error).__name__}: {error}")
        finally:
            self.llm.close()
        return self.played

    def _play(self) -> None:
        llm, phase = self.llm, self.case.phase
        self.ask("before", [*PREFIX, *ids(3, 2)])
        self.finish()
        self._clean()  # nothing is shared with what the next ones read
        free, held = dict(llm.runner.runtime.free_bytes()), dict(llm.ledger.held)
        if phase in ("prefix", "disk"):
            self.ask("stores", [*PREFIX, *ids(5, 3)])
            self.finish()
        session = llm.session() if phase == "session" else None
        if session is not None:
            self.handles["turn"] = session.submit(ids(37, 4), PARAMS)
            self.finish()
        if phase == "disk":
            with llm.engine.paused():
                llm.store.prefixes.evict(100)
                if llm.store.disk is not None:
                    llm.store.disk.files.flush()
        if phase in ("first", "later"):
            self.armed = "victim"
            self.ask("victim", ids(70, 5))
            self.ask("one", ids(30, 6))
            self.ask("two", ids(45, 7))
        else:
            self.ask("one", ids(30, 6))
            self.ask("two", ids(45, 7))
            for _ in range(3):
                llm.step()
            self.armed = "victim"
            if session is not None:
                if "forgotten" in self.variant:
                    llm.store.drop(session.number)
                if "no turn" not in self.variant:
                    self.handles["victim"] = session.submit(ids(33, 8), PARAMS)
            elif phase in STORED:
                self.ask("victim", [*PREFIX, *ids(30, 9)])
            elif phase == "remote":
                self.handles["victim"] = llm.submit(self.given, PARAMS)
            else:
                self.ask("victim", ids(70, 5))
        self.finish()
        self.armed = None
        if session is not None:
            self.handles["next turn"] = session.submit(ids(9, 10), PARAMS)
            self.finish()
            session.close()
        for i in range(3):  # in every slot
            self.ask(f"hit {i}", [*PREFIX, *ids(8 + i, 11)])
        self.finish()
        self._clean()
        if dict(llm.runner.runtime.free_bytes()) != free:
            self.played.problems.append(f"leak: {dict(llm.runner.runtime.free_bytes())} bytes free, {free} before")
        if dict(llm.ledger.held) != held:
            self.played.problems.append(f"leak: {dict(llm.ledger.held)} bytes held, {held} before")
        if self.runtime.busy():
            self.played.problems.append("something is still done for nobody")
        for name, handle in self.handles.items():
            self.played.outputs[name], self.played.prompts[name] = handle.output(), handle.request.prompt

    def ask(self, name: str, tokens: list[int]) -> None:
        self.handles[name] = self.llm.submit(tokens, PARAMS)

    def finish(self) -> None:
        steps = 0
        while not all(handle.done for handle in self.handles.values()):
            self.llm.step()
            self._look_at_slots()
            steps += 1
            if steps > 2000:
                raise AssertionError("requests do not end")

    def _look_at_slots(self) -> None:
        """A slot that nobody has is empty."""
        running = {request.slot for request in self.llm.engine.scheduler.running}
        for table in self.llm.store.tables:
            left = [s for s, owned in table.owned.items() if owned and s < self.llm.runner.slots and s not in running]
            if left:
                self.played.problems.append(f"leak: slot {left[0]} is nobody's and has blocks")
            check_blocks(table)

    def _clean(self) -> None:
        with self.llm.engine.paused():
            if self.llm.store.disk is not None:
                self.llm.store.disk.files.flush()
            for group in self.runtime.groups:  # what spare memory remembers of prompts is nobody's either
                while group.cache.prompts is not None and group.cache.prompts._drop_oldest():
                    pass
            for table in self.llm.store.tables:
                self.llm.store.prefixes.evict(10_000)
                check_blocks(table)
                used = table.used() - len(table.owned.get(self.llm.runner.slots, ()))
                if used or table.idle:
                    self.played.problems.append(f"leak: {used} blocks in use, {table.idle} held, by nobody")


@cache
def undisturbed(case: Case, variant: str = "") -> Played:
    with tempfile.TemporaryDirectory() as folder:
        return Scenario(case, Path(folder), disturbed=False, variant=variant).play()


def run(case: Case) -> Played | None:
    """Plays a case -> what came out, with what is wrong; None where such a step does not occur."""
    want = undisturbed(Case(case.row, case.family, case.phase, 0, False))
    with tempfile.TemporaryDirectory() as folder:
        found = Scenario(case, Path(folder), disturbed=True).play()
    found.problems += [f"undisturbed: {problem}" for problem in want.problems]
    found.problems = list(dict.fromkeys(found.problems))
    extension.inject_fault("")
    if not found.fired:
        assert not found.problems, found.problems
        return None
    for name, output in found.outputs.items():
        wrong = compare(output, want.outputs[name], name in found.victims)
        others = iter(references(case, found.prompts[name], name))
        while wrong and output.error is None and (other := next(others, None)) is not None:
            wrong = compare(output, other, may_fail=False)
        # whose draws go on; and who has dropped tokens, or filled pools, for a step that is not
        again = case.phase == "runner" and case.after and case.row in ("h2o", "tova", "auto")
        numbers = case.row == "random" or again
        found.problems += [f"{name}: {x}" for x in wrong if not numbers or x.startswith(("failed", "ended"))]
    return found


def references(case: Case, tokens: list[int], name: str) -> Iterator[RequestOutput]:
    """Of a session whose turn failed: the next one's answer without it. Of a lossy row that has read again what it had
    decoded, or had nothing to go on from: what it answers then."""
    exact = compose(ROWS[case.row]).exact
    if case.phase == "session":
        for variant in ("no turn",) if exact else ("forgotten", "no turn", "forgotten, no turn"):
            played = undisturbed(Case(case.row, case.family, case.phase, 0, False), variant)
            if played.prompts.get(name) == tokens:
                yield played.outputs[name]
    if not exact:
        yield alone(case.row, case.family, tuple(tokens))


@cache
def alone(row: str, family: str, tokens: tuple[int, ...]) -> RequestOutput:
    """The answer to a text that nobody has read before, once another has made whatever the first prompt makes."""
    given = {"max_batch": 1, "max_length": 160, "chunk": 24, **options(row)} | measured(row, model(family))
    with coattn.LLM((model(family), None), ROWS[row], reuse=False, **given) as llm:
        llm.generate([*PREFIX, *ids(3, 2)], PARAMS)
        return llm.generate(list(tokens), PARAMS)[0]


def compare(found: RequestOutput, want: RequestOutput, may_fail: bool) -> list[str]:
    """What is wrong with an answer."""
    if found.finish_reason == "error":
        if not may_fail:
            return [f"failed: {found.error}"]
        if not isinstance(found.error, CoattnError) or not found.error.hint or "injected" not in str(found.error):
            return [f"failed without a sentence: {found.error!r}"]
        return []
    if found.finish_reason != want.finish_reason:
        return [f"ended with {found.finish_reason}"]
    for i, (one, two) in enumerate(zip(found.logprobs, want.logprobs, strict=True)):
        if two.top[0][1] - two.top[1][1] < UNCLEAR:
            return []
        if found.token_ids[i] != want.token_ids[i]:
            return [f"wrong from token {i}: {found.token_ids} for {want.token_ids}"]
        if abs(one.logprob - two.logprob) > NEAR:
            return [f"log-probability of token {i} is off by {abs(one.logprob - two.logprob):.4f}"]
    return []


def draw(dice: random.Random) -> Case:
    """Any case, at any of its places."""
    phase = dice.choice(PHASES)
    layer = dice.choice((*LAYERS, PUT) if phase in STORED else LAYERS)
    return Case(
        dice.choice(list(ROWS)),
        dice.choice(FAMILIES),
        phase,
        layer,
        dice.random() < 0.5,
        dice.choice((0, 0, 1, 2, 3)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Exceptions in the middle of steps.")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--captured", action="store_true", help="with the cases of steps that a GPU replays")
    parser.add_argument("--fuzz", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--phases", nargs="*", default=[*CAPTURED, *PHASES])
    parser.add_argument("--part", default="0/1", help="such as 1/2: of every two cases, the second")
    parser.add_argument("--show", action="store_true", help="print every problem")
    given = parser.parse_args()
    logging.getLogger("coattn").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dice = random.Random(given.seed)
    cases = list(matrix(given.captured)) if given.matrix else [draw(dice) for _ in range(given.fuzz)]
    number, of = map(int, given.part.split("/"))
    cases = [case for case in cases[number::of] if case.row in given.rows and case.phase in given.phases]
    start, counts, bad = time.perf_counter(), Counter[str](), Counter[tuple[str, str]]()
    for case in cases:
        found = run(case)
        counts["cases"] += 1
        counts["not there"] += found is None
        if found is not None and found.problems:
            counts["bad"] += 1
            bad[case.row, case.phase] += 1
            if given.show:
                print(case, "|", "; ".join(found.problems)[:400], flush=True)
        if found is not None:
            counts["failed requests"] += sum(output.finish_reason == "error" for output in found.outputs.values())
            counts["answers"] += len(found.outputs)
    for (row, phase), count in sorted(bad.items()):
        print(f"{row:20} {phase:10} {count}")
    print(
        f"{counts['cases'] - counts['not there']} cases with an exception ({counts['not there']} whose step does not "
        f"occur), {counts['bad']} with violations; {counts['answers']} answers, {counts['failed requests']} failed; "
        f"seed {given.seed}, part {given.part}, {time.perf_counter() - start:.0f} s"
    )
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
