"""Tiny random checkpoints of models that make vectors, and what the stock models make, computed plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import VOCAB, config_of, save_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.25,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {"type_vocab_size": 2, "pad_token_id": 0}),
    "xlm_roberta": ("XLMRobertaConfig", {"type_vocab_size": 1}),
    "mpnet": ("MPNetConfig", {}),
    "modernbert": (
        "ModernBertConfig",
        {"local_attention": 8, "global_attn_every_n_layers": 3, "cls_token_id": 2, "sep_token_id": 3},
    ),
}
PAD, UNK, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


def make_encoder(path: Path, kind: str, task: str = "embed", *, seed: int = 0, **changes: Any) -> Path:
    """Writes a random encoder, or a decoder of tests/checkpoints.py, for embeddings or for scores."""
    if kind in ENCODERS:
        name, special = ENCODERS[kind]
        config = getattr(transformers, name)(**(SMALL | special | changes))
        save_word_pieces(path, typed=kind == "bert")
    else:
        config = config_of(kind, **changes)
        save_tokenizer(path, config.vocab_size)
    if task == "score":
        config.num_labels = 1
    torch.manual_seed(seed)
    auto = transformers.AutoModel if task == "embed" else transformers.AutoModelForSequenceClassification
    auto.from_config(config).save_pretrained(path)
    return path


def save_pooling(path: Path, mode: str = "mean_tokens", *, normalize: bool = True, most: int = 0) -> Path:
    """Writes sentence-transformers' own files beside a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": 64, f"pooling_mode_{mode}": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if most:
        (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))
    return path


def save_word_pieces(path: Path, *, typed: bool) -> None:
    """Writes a tokenizer of letters and pieces of words, with BERT's forms of one text and of a pair. typed:
    whether it says of which text of a pair a token is."""
    letters = [chr(ord("a") + i) for i in range(26)] + [str(i) for i in range(10)] + list(".,!?")
    words = [PAD, UNK, CLS, SEP, *letters, *(f"##{letter}" for letter in letters), "hello", "world"]
    words += [f"[unused{i}]" for i in range(VOCAB - len(words))]
    vocab = {word: at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, vocab[CLS]), (SEP, vocab[SEP])],
    )
    names = {"pad_token": PAD, "unk_token": UNK, "cls_token": CLS, "sep_token": SEP}
    inputs = ["input_ids", *(["token_type_ids"] if typed else []), "attention_mask"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)
    fast.save_pretrained(path)


def states_of(path: Path, tokens: list[int], **more: Any) -> torch.Tensor:
    """Returns the last hidden states [n, H] of one text, by the stock model."""
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([tokens]), **more).last_hidden_state[0]
    return states


def score_of(path: Path, tokens: list[int], second: int = 0) -> float:
    """Returns what the stock classifier makes of one text, whose tokens from `second` on are of type 1."""
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(path, attn_implementation="eager").eval()
    more = {"token_type_ids": torch.tensor([[int(0 < second <= at) for at in range(len(tokens))]])}
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        logits = model(input_ids=ids, **(more if second else {})).logits
    return float(logits[0, 0])
