"""What K and V in fewer bits cost in exactness: the mean Kullback-Leibler divergence of the next token's
distribution from float32's, on texts that the demo fleet's models have written.

python -m benchmarks.kv_formats. Each text is one prefill over pages, as an engine runs it, of the same model
with K and V in each format; nothing is timed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.places import ROOT
from benchmarks.report import Report, make_parser, publish, this_machine
from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import LoadedModel, load_model
from kvloom.kv.arena import Arena
from kvloom.kv.pool import Pool
from kvloom.types.geometry import KVDtype
from kvloom.types.spec import ModelSpec

DEMO: Final = ROOT / "src" / "kvloom" / "demo"
MODELS: Final = ("guide", "stories", "sums")
KEPT: Final[tuple[KVDtype, ...]] = ("float32", "bfloat16", "int8")
ALL: Final = 1000  # examples of a model; none has as many
_BLOCK = 4096
_NAME = "m"


def texts(path: Path, count: int, length: int) -> list[tuple[list[int], int]]:
    """Returns the tokens of the first `count` examples with greedy answers of up to `length` tokens, and how
    many of each are the prompt's."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    found = []
    for row in json.loads((path / "examples.json").read_text("utf-8"))[:count]:
        chat = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        asked = {"tools": row.get("tools"), "add_generation_prompt": True, "tokenize": False}
        prompt = tokenizer(tokenizer.apply_chat_template(chat, **asked), add_special_tokens=False).input_ids
        with torch.inference_mode():
            tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=length)[0]
        found.append((tokens.tolist(), len(prompt)))
    return found


def load(path: Path, kv_dtype: KVDtype) -> LoadedModel:
    spec = ModelSpec(name=_NAME, path=str(path), dtype="float32", kv_dtype=kv_dtype)
    return load_model(spec, _BLOCK, CPU)


def log_probabilities(model: LoadedModel, tokens: Sequence[int], asked: int) -> Tensor:
    """Returns [L − asked + 1, V], after the last token of the prompt and after each of the answer."""
    geometry = model.geometry
    arena = Arena(geometry.blocks(len(tokens)), geometry.block_bytes)
    pool = Pool(arena.blocks, {_NAME: geometry}, max_sequences=1, max_tokens={_NAME: len(tokens)})
    cache, kept = pool.caches[_NAME], np.arange(asked - 1, len(tokens))
    cache.add_sequence(0)
    plan = cache.begin_forward([0], [len(tokens)])
    with torch.inference_mode():
        state = ForwardState(plan, arena.view(geometry.head_dim, model.kv_dtype))
        return model.forward(np.asarray(tokens), kept, state)[: len(kept)].double().log_softmax(-1)


class Divergence(NamedTuple):
    """The mean divergence in nats over `tokens` tokens of answers."""

    mean: float
    tokens: int


def divergences(path: Path, count: int, length: int = 80) -> dict[KVDtype, Divergence]:
    """Returns what each format of K and V costs on `count` texts of the model. float32's own is 0 unless the
    forwards differ by chance."""
    exact = load(path, "float32")
    asked = texts(path, count, length)
    wanted = [log_probabilities(exact, *one) for one in asked]
    seen, found = sum(map(len, wanted)), dict[KVDtype, Divergence]()
    for kv_dtype in KEPT:
        model = load(path, kv_dtype)
        pairs = zip(wanted, (log_probabilities(model, *one) for one in asked), strict=True)
        found[kv_dtype] = Divergence(sum(float((p.exp() * (p - q)).sum()) for p, q in pairs) / seen, seen)
    return found


def measure(count: int) -> Report:
    machine = this_machine()
    rows: list[list[str | int | float | None]] = []
    for name in MODELS:
        for kv_dtype, found in divergences(DEMO / name, count).items():
            geometry = load(DEMO / name, kv_dtype).geometry
            size = geometry.token_bytes * geometry.blocks_per_page
            rows.append([name, kv_dtype, size, geometry.tokens_per_block, f"{found.mean:.1e}", found.tokens])
    return Report(
        name="kv-formats",
        title="K and V in fewer bits",
        columns=["model", "kv_dtype", "bytes a token", "tokens a block", "mean divergence, nats", "tokens"],
        rows=rows,
        findings=[],
        machine=machine,
        notes=[f"Blocks of {_BLOCK} bytes; float32 against itself shows what the script adds."],
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--texts", type=int, default=ALL, help="examples of each model at most")
    publish(measure(parser.parse_args().texts), Console())


if __name__ == "__main__":
    main()
