"""The laboratory's command line in this process."""

from __future__ import annotations

from tests.cli.run import Done, run

from coattn_lab.cli.main import main


def coattn_lab(*arguments: str) -> Done:
    """`coattn-lab ARGUMENTS`."""
    return run(main, arguments)
