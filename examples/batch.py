"""Many requests at once: chats, plain text, sampling with seeds, and one that streams while the others run.

Usage: python examples/batch.py [MODEL]
"""

import sys

import coattn
from coattn import SamplingParams
from coattn.units import format_bytes

QUESTIONS = ["What is the capital of France?", "What is the capital of Japan?", "How many days are in a week?"]

with coattn.LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", "cpu", max_batch=4, max_length=512) as llm:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    story = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=1)
    handle = llm.submit("Once upon a time", story)  # runs beside the questions below

    for question, output in zip(QUESTIONS, llm.generate(chats, SamplingParams(max_new_tokens=24)), strict=True):
        print(f"{question} {output.text.strip()} [{output.finish_reason}]")

    print("story:", "".join(part.text for part in handle).replace("\n", " "))
    report = llm.report()
    print(f"{report['new_tokens']} tokens in {report['decode_steps']} decode steps under {report['method']}")
    print(
        f"KV: {format_bytes(report['gpu_kv_bytes'])} in the GPU tier, {format_bytes(report['host_kv_bytes'])} in DRAM"
    )
