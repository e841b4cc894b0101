"""The dashboard's chat in a browser, with scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import test_utils, web

from mla_router import Router, RouterConfig
from support import browser

pytestmark = pytest.mark.skipif(browser.BINARY is None, reason="no Chromium")

ANSWER = """\
# Sum

The **sum** of `17` and *25* is [42](https://example.org/42).
See https://example.org/sums, not [this](javascript:document.title='taken').

1. Add the ones:
   - 7 + 5 = 12
2. Add the tens.

| step | result |
|---|---|
| ones | `12` |

```python
print("<b>17</b>" + "25")
```

> <img src=x onerror="document.title='taken'"> <script>document.title='taken'</script>
"""
BODY = "document.querySelector('#talk .assistant .body')"
TEXTS = "[...document.querySelectorAll('#talk article .body')].map((body) => body.innerText)"


class Engine:
    """Answers each conversation with a text in several pieces, or without end."""

    def __init__(self, answer: str | None = ANSWER) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.left = asyncio.Event()  # a client has left before the end

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._write(response)
        except (ConnectionResetError, asyncio.CancelledError):
            self.left.set()
            raise
        return response

    async def _write(self, response: web.StreamResponse) -> None:
        async def event(data: str) -> None:
            await response.write(f"data: {data}\n\n".encode())

        async def write(**delta: str) -> None:
            await event(json.dumps({"choices": [{"index": 0, "delta": delta}]}))

        if self.answer is None:
            while True:
                await write(content="on and ")
                await asyncio.sleep(0.02)
        await write(reasoning_content="Ones, then tens.")
        for at in range(0, len(self.answer), 7):
            await write(content=self.answer[at : at + 7])
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        await event(json.dumps({"choices": [], "usage": usage}))
        await event("[DONE]")


async def _anything(_: web.Request) -> web.Response:
    return web.json_response({})


@contextlib.asynccontextmanager
async def _page(engine: Engine, **config: Any) -> AsyncIterator[browser.Page]:
    app = web.Application(handler_args={"handler_cancellation": True})
    app.router.add_post("/v1/chat/completions", engine._chat)
    app.router.add_get("/{path:.*}", _anything)
    async with test_utils.TestServer(app) as worker:
        url = str(worker.make_url("")).rstrip("/")
        with Router(RouterConfig(port=0, worker_urls=[url], **config)) as router:
            async with browser.page() as page:
                await page.open(router.url + "/dashboard")
                yield page


async def _until_answered(page: browser.Page, count: int) -> None:
    await page.until(
        f"document.querySelectorAll('#talk .assistant').length == {count}"
        " && document.querySelector('#send').textContent == 'Send'"
    )


def test_markdown_becomes_elements_and_nothing_else_does() -> None:
    async def check() -> None:
        engine = Engine()
        async with _page(engine) as page:
            await page.until("document.querySelector('#state').textContent == 'serving'")
            await page.type("#message", "What is 17 + 25?")
            await _until_answered(page, 1)

            async def texts(selector: str) -> list[str]:
                found = f"[...{BODY}.querySelectorAll({selector!r})].map((node) => node.innerText)"
                shown: list[str] = await page.evaluate(found)
                return [text.strip() for text in shown]

            assert await texts("h3") == ["Sum"]
            assert await texts("strong, em") == ["sum", "25"]
            assert await texts("ol > li > ul > li") == ["7 + 5 = 12"]
            assert await texts("th") == ["step", "result"]
            assert await texts("td") == ["ones", "12"]
            assert await texts("pre code") == ['print("<b>17</b>" + "25")']
            assert "<script>" in (await texts("blockquote"))[0]
            links = await page.evaluate(f"[...{BODY}.querySelectorAll('a')].map((a) => a.href)")
            assert links == ["https://example.org/42", "https://example.org/sums"]
            assert await page.evaluate(f"{BODY}.querySelectorAll('img, script, b').length") == 0
            assert await page.evaluate("document.title") == "mla-router"
            thought = "document.querySelector('#talk .thinking p').textContent"
            assert await page.evaluate(thought) == "Ones, then tens."
            note = "document.querySelector('#talk .assistant footer').textContent"
            assert "3 tokens" in await page.evaluate(note)
            assert not page.complaints

    asyncio.run(check())


def test_a_conversation_goes_on_after_a_reload_and_has_several_lines() -> None:
    async def check() -> None:
        engine = Engine("Yes.")
        async with _page(engine) as page:
            await page.until("document.querySelector('#state').textContent == 'serving'")
            height = "document.querySelector('#message').getBoundingClientRect().height"
            before = await page.evaluate(height)
            await page.type("#message", "one\ntwo\nthree\nfour", enter=False)
            assert await page.evaluate(height) > before
            await page.press_enter(shift=True)
            await page.type("#message", "five")
            await _until_answered(page, 1)
            assert engine.requests[0]["messages"][0]["content"] == "one\ntwo\nthree\nfour\nfive"
            await page.reload()
            await page.until("document.querySelector('#state').textContent == 'serving'")
            await page.until(f"{TEXTS}.length == 2")
            await page.type("#message", "Again?")
            await _until_answered(page, 2)
            assert [message["role"] for message in engine.requests[1]["messages"]] == [
                "user",
                "assistant",
                "user",
            ]
            await page.click("#clear")
            assert await page.evaluate(TEXTS) == []
            await page.type("#message", "New.")
            await _until_answered(page, 1)
            assert len(engine.requests[2]["messages"]) == 1

    asyncio.run(check())


def test_an_answer_can_be_stopped() -> None:
    async def check() -> None:
        engine = Engine(None)
        async with _page(engine) as page:
            await page.until("document.querySelector('#state').textContent == 'serving'")
            await page.type("#message", "Tell me everything.")
            await page.until(f"{BODY}?.innerText.length > 50")
            await page.click("#send")
            await _until_answered(page, 1)
            notes = "[...document.querySelectorAll('#talk footer')].map((note) => note.innerText)"
            assert (await page.evaluate(notes))[-1] == "stopped"
            async with asyncio.timeout(browser.EVENT_TIMEOUT_S):
                await engine.left.wait()

    asyncio.run(check())


def test_the_key_of_the_page_opens_the_chat_and_a_failed_question_can_be_asked_again() -> None:
    async def check() -> None:
        engine = Engine("Yes.")
        async with _page(engine, api_key=["a-key"]) as page:
            await page.until("!document.querySelector('#unlock').hidden")
            await page.type("#admin-key", "a-key")
            await page.until("document.querySelector('#state').textContent == 'serving'")
            await page.type("#message", "Does one key do?")
            await _until_answered(page, 1)
            assert (await page.evaluate(TEXTS))[-1] == "Yes."
            await page.click("#clear")
            await page.evaluate("sessionStorage.setItem('client-key', 'a guess')")
            await page.type("#message", "And a wrong one?")
            await page.until("document.querySelector('#talk footer.bad') !== null")
            assert await page.evaluate("document.querySelector('#message').value") == (
                "And a wrong one?"
            )
            await page.until("!document.querySelector('#client-key-row').hidden")
            await page.evaluate("document.querySelector('#client-key').value = 'a-key'")
            await page.click("#send")
            await page.until(f"{TEXTS}.at(-1) == 'Yes.'")

    asyncio.run(check())
