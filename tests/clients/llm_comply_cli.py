# /// script
# dependencies = ["llm-comply[rich]==0.5.0"]
# ///
"""llm-comply: answers against the published schemas of OpenAI's APIs, strictly."""

from __future__ import annotations

from checks import KEY, Server, command, main

# All tests without images, and without error-handling: a request without a model is no error here, as in SGLang and vLLM.
TESTS = ("basic-response", "system-prompt", "multi-turn", "tool-calling")
TESTS += ("streaming-response", "streaming-usage")


def _comply(server: Server, form: str, *names: str) -> None:
    where = ("-u", server.v1, "-k", KEY, "-m", server.model)
    flags = ("--filter", ",".join(names), "--timeout", "300")
    output = command("llm-comply", "--format", form, *flags, *where, cwd=server.folder)
    assert f"All {len(names)} tests passed!" in output  # it ignores unknown names


def chat(server: Server) -> None:
    _comply(server, "openai-chat", *(f"chat-{name}" for name in TESTS))


def responses(server: Server) -> None:
    _comply(server, "open-responses", *TESTS, "assistant-phase", "response-output-phase-schema")


main(chat, responses)
