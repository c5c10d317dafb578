"""The forms of requests and answers of /v1/embeddings, /v1/rerank and /v1/score: OpenAI's, and those that
vLLM, Cohere and Jina have for the last two."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvloom.api.schemas.generation import Answer, ModelBody, TokenIds, Unserved, wrong

MOST_TEXTS = 2048  # OpenAI's

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
Ids = Annotated[TokenIds, Field(min_length=1)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]


class PoolingBody(ModelBody):
    """Parameters of all three. An answer comes whole."""

    stream: Annotated[None, Unserved("vectors and scores come whole", False)] = None
    truncate_prompt_tokens: Annotated[None, Unserved("texts are not cut short; send a shorter one")] = None


class EmbeddingBody(PoolingBody):
    """`dimensions` keeps the first numbers of each vector, which then has the length 1 again."""

    input: Text | Texts | Ids | ManyIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _not_too_many(cls, given: Any) -> Any:
        if isinstance(given, list) and len(given) > MOST_TEXTS and not isinstance(given[0], int):
            raise wrong("input", f"at most {MOST_TEXTS} texts are taken at once, and {len(given)} are here")
        return given

    @property
    def cut(self) -> bool:
        """Returns whether what is longer than the model's context loses its end."""
        return False

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """Returns one text or one list of tokens for each vector."""
        given: Any = self.input
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        several: list[str] | list[list[int]] = given
        return several


class RerankBody(PoolingBody):
    max_tokens_per_doc: Annotated[None, Unserved("documents are not cut short; send shorter ones")] = None
    query: Text
    documents: Annotated[list[Text | dict[str, Any]], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_documents: bool | None = None

    @model_validator(mode="after")
    def _read(self) -> RerankBody:
        for document in self.documents:
            text = document.get("text") if isinstance(document, dict) else document
            if not isinstance(text, str) or not text:
                raise wrong("documents", "a document is a text, or an object with a `text`")
        return self

    @property
    def texts(self) -> list[str]:
        return [one["text"] if isinstance(one, dict) else one for one in self.documents]


class ScoreBody(PoolingBody):
    """One text is scored with each of several, or as many texts with as many, one by one."""

    text_1: Text | Texts
    text_2: Text | Texts

    @model_validator(mode="after")
    def _even(self) -> ScoreBody:
        first, second = _listed(self.text_1), _listed(self.text_2)
        if len(first) not in (1, len(second)):
            raise wrong(
                "text_1", f"text_1 has {len(first)} texts and text_2 {len(second)}; one, or as many, is right"
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = _listed(self.text_1), _listed(self.text_2)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class PromptUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(Answer):
    """`embedding` is the base64 of numbers of float32, little-endian, if that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Answer):
    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: PromptUsage


class RerankResult(Answer):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankAnswer(Answer):
    id: str
    model: str
    usage: PromptUsage
    results: list[RerankResult]


class ScoreData(Answer):
    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: PromptUsage
