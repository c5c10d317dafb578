"""Three models of one server, asked at the same time."""

from __future__ import annotations

import asyncio
import os

from openai import AsyncOpenAI

URL = os.environ.get("KVLOOM_URL", "http://127.0.0.1:8000")

QUESTIONS = {
    "guide": "Who is kvloom for?",
    "stories": "Tell me a story about a fox.",
    "sums": "What is 3 - 40?",
}


async def ask(client: AsyncOpenAI, model: str, question: str) -> str:
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0
    )
    usage = answer.usage
    assert usage is not None
    return (
        f"{model} ({usage.prompt_tokens} tokens in, {usage.completion_tokens} out)\n"
        f"  {answer.choices[0].message.content}"
    )


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        served = {model.id async for model in client.models.list()}
        assert served >= QUESTIONS.keys()
        answers = await asyncio.gather(*(ask(client, *pair) for pair in QUESTIONS.items()))
        print(*answers, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
