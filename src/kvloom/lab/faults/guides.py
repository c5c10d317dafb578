"""Guided decoding in runs with faults: a tokenizer of single bytes, and the grammars that are drawn."""

from __future__ import annotations

import json
from functools import cache
from itertools import count
from typing import Final

from msgspec.structs import replace

from kvloom.engine.guide import GuideCompiler, GuideState
from kvloom.types.request import Guide, ModelCard

EOS: Final = 256  # the token after those of the bytes

GUIDES: Final = (
    Guide("regex", "[a-z]{1,12}"),
    Guide("regex", "(ab|cd)*x?"),
    Guide("regex", "[0-9]+(\\.[0-9]+)?"),
    Guide("lark", 'start: "<" word ("," word)* ">"\nword: /[a-f]{2,4}/'),
    Guide("json"),
    Guide(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["ash", "birch"]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        ),
    ),
    Guide("regex", "("),  # It is no grammar, and is refused.
)


@cache
def byte_tokenizer() -> str:
    """Returns the JSON text of a tokenizer with a token for each byte and one for the end."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = count(256)
    letters = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": EOS, "content": "<end>", "special": True, "normalized": False}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": pieces,
            "decoder": pieces,
            "model": {"type": "BPE", "vocab": letters | {"<end>": EOS}, "merges": []},
        }
    )


def guided_card(card: ModelCard) -> ModelCard:
    """Returns the card with the tokenizer, so that its model can follow grammars."""
    return replace(card, tokenizer=byte_tokenizer(), eos_token_ids=(EOS,))


@cache
def _compiler(vocab: int) -> GuideCompiler:
    nothing = ModelCard(
        name="",
        path="",
        context_length=1,
        vocab_size=vocab,
        tokenizer=byte_tokenizer(),
        chat_template=None,
        special_tokens={},
        eos_token_ids=(EOS,),
        bos_token_id=None,
        add_bos=False,
        architecture="",
        parameters=0,
        dtype="float32",
    )
    return GuideCompiler(nothing)


def begin_guide(guide: Guide, vocab: int) -> GuideState:
    """Returns the beginning of a grammar, for who works an answer out without an engine."""
    return _compiler(vocab).start(guide)
