"""What an engine runs on: resolved once, refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvloom.config.machine import Machine, cpu_quota
from tests.config.configs import AB, MACHINE, load, refused

TWO = Machine(cores=4, memory=3 << 30, gpus=2)
FIVE = Machine(cores=16, memory=3 << 30, gpus=5)
UNITS = AB + "units:\n  - {models: [a]}\n  - {models: [b], replicas: 2}\n"


def found(folder: Path, text: str, machine: Machine = TWO) -> list[tuple[str, int]]:
    """The device and the pool of each engine."""
    return [(engine.device, engine.kv_bytes) for engine in load(folder, text, machine=machine).engines]


def test_a_cpu_unless_a_gpu_is_asked_for(folder: Path) -> None:
    assert found(folder, AB) == found(folder, AB + "device: cpu") == [("cpu", 1 << 30)]


def test_auto_takes_gpus_where_there_are_any(folder: Path) -> None:
    assert found(folder, AB + "device: auto") == [("cuda:0", 0)]
    assert found(folder, AB + "device: auto", MACHINE) == [("cpu", 1 << 30)]


def test_chunks_of_prompts_are_longer_on_a_gpu(folder: Path) -> None:
    mixed = "units: [{models: [a], device: 'cuda:0'}, {models: [b], device: cpu}]\n"
    for text, wanted in ((mixed, [2048, 512]), (mixed + "chunk_tokens: 64", [64, 64])):
        config = load(folder, AB + text, machine=TWO)
        assert [spec.chunk_tokens for spec in config.engines] == wanted
        assert {spec.vector_tokens for spec in config.engines} == {max(wanted)}


def test_cuda_is_left_to_the_engine_to_find(folder: Path) -> None:
    """It knows why there is none."""
    assert found(folder, AB + "device: cuda", MACHINE) == [("cuda:0", 0)]


def test_a_unit_may_name_its_gpu(folder: Path) -> None:
    """The others go round as if it were not there."""
    text = UNITS.replace("[a]", "[a], device: 'cuda:1', kv_memory: 2GiB, node: big")
    machine = Machine(cores=4, memory=1 << 30, gpus=2, name="big")
    placed = found(folder, text.replace("replicas: 2", "kv_memory: 1GiB") + "device: cuda", machine)
    assert placed == [("cuda:1", 2 << 30), ("cuda:0", 1 << 30)]


def test_gpus_go_round_and_units_may_differ(folder: Path) -> None:
    sized = UNITS.replace("[a]", "[a], device: cpu").replace("replicas: 2", "replicas: 3, kv_memory: 40GiB")
    assert found(folder, sized + "device: cuda") == [
        ("cpu", 1 << 30),
        *((f"cuda:{i}", 40 << 30) for i in (0, 1, 0)),
    ]
    shared = UNITS.replace("replicas: 2", "replicas: 1") + "device: cuda\nkv_memory: 60GiB"
    assert found(folder, shared) == [("cuda:0", 30 << 30), ("cuda:1", 30 << 30)]


def test_ranks_have_gpus_one_after_the_other(folder: Path) -> None:
    """Two units of two, one of one; then they go round."""
    text = AB + (
        "device: cuda\nunits:\n"
        "  - {models: [a, b], replicas: 3, tensor_parallel: 2, threads: 2, kv_memory: 1GiB}\n"
        "  - {models: [a], replicas: 4, threads: 1, kv_memory: 1GiB}\n"
    )
    assert [device for device, _ in found(folder, text, FIVE)] == [f"cuda:{i}" for i in (0, 2, 0, 2, 3, 4, 0)]
    apart = text.replace("replicas: 3", "replicas: 2").replace("replicas: 4", "replicas: 1")
    assert found(folder, apart.replace(", kv_memory: 1GiB", ""), FIVE) == [
        (f"cuda:{i}", 0) for i in (0, 2, 4)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AB + "device: cuda\ntransport: tcp", "transport: tcp carries K and V of CPU units; nixl or shm"),
        (AB + "device: cuda\ncache_dir: cache", "cache_dir: all units are on GPUs"),
        (AB + "device: gpu", "device: .*'auto', 'cpu' or 'cuda'"),
        (
            AB.replace("./other", "{path: ./other, kv_dtype: int8}") + "device: cuda",
            "models.b.kv_dtype: int8, but units.0 is on cuda:0; auto, float32, bfloat16, float8_e4m3fn are",
        ),
        (
            AB.replace("./other", "{path: ./other, kv_dtype: float8_e4m3fn}"),
            "models.b.kv_dtype: float8_e4m3fn, but units.0 is on cpu; auto, float32, bfloat16, int8 are",
        ),
        (
            "models: {a: {path: ./model, kv_dtype: float8_e4m3fn}, b: ./other}\ndevice: cuda\n"
            "kv_memory: 2GiB\nunits: [{models: [a], device: 'cuda:0'}, {models: [b], device: 'cuda:0'}]\n"
            "weave: [{hot: unit-0, cold: unit-1}]",
            "models.a.kv_dtype: float8_e4m3fn, but units.0 is on cuda:0 and weaves, where mailboxes have no",
        ),
        (AB + "device: cuda:1", "device: .*'auto', 'cpu' or 'cuda'"),
        (
            UNITS.replace("[a]", "[a], device: gpu"),
            "units.0.device: 'gpu'; `auto`, `cpu`, `cuda` or a GPU by",
        ),
        (UNITS.replace("[a]", "[a], device: 'cuda:01'"), "units.0.device: 'cuda:01'; `auto`"),
        (
            UNITS.replace("[a]", "[a], device: 'cuda:2'"),
            "units.0.device: there is no cuda:2 here, but 2 GPUs",
        ),
        (
            UNITS.replace("[a]", "[a], device: 'cuda:1', tensor_parallel: 2, threads: 2"),
            "units.0.device: there is no cuda:1 to cuda:2 here, but 2 GPUs; a machine that has it, or",
        ),
        (
            UNITS.replace(
                "[a]",
                "[a], device: cuda, tensor_parallel: 2, threads: 2, kv_memory: 1GiB, "
                "shares: {a: {decode: 0.5}}",
            ),
            "units.0.shares.a.decode: 0.5, but jobs of 2 GPUs take turns; 1, or nothing, is right",
        ),
        (UNITS.replace("[a]", "[a], node: other"), "units.0.node: 'other', and this machine is ''"),
        (UNITS.replace("[a]", "[a], node: ''"), "units.0.node: "),
        (UNITS + "device: cuda", "units.0.kv_memory: several engines on cuda:0 cannot each"),
        (
            UNITS.replace("[a]", "[a], tensor_parallel: 3, device: cuda, threads: 3"),
            "units.0.tensor_parallel: 3 ranks for the 2 GPUs here; one GPU for each, or `device: cpu`, is",
        ),
        (
            UNITS.replace("[a]", "[a], tensor_parallel: 2, threads: 2") + "device: cuda",
            "units.0.kv_memory: several engines on cuda:0 cannot each",
        ),
        (
            UNITS.replace("[a]", "[a], tensor_parallel: 2, device: cuda, threads: 2")
            + "program: disaggregate",
            "units.0.tensor_parallel: 2 ranks on GPUs, whose K and V are neither sent nor received, under "
            "the program disaggregate, which moves them; cache_aware, data_parallel, freest, infaas, "
            "least_loaded are right",
        ),
        (
            UNITS.replace("[a]", "[a], device: cuda, kv_memory: 64"),
            "units.0.kv_memory: 64 bytes is less",
        ),
        (UNITS.replace("[a]", "[a], kv_memory: 4GiB"), "units: 4 GiB of kv_memory for all engines"),
    ],
)
def test_refused_in_one_line(folder: Path, text: str, words: str) -> None:
    assert re.search(words, refused(folder, text, machine=TWO))


def test_memory_of_the_host_does_not_bound_a_gpus(folder: Path) -> None:
    text = AB + "device: cuda\nkv_memory: 40GiB"
    assert "40 GiB is more than the 3 GiB available" in refused(folder, text)
    assert found(folder, text) == [("cuda:0", 40 << 30)]


def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Machine.here().gpus == 0


@pytest.mark.parametrize(
    ("limits", "quota", "threads"),
    [
        ({"a/b": "150000 100000"}, 1.5, 1),
        ({"a/b": "50000 100000"}, 0.5, 1),
        ({"a/b": "max 100000", "a": "300000 100000"}, 3.0, 3),
        ({"a/b": "800000 100000", ".": "6400000 100000"}, 8.0, 4),
        ({"a/b": "max 100000", "other": "100000 100000"}, None, 4),
        ({}, None, 4),
    ],
)
def test_auto_takes_no_more_cores_than_have_time(
    limits: dict[str, str], quota: float | None, threads: int, folder: Path, tmp_path: Path
) -> None:
    """And a number that is asked for is taken all the same."""
    for name, limit in limits.items():
        (tmp_path / "cgroup" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name / "cpu.max").write_text(f"{limit}\n")
    (tmp_path / "own").write_text("0::/a/b\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "own") == quota
    machine = Machine(cores=4, memory=3 << 30, quota=quota)
    both = AB + "units: [{models: [a]}, {models: [b]}]\n"
    [engine] = load(folder, AB, machine=machine).engines
    assert engine.threads == threads
    assert sum(one.threads for one in load(folder, both, machine=machine).engines) == max(2, threads)
    assert [one.threads for one in load(folder, f"{AB}threads: 4\n", machine=machine).engines] == [4]
    assert Machine.here().quota == cpu_quota()


def test_how_units_exchange_k_and_v_is_found_out_where_there_are_several_hosts(folder: Path) -> None:
    one = Machine(cores=4, memory=3 << 30, nodes=("10.0.0.1",))
    several = Machine(cores=4, memory=3 << 30, nodes=("10.0.0.1", "10.0.0.2"))
    for machine, text, transport in (
        (Machine(cores=4, memory=3 << 30), "", "shm"),
        (Machine(cores=4, memory=3 << 30), "transport: auto", "shm"),
        (one, "", "auto"),
        (several, "", "auto"),
        (several, "transport: tcp", "tcp"),
        (several, "transport: nixl", "nixl"),
        (one, "transport: shm", "shm"),
    ):
        config = load(folder, AB + text, machine=machine)
        assert [engine.transport for engine in config.engines] == [transport]
    assert "shm reaches units of one host, and the cluster has 2; auto" in refused(
        folder, AB + "transport: shm", machine=several
    )
