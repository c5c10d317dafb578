"""What NIXL is told of a unit's memory."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.kv.arena import Arena
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import HostPlace
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.errors import BadRequest, ConfigError
from kvloom.types.geometry import Geometry
from tests.transfer.kinds import NIXL

BLOCKS, BLOCK_BYTES = 8, 4096

pytestmark = pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'")


class _Mistaken(HostPlace):
    """Says of the host's memory that it is a GPU's."""

    segment = "VRAM"
    progress = False


def test_memory_that_nixl_cannot_use_is_refused_at_the_start_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot use this unit's VRAM, 32,768 bytes: .*BACKEND") as error:
        NixlTransport("unit", Arena(BLOCKS, BLOCK_BYTES), _Mistaken())
    assert "\n" not in error.value.message


def test_a_gpus_memory_and_the_hosts_exchange_nothing() -> None:
    form = KVForm.of(Geometry(1, 1, 16, 4, BLOCK_BYTES), "float32")
    blocks = KVAddress.compress(np.array([7], np.int32))
    address = KVAddress(model="m", form=form, begin=0, end=32, blocks=blocks, ticket=Ticket(0, 1))
    unit = NixlTransport("unit", Arena(BLOCKS, BLOCK_BYTES), HostPlace())
    try:
        peer = Endpoint(unit="gpu", kind="nixl-cuda", where=unit.endpoint.where)
        with pytest.raises(BadRequest, match="gpu moves K and V by nixl-cuda, this unit by nixl"):
            unit.claim(peer, address, 5, 0, 32)
    finally:
        unit.close_all()
