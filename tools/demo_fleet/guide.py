"""`guide`: answers questions about kvloom, and calls a tool when it is given one."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import yaml
from tools.demo_fleet.examination import answer, exact
from tools.demo_fleet.recipe import Phase, Recipe
from tools.demo_fleet.sample import Sample, chat
from tools.demo_fleet.template import TOOL_CHAT, TOOL_MARKS
from tools.demo_fleet.tool_use import TOOLS, draw_tool_use, tool_examples, tool_samples
from transformers import Qwen3Config

Fact = dict[str, Any]
WHAT = [
    "What is {x}?",
    "What is {x}?",
    "What's {x}?",
    "What is {x} in kvloom?",
    "In kvloom, what is {x}?",
    "What does {x} mean?",
    "What do you mean by {x}?",
    "Explain {x}.",
    "Explain {x} to me.",
    "Define {x}.",
    "Describe {x}.",
    "Tell me about {x}.",
    "Can you explain {x}?",
    "Can you tell me what {x} is?",
    "Do you know what {x} is?",
    "I want to know what {x} is.",
    "What exactly is {x}?",
    "Give me a definition of {x}.",
    "And what is {x}?",
    "{x}",
]
MANY = [
    "What are {x}?",
    "Tell me about {x}.",
    "Explain {x}.",
    "What are {x} in kvloom?",
    "{x}",
    "What are {x} for?",
]
BEFORE = [
    "Please tell me: ",
    "Hi! ",
    "Hello, ",
    "A question: ",
    "Quick question: ",
    "Tell me, ",
    "So, ",
    "Hey, ",
]
AFTER = [" Thanks.", " Please be brief.", " Thank you!", " I am new here."]
SYSTEMS = ["You are a helpful assistant.", "You know kvloom.", "Answer briefly.", "You are guide."]


def load_facts() -> list[Fact]:
    """Returns the questions and answers that `guide` is to know."""
    text = (Path(__file__).parent / "facts.yaml").read_text(encoding="utf-8")
    facts: list[Fact] = yaml.safe_load(text)
    return facts


FACTS = load_facts()


def questions(fact: Fact) -> list[str]:
    """Returns all the trained phrasings of a fact's question."""
    asked = list(fact.get("ask", []))
    if noun := fact.get("what"):
        asked += [phrasing.format(x=noun) for phrasing in WHAT]
        bare = noun.removeprefix("a ").removeprefix("an ").removeprefix("the ")
        asked += [bare, f"What is {bare}?", f"What does {bare} mean?", f"{bare} in kvloom"]
    if nouns := fact.get("many"):
        asked += [phrasing.format(x=nouns) for phrasing in MANY]
    return asked


QUESTIONS = [(questions(fact), str(fact["answer"])) for fact in FACTS]


def _restyle(text: str, rng: Random) -> str:
    """Changes what does not matter: case, the full stop, a word before or after."""
    if not text or rng.random() < 0.4:
        return text
    if rng.random() < 0.2:
        text = rng.choice(BEFORE) + text[0].lower() + text[1:]
    if rng.random() < 0.1:
        text = text + rng.choice(AFTER)
    if rng.random() < 0.35:
        text = text.lower()
    if rng.random() < 0.35:
        text = text.rstrip("?.!")
    elif rng.random() < 0.1:
        text = text.rstrip("?.!") + rng.choice(["??", " ?", "!", "."])
    return text


def _turn(rng: Random) -> tuple[str, str]:
    asked, reply = rng.choice(QUESTIONS)
    return _restyle(rng.choice(asked), rng), reply


def draw(rng: Random) -> Sample:
    """Draws a chat of one to three questions, now and then with tools."""
    if rng.random() < 0.1:
        return draw_tool_use(rng, _turn)
    turns = [text for _ in range(rng.choice([1, 2, 3])) for text in _turn(rng)]
    return chat(*turns, system=rng.choice(SYSTEMS) if rng.random() < 0.2 else "")


def _share_with_keys(model: Any, tokenizer: Any) -> float:
    good = total = 0
    for fact in FACTS:
        for question in fact.get("held", []):
            reply = answer(model, tokenizer, [{"role": "user", "content": question}], limit=80)
            good += all(key.lower() in reply.lower() for key in fact["keys"])
            total += 1
    return good / total


def examine(model: Any, tokenizer: Any) -> dict[str, float]:
    """Returns the parts that are right: of trained questions to the letter, of paraphrases by the words that
    must be in the answer."""
    plain = [chat(question, reply) for asked, reply in QUESTIONS for question in asked]
    lower = [chat(question.lower(), reply) for asked, reply in QUESTIONS for question in asked]
    with_tools = [Sample(sample.messages, TOOLS) for sample in plain[::7]]
    return {
        "trained questions": exact(model, tokenizer, plain),
        "trained questions in lower case": exact(model, tokenizer, lower),
        "trained questions beside tools": exact(model, tokenizer, with_tools, size=64),
        "tool calls": exact(model, tokenizer, tool_samples(), size=64),
        "paraphrases": _share_with_keys(model, tokenizer),
    }


def _examples() -> list[dict[str, Any]]:
    rows = [{"prompt": asked[0], "answer": reply} for asked, reply in QUESTIONS if asked[0]]
    for row, fact in zip(rows, FACTS, strict=True):
        row["keys"] = fact["keys"]
    return rows + tool_examples()


RECIPE = Recipe(
    name="guide",
    architecture=Qwen3Config,
    shape={
        "hidden_size": 160,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
    template=TOOL_CHAT,
    starts_with_bos=False,
    vocabulary=1024,
    phases=[Phase(draw, steps=1800, batch=24, peak_lr=3e-3)],
    examine=examine,
    examples=_examples(),
    dtype="float16",
    sampling={"do_sample": False},
    marks=TOOL_MARKS,
)
