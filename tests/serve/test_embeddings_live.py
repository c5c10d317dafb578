"""Embeddings and scores by OpenAI's client and by HTTP, from a fleet whose engine is killed."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import make_checkpoint
from tests.pooled import make_encoder, save_pooling, score_of, states_of
from tests.processes import fleet

CONFIG = """
kv_memory: 16MiB
block_bytes: 4KiB
threads: 2
models: {text: ./text, vectors: ./vectors, cross: ./cross}
"""
TEXTS = ["Hello world.", "a somewhat longer text, with 3 parts!", "b"]


def post(url: str, path: str, **body: Any) -> Any:
    asked = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)


def test_embeddings_and_scores_beside_generation_and_after_a_kill(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "text", "qwen2")
    vectors = save_pooling(make_encoder(tmp_path / "vectors", "bert"))
    cross = make_encoder(tmp_path / "cross", "bert", "score")
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(vectors)
    means = [states_of(vectors, tokenizer(text)["input_ids"]).mean(0) for text in TEXTS]
    expected = torch.nn.functional.normalize(torch.stack(means))
    with fleet(str(file)) as running:
        url = running.wait_until_ready()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            coded = client.embeddings.create(model="vectors", input=TEXTS)  # asks for base64, and decodes it
            plain = client.embeddings.create(model="vectors", input=TEXTS, encoding_format="float")
            for answer in (coded, plain):
                found = torch.tensor([one.embedding for one in answer.data])
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert client.completions.create(model="text", prompt="a", max_tokens=2).choices
            with pytest.raises(openai.BadRequestError, match="text does not make embeddings"):
                client.embeddings.create(model="text", input="a")
            with pytest.raises(openai.BadRequestError, match="/v1/embeddings is right"):
                client.completions.create(model="vectors", prompt="a")

            os.kill(running.children()["unit-0"], signal.SIGKILL)
            again = client.embeddings.create(model="vectors", input=TEXTS)
            assert [one.embedding for one in again.data] == [one.embedding for one in coded.data]
        pairs = [tokenizer("who is it", text) for text in TEXTS]
        scores = [
            score_of(cross, one["input_ids"], len(tokenizer("who is it")["input_ids"])) for one in pairs
        ]
        ranked = post(url, "/v1/rerank", model="cross", query="who is it", documents=TEXTS)["results"]
        assert [one["index"] for one in ranked] == sorted(range(3), key=lambda at: -scores[at])
        for one in ranked:
            wanted = torch.sigmoid(torch.tensor(scores[one["index"]])).item()
            assert one["relevance_score"] == pytest.approx(wanted, abs=1e-5)
        assert running.end(signal.SIGINT) == 0
