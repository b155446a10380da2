"""Answers that must have a form: JSON schemas, regular expressions and grammars, by llguidance.

The mask of the next token is made on another thread while the model works on the step before it.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from torch import Tensor

from coattn.engine.llm import LLM
from coattn.errors import InputError
from coattn.serve.errors import invalid
from coattn.serve.schema.base import ResponseFormat

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to lay JSON out: a small model that may write any space writes spaces until it is cut off."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
"""Of llguidance's own measures: about 10 ms to compile, 5 ms for a mask, 40 MB. Its defaults allow ten times that."""
MAX_GRAMMARS = 32
"""Compiled grammars that are remembered."""

SENTENCES = {
    "NoExtensionBias": "no text that ends has it",
    "LexerTooComplex": "its words are too complex",
    "ParserTooComplex": "its rules are too complex",
}
"""Words of llguidance for what ends an answer, and what they mean."""
SIMPLER = "Simplify the schema or the grammar."


class Grammars:
    """Compiles what requests ask for, within limits, and remembers it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._threads = ThreadPoolExecutor(2, "coattn-guide")
        self._lock = threading.Lock()
        self._tokens: tuple[Any, LLTokenizer] | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, wanted: ResponseFormat | None, llm: LLM) -> Callable[[], MatcherGuide] | None:
        """-> makes a guide for one answer; None where any text will do. Raises ApiError 400. May take a second."""
        if wanted is None or wanted.type == "text":
            return None
        return self._guide(self._grammar(wanted), llm, "response_format")

    def lark(self, grammar: str, llm: LLM, param: str = "response_format") -> Callable[[], MatcherGuide]:
        """The same for a grammar of ours. Raises ApiError 400 that names `param`."""
        return self._guide(str(LLMatcher.grammar_from_lark(grammar)), llm, param)

    def _guide(self, grammar: str, llm: LLM, param: str) -> Callable[[], MatcherGuide]:
        """grammar: as llguidance takes it."""
        with self._lock:
            matcher = self._matcher(grammar, llm, param)
        return lambda: MatcherGuide(matcher.deep_copy(), llm.vocabulary, self._threads)

    def schema(self, wanted: ResponseFormat | None) -> Any:
        """The JSON schema that an answer must meet; None where it need not be JSON. Raises ApiError 400."""
        if wanted is None or wanted.type not in ("json_object", "json_schema"):
            return None
        return json.loads(self._given(wanted))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _grammar(self, wanted: ResponseFormat) -> str:
        text = self._given(wanted)
        if wanted.type == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        if wanted.type == "grammar":
            try:
                return str(LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text))
            except (GbnfToLarkError, RecursionError):
                raise invalid("response_format.grammar", "The grammar is neither Lark nor GBNF.") from None
        return str(LLMatcher.grammar_from_json_schema(text, overrides=FORM))

    def _given(self, wanted: ResponseFormat) -> str:
        given: Any = {"type": "object"}
        if wanted.type == "json_schema":
            given = None if wanted.json_schema is None else wanted.json_schema.schema_
        elif wanted.type in ("regex", "grammar"):
            given = getattr(wanted, wanted.type)
        param = f"response_format.{wanted.type}"
        if given is None:
            raise invalid(param, f"response_format of type {wanted.type} needs its {wanted.type}.")
        text = given if isinstance(given, str) else json.dumps(given)
        self.check_size(text, param, wanted.type)
        return text

    def check_size(self, text: str, param: str, what: str) -> None:
        """Raises ApiError 400 for what is too long."""
        if len(text) > self.most:
            raise invalid(param, f"The {what} has {len(text):,} characters, but {self.most:,} is the most.")

    def _matcher(self, grammar: str, llm: LLM, param: str) -> LLMatcher:
        if self._tokens is None or self._tokens[0] is not llm.tokenizer:
            self._tokens = (llm.tokenizer, _tokens(llm))
            self._kept.clear()
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar]
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        made = LLMatcher(self._tokens[1], grammar, log_level=0, limits=limits)
        for _ in range(2):  # copies share what they have built, and what is too large may fail the second time only
            trial = made.deep_copy()
            if not trial.is_error():
                trial.compute_bitmask()
            if trial.is_error():
                raise invalid(param, f"This form cannot be used: {_said(trial)}.")
        self._kept[grammar] = made
        if len(self._kept) > MAX_GRAMMARS:
            self._kept.popitem(last=False)
        return made


class MatcherGuide:
    """Which tokens may come next in one answer."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, threads: ThreadPoolExecutor) -> None:
        self._matcher, self._threads = matcher, threads
        self._size = -(-vocabulary // 32) * 4
        self._next: Future[Tensor] = threads.submit(self._make)

    def mask(self) -> Tensor:
        return self._next.result()

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise InputError(f"The answer left its form: {_said(self._matcher)}.", SIMPLER)
        self._next = self._threads.submit(self._make)

    def _make(self) -> Tensor:
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise InputError(f"The answer's form is too complex: {_said(self._matcher)}.", SIMPLER)
        return torch.frombuffer(bytearray(bits.ljust(self._size, b"\0")[: self._size]), dtype=torch.int32)


def _said(matcher: LLMatcher) -> str:
    said = re.split(r" \d+ \| ", " ".join(matcher.get_error().split()))[0][:300].rstrip(".")  # the source follows
    return next((words for name, words in SENTENCES.items() if said.startswith(name)), said)


def _tokens(llm: LLM) -> LLTokenizer:
    backend = getattr(llm.tokenizer, "backend_tokenizer", None)
    if backend is None or not llm.engine.ends:
        raise invalid("response_format", "Answers of a given form need a fast tokenizer and an end token.")
    plain = copy.copy(backend)
    plain.no_padding()
    plain.no_truncation()
    try:
        return LLTokenizer(plain.to_str(), n_vocab=llm.vocabulary, eos_token=sorted(llm.engine.ends))
    except ValueError as error:  # a tokenizer of a kind that it does not know, such as one without a decoder
        raise invalid("response_format", f"This model's tokenizer cannot guide answers: {error}.") from None
