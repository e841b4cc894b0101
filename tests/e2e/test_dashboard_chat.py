"""The dashboard's chat in a browser, with scripted answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
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
PREVIEWS = "document.querySelectorAll('#pictures img').length"
SHOWN = "[...document.querySelectorAll('#talk .user img')].map((picture) => picture.naturalWidth)"
# Two PNGs of 1 and 2 pixels
SMALL, WIDE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC",
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAADUlEQVR4nGP4z8AARAAI/gH/xp559wAAAABJRU5ErkJggg==",
)
TEXTS = "[...document.querySelectorAll('#talk article .body')].map((body) => body.innerText)"


class Engine:
    """Answers each conversation with a text in several pieces, or without end."""

    def __init__(self, answer: str | None = ANSWER, *, images: bool = False) -> None:
        self.answer = answer
        self.images = images
        self.refusal = ""  # instead of an answer
        self.requests: list[dict[str, Any]] = []
        self.left = asyncio.Event()  # a client has left before the end

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        if self.refusal:
            return web.json_response({"error": {"message": self.refusal}}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._write(response)
        except (ConnectionResetError, asyncio.CancelledError):
            self.left.set()
            raise
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"has_image_understanding": self.images})

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
    app.router.add_get("/v1/models", engine._models)
    app.router.add_get("/get_model_info", engine._model_info)
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


def test_pictures_are_chosen_pasted_dropped_removed_and_sent(tmp_path: Path) -> None:
    small, wide = tmp_path / "small.png", tmp_path / "wide.png"
    small.write_bytes(base64.b64decode(SMALL))
    wide.write_bytes(base64.b64decode(WIDE))
    (tmp_path / "text.txt").write_text("no picture")

    def handed(event: str, selector: str, holder: str) -> str:
        """Returns a script that pastes or drops the wide picture."""
        return f"""(() => {{
          const data = new DataTransfer();
          const bytes = Uint8Array.from(atob("{WIDE}"), (one) => one.charCodeAt(0));
          data.items.add(new File([bytes], "wide.png", {{ type: "image/png" }}));
          const event = new {event} {{ {holder}: data, bubbles: true, cancelable: true }});
          document.querySelector("{selector}").dispatchEvent(event);
        }})()"""

    async def check() -> None:
        engine = Engine("A dot.", images=True)
        async with _page(engine) as page:
            await page.until("document.querySelector('#add-picture').checkVisibility()")
            await page.choose("#picture-files", small, wide)
            await page.until(f"{PREVIEWS} == 2")
            await page.click("#pictures li:first-child button")
            assert await page.evaluate(PREVIEWS) == 1
            await page.evaluate(handed("ClipboardEvent('paste',", "#message", "clipboardData"))
            await page.until(f"{PREVIEWS} == 2")
            await page.evaluate(handed("DragEvent('drop',", "#talk", "dataTransfer"))
            await page.until(f"{PREVIEWS} == 3")
            await page.choose("#picture-files", tmp_path / "text.txt")
            await page.until("document.querySelector('#picture-refused').checkVisibility()")
            refused = await page.evaluate("document.querySelector('#picture-refused').textContent")
            assert refused == "text.txt is not a PNG, JPEG, WebP, GIF or BMP picture."
            await page.choose("#picture-files", small)
            await page.until(f"{PREVIEWS} == 4")
            await page.type("#message", "What is it?")
            await _until_answered(page, 1)
            assert await page.evaluate(PREVIEWS) == 0
            (message,) = engine.requests[0]["messages"]
            urls = [f"data:image/png;base64,{data}" for data in (WIDE, WIDE, WIDE, SMALL)]
            sent = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            assert message["content"] == [*sent, {"type": "text", "text": "What is it?"}]
            # The conversation keeps its pictures, also after a reload, and the next question has none of its own
            await page.reload()
            await page.until(f"{SHOWN}.join() == '2,2,2,1'")
            await page.until("document.querySelector('#state').textContent == 'serving'")
            await page.type("#message", "Sure?")
            await _until_answered(page, 2)
            first, _, last = engine.requests[1]["messages"]
            assert (first, last["content"]) == (message, "Sure?")
            assert not page.complaints

    asyncio.run(check())


def test_a_refused_picture_comes_back_and_a_model_of_text_offers_none(tmp_path: Path) -> None:
    small = tmp_path / "small.png"
    small.write_bytes(base64.b64decode(SMALL))

    async def check() -> None:
        engine = Engine("A dot.", images=True)
        engine.refusal = "the image is damaged or cut off"
        async with _page(engine) as page:
            await page.until("document.querySelector('#add-picture').checkVisibility()")
            await page.choose("#picture-files", small)
            await page.until(f"{PREVIEWS} == 1")
            await page.click("#send")  # a picture without a text
            await page.until("document.querySelector('#talk footer.bad') !== null")
            note = await page.evaluate("document.querySelector('#talk footer.bad').textContent")
            assert note == engine.refusal
            assert await page.evaluate(PREVIEWS) == 1
        async with _page(Engine("Yes.")) as page:
            await page.until("document.querySelector('#state').textContent == 'serving'")
            await page.type("#message", "Only text?")
            await _until_answered(page, 1)
            assert not await page.evaluate(
                "document.querySelector('#add-picture').checkVisibility()"
            )

    asyncio.run(check())
