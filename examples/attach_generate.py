"""Ask about a fact in a long text while almost all of its KV cache lies in DRAM.

Usage: python examples/attach_generate.py [MODEL]
"""

import sys

import coattn
from coattn.hf.load import load
from coattn.text import default_text
from coattn.units import format_bytes

GPU_KV = "4MiB"  # about a sixth of what this text needs in bfloat16

loaded = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
model, tokenizer = loaded.model, loaded.tokenizer

document = default_text().body[:4000]
cut = document.index("\n\n", 1500)
fact = "Remember this: the access code of the northern lighthouse is 58213."
question = "What is the access code of the northern lighthouse? Answer with the number."
message = f"{document[:cut]}\n\n{fact}{document[cut:]}\n\n{question}"
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": message}], add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(model.device)

with coattn.attach(model, "offload", gpu_kv=GPU_KV) as attachment:
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    report = attachment.report()

read = inputs["input_ids"].shape[1]
print(f"read {read} tokens under {report['method']}, exact: {report['exact']}")
print(f"GPU tier: {format_bytes(report['gpu_kv_peak'])} at most, of {GPU_KV}")
print(f"DRAM: {format_bytes(report['host_kv_peak'])}")
print("answer:", tokenizer.decode(out[0, read:], skip_special_tokens=True).strip())
