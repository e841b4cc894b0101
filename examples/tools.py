"""A tool call: the model asks for a function, the program runs it, the model answers with its result.

pip install openai
python examples/tools.py
"""

from __future__ import annotations

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def get_weather(city: str) -> dict[str, object]:
    return {"city": city, "sky": "sunny", "degrees": 21}


def main() -> None:
    url = os.environ.get("MLA_ROUTER_URL", "http://127.0.0.1:30000")
    client = OpenAI(base_url=url + "/v1", api_key=os.environ.get("MLA_ROUTER_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the weather in Paris?"}
    ]

    # "required": a grammar makes the answer a valid call. "auto" leaves the choice to the model.
    asked = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=128,
        temperature=0,
    )
    message = asked.choices[0].message
    assert message.tool_calls, message
    messages.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
    for call in message.tool_calls:
        assert call.type == "function"
        print("call:", call.function.name, call.function.arguments)
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], max_tokens=64, temperature=0
    )
    print("answer:", answer.choices[0].message.content)


if __name__ == "__main__":
    main()
