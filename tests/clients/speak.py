"""Asks a server by each client's own package: python speak.py URL. One line of JSON a client: its name, and
what it was told, or the error. It runs in the environment that `make clients` makes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

URL = sys.argv[1]
V1, KEY = URL + "/v1", "x"
QUESTION = "What is 17 + 25?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
MODEL: dict[str, Any] = {"model": "sums", "temperature": 0}


def openai_chat() -> Any:
    import openai

    client = openai.OpenAI(base_url=V1, api_key=KEY)
    whole = client.chat.completions.create(messages=ASKED, **MODEL).choices[0].message.content
    chunks = client.chat.completions.create(messages=ASKED, stream=True, **MODEL)
    return [whole, "".join(one.choices[0].delta.content or "" for one in chunks)]


def openai_completions() -> Any:
    import openai

    client = openai.OpenAI(base_url=V1, api_key=KEY)
    asked: dict[str, Any] = {"prompt": "1 2 3", "max_tokens": 5, **MODEL}
    whole = client.completions.create(**asked).choices[0].text
    return [whole, "".join(one.choices[0].text for one in client.completions.create(stream=True, **asked))]


def openai_responses() -> Any:
    import openai

    client = openai.OpenAI(base_url=V1, api_key=KEY)
    first = client.responses.create(input=QUESTION, **MODEL)
    with client.responses.stream(input=ASKED, **MODEL) as stream:
        streamed = stream.get_final_response().output_text
    more = client.responses.create(input="What is 3 + 4?", previous_response_id=first.id, **MODEL)
    return [first.output_text, streamed, bool(more.output_text)]


def anthropic_messages() -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key=KEY)
    asked: dict[str, Any] = {"messages": ASKED, "max_tokens": 40, "model": "sums"}
    asked |= {"extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked).content[0].text
    with client.messages.stream(**asked) as stream:
        return [whole, "".join(stream.text_stream)]


def ollama_chat() -> Any:
    import ollama

    client = ollama.Client(host=URL)
    asked: dict[str, Any] = {"model": "sums", "messages": ASKED, "options": {"temperature": 0}}
    parts = client.chat(stream=True, **asked)
    streamed = "".join(part.message.content or "" for part in parts)
    listed = sorted(model.model.removesuffix(":latest") for model in client.list().models)
    return [client.chat(**asked).message.content, streamed, "sums" in listed]


def litellm_chat() -> Any:
    import litellm

    given: dict[str, Any] = {"model": "openai/sums", "api_base": V1, "api_key": KEY, "temperature": 0}
    said = litellm.completion(messages=ASKED, **given).choices[0].message.content
    parts = litellm.completion(messages=ASKED, stream=True, **given)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    long = [{"role": "user", "content": "1 + " * 9000}]
    try:
        litellm.completion(messages=long, **given)
        known = False
    except litellm.ContextWindowExceededError:
        known = True
    return [said, streamed, known]


def langchain_openai() -> Any:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="sums", base_url=V1, api_key=KEY, temperature=0)
    return [model.invoke(QUESTION).content, "".join(str(one.content) for one in model.stream(QUESTION))]


def instructor_modes() -> Any:
    import instructor
    import openai
    from instructor.exceptions import InstructorRetryException
    from pydantic import BaseModel

    class Pair(BaseModel):
        small: int
        big: int

    found: dict[str, Any] = {}
    for mode in (
        "TOOLS",
        "TOOLS_STRICT",
        "JSON_SCHEMA",
        "RESPONSES_TOOLS",
        "RESPONSES_TOOLS_WITH_INBUILT_TOOLS",
    ):
        client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key=KEY), mode=instructor.Mode[mode])
        made = client.chat.completions.create(
            response_model=Pair, messages=ASKED, max_tokens=200, max_retries=0, **MODEL
        )
        found[mode] = isinstance(made, Pair)
    # These ask in the prompt alone for the fields, or for calls, and a model of this size does not heed it.
    for mode, form in (("JSON", Pair), ("MD_JSON", Pair), ("PARALLEL_TOOLS", Iterable[Pair])):
        client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key=KEY), mode=instructor.Mode[mode])
        answers: list[Any] = []
        client.on("completion:response", answers.append)
        with contextlib.suppress(InstructorRetryException):
            client.chat.completions.create(
                response_model=form, messages=ASKED, max_tokens=14, max_retries=0, **MODEL
            )
        said = answers[0].choices[0].message.content
        found[mode] = isinstance(json.loads(said), dict) if mode == "JSON" else bool(said)
    return found


def evaluation() -> Any:
    """EleutherAI's lm-evaluation-harness with the server's tokenizer: what it was told for each request."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    kinds: dict[str, dict[str, Any]] = {
        "multiple_choice": {"doc_to_text": "{{a}} + {{b}} =", "doc_to_target": 0}
        | {"doc_to_choice": "{{[(a + b)|string, (a + b + 1)|string]}}"},
        "loglikelihood_rolling": {"doc_to_text": "", "doc_to_target": "What is {{a}} + {{b}}?"},
        "generate_until": {"doc_to_text": "What is {{a}} + {{b}}?", "doc_to_target": ""}
        | {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 40}},
    }
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "sums.jsonl")
        data.write_text("\n".join(json.dumps({"a": a, "b": b}) for a, b in ((17, 25), (3, 4), (60, 8))))
        common = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
        common |= {"dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder}}

        def ask(model: str, path: str, *asked: str, **more: Any) -> dict[str, Any]:
            tasks = [common | {"task": kind, "output_type": kind} | kinds[kind] for kind in asked]
            given = {"model": "sums", "base_url": V1 + path, "tokenizer_backend": "remote"} | more
            found = simple_evaluate(
                model=model, model_args=given, tasks=tasks, log_samples=True, bootstrap_iters=0,
                task_manager=TaskManager(include_defaults=False), apply_chat_template="chat" in model,
            )["samples"]  # fmt: skip
            return {
                kind: [
                    [[str(one) for one in arguments], answers[0]]
                    for sample in samples
                    for arguments, answers in zip(sample["arguments"], sample["resps"], strict=True)
                ]
                for kind, samples in found.items()
            }

        told["completions"] = ask("local-completions", "/completions", *kinds, batch_size=2, num_concurrent=2)
        told["chat"] = ask("local-chat-completions", "/chat/completions", "generate_until")
    return told


def pydantic_ai() -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask(model: Any) -> str:
        agent = Agent(model, model_settings={"temperature": 0})
        return str((await agent.run(QUESTION)).output)

    provider = OpenAIProvider(base_url=V1, api_key=KEY)
    models = OpenAIChatModel("sums", provider=provider), OpenAIResponsesModel("sums", provider=provider)
    return [asyncio.run(ask(model)) for model in models]


def llm_schema() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        known = [{"model_id": "sums", "model_name": "sums", "api_base": V1, "supports_schema": True}]
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps(known))
        done = subprocess.run(
            [Path(sys.executable).with_name("llm"), "-m", "sums", "--schema", "small int, big int", "?"],
            env=os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": KEY},
            capture_output=True,
            text=True,
            check=True,
        )
    return sorted(json.loads(done.stdout))


CLIENTS: dict[str, Callable[[], Any]] = {
    "openai: chat": openai_chat,
    "openai: completions": openai_completions,
    "openai: responses": openai_responses,
    "anthropic": anthropic_messages,
    "ollama": ollama_chat,
    "litellm": litellm_chat,
    "langchain-openai": langchain_openai,
    "instructor": instructor_modes,
    "lm-eval": evaluation,
    "pydantic-ai": pydantic_ai,
    "llm --schema": llm_schema,
}


def main() -> None:
    for name, ask in CLIENTS.items():
        told: dict[str, Any] = {"client": name}
        try:
            told["told"] = ask()
        except Exception:  # whatever a client raises is its verdict
            told["error"] = traceback.format_exc()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
