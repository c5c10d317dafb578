"""Models that make vectors, against sentence-transformers' own answers from the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvloom.exec.loader import LoadedModel
from kvloom.exec.pooling.files import MODES
from kvloom.exec.pooling.model import PoolingModel
from tests.exec.loading import load, reconfigure, refusal
from tests.pooling_models import make_encoder, save_pooling

NAMES = {
    "cls": "cls_token",
    "mean": "mean_tokens",
    "max": "max_tokens",
    "weightedmean": "weightedmean_tokens",
}
TEXTS = [
    "Hello world.",
    "a somewhat longer text, with 3 parts! and then it goes on for a while",
    "b",
    "hello",
]
QUERY = "who is it?"


def vectors(model: LoadedModel, texts: list[list[int]], pairs: tuple[int, ...] = ()) -> torch.Tensor:
    assert model.pooling_model is not None
    lengths = np.array([len(text) for text in texts])
    with torch.inference_mode():
        return model.pooling_model(np.concatenate(texts), lengths, pairs or (0,) * len(texts))


def tokens(path: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return [tokenizer(text)["input_ids"] for text in texts]


def theirs(path: Path) -> torch.Tensor:
    model = sentence_transformers.SentenceTransformer(str(path), device="cpu")
    model.tokenizer.pad_token = model.tokenizer.pad_token or model.tokenizer.convert_ids_to_tokens(0)
    return torch.from_numpy(model.encode(TEXTS, batch_size=1))


@pytest.mark.parametrize("kind", ["bert", "xlm_roberta", "modernbert", "qwen3", "llama", "gemma2"])
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, kind: str) -> None:
    path = save_pooling(make_encoder(tmp_path, kind), "lasttoken" if kind == "qwen3" else "mean_tokens")
    model = load(path)
    torch.testing.assert_close(vectors(model, tokens(path, TEXTS)), theirs(path), atol=1e-5, rtol=0)
    assert model.card.task == "embed"
    assert model.card.chat_template is None


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_pooling(tmp_path: Path, mode: str, normalize: bool) -> None:
    path = save_pooling(make_encoder(tmp_path, "bert"), NAMES.get(mode, mode), normalize=normalize)
    found = vectors(load(path), tokens(path, TEXTS))
    torch.testing.assert_close(found, theirs(path), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [None, "activation.Sigmoid", "linear.Identity"])
@pytest.mark.parametrize("kind", ["bert", "xlm_roberta", "modernbert"])
def test_scores_are_those_of_a_cross_encoder(tmp_path: Path, kind: str, function: str | None) -> None:
    path = make_encoder(tmp_path, kind, "score")
    if function is not None:
        reconfigure(path, sentence_transformers={"activation_fn": f"torch.nn.modules.{function}"})
    stock = sentence_transformers.CrossEncoder(str(path), device="cpu")
    expected = torch.from_numpy(stock.predict([(QUERY, one) for one in TEXTS]))
    tokenizer = AutoTokenizer.from_pretrained(path)
    second = len(tokenizer(QUERY)["input_ids"])
    pairs = [tokenizer(QUERY, text)["input_ids"] for text in TEXTS]
    model = load(path)
    found = vectors(model, pairs, (second,) * len(pairs))[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (model.card.task, model.card.dimensions) == ("score", 1)


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(save_pooling(make_encoder(tmp_path_factory.mktemp("model"), "modernbert")))


@settings(deadline=None, max_examples=25)
@given(texts=st.lists(st.lists(st.integers(4, 90), min_size=1, max_size=40), min_size=1, max_size=9))
def test_a_text_has_one_vector_whatever_is_computed_beside_it(
    modernbert: LoadedModel, texts: list[list[int]]
) -> None:
    alone = torch.cat([vectors(modernbert, [text]) for text in texts])
    torch.testing.assert_close(vectors(modernbert, texts), alone, atol=2e-6, rtol=0)


def test_texts_are_as_long_as_the_files_say(tmp_path: Path) -> None:
    assert load(make_bert(tmp_path / "a")).card.context_length == 130
    assert load(make_bert(tmp_path / "b", most=50)).card.context_length == 50
    assert load(make_bert(tmp_path / "c", most=50), max_context=20).card.context_length == 20
    roberta = save_pooling(make_encoder(tmp_path / "d", "xlm_roberta"))
    assert load(roberta).card.context_length == 128  # its table begins behind the row for padding


def make_bert(path: Path, **pooling: Any) -> Path:
    return save_pooling(make_encoder(path, "bert"), **pooling)


def set_prompts(path: Path, **prompts: Any) -> None:
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def test_a_default_prompt_stands_in_front_of_every_text(tmp_path: Path) -> None:
    path = make_bert(tmp_path)
    set_prompts(path, prompts={"query": "who is ", "document": ""}, default_prompt_name="query")
    model = load(path)
    found = vectors(model, tokens(path, [model.card.prefix + text for text in TEXTS]))
    torch.testing.assert_close(found, theirs(path), atol=1e-5, rtol=0)
    set_prompts(path, prompts={"query": "who is "}, default_prompt_name=None)
    assert load(path).card.prefix == ""


def no_such_prompt(path: Path) -> None:
    set_prompts(path, prompts={}, default_prompt_name="query")


def a_prompt_beside_the_pooling(path: Path) -> None:
    set_prompts(path, prompts={"query": "who is "}, default_prompt_name="query")
    config = path / "1_Pooling" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"include_prompt": False}))


def drop_pooling(path: Path) -> None:
    (path / "modules.json").unlink()


def no_mode(path: Path) -> None:
    (path / "1_Pooling" / "config.json").write_text("{}")


def two_modes(path: Path) -> None:
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def no_config(path: Path) -> None:
    (path / "1_Pooling" / "config.json").unlink()


def elsewhere(path: Path) -> None:
    change_module(path, 1, path="../../etc")


def dense(path: Path) -> None:
    change_module(path, 2, type="sentence_transformers.models.Dense")


def no_type(path: Path) -> None:
    change_module(path, 0, type=None)


def a_link_out(path: Path) -> None:
    (path / "1_Pooling" / "config.json").unlink()
    (path / "1_Pooling" / "config.json").symlink_to("/etc/hostname")


def no_json(path: Path) -> None:
    (path / "modules.json").write_text("[")


def two_labels(path: Path) -> None:
    reconfigure(path, architectures=["BertForSequenceClassification"], id2label={"0": "a", "1": "b"})


def change_module(folder: Path, at: int, **changes: Any) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[at] |= changes
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (drop_pooling, "no file says how its states become a vector"),
        (no_mode, "it pools by nothing; one of cls, "),
        (two_modes, "it pools by cls, mean; one of "),
        (no_config, "its files lack 1_Pooling/config.json"),
        (elsewhere, "names the folder '../../etc'; one like 1_Pooling is right"),
        (dense, "its modules.json has Transformer, Pooling, Dense"),
        (no_type, "its modules.json has a module without a type"),
        (a_link_out, "its 1_Pooling/config.json is no file of its folder"),
        (no_json, "its modules.json"),
        (no_such_prompt, "has no prompt 'query', which is its default"),
        (a_prompt_beside_the_pooling, "its default prompt is not to be pooled"),
        (two_labels, "it tells 2 classes apart"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, breaks: Callable[[Path], None], told: str) -> None:
    breaks(make_bert(tmp_path))
    assert told in refusal(tmp_path)


def test_a_model_with_positions_of_its_own_is_refused(tmp_path: Path) -> None:
    told = refusal(save_pooling(make_encoder(tmp_path, "mpnet")))
    assert "attention" in told


def test_what_differs_from_the_stock_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose layers look at where a text lies in the row would give each text another vector."""
    real = PoolingModel.__call__

    def moved(self: PoolingModel, tokens: Any, lengths: Any, pairs: Any) -> torch.Tensor:
        return real(self, tokens[::-1].copy(), lengths, pairs)

    monkeypatch.setattr(PoolingModel, "__call__", moved)
    assert "differs from what it makes of each" in refusal(make_bert(tmp_path))
