"""The groups of commands of `coattn-lab`, and options that they share."""

from __future__ import annotations

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True})
def lab() -> None:
    """Measurements of coattn: papers' figures, task suites, peers, driven benchmarks.

    Results name the commit they were made from. COATTN_COMMIT=SHA says it where the source was copied without its
    history.
    """


@lab.group()
def bench() -> None:
    """Measure speed, beside the limits of this machine."""


@lab.group("eval")
def evaluate() -> None:
    """Measure what methods cost in quality."""
