"""python -m tools.gpu_checks PART FILE SECONDS: what one part finds, in a file. For `make gpu-check`."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.gpu_checks.parts import PARTS
from tools.gpu_checks.report import Checks


def main(part: str, file: str, seconds: str) -> None:
    PARTS[part](Checks(float(seconds), Path(file)))


if __name__ == "__main__":
    main(*sys.argv[1:])
