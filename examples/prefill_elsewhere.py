"""One process reads a prompt and writes its keys and values to a file; another answers from there under `scout`.

Usage: python examples/prefill_elsewhere.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT = "The capital of France is Paris. The capital of Italy is Rome. " * 30 + "The capital of France is"


def read(path: str) -> None:
    from coattn.hf.load import load
    from coattn.hf.prefilled import prefill

    loaded = load("smollm2")
    prefill(loaded.model, loaded.tokenizer(PROMPT).input_ids).save(path)


def answer(path: str) -> None:
    import coattn
    from coattn.hf.prefilled import Prefilled

    prompt = Prefilled.load(path)
    with coattn.LLM("smollm2", "scout", budget=256, max_length=1024) as llm:
        (found,) = llm.generate(prompt, coattn.SamplingParams(max_new_tokens=4, temperature=0))
        read = llm.report()["prefill_tokens"]
        print(f"{len(prompt.tokens)} tokens handed over, {read} read here: {found.text.strip()}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"read": read, "answer": answer}[sys.argv[1]](sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            for what in ("read", "answer"):
                subprocess.run([sys.executable, __file__, what, str(Path(folder) / "prompt.safetensors")], check=True)
