"""llama.cpp as a peer, in a process of its own: llama-cpp-python's low level, which has llama.cpp's batches.

It runs by the Python of a venv that has llama-cpp-python built from source, and needs nothing else:
llama_peer.py quantize FILE TYPE OUT writes a GGUF file in another type, as llama.cpp's own tool does;
llama_peer.py serve FILE THREADS CONTEXT reads lines of JSON, {"decode": rows, "steps": …} or {"prefill":
tokens}, and answers each by a line with the tokens a second.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

BYTES, CHUNK = 256, 512
ROOM = 256  # tokens of a request that decodes


class Model:
    """A file, and a context for each number of requests: llama.cpp shares a context's tokens out evenly, and
    if it does not (`kv_unified`), each request attends over the places of all. context: the tokens that each
    decodes after."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        self._threads, self._after = threads, context
        self._contexts: dict[int, Any] = {}
        self._batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self._random = np.random.default_rng(0)

    def decode(self, rows: int, steps: int) -> float:
        run = self._context(rows, ROOM)
        for row in range(rows):
            self._append(run, [row] * self._after, range(self._after))
        self._append(run, range(rows), [self._after] * rows)  # a step that is not measured
        begun = time.perf_counter()
        for step in range(steps):
            self._append(run, range(rows), [self._after + 1 + step] * rows)
        return rows * steps / (time.perf_counter() - begun)

    def prefill(self, tokens: int) -> float:
        run = self._context(1, tokens)
        begun = time.perf_counter()
        for start in range(0, tokens, CHUNK):
            span = range(start, min(start + CHUNK, tokens))
            self._append(run, [0] * len(span), span)
        return tokens / (time.perf_counter() - begun)

    def _context(self, rows: int, tokens: int) -> Any:
        """An empty context for `rows` requests of at most so many tokens."""
        if (made := self._contexts.get(rows * tokens)) is None:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_seq_max = rows * -(-tokens // 256) * 256, rows
            params.n_batch = params.n_ubatch = CHUNK
            params.n_threads = params.n_threads_batch = self._threads
            made = llama_cpp.llama_init_from_model(self._model, params)
            if not made:
                sys.exit("llama.cpp has no room for a context")
            self._contexts[rows * tokens] = made
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(made), False)
        return made

    def _append(self, run: Any, rows: Sequence[int], positions: Sequence[int]) -> None:
        """One random token for each row at its position; the last of each row gets logits, and these their
        maximum, as a greedy draw needs it."""
        batch, last = self._batch, dict(zip(rows, range(len(rows)), strict=True))
        for at, (row, position) in enumerate(zip(rows, positions, strict=True)):
            batch.token[at] = int(self._random.integers(0, BYTES))
            batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = position, 1, row
            batch.logits[at] = last[row] == at
        batch.n_tokens = len(rows)
        if llama_cpp.llama_decode(run, batch):
            sys.exit("llama.cpp cannot run a batch")
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        for at in last.values():
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(run, at), (size,)).argmax()


def quantize(source: str, kind: str, out: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)):
        sys.exit(f"llama.cpp cannot make {kind} of {source}")


def serve(path: str, threads: str, context: str) -> None:
    model = Model(path, int(threads), int(context))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        pace = (
            model.decode(asked["decode"], asked["steps"])
            if "decode" in asked
            else model.prefill(asked["prefill"])
        )
        print(json.dumps(pace), flush=True)


if __name__ == "__main__":
    {"quantize": quantize, "serve": serve}[sys.argv[1]](*sys.argv[2:])
