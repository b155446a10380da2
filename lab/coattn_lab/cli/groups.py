"""The groups of commands of `coattn-lab`, and options that they share."""

from __future__ import annotations

from typing import Any

import click

from coattn.cli.evaluate import text_options


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True})
def lab() -> None:
    """Measurements of coattn itself: papers' figures, task suites, peers, driven benchmarks.

    Results name the commit they were made from. COATTN_COMMIT=SHA says it where the source was copied without its
    history.
    """


@lab.group()
def bench() -> None:
    """Measure speed, beside the limits of this machine."""


@lab.group("eval")
def evaluate() -> None:
    """Measure what methods cost in quality."""


def resumed_options(command: Any) -> Any:
    """`text_options` of a command whose --out goes on from a run that was cut off."""
    return text_options(command)
