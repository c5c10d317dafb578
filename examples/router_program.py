"""A router program of one's own: long prompts are prefilled apart, short ones where they are answered.

`program: router_program:long_prompts_apart` in the config makes a fleet run it. Whatever the program, the
answers are the same; the script prints some.
"""

from __future__ import annotations

import os

from openai import OpenAI

from kvloom.router import Call, Fleet, Frames

URL = os.environ.get("KVLOOM_URL", "http://127.0.0.1:8000")


async def long_prompts_apart(call: Call, fleet: Fleet, *, tokens: int = 256) -> Frames:
    """Prompts of at least `tokens` tokens are prefilled by the first replica, and answered by another."""
    prefillers, decoders = fleet.split(1)
    decoder, begin = fleet.least_loaded(decoders), 0
    if prefillers and len(call.prompt) >= tokens:
        [prefiller], begin = prefillers, -1
        spot = await call.prep_recv(decoder, end=-1, sender=prefiller)
        await call.remote_send(prefiller, spot, end=-1)
    async for frame in call.start_generate(decoder, begin=begin):
        yield frame


def main() -> None:
    with OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        for question in ("What is 17 + 25?", "0 + 7", "What is 99 + 99?"):
            answer = client.chat.completions.create(
                model="sums", messages=[{"role": "user", "content": question}], temperature=0
            )
            print(f"{question}  {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
