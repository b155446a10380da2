"""`coattn generate`: a prompt in, an answer out, and what it took."""

import sys
from pathlib import Path
from typing import Any

import click

from coattn.cli.options import EngineOptions, count_option, engine_options, json_option, sampling_options
from coattn.cli.output import notices, print_json, tell
from coattn.errors import ConfigError, InputError
from coattn.text import decode, read_bytes
from coattn.units import format_bytes


@click.command()
@click.argument("prompt", required=False)
@click.option("--file", "file", metavar="FILE", help="Read the prompt from FILE. PROMPT, if given, follows it.")
@engine_options
@sampling_options
@count_option("--top-k", None, "Sample from this many of the most likely tokens.")
@count_option("--seed", None, "Seed of the sampling, to repeat an answer.", 0)
@click.option("--raw", is_flag=True, help="Send the prompt unchanged, without the model's chat template.")
@click.option("--fidelity", is_flag=True, help="Also measure how far the answer's predictions are from full attention.")
@json_option
def generate(
    engine: EngineOptions, prompt: str | None, file: str | None, raw: bool, fidelity: bool, as_json: bool, **given: Any
) -> None:
    """Answer a prompt, streaming the text to stdout.

    The prompt is PROMPT, a file, or standard input. At the end, stderr shows tokens per second, the bytes of the KV
    cache in GPU memory and DRAM and, with --fidelity, the difference from full attention.
    """
    row, params = engine.row, engine.params
    text = read_prompt(prompt, file)
    asked = {name: value for name, value in given.items() if value is not None}
    check_sampling(asked, 1)

    from coattn.engine.chunk_policy import GPU_CHUNK_TOKENS
    from coattn.engine.llm import LLM
    from coattn.engine.prompts import encode
    from coattn.engine.sampling.params import DEFAULT_NEW_TOKENS, SamplingParams
    from coattn.engine.watch import stream
    from coattn.hf.families import check_length, room
    from coattn.hf.forward import sampling_defaults
    from coattn.hf.sketches import with_sketches
    from coattn.method.row import compose
    from coattn.method.table import find_method

    ids: list[int] = []

    def check(tokenizer: Any, most: int | None) -> None:
        check_length("--max-new-tokens", asked.get("max_new_tokens"), engine.model, most)
        if tokenizer is not None:
            plain = raw or not getattr(tokenizer, "chat_template", None)
            said: Any = text if plain else [{"role": "user", "content": text}]
            ids[:] = encode(said, tokenizer, len(tokenizer))
            room(engine.model, most, len(ids))

    loaded = engine.load(check)
    check_sampling(asked, sampling_defaults(loaded.model).get("temperature", 0))
    most, devices = asked.get("max_new_tokens", DEFAULT_NEW_TOKENS), engine.memory.get("devices", [loaded.model.device])
    on_gpu = str(devices[0]).startswith("cuda") or engine.weights_on_gpu is not None
    options: dict[str, Any] = {
        "max_batch": 1,
        "max_length": min(len(ids) + most, loaded.positions or len(ids) + most),
        "chunk": GPU_CHUNK_TOKENS if on_gpu else len(ids),  # without a GPU the prompt is read at once
        "progress": engine.progress,
    }
    with notices() as answer, LLM(loaded, row, **options, **engine.memory, **params) as llm:
        handle = llm.submit(ids, SamplingParams(**asked))
        for part in stream(llm.engine, handle, engine.progress):
            if part.text and not as_json:
                answer.write(part.text)
        result, report = handle.output(), llm.report()
        if result.error is not None:
            raise result.error
        if not as_json:
            answer.write("")  # one without text has its line, too
    first = result.first_token_s or 0.0
    summary = {
        "text": result.text,
        "prompt_tokens": len(ids),
        "new_tokens": len(result.token_ids),
        "finish_reason": result.finish_reason,
        "prefill_s": round(first, 4),
        "decode_s": round((result.total_s or 0.0) - first, 4),
        "tokens_per_s": None if result.tokens_per_s is None else round(result.tokens_per_s, 3),
        "model": loaded.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        **report,
        "fidelity": None,
    }
    if fidelity:
        composed = with_sketches(compose(row or find_method(report["method"]), **params), loaded)
        forced = {"gpu_kv": engine.gpu_kv, "host_kv": engine.host_kv, **composed.params}
        summary["fidelity"] = measure(loaded, ids, result.token_ids, composed.method, **forced)
    if as_json:
        print_json(summary)
        return
    if result.finish_reason == "length":
        end = f"--max-new-tokens {most}" if len(result.token_ids) >= most else "the model's context length"
        tell(f"The answer was cut off: it reached {end}.", "dim")
    tell(footer(summary), "dim")


def check_sampling(asked: dict[str, Any], otherwise: float) -> None:
    """Raises ConfigError for filters that change nothing. otherwise: the temperature where there is none."""
    if asked.get("temperature", otherwise) == 0 and asked.keys() & {"top_p", "top_k"}:
        raise ConfigError(
            "--top-p and --top-k have no effect at --temperature 0.", "Set --temperature above 0 to sample."
        )


def read_prompt(prompt: str | None, file: str | None) -> str:
    """PROMPT, the file, both, or standard input."""
    parts = []
    if file is not None and not file.strip():
        raise InputError("--file is empty.", "Give the path of a text file.")
    if file is not None:
        parts.append(decode(read_bytes(Path(file)), file))
    if prompt is not None:
        parts.append(prompt)
    if not parts and not sys.stdin.isatty():
        parts.append(decode(sys.stdin.buffer.read(), "standard input"))
    text = "\n\n".join(parts)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError("The prompt is not text (UTF-8).", "Write it in UTF-8, or give a file.")
    if not text.strip():
        raise InputError("There is no prompt.", "Give it as an argument, with --file, or on standard input.")
    return text


def measure(loaded: Any, prompt: Any, answer: Any, row: Any, **arguments: Any) -> dict[str, Any]:
    """KL and top-1 agreement of the answer's predictions, with the answer forced under the method and under full."""
    import torch

    from coattn.tools.evaluate.fidelity import compare
    from coattn.tools.evaluate.forced import force

    ids = torch.tensor([*prompt, *answer])
    own = force(loaded.model, ids, len(prompt), row, **arguments)
    return compare(own, force(loaded.model, ids, len(prompt), "full"))


def footer(summary: dict[str, Any]) -> str:
    """The last line for people."""
    speed = "" if summary["tokens_per_s"] is None else f", {summary['tokens_per_s']:.1f} tokens/s"
    line = (
        f"{summary['method']} ({'exact' if summary['exact'] else 'lossy'}): {summary['prompt_tokens']:,} tokens read "
        f"in {summary['prefill_s']:.2f} s, {summary['new_tokens']} written{speed}; KV at most "
        f"{format_bytes(summary['gpu_kv_peak'])} in the GPU tier, {format_bytes(summary['host_kv_peak'])} in DRAM"
    )
    if summary["fidelity"]:
        line += f"; fidelity to full: KL {summary['fidelity']['kl']:.2g}, top-1 {summary['fidelity']['top1']:.1%}"
    audit = summary.get("audit")
    if audit and audit["audits"]:
        low_high = "" if audit["error_95"] is None else " (95%: {:.2g} to {:.2g})".format(*audit["error_95"])
        line += (
            f"; audited error {audit['error']:.2g}{low_high} of {audit['error_target']:.2g} allowed, missed mass "
            f"{audit['missed_mass']:.2%}, {audit['audits']} cases"
        )
        if audit["over_target"]:
            line += f"; the error is {audit['over_target']:.2g} times what the quality allows"
    return line
