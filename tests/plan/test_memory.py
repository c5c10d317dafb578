"""Bytes against published ones."""

from __future__ import annotations

import pytest

from kvloom.plan.cluster import CPU, Nodes
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.plan import (
    activation_bytes,
    fixed_bytes,
    pool_bytes,
    request_bytes,
    token_bytes,
    usable_bytes,
)
from tests.plan.clusters import demand, nodes

ONE, FOUR, EIGHT = (nodes("A100-80", 8).mesh(n) for n in (1, 4, 8))


def test_k_and_v_of_a_token() -> None:
    assert [token_bytes(find_shape(f"llama-{size}"), ONE) for size in ("7b", "13b", "30b", "65b")] == [
        524_288,
        819_200,
        1_597_440,
        2_621_440,
    ]
    assert request_bytes(demand("a", "llama-7b", 1.0, 161, 338), ONE) == 499 * 524_288 + 1


def test_more_devices_than_kv_heads_keep_copies() -> None:
    shape = find_shape("llama3-8b")  # 8 KV heads
    assert [token_bytes(shape, kind) for kind in (ONE, FOUR, EIGHT)] == [131_072] * 3
    sixteen = nodes("A100-80", 16).mesh(16)
    assert token_bytes(shape, sixteen) == 2 * 131_072
    assert token_bytes(shape, Nodes(CPU, 1 << 30, 16, 1).mesh(16)) == 131_072


def test_the_pool_is_what_weights_and_activations_leave() -> None:
    seven, thirteen = find_shape("llama-7b"), find_shape("llama-13b")
    left = pool_bytes(FOUR, [seven, thirteen])
    assert left == usable_bytes(FOUR) - fixed_bytes(seven, FOUR) - fixed_bytes(thirteen, FOUR)
    assert usable_bytes(FOUR) == 304 * 10**9
    assert fixed_bytes(seven, FOUR) == seven.weight_bytes + activation_bytes(seven, FOUR)
    assert pool_bytes(ONE, [find_shape("llama-65b")]) < 0


@pytest.mark.parametrize("size", ["7b", "13b", "30b", "65b"])
def test_activations_are_little_and_grow_with_copies(size: str) -> None:
    shape = find_shape(f"llama-{size}")
    assert 0 < activation_bytes(shape, ONE) < activation_bytes(shape, EIGHT) < 0.1 * shape.weight_bytes
