"""What the command of the attacks says without playing any."""

from __future__ import annotations

import pytest

from tests.attacks.__main__ import ALL, ALONE, command


def test_a_name_that_no_attack_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["2", "nosuch"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    for name in ("'nosuch'", *ALL, *ALONE):
        assert name in printed.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--help"]) == 0
    assert "python -m tests.attacks [NAME ...]" in capsys.readouterr().out
