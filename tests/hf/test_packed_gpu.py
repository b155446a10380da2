"""Checkpoints in 4 to 8 bits on a GPU: the model's numbers, steps that a GPU replays, and the memory that they take."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small import greedy
from tests.hf.quantised_folders import write

from coattn import LLM, attach
from coattn.hf.gguf.header import read_tensors
from coattn.hf.load import load
from coattn.hf.quantised.module import PackedExperts, PackedModule
from coattn.hf.stored import bytes_of

pytestmark = pytest.mark.gpu
NEEDS_GGUF = pytest.mark.skipif(find_spec("gguf") is None, reason="the package gguf is not installed")
DTYPES = [torch.float16, torch.bfloat16]
IDS = torch.randint(3, 160, (1, 30), generator=torch.Generator().manual_seed(2))
CASES = [
    *(("awq", family) for family in ("llama", "qwen3_moe")),
    *(("gptq", family) for family in ("qwen3", "qwen3_moe")),
    *(("fp8 blocks", family) for family in ("llama", "qwen3_moe")),
    *((scheme, "llama") for scheme in ("gptq sorted", "int4 zeros", "int8", "int8 bytes", "fp8 rows", "nf4")),
    ("int8", "mixtral"),
    ("bnb int8", "llama"),
    ("mxfp4", "gpt_oss"),
    *(
        pytest.param(kind, "gguf", marks=NEEDS_GGUF)
        for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
    ),
]


def made(folder: Path, scheme: str, family: str) -> tuple[str, Any]:
    """What to load, and the model of its numbers."""
    if family == "gguf":
        from tests.hf import gguf_files

        return str(folder / "m.gguf"), gguf_files.write(folder / "m.gguf", scheme, tied=True)
    return str(folder), write(folder, scheme, family)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scheme", "family"), CASES)
def test_logits_are_as_near_as_those_of_the_numbers(
    scheme: str, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In the same precision, for a token and for a prompt: in the mean over positions, whose experts may differ."""
    name, numbers = made(tmp_path, scheme, family)
    model = load(name, dtype=dtype, device="cuda").model
    assert any(isinstance(module, PackedModule | PackedExperts) for module in model.modules())
    ids = IDS.cuda()
    with torch.no_grad():
        want = numbers.cuda()(ids).logits
        plain = numbers.to(dtype)(ids).logits.float()
        for length in (1, 30):
            got = model(ids[:, :length]).logits.float()
            usual = (plain[:, :length] - want[:, :length]).abs().mean()
            assert (got - want[:, :length]).abs().mean() <= 2 * usual


@pytest.mark.parametrize(("scheme", "family"), CASES)
def test_a_replayed_step_gives_the_tokens_of_one_layer_by_layer(scheme: str, family: str, tmp_path: Path) -> None:
    """The first ones: later rounding may decide between two that are nearly as likely."""
    name, _ = made(tmp_path, scheme, family)
    with LLM(name, "full", dtype="float16", device="cuda", max_length=64, max_batch=2) as llm:
        (output,) = llm.generate(IDS[0].tolist(), greedy(8))
        assert llm.report()["captured"], llm.report()["not_captured"]
    model = load(name, dtype="float16", device="cuda").model
    with attach(model, "full"), torch.no_grad():
        want = model.generate(IDS.cuda(), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 30:].tolist()
    assert list(output.token_ids[:3]) == want[:3]


@NEEDS_GGUF
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_a_file_takes_its_own_bytes_of_gpu_memory(kind: str, tmp_path: Path) -> None:
    from tests.hf import gguf_files

    gguf_files.write(tmp_path / "m.gguf", kind)
    stored = sum(each.size for each in read_tensors(tmp_path / "m.gguf").values())
    before = torch.cuda.memory_allocated()
    model = load(tmp_path / "m.gguf", dtype="bfloat16", device="cuda").model
    torch.cuda.empty_cache()
    assert bytes_of(model) <= 1.05 * stored
    assert torch.cuda.memory_allocated() - before <= 1.1 * stored + (1 << 20)
