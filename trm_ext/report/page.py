# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page: no script, no network, readable on a phone and on paper.

Only :class:`Html` goes into the page as it is; any other value is escaped on the way, so a string
from a file cannot become markup.
"""

from __future__ import annotations

import html
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = [
    "Html",
    "check_target",
    "facts",
    "figure",
    "figures",
    "notes",
    "page",
    "paragraph",
    "section",
    "table",
    "write_page",
]

_ONE_LINE = 24  # characters

# Control characters, directional overrides and lone surrogates: shown as their code, so that a
# string cannot hide or reorder what stands around it.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Html(str):
    """Markup that is safe to insert."""


def text(value: object) -> Html:
    r"""Escape a value, unless it is :class:`Html` already.

    >>> text("<b> & \x1b[31m")
    '&lt;b&gt; &amp; \\x1b[31m'
    """
    if isinstance(value, Html):
        return value
    visible = _INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], str(value))
    return Html(html.escape(visible))


def join(parts: Iterable[object]) -> Html:
    """Concatenate, escaping what is not markup.

    >>> join([Html("<b>"), "<", Html("</b>")])
    '<b>&lt;</b>'
    """
    return Html("".join(text(part) for part in parts))


def element(tag: str, *parts: object, style: str = "") -> Html:
    """``<tag class="style">parts</tag>``.

    >>> element("p", "a < b")
    '<p>a &lt; b</p>'
    """
    attribute = f' class="{text(style)}"' if style else ""
    return Html(f"<{tag}{attribute}>{join(parts)}</{tag}>")


def paragraph(*parts: object) -> Html:
    """A paragraph."""
    return element("p", *parts)


def notes(sentences: Sequence[object]) -> Html:
    """Sentences that nobody should miss; nothing when there are none."""
    return Html("") if not sentences else element("ul", *map(_item, sentences), style="notes")


def facts(pairs: Sequence[tuple[object, object]]) -> Html:
    """Names with their values, side by side."""
    cells = [element("div", element("dt", name), element("dd", value)) for name, value in pairs]
    return element("dl", *cells)


def table(
    header: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    left: Sequence[str] = (),
    caption: object = "",
) -> Html:
    """A table that scrolls inside its own box when the page is narrow.

    Args:
        header: column titles.
        rows: cells.
        left: titles of the columns that hold words; the others are aligned to the right.
        caption: below the table.
    """
    columns = zip(header, *rows, strict=True)
    styles = [_word_style(cells) if cells[0] in left else "" for cells in columns]

    def line(tag: str, cells: Sequence[object]) -> Html:
        made = [element(tag, cell, style=s) for cell, s in zip(cells, styles, strict=True)]
        return element("tr", *made)

    body = element("tbody", *(line("td", row) for row in rows))
    made = element("table", element("thead", line("th", header)), body)
    below = element("p", caption, style="caption") if caption else Html("")
    return join([element("div", made, style="scroll"), below])


def figure(picture: Html, caption: object) -> Html:
    """A picture with its caption."""
    return element("figure", picture, element("figcaption", caption))


def figures(*made: Html) -> Html:
    """Figures side by side where there is room."""
    return element("div", *made, style="figures")


def section(title: object, *blocks: object) -> Html:
    """A part of the page with its heading."""
    return element("section", element("h2", title), *blocks)


def page(title: object, *blocks: object) -> str:
    """The whole document.

    Args:
        title: heading, and name of the browser's tab.
        blocks: what stands below it.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{text(title)}</h1>\n" + "\n".join(map(text, blocks)) + "\n</main>\n</body>\n</html>\n"
    )


def check_target(path: Path) -> None:
    """Raise ValueError unless a page can be written there."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, not a page")


def write_page(path: Path, document: str) -> None:
    """Write a page in UTF-8; an interrupt leaves what was there before.

    Raises:
        ValueError: the folder does not exist, or the path is a folder.
    """
    check_target(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(document)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _word_style(cells: Sequence[object]) -> str:
    """Words stay on one line, sentences get room to be read where a table is squeezed."""
    longest = max(len(re.sub("<[^>]*>", "", text(cell))) for cell in cells)
    return "word" if longest <= _ONE_LINE else "word long"


def _item(sentence: object) -> Html:
    return element("li", sentence)


_CSS = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5d6873; --paper: #fff; --edge: #d8dde2;
  --card: #f5f7f9; --a: #2667a8; --b: #c2571a; --c: #6b4c9a; --hot: #b3261e; --good: #1e7a44; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9da8b3; --paper: #14181c;
  --edge: #343c44; --card: #1d2329; --a: #6aaae8; --b: #f0945a; --c: #b59ae0; --hot: #ff7a70;
  --good: #66c48a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 8px 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 8px; padding-top: 12px; border-top: 1px solid var(--edge); }
p { margin: 8px 0; max-width: 75ch; overflow-wrap: anywhere; }
.lead { font-size: 1.1rem; }
.caption, figcaption { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.notes { margin: 12px 0; padding: 8px 12px 8px 28px; border-left: 4px solid var(--b);
  background: var(--card); overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 8px;
  margin: 12px 0; }
dl > div { background: var(--card); border-radius: 6px; padding: 8px 10px; min-width: 0; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--edge);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { padding-left: 0; }
td.word, th.word { text-align: left; }
th, td { white-space: nowrap; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 26ch; max-width: 60ch; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr));
  gap: 16px 24px; margin: 12px 0; }
figure { margin: 0; min-width: 0; max-width: 560px; break-inside: avoid; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
svg text.mark { fill: var(--hot); paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.grid { stroke: var(--edge); stroke-width: .7; }
.axis { stroke: var(--soft); stroke-width: 1; }
.limit { stroke: var(--hot); stroke-width: 1.2; stroke-dasharray: 4 3; }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .hot { fill: var(--hot); }
.hole { fill: var(--edge); }
.line { fill: none; stroke-width: 1.8; } .line.a { stroke: var(--a); } .line.b { stroke: var(--b); }
.line.c { stroke: var(--c); stroke-dasharray: 6 3; } .line.b { stroke-dasharray: 2 2; }
.key { white-space: nowrap; font-weight: 600; } .key.a { color: var(--a); }
.key.b { color: var(--b); } .key.c { color: var(--c); }
.bad { color: var(--hot); font-weight: 600; } .good { color: var(--good); font-weight: 600; }
mark { background: none; color: var(--hot); font-weight: 700; border-bottom: 2px solid var(--hot); }
code { font: .85rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  overflow-wrap: anywhere; white-space: pre-wrap; }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --edge: #bbb;
    --card: #f4f4f4; --a: #1d4f85; --b: #a34410; --c: #553a80; --hot: #9a1a12; --good: #155a32; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; } .scroll { overflow: visible; }
  table { font-size: 7.5pt; } th, td { padding: 2px 5px; } tr, .notes { break-inside: avoid; }
  h2 { break-after: avoid; } .figures { grid-template-columns: 1fr 1fr; } @page { margin: 14mm; } }
"""
