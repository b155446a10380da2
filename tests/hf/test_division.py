"""Which layers lie on which device, and what a forward call carries between them."""

import pytest
import torch
from tests.hf.families import FAMILIES, tiny
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.engine.runner.runner import Runner
from coattn.hf.division import Division, Sizes, divide, sizes
from coattn.hf.forward import Session
from coattn.hf.pipeline import PipelineStages
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn_lab.bench.random_model import random_model

CPU = (torch.device("cpu", 0), torch.device("cpu", 1))


def parts(layers: list[int], kv: int, shares: tuple[float, ...], first: int = 0, last: int = 0) -> tuple[int, ...]:
    devices = [torch.device("cuda", i) for i in range(len(shares))]
    return divide(Sizes(tuple(layers), first, last), [kv] * len(layers), devices, shares).layers


def test_each_holds_about_the_same() -> None:
    assert parts([10] * 8, 0, (0.5, 0.5)) == (4, 4)
    assert parts([10] * 8, 5, (0.25,) * 4) == (2, 2, 2, 2)
    assert parts([10] * 8, 0, (0.5, 0.5), first=20) == (3, 5)
    assert parts([10] * 8, 10, (0.5, 0.5), first=20) in ((3, 5), (4, 4))
    assert parts([10] * 8, 0, (0.5, 0.5), first=40, last=40) == (4, 4)
    assert parts([30, 10, 10, 10], 0, (0.5, 0.5)) == (1, 3)


def test_by_shares_and_never_none() -> None:
    assert parts([10] * 8, 0, (0.75, 0.25)) == (6, 2)
    assert parts([10] * 8, 0, (0.01, 0.99)) == (1, 7)
    assert parts([10] * 3, 0, (1 / 3,) * 3, last=1000) == (1, 1, 1)


def test_a_device_that_is_there_twice_has_two_names() -> None:
    cuda = torch.device("cuda", 0)
    division = Division((cuda, torch.device("cuda", 1), cuda), (2, 1, 3))
    assert division.names == ("cuda:0", "cuda:1", "cuda:0#2")
    assert division.stages == (0, 0, 1, 2, 2, 2)
    assert division.spans() == [(0, 1), (2, 2), (3, 5)]


@pytest.mark.parametrize("shapes", ["qwen3-8b", "smollm2-135m"])
def test_bytes_of_the_ends(shapes: str) -> None:
    """A tied head is there twice: on the first device as the embedding, on the last as the head."""
    model = random_model(shapes, torch.device("meta"), torch.bfloat16)
    found, whole = sizes(model), sum(p.nbytes for p in model.parameters())
    table = model.get_input_embeddings().weight.nbytes
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert found.first == table
    assert found.last == table + model.model.norm.weight.nbytes
    assert sum(found.layers) + found.first + found.last == whole + tied * table


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_crosses(family: str) -> None:
    """Logits of one device, of two and of three are the same; a step carries its hidden state over each border once."""
    ids, found = torch.randint(0, 160, (30,)).tolist(), []
    for division in (None, Division(CPU, (1, 2)), Division((*CPU, CPU[1]), (1, 1, 1))):
        model = tiny(family)
        pipeline = None if division is None else PipelineStages(model, division)
        carried: list[tuple[int, Tensor]] = []
        if pipeline is not None:
            real = pipeline.carry
            pipeline.carry = lambda stage, x, real=real, carried=carried: carried.append((stage, x)) or real(stage, x)  # type: ignore[misc]
        with Session(model, pipeline) as session:
            runtime = Runtime(session.layers, compose(METHODS["cpu"], block=8), Ledger(), 1, 64, fixed=True)
            runner = Runner(session, runtime, 1)
            logits = [runner.extend(0, ids, 0, True)]
            carried.clear()
            logits += [runner.decode([0], [7], [30 + i]) for i in range(3)]
            runtime.release()
        found.append(torch.cat([x for x in logits if x is not None]))
        if pipeline is not None and division is not None:
            for stage in range(1, len(division.layers)):
                assert sum(k == stage and x.shape == (1, 1, 64) for k, x in carried) == 3, "steps"
            pipeline.close()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.gpu
def test_a_tied_head_is_copied_to_the_last_gpu_and_given_back() -> None:
    model = random_model("tiny", torch.device("cuda:0"), torch.float32)
    table = model.get_input_embeddings().weight
    pipeline = PipelineStages(model, Division((torch.device("cuda:0"), torch.device("cuda:1")), (1, 1)))
    assert model.get_output_embeddings().weight.device.index == 1
    assert model.get_output_embeddings().weight is not table
    pipeline.close()
    assert model.get_output_embeddings().weight is table
