"""The page: its files, its headers, and, where there is a browser, what it does."""

from __future__ import annotations

import importlib.util
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.engine.small import DEVICE
from tests.serve.running import Running, serving
from tests.serve.test_life import slow

from coattn.serve.guide import Grammars
from coattn.serve.routes.page import files
from coattn.serve.schema.base import ResponseFormat
from coattn.serve.settings import Settings

BROWSER = shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    BROWSER is None or importlib.util.find_spec("playwright") is None, reason="needs playwright and chromium"
)
SAID = (
    "**bold** <img src=x onerror=\"document.title='ran'\"> <script>document.title='ran'</script> [a](javascript:x) end"
)


def test_the_pages_files_and_nothing_else(server: Running) -> None:
    page = server.client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    asked = set(re.findall(r'(?:href|src)="(/page/[^"]+)"', page.text))
    for name, text in files().items():
        if name.endswith(".js") and "vendor" not in name:
            asked |= set(re.findall(r'from "(/page/[^"]+)"', text.decode()))
            assert "innerHTML" not in text.decode(), name
    for path in asked:
        assert server.client.get(path).status_code == 200, path
    assert not re.search(r"<script>|style=|onclick=", page.text), "nothing that the policy forbids"
    for name in ("none.js", "../app.py", "%2e%2e/app.py", "vendor/../../app.py"):
        assert server.client.get(f"/page/{name}").status_code == 404, name
    assert "MIT" in server.client.get("/page/vendor/LICENSES.txt").text


def test_the_page_needs_no_key_but_the_rest_does() -> None:
    with serving(Settings(port=0, names=("small",), keys=("secret",))) as server:
        assert server.client.get("/").status_code == 200
        assert server.client.get("/page/main.js").status_code == 200
        assert server.client.get("/v1/coattn/live").status_code == 401


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A browser's page on a server whose model always says the same."""
    from playwright.sync_api import sync_playwright

    spell = ResponseFormat(type="regex", regex=re.escape(SAID))
    compiled = Grammars.compile
    monkeypatch.setattr(Grammars, "compile", lambda self, wanted, llm: compiled(self, spell, llm))
    with serving(method="cpu", window_blocks=1) as server, sync_playwright() as play:
        slow(server, monkeypatch, 0.03)  # long enough for a person, or a test, to see something
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        made = browser.new_page()
        made.set_default_timeout(60_000)
        made.problems = []  # type: ignore[attr-defined]
        made.on("pageerror", lambda error: made.problems.append(str(error)))
        made.goto(server.url + "/")
        yield made
        browser.close()


def send(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


@needs_browser
def test_a_chat_in_the_browser(page: Any, tmp_path: Path) -> None:
    send(page, "hello")
    page.locator("#stop").wait_for()
    assert page.locator(".foot button").count() == 0, "no button that does nothing while an answer is written"
    strip = page.locator(".strip canvas").first
    strip.wait_for()
    seen = set()
    while not page.locator("#stop").is_hidden():
        if strip.count():
            seen.add(strip.get_attribute("aria-label"))
        time.sleep(0.05)
    assert len([each for each in seen if each and "in DRAM" in each]) > 1, f"the strip changes as it answers: {seen}"
    answer = page.locator(".message.assistant .body")
    assert answer.locator("strong").inner_text() == "bold"
    assert "end" in answer.inner_text()
    assert page.title() == "coattn", "nothing of the model's has run"
    assert page.evaluate("document.querySelectorAll('#talk script, #talk [onerror], #talk a[href]').length") == 0
    assert "exact" in page.inner_text("#state")
    assert "ms for 1 request" in page.inner_text("#numbers")

    page.reload()
    page.locator(".message.assistant strong").wait_for()
    assert page.locator(".message").count() == 2
    assert page.locator("#list li").count() == 1

    page.get_by_role("button", name="Regenerate").click()
    page.locator("#stop").wait_for()
    while len(page.inner_text(".message.assistant .body")) < 2:  # the policy lets no test evaluate text in the page
        time.sleep(0.05)
    page.click("#stop")
    page.locator("#note", has_text="stopped").wait_for()
    cut = page.inner_text(".message.assistant .body")
    assert 0 < len(cut) < len(answer.inner_text()) + 40
    assert "end" not in cut

    page.get_by_role("button", name="Edit").click()
    assert page.locator(".message").count() == 0
    assert page.input_value("#text") == "hello"
    note = tmp_path / "note.txt"
    note.write_text("from a file")
    page.set_input_files("#attach", str(note))
    page.locator("#files li", has_text="note.txt").wait_for()
    send(page, "two")
    page.locator(".message.user", has_text="note.txt").wait_for()
    page.click("#stop")
    page.locator("#note", has_text="stopped").wait_for()
    stored = page.evaluate("localStorage.getItem('coattn.conversations')")
    assert "from a file" in stored
    assert page.problems == []


@needs_browser
def test_the_page_says_what_is_there_and_fits_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 780})
    assert "Ask the model" in page.inner_text(".hello")
    for opens, bar in (("Chats", "#side"), ("Memory", "#live")):
        assert page.locator(bar).is_hidden()
        page.get_by_role("button", name=opens).click()
        assert page.locator(bar).bounding_box()["x"] == 0
        page.get_by_role("button", name=opens).click()
        assert page.locator(bar).is_hidden(), "it does not cover the text"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    send(page, "hello")
    page.locator("#numbers:not(:empty)").wait_for(state="attached")
    assert "of the model's weights: " in page.locator("#live").text_content()
    page.click("#stop")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show = (
        "text => import('/page/markdown.js').then((made) => document.querySelector('#talk').append(made.render(text)))"
    )
    page.evaluate(show, "```python\nx = 1\n```")
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n"
    assert page.problems == []


@needs_browser
@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU")
def test_no_gpu_is_shown_where_there_is_none(page: Any) -> None:
    send(page, "hello")
    page.locator("#numbers:not(:empty)").wait_for()
    assert "GPU" not in page.inner_text("#live").replace("There is no GPU here", "")
    assert "GPU" not in page.get_attribute("#step", "aria-label")
    page.click("#stop")


@needs_browser
def test_a_beginning_that_two_requests_have_is_shown_as_shared(page: Any) -> None:
    text = "the same question, long enough for some blocks " * 2
    other = threading.Thread(target=ask, args=(page.url, text))
    send(page, text)
    page.locator(".strip canvas").first.wait_for()
    other.start()
    page.locator(".strip canvas[aria-label*='in a shared prefix']").nth(1).wait_for()
    page.click("#stop")
    other.join(60)
    assert page.problems == []


def ask(url: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "temperature": 0}
    assert httpx.post(f"{url}v1/chat/completions", json=body, timeout=60, trust_env=False).status_code == 200
