"""`coattn chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.options import EngineOptions, engine_options, fits, is_given, length_option, sampling_options
from coattn.cli.output import notices, tell
from coattn.errors import ConfigError, InputError
from coattn.serve.settings import KEY

if TYPE_CHECKING:
    from coattn.tools.chat.partner import Partner
    from coattn.tools.chat.server import Server

OF_ENGINE = [each.name for each in fields(EngineOptions) if each.name != "progress"] + ["max_length", "session"]
"""Options of an engine in this process."""
SERVER = "http://127.0.0.1:8000"
"""Where `coattn serve` listens."""
say = partial(tell, style="dim")
"""What is not part of an answer."""
HOW = "/help lists the commands, Ctrl-C stops an answer, /quit or Ctrl-D leaves."


@click.command()
@engine_options
@length_option("conversation")
@click.option("--url", metavar="URL", help=f"Talk to this server. Its API key is read from {KEY}.")
@click.option("--session", metavar="NAME", help="Continue the session of this name, and save it at the end.")
@click.option("--system", metavar="TEXT", help="Begin the conversation with this system message.")
@sampling_options
def chat(engine: EngineOptions, max_length: Any, url: Any, session: Any, system: Any, **sampling: Any) -> None:
    """Chat with a model. Answers go to stdout, everything else to stderr.

    If `coattn serve` runs on this machine at its default port, it answers, unless there is an option for the model, the
    method, memory or the session; else the model is loaded here. /help lists the commands. If messages come from a pipe
    or a file, the exit code is 2 if one of them failed.
    """
    given = [name for name in OF_ENGINE if is_given(name)]
    if url is not None and given:
        option = "set" if given[0] == "settings" else given[0].replace("_", "-")
        raise ConfigError(f"--{option} has no effect on the server at --url.", "Omit one of them.")
    if given:
        _ = engine.row  # refuse what cannot run before anything is imported

    from coattn.engine.sampling.params import SamplingParams
    from coattn.tools.chat.talk import Talk

    with notices() as answer:
        server = None if given else find_server(url, engine.progress)
        partner = server or open_partner(engine, max_length, session)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` its history and its editing)

        def read_next(prompt: str) -> str:
            answer.end()
            return read(prompt)

        try:
            say(f"{partner.greeting()}. {HOW}")
            talk = Talk(partner, SamplingParams(**sampling), system, read_next, answer.write, say)
            talk.run()
        finally:
            partner.close()
    if talk.failed and not sys.stdin.isatty():
        sys.exit(2)  # there is no user who could ask again


def find_server(url: str | None, progress: bool) -> Server | None:
    """The server at `url`; where none is given, one that runs on this machine and needs no key."""
    from coattn.tools.chat.server import Server

    if url is not None:
        return Server(url, os.environ.get(KEY), progress)
    try:
        return Server(SERVER, progress=progress, timeout=1.0)
    except InputError as error:
        if "cannot be reached" not in str(error):  # something is there: say why it is not used
            say(f"There is a server at {SERVER}, but: {error} {error.hint}")
        return None


def open_partner(engine: EngineOptions, max_length: int | None, session: str | None) -> Partner:
    """An engine for one conversation."""
    if session is not None:
        from coattn.engine.session_file import Sessions

        Sessions().check(session)  # refuse what cannot be saved before the model is loaded

    from coattn.engine.llm import LLM
    from coattn.tools.chat.partner import Partner

    if not is_given("model"):
        say(f"Loading {engine.model}; --model takes another.")
    loaded = engine.load(fits("--max-length", max_length, engine.model))
    if not getattr(loaded.tokenizer, "chat_template", None):
        raise InputError(
            f"{loaded.name} has no chat template.",
            "Use a model that was tuned for chats, or continue a text with `coattn generate --raw`.",
        )

    options: dict[str, Any] = {**engine.memory, **engine.params, "progress": engine.progress}
    return Partner(LLM(loaded, engine.method, max_batch=1, max_length=max_length, **options), session)


def read(prompt: str) -> str:
    """A line of standard input; the prompt is for terminals only."""
    try:
        if sys.stdin.isatty():
            return input(prompt)
        line = sys.stdin.buffer.readline().decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("This line is not text (UTF-8).", "Write it in UTF-8.") from None
    if not line:
        raise EOFError
    return line.rstrip("\n")
