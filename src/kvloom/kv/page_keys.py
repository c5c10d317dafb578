"""Keys by which a store of prefixes (`types/prefix_store.py`) knows full pages, in any process.

A page's key is a digest over the salt and all tokens from the first to its last, as its name in the feed is
(`kv/prefix_feed.py`), but so long that nobody can make two prompts with the same key.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 24


def root_key(width: int, salt: str) -> bytes:
    """Returns the key before that of the first page, for pages of `width` tokens cached with a salt."""
    return blake2b(repr((width, salt)).encode(), digest_size=KEY_BYTES, person=b"kvloom-root").digest()


def page_key(before: bytes, run: Sequence[int]) -> bytes:
    """Returns the key of the page that holds `run` after the page, or the root, of the key `before`."""
    return blake2b(before + array("i", run).tobytes(), digest_size=KEY_BYTES, person=b"kvloom-page").digest()


def page_keys(root: bytes, tokens: Sequence[int], width: int) -> list[bytes]:
    """Returns the keys of the full pages that hold `tokens`."""
    keys, key = list[bytes](), root
    for at in range(0, len(tokens) - width + 1, width):
        key = page_key(key, tokens[at : at + width])
        keys.append(key)
    return keys
