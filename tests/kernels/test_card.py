"""What cards differ in: too old ones are refused, and tiles fit into their shared memory."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from tests.engine.small import small
from tests.kernels.cards import SHARED

from coattn.cli.main import cli
from coattn.errors import ConfigError
from coattn.hf.architectures import describe_layers
from coattn.hf.load import choose_device
from coattn.kernels.card import check_card

GPU = torch.device("cuda", 0)


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU of the given compute capability, as far as PyTorch is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")


@pytest.mark.parametrize("card", [(7, 0), (7, 5)], indirect=True)
def test_an_old_card_is_refused_in_one_sentence(card: None) -> None:
    for refuses in (lambda: check_card(GPU), lambda: choose_device("auto"), lambda: choose_device("cuda:0")):
        with pytest.raises(ConfigError) as at:
            refuses()
        said = r"Tesla T4 has compute capability 7\.[05], but .* need 8\.0: .*\."
        assert re.fullmatch(said, str(at.value))
        assert "cpu" in at.value.hint
    assert choose_device("cpu").type == "cpu"


def test_layers_on_an_old_card_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model that somebody else has loaded: `attach` and engines describe its layers first."""
    model = small()
    assert describe_layers(model)
    for layer in model.get_decoder().layers:
        layer.self_attn._hf_hook = SimpleNamespace(execution_device=GPU)  # where Accelerate puts it
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    with pytest.raises(ConfigError, match=r"compute capability 7\.5"):
        describe_layers(model)


@pytest.mark.parametrize("card", [(7, 5)], indirect=True)
def test_doctor_says_why_a_card_is_not_used(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Tesla T4", total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert "Tesla T4" in said["machine"]["gpu"]
    assert sum("compute capability 7.5" in hint for hint in said["hints"]) == 1
    assert said["uses"][0]["choice"] == "ordinary memory"


@pytest.mark.parametrize("card", [(8, 0), (8, 6), (9, 0), (12, 0)], indirect=True)
def test_later_cards_are_taken(card: None) -> None:
    check_card(GPU)
    assert choose_device("auto").type == "cuda"
    check_card(torch.device("cpu"))


@pytest.mark.parametrize("shared", sorted(set(SHARED.values())))
def test_tiles_of_products_fit(shared: int) -> None:
    linear = pytest.importorskip("coattn.kernels.triton.linear")
    for n in (2560, 5120, 6144, 16384, 151936):
        for k in (1024, 4096, 5120, 8192, 17408):
            tile = linear.tile_of(16, n, k)
            bn, bk, warps, stages = linear.fitted(tile, shared)
            assert (bn, bk, warps) == tile[:3]
            assert (bn + 16) * bk * 2 * (stages - 1) <= shared
            assert stages == tile[3] or (bn + 16) * bk * 2 * stages > shared
            if shared >= 227 << 10:
                assert stages == tile[3]
