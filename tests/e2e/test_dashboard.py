"""The dashboard in a browser, on a desktop and on a phone: `make test-dashboard`."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

import pytest
from aiohttp import test_utils, web

from mla_router import Router, RouterConfig
from support import browser, client
from support.processes import Running

pytestmark = pytest.mark.skipif(
    browser.BINARY is None, reason="no Chromium: apt-get install chromium"
)

# Folder for the screenshots in the docs.
PICTURES = os.environ.get("DASHBOARD_PICTURES")
MAX_PICTURE = 300 * 1024
# Seconds of traffic before the screenshot, so that its charts have data.
TRAFFIC_S = 120.0 if PICTURES else 1.0

PHONE = {"width": 390, "height": 844, "phone": True}
SCREENS = [{"width": 1440, "height": 900}, PHONE]

TILE = """(title) => [...document.querySelectorAll(".tile")]
  .find((tile) => tile.querySelector("h3").textContent == title)
  .querySelector(".value").textContent"""
# The number of points of the first chart.
POINTS = (
    """(document.querySelector(".tile .line-0")?.getAttribute("d") ?? "").split(/[ML]/).length"""
)
ROWS = """[...document.querySelectorAll("#workers tr")].map((row) =>
  [row.className, ...[...row.cells].filter((cell) => !cell.hidden).map((cell) => cell.innerText)])"""
ANSWERS = """[...document.querySelectorAll("#talk .assistant")].map((answer) =>
  [answer.querySelector(".body").textContent, answer.querySelector("footer").textContent])"""
NOTE = re.compile(
    r"first token after .+ · \d+ tokens?( · .+ per second)? · \d+ of \d+ prompt tokens"
)


async def _converse(url: str, number: int, until: float) -> None:
    """Sends growing conversations, whose prefix is cached from the second turn on."""
    async with client.session() as http:
        while time.monotonic() < until:
            text = f"This is conversation {number}. " * 12
            for _ in range(6):
                messages = [{"role": "user", "content": text}]
                body = {"model": "mla-small", "messages": messages, "max_tokens": 24}
                body |= {"stream": True, "ignore_eos": True}
                async with http.post(url + "/v1/chat/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()
                text += " Go on."


async def _ask(page: browser.Page, question: str, phone: bool) -> tuple[str, str]:
    """Returns the answer and the page's text about it."""
    before = len(await page.evaluate(ANSWERS))
    await page.type("#message", question, enter=not phone)
    if phone:
        await page.click("#send")
    answered = (
        f"(() => {{ const all = {ANSWERS}; return all.length > {before} && all.at(-1)[1] }})()"
    )
    await page.until(answered)
    answer, note = (await page.evaluate(ANSWERS))[-1]
    return answer, note


async def _anything(_: web.Request) -> web.Response:
    return web.json_response({})


@pytest.mark.parametrize("screen", SCREENS, ids=["desk", "phone"])
def test_it_shows_the_workers_and_talks_to_the_model(
    small_server: Running, tmp_path: Path, screen: dict[str, int | bool]
) -> None:
    phone = "phone" in screen

    async def check() -> None:
        async with browser.page(**screen) as page:  # type: ignore[arg-type]
            await page.open(small_server.url + "/dashboard")
            await page.until("document.querySelectorAll('#workers tr').length == 2")
            assert await page.evaluate("document.querySelector('#state').textContent") == "serving"
            about = await page.evaluate("document.querySelector('#about').textContent")
            assert about.startswith("mla-small · cache_aware policy · up ")

            end = time.monotonic() + TRAFFIC_S
            clients = (_converse(small_server.url, number, end) for number in range(4))
            traffic = asyncio.gather(*clients)
            await page.until(f"parseFloat(({TILE})('Output tokens/s')) > 0")
            await page.until(f"parseFloat(({TILE})('Prompt tokens/s')) > 0")
            await page.until(f"parseFloat(({TILE})('Prompt cache hits')) > 0")
            for title, form in {
                "Requests/s": r"[\d.,]+",
                "Requests in flight": r"\d+",
                "Time to first token": r"[\d.]+ m?s",
                "Time per output token": r"[\d.]+ m?s",
                "KV cache in use": r"[\d.]+%",
            }.items():
                shown = await page.evaluate(f"({TILE})({title!r})")
                assert re.fullmatch(form, shown), f"{title}: {shown}"
            await page.until(f"{ROWS}.every((row) => / m?s$/.test(row[7]))")
            for tone, name, *figures in await page.evaluate(ROWS):
                assert tone == "good" and name.startswith("127.0.0.1:") and "serving" in name
                assert len(figures) == 8 and figures[-1].endswith("% of 65.5K")
            if PICTURES:
                await asyncio.sleep(TRAFFIC_S * 0.9)

            for question in ("What is 17 + 25?", "What is 230 + 412?"):
                answer, note = await _ask(page, question, phone)
                assert answer.strip()
                assert NOTE.match(note), note

            # Nothing is wider than the screen, and the text field has room.
            wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not await page.evaluate(wide)
            input_width = "document.querySelector('#message').getBoundingClientRect().width"
            assert await page.evaluate(input_width) >= 300
            shot = Path(PICTURES or tmp_path) / f"dashboard{'_phone' if phone else ''}.png"
            await page.evaluate("scrollTo(0, 0)")
            await page.screenshot(shot)
            assert 10_000 < shot.stat().st_size <= MAX_PICTURE
            await traffic

            # A reload shows the same conversation.
            points = await page.evaluate(POINTS)
            said = await page.evaluate(ANSWERS)
            assert points > 3 and len(said) == 2
            await page.reload()
            await page.until(f"{POINTS} >= {points}")
            assert await page.evaluate(ANSWERS) == said
            assert not page.complaints

    asyncio.run(check())


def test_a_dead_worker_is_red_and_says_why() -> None:
    async def check() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", _anything)
        worker = test_utils.TestServer(app)
        await worker.start_server()
        url = str(worker.make_url("")).rstrip("/")
        config = RouterConfig(port=0, worker_urls=[url], health_check_interval_secs=0.1)
        with Router(config) as router:
            async with browser.page() as page:
                await page.open(router.url + "/dashboard")
                await page.until(f"{ROWS}[0]?.[0] == 'good'")
                # An engine without reports of its cache and tokens has a dash, not a wrong zero.
                assert (await page.evaluate(ROWS))[0][-1] == "–"
                await worker.close()
                await page.until(f"{ROWS}[0][0] == 'bad'")
                [[_, name, reason]] = await page.evaluate(ROWS)
                assert name.endswith("down")
                assert re.fullmatch(
                    r"cannot connect: .+, since \d\d:\d\d:\d\d \(\d+ s\)", reason
                ), reason
                assert "not serving" in await page.evaluate("document.title")
                state = await page.evaluate("document.querySelector('#state').textContent")
                assert state == "1 of 1 worker not serving"

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
                # The key is not in the address, and not kept after the tab is closed.
                assert await page.evaluate("location.search + location.hash") == ""
                assert await page.evaluate("localStorage.length") == 0

    asyncio.run(check())


def test_names_of_models_are_text() -> None:
    """The operator of a worker chooses the name of its model, so it may contain HTML."""
    name = "<img src=x onerror=\"document.title='taken'\">"

    async def check() -> None:
        app = web.Application()

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": name}, {"id": "other"}]})

        app.router.add_get("/v1/models", models)
        app.router.add_get("/{path:.*}", _anything)
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
                    assert name in await page.evaluate("document.querySelector('#about').innerText")
                    assert await page.evaluate("document.title") == "mla-router"
                    assert await page.evaluate("document.querySelectorAll('img').length") == 0
                    assert not page.complaints

    asyncio.run(check())


def test_every_control_has_an_accessible_name() -> None:
    async def check() -> None:
        with Router(RouterConfig(port=0)) as router:
            async with browser.page() as page:
                await page.open(router.url + "/dashboard")
                await page.until("!document.querySelector('main').hidden")
                await page.command("Accessibility.enable")
                tree = await page.command("Accessibility.getFullAXTree")
                controls = {"button", "textbox", "spinbutton", "radio", "combobox", "log", "table"}
                found = {}
                for node in tree["nodes"]:
                    if not node["ignored"] and node["role"]["value"] in controls:
                        found[node.get("name", {}).get("value")] = node["role"]["value"]
                assert found == {
                    "5 min": "radio",
                    "1 hour": "radio",
                    "Hide chat": "button",
                    "Workers": "table",
                    "New chat": "button",
                    "Conversation": "log",
                    "Message": "textbox",
                    "at most tokens": "spinbutton",
                    "Send": "button",
                }
                # The address for a screen on a wall.
                await page.click("#wall")
                await page.until("location.hash == '#wall'")
                await page.until("!document.querySelector('#chat').checkVisibility()")

    asyncio.run(check())
