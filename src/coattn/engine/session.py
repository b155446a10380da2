"""A conversation that goes on where it was: a turn is appended to what is stored, and only its own tokens are read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from coattn.engine.engine import Engine
from coattn.engine.handle import Handle
from coattn.engine.prompts import Prompt, encode, encode_text, render_chat, split
from coattn.engine.request import RequestOutput
from coattn.engine.sampling.params import SamplingParams
from coattn.engine.session_file import SAVED_HINT, Sessions
from coattn.engine.store.sequence_store import SequenceStore
from coattn.errors import ConfigError, InputError, SessionBusyError
from coattn.method.row import Composed

Messages = list[dict[str, Any]]


class SessionHost(Protocol):
    """Runs the turns of sessions: see `LLM`."""

    engine: Engine
    store: SequenceStore
    sessions: Sessions
    composed: Composed
    tokenizer: Any
    vocabulary: int
    max_length: int

    @property
    def submit(self) -> Callable[..., Handle]:
        """Puts a turn in line."""

    def fingerprints(self) -> dict[str, str]:
        """What the model and its tokenizer are."""


class Session(AbstractContextManager["Session"]):
    """Made by `LLM.session`. One turn at a time; several sessions, and other requests, run side by side.

    Between turns it has no slot. Its blocks stay stored as long as running requests leave room, the least recently used
    session's the shortest; a session that has lost them reads its tokens again.
    """

    def __init__(
        self, llm: SessionHost, number: int, name: str | None, salt: bytes, on_close: Callable[[object], None]
    ) -> None:
        """on_close: called with the session."""
        self.llm, self.number, self.name, self.salt = llm, number, name, salt
        self._on_close = on_close
        llm.store.open(number)
        self.closed = False
        self._tokens: list[int] = []
        self._messages: Messages = []
        self._text = ""
        """Of a chat: what the template and the model have written so far, as text."""
        self._turn: tuple[Handle, Messages, str] | None = None
        self._lock = threading.Lock()

    @property
    def tokens(self) -> list[int]:
        """Of all turns so far, answers included."""
        with self._lock:
            self._fold_turn()
            return list(self._tokens)

    @property
    def messages(self) -> Messages:
        """Of a chat: what was said so far."""
        with self._lock:
            self._fold_turn()
            return list(self._messages)

    @property
    def answering(self) -> bool:
        """Whether a turn is not done yet."""
        turn = self._turn
        return turn is not None and not turn[0].done

    def whole(self, prompt: Prompt) -> list[int]:
        """The token ids that `ask` would go on from: the conversation so far, and this."""
        with self._lock:
            self._begin_turn()
            return self._follow(prompt)[0]

    def ask(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """What comes next, and the whole answer to it.

        prompt: text or token ids that follow what was said so far; or chat messages, the new ones alone.
        """
        return self.submit(prompt, params).result()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The same in parts. Stopping early ends the answer there; what it has so far is part of the conversation."""
        return self.submit(prompt, params).stream()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Handle:
        """The same as a handle; options are those of `LLM.submit`."""
        with self._lock:
            self._begin_turn()
            prompts = split(prompt)
            if len(prompts) != 1:
                raise InputError(f"There are {len(prompts)} prompts, but a turn is one.", "Ask one after the other.")
            return self._begin(*self._follow(prompts[0]), params, options)

    def submit_whole(self, ids: Sequence[int], params: SamplingParams | None = None, **options: Any) -> Handle:
        """A turn by the tokens of the whole conversation: what they have in common with the stored is not read."""
        with self._lock:
            self._begin_turn()
            return self._begin(list(ids), [], "", params, options)

    def reset(self) -> None:
        """Forgets the conversation; what is saved stays."""
        with self._lock:
            self._begin_turn()
            self._forget()

    def save(self, name: str | None = None) -> Path:
        """Writes everything to a file, by which a session of that name goes on later, also in another process."""
        with self._lock:
            self._begin_turn()
            name = self.name if name is None else name
            if name is None:
                raise ConfigError("This session has no name.", "Give one: save(name), or LLM.session(name).")
            llm = self.llm
            llm.sessions.path(name)
            with llm.engine.paused():
                parked, tensors = llm.store.export(self.number)
            stored = [] if parked is None else parked.tokens
            for name_of, ids in (("tokens", self._tokens), ("stored", stored)):
                tensors[name_of] = torch.tensor(ids, dtype=torch.int64)
            facts = {
                "made for": llm.fingerprints(),
                "row": _plain(llm.composed.describe()),
                "clean": 0 if parked is None else parked.shareable_tokens,
                "messages": self._messages,
                "text": self._text,
            }
            self.name = name
            return llm.sessions.save(name, tensors, facts)

    def restore(self) -> None:
        """Goes on from the file of its name. Raises InputError, and has changed nothing."""
        with self._lock:
            self._begin_turn()
            assert self.name is not None
            tensors, facts = self.llm.sessions.load(self.name)
            try:
                self._restore(tensors, facts)
            except InputError as error:
                raise InputError(f"Session {self.name!r} cannot go on here: {error.sentence}.", SAVED_HINT) from None
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"Session {self.name!r} is damaged: {error}.", SAVED_HINT) from None

    def close(self) -> None:
        """Lets go of what it has stored. May be called twice."""
        with self._lock:
            if self._turn is not None:
                self._turn[0].cancel()
            self._forget(closes=True)
            self.closed = True
            self._on_close(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(
        self, ids: list[int], messages: Messages, text: str, params: SamplingParams | None, options: dict[str, Any]
    ) -> Handle:
        handle = self.llm.submit(ids, params, salt=self.salt, session=self.number, **options)
        self._turn = handle, messages, text
        return handle

    def _begin_turn(self) -> None:
        """The last turn becomes part of the conversation, unless it failed."""
        if self.closed:
            raise InputError("This session is closed.", "Open another one with LLM.session().")
        if self.answering:
            raise SessionBusyError("This session is still answering.", "Wait for its answer, or cancel it.")
        self._fold_turn()

    def _fold_turn(self) -> None:
        if self._turn is None or self.answering:
            return
        handle, messages, text = self._turn
        self._turn = None
        output = handle.output()
        if output.finish_reason == "error":
            return
        self._tokens = self._said(handle, chat=bool(messages))
        self._messages = [*messages, {"role": "assistant", "content": output.text}] if messages else []
        self._text = text + output.text if messages else ""

    def _said(self, handle: Handle, chat: bool) -> list[int]:
        """The conversation with this turn. As in its text, a stop string is not part of it, nor a chat's stop token.

        So the cache may have more stored than this; the next turn then goes on from the last block that is the same.
        """
        request = handle.request
        tokens = request.tokens(0, request.total)
        if handle.text.stop.stopped:
            kept, rest = handle.text.kept()
            return tokens[: len(tokens) - handle.new_tokens + kept] + encode_text(rest, self.llm.tokenizer)
        stopped = request.finish_reason == "stop" and tokens[-1] in request.params.stop_token_ids
        return tokens[:-1] if chat and stopped else tokens

    def _follow(self, prompt: Any) -> tuple[list[int], Messages, str]:
        """The tokens of the whole conversation with a new turn; of a chat its messages and its text so far."""
        llm, tokenizer = self.llm, self.llm.tokenizer
        if isinstance(prompt, str) and self._tokens:
            return self._tokens + encode_text(prompt, tokenizer), [], ""
        chat = isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt)
        if not chat:
            return self._tokens + encode(prompt, tokenizer, llm.vocabulary), [], ""
        messages = [*self._messages, *(dict(each) for each in prompt)]
        text = render_chat(messages, tokenizer)
        if not self._text or not text.startswith(self._text):
            return encode_text(text, tokenizer), messages, text
        rest, tokens = text[len(self._text) :], self._tokens
        if tokens and tokens[-1] in llm.engine.ends:  # the answer's end is the template's business
            end = tokenizer.decode(tokens[-1:], skip_special_tokens=False)
            rest, tokens = (rest.removeprefix(end), tokens) if rest.startswith(end) else (rest, tokens[:-1])
        return tokens + encode_text(rest, tokenizer), messages, text

    def _restore(self, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
        llm = self.llm
        own, theirs = llm.fingerprints(), facts["made for"]
        for what, mark in own.items():
            if theirs[what] != mark:
                raise InputError(f"it was not written with the same {what}")
        row = _plain(llm.composed.describe())
        if facts["row"] != row:
            raise InputError(f"it was written under method {facts['row']['method']!r} with other parameters")
        tokens, stored = (_ids(tensors.pop(name), llm.vocabulary) for name in ("tokens", "stored"))
        most = max(len(tokens), len(stored))
        if most > llm.max_length:
            raise InputError(f"it has {most:,} tokens, but {llm.max_length:,} is the most")
        clean = facts["clean"]
        if not 0 <= clean <= len(stored):
            raise InputError("its numbers are out of range")
        with llm.engine.paused():
            if stored:
                llm.store.restore(self.number, tensors, stored, clean)
            else:
                llm.store.drop(self.number)
        self._tokens, self._messages, self._text = tokens, list(facts["messages"]), str(facts["text"])

    def _forget(self, closes: bool = False) -> None:
        self._tokens, self._messages, self._text, self._turn = [], [], "", None
        with self.llm.engine.paused():
            (self.llm.store.close if closes else self.llm.store.drop)(self.number)


def _ids(given: torch.Tensor, vocabulary: int) -> list[int]:
    """Raises InputError for what is not token ids."""
    ids = given.tolist() if given.ndim == 1 and not given.is_floating_point() else [-1]
    if not all(0 <= token < vocabulary for token in ids):
        raise InputError("its tokens are not the model's")
    return ids


def _plain(given: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(given, sort_keys=True, default=str))
