"""The training loop."""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tools.demo_fleet.batch import IGNORED, Batches
from tools.demo_fleet.recipe import Phase, Recipe
from transformers import AutoModelForCausalLM

WARMUP = 100


def make_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A fresh model of the recipe's shape."""
    config = recipe.architecture(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.04,
        **recipe.shape,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _rate(step: int, phase: Phase) -> float:
    """Warm up, then a cosine down to nothing."""
    if step < WARMUP:
        return phase.peak_lr * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, phase.steps - WARMUP)
    return phase.peak_lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def _optimizer(model: Any, phase: Phase) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    free = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=phase.peak_lr, betas=(0.9, 0.98), fused=True)


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, labels: torch.Tensor) -> float:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def train_phase(model: Any, phase: Phase, batches: Batches, title: str) -> None:
    """Train for one phase, and show how it goes."""
    optimizer, smooth = _optimizer(model, phase), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=phase.steps)
        for step in range(phase.steps):
            for group in optimizer.param_groups:
                group["lr"] = _rate(step, phase)
            loss = _step(model, optimizer, *batches.next())
            smooth = loss if step == 0 else 0.98 * smooth + 0.02 * loss
            progress.update(task, advance=1, description=f"{title} {step + 1} loss {smooth:.4f}")
            if not progress.console.is_terminal and (step + 1) % 200 == 0:
                progress.console.print(f"{title} {step + 1}/{phase.steps} loss {smooth:.4f}")


def train(recipe: Recipe, tokenizer: Any, seed: int) -> Any:
    """Train a model through all phases of its recipe."""
    torch.manual_seed(seed)
    model = make_model(recipe, tokenizer).train()
    for number, phase in enumerate(recipe.phases, start=1):
        train_phase(model, phase, Batches(phase, tokenizer, seed + number), f"{recipe.name} phase {number}")
    return model.eval()
