"""Puts the page together out of `static/` and `uplot/`. Its modules import each other by name alone, in one
line each, so that for a recording they can be written into one script, one after the other."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import msgspec

from kvloom.journal.records import Record
from kvloom.journal.samples import Sample

PAGE_PATH: Final = "/page/"
FOLDER: Final = Path(__file__).parent
UPLOT: Final = ("uplot/uPlot.min.css", "uplot/uPlot.iife.min.js", "uplot/LICENSE")
MAIN: Final = "page.js"
STYLES: Final = ("uplot/uPlot.min.css", "static/page.css")
TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page that is served."""
_HEAD: Final = "<!-- head -->"
_TAIL: Final = "<!-- tail -->"
_IMPORT: Final = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.M)


@cache
def _text(path: str) -> str:
    return (FOLDER / path).read_text("utf-8")


@cache
def served_files() -> dict[str, tuple[bytes, str]]:
    """Returns the content and the media type of each file, by its name. That of the page itself is empty."""
    head = "".join(f'<link rel="stylesheet" href="{PAGE_PATH}{Path(path).name}">\n' for path in STYLES)
    tail = f'<script src="{PAGE_PATH}uPlot.iife.min.js"></script>\n'
    tail += f'<script type="module" src="{PAGE_PATH}{MAIN}"></script>'
    files = {"": (_page(head, tail).encode(), "text/html")}
    paths = [*UPLOT, *(f"static/{file.name}" for file in sorted((FOLDER / "static").iterdir()))]
    for path in paths:
        if not path.endswith(".html"):
            media = TYPES.get(Path(path).suffix, "text/plain")
            files[Path(path).name] = (_text(path).encode(), media)
    return files


def uplot(name: str) -> str:
    """Returns the text of a file of uPlot."""
    return _text(f"uplot/{name}").strip()


def recorded_page(title: str, samples: Sequence[Sample], records: Sequence[Record]) -> bytes:
    """Returns one file that plays a run and loads nothing: the same page with a slider."""
    style = "".join(map(_text, STYLES))
    scripts = [_text("uplot/uPlot.iife.min.js"), _script()]
    allowed = " ".join(map(_source, scripts))
    policy = f"default-src 'none'; script-src {allowed}; style-src {_source(style)}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    run = msgspec.json.encode({"title": title, "samples": samples, "records": records}).decode()
    run = run.replace("<", "\\u003c")
    tail = f'<script type="application/json" id="recording">{run}</script>\n'
    tail += f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>'
    named = _page(head, tail).replace("<title>kvloom</title>", f"<title>{html.escape(title)}</title>", 1)
    return named.encode()


def _page(head: str, tail: str) -> str:
    before, after = _text("static/index.html").split(_TAIL)
    opening, body = before.split(_HEAD)
    return opening + head + body + tail + after


@cache
def _script() -> str:
    """Returns all modules as one: each after those that it imports."""
    modules = {file.name: _text(f"static/{file.name}") for file in sorted((FOLDER / "static").glob("*.js"))}
    order = TopologicalSorter({name: _IMPORT.findall(text) for name, text in modules.items()})
    parts = (_IMPORT.sub("", modules[name]) for name in order.static_order())
    return "".join(re.sub(r"^export ", "", part, flags=re.M) for part in parts)


def _source(text: str) -> str:
    """Returns the source expression by which a policy lets this text be, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
