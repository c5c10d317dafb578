"""Writing a model out as an ordinary Hugging Face checkpoint, and reading it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tools.demo_fleet.recipe import Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def write(recipe: Recipe, model: Any, tokenizer: Any, folder: Path) -> None:
    """Write weights, configuration, tokenizer and examples."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, recipe.dtype))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **recipe.sampling,
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    tokenizer.save_pretrained(folder)
    examples = json.dumps(recipe.examples, indent=1, ensure_ascii=False)
    (folder / "examples.json").write_text(examples + "\n", encoding="utf-8")


def read(folder: Path) -> tuple[Any, Any]:
    """The model, as float32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)
