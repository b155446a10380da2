"""Models some of whose layers have a state instead of a KV cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.hf.test_table import attached, batch, greedy, small
from transformers import PreTrainedModel

import coattn
from coattn.errors import InputError, UnsupportedError
from coattn.hf.conversation import CoattnCache
from coattn.hf.probe import look_at, mixers_of

FAMILY = "qwen3_5_text"
MORE_KINDS = ("nemotron_h", "granitemoehybrid", "lfm2", "falcon_h1")
"""Layers of experts alone; Mamba before each attention; short convolutions; attention and Mamba in one layer."""


@contextmanager
def by_attach(model: PreTrainedModel, method: str) -> Iterator[CoattnCache]:
    with coattn.attach(model, method) as attachment:
        yield attachment.new_cache()


OPENERS: tuple[Callable[..., Any], ...] = (by_attach, coattn.Cache)


def make(model: PreTrainedModel, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    made: Any = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
    return made


def test_a_call_of_the_decoder_shows_its_states() -> None:
    model = small(FAMILY, 0)
    assert [each.index for each in look_at(model)] == [1, 3]
    first, other = mixers_of(model)
    assert (first.name, first.index, other.index) == ("layers.0.linear_attn", 0, 2)
    assert first.states == (("conv", 0, (96, 4), None), ("recurrent", 0, (2, 16, 16), torch.float32))


@pytest.mark.parametrize("family", [FAMILY, *MORE_KINDS])
@pytest.mark.parametrize("method", ["full", "cpu"])
def test_a_padded_batch_gives_the_same_tokens(family: str, method: str) -> None:
    model = small(family, 0)
    want = greedy(model)
    assert attached(model, method) == want
    ids, mask = batch()
    with coattn.Cache(model, method) as cache:
        assert make(model, ids, cache, mask)[:, ids.shape[1] :].tolist() == [row[:8] for row in want]
    assert greedy(model) == want


@pytest.mark.parametrize("opened", OPENERS)
def test_a_turn_goes_on_and_tokens_are_not_taken_back(opened: Callable[..., Any]) -> None:
    model, ids = small(FAMILY, 0), batch()[0][:1]
    first = make(model, ids, None)
    text = torch.cat([first, ids[:, :9]], 1)
    want = make(model, text, None)
    with opened(model, "cpu") as cache:
        assert torch.equal(make(model, ids, cache), first)
        assert torch.equal(make(model, text, cache), want)
        with pytest.raises(UnsupportedError, match="cannot be taken back from a model whose layers have a state"):
            cache.crop(-3)
        padded = torch.cat([torch.ones_like(want), torch.tensor([[0, 1, 1]])], 1)
        with pytest.raises(UnsupportedError, match="hides a column after a token"):
            make(model, torch.cat([want, ids[:, :3]], 1), cache, padded)
        if opened is coattn.Cache:  # by then the first layer had counted the tokens
            with pytest.raises(InputError, match="failed half way"):
                make(model, torch.cat([want, ids[:, :3]], 1), cache)
        cache.reset()
        assert torch.equal(make(model, text, cache), want)


@pytest.mark.parametrize("opened", OPENERS)
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_step_that_fails_is_not_gone_on_from(opened: Callable[..., Any], layer: int) -> None:
    model, ids = small(FAMILY, 0), batch()[0][:1]
    want, decoder = make(model, ids, None), model.get_decoder()

    def fail(*_: Any) -> None:
        raise ValueError("here")

    with opened(model, "full") as cache:
        make(model, ids, cache)
        hook = decoder.get_submodule(f"layers.{layer}").register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="here"):
            make(model, torch.cat([want, ids[:, :3]], 1), cache)
        hook.remove()
        with pytest.raises(InputError, match="failed half way"):
            make(model, torch.cat([want, ids[:, :3]], 1), cache)
        cache.reset()
        assert torch.equal(make(model, ids, cache), want)


@pytest.mark.parametrize("opened", OPENERS)
def test_rows_that_predict_are_refused(opened: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"layers with a state between|predicts queries by hooks"):
        opened(small(FAMILY, 0), "scout").__enter__()
