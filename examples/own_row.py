"""Run methods of your own, written as rows of a TOML file, and compare their answers with full attention.

Usage: python examples/own_row.py [MODEL]
"""

import sys
from pathlib import Path

import coattn
from coattn.hf.load import load
from coattn.text import default_text

ROWS = Path(__file__).with_name("own_row.toml")

loaded = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2", dtype="float32")
model, tokenizer = loaded.model, loaded.tokenizer
inputs = tokenizer(default_text().body[:1500], return_tensors="pt").to(model.device)

answers = {}
for method in ("full", f"{ROWS}:recent-on-gpu", f"{ROWS}:short-memory"):
    with coattn.attach(model, method) as attachment:
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        report = attachment.report()
    name = report["method"]
    answers[name] = out[0, inputs["input_ids"].shape[1] :].tolist()
    same = sum(a == b for a, b in zip(answers[name], answers["full"], strict=False))
    print(
        f"{name}: exact {report['exact']}, GPU tier {report['gpu_kv_peak']:,} bytes, DRAM {report['host_kv_peak']:,} "
        f"bytes, {same} of {len(answers['full'])} tokens as under full attention"
    )
