"""`LLM`: a model under a method, serving many requests at once."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from os.path import expanduser, isdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coattn.aliases import takes_aliases
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import BudgetError, ConfigError, InputError
from coattn.hf.models import CATALOG, resolve
from coattn.part import MOST, MOST_BATCH, check_count, check_number
from coattn.progress import progress_line
from coattn.units import as_folder, parse_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from coattn.engine.handle import Handle
    from coattn.engine.prompts import Prompt, PromptReader
    from coattn.engine.request import Request, RequestOutput
    from coattn.engine.sampling.logits import Guide
    from coattn.engine.session import Session as Conversation
    from coattn.hf.load import Loaded
    from coattn.method.row import Method
    from coattn.step.trace.step import StepTrace


class LLM(AbstractContextManager["LLM"]):
    """A model under a method, with continuous batching: requests join and leave between steps.

    model: a name, folder or GGUF file (as `coattn generate` takes it), a `Loaded`, or `(model, tokenizer)`;
        the tokenizer may be None, then prompts are token ids and answers have no text.
    method: a name from `coattn methods`, a TOML file with a row of your own, or a `coattn.Method`. Left out,
        `full` where the KV of `max_batch` sequences (left out: one) of `max_length` tokens fits in the GPU tier, and
        without a GPU; else `auto`.
    gpu_kv, host_kv: budgets for KV memory per tier, such as `"2GiB"`. All that they allow, and at most
        `max_batch` sequences of `max_length` tokens, is taken once, here; without a GPU pages are used as they fill.
        Left out, 80% of what is free; of DRAM that a GPU reads, where `max_batch` is left out too, at most twice the
        KV of 131,072 tokens or of one sequence. More than the machine, or its container, has is refused.
    max_batch: sequences that run at a time; others wait. Left out, 16, or fewer, so that one of `max_length` fits.
    max_length: tokens of a sequence, prompt and answer. Left out, as many as the model has positions, or, where memory
        has no room for them, as fit.
    chunk: tokens of prompts in one step; on a GPU decode steps run between its layers. Left out, exact methods read as
        many as `target_ms` allows, others 2,048, on a GPU 8,192: what they forget may depend on it.
    target_ms: the time between two tokens that holds while prompts are read; left out, 2.5 times that without,
        and 40 times while several prompts are read or wait. Not with `chunk`.
    deterministic: whether a greedy answer is the same bits whoever else runs; under `full`, `cpu` and `offload`.
        Prompts are read in chunks of `chunk`, left out 512 tokens, on a GPU 2,048. Where steps are not captured, as on
        a CPU, sequences decode one after another.
    sizes: batch sizes that are captured on a GPU, where one is first needed; a step runs in the next larger one. Left
        out, a ladder up to `max_batch`. Few sizes start sooner, many waste less when the batch is not full.
    max_waiting: requests that may wait besides those that run; more are refused with a BusyError. Left out, any number.
    reuse: whether prompts that begin alike share what is stored of them; `report()["not_shared"]` says why a method
        does not.
    session_dir: the folder of saved sessions; left out, `sessions` in coattn's cache folder.
    disk: a folder of this engine's own, where stored blocks are written too, so that they outlast memory and process;
        they are read back where that is faster than computing them. Left out, they are given up.
    disk_memory: most bytes of its files, such as `"64GiB"`; left out, 16 GiB.
    weights_on_gpu: share of the layers' weights that GPU memory holds at a time; the others lie in DRAM and are brought
        in while earlier layers compute. A model given by name is loaded on the host, so that one larger than the GPU
        runs. Left out, all weights lie where the model is. Not with methods that predict queries.
    dtype, device: for a model given by name.
    devices: several devices in place of one, such as `["cuda:0", "cuda:1"]`: consecutive layers lie on each, with their
        KV. `gpu_kv` is then for each device, or one for each in a list.
    device_shares: how much of the bytes of weights and KV each is to hold, such as `[3, 1]`; left out, the same.
    progress: whether one line on stderr shows how far loading, and `generate` and `chat`, are; only on a terminal.
    method_params: the method's parameters.

    vLLM's names for what is the same here are taken, too: see `coattn.aliases`.
    Use it in a `with` block, or call `close`; one that is forgotten closes itself. Until then the model belongs to the
    engine. Afterwards, also after an exception, it is as it was, and every byte is given back.
    """

    elsewhere: PromptReader | None = None
    """Who reads prompts for a server of this engine; set by `RemotePrefill.attach`."""

    @takes_aliases("LLM")
    def __init__(
        self,
        model: str | Path | Loaded | tuple[PreTrainedModel, Any],
        method: str | Method | None = None,
        *,
        gpu_kv: int | float | str | Sequence[int | float | str] | None = None,
        host_kv: int | float | str | None = None,
        max_batch: int | None = None,
        max_length: int | None = None,
        chunk: int | None = None,
        target_ms: float | None = None,
        deterministic: bool = False,
        sizes: Sequence[int] | None = None,
        max_waiting: int | None = None,
        reuse: bool = True,
        session_dir: str | Path | None = None,
        disk: str | Path | None = None,
        disk_memory: int | float | str | None = None,
        weights_on_gpu: float | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        devices: Sequence[str | torch.device] | None = None,
        device_shares: Sequence[float] | None = None,
        progress: bool = True,
        **method_params: Any,
    ) -> None:
        if isinstance(model, str | Path) and str(model) not in CATALOG and isdir(expanduser(model)):
            resolve(model)  # a folder that does not run is refused before PyTorch is imported

        from coattn.cache.states import ROWS, state_bytes
        from coattn.engine.chunk_policy import ChunkConfig
        from coattn.engine.conversations import Conversations
        from coattn.engine.devices import Devices
        from coattn.engine.engine import Engine
        from coattn.engine.method_choice import Wanted
        from coattn.engine.model import check_share, open_model, sequence_length, stage
        from coattn.engine.plan.fit import SLOTS, choose, say_enough
        from coattn.engine.runner.capture import choose_runner
        from coattn.engine.runner.one_by_one import CHUNK_TOKENS, GPU_CHUNK_TOKENS, check
        from coattn.engine.session_file import Sessions
        from coattn.engine.store.disk import DiskConfig
        from coattn.engine.store.sequence_store import SequenceStore
        from coattn.hf.architectures import activation_dtype
        from coattn.hf.cpu_dtypes import warn_if_slow
        from coattn.hf.forward import Session, end_tokens, sampling_defaults
        from coattn.hf.sketches import with_sketches
        from coattn.method.row import compose
        from coattn.method.table import METHODS
        from coattn.step.runtime import Runtime

        if max_batch is None and sizes:
            max_batch = SLOTS[0]
        check_count("max_batch", max_batch, 1, MOST_BATCH, unset=True)
        for size in sizes or ():
            check_count("sizes", size, 1, max_batch or MOST_BATCH)
        check_count("max_waiting", max_waiting, 0, unset=True)
        # what is wrong is said before a model is loaded
        wanted, chunks = Wanted.of(method, method_params), ChunkConfig(chunk, target_ms)
        tier = DiskConfig.of(disk, disk_memory)
        share = check_share(weights_on_gpu, wanted.named)
        asked = Devices.of(devices, device_shares, gpu_kv, device, share)
        host = parse_bytes(host_kv, "host_kv")
        on_host = share is not None or asked.several
        check_count("max_length", max_length, 2, unset=True)
        loaded = open_model(model, dtype, device, on_host, asked.first, max_length, progress)
        self.progress = progress
        self.name, self.model, self.tokenizer = loaded.name, loaded.model, loaded.tokenizer
        most = sequence_length(loaded, max_length)
        self.sessions = Sessions(as_folder("session_dir", session_dir))
        """Those that are saved: `names()`, `has(name)`, `delete(name)`."""
        self.conversations = Conversations()
        """Those that are open."""
        self._fingerprints: dict[str, str] | None = None
        with ExitStack() as undo:
            self._weights = None if share is None else stage(loaded, share, device)
            if self._weights is not None:
                undo.callback(self._weights.close)
            divided_for = wanted.named or compose(METHODS["full"])
            self.devices = asked.resolve(loaded.model, divided_for, max_batch or 1, most)
            if self.devices.pipeline is not None:
                undo.callback(self.devices.pipeline.close)
            session = undo.enter_context(Session(loaded.model, self.devices.pipeline))
            self.ledger = self.devices.ledger(session, host)
            room = self.ledger.gpu_in_all()
            if room is not None:
                room -= ROWS * state_bytes(session.states) * (max_batch or 1)
            resolved = wanted.resolve(session.layers, room, max_batch or 1, most)
            row = resolved.over((shape.dtype for shape in session.layers), activation_dtype(loaded.model))
            with progress_line(f"{self.name}: ", progress) as show:
                self.composed = with_sketches(row, loaded, session, show)
            asked_for, states = (max_batch, max_length, most), session.states
            max_batch, self.max_length = choose(session.layers, self.composed, self.ledger, *asked_for, states)
            sizes_of = max_batch, self.max_length
            try:
                runtime = Runtime(session.layers, self.composed, self.ledger, *sizes_of, fixed=True, states=states)
            except BudgetError as error:
                wished = (max_batch, most, states)
                raise say_enough(error, session.layers, self.composed, self.ledger, *wished) from None
            undo.callback(runtime.release)
            warn_if_slow(loaded.model, session.layers)
            self.vocabulary, self._layers = session.vocabulary, session.layers
            read_in: int | None = None
            on_gpu = session.device.type == "cuda"
            if deterministic:
                read_in = chunk or (GPU_CHUNK_TOKENS if on_gpu else CHUNK_TOKENS)
                check(session, runtime, read_in, target_ms)
                chunks = ChunkConfig(read_in)
            self.runner = choose_runner(session, runtime, max_batch, sizes, deterministic)
            undo.callback(self.runner.close)
            self.not_captured, self.not_mixed = self.runner.uncaptured, runtime.unmixed()
            key = tier.key(loaded.model, session.layers)
            folder = tier.open(key)
            if folder is not None:
                undo.callback(folder.close)
            self.store = SequenceStore(runtime, key, reuse, folder, read_in)
            between = on_gpu and self.not_captured is None and self._weights is None
            if between:
                self.not_mixed = self.not_mixed or "decode steps are captured, and run between the layers of prompts"
            self.engine = Engine(
                self.runner,
                loaded.tokenizer,
                chunk_policy=chunks.policy(self.composed.exact, on_gpu, len(session.layers) if between else None),
                store=self.store,
                longest=self.max_length,
                ends=end_tokens(loaded.model, loaded.tokenizer),
                sampling=sampling_defaults(loaded.model),
                max_waiting=max_waiting,
                deterministic=deterministic,
            )
            if max_length is None:
                self.engine.scheduler.admission.check_room()
            undo.pop_all()
            for opened in (self.devices.pipeline, self._weights, folder):
                if opened is not None:
                    self.engine.closers.append(opened.close)
        weakref.finalize(self, self.engine.close).atexit = False

    @takes_aliases("LLM.generate")
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in their order.

        prompts: text (used as it is), token ids, chat messages (which go through the chat template), or a `Prefilled`
            that another process has read; one or a list.
        params: one for all or one each. progress: whether a line on stderr shows how far it is; left out, as in `LLM`.

        A prompt that cannot be used raises before anything runs. A request that fails later has finish_reason `error`
        and its error. An interrupt cancels all of them and gives their memory back.
        """
        from coattn.engine.prompts import split, spread
        from coattn.engine.request import join_choices
        from coattn.engine.watch import watching

        listed = split(prompts)
        each = spread(params, len(listed))
        requests = [request for i, prompt in enumerate(listed) for request in self._choices(prompt, each[i])]
        handles: list[Handle] = []
        try:
            handles.extend(self.engine.submit(request, streams=False) for request in requests)
            with watching(self.engine, handles, self.progress if progress is None else progress) as look:
                for handle in handles:
                    while not handle.done:
                        look()
                        self.engine.step()
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        outputs = (handle.output() for handle in handles)
        return [join_choices(list(islice(outputs, one.n))) for one in each]

    @takes_aliases("LLM.chat")
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or many: `generate` for lists of messages with role and content."""
        from coattn.engine.prompts import is_chat, split

        listed = split(messages)
        wrong = [type(each).__name__ for each in listed if not is_chat(each) or each == ""]
        if wrong:
            raise InputError(f"LLM.chat takes messages with role and content, not {wrong[0]}.", "Use LLM.generate.")
        return self.generate(listed, params, progress=progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The answer to one prompt in parts, one for each token. Stopping early cancels the request."""
        return self.submit(prompt, params).stream()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        notify: Callable[[], None] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        guide: Guide | None = None,
        streams: bool = True,
        salt: bytes = b"",
        session: int | None = None,
    ) -> Handle:
        """Puts a request in line, from any thread, also while others run. Iterate the handle or ask for its result.

        notify: called by the thread that steps whenever there is something new to `poll`; it must be quick.
        priority: a lower number is served first, and keeps its memory when there is not enough for all.
        timeout: seconds after which the request fails with a DeadlineError, with what it has so far.
        guide: says before each token which ones may come.
        streams: whether the handle keeps parts; else there is only its result, and `notify` is called at the end alone.
        salt: only requests of the same salt share what is stored. session: the number of the session that asks.
        """
        from coattn.engine.prompts import split, spread

        listed = split(prompt)
        if len(listed) != 1:
            raise InputError(f"There are {len(listed)} prompts, but submit takes one.", "Submit each by itself.")
        if params is not None and getattr(params, "n", 1) > 1:
            raise ConfigError(f"n is {params.n:,}, but submit gives one answer.", "Use LLM.generate, or submit each.")
        check_count("priority", priority, -MOST)
        if timeout is not None:
            check_number("timeout", timeout, 0, above=True)
        deadline = None if timeout is None else time.perf_counter() + timeout
        request = self._prepare(
            listed[0], spread(params, 1)[0], priority=priority, deadline=deadline, salt=salt, session=session
        )
        handle = self.engine.submit(request, streams=streams, notify=notify, guide=guide)
        handle.owner = self
        return handle

    def session(self, name: str | None = None, *, salt: bytes = b"", restore: bool = True) -> Conversation:
        """A conversation in turns, each appended to what is stored.

        name: by which it is known in this engine, and saved; a saved one of that name goes on where it was. Raises
            InputError where its file is damaged, or was written by another model or under another method.
        salt: tenants with different salts have different sessions, and share nothing; saved ones are nobody's but the
            owner's of no salt. restore: whether a saved one goes on.
        """
        return self.conversations.open(self, name, salt, restore)

    def fingerprints(self) -> dict[str, str]:
        """What the model and its tokenizer are. The first call reads every weight."""
        from coattn.hf.fingerprint import fingerprints

        if self._fingerprints is None:
            self._fingerprints = fingerprints(self.model, self.tokenizer)
        return self._fingerprints

    def step(self) -> bool:
        """Does one piece of work. False when there is no request."""
        return self.engine.step()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until there is something to do, or for `timeout` seconds. For a server's loop around `step`."""
        return self.engine.inbox.wait(timeout)

    def warm_up(self, sizes: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Records the decode step for batches of these sizes now rather than when one first runs; all sizes if None.

        Kernels for prompts are chosen and compiled too, and a text that is made up is read and answered where no other
        request runs: so the first request waits for nothing but its own work. The first time on a machine takes a
        minute, since compiled kernels are kept.
        -> one entry for each captured graph: batch size, whether the CPU takes part, seconds. Nothing without a GPU.
        """
        from coattn.engine.runner.rehearse import rehearse
        from coattn.kernels.prompt.warm import warm

        with self.engine.paused():
            warm(self._layers, self.max_length)
            made = self.runner.warm_up(sizes)
            if made and not self.engine.scheduler.running:
                rehearse(self.runner, self.max_length, self.engine.chunk_policy.budget(False))
            return made

    def trace(self) -> StepTrace | None:
        """Where the time of the last decode step went. Waits for a step that runs on another thread."""
        with nullcontext() if self.engine.stepping else self.engine.paused():
            return self.runner.trace()

    def report(self) -> dict[str, Any]:
        """The method, KV bytes per tier now and at most, who runs and waits, and counts since the start.

        chunk: prompt tokens that would be read now between two decode steps.
        cached_tokens: prompt tokens that were stored already; prefix_blocks: blocks that prompts can begin with;
        prefix_evicted: those that were given up; not_shared: why prompts do not share, where they do not.
        copied_bytes: what hits and turns have copied into windows; sequences_moved: those that left the GPU for DRAM.
        disk: of the disk tier, its bytes, the blocks written, skipped, deleted and damaged, the tokens read from it and
        those that were computed sooner (refused), sequences that were put there (parked), what failed on its way to or
        from memory (failed), and both measured speeds.
        weights_gpu, weights_host, weights_moved: bytes of weights in each tier, and what a step brings in over PCIe;
        with weights_on_gpu only.
        devices: what lies on each, with several only.
        deterministic: whether an answer is the same bits whoever else runs.
        captured: whether decode steps are CUDA graphs; not_captured: else the part and the reason.
        audit: under a method that promises an error, what was measured of it: see docs/methods/auto.md; None elsewhere.
        mixed_steps: steps that decoded and read prompts at once; not_mixed: the part and the reason where none does.
        elsewhere_prompts, elsewhere_tokens, elsewhere_failed: what other processes read, where some do.
        between_steps: decode steps between the layers of a prompt.
        """
        scheduler, counts = self.engine.scheduler, self.engine.counts
        names = ("prefill_steps", "prefill_tokens", "decode_steps", "mixed_steps", "between_steps", "new_tokens")
        reasons = ("stop", "length", "error", "cancelled")
        return {
            **self.composed.describe(),
            **self.ledger.describe(),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": counts["preemptions"] + scheduler.preemptions,
            "chunk": self.engine.chunk_policy.budget(any(request.decodes for request in scheduler.running)),
            **{name: counts[name] for name in names},
            "failed_steps": counts["failed_steps"],
            **self.store.describe(),
            "captured": self.not_captured is None,
            "not_captured": self.not_captured,
            "deterministic": self.engine.deterministic,
            **({} if self._weights is None else self._weights.report()),
            **self.devices.report(self.ledger),
            "not_mixed": self.not_mixed,
            **({} if self.elsewhere is None else self.elsewhere.report()),
            "audit": next((audit.report() for audit in self.runner.runtime.audits()), None),
            "requests": {reason: counts[f"requests_{reason}"] for reason in reasons},
        }

    def close(self) -> None:
        """Cancels what is left, gives every byte back and leaves the model as it was. May be called twice."""
        self.engine.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, prompt: Any, params: SamplingParams, **fields: Any) -> Request:
        """fields: others of the request."""
        from coattn.engine.prompts import encode
        from coattn.hf.fingerprint import read_by
        from coattn.hf.prefilled import Prefilled

        params.check_model(self.vocabulary, has_text=self.tokenizer is not None)
        given = prompt if isinstance(prompt, Prefilled) else None
        if given is not None:
            given.check(self._layers, read_by(self.model))
            if self.engine.deterministic:
                raise ConfigError("A prompt that was read elsewhere is not deterministic.", "Give its tokens.")
        ids = encode(prompt, self.tokenizer, self.vocabulary)
        return self.engine.prepare(ids, params, given=given, **fields)

    def _choices(self, prompt: Any, params: SamplingParams) -> list[Request]:
        """A request for each of the answers to a prompt: all but the first find what it has read, if rows share."""
        first, *others = params.choices()
        request = self._prepare(prompt, first)
        again = prompt if request.given is not None else request.prompt
        return [request, *(self._prepare(again, each) for each in others)]
