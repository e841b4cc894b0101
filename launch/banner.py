"""The text after a successful start: addresses, model, policy, and requests to paste."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from mla_router.launch.secrets import HeaderFile
from mla_router.worker.config import WorkerConfig

ANY_ADDRESS = ("0.0.0.0", "[::]")
QUESTION = "What is 17 + 25?"


def ready_text(
    url: str, policy: str, settings: WorkerConfig, worker_urls: Sequence[str], model: str = ""
) -> str:
    """Returns the text. `settings` are common to all workers, with the key of clients. `model` is its name if the
    settings do not tell it."""
    model = model or settings.model_name
    path = settings.model_path or "the small model that the package ships"
    key = settings.api_key
    header = HeaderFile(key).path if key else None
    base = url
    for address in ANY_ADDRESS:  # a client on this machine connects to loopback
        base = base.replace(f"//{address}:", "//127.0.0.1:")
    return "\n".join(
        [
            "",
            f"Ready: {url}",
            f"  model     {model} ({path})",
            f"  policy    {policy}",
            f"  dashboard {base}/dashboard",
            *(f"  worker {index}  {worker}" for index, worker in enumerate(worker_urls)),
            "",
            "Try it (the key is read from this process; run as the same user):"
            if key
            else "Try it:",
            _curl(base, model, header, stream=False),
            "",
            "The same, streaming:",
            _curl(base, model, header, stream=True),
            "",
            "Ctrl-C stops everything.",
        ]
    )


def _curl(base: str, model: str, header: str | None, stream: bool) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 32,
    } | ({"stream": True} if stream else {})
    words = ["curl"] + (["-N"] if stream else []) + [f"{base}/v1/chat/completions"]
    words += ["-H", shlex.quote("Content-Type: application/json")]
    if header:  # a file, because the key must not be in the log
        words += ["-H", f"@{header}"]
    words += ["-d", shlex.quote(json.dumps(body))]
    return "  " + " ".join(words)
