"""Every family under every exact method equals Transformers: logits, greedy text, mixed lengths, three turns."""

from functools import cache
from typing import Any

import pytest
import torch
from tests.hf.families import FAMILIES, FEATURED, tiny
from transformers import DynamicCache, PreTrainedModel

import coattn
from coattn.hf.architectures import describe_layers

TIERED = {"block": 8, "window_blocks": 1}
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("offload", TIERED),
    ("cpu", TIERED),
    ("hcattention", {**TIERED, "groups": 0, "tau": 1}),
    ("hgca", {**TIERED, "beta": 0}),
]
LENGTHS = (37, 9, 60)
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def batch(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and mask `[3, 60]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 160, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - n for n in LENGTHS]).long()
    return (ids * mask).to(device), mask.to(device)


Conversation = list[list[torch.Tensor]]
"""Per step, the new ids of each sequence."""


def three_turns(model: PreTrainedModel) -> Conversation:
    """A prompt, ten decode steps, a new turn, five decode steps, another turn, two decode steps; all of mixed lengths.

    Transformers' sliding layers count padding between turns as if it were tokens; coattn's count tokens. So models with
    such layers get turns of equal length, which need no padding.
    """
    slides = any(layer.sliding_window for layer in describe_layers(model))
    generator = torch.Generator().manual_seed(1)
    turn, last = ((13, 13, 13), (30, 30, 30)) if slides else ((13, 6, 9), (30, 15, 1))
    sizes = [LENGTHS, *[(1, 1, 1)] * 10, turn, *[(1, 1, 1)] * 5, last, (1, 1, 1), (1, 1, 1)]
    return [[torch.randint(3, 160, (n,), generator=generator) for n in step] for step in sizes]


@torch.no_grad()
def run(model: PreTrainedModel, past: Any, steps: Conversation) -> list[list[torch.Tensor]]:
    """The sequences side by side, padded on the left: per step the logits of each, in float64."""
    mask, kept = torch.empty(len(steps[0]), 0, dtype=torch.long), []
    for step in steps:
        columns = max(map(len, step))
        ids = torch.stack([torch.nn.functional.pad(x, (columns - len(x), 0)) for x in step])
        fresh = torch.stack([torch.arange(columns) >= columns - len(x) for x in step]).long()
        mask = torch.cat([mask, fresh], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -columns:]
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        out = model(**{k: x.to(model.device) for k, x in inputs.items()}, past_key_values=past, use_cache=True)
        past = out.past_key_values
        kept.append([row[columns - len(x) :].double() for row, x in zip(out.logits, step, strict=True)])
    return kept


def flat(kept: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([logits for step in kept for logits in step])


@cache
def plain_text(family: str, device: torch.device) -> torch.Tensor:
    ids, mask = batch(device)
    return tiny(family, device).generate(ids, attention_mask=mask, **GREEDY)


@cache
def plain_logits(family: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64 each sequence alone, so without padding; and in float32 as a batch."""
    exact, same = (tiny(family, device, dtype) for dtype in (torch.float64, torch.float32))
    steps = three_turns(same)
    alone = [run(exact, DynamicCache(config=exact.config), [[step[i]] for step in steps]) for i in range(len(LENGTHS))]
    together = [[alone[i][n][0] for i in range(len(LENGTHS))] for n in range(len(steps))]
    return flat(together), flat(run(same, DynamicCache(config=same.config), steps))


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, device: torch.device) -> None:
    """Under `attach`, and with a `coattn.Cache`: greedy text of left-padded prompts is identical; over three turns of
    mixed lengths the error of the logits is at most twice that of Transformers in the same precision."""
    model = tiny(family, device)
    ids, mask = batch(device)
    assert len(plain_text(family, device)[0].unique()) > 8, "a text that repeats itself would prove little"
    exact, same = plain_logits(family, device)
    allowed = 2 * (same - exact).abs().max().item()
    every = family in FEATURED or device.type == "cuda"
    for method, params in EXACT if every else EXACT[2:3]:
        with coattn.attach(model, method, gpu_kv="1MiB", **params) as attachment:
            assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), plain_text(family, device)), method
            error = (flat(run(model, attachment.new_cache(), three_turns(model))) - exact).abs().max().item()
        assert 0 < error <= allowed, f"{method}: error {error:.3g}, allowed {allowed:.3g}"
    for method, params in EXACT[:3]:
        cache = coattn.Cache(model, method, gpu_kv="1MiB", **params)
        own = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert torch.equal(own, plain_text(family, device)), f"{method} in a cache"
        assert cache.get_seq_length() == own.shape[1] - 1
        cache.reset()
        assert cache.get_seq_length() == 0
        error = (flat(run(model, cache, three_turns(model))) - exact).abs().max().item()
        assert 0 < error <= allowed, f"{method} in a cache"


@pytest.mark.parametrize("family", ["gemma2", "mistral_sliding"])
def test_padding_between_turns_changes_nothing(family: str) -> None:
    """A conversation gives the same logits with and without padding between its turns, sliding layers included."""
    model = tiny(family)
    generator = torch.Generator().manual_seed(2)
    turns = [torch.randint(3, 160, (1, n), generator=generator) for n in (40, 7, 1, 30)]

    def logits(padding: int) -> torch.Tensor:
        kept, real = [], torch.empty(1, 0, dtype=torch.long)
        with coattn.attach(model, "cpu", block=8) as attachment, torch.no_grad():
            past = attachment.new_cache()
            for turn in turns:
                pad = torch.zeros(1, padding, dtype=torch.long)
                real = torch.cat([real, pad, torch.ones_like(turn)], 1)
                ids = torch.cat([pad, turn], 1)
                positions = (real.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
                out = model(input_ids=ids, attention_mask=real, position_ids=positions, past_key_values=past)
                kept.append(out.logits[0, padding:])
        return torch.cat(kept)

    torch.testing.assert_close(logits(5), logits(0), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("family", "room"), [*((f, True) for f in (*FEATURED, "opt")), ("llama", False), ("opt", False)]
)
def test_streaming_is_exact_where_it_has_room_for_everything(family: str, room: bool) -> None:
    model = tiny(family)
    ids, mask = batch(model.device)
    sizes = {"sinks": 4, "recent": 200} if room else {"sinks": 2, "recent": 8}
    with coattn.attach(model, "streaming", **sizes):
        found = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(found, plain_text(family, model.device)) is room
