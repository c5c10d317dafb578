"""Each client, unchanged, gets from a served fleet what the model says. They are slow to import, and so they
run in one process, in an environment of their own that `make clients` makes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvloom.config.config import DEMO
from tests.processes import DEADLINE
from tests.serve.streaming import serving

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "clients" / "bin" / "python"
SPEAK = Path(__file__).with_name("speak.py")
CONFIG = "kv_memory: 64MiB\nthreads: 1\nmodels: {{sums: {demo}/sums}}\nunits: [{{models: [sums]}}]\n"
SAID = "17 + 25 = 42."
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS",
         "JSON", "MD_JSON", "PARALLEL_TOOLS")  # fmt: skip
EXPECTED: dict[str, Any] = {
    "openai: chat": [SAID, SAID],
    "openai: completions": None,
    "openai: responses": [SAID, SAID, True],
    "anthropic": [SAID, SAID],
    "ollama": [SAID, SAID, True],
    "litellm": [SAID, SAID, True],
    "langchain-openai": [SAID, SAID],
    "instructor": dict.fromkeys(MODES, True),
    "pydantic-ai": [SAID, SAID],
    "llm --schema": ["big", "small"],
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What each client was told, by its name."""
    if not PYTHON.exists():
        pytest.skip("`make clients` has not installed the clients")
    with serving(tmp_path_factory.mktemp("clients"), CONFIG.format(demo=DEMO)) as (_, url):
        argv = [str(PYTHON), str(SPEAK), url]
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=4 * DEADLINE, check=False, env=env
        )
        assert done.returncode == 0, done.stderr
        # clients may print lines of their own
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"client"')]
        yield {line["client"]: line for line in lines}


@pytest.mark.parametrize("client", EXPECTED)
def test_a_client_gets_what_the_model_says(told: dict[str, Any], client: str) -> None:
    line = told[client]
    assert "error" not in line, line["error"]
    if EXPECTED[client] is not None:
        assert line["told"] == EXPECTED[client]
    else:
        whole, streamed = line["told"]
        assert whole == streamed != ""


class Alone:
    """The model by itself."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO / "sums")
        self.model = AutoModelForCausalLM.from_pretrained(DEMO / "sums", dtype=torch.float32)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def scored(self, before: list[int], after: list[int]) -> tuple[float, bool]:
        """The log-likelihood of the tokens `after`, and whether each is the likeliest."""
        with torch.no_grad():
            logits = self.model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        told = logprobs.gather(1, torch.tensor(after)[:, None]).sum().item()
        return told, logprobs.argmax(-1).tolist() == after

    def says(self, text: str) -> str:
        given = torch.tensor([self.tokens(text)])
        made = self.model.generate(given, do_sample=False, max_new_tokens=40)[0, given.shape[1] :]
        said: str = self.tokenizer.decode(made, skip_special_tokens=True)
        return said.partition("\n")[0]


def test_an_evaluation_equals_the_model_s_own(told: dict[str, Any]) -> None:
    """lm-eval asks for log-likelihoods by token ids, `echo` and `logprobs`, which the server's tokenizer and
    start token have to fit."""
    line = told["lm-eval"]
    assert "error" not in line, line["error"]
    completions, chat, alone = line["told"]["completions"], line["told"]["chat"], Alone()
    chosen = completions["multiple_choice"]
    assert len(chosen) == 6
    for (before, after), (logprob, likeliest) in chosen:
        known = alone.tokens(before)
        expected = alone.scored(known, alone.tokens(before + after)[len(known) :])
        assert (logprob, likeliest) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    first = alone.tokenizer.bos_token_id or alone.tokenizer.eos_token_id
    for (text,), logprob in completions["loglikelihood_rolling"]:
        assert logprob == pytest.approx(alone.scored([first], alone.tokens(text))[0], abs=1e-4)
    for (text, _), said in completions["generate_until"]:
        assert said == alone.says(text)
    assert [said for _, said in chat["generate_until"]] == [SAID, "3 + 4 = 7.", "60 + 8 = 68."]
