"""`coattn serve`: an engine behind OpenAI's API."""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import TYPE_CHECKING, Any

import click

from coattn.aliases import ALWAYS, SAME_OPTIONS
from coattn.cli.options import EngineOptions, Number, count_option, engine_options, fits, length_option
from coattn.cli.output import tell
from coattn.cli.roles import RoleOptions, role_options, run_prefill
from coattn.errors import BudgetError, ConfigError
from coattn.part import MOST_BATCH
from coattn.serve.settings import KEY, Settings, read_keys
from coattn.serve.steady import Steady
from coattn.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from coattn.engine.llm import LLM
    from coattn.hf.load import Loaded

ORIGIN = re.compile(r"\*|https?://[^/\s?#]+")
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
ENGINE = ("max_batch", "max_length", "chunk", "target_ms", "deterministic", "max_waiting", "disk_memory")
"""Options that `LLM` has under the same names."""
SETTINGS = ("host", "port", "names", "origins", "drain", "stall", "key_requests", "key_tokens", "traces")
"""Options that are fields of `Settings`."""
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


class Serve(click.Command):
    """Takes the options of vLLM's server that mean the same under their names there."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parts = (each.partition("=") for each in args if each not in ALWAYS)
        return super().parse_args(ctx, ["".join((SAME_OPTIONS.get(part[0], part[0]), *part[1:])) for part in parts])


@click.command(cls=Serve)
@engine_options
@count_option(
    "--max-batch",
    None,
    "Requests that run at the same time.  [default: 16, fewer where memory is short]",
    1,
    MOST_BATCH,
)
@length_option("sequence, prompt and answer,")
@count_option("--chunk", None, "Prompt tokens read between two decode steps.  [default: chosen by the engine]")
@click.option(
    "--target-ms",
    type=Number(0, min_open=True),
    help="Time between two tokens that holds while prompts are read.  [default: 2.5 times that without]",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Give a greedy answer the same bits whoever else asks; slower; for full, cpu and offload.",
)
@count_option("--max-waiting", 256, "Requests that may wait; further ones get a 503.", 0)
@count_option("--key-requests", None, "Answers that each API key may wait for at a time.  [default: no limit]", 1)
@count_option(
    "--key-tokens",
    None,
    "Tokens a minute computed for each API key; more get a 429.  [default: no limit]",
    1,
)
@click.option("--no-reuse", is_flag=True, help="Do not share the KV cache of prompts that begin alike.")
@click.option("--disk-cache", metavar="DIR", help="Keep KV blocks in this folder too; they outlast the server.")
@click.option("--disk-memory", metavar="SIZE", help="Limit the size of --disk-cache, such as 64GiB.  [default: 16GiB]")
@click.option("--host", default="127.0.0.1", help="Listen on this address.")
@count_option("--port", 8000, "Listen on this port; 0 takes a free one.", 0, 65535)
@click.option(
    "--api-key-file", metavar="FILE", help=f"Require one of the API keys in FILE, one a line, or the key in {KEY}."
)
@click.option("--no-key", is_flag=True, help="Let other machines use the server without an API key.")
@click.option(
    "--name", "names", multiple=True, metavar="NAME", help="Serve the model under this name. May be repeated."
)
@click.option(
    "--origin", "origins", multiple=True, metavar="URL", help="Allow web pages of this origin (CORS). May be repeated."
)
@click.option("--max-body", default="32MiB", metavar="SIZE", help="Refuse request bodies longer than this.")
@click.option(
    "--timeout", type=Number(0, min_open=True), help="End a request after this many seconds.  [default: no limit]"
)
@click.option("--drain", default=30.0, type=Number(0), help="Seconds that running requests get after SIGTERM.")
@click.option(
    "--stall",
    default=120.0,
    type=Number(0, min_open=True),
    help="Fail the requests of a step that takes longer, in seconds.",
)
@click.option(
    "--keep-billing-line", is_flag=True, help="Leave the billing line in that Claude Code sends with each call."
)
@click.option(
    "--move-line",
    "moved",
    multiple=True,
    metavar="REGEX",
    help="Move lines of system messages that begin like this behind the last message. May be repeated.",
)
@click.option("--sort-tools", is_flag=True, help="Tell the model of tools in one order, whatever order they come in.")
@click.option(
    "--warm-up/--no-warm-up",
    default=True,
    show_default=True,
    help="Compile kernels and capture the decode steps as CUDA graphs before the first request.",
)
@click.option("--traces", metavar="URL", help="Send OpenTelemetry spans of requests to this OTLP collector.")
@click.option("--verbose", is_flag=True, help="Also log debug messages.")
@click.option("--no-access-log", is_flag=True, help="Do not log a line for each request.")
@role_options
def serve(engine: EngineOptions, part: RoleOptions, **options: Any) -> None:
    """Serve a model over HTTP with OpenAI's and Anthropic's API, and a page at /.

    /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /tokenize, /detokenize, /health,
    /ready, /metrics, /v1/coattn/status and /v1/coattn/live. After SIGTERM running requests may end; a second SIGTERM
    aborts them.

    With --role prefill there is no HTTP: this process reads prompts for processes with --role decode.
    """
    part.check()
    chunk, host, keyless = options["chunk"], options["host"], options["no_key"]
    if part.role == "prefill":
        start_logging(options["verbose"])
        run_prefill(part, engine, chunk, options["drain"])
        return
    check_serve()
    row, params, keys = engine.row, engine.params, read_keys(options["api_key_file"])
    parse_bytes(options["disk_memory"], "--disk-memory")
    if options["disk_cache"] is None and options["disk_memory"] is not None:
        raise ConfigError("--disk-memory needs --disk-cache.", "Give both, or neither.")

    import asyncio

    from coattn.serve.lifecycle import Service
    from coattn.transfer.address import is_local

    if not keys and not keyless and not is_local(host):
        raise ConfigError(
            f"Anyone who can reach {host} could use this server, because it has no API key.",
            f"Give --api-key-file or set {KEY}; or allow it with --no-key.",
        )
    if not all(name.strip() for name in options["names"]):
        raise ConfigError("--name is empty.", "Give the name that clients send as `model`, or omit --name.")
    for origin in options["origins"]:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--origin is {origin!r}, which is not an origin.", "Give one such as https://chat.example."
            )
    if options["traces"] is not None:
        check_traces(options["traces"])
    if options["disk_cache"] is not None and options["no_reuse"]:
        raise ConfigError("--disk-cache keeps what prompts share, but --no-reuse is given.", "Leave one of them out.")
    settings = Settings(
        keys=keys,
        max_body=parse_bytes(options["max_body"], "--max-body") or 0,
        request_timeout=options["timeout"],
        steady=Steady(not options["keep_billing_line"], patterns(options["moved"]), options["sort_tools"]),
        **{name: options[name] for name in SETTINGS},
    )
    limits = {name: options[name] for name in ENGINE}
    start_logging(options["verbose"])
    if options["no_access_log"]:
        logging.getLogger("coattn.serve.gate").setLevel(logging.WARNING)
    loaded: list[Loaded] = []

    def open_engine() -> LLM:
        from coattn.engine.llm import LLM

        first = not loaded
        if first:  # after a failure the weights are still there
            loaded.append(engine.load(fits("--max-length", options["max_length"], engine.model)))
        arguments = {**engine.memory, **limits, "disk": options["disk_cache"], "reuse": not options["no_reuse"]}
        llm = LLM(loaded[0], row, **arguments, **params)
        try:
            llm.engine.scheduler.admission.check_room()  # else no request could be answered
        except BudgetError:
            llm.close()
            raise
        part.attach(llm, check=first)
        if options["warm_up"]:
            llm.warm_up()
        return llm

    def say(llm: LLM) -> None:
        name, size = llm.composed.method.name, f"{llm.max_length:,} tokens, {llm.runner.slots} at a time"
        where = f"a chat is at {url}/, OpenAI's API at {url}/v1, Anthropic's at {url}"
        if disk := llm.store.describe_disk():
            held = f"{format_bytes(disk['bytes'])} of {format_bytes(disk['limit_bytes'])}"
            lost = f"; under {name} prompts share nothing, so none is kept: {disk['unshared']}"
            tell(f"disk cache: {options['disk_cache']}, {held}{lost if disk['unshared'] else ''}")
        tell(f"ready: {llm.name} under {name}, {size}; {where}")

    service = Service(settings, open_engine)
    service.engine.opened = say
    url = f"http://{f'[{host}]' if ':' in host else host}:{service.port}"
    tell(f"listening on {url}\nloading {engine.model}; requests get a 503 meanwhile")
    code = asyncio.run(service.run())
    if code:
        raise SystemExit(code)


def patterns(given: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Raises ConfigError for what is not a regular expression."""
    try:
        return tuple(map(re.compile, given))
    except re.error as error:
        raise ConfigError(f"--move-line is not a regular expression: {error}.", "Give one such as 'Date: '.") from None


def check_serve() -> None:
    """Raises ConfigError where packages of the extra `serve` are not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Serving needs {', '.join(missing)}, which is not installed.",
            f'Run `pip install {" ".join(missing)}`, or `pip install ".[serve]"` in a checkout of coattn.',
        )


def check_traces(url: str) -> None:
    """Raises ConfigError where spans cannot be sent."""
    if not re.match(r"https?://[^/\s]", url):
        raise ConfigError(
            f"--traces is {url!r}, which is no address.", "Give one such as http://127.0.0.1:4318/v1/traces."
        )
    try:
        found = importlib.util.find_spec("opentelemetry.sdk") and importlib.util.find_spec(EXPORTER)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(
            "--traces needs OpenTelemetry, which is not installed.",
            'Run `pip install ".[traces]"` in a checkout of coattn.',
        )


def start_logging(verbose: bool) -> None:
    """Log lines on stderr. None of them holds a prompt or an answer."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    level = logging.DEBUG if verbose else logging.INFO
    logging.getLogger("coattn").setLevel(level)
