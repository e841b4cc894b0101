"""A page in headless Chromium, over the part of its DevTools protocol that the tests need."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

BINARY = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

EVENT_TIMEOUT_S = 60.0


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._loads = 0  # pages that have loaded
        self.complaints: list[
            str
        ] = []  # errors and warnings of the page, including its content security policy

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            answer = await self._socket.receive_json(timeout=EVENT_TIMEOUT_S)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._listen(answer)

    async def _load(self, method: str, **params: Any) -> None:
        """Sends a command that loads a page, and returns when that page has loaded.

        Until then a script may meet the old page, or a part of the new one.
        """
        loads = self._loads
        await self.command(method, **params)
        while self._loads == loads:
            self._listen(await self._socket.receive_json(timeout=EVENT_TIMEOUT_S))

    def _listen(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Page.loadEventFired":
                self._loads += 1

    async def evaluate(self, script: str) -> Any:
        result = await self.command("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Returns the first true value of `script` on the page."""
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            while not (value := await self.evaluate(script)):
                await asyncio.sleep(0.1)
            return value

    async def open(self, url: str, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])
        await self._load("Page.navigate", url=url)

    async def reload(self) -> None:
        await self._load("Page.reload")

    async def type(self, selector: str, text: str, enter: bool = True) -> None:
        """Types `text` into an element, and Enter, as a user does."""
        await self.evaluate(f"document.querySelector({selector!r}).focus()")
        await self.command("Input.insertText", text=text)
        if enter:
            await self.press_enter()

    async def press_enter(self, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            modifiers = 8 if shift else 0
            await self.command("Input.dispatchKeyEvent", type=kind, modifiers=modifiers, **key)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({selector!r}).click()")

    async def choose(self, selector: str, *files: Path) -> None:
        """Chooses files in a file input, as its dialog does."""
        script = f"document.querySelector({selector!r})"
        found = await self.command("Runtime.evaluate", expression=script)
        await self.command(
            "DOM.setFileInputFiles",
            files=[str(file) for file in files],
            objectId=found["result"]["objectId"],
        )

    async def screenshot(self, path: Path) -> None:
        shot = await self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def page(width: int = 1440, height: int = 900, phone: bool = False) -> AsyncIterator[Page]:
    """Opens an empty page in a separate browser. A phone has touch and a device pixel ratio of 2."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        browser = await asyncio.create_subprocess_exec(
            BINARY,
            *flags,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert browser.stderr is not None
            async with asyncio.timeout(EVENT_TIMEOUT_S):
                async for line in browser.stderr:
                    if line.startswith(b"DevTools listening on "):
                        break
            browser_at = URL(line.split()[-1].decode())
            targets_at = URL.build(scheme="http", host="127.0.0.1", port=browser_at.port)
            async with aiohttp.ClientSession() as http:
                async with http.get(targets_at / "json/list") as response:
                    targets = await response.json()
                address = next(t for t in targets if t["type"] == "page")["webSocketDebuggerUrl"]
                async with http.ws_connect(address, max_msg_size=0) as socket:
                    opened = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await opened.command(f"{domain}.enable")
                    screen = {"width": width, "height": height, "mobile": phone}
                    screen["deviceScaleFactor"] = 2 if phone else 1
                    await opened.command("Emulation.setDeviceMetricsOverride", **screen)
                    await opened.command("Emulation.setTouchEmulationEnabled", enabled=phone)
                    yield opened
        finally:
            browser.kill()
            await browser.wait()
