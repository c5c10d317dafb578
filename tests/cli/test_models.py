"""`kvloom model` and `kvloom config apply` against a real gateway, whose units' processes are modelled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from kvloom.config.config import DEMO
from tests.api.fleet import Administered, administered
from tests.api.scripted import serving
from tests.commands import kvloom
from tests.ggufs import make_gguf

STORIES = DEMO / "stories"
AS_WANTED = "units, models and program are as the config says"
DONE = f"done: {AS_WANTED}"
CONFIG = f"""
kv_memory: 32MiB
block_bytes: 4KiB
models: {{stories: {STORIES}, sums: {DEMO}/sums}}
units: [{{models: [stories]}}, {{models: [stories]}}, {{models: [sums]}}]
"""


@pytest.fixture
def fleet() -> Administered:
    return administered()


@pytest.fixture
def url(fleet: Administered) -> Iterator[str]:
    with serving(fleet.app) as url:
        yield url


def models(fleet: Administered) -> dict[str, list[str]]:
    """What each unit is to serve."""
    return {
        name: [model.name for model in unit.engine.models]
        for name, unit in fleet.kept.units.items()
        if not unit.removed
    }


def test_a_model_is_added_listed_and_removed(fleet: Administered, url: str) -> None:
    done = kvloom("model", "add", "other=stories", "--unit", "unit-1", "--url", url, folder=DEMO)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"other  unit-1 up  {STORIES}\n", "")
    assert models(fleet) == {"unit-0": ["m"], "unit-1": ["m", "other"]}
    listed = kvloom("model", "list", "--url", url)
    assert listed.stdout.splitlines() == [
        "m      unit-0 up, unit-1 up  /m",
        f"other  unit-1 up             {STORIES}",
    ]
    done = kvloom("model", "remove", "other", "--drain", "1.5", "--url", url)
    assert (done.returncode, done.stdout) == (0, "m  unit-0 up, unit-1 up  /m\n")
    assert models(fleet) == {"unit-0": ["m"], "unit-1": ["m"]}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("model", "add", f"m={STORIES}"), 1, "there is a model m already, /m on unit-0"),
        (
            ("model", "add", f"x={STORIES}", "--unit", "unit-7"),
            1,
            "no unit unit-7; the units: unit-0, unit-1",
        ),
        (("model", "add", "x=/no/such"), 2, "x: /no/such does not exist; a checkpoint directory"),
        (("model", "add", f"x={STORIES}/config.json"), 2, "config.json is a file; a checkpoint directory"),
        (("model", "add", "x"), 2, "x: NAME=PATH_OR_HUB_ID is right"),
        (("model", "add", f"a b={STORIES}"), 2, "'a b' is no name; letters, digits"),
        (
            ("model", "remove", "x"),
            1,
            "The model `x` does not exist or you do not have access to it; served: m",
        ),
        (("model", "remove", "m", "--drain", "-1"), 2, "--drain: '-1'; seconds from 0 to 3600 are right"),
        (("config", "apply", "/no/such.yaml"), 2, "/no/such.yaml: No such file or directory"),
    ],
)
def test_an_order_that_cannot_be_is_told_in_one_line(
    fleet: Administered, url: str, words: tuple[str, ...], code: int, said: str
) -> None:
    done = kvloom(*words, "--url", url)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not fleet.done


def test_a_unit_that_cannot_start_with_the_model_serves_what_it_served(fleet: Administered, url: str) -> None:
    fleet.problems["unit-1"] = "ended with exit code 3"
    done = kvloom("model", "add", f"x={STORIES}", "--unit", "unit-1", "--url", url)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "unit-1 ended with exit code 3 as it started" in done.stderr
    assert models(fleet) == {"unit-0": ["m"], "unit-1": ["m"]}


def test_a_config_is_shown_and_then_applied(fleet: Administered, url: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG)
    shown = kvloom("config", "apply", str(file), "--url", url)
    lines = shown.stdout.splitlines()
    assert shown.returncode == 0
    assert [line.partition(":")[0] for line in lines[:2]] == ["unit-0 starts anew", "unit-1 starts anew"]
    assert lines[2] == "unit-2 is added, with sums"
    assert lines[3:] == ["nothing is changed yet; --yes does it"]
    assert not fleet.done

    done = kvloom("config", "apply", str(file), "--yes", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [*lines[:3], DONE]
    assert models(fleet) == {"unit-0": ["stories"], "unit-1": ["stories"], "unit-2": ["sums"]}
    again = kvloom("config", "apply", str(file), "--yes", "--url", url)
    assert (again.returncode, again.stdout) == (0, f"{AS_WANTED}\n")


def test_another_program_of_a_config_runs(fleet: Administered, url: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG + "program: {name: balanced, ratio: 0.25}\n")
    done = kvloom("config", "apply", str(file), "--yes", "--url", url)
    assert done.stdout.splitlines()[3:] == [
        "program: the config's → balanced (ratio 0.25)",
        DONE,
    ]
    assert kvloom("program", "show", "--url", url).stdout == "balanced --option ratio=0.25\n"
    file.write_text(CONFIG + "program: none_such\n")
    done = kvloom("config", "apply", str(file), "--yes", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{file}: program: 'none_such' is not known; data_parallel" in done.stderr
    file.write_text(CONFIG + "program: 'no.module:at_all'\n")
    done = kvloom("config", "apply", str(file), "--yes", "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no.module" in done.stderr


def test_what_a_config_sets_and_only_a_new_start_applies_is_told(
    fleet: Administered, url: str, tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG + "max_body: 1MiB\nport: 9000\nchunk_tokens: 256\n")
    told = "not applied, needs a new start if it has changed: port, max_body"
    shown = kvloom("config", "apply", str(file), "--url", url)
    assert shown.stdout.splitlines()[3:] == [told, "nothing is changed yet; --yes does it"]
    done = kvloom("config", "apply", str(file), "--yes", "--url", url)
    assert done.stdout.splitlines()[3:] == [told, DONE]
    again = kvloom("config", "apply", str(file), "--yes", "--url", url)
    assert again.stdout.splitlines() == [AS_WANTED, told]


def test_after_the_last_model_it_is_told_what_brings_one(fleet: Administered, url: str) -> None:
    assert kvloom("model", "remove", "m", "--url", url).returncode == 0
    done = kvloom("model", "add", f"x={STORIES}", "--url", url)
    assert done.returncode == 1
    assert "`kvloom config apply` or `kvloom replan` adds units" in done.stderr
    done = kvloom("unit", "drain", "unit-0", "--url", url)
    assert "there is no unit 'unit-0'; the units: none" in done.stderr


def test_a_unit_of_a_config_that_cannot_be_started(fleet: Administered, url: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG)
    fleet.problems["unit-2"] = "ended with exit code 3"
    done = kvloom("config", "apply", str(file), "--yes", "--url", url)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "unit-2 ended with exit code 3" in done.stderr
    assert models(fleet)["unit-1"] == ["stories"]


def test_a_digest_is_that_of_the_weight_files(tmp_path: Path) -> None:
    """It is what `sha256sum *.safetensors | cut -c-64 | LC_ALL=C sort | sha256sum` prints."""
    weights = (DEMO / "sums" / "model.safetensors").read_bytes()
    line = hashlib.sha256(weights).hexdigest() + "\n"
    done = kvloom("model", "digest", "sums", folder=DEMO)
    assert (done.returncode, done.stdout) == (0, hashlib.sha256(line.encode()).hexdigest() + "\n")
    done = kvloom("model", "digest", "sums", "--revision", "main", folder=DEMO)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'main', but the path is a folder, which has no revisions" in done.stderr
    file, _ = make_gguf(tmp_path, "qwen2", Type.Q8_0)
    done = kvloom("model", "digest", str(file))
    assert (done.returncode, done.stdout) == (0, hashlib.sha256(file.read_bytes()).hexdigest() + "\n")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1e9}')
    done = kvloom("model", "digest", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "config.json: num_hidden_layers: 1000000000.0; 4,096 at most is right" in done.stderr


def test_a_model_is_added_with_what_pins_it(fleet: Administered, url: str) -> None:
    """Another replica of it is pinned alike, or is not added."""
    digest = "ab" * 32
    named = ("model", "add", "other=stories", "--url", url, "--unit")
    done = kvloom(*named, "unit-1", "--sha256", digest.upper(), folder=DEMO)
    assert (done.returncode, done.stderr) == (0, "")
    added = fleet.kept.units["unit-1"].engine.models[-1]
    assert (added.name, added.revision, added.sha256) == ("other", None, digest)
    done = kvloom(*named, "unit-0", folder=DEMO)
    assert done.returncode != 0
    assert f"{STORIES} with the sha256 {digest} on unit-1; another name is right" in done.stderr
    done = kvloom(*named, "unit-0", "--sha256", "12", folder=DEMO)
    assert (done.returncode, "64 hexadecimal digits" in done.stderr) == (2, True)
