"""How far do the predictions of a method stray from full attention? One text, several methods.

Usage: python examples/compare_fidelity.py [MODEL]
"""

import sys

from coattn.hf.load import load
from coattn.text import default_text
from coattn.tools.evaluate.fidelity import compare
from coattn.tools.evaluate.forced import force

LENGTH, DECODE = 256, 8
CASES = [
    ("offload", {}),
    ("cpu", {}),
    ("streaming", {"sinks": 4, "recent": 124}),
    ("streaming", {"sinks": 4, "recent": 28}),
]

loaded = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2", dtype="float32")
ids = loaded.tokenizer(default_text().body[:6000], return_tensors="pt").input_ids[0, :LENGTH]

full = force(loaded.model, ids, LENGTH - DECODE, "full")
print(f"{'method':<10} {'parameters':<28} {'KL, nats':>9} {'top-1':>6}")
for method, params in CASES:
    result = compare(force(loaded.model, ids, LENGTH - DECODE, method, **params), full)
    shown = " ".join(f"{name}={value}" for name, value in params.items())
    print(f"{method:<10} {shown:<28} {result['kl']:>9.2g} {result['top1']:>6.1%}")
