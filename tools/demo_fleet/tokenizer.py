"""A byte-level BPE tokenizer of each model's own."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tools.demo_fleet.recipe import Recipe
from tools.demo_fleet.sample import Sample
from tools.demo_fleet.template import BOS, END, PAD, SPECIAL
from transformers import PreTrainedTokenizerFast

CORPUS_SAMPLES = 6000


def _texts(sample: Sample) -> Iterator[str]:
    yield sample.text
    for message in sample.messages:
        yield str(message.get("content") or "")
    for tool in sample.tools or []:
        yield str(tool).replace("'", '"')


def _corpus(recipe: Recipe, rng: Random) -> Iterator[str]:
    for _ in range(CORPUS_SAMPLES):
        yield from _texts(recipe.phases[0].draw(rng))


def train_tokenizer(recipe: Recipe, seed: int) -> Any:
    """Train on a part of the recipe's text; every byte has a token, so no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary - len(recipe.marks),
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(recipe, Random(seed)), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in recipe.marks])
    if recipe.starts_with_bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{BOS} $A",
                    pair=f"{BOS} $A $B",
                    special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
                ),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=recipe.shape["max_position_embeddings"],
        chat_template=recipe.template,
    )
