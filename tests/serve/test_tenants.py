"""Who shares what is stored: requests of one key, and nobody else's; and sessions by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.serve.running import Running, serving

from coattn.serve.settings import Settings

ASK = {"prompt": "x" * 50, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
CHAT = "/v1/chat/completions"
KEYS = Settings(port=0, names=("small",), keys=("alpha", "beta"))


def cached(server: Running, key: str | None = None, path: str = "/v1/completions", **more: Any) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    got = server.post(path, {**ASK, **more}, headers=headers)
    assert got.status_code == 200, got.text
    found: int = got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_keys_and_salts_share_nothing() -> None:
    with serving(KEYS) as server:
        assert [cached(server, key) for key in ("alpha", "alpha", "beta", "beta", "alpha")] == [0, 48, 0, 48, 48]
        read = server.llm.report()["prefill_tokens"]
        assert cached(server, "alpha", cache_salt="mine") == 0
        assert server.llm.report()["prefill_tokens"] - read == 50, "another salt reads everything"
        assert cached(server, "alpha", cache_salt="mine") == 48
        assert cached(server, "beta", cache_salt="mine") == 0
        told = server.client.get("/metrics", headers={"Authorization": "Bearer alpha"}).text
        assert 'coattn:prefix_cache_hits_total{model_name="small"} 192.0' in told


def test_a_second_key_reads_as_much_as_the_first() -> None:
    """Over 50 pairs, to the token: what one key has asked saves another nothing."""
    with serving(KEYS) as server:

        def read(key: str, text: str) -> int:
            before = server.llm.report()["prefill_tokens"]
            cached(server, key, prompt=text, max_tokens=1)
            count: int = server.llm.report()["prefill_tokens"] - before
            return count

        pairs = [(read("alpha", text), read("beta", text)) for text in (f"{i:03} " + "word " * 9 for i in range(50))]
        assert pairs == [(49, 49)] * 50
        assert read("beta", "049 " + "word " * 9) == 0, "a key's own is found; its last token is a decode step's"


def test_metrics_of_a_disk_tier(tmp_path: Path) -> None:
    with serving(KEYS, disk=tmp_path, disk_memory="1MiB") as server:
        cached(server, "alpha")
        told = server.client.get("/metrics", headers={"Authorization": "Bearer alpha"}).text
        assert 'coattn:disk_cache_hits_total{model_name="small"} 0.0' in told
        assert 'coattn:disk_cache_bytes{model_name="small"}' in told
        assert "coattn:prompt_tokens_per_second" in told
        assert "coattn:disk_cache_read_bytes_per_second" not in told, "nothing was read yet"


def test_a_session_goes_on_and_belongs_to_its_key() -> None:
    with serving(KEYS, method="streaming", sinks=4, recent=200) as server:
        talk = [{"role": "user", "content": "hello there"}]
        first = server.post(
            CHAT,
            {"messages": talk, "max_tokens": 4, "temperature": 0, "session_id": "s", "ignore_eos": True},
            headers={"Authorization": "Bearer alpha"},
        ).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        more = {"path": "/v1/completions", "session_id": "t"}
        assert cached(server, "alpha", **more) == 0
        longer = {**more, "prompt": "x" * 50 + "and on"}
        assert cached(server, "beta", **longer) == 0
        # a row that shares nothing between requests goes on in its session, as far as the text is the same
        assert cached(server, "alpha", **longer) == 48
        wrong = server.post("/v1/completions", {**ASK, **more, "n": 2}, headers={"Authorization": "Bearer alpha"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "session_id"
        wrong = server.post("/v1/completions", {**ASK, "session_id": "../x"}, headers={"Authorization": "Bearer alpha"})
        assert wrong.status_code == 400
