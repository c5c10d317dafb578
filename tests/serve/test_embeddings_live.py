"""Embeddings and scores by official clients and by HTTP, from a real fleet whose engine is killed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import make_checkpoint
from tests.pooling_models import make_encoder, save_pooling, score_of, states_of
from tests.processes import Fleet, fleet

CONFIG = """
kv_memory: 16MiB
block_bytes: 4KiB
threads: 2
models: {text: ./text, vectors: ./vectors, cross: ./cross, asking: ./asking}
"""
TEXTS = ["Hello world.", "a somewhat longer text, with 3 parts!", "b"]
QUERY = "who is it"
CONTEXT = 130


@dataclass(frozen=True)
class Served:
    running: Fleet
    url: str
    vectors: Path
    cross: Path

    def post(self, path: str, **body: Any) -> Any:
        asked = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)

    def refused(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.post(path, **body)
        error = json.load(caught.value)["error"]
        return caught.value.code, error if isinstance(error, dict) else {"message": error}

    def tokens(self, *texts: str) -> list[int]:
        ids: list[int] = AutoTokenizer.from_pretrained(self.vectors)(*texts)["input_ids"]
        return ids

    def expected(self, texts: list[str]) -> torch.Tensor:
        means = [states_of(self.vectors, self.tokens(text)).mean(0) for text in texts]
        return torch.nn.functional.normalize(torch.stack(means))

    def scores(self) -> list[float]:
        second = len(self.tokens(QUERY))
        logits = [score_of(self.cross, self.tokens(QUERY, text), second) for text in TEXTS]
        return torch.tensor(logits).sigmoid().tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fleet")
    make_checkpoint(folder / "text", "qwen2")
    vectors = save_pooling(make_encoder(folder / "vectors", "bert"))
    cross = make_encoder(folder / "cross", "bert", "score")
    shutil.copytree(vectors, folder / "asking")
    prompts = {"prompts": {"query": QUERY}, "default_prompt_name": "query"}
    (folder / "asking" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    file = folder / "fleet.yaml"
    file.write_text(CONFIG)
    with fleet(str(file)) as running:
        yield Served(running, running.wait_until_ready(), vectors, cross)
        assert running.end(signal.SIGINT) == 0


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)


def test_the_client_of_openai(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        coded = client.embeddings.create(model="vectors", input=TEXTS)  # asks for base64, and decodes it
        plain = client.embeddings.create(model="vectors", input=TEXTS, encoding_format="float")
        for answer in (coded, plain):
            close([one.embedding for one in answer.data], served.expected(TEXTS))
            assert [one.index for one in answer.data] == [0, 1, 2]
            assert answer.usage.total_tokens == sum(len(served.tokens(text)) for text in TEXTS)
        assert client.completions.create(model="text", prompt="a", max_tokens=2).choices
        with pytest.raises(openai.BadRequestError, match="text does not make embeddings"):
            client.embeddings.create(model="text", input="a")
        with pytest.raises(openai.BadRequestError, match="/v1/embeddings is right"):
            client.completions.create(model="vectors", prompt="a")


def test_texts_and_their_tokens_are_alike(served: Served) -> None:
    def found(given: Any) -> list[list[float]]:
        return [
            one["embedding"] for one in served.post("/v1/embeddings", model="vectors", input=given)["data"]
        ]

    ids = [served.tokens(text) for text in TEXTS]
    assert found(ids) == found(TEXTS)
    close(found(ids[0]), served.expected(TEXTS[:1]))


def test_a_default_prompt_stands_in_front_of_texts(served: Served) -> None:
    expected = served.expected([QUERY + text for text in TEXTS])
    data = served.post("/v1/embeddings", model="asking", input=TEXTS)["data"]
    close([one["embedding"] for one in data], expected)
    scored = served.post("/v1/score", model="asking", text_1=TEXTS[0], text_2=TEXTS[1:])["data"]
    close([one["score"] for one in scored], expected[1:] @ expected[0])


def test_vectors_that_are_cut_have_the_length_1_again(served: Served) -> None:
    body = {"model": "vectors", "input": TEXTS, "dimensions": 10, "encoding_format": "base64"}
    data = served.post("/v1/embeddings", **body)["data"]
    found = np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data])
    close(found, torch.nn.functional.normalize(served.expected(TEXTS)[:, :10]))


def test_more_texts_than_one_job_has(served: Served) -> None:
    texts = [f"{TEXTS[at % 3]} {at}" for at in range(150)]
    data = served.post("/v1/embeddings", model="vectors", input=texts)["data"]
    assert [one["index"] for one in data] == list(range(150))
    close([data[at]["embedding"] for at in (0, 77, 149)], served.expected([texts[at] for at in (0, 77, 149)]))


def test_the_client_of_ollama(served: Served) -> None:
    client = ollama.Client(host=served.url)
    close(client.embed("vectors", TEXTS).embeddings, served.expected(TEXTS))
    close([client.embeddings("vectors:latest", TEXTS[1]).embedding], served.expected(TEXTS[1:2]))
    assert client.show("vectors").capabilities == ["embedding"]
    with pytest.raises(ollama.ResponseError, match="does not make embeddings"):
        client.embed("text", "a")


def test_ollama_cuts_what_is_too_long_before_the_last_token(served: Served) -> None:
    long = "a b c d " * 100
    client = ollama.Client(host=served.url)
    found = client.embed("vectors", [long, "b"])
    ids = served.tokens(long)
    kept = states_of(served.vectors, [*ids[: CONTEXT - 1], ids[-1]]).mean(0)
    close(found.embeddings[:1], torch.nn.functional.normalize(kept[None]))
    close(found.embeddings[1:], served.expected(["b"]))
    with pytest.raises(ollama.ResponseError, match="maximum context length is 130 tokens"):
        client.embed("vectors", long, truncate=False)


def test_documents_are_sorted_by_their_scores(served: Served) -> None:
    scores = served.scores()
    order = sorted(range(len(TEXTS)), key=lambda at: -scores[at])
    body = {"model": "cross", "query": QUERY, "documents": TEXTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = served.post(path, **body)
        assert [one["index"] for one in answer["results"]] == order
        close(
            [one["relevance_score"] for one in answer["results"]], torch.tensor([scores[at] for at in order])
        )
        assert [one["document"] for one in answer["results"]] == [{"text": TEXTS[at]} for at in order]
    documents = [{"text": text, "title": "t"} for text in TEXTS]
    best = served.post("/rerank", **body | {"documents": documents}, top_n=1, return_documents=False)
    assert [one["index"] for one in best["results"]] == order[:1]
    assert "document" not in best["results"][0]


def test_pairs_are_scored(served: Served) -> None:
    def found(path: str = "/v1/score", **body: Any) -> list[float]:
        return [one["score"] for one in served.post(path, **body)["data"]]

    scores = torch.tensor(served.scores())
    close(found(model="cross", text_1=QUERY, text_2=TEXTS), scores)
    close(found("/score", model="cross", text_1=[QUERY, QUERY], text_2=TEXTS[:2]), scores[:2])
    close(found(model="cross", text_1=QUERY, text_2=TEXTS[2]), scores[2:])
    own = served.expected([QUERY, *TEXTS])
    close(found(model="vectors", text_1=QUERY, text_2=TEXTS), own[1:] @ own[0])


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": ""}, "input", "expected a text or token ids"),
        ({"input": []}, "input", "none of them empty"),
        ({"input": ["a", ""]}, "input", "at least 1"),
        ({"input": [[]]}, "input", "input[0]"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 texts are taken at once, and 2049 are here"),
        ({"input": [[1], ["a"]]}, "input", "integer"),
        ({"input": None}, "input", "input"),
        ({"input": [100_000]}, "input", "token 100000 is not in the vocabulary of"),
        ({"input": "a b " * 100}, "input", "context length is 130 tokens. However, input has 202 tokens"),
        ({"input": [[7], [7] * 131]}, "input", "130 tokens. However, input has 131 tokens"),
        ({"input": "a " * 500_000}, "input", "maximum context length is 130 tokens"),
        ({"input": "a", "dimensions": 65}, "dimensions", "have 64; at most as many are right"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "stream": True}, "stream", "come whole"),
        ({"input": "a", "model": "cross"}, "model", "cross does not make embeddings; /v1/score"),
    ],
)
def test_bad_requests_for_embeddings(served: Served, body: dict[str, Any], param: str, told: str) -> None:
    status, error = served.refused("/v1/embeddings", **{"model": "vectors"} | body)
    assert (status, error["param"].partition("[")[0]) == (400, param)
    assert told in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"query": "", "documents": ["a"]}, "query"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": [""]}, "documents"),
        ("rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "a", "documents": ["b"], "model": "text"}, "model"),
        ("rerank", {"query": "a", "documents": ["b " * 200]}, "documents"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("score", {"text_1": "a " * 200, "text_2": "b"}, "text_1"),
    ],
)
def test_bad_requests_for_scores(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    status, error = served.refused(f"/v1/{path}", **{"model": "cross"} | body)
    assert (status, error["param"].partition("[")[0]) == (400, param), error["message"]


def test_a_killed_engine_costs_no_vector(served: Served) -> None:
    before = served.post("/v1/embeddings", model="vectors", input=TEXTS)
    os.kill(served.running.children()["unit-0"], signal.SIGKILL)
    assert served.post("/v1/embeddings", model="vectors", input=TEXTS)["data"] == before["data"]
