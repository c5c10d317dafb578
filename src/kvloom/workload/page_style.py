"""The look of the results page: eight colours that differ in lightness too, for light and for dark."""

from __future__ import annotations

from typing import Final

_LIGHT: Final = ("#1f5fbf", "#c2560a", "#0b7a55", "#9c3f94", "#7a6200", "#1988a8", "#b02a44", "#6b6b76")
_DARK: Final = ("#74a9f7", "#f59b58", "#4cc79c", "#dd8fd4", "#d6ba45", "#6cc9e6", "#f5808f", "#a5a5b2")
_DASHES: Final = ("", "", "", "", "6 3", "6 3", "6 3", "2 3")

COLOURS: Final = len(_LIGHT)  # classes s0 to s7 are models; s8 and s9 are what came and what was answered


def _colours(values: tuple[str, ...]) -> str:
    pairs = [*enumerate(values), (COLOURS, values[-1]), (COLOURS + 1, values[0])]
    return "".join(f".s{number}{{--c:{value}}}" for number, value in pairs)


_SHAPES: Final = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:24px;background:var(--ground);color:var(--ink);
 font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.35em;margin:0}h2{font-size:1.05em}p{margin:.2em 0 1em;color:var(--soft)}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:0 0 16px}
.tiles div{background:var(--card);border-radius:8px;padding:10px 14px}
dd{margin:0;font-size:1.2em;font-weight:600}dt{color:var(--soft);font-size:.85em}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:0 0 12px;padding:0;font-size:.9em}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;background:var(--c)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
figure{margin:0;background:var(--card);border-radius:8px;padding:12px}
figcaption{font-weight:600;margin-bottom:6px}
svg{display:block;width:100%;height:auto}
.grid line{stroke:var(--line)}.words{fill:var(--soft);font-size:12px}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.area{fill:var(--c);fill-opacity:.75;stroke:var(--card);stroke-width:1}
.wide{overflow-x:auto;margin-top:16px}table{border-collapse:collapse;font-size:.88em}
th,td{padding:4px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th:first-child{text-align:left}thead th{color:var(--soft);font-weight:500}
"""

_DASHED: Final = "".join(f".line.s{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(_DASHES) if dash)

STYLE: Final = (
    ":root{color-scheme:light dark;--ground:#fff;--card:#f5f6f8;--ink:#1b1c20;--soft:#5c5f6a;--line:#dcdfe5}"
    + _colours(_LIGHT)
    + "@media(prefers-color-scheme:dark){"
    + ":root{--ground:#15161a;--card:#1f2127;--ink:#e9eaee;--soft:#a0a4b0;--line:#363943}"
    + _colours(_DARK)
    + "}"
    + _SHAPES
    + _DASHED
)
