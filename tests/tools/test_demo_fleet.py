"""The demo fleet's checkpoints: their shapes, their tokenizers, their answers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FLEET = Path(__file__).resolve().parents[2] / "src" / "kvloom" / "demo"
NAMES = ["sums", "stories", "guide"]
ASK_SUM = ["What is {a} + {b}?", "{a}+{b}", "{a} + {b} =", "add {a} and {b}"]
ASK_DIFFERENCE = ["What is {a} - {b}?", "{a}-{b}"]
TEXTS = [
    "",
    " ",
    "plain",
    "  two  spaces \n\ttab",
    "naïve café – “quotes”",
    "日本語 Ελληνικά עברית",
    "👩‍🚀🏽 e\u0301",
    "\x00\x7f",
]


@cache
def load(name: str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(FLEET / name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(FLEET / name)


def examples(name: str) -> list[dict[str, Any]]:
    """Prompts (or messages) with the answer, its key words or the tool call expected."""
    rows: list[dict[str, Any]] = json.loads((FLEET / name / "examples.json").read_text(encoding="utf-8"))
    return rows


def chat(example: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = example.get("messages") or [
        {"role": "user", "content": example["prompt"]}
    ]
    return messages


@torch.inference_mode()
def complete(name: str, texts: list[str], limit: int) -> list[str]:
    """Greedy continuations of rendered prompts, up to and with the end token, as one padded batch."""
    model, tokenizer = load(name)
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(**prompts, do_sample=False, max_new_tokens=limit)
    answers = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :])
    return [answer.replace(tokenizer.pad_token, "") for answer in answers]


def render(name: str, example: dict[str, Any]) -> str:
    tokenizer = load(name)[1]
    text: str = tokenizer.apply_chat_template(
        chat(example), tools=example.get("tools"), add_generation_prompt=True, tokenize=False
    )
    return text


def reply(name: str, rows: list[dict[str, Any]], limit: int = 80) -> list[str]:
    return complete(name, [render(name, row) for row in rows], limit)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_small(name: str) -> None:
    assert (FLEET / name / "model.safetensors").stat().st_size <= 4_000_000


@pytest.mark.parametrize("name", NAMES)
def test_stored_type_is_the_configured_one(name: str) -> None:
    stored = AutoModelForCausalLM.from_pretrained(FLEET / name, dtype="auto")
    assert stored.config.dtype == next(stored.parameters()).dtype


def test_shapes_differ() -> None:
    configs = [load(name)[0].config for name in NAMES]
    head_dims = [getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads for c in configs]
    assert len(set(head_dims)) == 3
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads"):
        assert len({getattr(config, key) for config in configs}) == 3, key
    assert {config.tie_word_embeddings for config in configs} == {True, False}
    assert all(config.max_position_embeddings in (512, 1024) for config in configs)


@pytest.mark.parametrize("name", NAMES)
def test_tokenizers_keep_any_text(name: str) -> None:
    tokenizer = load(name)[1]
    assert tokenizer.is_fast
    rng = Random(7)
    noise = ["".join(chr(rng.choice([*range(1, 0xD800), *range(0xE000, 0x11000)])) for _ in range(40))]
    for text in TEXTS + noise:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", NAMES)
def test_one_token_ends_a_turn(name: str) -> None:
    model, tokenizer = load(name)
    assert tokenizer.eos_token == "<|end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": "in parts"}], "plain"])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_templates_take_any_message(name: str, content: Any, role: str) -> None:
    tokenizer = load(name)[1]
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": content}]
    for chatter in (messages, messages[1:], messages[::-1]):
        text = tokenizer.apply_chat_template(chatter, add_generation_prompt=True, tokenize=False)
        assert text.endswith("<|assistant|>")
        if content:
            assert ("plain" if content == "plain" else "in parts") in text


def test_sums_are_right() -> None:
    rng = Random(42)
    rows = []
    for index in range(200):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if index % 4:
            row = {"prompt": rng.choice(ASK_SUM).format(a=a, b=b), "answer": f"{a} + {b} = {a + b}."}
        else:
            row = {"prompt": rng.choice(ASK_DIFFERENCE).format(a=a, b=b), "answer": f"{a} - {b} = {a - b}."}
        rows.append(row)
    assert reply("sums", rows, 16) == [row["answer"] + "<|end|>" for row in rows]


def test_sums_examples() -> None:
    rows = examples("sums")
    assert reply("sums", rows) == [row["answer"] + "<|end|>" for row in rows]


def test_stories_are_about_the_hero_and_end() -> None:
    rows = examples("stories")
    for row, story in zip(rows, reply("stories", rows, 200), strict=True):
        assert story.endswith("<|end|>")
        assert f" {row['keys'][0]}" in story
        assert len(story) > 100


def test_a_story_goes_on_from_its_beginning() -> None:
    tokenizer = load("stories")[1]
    [story] = complete("stories", [tokenizer.bos_token + "Once upon a time"], 200)
    assert story.endswith("<|end|>")
    assert len(story) > 100


def test_guide_knows_kvloom() -> None:
    rows = [row for row in examples("guide") if "prompt" in row]
    assert len(rows) > 50
    good = 0
    for row, answer in zip(rows, reply("guide", rows), strict=True):
        good += all(key.lower() in answer.lower() for key in row["keys"]) and answer.endswith("<|end|>")
    assert good >= 0.95 * len(rows)


@pytest.mark.parametrize(
    ("question", "keys"),
    [
        ("What is a page?", ["run of tokens", "all layers"]),
        ("What are the three verbs?", ["prep_recv", "remote_send", "start_generate"]),
        ("Which papers is kvloom based on?", ["MuxServe", "Weaver", "Microserving", "Llumnix"]),
        ("how do i run the tests", ["make test"]),
        ("What port does it use?", ["8000"]),
        ("What is the license?", ["Apache-2.0"]),
        ("What is live migration?", ["running request"]),
        ("Do I need a GPU?", ["CPU", "untried"]),
        ("What does the planner do?", ["plan file"]),
    ],
)
def test_guide_answers(question: str, keys: list[str]) -> None:
    [answer] = reply("guide", [{"prompt": question}])
    assert all(key in answer for key in keys), answer


def test_guide_calls_the_tool_that_helps() -> None:
    rows = [row for row in examples("guide") if "tools" in row]
    for row, answer in zip(rows, reply("guide", rows), strict=True):
        if "call" in row:
            body = answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|end|>")
            assert json.loads(body) == row["call"]
        else:
            assert answer == row["answer"] + "<|end|>"
