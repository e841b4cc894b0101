"""The dashboard in a browser: `make test-dashboard`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from aiohttp import test_utils, web

from mla_router import Router, RouterConfig
from support import browser, client
from support.processes import Running

pytestmark = pytest.mark.skipif(
    browser.BINARY is None, reason="no Chromium: apt-get install chromium"
)

# Where to put the picture of the page; the docs show one.
SCREENSHOT = os.environ.get("DASHBOARD_SCREENSHOT")
MAX_SCREENSHOT = 300 * 1024

TILE = """(title) => [...document.querySelectorAll(".tile")]
  .find((tile) => tile.querySelector("h3").textContent == title)
  .querySelector(".value").textContent"""
ROWS = """[...document.querySelectorAll("#workers tr")].map((row) =>
  [...row.cells].map((cell) => cell.textContent))"""
ANSWERS = """[...document.querySelectorAll("#talk .assistant")].map((answer) =>
  [answer.querySelector("p").textContent, answer.querySelector("footer").textContent])"""


async def _talk(url: str, number: int, turns: int) -> None:
    """A conversation that grows, so that its prefix is found in a cache from the second turn on."""
    text = f"This is conversation {number}. " * 12
    async with client.session() as http:
        for _ in range(turns):
            messages = [{"role": "user", "content": text}]
            body = {"model": "mla-small", "messages": messages, "max_tokens": 12}
            async with http.post(url + "/v1/chat/completions", json=body) as response:
                answer = await response.json()
            text += answer["choices"][0]["message"]["content"] + " Go on."


async def _ask(page: browser.Page, question: str) -> tuple[str, str]:
    """The answer and what the page says about it."""
    before = len(await page.evaluate(ANSWERS))
    await page.type("#message", question)
    answered = (
        f"(() => {{ const all = {ANSWERS}; return all.length > {before} && all.at(-1)[1] }})()"
    )
    await page.until(answered)
    answer, note = (await page.evaluate(ANSWERS))[-1]
    return answer, note


def test_it_shows_the_workers_and_talks_to_the_model(small_server: Running, tmp_path: Path) -> None:
    async def check() -> None:
        async with browser.page() as page:
            await page.open(small_server.url + "/dashboard")
            await page.until("document.querySelectorAll('#workers tr').length == 2")
            assert await page.evaluate("document.querySelector('#state').textContent") == "serving"
            await asyncio.gather(*(_talk(small_server.url, number, 6) for number in range(6)))

            # Eighteen answers and more, and most of their prompts was cached.
            await page.until(f"parseFloat(({TILE})('Prompt cache hits')) > 50")
            assert "ms" in await page.evaluate(f"({TILE})('Time to first byte')")
            assert await page.evaluate(f"({TILE})('Errors per second')") == "0.0"
            rows = await page.evaluate(ROWS)
            assert [row[0].startswith("http://127.0.0.1:") for row in rows] == [True, True]
            assert all("%" in row[4] for row in rows), rows

            traffic = asyncio.gather(*(_talk(small_server.url, number, 12) for number in range(4)))
            await page.evaluate("document.querySelector('#limit').value = 24")
            await page.until(f"parseFloat(({TILE})('Requests per second')) > 0")
            for question in ("What is 17 + 25?", "And 30 more?"):
                answer, note = await _ask(page, question)
                assert answer.strip()
                assert "first token after" in note
                assert "24 tokens" in note
                assert "prompt tokens cached" in note
            assert not page.complaints

            shot = Path(SCREENSHOT or tmp_path / "dashboard.png")
            await page.screenshot(shot)
            assert 10_000 < shot.stat().st_size <= MAX_SCREENSHOT
            await traffic

            # A long answer can be stopped, and the page goes on from there.
            await page.evaluate("document.querySelector('#limit').value = 4000")
            await page.type("#message", "Tell me everything.")
            await page.until(f"{ANSWERS}.length == 3 && {ANSWERS}.at(-1)[0].length > 50")
            await page.evaluate("document.querySelector('#send').click()")
            await page.until(f"{ANSWERS}.at(-1)[1] == 'stopped'")
            await page.evaluate("document.querySelector('#clear').click()")
            assert await page.evaluate(ANSWERS) == []

    asyncio.run(check())


def test_it_asks_for_the_key() -> None:
    async def check() -> None:
        config = RouterConfig(port=0, api_key=["for-clients"], admin_api_key="for-admins")
        with Router(config) as router:
            async with browser.page() as page:
                await page.open(router.url + "/dashboard")
                await page.until("!document.querySelector('#unlock').hidden")
                assert await page.evaluate("document.querySelector('main').hidden")
                await page.type("#admin-key", "a guess")
                await page.until("!document.querySelector('#refused').hidden")
                await page.evaluate("document.querySelector('#admin-key').value = ''")
                await page.type("#admin-key", "for-admins")
                await page.until("!document.querySelector('main').hidden")
                await page.until("!document.querySelector('#nobody').hidden")
                # Not in the address, and not kept beyond the tab.
                assert await page.evaluate("location.search + location.hash") == ""
                assert await page.evaluate("localStorage.length") == 0

    asyncio.run(check())


def test_names_of_models_are_text() -> None:
    """Whoever runs a worker chooses the name of its model."""
    name = "<img src=x onerror=\"document.title='taken'\">"

    async def check() -> None:
        app = web.Application()

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": name}, {"id": "other"}]})

        async def anything(_: web.Request) -> web.Response:
            return web.json_response({})

        app.router.add_get("/v1/models", models)
        app.router.add_get("/{path:.*}", anything)
        async with test_utils.TestServer(app) as worker:
            url = str(worker.make_url("")).rstrip("/")
            with Router(RouterConfig(port=0, worker_urls=[url])) as router:
                async with browser.page() as page:
                    await page.open(router.url + "/dashboard")
                    await page.until("document.querySelectorAll('#model option').length == 2")
                    shown = (
                        "[...document.querySelectorAll('#model option')].map((o) => o.textContent)"
                    )
                    assert name in await page.evaluate(shown)
                    assert await page.evaluate("document.title") == "mla-router"
                    assert await page.evaluate("document.querySelectorAll('img').length") == 0
                    assert not page.complaints

    asyncio.run(check())
