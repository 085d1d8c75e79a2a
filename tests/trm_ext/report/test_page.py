# SPDX-License-Identifier: Apache-2.0
"""The page: everything is escaped but markup, and writing is all or nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.trm_ext.report.documents import Document
from trm_ext.report import page

HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<b>"


def test_no_string_becomes_markup_wherever_it_goes() -> None:
    blocks = [
        page.notes([HOSTILE]),
        page.facts([(HOSTILE, HOSTILE)]),
        page.table([HOSTILE], [[HOSTILE]], left=[HOSTILE], caption=HOSTILE),
        page.figure(page.Html("<svg></svg>"), HOSTILE),
        page.section(HOSTILE, page.paragraph(HOSTILE), HOSTILE),
        page.element("p", "x", style=HOSTILE),
    ]
    document = Document(page.page(HOSTILE, *blocks, HOSTILE))
    assert document.text.count("<script>alert(1)</script>") == 13
    assert "script" not in document.tags and "img" not in document.tags


def test_invisible_and_reordering_characters_are_shown() -> None:
    assert page.text("a\u202eb\x00c\x1b[1m\ud800") == r"a\u202eb\x00c\x1b[1m\ud800"
    assert page.text("héé 日本 ␣\n") == "héé 日本 ␣\n"


def test_a_page_forbids_scripts_and_requests() -> None:
    text = page.page("title")
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert text.startswith("<!doctype html>") and 'name="viewport"' in text
    assert "@media print" in text and "http://" not in text and "https://" not in text


def test_an_interrupt_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "page.html"
    page.write_page(target, "old ‖")
    assert target.read_text(encoding="utf-8") == "old ‖"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        page.write_page(target, "new")
    assert target.read_text(encoding="utf-8") == "old ‖" and os.listdir(tmp_path) == ["page.html"]


def test_a_place_where_no_page_can_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder .*absent does not exist"):
        page.write_page(tmp_path / "absent" / "page.html", "")
    with pytest.raises(ValueError, match="is a folder, not a page"):
        page.write_page(tmp_path, "")
