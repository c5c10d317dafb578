"""A unit on a device that lends: its own forwards do another unit's tasks on the way, and give the tokens
that they give without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvloom.kernels import mail_reference
from kvloom.kernels.mail import End
from kvloom.model.gpu.attender import DeviceAttender
from kvloom.model.gpu.device import Device
from kvloom.model.gpu.operations import Operations, plain_operations, triton_operations
from kvloom.model.gpu.partitions import Lane, Partitions
from kvloom.model.gpu.streams import HostStream
from tests import interpreter
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, spec_of
from tests.kernels.loaned import Loaned, Shape, scale_of
from tests.model.gpu.engines import COMPUTE, running_on_device

COUNT = 3
PROMPT = [5, 9, 200, 17, 3]


@pytest.fixture(params=["plain", "triton"])
def operations(request: pytest.FixtureRequest) -> Iterator[Operations]:
    """The second polls by the kernel, in the interpreter."""
    if request.param == "plain":
        yield plain_operations()
        return
    if not interpreter.INSTALLED or torch.cuda.is_available():
        pytest.skip("want triton, and no GPU: kernels do not run on the CPU there")
    interpreter.load()
    with interpreter.interpreting():
        yield replace(plain_operations(), serve=partial(triton_operations().serve, programs=2))


def test_tasks_are_done_on_the_way(tmp_path: Path, operations: Operations) -> None:
    path = make_checkpoint(tmp_path, "mistral", num_hidden_layers=2)
    device = Device(torch.device("cpu"), COMPUTE, Partitions(Lane(COMPUTE, HostStream()), []))
    shape = Shape()
    loan = Loaned(shape)
    lanes = device.partitions.lanes
    attender = DeviceAttender(loan.mail, loan.lent, lanes, operations, loan.start)

    def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)

    async def serve() -> None:
        async with running_on_device(spec_of({"m": path}, max_running=1), device, operations) as (
            engine,
            executor,
        ):
            alone = (await ask(engine, body("m", PROMPT, max_tokens=COUNT))).tokens
            executor.lend(attender)
            for step in range(2):
                loan.begin([step + 2, 4])
                asked = loan.rows(2)
                wanted = []
                for layer in range(2):  # as many as there are slots
                    mail_reference.post(loan.mail, loan.pad, *asked, layer, scale_of(shape))
                    wanted.append(loan.wanted(layer, *asked, scale_of(shape)))
                assert (await ask(engine, body("m", PROMPT, max_tokens=COUNT))).tokens == alone
                for one in wanted:
                    out = torch.empty_like(asked[0])
                    mail_reference.collect(loan.mail, loan.pad, out, 0)
                    assert not int(loan.pad.status)
                    check(out, one)
            attender.close()
            mail_reference.post(loan.mail, loan.pad, *asked, 0, 1.0)
            done = int(loan.mail.word("done"))
            assert (await ask(engine, body("m", PROMPT, max_tokens=COUNT))).tokens == alone
            assert int(loan.mail.word("done")) == done
            executor.lend(None)

    asyncio.run(serve())
    assert attender.over is End(int(loan.mail.word("over"))) is End.CLOSED


def test_who_breaks_the_rules_is_found_out_without_the_host(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mistral", num_hidden_layers=1)
    device = Device(torch.device("cpu"), COMPUTE, Partitions(Lane(COMPUTE, HostStream()), []))
    loan = Loaned(Shape())
    loan.begin([3])
    mail_reference.post(loan.mail, loan.pad, *loan.rows(1), 0, 1.0)
    loan.mail.lengths[0] = 1 << 30
    attender = DeviceAttender(loan.mail, loan.lent, device.partitions.lanes, plain_operations(), loan.start)

    async def serve() -> None:
        async with running_on_device(spec_of({"m": path}, max_running=1), device) as (engine, executor):
            executor.lend(attender)
            assert len((await ask(engine, body("m", PROMPT, max_tokens=COUNT))).tokens[0]) == COUNT

    asyncio.run(serve())
    assert attender.over is End.FORGED
    attender.close()
    assert int(loan.mail.word("over")) == End.FORGED
