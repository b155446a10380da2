"""Runs RULER's own generators, from the package `nvidia-long-context-eval`, in a process of their own.

`python -m coattn_lab.evaluate.tasks.ruler_child JOB`: a job is JSON with `tokenizer` (a tokenizer.json), `task`,
`lengths`, `samples`, `seed` and `most` (no prompt is longer). For each length one line of JSON on stdout: the
generator's rows, and how its prompt is put together. The generators are scripts that read their arguments
when they are run, keep what they make in a file, and print as they go; hence the process.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any


class Counter:
    """Cuts texts into tokens with the model's own tokenizer: what the generators ask of one."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(path)

    def text_to_tokens(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found


def main(job: dict[str, Any]) -> None:
    """Makes the prompts of one task at every length."""
    import long_context_eval
    import yaml
    from long_context_eval.data import tokenizer as tokenizers_of_theirs
    from long_context_eval.data.synthetic import constants

    root = Path(long_context_eval.__path__[0])
    folder = root / "data" / "synthetic"
    sys.path[:0] = [str(folder), str(root / "data")]  # they import each other by bare names
    counter = Counter(job["tokenizer"])
    tokenizers_of_theirs.select_tokenizer = lambda _kind, _path: counter
    sys.modules["tokenizer"] = tokenizers_of_theirs
    task = yaml.safe_load((root / "synthetic.yaml").read_text(encoding="utf-8"))[job["task"]]
    base = constants.TASKS[task["task"]]
    if task["args"].get("type_haystack") == "essay":
        give_sentences(folder / "json" / "PaulGrahamEssays.json")
    for length in job["lengths"]:
        top = job.get("most") or length
        rows = generate(folder / f"{task['task']}.py", task["args"], base, min(length, top), job)
        made = {"length": length, "rows": rows, "template": base["template"], "prefix": base["answer_prefix"]}
        print(json.dumps({**made, "new_tokens": base["tokens_to_generate"]}), flush=True)


def generate(
    script: Path, more: dict[str, Any], base: dict[str, Any], length: int, job: dict[str, Any]
) -> list[dict[str, Any]]:
    """One run of one script."""
    with tempfile.TemporaryDirectory() as scratch:
        given = {
            "save_dir": scratch,
            "save_name": "made",
            "tokenizer_path": "given",
            "tokenizer_type": "hf",
            "max_seq_length": length,
            "tokens_to_generate": base["tokens_to_generate"],
            "num_samples": job["samples"],
            "random_seed": job["seed"],
            "template": base["template"] + base["answer_prefix"],
            **more,
        }
        sys.argv = [str(script), *(str(word) for name, value in given.items() for word in (f"--{name}", value))]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(str(script), run_name="__main__")
        lines = (Path(scratch) / "made" / "validation.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def give_sentences(essays: Path) -> None:
    """NLTK finds sentences by a model that is a download of its own; without it, one is learned from the essays."""
    import nltk.tokenize
    from nltk.tokenize import punkt

    try:
        nltk.tokenize.sent_tokenize("One. Two.")
    except LookupError:
        learned = punkt.PunktTrainer(json.loads(essays.read_text(encoding="utf-8"))["text"]).get_params()
        splitter = punkt.PunktSentenceTokenizer(learned)
        nltk.tokenize.sent_tokenize = splitter.tokenize  # the scripts import it when they run


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
