# SPDX-License-Identifier: Apache-2.0
"""Reading a page the strict way: tags nest, and only harmless ones are there."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta"}
ALLOWED = set(
    "html head meta title style body main h1 h2 section p ul li dl div dt dd table thead tbody tr "
    "th td figure figcaption span b code mark svg rect circle line polyline text".split()
)
ATTRIBUTES = set(
    "lang charset name content http-equiv class viewbox role x y x1 x2 y1 y2 cx cy r width height "
    "points text-anchor fill-opacity".split()
)


class Document(HTMLParser):
    """Collects the text of a page by tag, and fails on anything it should not hold."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(source)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        for name, value in attrs:
            assert name in ATTRIBUTES, (tag, name)
            assert "url(" not in (value or "") and "://" not in (value or "")
        self.tags.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert not re.search(r"url\(|@import|expression", data)
            return
        self.words.append(data)
        if self.tables and ("td" in self.open or "th" in self.open):
            self.tables[-1][-1][-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def table(self, *header: str) -> list[list[str]]:
        """The rows of the table whose first titles are these."""
        for rows in self.tables:
            if rows[0][: len(header)] == list(header):
                return rows[1:]
        raise AssertionError(f"no table {header}; there are {[rows[0] for rows in self.tables]}")
