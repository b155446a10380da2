"""Plans: bytes are those that the cache's own ledger counts, times are bytes over rates, and more is never less."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from coattn.cache.ledger import Ledger
from coattn.cache.states import KEPT, KEPT_SHARE
from coattn.cache.states import ROWS as STATES
from coattn.engine.plan.fit import longest as reach
from coattn.engine.plan.kv import held as counted
from coattn.hf.architectures import describe_layers
from coattn.hf.experts import weights_read
from coattn.hf.families import check_config
from coattn.method.row import compose
from coattn.method.table import METHODS as ROWS
from coattn.tools.plan import estimate as estimating
from coattn.tools.plan.estimate import METHODS, Machine, estimate, held, longest
from coattn.tools.plan.known import find_card, find_config, models
from coattn.tools.plan.shape import ModelShape, read_shape
from coattn.units import ceil_div
from coattn_lab.bench.random_model import random_model

GIB = 1 << 30
MACHINE = Machine(find_card("rtx4090"), 64 * GIB, 60e9)


def shape_of(name: str) -> ModelShape:
    return read_shape(*find_config(name))


@pytest.mark.parametrize("name", ["Meta-Llama-3-8B-Instruct", "SmolLM2-135M-Instruct"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4096), (2, 30001)])
def test_kv_bytes_are_those_of_the_ledger(name: str, method: str, batch: int, tokens: int) -> None:
    shapes = {"Meta-Llama-3-8B-Instruct": "llama-3-8b", "SmolLM2-135M-Instruct": "smollm2-135m"}
    layers = describe_layers(random_model(shapes[name], torch.device("meta"), torch.bfloat16))
    row, _, form = method.partition(",gpu_dtype=")
    composed = compose(ROWS[row], **({"gpu_dtype": form} if form else {}))
    real, model = counted(layers, composed, batch, tokens), shape_of(name)
    gpu, dram = held(method, model, batch, tokens)
    if row not in ("full", "offload", "auto"):  # the ledger has no staging for those that do not fetch
        gpu -= 2 * ceil_div(tokens, 32) * 32 * model.token_bytes
    assert gpu == pytest.approx(real["gpu"], rel=0.01)
    lists = 1.1 if method == "hgca" else 1.0  # entries that the CPU attends to are copied
    assert dram == pytest.approx(lists * real["host"], rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-8B-Instruct", 8.03), ("Llama-3.1-70B-Instruct", 70.6), ("Llama-3.2-1B-Instruct", 1.236),
        ("Qwen2.5-7B-Instruct", 7.62), ("Qwen2.5-Coder-1.5B-Instruct", 1.54), ("Qwen3-8B", 8.19), ("Qwen3-32B", 32.8),
        ("Qwen3-30B-A3B", 30.5), ("Qwen3-Coder-30B-A3B-Instruct", 30.5), ("GLM-4.5-Air", 106.9),
        ("Mixtral-8x7B-Instruct-v0.1", 46.7), ("Mistral-Small-24B-Instruct-2501", 23.6), ("gemma-2-9b-it", 9.24),
        ("gemma-3-12b-it", 11.8), ("phi-4", 14.7), ("glm-4-9b-chat-hf", 9.4), ("gpt-neox-20b", 20.6),
    ],
)  # fmt: skip
def test_weights_are_as_many_as_model_cards_say(name: str, billions: float) -> None:
    assert shape_of(name).weight_bytes == pytest.approx(2e9 * billions, rel=0.02)


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-30B-A3B", 3.3), ("GLM-4.5-Air", 12.9), ("Mixtral-8x7B", 12.9)])
def test_of_experts_a_token_uses_a_few(name: str, billions: float) -> None:
    model = shape_of(name)
    assert model.active_params == pytest.approx(billions * 1e9, rel=0.08)
    assert model.read_bytes(1) == model.active_weight_bytes
    reads = [model.read_bytes(batch) for batch in (1, 2, 4, 1000)]
    assert reads == sorted(reads)
    assert reads[1] < 2 * reads[0]
    assert reads[3] == pytest.approx(model.weight_bytes - model.config["vocab_size"] * model.hidden * 2, rel=1e-6)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "GLM-4.5-Air", "Mixtral-8x7B", "Qwen3-8B"])
def test_a_plan_reads_what_the_model_itself_does(name: str) -> None:
    read, shape = weights_read(random_model(name.lower(), torch.device("meta"), torch.bfloat16)), shape_of(name)
    for batch in (1, 4, 64):
        assert shape.read_bytes(batch) == pytest.approx(read.of(batch), rel=0.001)


@pytest.mark.parametrize(("name", "gib"), [("openai/gpt-oss-20b", 12.8), ("deepseek-ai/DeepSeek-V3", 641)])
def test_quantised_weights_have_the_bytes_of_their_format(name: str, gib: float) -> None:
    assert shape_of(name).weight_bytes == pytest.approx(gib * GIB, rel=0.1)


def test_a_config_with_4_bits_is_a_quarter() -> None:
    name, config = find_config("Qwen2.5-32B-Instruct")
    packed = {**config, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    assert read_shape(name, packed).weight_bytes == pytest.approx(18 * GIB, rel=0.05)


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("method", METHODS)
def test_more_tokens_never_take_less(name: str, method: str) -> None:
    model = shape_of(name)
    rows = [estimate(method, model, batch, n, MACHINE) for batch, n in ((1, 1), (1, 100), (1, 9000), (2, 9000))]
    for less, more in pairwise(rows):
        assert less.kv <= more.kv
        assert less.dram <= more.dram
        assert less.step_s <= more.step_s  # type: ignore[operator]


@pytest.mark.parametrize("method", METHODS)
def test_the_longest_context_fits_and_a_longer_one_does_not(method: str) -> None:
    model = shape_of("Llama-3.1-8B-Instruct")
    found = longest(method, model, 4, MACHINE, 1 << 20)
    assert 0 < found < 1 << 20
    assert estimate(method, model, 4, found, MACHINE).fits
    assert not estimate(method, model, 4, found + 64, MACHINE).fits


def test_weights_in_dram_leave_room_and_cost_time() -> None:
    model = shape_of("Qwen3-32B")
    whole, half = (estimate("cpu", model, 1, 8192, replace(MACHINE, weights_on_gpu=s)) for s in (1.0, 0.5))
    moved = whole.weights - half.weights
    assert moved == half.dram - whole.dram > 25 * GIB
    assert half.step_s >= moved / MACHINE.card.pcie  # type: ignore[operator]


def test_a_step_takes_at_least_its_bytes() -> None:
    model = shape_of("Llama-3.1-8B-Instruct")
    kv = 100_000 * 32 * model.token_bytes
    for method, rate in (("full", MACHINE.card.hbm), ("cpu", MACHINE.dram_rate), ("offload", MACHINE.card.pcie)):
        assert estimate(method, model, 1, 100_000, MACHINE).step_s >= kv / rate  # type: ignore[operator]


def test_a_hybrid_inside_a_wrapper_has_kv_in_some_layers_and_states() -> None:
    """Qwen3.5-27B: llama.cpp says 149.9 MiB of states, all in float32, with a column less of each convolution."""
    text = {"model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64}
    text |= {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320}
    text |= {"linear_num_key_heads": 16, "linear_num_value_heads": 48, "max_position_embeddings": 262144}
    text |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"model_type": "qwen3_5"}}
    check_config(config)
    shape = read_shape("Qwen3.5-27B", config)
    assert (shape.layers, shape.full_layers, shape.token_bytes * shape.full_layers) == (64, 16, 65536)
    convolved, recurrent = (2 * 16 + 48) * 128 * 4, 48 * 128 * 128
    assert shape.state_bytes == 48 * (2 * convolved + 4 * recurrent)
    assert shape.weight_bytes == pytest.approx(2 * 26.9e9, rel=0.01)
    assert read_shape("", config, "float32").state_bytes == pytest.approx(149.9 * 2**20, rel=0.02)
    assert (estimating.KEPT_STATES, estimating.KEPT_SHARE, estimating.STATE_ROWS) == (KEPT, KEPT_SHARE, STATES)
    assert estimate("full", shape, 3, 4096, MACHINE).dram == 35 * shape.state_bytes
    small = replace(MACHINE, dram=1 << 30)
    assert estimate("full", shape, 3, 4096, small).dram == (1 << 28) // shape.state_bytes * shape.state_bytes


def test_a_pool_is_cut_down_to_the_room_that_there_is() -> None:
    """The engine opens with what the plan says, and takes a sequence as long."""
    model, tokens = shape_of("Qwen3-32B"), 131072
    whole, dram = held("auto", model, 1, tokens)
    assert held("auto", model, 1, tokens, whole) == (whole, dram)
    for room in (0.95 * whole, 0.75 * whole):
        assert 0.9 * room < held("auto", model, 1, tokens, room)[0] <= room
    least = held("auto", model, 1, tokens, 0)[0]
    assert 0.5 * whole < least < 0.7 * whole, "codes and books of all tokens stay"
    layers = describe_layers(random_model("qwen3-32b", torch.device("meta"), torch.bfloat16))
    assert reach(layers, compose(ROWS["auto"]), Ledger(least, None), 1, tokens) == tokens


def test_shorter_chunks_and_packed_weights_are_counted() -> None:
    name, config = find_config("Qwen3-32B")
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    plain, packed = (read_shape(name, each) for each in (config, {**config, "quantization_config": awq}))
    assert (plain.packed, packed.packed) == (False, True)
    machine = replace(MACHINE, card=find_card("24GiB"))
    usual, short = (estimate("auto", packed, 1, 131072, each) for each in (machine, replace(machine, chunk=2048)))
    assert not usual.fits_gpu
    assert short.fits_gpu
    assert short.workspace < usual.workspace - (1 << 30)
    matrix = 2 * 25600 * 5120 * 2
    assert usual.workspace == estimate("auto", plain, 1, 131072, machine).workspace + matrix
