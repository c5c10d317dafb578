"""Embeddings of 64 texts by HTTP against sentence-transformers in its own process, from the same files in
float32.

python -m benchmarks.embeddings. Two shapes, those of all-MiniLM-L6 and of BERT base, with random weights. The
lengths of texts are either drawn, as questions and passages have them, or all alike, so that padding costs
nothing. Both sides take turns, read text and have two threads; sentence-transformers has the best of three
sizes of a batch, as it was found first. Vectors are compared too.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks.places import BENCH, LOGS
from benchmarks.process import Command, free_port, running
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine

TEXTS: Final = 64
LEAST: Final = 1.5
MOST_APART: Final = 1e-5
BATCHES: Final = (16, 32, 64)
SHAPES: Final = {
    "MiniLM-L6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12},
    "BERT base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}
VOCABULARY: Final = 30_522
LONGEST: Final = 256  # tokens of a text
PATIENCE: Final = 120.0
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Effort:
    shapes: tuple[str, ...] = tuple(SHAPES)
    rounds: int = 5


QUICK: Final = Effort(("MiniLM-L6",), 1)


def checkpoint(shape: str) -> Path:
    """Returns a random encoder with a tokenizer of whole words, which is made on first use."""
    path = BENCH / "checkpoints" / shape.replace(" ", "-").lower()
    if not (path / "modules.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        size = SHAPES[shape]
        config = BertConfig(vocab_size=VOCABULARY, intermediate_size=4 * size["hidden_size"], **size)
        torch.manual_seed(0)
        stock = path.with_name(f"{path.name}-stock")
        BertModel(config).save_pretrained(stock)
        _tokenizer().save_pretrained(stock)
        transformer = Transformer(str(stock), max_seq_length=LONGEST)
        pooling = Pooling(size["hidden_size"], pooling_mode="mean")
        SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu").save(str(path))
        shutil.rmtree(stock)
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = special + [f"w{at}" for at in range(VOCABULARY - len(special))]
    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


def texts_of(lengths: str, seed: int) -> list[str]:
    """Returns texts of lengths that are drawn (log-normal, a median of 48 tokens), or all of 128."""
    draw = random.Random(seed)

    def words() -> int:
        return 126 if lengths == "128" else min(LONGEST - 2, max(3, round(draw.lognormvariate(3.87, 0.8))))

    return [" ".join(f"w{draw.randrange(VOCABULARY - 4)}" for _ in range(words())) for _ in range(TEXTS)]


def theirs(model: SentenceTransformer, texts: list[str], batch: int) -> tuple[float, Vectors]:
    began = time.perf_counter()
    vectors: Vectors = model.encode(texts, batch_size=batch, show_progress_bar=False)
    return time.perf_counter() - began, vectors


async def ours(session: aiohttp.ClientSession, url: str, texts: list[str]) -> tuple[float, Vectors]:
    began = time.perf_counter()
    body: dict[str, Any] = {"model": "m", "input": texts}
    async with session.post(f"{url}/v1/embeddings", json=body) as answer:
        answer.raise_for_status()
        data = (await answer.json())["data"]
    return time.perf_counter() - began, np.array([one["embedding"] for one in data], np.float32)


async def _shape(
    shape: str, rounds: int, say: Callable[[str], None]
) -> tuple[list[list[Cell]], list[Finding]]:
    path, port = checkpoint(shape), free_port()
    config = LOGS / "embeddings.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_bytes(msgspec.yaml.encode({"models": {"m": {"path": str(path), "dtype": "float32"}}}))
    argv = [sys.executable, "-m", "kvloom.cli", "serve", str(config), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    command = Command("kvloom", [*argv, "--kv-memory", "64MiB"], {}, f"{url}/health", LOGS / "embeddings.log")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = SentenceTransformer(str(path), device="cpu")
    rows: list[list[Cell]] = []
    findings: list[Finding] = []
    async with running(command, patience=PATIENCE), aiohttp.ClientSession() as session:
        for lengths in ("drawn", "128"):
            say(f"{shape}, {lengths} …")
            taken: list[tuple[float, float]] = []
            apart = 0.0
            texts = texts_of(lengths, -1)
            await ours(session, url, texts)
            batch = min((theirs(model, texts, size)[0], size) for size in (BATCHES[0], *BATCHES))[1]
            for seed in range(rounds):
                texts = texts_of(lengths, seed)
                stock, own = theirs(model, texts, batch), await ours(session, url, texts)
                apart = max(apart, float(np.abs(stock[1] - own[1]).max()))
                taken.append((stock[0], own[0]))
            ratio = median(stock / own for stock, own in taken)
            paces = [TEXTS / median(side) for side in zip(*taken, strict=True)]
            rows.append([shape, lengths, *paces, ratio, apart])
            what = f"{shape}, lengths {lengths}"
            findings.append(Finding(what=f"{what}: over sentence-transformers", value=ratio, least=LEAST))
            findings.append(Finding(what=f"{what}: farthest apart", value=apart, most=MOST_APART))
    return rows, findings


async def measure(effort: Effort, say: Callable[[str], None]) -> Report:
    machine = this_machine()
    rows: list[list[Cell]] = []
    findings: list[Finding] = []
    for shape in effort.shapes:
        more, found = await _shape(shape, effort.rounds, say)
        rows += more
        findings += found
    return Report(
        name="embeddings",
        title="64 texts a request, float32",
        columns=[
            "shape",
            "tokens a text",
            "sentence-transformers /s",
            "kvloom /s",
            "ratio",
            "farthest apart",
        ],
        rows=rows,
        findings=findings,
        machine=machine,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=Effort().rounds)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    console = Console()
    effort = Effort(tuple(options.shape), options.rounds)
    publish(asyncio.run(measure(effort, console.print)), console)


if __name__ == "__main__":
    main()
