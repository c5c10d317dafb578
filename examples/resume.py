"""A stream whose client loses its connection twice, and goes on after the last event that it has."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from itertools import islice

URL = os.environ.get("KVLOOM_URL", "http://127.0.0.1:8000")
BODY = json.dumps(
    {
        "model": "stories",
        "prompt": "Once",
        "max_tokens": 60,
        "temperature": 0.8,
        "stream": True,
        "stream_options": {"include_event_ids": True},
    }
).encode()


def events(last: str = "") -> Iterator[tuple[str, str]]:
    """The id and the data of each event after the event `last`."""
    headers = {"content-type": "application/json"} | ({"last-event-id": last} if last else {})
    request = urllib.request.Request(f"{URL}/v1/completions", BODY, headers)
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                last = value
            elif name == "data":
                yield last, value


def text(data: str) -> str:
    told: str = json.loads(data)["choices"][0]["text"]
    return told


def main() -> None:
    told: list[tuple[str, str]] = []
    for lost_after in (10, 10, None):  # events; then the connection is lost
        told += islice(events(told[-1][0] if told else ""), lost_after)
    story = [text(data) for _, data in told if data != "[DONE]"]
    again = [text(data) for _, data in events(told[0][0]) if data != "[DONE]"]
    print("The stream came to its end:", told[-1][1] == "[DONE]")
    print("Joined it is what the server makes in one piece:", "".join(story[1:]) == "".join(again))


if __name__ == "__main__":
    main()
