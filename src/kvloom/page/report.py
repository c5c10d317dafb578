"""Reports to look at: one file each, which loads nothing, in the style of the page. What is drawn is SVG
without text, so that the text beside it stays as large as the reader has it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Final

COLOURS: Final = 8  # of models, in the page's style
_OWN: Final = """
body{max-width:70rem;margin:0 auto}header{display:block}.card{margin-top:1rem}.card h3{margin-top:.6rem}
svg{display:block;width:100%;border-radius:.25rem}rect{fill:var(--model,var(--line))}.pale{opacity:.55}
.back{fill:var(--line)}.theirs{fill:var(--edge)}.ours{fill:var(--accent)}
.bars{display:grid;grid-template-columns:minmax(6rem,1fr) minmax(8rem,2fr) minmax(7rem,1fr);gap:.35rem .8rem;
align-items:center;margin-top:.6rem;font-size:.9rem}.bars>:nth-child(3n){text-align:right}
@media(max-width:560px){.bars{grid-template-columns:1fr}.bars>:nth-child(3n){text-align:left;margin-bottom:.5rem}}
.wide{margin-top:.7rem}.number{text-align:right;white-space:nowrap}
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar. colour: of a model, None for what is nobody's; pale: the second thing that it has."""

    size: float
    colour: int | None
    pale: bool = False
    said: str = ""
    """The text that is shown when it is pointed at."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A row: a name, a bar whose parts follow one another, and what is told of it."""

    name: str
    parts: Sequence[Part]
    told: str
    whole: float
    """The size of a full bar."""
    colour: int | None = None
    """Of the name's mark."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A row of two bars, one below the other: what was told elsewhere (None: nothing), and what is found."""

    name: str
    theirs: float | None
    ours: float
    told: str
    whole: float


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. right: the columns of numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """A part of a report under one heading."""

    title: str
    said: str = ""
    blocks: Sequence[Sequence[Bar] | Sequence[Pair] | Grid] = ()


@cache
def style() -> str:
    """Returns the page's style."""
    return (Path(__file__).parent / "static" / "page.css").read_text("utf-8")


def report_page(title: str, said: str, cards: Iterable[Card]) -> str:
    """Returns the file's text."""
    text = style() + _OWN
    allowed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(title)}</title>\n<style>{text}</style></head>\n<body>\n",
            f'<header><h1>{escape(title)}</h1><p class="soft">{escape(said)}</p></header>\n',
            *(piece for card in cards for piece in _card(card)),
            "</body></html>\n",
        ]
    )


def _card(card: Card) -> Iterator[str]:
    yield f'<section class="card"><h2>{escape(card.title)}</h2>'
    if card.said:
        yield f'<p class="soft">{escape(card.said)}</p>'
    for block in card.blocks:
        if isinstance(block, Grid):
            yield from _table(block)
        else:
            yield '<div class="bars">'
            for row in block:
                yield from _pair(row) if isinstance(row, Pair) else _bar(row)
            yield "</div>"
    yield "</section>\n"


def _bar(bar: Bar) -> Iterator[str]:
    mark = "" if bar.colour is None else f'<span class="swatch c{bar.colour % COLOURS}"></span> '
    yield f'<div>{mark}{escape(bar.name)}</div><svg viewBox="0 0 1000 30" height="18" '
    yield f'preserveAspectRatio="none" role="img" aria-label="{escape(f"{bar.name}: {bar.told}")}">'
    yield '<rect class="back" width="1000" height="30"/>'
    ends = accumulate(part.size for part in bar.parts)
    for part, end in zip(bar.parts, ends, strict=True):
        kind = "back" if part.colour is None else f"c{part.colour % COLOURS}" + " pale" * part.pale
        at, width = _scaled(end - part.size, bar.whole), _scaled(part.size, bar.whole)
        yield f'<rect class="{kind}" x="{at}" width="{width}" height="30">'
        yield f"<title>{escape(part.said)}</title></rect>"
    yield f"</svg><div>{escape(bar.told)}</div>"


def _pair(pair: Pair) -> Iterator[str]:
    yield f'<div>{escape(pair.name)}</div><svg viewBox="0 0 1000 30" height="22" '
    yield f'preserveAspectRatio="none" role="img" aria-label="{escape(f"{pair.name}: {pair.told}")}">'
    if pair.theirs is not None:
        yield f'<rect class="theirs" width="{_scaled(pair.theirs, pair.whole)}" height="12"/>'
    yield f'<rect class="ours" y="16" width="{_scaled(pair.ours, pair.whole)}" height="12"/>'
    yield f"</svg><div>{escape(pair.told)}</div>"


def _scaled(size: float, whole: float) -> str:
    return f"{max(min(1000 * size / whole, 1000.0), 0.0):.1f}" if whole > 0 else "0"


def _table(grid: Grid) -> Iterator[str]:
    def cell(kind: str, at: int, text: str) -> str:
        return f"<{kind}{' class=number' * (at in grid.right)}>{escape(text)}</{kind}>"

    yield '<div class="wide" tabindex="0"><table><thead><tr>'
    yield from (cell("th", at, head) for at, head in enumerate(grid.heads))
    yield "</tr></thead><tbody>"
    for row in grid.rows:
        yield "<tr>" + "".join(cell("td", at, text) for at, text in enumerate(row)) + "</tr>"
    yield "</tbody></table></div>"
