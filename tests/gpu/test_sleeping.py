"""Weights that sleep on the device: mapped by the driver, under a recording that holds their addresses."""

from __future__ import annotations

import torch
from torch import nn

from kvloom.exec.cuda.device import cuda_device, uncut
from kvloom.exec.cuda.granules import GranuleArena, Granules
from kvloom.exec.cuda.operations import triton_operations
from kvloom.exec.cuda.weights import SleepingWeights
from kvloom.kernels.driver import Driver

WIDE = 4096  # 64 MiB a layer: a chunk


class Layer(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        weight = torch.randn(WIDE, WIDE, device=device) / WIDE**0.5
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Model(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(device) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_recording_gives_the_same_after_its_weights_have_slept_and_the_pool_had_their_memory() -> None:
    device = cuda_device(0, uncut, triton_operations())
    device.enter()
    lane = device.partitions.whole
    with torch.inference_mode():
        model, x = Model(device.torch), torch.randn(4, WIDE, device=device.torch)
        told = model(x)
        device.settle()
        granules = Granules(Driver(), device.torch, 16 << 10)
        weights = SleepingWeights(model, granules, device)
        granules.create(weights.granules + 1)
        arena = GranuleArena(granules, weights.granules + 1, 16 << 10)
        blocks = torch.arange(weights.granules * arena.per_granule, dtype=torch.int32).numpy()
        out = torch.empty_like(told)
        recording = None

        def compute() -> None:
            out.copy_(model(x))

        for _ in range(2):
            arena.bytes.fill_(255)
            device.settle()
            arena.discard(blocks)
            assert not weights.read_part()
            weights.follow(lane)  # the rest is still being copied
            with lane.entered():
                if recording is None:
                    compute()
                    recording = lane.record(compute)
                out.zero_()
                recording.replay()
            lane.mark().wait()
            torch.testing.assert_close(out, told)
            while not weights.read_part():
                pass
            weights.let_go()
            arena.restore(blocks)
        assert arena.bytes[-granules.size :].eq(255).all(), "what the pool kept"
    arena.close()
