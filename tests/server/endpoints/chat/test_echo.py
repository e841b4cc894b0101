"""vLLM's `echo`: the answer begins with the message that it continues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tokenizers

from support.client import session
from support.fake_worker import FakeWorker, script
from support.processes import post_json
from support.replay import Stream, stream

CHAT = "/v1/chat/completions"
BEGUN = "An apple a day"
SAID = " keeps 😀 away"
ASKED = {"role": "user", "content": "A saying?"}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def salt(backend: tokenizers.Tokenizer) -> str:
    """Makes the fake scheduler generate SAID."""
    ids = backend.encode(SAID, add_special_tokens=False).ids
    return script(say=[*ids, 1])  # 1: the EOS token


def body_of(salt: str, content: Any = BEGUN, **fields: Any) -> dict[str, Any]:
    messages = [ASKED, {"role": "assistant", "content": content}]
    return {"messages": messages, "cache_salt": salt, "echo": True} | CONTINUED | fields


@pytest.mark.parametrize(
    ("content", "echo", "expected"),
    [
        (BEGUN, True, BEGUN + SAID),
        (BEGUN, False, SAID),
        (BEGUN, None, SAID),
        (
            [{"type": "text", "text": "An"}, {"type": "text", "text": "apple"}],
            True,
            "An\napple" + SAID,
        ),
    ],
)
def test_a_complete_answer(
    worker: FakeWorker, salt: str, content: Any, echo: bool | None, expected: str
) -> None:
    answer = post_json(worker.url + CHAT, body_of(salt, content, echo=echo, n=2))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [expected] * 2


def test_there_is_nothing_to_echo_of_a_question(worker: FakeWorker, salt: str) -> None:
    body = {"messages": [ASKED], "cache_salt": salt, "echo": True}
    (choice,) = post_json(worker.url + CHAT, body)["choices"]
    assert choice["message"]["content"] == SAID


def test_a_stream_wherever_it_breaks(worker: FakeWorker, salt: str) -> None:
    body = body_of(salt, n=2)

    def texts(answer: Stream, *, since: int = 0) -> list[str]:
        """Returns the content of each choice from event `since` on."""
        choices = [choice for event in answer.events[since:-1] for choice in event.body["choices"]]
        return [
            "".join(
                choice["delta"].get("content", "") for choice in choices if choice["index"] == at
            )
            for at in range(2)
        ]

    async def run() -> None:
        async with session() as http:
            url = worker.url + CHAT
            uncut = await stream(http, url, body)
            assert texts(uncut) == [BEGUN + SAID] * 2
            for cut in range(1, len(uncut.events) - 1):
                again = await stream(http, url, body, continuation=uncut.after(cut))
                assert texts(again) == texts(uncut, since=cut), cut

    asyncio.run(run())
