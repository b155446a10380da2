"""README's table: a row of speed joined with a row of quality, and what is not joined."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from lab.tests.run import coattn_lab
from tests.tools.evaluate.tiny import model_and_text

from coattn.errors import InputError
from coattn_lab.evaluate.readme_table import HEAD, NONE, join, read_list, table, times, unlike
from coattn_lab.evaluate.readme_table import Wanted as Row

WHERE = {
    "command": "coattn x", "commit": "0123456789abcdef0123456789abcdef01234567", "tree": "aa", "versions": {},
    "hardware": {"cpu": "a CPU", "cores": 16, "gpu": "a GPU"},
}  # fmt: skip
EVERY = ["random weights", "random keys and values"]
SETTINGS = {"block": 32, "window_blocks": 128, "beta": 1, "capacity": 0.1, "alpha": 0.1}


def row(method: str, tokens_per_s: float, batch: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "shapes": "qwen3-8b", "batch": batch, "context": 32768, "params": {}, "settings": {},
        "dtype": "bfloat16", "gpu_budget": None, "simulated": EVERY, "kept_share": None,
        "ms_per_step": 1e3 * batch / tokens_per_s, "floor_ms": 800 * batch / tokens_per_s,
        "tokens_per_s": tokens_per_s, "notes": {},
        "gpu_kv_bytes": 1 << 30, "host_kv_bytes": 18 << 30, **more,
    }  # fmt: skip


SPEED = {
    "rows": [
        row("full", 400.0, settings={"block": 32}, host_kv_bytes=0),
        row("hgca", 250.0, settings=SETTINGS, kept_share=0.07, params={"window_blocks": 128, "kept": [0.07]},
            simulated=[*EVERY, "assumed lists: 7.0% of DRAM's entries kept"]),
        row("hgca", 100.0, settings=SETTINGS, kept_share=0.3, params={"window_blocks": 128, "kept": [0.3]}),
        row("transformers-full", 40.0),
        row("full", 999.0, batch=8),
    ],
    **WHERE,
}  # fmt: skip
QUALITY = {
    "evaluation": "sweep", "model": "smollm2", "dtype": "float32", "length": 8192, "prefill": 8064, "starts": [0],
    "text": {"name": "pride.txt", "sha256": "00"}, "complete": True,
    "rows": [{"row": "hgca,window_blocks=128,beta=16", "method": "hgca", "ratio": 1.0185, "ratio_95": [1.0011, 1.0362],
              "kl": 0.011, "params": {**SETTINGS, "beta": 16, "capacity": 1.0}, "kept_mean": 0.072}],
    **WHERE,
}  # fmt: skip
LISTED = """
[[row]]
speed = "speed.json"
method = "full"
where = { batch = 4 }

[[row]]
speed = "speed.json"
method = "hgca"
where = { kept_share = 0.07 }
quality = "quality.json"
sweep_row = "hgca,window_blocks=128,beta=16"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "results"
    made.mkdir()
    write(made, SPEED, QUALITY)
    (made / "readme.toml").write_text(LISTED)
    return made


def write(folder: Path, speed: dict[str, Any], quality: dict[str, Any]) -> None:
    (folder / "speed.json").write_text(json.dumps(speed))
    (folder / "quality.json").write_text(json.dumps(quality))


def test_a_row_has_speed_and_quality_at_the_same_settings(folder: Path) -> None:
    text = table(folder, folder.parent)
    lines = text.splitlines()
    assert lines[0] == "| " + " | ".join(HEAD) + " |"
    assert lines[2] == (
        "| `full` | 4, 32,768 | 1.0 GiB, 0 B | 10.00, 1.25 | 400 |  | 10.00 | exact |  | [speed](results/speed.json) |"
    )
    assert lines[3] == (
        "| `hgca`, window 4,096, kept 7% | 4, 32,768 | 1.0 GiB, 18.0 GiB | 16.00, 1.25 | 250 | 0.62 | 6.25 "
        "| 1.0185 (1.0011 to 1.0362), 0.011 | assumed lists: 7.0% of DRAM's entries kept "
        "| [speed](results/speed.json), [quality](results/quality.json) |"
    )
    assert "random weights, keys and values: qwen3-8b in bfloat16 on a GPU and 16 CPU cores." in text
    assert "Quality: smollm2 (float32), 8,192 tokens of pride.txt, the last 128 decoded" in text


def test_no_list_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    assert table(tmp_path / "results", tmp_path) == NONE


@pytest.mark.parametrize(
    ("speed", "quality", "said"),
    [
        ({"settings": {**SETTINGS, "window_blocks": 64}}, {}, "window_blocks 64 and 128"),
        ({"settings": {**SETTINGS, "alpha": 0.2}}, {}, "alpha 0.2 and 0.1"),
        ({"kept_share": 0.3}, {}, "kept 30% and 7.2%"),
        ({"kept_share": None}, {}, "beta 1 and 16"),
        ({"settings": {}}, {}, "does not record its settings"),
        ({}, {"kept_mean": None}, "does not record the kept share"),
        ({}, {"method": "scout"}, "method hgca and scout"),
        ({"settings": {**SETTINGS, "groups": 32}, "notes": {"group_width": 4}}, {"group_width": 2}, "group_width 4"),
        ({}, {}, None),
    ],
)
def test_unlike_settings_are_not_joined(speed: dict[str, Any], quality: dict[str, Any], said: str | None) -> None:
    found = unlike({**SPEED["rows"][1], **speed}, {**QUALITY["rows"][0], **quality})  # type: ignore[dict-item]
    assert (found is None) if said is None else (found is not None and said in found)


def test_a_codebook_is_compared_by_what_it_is() -> None:
    own = {"tau": 1.0, "cap": 99, "groups": 32, "centroids": 8192, "codebook": None, "host_dtype": "model"}
    other = {"tau": 0.95, "cap": None, "groups": None, "centroids": None, "codebook": "t16", "host_dtype": "model"}
    notes = {"group_width": 4, "code_centroids": 8192}
    speed = row("hcattention", 9.0, settings=own, kept_share=0.065, notes=notes)
    quality = {"method": "hcattention", "params": other, "kept_mean": 0.066, **notes}
    assert unlike(speed, quality) is None
    assert unlike(speed, {**quality, "code_centroids": 256}) == "code_centroids 8192 and 256"
    assert unlike(speed, {**quality, "params": {**other, "host_dtype": "int4"}}) == "host_dtype model and int4"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Row("speed.json", "hgca", {"batch": 4}, "quality.json", "x"), "has 2 rows of hgca"),
        (Row("speed.json", "scout"), "has 0 rows of scout"),
        (Row("absent.json", "full"), "names absent.json, which is not in results/"),
        (Row("speed.json", "hgca", {"kept_share": 0.07}), "hgca is not exact, and its row has no quality"),
        (Row("speed.json", "hgca", {"kept_share": 0.07}, "quality.json", "hgca"), "has no row 'hgca'"),
        (
            Row("speed.json", "hgca", {"kept_share": 0.3}, "quality.json", "hgca,window_blocks=128,beta=16"),
            "at unlike settings: kept 30% and 7.2%",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(folder: Path, wanted: Row, said: str) -> None:
    with pytest.raises(InputError, match=said):
        join(wanted, folder)


@pytest.mark.parametrize("which", ["speed", "quality"])
@pytest.mark.parametrize("commit", [None, "0123456789ab-dirty"])
def test_a_result_without_a_clean_commit_is_refused(folder: Path, which: str, commit: str | None) -> None:
    files = {"speed": copy.deepcopy(SPEED), "quality": copy.deepcopy(QUALITY)}
    files[which]["commit"] = commit  # type: ignore[assignment]
    write(folder, files["speed"], files["quality"])
    with pytest.raises(InputError, match=f"{which}.json may not be published"):
        table(folder, folder.parent)


def test_a_row_that_does_not_say_what_is_simulated_is_refused(folder: Path) -> None:
    speed = copy.deepcopy(SPEED)
    del speed["rows"][0]["simulated"]  # type: ignore[attr-defined]
    write(folder, speed, QUALITY)
    with pytest.raises(InputError, match="does not say what is simulated"):
        table(folder, folder.parent)


def test_batches_that_differ_are_compared_only_in_the_same_memory(folder: Path) -> None:
    speed = copy.deepcopy(SPEED)
    speed["rows"][0]["batch"] = 1  # type: ignore[index]
    speed["rows"].pop()  # type: ignore[attr-defined]
    wanted = read_list(folder / "readme.toml")[1]
    (folder / "readme.toml").write_text(LISTED[LISTED.rindex("[[row]]") :])
    write(folder, speed, QUALITY)
    assert join(wanted, folder).row["batch"] == 4
    assert " | 16.00, 1.25 | 250 |  | 6.25 |" in table(folder, folder.parent)
    write(folder, {**speed, "memory": {"gpu_memory": 48 << 30}}, QUALITY)
    assert " | 16.00, 1.25 | 250 | 0.62 (its batch 1) | 6.25 |" in table(folder, folder.parent)


@pytest.mark.parametrize("text", ["[[row]]\nspeed = 1 2", "[[row]]\nspeed = 'a'\nmethod = 'b'\nmore = 1", "[[row]]"])
def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "readme.toml").write_text(text)
    with pytest.raises(InputError, match="cannot be read"):
        read_list(tmp_path / "readme.toml")


def test_eight_rows_are_the_most(tmp_path: Path) -> None:
    (tmp_path / "readme.toml").write_text(9 * "[[row]]\nspeed = 'a'\nmethod = 'full'\n")
    with pytest.raises(InputError, match="has 9 rows"):
        read_list(tmp_path / "readme.toml")


def test_files_as_the_commands_write_them_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATTN_COMMIT", str(WHERE["commit"]))  # which git does not know, so it is taken as given
    folder, model = tmp_path / "results", model_and_text(tmp_path / "model")
    folder.mkdir()
    text = ("--model", str(model), "--text", str(model / "text.txt"), "--prefill", "392", "--decode", "8")
    row = "hgca,window_blocks=2,beta=0.5"
    done = coattn_lab("eval", "sweep", row, *text, "--device", "cpu", "--out", str(folder / "quality.json"), "--json")
    kept = json.loads(done.stdout)["rows"][0]["kept_mean"]
    few = ("--shapes", "tiny", "--device", "cpu", "--context", "300", "--steps", "4", "--seconds", "0.1", "--peers")
    own = ("--methods", "full,hgca", "--set", "window_blocks=2", "--kept", f"{kept:.3f}")
    assert coattn_lab("bench", "decode", *few, *own, "--out", str(folder / "speed.json")).returncode == 0
    wanted = Row("speed.json", "hgca", {}, "quality.json", row)
    joined = join(wanted, folder)
    assert joined.row["kept_share"] == pytest.approx(kept, abs=1e-3)
    for other in ("full", "transformers-full"):
        assert float(times(joined, other)) > 0
    (folder / "readme.toml").write_text(
        f"[[row]]\nspeed = 'speed.json'\nmethod = 'hgca'\nquality = 'quality.json'\nsweep_row = '{row}'\n"
    )
    assert "| `hgca`, window 64, kept " in table(folder, tmp_path)
