"""Requests for vectors and scores that are refused before an engine is asked."""

from __future__ import annotations

from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.openai.pooling import MOST_TOKENS
from tests.api.scripted import ScriptedEngine, card, says


def test_a_query_in_many_pairs_has_so_many_tokens_at_most() -> None:
    """A body of kilobytes would stand for gigabytes of tokens."""
    scorer = card(template=None, context_length=4096, task="score", dimensions=1)
    engine = ScriptedEngine(says(""), cards=[scorer])
    documents, query = ["b"] * 2048, "a" * (MOST_TOKENS // 2048)
    with TestClient(create_app(engine)) as http:
        for path, body in (
            ("/v1/rerank", {"query": query, "documents": documents}),
            ("/v1/score", {"text_1": query, "text_2": documents}),
        ):
            answer = http.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 400
            assert f"more than {MOST_TOKENS} tokens in all" in answer.json()["error"]["message"]
    assert not engine.bodies


def test_a_chat_with_a_model_that_makes_vectors_is_told_what_is_right() -> None:
    engine = ScriptedEngine(says(""), cards=[card(template=None, task="embed", dimensions=4)])
    turns = [{"role": "user", "content": "a"}]
    with TestClient(create_app(engine)) as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": turns}),
            ("/v1/responses", {"input": turns}),
            ("/v1/messages", {"messages": turns, "max_tokens": 1}),
            ("/api/chat", {"messages": turns}),
            ("/api/generate", {"prompt": "a"}),
        ):
            answer = http.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 400, path
            assert "/v1/embeddings is right for it" in answer.text
