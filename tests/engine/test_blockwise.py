"""Prompts read block by block through `attach` and `LLM`: exact within one block, the same however they are cut."""

import pytest
import torch
from tests.engine.small import greedy, llm, small

from coattn import attach

IDS = torch.randint(0, 250, (90,), generator=torch.Generator().manual_seed(3))


def logits(method: str, **params: object) -> torch.Tensor:
    model = small()
    with torch.no_grad(), attach(model, method, **params):
        return model(IDS[None].to(model.device)).logits[0].float()


@pytest.mark.parametrize("method", ["full", "cpu"])
def test_a_prompt_of_one_block_is_read_exactly(method: str) -> None:
    plain = logits(method)
    torch.testing.assert_close(logits(method, prefill_block=90), plain, atol=1e-4, rtol=1e-4)
    short = logits(method, prefill_block=32, anchor=8, question=0)
    torch.testing.assert_close(short[:32], plain[:32], atol=1e-4, rtol=1e-4)
    assert (short[40:] - plain[40:]).abs().max() > 1e-3


@pytest.mark.parametrize("method", ["full", "cpu"])
def test_the_question_attends_to_everything(method: str) -> None:
    """With two layers: what the last layer's queries of the question see differs only by keys that blocks have made."""
    plain, blocks = logits(method), logits(method, prefill_block=32, anchor=8, question=0)
    asked = logits(method, prefill_block=32, anchor=8, question=20)
    torch.testing.assert_close(asked[:70], blocks[:70], atol=1e-4, rtol=1e-4)
    assert (asked[70:] - plain[70:]).abs().mean() < 0.7 * (blocks[70:] - plain[70:]).abs().mean()
    whole = logits(method, prefill_block=32, anchor=8, question=90)
    torch.testing.assert_close(whole, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["full", "hcattention"])
def test_the_engines_chunks_do_not_matter(method: str) -> None:
    def answer(chunk: int) -> list[tuple[int, ...]]:
        extra = {"groups": 0, "tau": 1} if method == "hcattention" else {}
        blocks = {"block": 32, "prefill_block": 32, "anchor": 16, "question": 10}
        with llm(method, max_length=128, chunk=chunk, **blocks, **extra) as engine:
            found = engine.generate([IDS.tolist(), IDS[:50].tolist()], greedy(12, ignore_eos=True))
            return [done.token_ids for done in found]

    assert answer(90) == answer(32) == answer(13)
