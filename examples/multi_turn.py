"""Three turns over one cache: each turn reads only its own new tokens. Written for smollm2's chat format.

Usage: python examples/multi_turn.py
"""

import torch

import coattn
from coattn.hf.load import load

END, ASK = "<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TURNS = ["Ada lives in Turin. Ada works in Milan. Where does Ada live?", "Where does Ada work?", "Where does Ada live?"]

loaded = load("smollm2")
model, tokenizer = loaded.model, loaded.tokenizer


def encode(text: str) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)


with coattn.attach(model, "cpu", gpu_kv="4MiB") as attachment:
    cache = attachment.new_cache()
    ids = encode(ASK.format(TURNS[0]))
    for turn in [*TURNS[1:], None]:
        known, length = cache.get_seq_length(), ids.shape[1]
        out = model.generate(ids, past_key_values=cache, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(out[0, length:], skip_special_tokens=True).strip()
        print(f"{length} tokens, {known} of them known, {length - known} read: {answer}")
        if out[0, -1] == tokenizer.eos_token_id:
            out = out[:, :-1]  # END brings it back
        if turn is not None:
            ids = torch.cat([out, encode(END + ASK.format(turn))], 1)
