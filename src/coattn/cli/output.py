"""Where output goes: data on stdout, everything else on stderr."""

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from coattn.errors import CoattnError, InputError
from coattn.provenance import command_line, given_commit

PAGE = 140
"""Columns when the output is not a terminal: files and pipes should not wrap tables at 80."""

out = Console(width=None if sys.stdout.isatty() else PAGE)
err = Console(stderr=True, width=None if sys.stderr.isatty() else PAGE)


def print_json(data: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(data, indent=2, default=str))


def tell(text: str, style: str | None = None) -> None:
    """A line on stderr, as it is."""
    err.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def print_line(text: str) -> None:
    """A line of a result on stdout, as it is."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None, **style: Any) -> None:
    """A table on stdout. The first column is never cut; those whose name begins with `>` are aligned on the right."""
    table = Table(title=title, **style)
    for i, column in enumerate(columns):
        justify: Any = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    out.print(table)


ARGUMENTS = re.compile(r"(?<![-\w'])(gpu_kv|host_kv|max_length|max_batch|max_new_tokens)\b=?")
"""Of the library, that the command line has options for."""


def print_error(error: CoattnError) -> None:
    """One sentence and a hint on stderr, in which arguments of the library are the options they came from."""
    for kind, text in (("error", str(error)), ("hint", error.hint)):
        if text:
            click.echo(f"{kind}: {ARGUMENTS.sub(_option, text)}", err=True)


def _option(match: re.Match[str]) -> str:
    return f"--{match[1].replace('_', '-')}" + (" " if match[0].endswith("=") else "")


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Progress]:
    """A progress bar on stderr, with the time left; nothing where stderr is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        bar.add_task(label, total=total)
        yield bar


class Notices(logging.Handler):
    """The library's warnings as lines on stderr. Those that come while an answer is written wait for its end."""

    waiting: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {self.format(record)}"
        if self.waiting is None:
            print(text, file=sys.stderr)
        else:
            self.waiting.append(text)

    def write(self, piece: str) -> None:
        """Part of an answer."""
        self.waiting = self.waiting or []
        click.echo(piece, nl=False)

    def end(self, newline: bool = False) -> None:
        """The answer is over; newline: its line is not."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            click.echo("\n" * newline, nl=False)
            print(*waiting, sep="\n", end="\n" if waiting else "", file=sys.stderr)


@contextmanager
def notices() -> Iterator[Notices]:
    """While an answer is asked for: it goes to stdout, and what the library has to say to stderr."""
    made, log = Notices(logging.WARNING), logging.getLogger("coattn")
    log.addHandler(made)
    try:
        yield made
    finally:
        log.removeHandler(made)
        made.end(newline=True)


def writable(path: str | None) -> Path | None:
    """A path that a result can be written to, checked before the work starts; its folder is made.

    What is there already is overwritten only if the same command has written it, and a run that was cut off only by
    the very same call.
    """
    if path is None:
        return None
    given_commit()  # refuses a wrong commit before the work
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = not target.exists()
        with target.open("a"):
            pass
        if fresh:
            target.unlink()
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}.", "Choose another path for --out.") from None
    _check_free(target)
    return target


def _check_free(target: Path) -> None:
    hint = "Choose another path, or remove the file."
    picture = target.with_suffix(".png")
    if not target.exists() or not target.stat().st_size:
        if target.suffix == ".json" and picture.is_file() and b"Matplotlib" not in picture.read_bytes()[:1024]:
            raise InputError(f"{picture} is there already, and is not a figure of coattn.", hint)
        return
    if not target.is_file():
        return  # a device or a pipe holds nothing
    command, unfinished = made_by(target)
    words = click.get_current_context().command_path.split()[1:]
    if command is None:
        raise InputError(f"{target} is there already, and is not a result of coattn.", hint)
    if command.split()[1 : 1 + len(words)] != words:
        raise InputError(f"{target} holds a result of another command: {command}.", hint)
    if unfinished and command != command_line():
        raise InputError(f"{target} holds what a run found before it was cut off: {command}.", hint)


CALIBRATED = {b"codebook": "hcattention", b"skew": "infinigen", b"spread": "auto"}
"""What a safetensors file of ours says that it holds -> what made it."""


def made_by(path: Path) -> tuple[str | None, bool]:
    """The command that wrote a file, None where none of ours did; and whether it was cut off."""
    with path.open("rb") as file:
        start = file.read(9)
        size = int.from_bytes(start[:8], "little")
        if start[8:9] == b"{" and size < path.stat().st_size:  # a safetensors file
            file.seek(8)
            head = file.read(size)
            made = (f"coattn calibrate {name}" for form, name in CALIBRATED.items() if b"coattn-" + form in head)
            return next(made, None), False
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None, False
    if not isinstance(result, dict):
        return None, False
    if "traceEvents" in result:
        return "coattn trace", False
    command = result.get("command")
    return command if isinstance(command, str) else None, bool(result.get("unfinished"))


def keep(path: Path | None, **result: Any) -> None:
    """What a long run has found so far, so that nothing is lost if it is cut off; `save` overwrites it."""
    if path is not None:
        path.write_text(json.dumps({"command": command_line(), **result, "unfinished": True}, indent=2) + "\n")


def save(path: Path | None, result: Any) -> None:
    """A result as JSON, where a path was given; says so."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
        tell(f"wrote {path}")
