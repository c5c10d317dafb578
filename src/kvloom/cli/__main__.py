"""`python -m kvloom.cli` is `kvloom`."""

from __future__ import annotations

import sys

from kvloom.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
