"""Two questions about a text that Transformers' own `generate` reads once, its KV cache in DRAM.

Usage: python examples/native_cache.py
"""

import torch

import coattn
from coattn.hf.load import load
from coattn.text import default_text

loaded = load("smollm2")  # or AutoModelForCausalLM and AutoTokenizer
model, tokenizer = loaded.model, loaded.tokenizer
body = default_text().body[:4000]
document = f"{body}\n\nPierre lives in Paris. Anna works as a nurse in Oslo.\n"
text = tokenizer(document, return_tensors="pt").input_ids.to(model.device)
with coattn.Cache(model, "cpu", gpu_kv="4MiB") as cache:
    for question in ("Pierre lives in the city of", "Anna works as a"):
        ids = torch.cat([text, tokenizer(question, return_tensors="pt").input_ids.to(model.device)], 1)
        known = cache.get_seq_length()
        out = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
        print(f"{ids.shape[1] - known} of {ids.shape[1]} tokens read: {tokenizer.decode(out[0, text.shape[1] :])!r}")
        cache.crop(text.shape[1] - cache.get_seq_length())  # forget the question and its answer
    print(f"{cache.report()['host_kv_peak']:,} bytes in DRAM")
