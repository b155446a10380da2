"""Parameters of rows that make no sense are refused, and which one it is is said."""

import re
from typing import Any

import pytest

from coattn.cli.methods import describe
from coattn.errors import ConfigError
from coattn.method.row import compose
from coattn.method.table import METHODS

VALUES: dict[str, list[tuple[str, Any]]] = {
    "auto": [("quality", 1.1), ("quality", "best"), ("code_bytes", 6), ("pool_dtype", "int4")],
    "h2o": [("heavy", 0), ("heavy", True), ("recent", 1.5)],
    "hcattention": [
        *(("tau", 0), ("tau", 1.2), ("cap", 0), ("code_bits", 8), ("centroids", 1)),
        *(("union", "perhaps"), ("tail", "median"), ("host_dtype", "int2"), ("groups", -1)),
    ],
    "hgca": [("beta", -1), ("beta", "x"), ("alpha", 0), ("alpha", 1.5), ("capacity", 2)],
    "pqcache": [("compress", 0), ("compress", 1.5), ("subbits", 9), ("sinks", -1), ("recent_share", 2)],
    "quest": [("budget", 47), ("budget", "1k"), ("dense_layers", -1), ("sink_blocks", -1), ("slack", 2)],
    "random": [("budget", 0), ("budget", 1.5), ("block", 32), ("seed", -1)],
    "scout": [
        *(("pool_blocks", 0), ("recall_interval", -1), ("slack", 2), ("budget", 0)),
        *(("ahead_from", 0), ("ahead_from", 1.5), ("ahead_from", "high"), ("ahead_from", True)),
    ],
    "snapkv": [("window", 0), ("kernel", 0), ("block", 32)],
    "streaming": [("sinks", -1), ("recent", 0), ("block", 0), ("sinks", 1.5), ("sinks", True)],
    "tova": [("cache_size", 0)],
}
SENTENCES: list[tuple[str, dict[str, Any], str]] = [
    ("hcattention", {"code_bits": 12}, "8,192 centroids do not fit"),
    ("hcattention", {"union": "perhaps"}, "but must be true or false"),
    ("hcattention", {"codebook": "/nowhere"}, "There is no codebook"),
    ("infinigen", {"norm": "none"}, "must be own or before"),
    ("snapkv", {"budget": 32}, "budget is 32, but must be a whole number of at least 33"),
    ("snapkv", {"kernel": 4}, "kernel is 4, but must be odd"),
    ("streaming", {"positions": "true"}, "must be cache or text"),
]
CASES = [
    *((method, {name: value}, f"{name} is {value!r}") for method, found in VALUES.items() for name, value in found),
    *SENTENCES,
]


@pytest.mark.parametrize(("method", "params", "words"), CASES)
def test_bad_values_are_refused(method: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose(METHODS[method], **params).build()


def test_settings_for_experiments_are_taken_and_not_listed() -> None:
    row = METHODS["auto"]
    assert describe(row)["params"].keys() == {"quality", "host_dtype", "sketch"}
    assert row.internal <= compose(row).params.keys()
    assert compose(row, now=2.0).params["now"] == 2.0
    with pytest.raises(ConfigError) as refused:
        compose(row, qualty=1)
    assert "Did you mean quality?" in refused.value.hint
    with pytest.raises(ConfigError) as refused:
        compose(row, zzz=1)
    assert not any(name in refused.value.hint for name in ("pool_share", "code_bytes", "window_blocks"))
