"""The file that travels: what was written is read, and what is none is refused with its line."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.evaluate.tasks.small_prompts import made
from tests.engine.small import tokenizer

from coattn.errors import InputError
from coattn_lab.evaluate.tasks.prompts import encode, read_prompts, write_prompts


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    prompts = [replace(made()[0], context="line\u2028 \x85 end"), *made()[1:]]
    sha256 = write_prompts(tmp_path / name, prompts, {"command": "x"})
    found = read_prompts(tmp_path / name)
    assert list(found.prompts) == prompts
    assert (found.about["command"], found.sha256) == ("x", sha256)
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith(".gz") else b'{"')


def test_a_packed_file_has_the_same_hash(tmp_path: Path) -> None:
    assert write_prompts(tmp_path / "a", made(), {}) == write_prompts(tmp_path / "b.gz", made(), {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rule": "fuzzy"}, "line 2 has the rule 'fuzzy'"),
        ({"outputs": []}, "expects nothing"),
        ({"new_tokens": 0}, "wrong kind"),
        ({"context": 3}, "wrong kind"),
        ({"question": ""}, "no question"),
        ({"more": 1}, "keys of a prompt"),
    ],
)
def test_bad_lines_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    line = {**asdict(made()[0]), **change}
    (tmp_path / "p").write_text('{"coattn_prompts": 1}\n' + json.dumps(line) + "\n")
    with pytest.raises(InputError, match=said):
        read_prompts(tmp_path / "p")


def test_other_files_are_refused(tmp_path: Path) -> None:
    twice = '{"coattn_prompts": 1}\n' + 2 * (json.dumps(asdict(made()[0])) + "\n")
    for data, said in (
        (b"", "no file of prompts"),
        (b"{}", "no file of prompts"),
        (gzip.compress(b"hello")[:-4], "no file of prompts"),
        (b"\xff\xfe", "no file of prompts"),
        (b'{"coattn_prompts": 1}\n', "has no prompts"),
        (b'{"coattn_prompts": 1}\n{', "line 2 is not JSON"),
        (twice.encode(), "two prompts of one name"),
    ):
        (tmp_path / "p").write_bytes(data)
        with pytest.raises(InputError, match=said):
            read_prompts(tmp_path / "p")


def test_the_question_begins_where_it_does() -> None:
    prompt = made()[0]
    ids, split = encode(prompt, tokenizer())
    assert tokenizer().decode(ids) == f"user: {prompt.context}{prompt.question}\nA:"
    assert tokenizer().decode(ids[:split]) == f"user: {prompt.context}"
    raw, border = encode(prompt, tokenizer(), chat=False)
    assert tokenizer().decode(raw[:border]) == prompt.context
    assert tokenizer().decode(raw[border:]) == prompt.question + "A:"
