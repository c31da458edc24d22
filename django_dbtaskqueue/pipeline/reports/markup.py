"""One self-contained HTML page: light and dark as its reader's system is, no script, no request to anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

PALETTE_LIGHT = ("#2563a8", "#b4530f", "#1f7a4d", "#8a3ea8", "#a8232f", "#4a6a10", "#0f7285", "#6b5b3e")
PALETTE_DARK = ("#7db4f0", "#f0a560", "#6fd0a0", "#d09bea", "#f28b94", "#b3d062", "#63cfe3", "#cdb98f")
RIGHT, BAD = ' class="number"', ' class="bad"'
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def _palette(colours: Sequence[str]) -> str:
    return "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours))


LIGHT = "--bg:#fff;--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--card:#f6f8fa;--bad:#b3261e;" + _palette(PALETTE_LIGHT)
DARK = "--bg:#14181d;--ink:#e6e9ed;--soft:#9aa5b1;--line:#39424e;--card:#1c2229;--bad:#ff8a80;" + _palette(PALETTE_DARK)
STYLE = f"""
:root{{color-scheme:light dark;{LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:1.5rem;max-width:72rem;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}}
h1{{font-size:1.7rem;margin:0}} h2{{font-size:1.2rem;margin:2.2rem 0 .5rem}} p{{margin:.4rem 0}}
.soft,figcaption,th{{color:var(--soft)}} .bad{{color:var(--bad);font-weight:600}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.7rem;margin:1rem 0}}
.tile{{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}}
.tile b{{display:block;font-size:1.4rem;font-variant-numeric:tabular-nums}}
.say{{background:var(--card);border-left:.3rem solid var(--c0);padding:.5rem .9rem;margin:.7rem 0}}
.wide{{overflow-x:auto}} table{{border-collapse:collapse;width:100%;font-size:.9rem}}
th,td{{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}}
td.number,th.number{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
td.text{{max-width:30rem;overflow-wrap:anywhere}}
figure{{margin:.8rem 0}} svg{{display:block;width:100%;height:auto}}
svg text{{fill:var(--soft);font:12px system-ui,sans-serif}} svg .grid{{stroke:var(--line)}}
.legend{{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem;list-style:none;margin:.2rem 0;padding:0}}
.legend i{{display:inline-block;width:.9rem;height:.25rem;margin-right:.35rem;vertical-align:middle}}
@media print{{body{{max-width:none;padding:0}} figure,table{{break-inside:avoid}}}}
"""


def page(title: str, subtitle: str, parts: Iterable[str]) -> str:
    """Return a whole document; ``parts`` are HTML, the rest is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n"
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>\n<main>'
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def heading(text: str, about: str = "") -> str:
    """Return the beginning of a section."""
    return f"<h2>{escape(text)}</h2>" + (f'<p class="soft">{escape(about)}</p>' if about else "")


def sentence(text: str) -> str:
    """Return a line that stands out."""
    return f'<p class="say">{escape(text)}</p>'


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """Return (name, value) pairs as tiles."""
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{escape(value)}</b><span class="soft">{escape(name)}</span></div>'
        for name, value in facts
    ) + "</div>"  # fmt: skip


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], *, bad: Iterable[int] = ()) -> str:
    """Return a table; numbers stand right. ``bad`` are the numbers of rows to mark."""
    marked, body, numeric = set(bad), [], [True] * len(heads)
    for number, row in enumerate(rows):
        numeric = [kept and (value is None or _is_number(value)) for kept, value in zip(numeric, row, strict=True)]
        cells = "".join(_cell(value) for value in row)
        body.append(f"<tr{BAD if number in marked else ''}>{cells}</tr>")
    if not body:
        return '<p class="soft">None.</p>'
    top = "".join(
        f'<th scope="col"{RIGHT if right else ""}>{escape(head)}</th>'
        for head, right in zip(heads, numeric, strict=True)
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption, quote=True)}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Number) and not isinstance(value, bool)


class Number(str):
    """Text that stands for a number, such as "99.9 %"."""

    __slots__ = ()


def _cell(value: object) -> str:
    if value is None:
        return '<td class="number">-</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if _is_number(value):
        return f'<td class="number">{escape(number(value))}</td>'
    return f'<td class="text">{escape(str(value))}</td>'


def number(value: object) -> str:
    """Return a number with thousands apart and no more digits than anybody reads."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def percent(value: float | None) -> Number | None:
    """Return a share as a percentage; what is not quite all does not become 100 %."""
    if value is None:
        return None
    text = f"{value * 100:.2f}".rstrip("0").rstrip(".")
    return Number("> 99.99 %" if text == "100" and value < 1 else f"{text} %")


def seconds(value: float | None) -> Number | None:
    """Return a time as people say it: 12 ms, 3.4 s, 5 min, 2.1 h."""
    if value is None:
        return None
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return Number(f"{value / size:.1f}".removesuffix(".0") + f" {unit}")
    return Number(f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms")
