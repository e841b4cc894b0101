"""Other requests to the server: model, tokenizer folder, cache, profiler."""

from __future__ import annotations

import json
from typing import Any

import aiohttp


class ServerError(Exception):
    """The server refuses a request. The message gives the cause and the mend."""


class Server:
    def __init__(self, http: aiohttp.ClientSession, base_url: str) -> None:
        self._http = http
        self._base_url = base_url

    async def model(self) -> str:
        """Returns the name of the first model of the server."""
        models = await self._ask("GET", "/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServerError("/v1/models lists no model; name it with --model") from None

    async def tokenizer(self) -> str:
        """Returns the folder of the tokenizer, from `/get_server_info` of a worker or a router."""
        info = await self._ask("GET", "/get_server_info")
        if not isinstance(info, dict):
            raise ServerError("/get_server_info is no object; name the tokenizer with --tokenizer")
        for candidate in [info, *info.get("workers", [])]:
            for key in ("tokenizer_path", "model_path"):
                if key in candidate:
                    return str(candidate[key])
        raise ServerError("/get_server_info names no tokenizer; name it with --tokenizer")

    async def flush_cache(self) -> None:
        await self._ask("POST", "/flush_cache")

    async def start_profile(self) -> None:
        await self._ask("POST", "/start_profile")

    async def stop_profile(self) -> None:
        await self._ask("POST", "/stop_profile")

    async def _ask(self, method: str, path: str) -> Any:
        """Returns the JSON of the answer, or its text."""
        try:
            async with self._http.request(method, self._base_url + path) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{self._base_url + path}: {error}") from None
        if response.status != 200:
            raise ServerError(f"{method} {self._base_url + path}: {response.status} {text[:300]}")
        try:
            return json.loads(text)
        except ValueError:
            return text
