"""An answer that follows a JSON schema: the server allows no token that would break it.

pip install openai pydantic
python examples/json_schema.py
"""

from __future__ import annotations

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

QUESTION = "Extract as JSON with the keys name, age, role: Maria is 34 years old and a doctor."


class Person(BaseModel):
    name: str
    age: int
    role: Literal["engineer", "doctor", "teacher"]


def main() -> None:
    url = os.environ.get("MLA_ROUTER_URL", "http://127.0.0.1:30000")
    client = OpenAI(base_url=url + "/v1", api_key=os.environ.get("MLA_ROUTER_API_KEY", "none"))
    model = client.models.list().data[0].id
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Person,
        max_tokens=128,
        temperature=0,
    )
    person = answer.choices[0].message.parsed
    assert person is not None, answer
    print(person)


if __name__ == "__main__":
    main()
