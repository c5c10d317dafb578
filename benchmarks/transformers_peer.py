"""transformers' own continuous batching (generate_batch, paged SDPA) as a peer, in a process of its own.

python -m benchmarks.transformers_peer --checkpoint DIR --requests 64 --output 64 --rounds 3 prints a JSON
list: the tokens a second of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.servers import MAX_CONTEXT, MAX_RUNNING
from benchmarks.workload import burst

PAGE = 32
BATCH_TOKENS = 2048  # vLLM's own default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    )
    generate(model, options.requests, 4, seed=-1)
    paces = [generate(model, options.requests, options.output, seed) for seed in range(options.rounds)]
    json.dump(paces, sys.stdout)


def generate(model: Any, requests: int, output: int, seed: int) -> float:
    """Tokens a second of one round. Raises RuntimeError where a request comes back short."""
    prompts = [ask.prompt for ask in burst("m", requests, output, seed)]
    config = GenerationConfig(max_new_tokens=output, min_new_tokens=output, do_sample=False, eos_token_id=-1)
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=MAX_RUNNING * MAX_CONTEXT // PAGE // 2,
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=MAX_RUNNING,
    )
    started = time.perf_counter()
    results = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    seconds = time.perf_counter() - started
    lengths = [len(result.generated_tokens) for result in results.values()]
    if lengths != [output] * requests:
        raise RuntimeError(f"{len(lengths)} of {requests} requests, with {set(lengths)} tokens of {output}")
    return sum(lengths) / seconds


if __name__ == "__main__":
    main()
