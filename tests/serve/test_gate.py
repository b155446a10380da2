"""Who may ask: keys, hosts, origins, and what the command refuses to open."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.run import coattn
from tests.serve.running import HELLO, serving

from coattn.serve.settings import Settings
from coattn.transfer.address import is_local

PUBLIC = ("/", "/health", "/ready", "/metrics", "/page/main.js")
PATHS = ("/v1/models", "/v1/coattn/status", "/v1/coattn/live", "/openapi.json", "/nothing")


def test_with_keys_everything_but_probes_metrics_and_the_page_needs_one() -> None:
    with serving(Settings(port=0, names=("small",), keys=("alpha", "beta \u00fc"))) as server:
        for path in PUBLIC:
            assert server.client.get(path).status_code == 200, path
        for path in PATHS:
            for headers in ({}, {"authorization": "Bearer gamma"}, {"authorization": "alpha"}, {"x-api-key": "gamma"}):
                got = server.client.get(path, headers=headers)
                assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
        refused = server.post("/v1/chat/completions", {"not": "read"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        key = {"authorization": "Bearer alpha"}
        assert server.post("/v1/chat/completions", HELLO, headers=key).status_code == 200
        other = {"authorization": "bearer beta \u00fc".encode()}
        assert server.client.get("/v1/models", headers=other).status_code == 200
        far = server.client.get("/v1/models", headers={**key, "host": "model.example"})
        assert far.status_code == 200, "who has a key may use any name"


def test_every_request_is_a_line_of_the_log_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "coattn.serve.gate")
    with serving() as server:
        server.post("/v1/chat/completions", HELLO, headers={"x-request-id": "mine"})
        server.client.get("/no%0Asuch")
    lines = {each.levelname: each.getMessage() for each in caplog.records if each.name == "coattn.serve.gate"}
    assert re.fullmatch(r"POST /v1/chat/completions: 200 in \d+\.\d\d s, request mine", lines["INFO"])
    assert lines["DEBUG"].startswith("GET /no%0Asuch: 404 in ")


def test_no_page_may_ask_unless_its_origin_is_allowed() -> None:
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with serving() as server:
        got = server.client.options("/v1/chat/completions", headers=ask)
        assert got.status_code == 405
        assert "access-control-allow-origin" not in got.headers
    own = "authorization,content-type,x-stainless-arch,x-stainless-retry-count"
    with serving(Settings(port=0, names=("small",), origins=("https://page.example",), keys=("alpha",))) as server:
        got = server.client.options("/v1/chat/completions", headers={**ask, "access-control-request-headers": own})
        assert (got.status_code, got.headers["access-control-allow-headers"]) == (200, own), "as OpenAI's client asks"
        assert got.headers["access-control-allow-origin"] == "https://page.example"
        refused = server.client.get("/v1/models", headers=ask)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example", "the page can read why"
        got = server.client.options("/v1/chat/completions", headers={**ask, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in got.headers


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_which_hosts_are_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local
    assert not is_local("machine.example")


def test_the_command_refuses_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COATTN_API_KEY", raising=False)
    empty, keys = tmp_path / "empty", tmp_path / "keys"
    empty.write_text("# none\n")
    keys.write_text("# ours\nalpha\n\n")
    blank = tmp_path / "blank"
    blank.write_text("")
    for arguments, said in (
        (["--host", "0.0.0.0"], "no API key"),
        (["--port", "70000"], "65535"),
        (["--port", "http"], "'http' is not a whole number"),
        (["--origin", "page.example"], "'page.example', which is not an origin"),
        (["--api-key-file", str(blank)], "holds no API key"),
        (["--method", "nothing"], "nothing"),
        (["--set", "x=1"], "x"),
        (["--gpu-kv", "much"], "--gpu-kv"),
        (["--max-body", "much"], "--max-body"),
        (["--api-key-file", str(tmp_path / "none")], "no file"),
        (["--api-key-file", str(empty)], "holds no API key"),
        (["--disk-memory", "1GiB"], "needs --disk-cache"),
        (["--disk-cache", str(tmp_path), "--disk-memory", "much"], "--disk-memory"),
        (["--api-key-file", str(keys), "--host", "no.such.host.invalid"], "cannot be listened on"),
    ):
        result = coattn("serve", *arguments)
        assert result.returncode == 2, arguments
        assert said in result.stderr, arguments
        assert "hint:" in result.stderr
    monkeypatch.setenv("COATTN_API_KEY", " ")
    assert "COATTN_API_KEY is empty" in coattn("serve").stderr
