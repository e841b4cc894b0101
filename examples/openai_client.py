"""Chat with the openai client: a complete answer, a streamed one, and the number of cached prompt tokens.

pip install openai
python examples/openai_client.py
"""

from __future__ import annotations

import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

# Prefixes are cached in pages of 16 tokens.
SYSTEM = "You are a helpful assistant. Answer the question of the user in one sentence. Be brief."
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "What is 17 + 25?"},
]


def main() -> None:
    url = os.environ.get("MLA_ROUTER_URL", "http://127.0.0.1:30000")
    client = OpenAI(base_url=url + "/v1", api_key=os.environ.get("MLA_ROUTER_API_KEY", "none"))
    model = client.models.list().data[0].id

    # Temperature 0: the most likely tokens
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=32, temperature=0
    )
    print("answer:", answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    print("streamed: ", end="")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage and chunk.usage.prompt_tokens_details:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\nof {chunk.usage.prompt_tokens} prompt tokens {cached} were cached")


if __name__ == "__main__":
    main()
