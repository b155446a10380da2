"""Keys and values in 8 and 4 bits in GPU memory, through an engine, a session's life and an attached model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small import DEVICE, UNIT, check_tables, greedy, prompt, small, tokenizer
from tests.hf.families import tiny

import coattn
from coattn.errors import InputError

FORMS = ("int8", "int4")
SHARE = {"int8": 16, "int4": 12}
"""Bytes of a row of 8 channels, where float32 has 32."""
PARAMS = greedy(6, ignore_eos=True)


def engine(form: str, **more: Any) -> coattn.LLM:
    given = {"max_batch": 2, "max_length": 160, "chunk": 160, "block": 8, "gpu_dtype": form, **more}
    return coattn.LLM((small(1), tokenizer()), "full", **given)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_an_attached_model_says_what_an_engine_says(form: str, family: str) -> None:
    """gemma2 has windows and soft-capping, gpt_oss windows and learned sinks."""
    model = tiny(family, DEVICE)
    ids = torch.randint(3, 160, (1, 45), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    given: dict[str, Any] = {"block": 8, "gpu_dtype": form}
    with coattn.attach(model, "full", **given) as attachment:
        wanted = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)[0, 45:]
        assert not attachment.report()["exact"]
    with coattn.LLM((model, None), "full", max_length=160, chunk=160, **given) as llm:
        found = llm.generate(ids[0].tolist(), greedy(12, ignore_eos=True))[0]
        assert not llm.report()["exact"]
    assert list(found.token_ids) == wanted.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_bytes_held_are_those_of_the_form(form: str) -> None:
    used = {}
    for kind in ("model", form):
        with engine(kind, max_batch=1) as llm:
            llm.generate(prompt(100), PARAMS)
            used[kind] = llm.report()["gpu_kv_bytes"]
    assert used[form] * 32 == used["model"] * SHARE[form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("disk", [False, True])
def test_a_conversation_that_was_moved_away_goes_on_as_if_it_had_stayed(form: str, disk: bool, tmp_path: Path) -> None:
    """Blocks go to DRAM, or to disk, and come back bit by bit."""
    texts, answers = (prompt(40, seed=1), prompt(9, seed=2)), []
    short: dict[str, Any] = {"gpu_kv": 18 * UNIT * SHARE[form] // 32, "host_kv": 0 if disk else None}
    if disk:
        short |= {"disk": tmp_path}
    for given in ({}, short):
        with engine(form, **given) as llm, llm.session() as session:
            said = [session.ask(texts[0], PARAMS).token_ids]
            llm.generate([prompt(60, seed=i) for i in (3, 4)], PARAMS)
            again = session.ask(texts[1], PARAMS)
            answers.append([*said, again.token_ids])
            assert again.cached_tokens == 45
            report = llm.report()
            moved = report["disk"]["parked"] if disk and given else report["sequences_moved"]
            assert bool(moved) is bool(given)
            check_tables(llm)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_session_is_of_its_form_alone(form: str, tmp_path: Path) -> None:
    with engine(form, session_dir=tmp_path) as llm:
        session = llm.session("talk")
        session.ask(prompt(40), PARAMS)
        session.save()
    for other in {"model", *FORMS} - {form}:
        with engine(other, session_dir=tmp_path) as llm, pytest.raises(InputError, match="other parameters"):
            llm.session("talk")
