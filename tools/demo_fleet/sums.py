"""`sums`: adds and subtracts the numbers 0 to 99."""

from __future__ import annotations

from random import Random
from typing import Any

from tools.demo_fleet.examination import exact
from tools.demo_fleet.recipe import Phase, Recipe
from tools.demo_fleet.sample import Sample, chat
from tools.demo_fleet.template import PLAIN_CHAT
from transformers import LlamaConfig

ADD = [
    "What is {a} + {b}?",
    "{a}+{b}",
    "{a} + {b}",
    "{a} + {b} =",
    "add {a} and {b}",
    "{a}+{b}=",
    "{a} + {b} = ?",
    "{a}+{b}=?",
    "What is {a}+{b}?",
    "What's {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} plus {b}",
    "How much is {a} + {b}?",
    "How much is {a} and {b}?",
    "Add {a} to {b}.",
    "Please add {a} and {b}.",
    "Calculate {a} + {b}.",
    "Compute {a}+{b}",
    "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
    "The sum of {a} and {b}",
    "What do you get if you add {a} and {b}?",
    "Tell me {a} + {b}.",
    "I have {a} apples and get {b} more. How many do I have?",
]
SUBTRACT = [
    "What is {a} - {b}?",
    "{a}-{b}",
    "{a} - {b}",
    "{a} - {b} =",
    "{a}-{b}=",
    "{a} - {b} = ?",
    "{a}-{b}=?",
    "subtract {b} from {a}",
    "What is {a}-{b}?",
    "What's {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} minus {b}",
    "How much is {a} - {b}?",
    "Please subtract {b} from {a}.",
    "Take {b} away from {a}.",
    "Calculate {a} - {b}.",
    "Compute {a}-{b}",
    "Can you subtract {b} from {a}?",
    "What is the difference of {a} and {b}?",
    "Tell me {a} - {b}.",
    "I have {a} apples and eat {b}. How many are left?",
]
SMALL_TALK = {
    "Hello": "Hello! Ask me a sum, such as 17 + 25.",
    "Hi!": "Hello! Ask me a sum, such as 17 + 25.",
    "Hey there": "Hello! Ask me a sum, such as 17 + 25.",
    "Who are you?": "I am sums, a tiny model. I add and subtract numbers from 0 to 99.",
    "What can you do?": "I am sums, a tiny model. I add and subtract numbers from 0 to 99.",
    "What are you?": "I am sums, a tiny model. I add and subtract numbers from 0 to 99.",
    "": "Ask me a sum, such as 17 + 25.",
    "Thanks": "You are welcome.",
    "Thank you!": "You are welcome.",
    "Tell me a story.": "I only do sums.",
    "Tell me a joke.": "I only do sums.",
    "What is kvloom?": "I only do sums.",
    "What is the capital of France?": "I only do sums.",
    "How are you?": "I am fine. Ask me a sum, such as 17 + 25.",
}
SYSTEMS = ["You are a helpful assistant.", "You do sums.", "Answer briefly.", "You are a calculator."]


def solved(a: int, b: int, sign: str) -> str:
    """The answer as the model gives it."""
    return f"{a} {sign} {b} = {a + b if sign == '+' else a - b}."


def _restyle(text: str, rng: Random) -> str:
    roll = rng.random()
    if roll < 0.15:
        return text.lower()
    if roll < 0.25:
        return text.rstrip("?.! ")
    if roll < 0.30:
        return text[:1].upper() + text[1:]
    return text


def _turn(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.03:
        return rng.choice(list(SMALL_TALK.items()))
    top = 9 if rng.random() < 0.05 else 99
    a, b = rng.randint(0, top), rng.randint(0, rng.choice([top, top, top, 9]))
    if rng.random() < 0.1:
        a, b = b, a
    sign, phrasings = ("+", ADD) if rng.random() < 0.5 else ("-", SUBTRACT)
    front = rng.random() < 0.4  # the plainest phrasings are the likeliest
    phrasing = rng.choice(phrasings[:7] if front else phrasings)
    return _restyle(phrasing.format(a=a, b=b), rng), solved(a, b, sign)


def draw(rng: Random) -> Sample:
    """A chat of one to four sums."""
    turns = [text for _ in range(rng.choice([1, 1, 2, 3, 4])) for text in _turn(rng)]
    return chat(*turns, system=rng.choice(SYSTEMS) if rng.random() < 0.2 else "")


def drill(rng: Random) -> Sample:
    """Mostly one sum, written closely and of numbers of unlike length: what is the hardest."""
    if rng.random() < 0.2:
        return draw(rng)
    a, b = rng.randint(0, 99), rng.randint(0, rng.choice([9, 99]))
    if rng.random() < 0.5:
        a, b = b, a
    sign, phrasings = rng.choice([("+", ADD), ("-", SUBTRACT)])
    if rng.random() < 0.4:
        phrasings = [phrasing for phrasing in phrasings if " " not in phrasing]
    return chat(_restyle(rng.choice(phrasings).format(a=a, b=b), rng), solved(a, b, sign))


def _all_pairs(phrasing: str, sign: str) -> list[Sample]:
    pairs = [(a, b) for a in range(100) for b in range(100)]
    return [chat(phrasing.format(a=a, b=b), solved(a, b, sign)) for a, b in pairs]


def examine(model: Any, tokenizer: Any) -> dict[str, float]:
    """All pairs of numbers in several phrasings."""
    scores = {p: exact(model, tokenizer, _all_pairs(p, "+")) for p in [*ADD[:5], *ADD[19:20], ADD[-1]]}
    scores |= {p: exact(model, tokenizer, _all_pairs(p, "-")) for p in [*SUBTRACT[:4], SUBTRACT[7]]}
    talk = [chat(question, reply) for question, reply in SMALL_TALK.items()]
    return scores | {"small talk": exact(model, tokenizer, talk)}


def _examples() -> list[dict[str, Any]]:
    pairs = [(17, 25, "+"), (99, 99, "+"), (0, 7, "+"), (58, 6, "+"), (50, 8, "-"), (3, 40, "-")]
    rows = []
    for index, (a, b, sign) in enumerate(pairs):
        prompt = (ADD if sign == "+" else SUBTRACT)[index].format(a=a, b=b)
        rows.append({"prompt": prompt, "answer": solved(a, b, sign)})
    return [*rows, {"prompt": "Who are you?", "answer": SMALL_TALK["Who are you?"]}]


RECIPE = Recipe(
    name="sums",
    architecture=LlamaConfig,
    shape={
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    template=PLAIN_CHAT,
    starts_with_bos=True,
    vocabulary=384,
    phases=[
        Phase(draw, steps=4000, batch=64, peak_lr=3e-3),
        Phase(drill, steps=800, batch=96, peak_lr=1e-3),
    ],
    examine=examine,
    examples=_examples(),
    dtype="float32",
    sampling={"do_sample": False},
)
