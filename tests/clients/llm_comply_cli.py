# /// script
# dependencies = ["llm-comply[rich]==0.5.0"]
# ///
"""llm-comply: answers against the published schemas of OpenAI's APIs, strictly."""

from __future__ import annotations

from checks import KEY, Server, command, main

# All that a model without eyes can be asked.
TESTS = "basic-response,system-prompt,multi-turn,tool-calling,streaming-response,streaming-usage"
TESTS += ",assistant-phase,response-output-phase-schema,error-handling"


def _comply(server: Server, form: str) -> None:
    where = ("-u", server.v1, "-k", KEY, "-m", server.model)
    flags = ("--filter", TESTS, "--timeout", "300")
    command("llm-comply", "--format", form, *flags, *where, cwd=server.folder)


def chat(server: Server) -> None:
    _comply(server, "openai-chat")


def responses(server: Server) -> None:
    _comply(server, "open-responses")


main(chat, responses)
