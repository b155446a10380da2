"""`coattn`: the command group, and the one place where errors become exit codes."""

import errno
import os
import re
import sys

import click

from coattn import provenance
from coattn._version import __version__
from coattn.aliases import OPTIONS_INSTEAD
from coattn.cli import eval_needle, eval_windows
from coattn.cli.bench import bench
from coattn.cli.calibrate import calibrate
from coattn.cli.chat import chat
from coattn.cli.demo import demo
from coattn.cli.doctor import doctor
from coattn.cli.evaluate import evaluate
from coattn.cli.generate import generate
from coattn.cli.methods import methods
from coattn.cli.models import models
from coattn.cli.output import print_error
from coattn.cli.plan import plan
from coattn.cli.serve import serve
from coattn.cli.sessions import sessions
from coattn.cli.trace import trace
from coattn.errors import BudgetError, CoattnError, ConfigError, InputError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of a place that takes no more."""
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""What PyTorch says on a CPU and on a GPU."""
PATHS = (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of a path that somebody gave."""


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(context_settings=SETTINGS)
@click.version_option(__version__, message="coattn %(version)s")
def cli() -> None:
    """Language models on contexts whose KV cache does not fit in GPU memory.

    The KV cache lives in tiers, GPU and CPU each attend to their part, and the partial results are merged exactly.
    """


__all__ = ["cli", "eval_needle", "eval_windows", "main"]

COMMANDS = [doctor, methods, models, generate, serve, chat, sessions, evaluate, bench, plan, calibrate, trace, demo]
for command in COMMANDS:
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    run_group(cli, "coattn", arguments)


def run_group(group: click.Group, name: str, arguments: list[str] | None = None) -> None:
    """Runs a group of commands. Exit code 2 and one sentence with a hint for anything the user can mend."""
    provenance.arguments[:] = [name, *(sys.argv[1:] if arguments is None else arguments)]
    try:
        sys.exit(group.main(arguments, name, standalone_mode=False) or 0)
    except CoattnError as error:
        print_error(error)
        sys.exit(2)
    except click.UsageError as error:
        where, said = name if error.ctx is None else error.ctx.command_path, error.format_message()
        if said.startswith("Usage: "):  # a group without a command: its help is all there is to say
            click.echo(said, err=True)
        else:
            said, *meant = re.split(r" \(?(?=Did you mean )", said, maxsplit=1)
            if isinstance(error, click.NoSuchOption) and where.endswith(" serve"):
                meant = [OPTIONS_INSTEAD[error.option_name]] if error.option_name in OPTIONS_INSTEAD else meant
            hints = [*(each.removesuffix(")") for each in meant), f"`{where} --help` shows what it takes."]
            print_error(ConfigError(said + ("" if said.endswith((".", "?")) else "."), " ".join(hints)))
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped.", err=True)
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        print_error(BudgetError("This needs more memory than there is.", "Lower the length, the batch or the budgets."))
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno in FULL:
            hint = "Make room, or write somewhere else."
            print_error(InputError(f"Output cannot be written: {error.strerror}.", hint))
        elif isinstance(error, PATHS) and isinstance(error.filename, str | bytes):
            name = os.fsdecode(error.filename)
            print_error(InputError(f"{name} cannot be used: {error.strerror}.", "Check the path and its permissions."))
        else:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be written would fail again at the end
        sys.exit(2)
