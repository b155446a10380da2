"""Layers on several devices: the answers of one device, budgets and reports for each.

Without GPUs the devices are `cpu:0` and `cpu:1`: one CPU, with a cache, a ledger and a border for each.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.engine.rows import options
from tests.engine.small import DEVICE, greedy, prompt, small, tokenizer

import coattn
from coattn.engine.devices import Devices
from coattn.engine.runner.runner import Runner
from coattn.errors import BudgetError, ConfigError, InputError

TWO = [f"{DEVICE.type}:0"] * 2 if DEVICE.type == "cuda" else ["cpu:0", "cpu:1"]
NAMES = ("cuda:0", "cuda:0#2") if DEVICE.type == "cuda" else ("cpu:0", "cpu:1")
ROWS = ("full", "cpu", "hgca", "scout", "hcattention", "quest")
Answers = list[tuple[tuple[int, ...], Any]]
_one_device: dict[str, Answers] = {}


def engine(method: str, devices: Sequence[str] | None = None, layers: int = 4, **more: Any) -> coattn.LLM:
    given = {"max_batch": 1, "max_length": 192, "chunk": 32, **options(method), **more}
    return coattn.LLM((small(layers), tokenizer()), method, devices=devices, **given)


def answers(llm: coattn.LLM, lengths: Sequence[int] = (9, 101)) -> Answers:
    """Tokens, and the log-probabilities of the likeliest, of greedy answers in float32."""
    params = greedy(10, ignore_eos=True, logprobs=5)
    return [(out.token_ids, out.logprobs) for out in llm.generate([prompt(n) for n in lengths], params)]


def same(got: Answers, want: Answers) -> bool:
    """On the CPU the same sums in the same order; captured steps are others for one device and for two."""
    if DEVICE.type == "cpu":
        return got == want
    near = [
        abs(a.logprob - b.logprob) for (_, x), (_, y) in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)
    ]
    return [tokens for tokens, _ in got] == [tokens for tokens, _ in want] and max(near) < 1e-3


def on_one(method: str) -> Answers:
    if method not in _one_device:
        with engine(method) as llm:
            _one_device[method] = answers(llm)
    return _one_device[method]


@pytest.mark.parametrize("method", ROWS)
def test_two_devices_answer_as_one(method: str) -> None:
    """Scout predicts from its fourth layer on, which is not the first of a device here."""
    with engine(method, TWO) as llm:
        assert same(answers(llm), on_one(method))
        report = llm.report()
    assert [row["layers"] for row in report["devices"]] == [[0, 1], [2, 3]]
    assert [row["device"] for row in report["devices"]] == list(NAMES)
    for name in ("gpu_kv_bytes", "host_kv_bytes"):
        assert sum(row[name] for row in report["devices"]) == report[name]
        assert (report[name] > 0) is (name == "gpu_kv_bytes" or method not in ("full", "quest"))
    weights = sum(p.nbytes for p in small(4).parameters())
    assert sum(row["weight_bytes"] for row in report["devices"]) == weights


@pytest.mark.parametrize("method", ["full", "hgca"])
@pytest.mark.parametrize(("shares", "layers"), [((3, 1), [[0, 2], [3, 3]]), ((1, 5), [[0, 0], [1, 3]])])
def test_an_uneven_division_answers_the_same(method: str, shares: tuple[int, int], layers: list[list[int]]) -> None:
    with engine(method, TWO, device_shares=shares) as llm:
        assert [row["layers"] for row in llm.report()["devices"]] == layers
        assert same(answers(llm), on_one(method))


def test_a_query_is_not_predicted_over_a_border() -> None:
    """Layer 3 is alone on the second device: it runs as where it is not predicted, and only there."""
    shares = (5, 1)
    with engine("scout", TWO, device_shares=shares) as llm:
        assert [row["layers"] for row in llm.report()["devices"]] == [[0, 2], [3, 3]]
        runtime = llm.runner.runtime
        assert [runtime.begins_section(i) for i in range(4)] == [False, False, False, True]
        got = answers(llm)
    with engine("scout", ahead_from=4) as llm:
        assert same(got, answers(llm))
    with engine("scout", TWO, device_shares=shares, ahead_from=1) as divided, engine("scout", ahead_from=1) as one:
        assert divided.runner.runtime.composed.params == one.runner.runtime.composed.params
        predicted = [_predicted(llm) for llm in (divided, one)]
    assert predicted == [{1, 2}, {1, 2, 3}]


def _predicted(llm: coattn.LLM) -> set[int]:
    """Layers whose query was predicted while an answer was written."""
    runtime, found, real = llm.runner.runtime, set(), llm.runner.runtime.predict
    runtime.predict = lambda running, layer, *rest: found.add(layer) or real(running, layer, *rest)  # type: ignore[method-assign, func-returns-value, misc]
    answers(llm, (101,))
    return found


def test_requests_join_and_leave_on_devices_of_different_room() -> None:
    """The device with the least room decides who runs; nobody fails, and nothing is left."""
    unit = 8 * 2 * 2 * 8 * 4  # a block of one layer
    room = [40 * 2 * unit, 24 * 2 * unit]
    lengths = (60, 70, 80, 50, 90)
    with engine("full", TWO, max_batch=4, gpu_kv=room, reuse=False) as llm:
        assert llm.runner.runtime.free_bytes()["gpu"] < 2 * sum(room)
        assert llm.engine.scheduler.admission.most() <= 24 * 8
        outs = llm.generate([prompt(n) for n in lengths], greedy(40, ignore_eos=True))
        report = llm.report()
        for row, limit in zip(report["devices"], room, strict=True):
            assert row["gpu_kv_limit"] == limit
            assert row["gpu_kv_peak"] <= limit
    assert report["failed_steps"] == 0
    with engine("full", max_batch=1) as llm:
        alone = [llm.generate(prompt(n), greedy(40, ignore_eos=True))[0].token_ids for n in lengths]
    assert [out.token_ids for out in outs] == alone


@pytest.mark.parametrize(("gpu_kv", "named"), [(["1MiB", "100"], 1), (["100", "1MiB"], 0), ("64", 0)])
def test_a_budget_that_is_too_small_names_its_device(gpu_kv: Any, named: int) -> None:
    model = small(4)
    with pytest.raises(BudgetError) as caught:
        coattn.LLM((model, tokenizer()), "cpu", devices=TWO, max_length=64, gpu_kv=gpu_kv)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers), "as it was"
    said = str(caught.value).splitlines()[0]
    assert f"in the GPU tier of {NAMES[named]}, but gpu_kv is" in said
    assert said.count(". ") == 0
    assert caught.value.hint


def test_a_request_that_cannot_fit_names_the_device_without_room() -> None:
    layer = 8 * 2 * 2 * 8 * 4  # a block of one layer
    spare = 4 if DEVICE.type == "cuda" else 0
    with engine("full", TWO, gpu_kv=[20 * 2 * layer, (10 + spare) * 2 * layer]) as llm:
        with pytest.raises(BudgetError) as caught:
            llm.generate(prompt(120), greedy(4))
        said = str(caught.value)
        assert f"in the GPU tier of {NAMES[1]} to itself" in said
        assert "needs 32.0 KiB" in said, "16 blocks of its two layers"
        assert len(llm.generate(prompt(60), greedy(4, ignore_eos=True))[0].token_ids) == 4


def test_the_limit_of_dram_is_one_for_all() -> None:
    with engine("cpu", TWO, host_kv="1MiB", device_shares=(3, 1)) as llm:
        parts = [part.host for part in llm.ledger.parts]
        assert parts == [3 << 18, 1 << 18]
        answers(llm)
    with engine("cpu", TWO, host_kv=2000) as llm, pytest.raises(BudgetError, match="in DRAM"):
        answers(llm, (101,))


def test_the_model_is_as_it_was() -> None:
    model = small(4)
    before = {name: (p.data_ptr(), p.device) for name, p in model.named_parameters()}
    with coattn.LLM((model, tokenizer()), "full", devices=TWO, max_length=64) as llm:
        assert any(layer._forward_pre_hooks for layer in model.model.layers)
        assert llm.report()["captured"] is (DEVICE.type == "cuda")
    assert {name: (p.data_ptr(), p.device) for name, p in model.named_parameters()} == before or DEVICE.type == "cuda"
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    with pytest.raises(ConfigError):
        coattn.LLM((model, tokenizer()), "full", devices=TWO, max_length=64, device_shares=(1,))
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_a_prefix_is_shared_and_a_session_goes_on(tmp_path: Any) -> None:
    text = prompt(80)
    few = greedy(6, ignore_eos=True)
    with engine("cpu", TWO, max_batch=2, session_dir=tmp_path) as llm:
        first, second = (llm.generate(text, few)[0] for _ in range(2))
        assert second.token_ids == first.token_ids
        assert second.cached_tokens == 72
        talk = llm.session("talk")
        talk.ask(text, few)
        talk.save()
        told = talk.ask(prompt(9), few)
    with engine("cpu", TWO, max_batch=2, session_dir=tmp_path) as llm:
        again = llm.session("talk").ask(prompt(9), few)
        assert again.cached_tokens == 85
        assert again.token_ids == told.token_ids
    with engine("cpu", max_batch=2, session_dir=tmp_path) as llm:
        assert llm.generate(text, few)[0].token_ids == first.token_ids
        with pytest.raises(InputError, match="cannot go on here"):
            llm.session("talk")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"devices": []}, "must be a list"),
        ({"devices": "cuda:0"}, "must be a list"),
        ({"devices": ["cpu:0", "meta"]}, "does not run on the device meta"),
        ({"devices": ["cpu:0", "cpu:x"]}, "are not devices"),
        ({"devices": ["cpu:0"] * 5}, "5 devices for 4 layers"),
        ({"devices": TWO, "device": "cpu"}, "Both devices and device"),
        ({"devices": TWO, "weights_on_gpu": 0.5}, "Both devices and weights_on_gpu"),
        ({"devices": TWO, "device_shares": (1, 2, 3)}, "3 device_shares for 2 devices"),
        ({"devices": TWO, "device_shares": (1, 0)}, "which is no share"),
        ({"devices": TWO, "device_shares": (1, float("nan"))}, "which is no share"),
        ({"device_shares": (1, 1)}, "without devices"),
        ({"devices": TWO, "gpu_kv": ["1MiB"]}, "1 sizes for 2 devices"),
        ({"gpu_kv": ["1MiB", "1MiB"]}, "2 sizes for one device"),
    ],
)
def test_bad_input_is_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        coattn.LLM((small(4), tokenizer()), "full", max_length=64, **given)
    assert caught.value.hint


def test_devices_by_name() -> None:
    assert Devices.of(None, None, "1MiB").budgets == (1 << 20,)
    assert Devices.of(["cpu:0", "cpu:1"], [3, 1], "1MiB,2MiB").budgets == (1 << 20, 2 << 20)
    assert Devices.of(["cpu:0", "cpu:1"], None, "1MiB").budgets == (1 << 20,) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("method", ROWS)
def test_captured_in_two_graphs(method: str) -> None:
    with engine(method, ["cuda:0", "cuda:0"]) as llm:
        assert type(llm.runner) is not Runner
        assert llm.report()["captured"]
        got = answers(llm)
        assert all(len(made.stages) == 2 for made in llm.runner._captured.values())
    assert same(got, on_one(method))
    assert torch.cuda.current_device() == 0
