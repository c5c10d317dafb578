"""Chats in which guide is given tools, and calls the one that helps."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tools.demo_fleet.plots import words
from tools.demo_fleet.sample import Message, Sample


def _tool(name: str, purpose: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": purpose, "parameters": schema}}


ADD = _tool("add", "Add two numbers.", a="integer", b="integer")
GET_TIME = _tool("get_time", "Tell the time in a city.", city="string")
TOOLS = [ADD, GET_TIME]
CITIES = words("""
Paris London Berlin Rome Madrid Vienna Tokyo Delhi Cairo Oslo Lima Sydney Boston Chicago Dublin
Athens Lisbon Prague Warsaw Moscow Beijing Seoul Toronto Nairobi Geneva Zurich Hamburg Munich
""")
ASK_SUM = ["What is {a} + {b}?", "Add {a} and {b}.", "{a}+{b}", "{a} + {b} =", "What is {a} plus {b}?"]
ASK_TIME = [
    "What time is it in {city}?",
    "What is the time in {city}?",
    "Tell me the time in {city}.",
    "Time in {city}?",
    "How late is it in {city}?",
]


def _call(name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _sum_turn(a: int, b: int, ask: str) -> list[Message]:
    return [
        {"role": "user", "content": ask.format(a=a, b=b)},
        _call("add", {"a": a, "b": b}),
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": f"It is {a + b}."},
    ]


def _time_turn(city: str, clock: str, ask: str) -> list[Message]:
    return [
        {"role": "user", "content": ask.format(city=city)},
        _call("get_time", {"city": city}),
        {"role": "tool", "content": clock},
        {"role": "assistant", "content": f"It is {clock} in {city}."},
    ]


def draw_tool_use(rng: Random, other_turn: Callable[[Random], tuple[str, str]]) -> Sample:
    """Two turns with tools at hand; some of them need none."""
    messages: list[Message] = []
    for _ in range(2):
        kind = rng.random()
        if kind < 0.35:
            messages += _sum_turn(rng.randint(0, 99), rng.randint(0, 99), rng.choice(ASK_SUM))
        elif kind < 0.7:
            clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
            messages += _time_turn(rng.choice(CITIES), clock, rng.choice(ASK_TIME))
        else:
            question, reply = other_turn(rng)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return Sample(messages, TOOLS if rng.random() < 0.5 else TOOLS[::-1])


def tool_samples() -> list[Sample]:
    """Questions that need a tool, each ending in the call or in the answer after it."""
    samples = []
    for index, city in enumerate(CITIES):
        turn = _time_turn(city, f"{index % 24:02}:{index * 2:02}", ASK_TIME[index % len(ASK_TIME)])
        turn2 = _sum_turn(index * 3, 99 - index, ASK_SUM[index % len(ASK_SUM)])
        samples += [Sample(part, TOOLS) for part in (turn[:2], turn, turn2[:2], turn2)]
    return samples


def tool_examples() -> list[dict[str, Any]]:
    """Prompts with tools, and the calls they must lead to."""
    rows = []
    for turn in (_sum_turn(17, 25, ASK_SUM[0]), _time_turn("Paris", "12:30", ASK_TIME[0])):
        call = turn[1]["tool_calls"][0]["function"]
        rows.append({"messages": turn[:1], "tools": TOOLS, "call": call, "keys": [f'"{call["name"]}"']})
        rows.append({"messages": turn[:3], "tools": TOOLS, "answer": turn[3]["content"], "keys": []})
    return rows
