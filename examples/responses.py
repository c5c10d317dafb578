"""OpenAI's Responses: a stream of events, an answer that follows a schema, and a kept conversation."""

from __future__ import annotations

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

URL = os.environ.get("KVLOOM_URL", "http://127.0.0.1:8000")


class Licence(BaseModel):
    licence: Literal["MIT", "Apache-2.0", "GPL-3.0"]


def main() -> None:
    with OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        print("sums: ", end="")
        with client.responses.stream(model="sums", input="What is 17 + 25?", temperature=0) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="", flush=True)
        print()

        question = "What is the license?"
        parsed = client.responses.parse(model="guide", input=question, text_format=Licence, temperature=0)
        print("guide:", parsed.output_parsed)

        first = client.responses.create(model="sums", input="What is 4 + 5?", temperature=0)
        question = "What is 20 + 22?"
        second = client.responses.create(
            model="sums", input=question, previous_response_id=first.id, temperature=0
        )
        for item in client.responses.input_items.list(second.id, order="asc"):
            if item.type == "message":
                print(f"{item.role}:", item.content[0].to_dict()["text"])
        print("assistant:", second.output_text)


if __name__ == "__main__":
    main()
