"""Make the demo fleet: train the tiny models, write their checkpoints, examine them.

python tools/make_demo_fleet.py [--only NAME] [--out DIR]
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from tools.demo_fleet import checkpoint  # noqa: E402
from tools.demo_fleet.examination import answer  # noqa: E402
from tools.demo_fleet.recipe import Recipe  # noqa: E402
from tools.demo_fleet.tokenizer import train_tokenizer  # noqa: E402
from tools.demo_fleet.training import train  # noqa: E402

NAMES = ["sums", "stories", "guide"]
SEED = 20240607


def report(recipe: Recipe, folder: Path, console: Console) -> None:
    """Read the checkpoint back and print what it can do."""
    model, tokenizer = checkpoint.read(folder)
    size = (folder / "model.safetensors").stat().st_size
    console.print(
        f"{recipe.name}: {model.num_parameters():,} parameters, {size / 1e6:.2f} MB, {recipe.dtype}"
    )
    for title, score in recipe.examine(model, tokenizer).items():
        console.print(f"  {score:8.3%}  {title}", markup=False)
    for example in recipe.examples:
        messages = example.get("messages") or [{"role": "user", "content": example["prompt"]}]
        console.print(f"  > {messages[-1]['content']}", markup=False)
        console.print(f"    {answer(model, tokenizer, messages, example.get('tools'))}", markup=False)


def main() -> None:
    """Make one model or all of them."""
    parser = argparse.ArgumentParser(description="train the demo fleet")
    parser.add_argument("--only", choices=NAMES, help="make this model alone")
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "kvloom" / "demo", help="where to write")
    parser.add_argument("--examine", action="store_true", help="train nothing, examine what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    console = Console()
    for name in [options.only] if options.only else NAMES:
        recipe: Recipe = import_module(f"tools.demo_fleet.{name}").RECIPE
        if not options.examine:
            tokenizer = train_tokenizer(recipe, SEED)
            checkpoint.write(recipe, train(recipe, tokenizer, SEED), tokenizer, options.out / name)
        report(recipe, options.out / name, console)


if __name__ == "__main__":
    main()
