"""Decode steps of a unit that lends: recorded with its polls in them, one after each product and each
attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from kvloom.exec.cpu.linear import Sister
from kvloom.exec.cuda.device import Lane
from kvloom.exec.cuda.graphs import Buffers, DecodeSteps
from kvloom.exec.cuda.model import DeviceModel
from kvloom.model.gpu.attender import DeviceAttender
from kvloom.types.job import Job


class PolledSteps:
    """For one loan: recordings have its mailbox' address. Each is made when a batch first needs it, by a
    thread that holds the lane's lock. To be made and closed while no forward runs."""

    def __init__(
        self,
        attender: DeviceAttender,
        models: Mapping[str, DeviceModel],
        buffers: Mapping[Lane, Buffers],
        plain: set[str],
    ) -> None:
        """plain: models whose steps cannot be recorded."""
        self.attender = attender
        self._models = models
        self._buffers = buffers
        self._steps: dict[tuple[str, Lane], DecodeSteps] = {}
        self._plain = plain
        self._hooks = [
            product.register_forward_hook(lambda *_: attender.poll())
            for model in models.values()
            for product in _products(model.module)
        ]

    def steps(self, job: Job, lane: Lane) -> DecodeSteps:
        """With a recording of the job's size, where the model can be recorded."""
        known = self._steps.get((job.model, lane))
        if known is None:
            model, poll = self._models[job.model], self.attender.poll
            known = self._steps[job.model, lane] = DecodeSteps(model, lane, self._buffers[lane], poll)
        known.record_late(job.tokens.size, self._plain)
        return known

    def close(self) -> None:
        """Forwards do not poll any more."""
        for hook in self._hooks:
            hook.remove()


def _products(module: nn.Module) -> Iterator[nn.Linear]:
    """Each once; sisters have one together."""
    found = (one.product if isinstance(one, Sister) else one for one in module.modules())
    yield from {id(one): one for one in found if isinstance(one, nn.Linear)}.values()
