"""Guided decoding: the answer follows a JSON schema, whatever the model would rather have said."""

from __future__ import annotations

import json
import os
from typing import Any

from openai import OpenAI

URL = os.environ.get("KVLOOM_URL", "http://127.0.0.1:8000")

LICENCE = {
    "type": "object",
    "properties": {"licence": {"enum": ["MIT", "Apache-2.0", "GPL-3.0"]}},
    "required": ["licence"],
    "additionalProperties": False,
}
RIGHT_ONE = {"enum": ["99 + 99 = 188.", "99 + 99 = 198.", "99 + 99 = 208."]}


def ask(client: OpenAI, model: str, question: str, schema: dict[str, Any]) -> Any:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        temperature=0,
        max_completion_tokens=64,
    )
    return json.loads(answer.choices[0].message.content or "")


def main() -> None:
    with OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        print("guide:", ask(client, "guide", "What is the license?", LICENCE))
        print("sums:", ask(client, "sums", "What is 99 + 99?", RIGHT_ONE))


if __name__ == "__main__":
    main()
