"""Each engine's share of the machine: its devices, its pool and its cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvloom.config.fields import Auto
from kvloom.config.machine import Machine
from kvloom.config.units import CPU, CUDA, ConfiguredEngine, Device
from kvloom.types.numbers import show_count, show_size
from kvloom.types.spec import gpu_index


def check_nodes(engines: Sequence[ConfiguredEngine], machine: Machine) -> None:
    """Raises ValueError if a unit is to be on a node that there is not."""
    for engine in engines:
        node = engine.unit.node
        if node is None or node in (machine.nodes or (machine.name,)):
            continue
        if machine.nodes:
            raise ValueError(
                f"{engine.key}.node: {node!r} is no node of the cluster; {', '.join(machine.nodes)} are right"
            )
        raise ValueError(
            f"{engine.key}.node: {node!r}, and this machine is {machine.name!r}; without --cluster "
            "units are served on this machine alone"
        )


def check_gateways(nodes: Sequence[str] | None, port: int, machine: Machine) -> None:
    """Raises ValueError if the fleet cannot have its gateways on these nodes, each at this port. nodes: None
    if none are named."""
    if machine.nodes and port == 0:
        raise ValueError("port: 0 with --cluster; a number is right, which each node with a gateway has free")
    for node, count in Counter(nodes or ()).items():
        if not machine.nodes:
            raise ValueError(
                "gateways: without --cluster there is one, on this machine; without this key it is right"
            )
        if node not in machine.nodes:
            raise ValueError(
                f"gateways: {node!r} is no node of the cluster; {', '.join(machine.nodes)} are right"
            )
        if count > 1:
            raise ValueError(f"gateways: {node} stands there twice; once is right, as a node has one gateway")


def check_ranks(engines: Sequence[ConfiguredEngine], cores: Sequence[int]) -> None:
    """Raises ValueError if an engine has fewer cores than ranks."""
    for engine, own in zip(engines, cores, strict=True):
        ranks, key = engine.unit.tensor_parallel, f"{engine.key}.tensor_parallel"
        if ranks > own:
            raise ValueError(
                f"{key}: {ranks} ranks, but {engine.name} has {show_count(own, 'core')}; "
                f"{f'1 to {own}' if own > 1 else '1'} is right"
            )


def share_devices(engines: Sequence[ConfiguredEngine], fleets: Device, machine: Machine) -> list[str]:
    """Returns `cpu` or `cuda:N` for each engine; GPUs go round. In an engine with ranks the first one has GPU
    N, and the others have the GPUs after it. Raises ValueError if there are fewer GPUs than ranks."""
    found: list[str] = []
    free, count = 0, max(1, machine.gpus)
    for engine in engines:
        ranks, wanted = engine.unit.tensor_parallel, engine.unit.device or fleets
        if wanted == CPU or (wanted == "auto" and not machine.gpus):
            found.append(CPU)
            continue
        if ":" in wanted:
            number = gpu_index(wanted)
            if number + ranks > machine.gpus:
                last = "" if ranks == 1 else f" to cuda:{number + ranks - 1}"
                there = f"{machine.gpus or 'no'} GPU{'' if machine.gpus == 1 else 's'}"
                raise ValueError(
                    f"{engine.key}.device: there is no {wanted}{last} here, but {there}; a machine that has "
                    "it, or `device: cpu`, is right"
                )
            found.append(wanted)
            continue
        if ranks > max(1, machine.gpus):
            raise ValueError(
                f"{engine.key}.tensor_parallel: {ranks} ranks for the {machine.gpus} GPUs here; "
                "one GPU for each, or `device: cpu`, is right"
            )
        first = free if free + ranks <= count else 0
        found.append(f"{CUDA}:{first}")
        free = (first + ranks) % count
    return found


def _gpus(engine: ConfiguredEngine, device: str) -> set[int]:
    """Returns the GPUs of all its ranks."""
    if device == CPU:
        return set()
    first = gpu_index(device)
    return set(range(first, first + engine.unit.tensor_parallel))


def share_pools(
    engines: Sequence[ConfiguredEngine],
    devices: Sequence[str],
    total: int | Auto,
    block: int,
    machine: Machine,
    key: str = "kv_memory",
) -> list[int]:
    """Returns the bytes of each engine's pool, by `share_memory`. If `total` is open, a GPU's pool has its
    own size, or 0 for what the weights leave. key: of `total` in the config. Raises ValueError."""
    pairs = list(zip(engines, devices, strict=True))
    hosted = [engine for engine, device in pairs if device == CPU or total != "auto"]
    pools = iter(share_memory(hosted, total, block, machine, key) if hosted else [])
    found: list[int] = []
    for engine, device in pairs:
        own = engine.unit.pool
        if device == CPU or total != "auto":
            found.append(next(pools))
        elif own != "auto" and own < block:
            raise ValueError(
                f"{engine.key}.kv_memory: {show_size(own)} is less than one block; "
                f"at least {show_size(block)} is right"
            )
        elif own == "auto" and sum(bool(_gpus(*pair) & _gpus(engine, device)) for pair in pairs) > 1:
            raise ValueError(
                f"{engine.key}.kv_memory: several engines on {device} cannot each have what is left; "
                "a size for each is right"
            )
        else:
            found.append(0 if own == "auto" else own)
    return found


def share_memory(
    engines: Sequence[ConfiguredEngine], total: int | Auto, block: int, machine: Machine, key: str
) -> list[int]:
    """Returns the bytes of each engine's pool: its own size, or an equal share of what the others leave of
    `total`. If `total` is open, the share is one that any node of a cluster has. Raises ValueError."""
    fixed = [engine.unit.pool for engine in engines if engine.unit.pool != "auto"]
    most, whose = (machine.memory, "available here") if total == "auto" else (total, f"of `{key}`")
    if sum(fixed) > most:
        raise ValueError(
            f"units: {show_size(sum(fixed))} of {key} for all engines is more than the "
            f"{show_size(most)} {whose}; less is right"
        )
    left = (most - sum(fixed)) // 3 if total == "auto" else most - sum(fixed)
    takers = len(engines) - len(fixed)
    share = left // takers if takers else 0
    if total == "auto":
        share = max(share if machine.least is None else min(share, machine.least.memory // 3), block)
    for engine in engines:
        own = engine.unit.pool
        got, where = (share, key) if own == "auto" else (own, f"{engine.key}.{key}")
        if got < block:
            what = f"{show_size(got)} for {engine.name}" if takers > 1 or fixed else show_size(got)
            raise ValueError(f"{where}: {what} is less than one block; at least {show_size(block)} is right")
    return [share if engine.unit.pool == "auto" else engine.unit.pool for engine in engines]


def share_threads(engines: Sequence[ConfiguredEngine], total: int | Auto, machine: Machine) -> list[int]:
    """Returns the cores of each engine: its own number, or an equal share of what the others leave of
    `total`, and one at least, but no more than any node of a cluster has. Raises ValueError."""
    cores, bound = (machine.auto_cores, machine.cores) if total == "auto" else (total, total)
    fixed = [engine.unit.threads for engine in engines if engine.unit.threads != "auto"]
    if sum(fixed) > bound and max(fixed) > 1:
        whose = "cores here" if total == "auto" else "of `threads`"
        raise ValueError(
            f"units: {sum(fixed)} threads for all engines are more than the {bound} {whose}; less is right"
        )
    takers = len(engines) - len(fixed)
    left = max(0, cores - sum(fixed))
    most = cores if machine.least is None else machine.least.auto_cores
    shares = iter([max(1, min(most, left // takers + (i < left % takers))) for i in range(takers)])
    return [next(shares) if engine.unit.threads == "auto" else engine.unit.threads for engine in engines]
