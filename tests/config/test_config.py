"""Every error names its key, says what would be right and is one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvloom.config.config import DEMO
from kvloom.config.fields import parse_seconds, parse_size
from kvloom.config.file import load_config, model_named
from kvloom.config.machine import Machine
from kvloom.plan.cost.shapes import read_shape
from kvloom.plan.plan import PROCESS_BYTES, host_bytes
from kvloom.types.errors import ConfigError
from kvloom.types.request import Level
from kvloom.types.spec import DEFAULT_POLICY, ProgramSpec, SchedulerSpec, Slo
from tests.config.configs import AB, MACHINE, load, refused

GIB = 1 << 30


M = "models: {a: ./model}\n"
S = "models: {a: {path: ./model, slo: "


def test_one_budget_for_weights_and_pool(folder: Path) -> None:
    (whole,) = load(folder, M + f"memory: 1GiB\nsleep_dir: {folder}").engines
    assert (whole.kv_bytes, whole.sleep_dir) == (GIB, str(folder))
    assert load(folder, M + "kv_memory: 1GiB").engines[0].sleep_dir == ""
    own, other = load(folder, AB + "units: [{models: [a], memory: 1GiB}, {models: [b]}]").engines
    assert (own.kv_bytes, own.sleep_dir, other.sleep_dir) == (GIB, "/var/tmp", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory: auto", "memory: 'auto'; a size for weights and pool together, as `8GiB`, is right"),
        ("memory: 9GiB", "memory: 9 GiB is more than the 3 GiB available here"),
        ("memory: 1GiB\nkv_memory: 1GiB", "memory: it is for weights and pool together"),
        ("units: [{models: [a], memory: 1GiB, kv_memory: 1GiB}]", "units.0.memory: it is for weights and"),
        ("memory: 1GiB\nunits: [{models: [a], tensor_parallel: 2}]", "memory: unit-0 has 2 ranks on cpu"),
        ("memory: 1GiB\nsleep_dir: /nowhere/at/all", "sleep_dir: /nowhere/at/all; a folder in which this"),
        ("memory: 1KiB", "memory: 1 KiB is less than one block; at least 16 KiB is right"),
    ],
)
def test_budgets_that_cannot_be(folder: Path, text: str, said: str) -> None:
    assert said in refused(folder, M + text)


def test_levels_of_priority_reach_every_engine(folder: Path) -> None:
    assert load(folder, M).engines[0].priorities == ()
    config = load(folder, M + "priorities: {-1: 4000, -10: 12000}\nunits: [{models: [a], replicas: 2}]")
    assert [engine.priorities for engine in config.engines] == [(Level(-10, 12000), Level(-1, 4000))] * 2


def test_rescheduling(folder: Path) -> None:
    """Of itself where a model is on two units."""
    two = "units: [{models: [a], replicas: 2}]\n"
    assert load(folder, M).scheduler is None
    assert load(folder, AB + "units: [{models: [a]}, {models: [b]}]").scheduler is None
    assert load(folder, AB + "units: [{models: [a]}, {models: [a, b]}]").scheduler == SchedulerSpec()
    assert load(folder, M + two).scheduler == SchedulerSpec(0.5, 24.0, 48.0)
    assert load(folder, M + two + "rescheduling: {period: 100ms, out: -5}").scheduler == SchedulerSpec(
        0.1, -5
    )
    ranks = two.replace("replicas", "tensor_parallel: 2, replicas")
    assert load(folder, M + ranks).scheduler == SchedulerSpec()
    for off in ("none", "null", ""):
        assert load(folder, M + two + f"rescheduling: {off}").scheduler is None


def test_keys_with_priorities(folder: Path) -> None:
    file = folder / "keys.txt"
    file.write_text("alpha  priority=-10\n# ours\nbeta\ngamma\tpriority=5\n")
    config = load(folder, M + "api_key_file: keys.txt")
    assert config.api_keys() == {"alpha": -10, "beta": None, "gamma": 5}


def test_defaults_and_short_form(folder: Path) -> None:
    config = load(folder, "models: {a: ./model}")
    assert (config.host, config.port, config.policy) == ("127.0.0.1", 8000, DEFAULT_POLICY)
    (engine,) = config.engines
    assert (engine.unit, engine.kv_bytes, engine.threads, engine.block_bytes) == ("unit-0", GIB, 4, 16384)
    assert (engine.transport, engine.transport_host, engine.lease) == ("shm", "127.0.0.1", 30.0)
    assert config.program == ProgramSpec("data_parallel")
    assert config.models["a"].path == str(folder / "model")
    (folder / "model.gguf").touch()  # what is in it is for the loader to tell
    assert load(folder, "models: {a: model.gguf}").models["a"].path == str(folder / "model.gguf")
    assert not config.api_keys()
    assert not config.admin_keys()
    assert (config.drain, config.patience, config.load_timeout) == (60.0, 120.0, 1800.0)
    assert config.watchdog == 30.0
    assert (config.cache_dir, engine.cache_dir, engine.cache_size) == (None, None, 0)


def test_objectives_of_models(folder: Path) -> None:
    text = "models: {a: ./model, b: {path: ./model, slo: {ttft: 5s, tpot: 80ms}}, "
    config = load(folder, text + "c: {path: ./model, slo: {tpot: 1}}}\n")
    assert [model.slo for model in config.engines[0].models] == [Slo(2.0, 0.2), Slo(5.0, 0.08), Slo(2.0, 1.0)]


def test_all_keys(folder: Path) -> None:
    config = load(
        folder,
        "host: 0.0.0.0\nport: 0\nkv_memory: 0.5GiB\nblock_bytes: 4096\npolicy: round-robin\nmax_running: 8\n"
        "max_waiting: 9\nchunk_tokens: 64\nthreads: 2\napi_key_file: keys.txt\nmax_body: 1MB\n"
        "max_connections: 7\nwatchdog: 6s\n"
        "admin_key_file: admins.txt\ndrain: 2s\npatience: 3s\ntransport: nixl\nlease: 1.5min\n"
        "program: {name: balanced, ratio: 0.2}\n"
        "load_timeout: 2h\n"
        f"models:\n  a: {{path: model, dtype: bfloat16, kv_dtype: int8, rate: 3, max_context: 512, "
        f"sha256: {'Ab' * 32}}}\n"
        "  b: {path: org/name, revision: refs/pr/3}\n",
    )
    assert config.api_keys() == {"alpha": None, "beta": None}
    assert config.admin_keys() == {"gamma"}
    assert (config.drain, config.patience, config.load_timeout, config.watchdog) == (2.0, 3.0, 7200.0, 6.0)
    assert (config.max_body, config.max_connections) == (1_000_000, 7)
    assert config.program == ProgramSpec("balanced", {"ratio": 0.2})
    (spec,) = config.engines
    assert (spec.transport, spec.lease) == ("nixl", 90.0)
    assert (spec.kv_bytes, spec.block_bytes, spec.policy, spec.threads) == (GIB // 2, 4096, "round-robin", 2)
    first, second = spec.models
    assert (first.name, first.dtype, first.rate, first.max_context) == ("a", "bfloat16", 3.0, 512)
    assert (first.revision, first.sha256, first.kv_dtype) == (None, "ab" * 32, "int8")
    assert (second.name, second.path, second.kv_dtype) == ("b", "org/name", "auto")
    assert (second.revision, second.sha256) == ("refs/pr/3", None)


def test_the_folder_of_kept_prefixes(folder: Path) -> None:
    """It need not be there yet."""
    (engine,) = load(folder, M + "cache_dir: new/cache").engines
    assert (engine.cache_dir, engine.cache_size) == (str(folder / "new" / "cache"), 10 << 30)
    (engine,) = load(folder, M + f"cache_dir: {folder}\ncache_size: 2GB").engines
    assert (engine.cache_dir, engine.cache_size) == (str(folder), 2_000_000_000)


def test_flags_win(folder: Path) -> None:
    config = load(
        folder, "port: 1\nmodels: {a: ./model}", {"port": 2, "kv_memory": "1MiB"}, a="org/x", b="org/y"
    )
    assert (config.port, config.kv_memory) == (2, 1 << 20)
    assert {name: model.path for name, model in config.models.items()} == {"a": "org/x", "b": "org/y"}


def test_frozen(folder: Path) -> None:
    with pytest.raises(ValidationError):
        load(folder, "models: {a: ./model}").port = 1


def test_units(folder: Path) -> None:
    """What units do not say, the fleet does; the machine has 4 cores and 3 GiB."""
    config = load(
        folder,
        AB + "policy: fcfs\nkv_memory: 1GiB\nprogram: my.own:route\nunits:\n"
        "- {models: [a, b], replicas: 2}\n- {models: [b], kv_memory: 256MiB, threads: 1, policy: adbs}\n",
    )
    assert [(e.unit, [m.name for m in e.models], e.policy) for e in config.engines] == [
        ("unit-0", ["a", "b"], "fcfs"),
        ("unit-1", ["a", "b"], "fcfs"),
        ("unit-2", ["b"], "adbs"),
    ]
    assert [e.kv_bytes >> 20 for e in config.engines] == [384, 384, 256]
    assert [e.threads for e in config.engines] == [2, 1, 1]
    assert config.program == ProgramSpec("my.own:route")
    assert config.folder == folder


@pytest.mark.parametrize(
    ("text", "memory", "threads"),
    [
        ("[{models: [a], replicas: 2}]", [512, 512], [2, 2]),
        ("[{models: [a], kv_memory: 1536MiB}, {models: [a]}]", [1536, 512], [2, 2]),
        ("[{models: [a], threads: 3}, {models: [a]}]", [512, 512], [3, 1]),
        ("[{models: [a], threads: 4}, {models: [a]}]", [512, 512], [4, 1]),
        ("[{models: [a], threads: 1, replicas: 6}]", [170] * 6, [1] * 6),
        ("[{models: [a], replicas: 6}]", [170] * 6, [1] * 6),
    ],
)
def test_auto_is_shared_out(folder: Path, text: str, memory: list[int], threads: list[int]) -> None:
    engines = load(folder, f"{M}units: {text}").engines
    assert [engine.kv_bytes >> 20 for engine in engines] == memory
    assert [engine.threads for engine in engines] == threads


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("units: []", "units: []; at least one is right"),
        ("units:", "units: nothing; a list is right"),
        ("units: a", "units: 'a'; a list is right"),
        ("units: [a]", "units.0: 'a'; a mapping with `models` is right"),
        ("units: [{}]", "units.0.models: is missing; a list of models' names is needed"),
        ("units: [{models: a}]", "units.0.models: 'a'; a list is right"),
        ("units: [{models: []}]", "units.0.models: []; at least one is right"),
        ("units: [{models: [1]}]", "units.0.models.0: 1; a text is right"),
        ("units: [{modls: [a], models: [b]}]", "units.0.modls: unknown key; did you mean `models`?"),
        ("units: [{models: [a, aa, b]}]", "units.0.models: no model 'aa'; did you mean `a`?"),
        ("units: [{models: [a, b]}, {models: [zz]}]", "units.1.models: no model 'zz'; known are a, b"),
        (
            "units: [{models: [a, b, a]}]",
            "units.0.models: a model stands there twice; `replicas` makes more of a unit",
        ),
        ("units: [{models: [a]}]", "units: 'b' is on none of them; each model needs at least one"),
        ("units: [{models: [a, b], replicas: 0}]", "units.0.replicas: 0; 1 or more is right"),
        ("units: [{models: [a, b], replicas: 65}]", "units.0.replicas: 65; 64 or less is right"),
        ("units: [{models: [a, b], replicas: yes}]", "units.0.replicas: 'true'; a number is right"),
        (
            "units: [{models: [a, b], replicas: 60}, {models: [a], replicas: 5}]",
            "units: 65 engines; 64 or less is right",
        ),
        (
            "units: [{models: [a, b], policy: lifo}]",
            "units.0.policy: 'lifo'; "
            "'adbs', 'fcfs', 'round-robin', 'partitioned', 'slack', 'vllm-2023' or 'adbs-2024' is right",
        ),
        (
            "units: [{models: [a, b], kv_memory: 4TiB}]",
            "units.0.kv_memory: 4 TiB is more than the 3 GiB available here; less, or `auto`, is right",
        ),
        (
            "units: [{models: [a, b], kv_memory: 2GiB, replicas: 2}]",
            "units: 4 GiB of kv_memory for all engines is more than the 3 GiB available here; less is right",
        ),
        (
            "kv_memory: 1GiB\nunits: [{models: [a, b], kv_memory: 2GiB}]",
            "units: 2 GiB of kv_memory for all engines is more than the 1 GiB of `kv_memory`; less is right",
        ),
        (
            "kv_memory: 1GiB\nunits: [{models: [a], kv_memory: 1GiB}, {models: [b]}]",
            "kv_memory: 0 bytes for unit-1 is less than one block; at least 16 KiB is right",
        ),
        (
            "units: [{models: [a, b], kv_memory: 1KiB}]",
            "units.0.kv_memory: 1 KiB for unit-0 is less than one block; at least 16 KiB is right",
        ),
        (
            "units: [{models: [a, b], threads: 5}]",
            "units.0.threads: 5 of 4 cores; 1 to 4, or `auto`, is right",
        ),
        (
            "units: [{models: [a, b], threads: 3, replicas: 2}]",
            "units: 6 threads for all engines are more than the 4 cores here; less is right",
        ),
        (
            "units: [{models: [a, b], tensor_parallel: 0}]",
            "units.0.tensor_parallel: 0; 1 or more is right",
        ),
        (
            "units: [{models: [a, b], tensor_parallel: 8}]",
            "units.0.tensor_parallel: 8 ranks, but unit-0 has 4 cores; 1 to 4 is right",
        ),
        (
            "units: [{models: [a], threads: 3}, {models: [b], tensor_parallel: 2}]",
            "units.1.tensor_parallel: 2 ranks, but unit-1 has 1 core; 1 is right",
        ),
        (
            "threads: 2\nunits: [{models: [a, b], threads: 3}]",
            "units: 3 threads for all engines are more than the 2 of `threads`; less is right",
        ),
    ],
)
def test_what_units_cannot_be(folder: Path, text: str, message: str) -> None:
    assert refused(folder, AB + text) == f"{folder / 'fleet.yaml'}: {message}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (M + "prot: 8000", ["fleet.yaml", "prot", "did you mean `port`?"]),
        (M + "zzzzzz: 8000", ["zzzzzz", "known are host"]),
        (
            "modles: {a: model}",
            ["fleet.yaml: modles: unknown key; did you mean `models`? (and 1 more error)"],
        ),
        (M + "port: eighty", ["port", "'eighty'", "whole number"]),
        (M + "port: 70000", ["port", "70000", "65535"]),
        (M + "port: yes", ["port", "true", "number"]),
        (M + "port:", ["port", "nothing"]),
        (M + "host: ''", ["host"]),
        (M + "kv_memory: lots", ["kv_memory", "lots", "512MiB"]),
        (M + "kv_memory: [1]", ["kv_memory", "[1]"]),
        (M + "kv_memory: 100", ["kv_memory", "less than one block", "16 KiB"]),
        (M + "kv_memory: 4TiB", ["kv_memory", "4 TiB", "3 GiB available"]),
        (M + "block_bytes: 1000", ["block_bytes", "power of two"]),
        (M + "block_bytes: 32", ["block_bytes", "power of two"]),
        (
            M + "policy: lifo",
            ["policy", "'lifo'", "'adbs', 'fcfs', 'round-robin'", "'vllm-2023' or 'adbs-2024'"],
        ),
        (S + "2s}}", ["models.a.slo: '2s'", "a mapping with `ttft` or `tpot` is right"]),
        (S + "{ttft: 0}}}", ["models.a.slo.ttft: 0 s; 0.001 s to 3600 s is right"]),
        (S + "{tpot: -1s}}}", ["models.a.slo.tpot: '-1s' is no time"]),
        (S + "{tpot: yes}}}", ["models.a.slo.tpot: 'True' is no time"]),
        (S + "{tpop: 1s}}}", ["models.a.slo.tpop: unknown key; did you mean `tpot`?"]),
        (S + "}}", ["models.a.slo: nothing; a mapping with `ttft` or `tpot` is right"]),
        (M + "max_running: 0", ["max_running", "0", "1 or more"]),
        (M + "chunk_tokens: 1.5", ["chunk_tokens", "whole number"]),
        (M + "threads: 9", ["threads", "9 of 4 cores", "`auto`"]),
        (M + "threads: 0", ["threads", "0 of 4 cores"]),
        (M + "threads: few", ["threads", "few of 4 cores"]),
        (M + "transport: udp", ["transport", "'udp'", "'shm', 'nixl' or 'tcp'"]),
        (M + "transport_host: 0.0.0.0", ["transport_host", "'0.0.0.0'", "at which peers reach this host"]),
        (M + "transport_host: here", ["transport_host", "'here'", "IP address"]),
        (M + "lease: soon", ["lease", "'soon'", "`30s`"]),
        (M + "lease: 0", ["lease", "0 s", "1 s to 3600 s"]),
        (M + "rescheduling: on", ["rescheduling: True", "`period`, `out` or `into`, or `none`"]),
        (M + "rescheduling: {periods: 1}", ["rescheduling.periods", "did you mean `period`?"]),
        (M + "rescheduling: {period: 0}", ["rescheduling.period: 0 s", "0.05 s to 60 s"]),
        (M + "rescheduling: {period: soon}", ["rescheduling.period", "'soon' is no time"]),
        (M + "rescheduling: {out: many}", ["rescheduling.out: 'many'", "a number is right"]),
        (M + "rescheduling: {into: .inf}", ["rescheduling.into: inf", "1000000000.0 or less is right"]),
        (M + "rescheduling: {out: 50}", ["rescheduling: out 50 is above into 48", "out ≤ into"]),
        (M + "priorities: 5", ["priorities", "5", "mapping of priorities"]),
        (M + "priorities: {high: 5}", ["priorities", "'high'", "whole number"]),
        (M + "priorities: {yes: 5}", ["priorities", "True is no priority"]),
        (M + "priorities: {-1: 0}", ["priorities", "-1: 0", "at least 1"]),
        (M + "priorities: {-1: 1.5}", ["priorities", "-1: 1.5", "at least 1"]),
        (M + f"priorities: {dict.fromkeys(range(17), 5)}", ["priorities", "17 levels", "16 at most"]),
        (M + "program: 7", ["program", "7", "a program's name"]),
        (M + "program: nope", ["program: 'nope' is not known; data_parallel, ", "`my_module:my_program`"]),
        (M + "program: {ratio: 1}", ["program", "`name`"]),
        (M + "program: {name: [a]}", ["program", "['a']", "module:function"]),
        (M + "program: 'a b'", ["program", "'a b'", "module:function"]),
        (M + "program: {name: balanced, 2: 1}", ["program", "2 is no option's name"]),
        (M + "program: {name: balanced, ratio: {}}", ["program", "ratio: {}", "a number"]),
        (M + "max_body: 1TiB", ["max_body"]),
        (M + "cache_dir: keys.txt", ["cache_dir", "keys.txt", "a folder, or a place for one"]),
        (M + "cache_dir: keys.txt/cache", ["cache_dir", "a folder, or a place for one"]),
        (M + "cache_dir: cache\ncache_size: 4KiB", ["cache_size"]),
        (M + "cache_dir: cache\ncache_size: much", ["cache_size", "no size"]),
        (M + "cache_size: 2GiB", ["cache_size: there is no cache_dir; a folder for it"]),
        (M + "max_connections: 0", ["max_connections", "0"]),
        (M + "admin_key_file: none.txt", ["admin_key_file", "none.txt", "one key a line"]),
        (M + "drain: 0s", ["drain", "1 s to 3600 s"]),
        (M + "load_timeout: 25h", ["load_timeout", "90000 s", "1 s to 86400 s"]),
        (M + "watchdog: 2s", ["watchdog", "2 s", "3 s to 3600 s"]),
        (M + "patience: 2h", ["patience", "7200 s", "1 s to 3600 s"]),
        (M + "api_key_file: none.txt", ["api_key_file", "none.txt", "one key a line"]),
        (M + "api_key_file: model", ["api_key_file", "model"]),
        ("port: 1", ["models", "is missing"]),
        ("models: {}", ["models", "at least one"]),
        ("models: [a, b]", ["models", "mapping"]),
        ("models: {a: 7}", ["models.a", "7"]),
        ("models: {a: {}}", ["models.a.path", "missing"]),
        ("models: {a: {path: model, dtyp: auto}}", ["models.a.dtyp", "did you mean `dtype`?"]),
        ("models: {a: {path: model, dtype: int3}}", ["models.a.dtype", "'int3'", "bfloat16"]),
        (
            "models: {a: {path: model, kv_dtype: int4}}",
            ["models.a.kv_dtype", "'int4'", "'int8' or 'float8_e4m3fn'"],
        ),
        ("models: {a: {path: model, kv_dtype: float16}}", ["models.a.kv_dtype", "'float16'", "'auto', "]),
        ("models: {a: {path: model, kv_dtype: 8}}", ["models.a.kv_dtype", "8", "'int8'"]),
        ("models: {a: {path: model, rate: 0}}", ["models.a.rate", "more than 0"]),
        ("models: {a: {path: model, rate: .nan}}", ["models.a.rate"]),
        ("models: {a: {path: org/name, revision: ../x}}", ["models.a.revision: '../x'", "a commit, a tag"]),
        ("models: {a: {path: org/name, revision: 'a b'}}", ["models.a.revision: 'a b'", "a commit, a tag"]),
        ("models: {a: {path: org/name, revision: 7}}", ["models.a.revision: 7", "a commit, a tag"]),
        (
            "models: {a: {path: model, revision: main}}",
            ["models.a.revision: 'main'", "a folder, which has no"],
        ),
        ("models: {a: {path: org/name, sha256: abc}}", ["models.a.sha256: 'abc'", "64 hexadecimal digits"]),
        ("models: {a: {path: org/name, sha256: 12}}", ["models.a.sha256: 12", "64 hexadecimal digits"]),
        ("models: {a: ./missing}", ["models.a.path", "missing", "does not exist", "org/name"]),
        ("models: {a: gpt2}", ["models.a.path", "does not exist", "org/name"]),
        ("models: {a: keys.txt}", ["models.a.path", "is a file"]),
        ("models: {a: org/none.gguf}", ["models.a.path", "org/none.gguf does not exist", "a file *.gguf"]),
        ("models: {a: empty}", ["models.a.path", "no config.json"]),
        ("models: {a: ''}", ["models.a.path", "no path"]),
        ("models: {'a b': model}", ["models", "'a b'", "letters"]),
        ("models: {1: model}", ["models"]),
        ("models: {a: model, a: other}", ["line 1", "`a` is set twice"]),
        (M + "port: [", ["fleet.yaml", "line 2"]),
        ("port: 1\n\tx: 2", ["line 2"]),
        ("", ["mapping"]),
        ("- a", ["mapping"]),
        ("1: 2", ["mapping"]),
        ("a: 2026-99-99", ["fleet.yaml"]),
        ("\x01", ["fleet.yaml"]),
    ],
)
def test_one_line_that_says_what_would_be_right(folder: Path, text: str, parts: list[str]) -> None:
    message = refused(folder, text)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n# none yet\n", "holds no key"),
        (b"\xff\xfe", "UTF-8"),
        (b"alpha beta", "the key a… has more behind it; nothing, or `priority=-1`, is right"),
        (b"alpha priority=high", "has more behind it"),
        (b"alpha priority=-9999999999", "has more behind it"),
        (b"alpha\nalpha priority=1", "the key a… stands there twice"),
    ],
)
def test_a_key_file_that_cannot_be_read(folder: Path, content: bytes, said: str) -> None:
    (folder / "keys.txt").write_bytes(content)
    assert said in refused(folder, M + "api_key_file: keys.txt")


def test_a_flag_is_named_as_one(folder: Path) -> None:
    assert refused(folder, M, {"kv_memory": "x"}).startswith("--kv-memory: ")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml", {}, {}, MACHINE)


def test_the_demo_fleet_without_anything() -> None:
    config = load_config(None, {"port": 5}, {}, MACHINE)
    assert (config.port, config.block_bytes, config.kv_memory) == (5, 4096, 64 << 20)
    assert all(Path(model.path).parent == DEMO.resolve() for model in config.models.values())


def test_auto_is_never_less_than_a_block(folder: Path) -> None:
    config = load(folder, M, machine=dataclasses.replace(MACHINE, memory=10))
    assert config.engines[0].kv_bytes == config.block_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 << 29),
        ("7", 7),
        (7, 7),
        ("1k", 1000),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1 apple", "-1", "1e9", "1XiB", True, "9" * 50])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("2 min", 120), ("200ms", 0.2), (1.5, 1.5), ("1h", 3600)]
)
def test_seconds(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "1 day", "-1", True, "nan", "9" * 50])
def test_no_seconds(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        parse_seconds(text)


CLUSTER = dataclasses.replace(MACHINE, nodes=("10.0.0.1", "10.0.0.2"))


def test_nodes_with_a_gateway(folder: Path) -> None:
    assert load(folder, M + "gateways: [10.0.0.2]", machine=CLUSTER).gateways == ("10.0.0.2",)
    assert load(folder, M, machine=CLUSTER).gateways is None


@pytest.mark.parametrize(
    ("said", "machine", "problem"),
    [
        ("gateways: [10.0.0.1]", MACHINE, "gateways: without --cluster there is one, on this machine"),
        (
            "gateways: [10.0.0.9]",
            CLUSTER,
            "'10.0.0.9' is no node of the cluster; 10.0.0.1, 10.0.0.2 ",
        ),
        ("gateways: [10.0.0.1, 10.0.0.1]", CLUSTER, "gateways: 10.0.0.1 stands there twice; once is right"),
        ("gateways: []", CLUSTER, "gateways: []; at least one is right"),
        ("gateways: 10.0.0.1", CLUSTER, "gateways: '10.0.0.1'; a list is right"),
        ("port: 0", CLUSTER, "port: 0 with --cluster; a number is right"),
    ],
)
def test_gateways_that_there_cannot_be(folder: Path, said: str, machine: Machine, problem: str) -> None:
    assert problem in refused(folder, M + said, machine=machine)


def test_a_unit_says_what_its_models_and_its_process_take_besides_the_pool(folder: Path) -> None:
    """By the checkpoint's shape, in the format in which it is served; a hub id is not known yet."""
    checkpoint = DEMO / "sums"
    text = f"models: {{a: {checkpoint}, b: {{path: {checkpoint}, dtype: bfloat16}}, c: some/where}}"
    [engine] = load(folder, text).engines
    wide, half, unknown = (model.memory for model in engine.models)
    assert wide == host_bytes(read_shape(checkpoint, 4))
    assert half == host_bytes(read_shape(checkpoint, 2)) < wide
    assert unknown == 0
    assert engine.memory == PROCESS_BYTES


def test_what_is_open_is_no_more_than_any_node_of_a_cluster_has(folder: Path) -> None:
    nodes = [Machine(cores=2, memory=3 << 30, name="a"), Machine(cores=6, memory=9 << 30, name="b")]
    [engine] = load(folder, "models: {a: ./model}", machine=Machine.together(nodes)).engines
    assert (engine.threads, engine.kv_bytes) == (2, 1 << 30)


def test_a_model_may_stand_in_a_config_s_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    assert model_named(Path("model")) == {"model": str(folder / "model")}
    assert model_named(folder / "model" / ".") == {"model": str(folder / "model")}
    assert model_named(Path("tiny-q4_0.gguf")) == {"tiny-q4_0": str(folder / "tiny-q4_0.gguf")}
    assert model_named(Path("Qwen/Qwen3-0.6B")) == {"Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B"}
    (tmp_path / "fleet").write_text(M)
    for config in ("fleet.yaml", "of/mine.yml", "deep/in/it", "/fleet", "plan.json", str(tmp_path / "fleet")):
        assert model_named(Path(config)) == {}
