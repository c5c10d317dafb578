"""Charts as SVG: lines, and areas upon each other. Colours come from the page's style: classes s0, s1, …"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from kvloom.workload.axis import Axis

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
_X_MARKS: Final = 7
_Y_MARKS: Final = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """colour: the number of its class."""

    name: str
    colour: int
    points: Points


def line_chart(title: str, curves: Sequence[Curve], x: Axis, y: Axis, x_name: str, y_name: str) -> str:
    shapes = [
        f'<polyline class="line s{curve.colour}" points="{_path(curve.points, x, y)}">'
        f"<title>{escape(curve.name)}</title></polyline>"
        for curve in curves
    ]
    return _chart(title, shapes, x, y, x_name, y_name)


def area_chart(title: str, curves: Sequence[Curve], x: Axis, y: Axis, x_name: str, y_name: str) -> str:
    """The first curve lies at the bottom. All have the same x."""
    shapes = []
    floor = [0.0] * len(curves[0].points) if curves else []
    for curve in curves:
        ceiling = [low + value for low, (_, value) in zip(floor, curve.points, strict=True)]
        xs = [at for at, _ in curve.points]
        outline = [*zip(xs, ceiling, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        shapes.append(
            f'<polygon class="area s{curve.colour}" points="{_path(outline, x, y)}">'
            f"<title>{escape(curve.name)}</title></polygon>"
        )
        floor = ceiling
    return _chart(title, shapes, x, y, x_name, y_name)


def _path(points: Points, x: Axis, y: Axis) -> str:
    return " ".join(f"{_across(x, at):.1f},{_down(y, value):.1f}" for at, value in points)


def _across(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _down(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _chart(title: str, shapes: Sequence[str], x: Axis, y: Axis, x_name: str, y_name: str) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    grid, words = [], []
    for mark in x.marks(_X_MARKS):
        at = _across(x, mark)
        grid.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        words.append(_text(x.show(mark), "middle", f'x="{at:.1f}" y="{bottom + 17}"'))
    for mark in y.marks(_Y_MARKS):
        at = _down(y, mark)
        grid.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        words.append(_text(y.show(mark), "end", f'x="{LEFT - 8}" y="{at + 4:.1f}"'))
    words.append(_text(x_name, "middle", f'x="{(LEFT + right) / 2}" y="{HEIGHT - 8}"'))
    words.append(_text(y_name, "middle", f'transform="translate(13 {(TOP + bottom) / 2}) rotate(-90)"'))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<g class="grid">{"".join(grid)}</g>{"".join(shapes)}<g class="words">{"".join(words)}</g></svg>'
    )


def _text(text: str, anchor: str, where: str) -> str:
    return f'<text {where} text-anchor="{anchor}">{escape(text)}</text>'
