"""`kvloom serve` over a GGUF file: tokenizer and chat template come out of it, and nothing else is there."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedTokenizerFast

from tests.ggufs import make_gguf
from tests.oracle import Oracle
from tests.processes import fleet

_QUESTION = {"messages": [{"role": "user", "content": "the weaver"}], "max_tokens": 8, "temperature": 0}


def test_a_file_is_served(tmp_path: Path) -> None:
    file, source = make_gguf(tmp_path, "qwen3", Type.Q8_0, Type.Q4_0, extra={"general.sampling.top_k": 5})
    alone = file.rename(tmp_path / "alone.gguf")
    config = tmp_path / "fleet.yaml"
    config.write_text(f"kv_memory: 16MiB\nmodels: {{chat: {{path: {alone}, dtype: float32}}}}\n")
    with fleet(str(config)) as served:
        url = served.wait_until_ready()
        answer = ask(f"{url}/v1/chat/completions", {"model": "chat", "logprobs": True, **_QUESTION})
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == 8
    oracle = Oracle(source)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(source)
    prompt = tokenizer.apply_chat_template(_QUESTION["messages"], add_generation_prompt=True)["input_ids"]
    assert choice["message"]["content"] == tokenizer.decode(oracle.greedy(prompt, 8))


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
