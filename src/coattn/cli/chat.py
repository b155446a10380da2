"""`coattn chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.options import EngineOptions, engine_options, length_option, sampling_options
from coattn.cli.output import err
from coattn.errors import InputError

if TYPE_CHECKING:
    from coattn.engine.llm import LLM
    from coattn.tools.chat.partner import Partner


@click.command()
@engine_options
@length_option("conversation")
@click.option("--session", metavar="NAME", help="Continue the session of this name, and save it at the end.")
@click.option("--system", metavar="TEXT", help="Begin the conversation with this system message.")
@sampling_options(1024, 0.7, 0.95)
def chat(
    engine: EngineOptions, max_length: int | None, session: str | None, system: str | None, **sampling: Any
) -> None:
    """Chat with a model. Answers go to stdout, everything else to stderr.

    /help lists the commands: files, other methods, statistics. If messages come from a pipe or a file, the exit code is
    2 if one of them failed.
    """
    from coattn.engine.sampling.params import SamplingParams
    from coattn.tools.chat.talk import Talk

    partner = open_partner(engine, max_length, session)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its history and its editing)
    try:
        talk = Talk(partner, SamplingParams(**sampling), system, read, write, tell)
        talk.run()
    finally:
        partner.close()
    if talk.failed and not sys.stdin.isatty():
        sys.exit(2)  # there is no user who could ask again


def open_partner(engine: EngineOptions, max_length: int | None, session: str | None) -> Partner:
    """An engine for one conversation. The method's settings hold for the first method only."""
    if session is not None:
        from coattn.engine.session_file import Sessions

        Sessions().check(session)  # refuse what cannot be saved before the model is loaded
    _ = engine.row  # the same

    from coattn.engine.llm import LLM
    from coattn.tools.chat.partner import Partner

    loaded = engine.load()
    if not getattr(loaded.tokenizer, "chat_template", None):
        raise InputError(
            f"{loaded.name} has no chat template.",
            "Use a model that was tuned for chats, or continue a text with `coattn generate --raw`.",
        )

    def open_engine(name: str | None) -> LLM:
        own = engine.params if name == engine.method else {}
        options: dict[str, Any] = {**engine.memory, **own}
        return LLM(loaded, name, max_batch=1, max_length=max_length, **options)

    return Partner(open_engine, engine.method, session)


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


def write(piece: str) -> None:
    """Part of an answer."""
    click.echo(piece, nl=False)


def tell(text: str) -> None:
    """What is not part of an answer."""
    err.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
