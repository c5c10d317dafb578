"""Chat over the OpenAI API: an answer as a whole, and one as it is made."""

from __future__ import annotations

import os

from openai import OpenAI

URL = os.environ.get("KVLOOM_URL", "http://127.0.0.1:8000")


def main() -> None:
    with OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        whole = client.chat.completions.create(
            model="guide",
            messages=[{"role": "user", "content": "What is kvloom?"}],
            temperature=0,
        )
        print("guide:", whole.choices[0].message.content)

        stream = client.chat.completions.create(
            model="sums",
            messages=[{"role": "user", "content": "What is 17 + 25?"}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        print("sums: ", end="")
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage:
                print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")


if __name__ == "__main__":
    main()
