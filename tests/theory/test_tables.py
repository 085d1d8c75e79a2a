# SPDX-License-Identifier: Apache-2.0
import pytest

from theory.tables import TABLES, Row, all_tables


def rows():
    return {row.label: row for table in all_tables() for row in table.rows}


def test_every_deviation_is_explained():
    compared = disagreeing = 0
    for table in all_tables():
        assert table.rows and table.source
        for row in table.rows:
            if row.agrees is None:
                continue
            compared += 1
            if not row.agrees:
                disagreeing += 1
                assert row.note, f"{table.name}: {row.label}"
    assert compared >= 40
    assert disagreeing == 12


def test_named_numbers():
    found = rows()
    assert found["T* = log 5 / log 1.001"].ours == pytest.approx(1610.24, abs=5e-3)
    assert found["1.001^5000"].ours == pytest.approx(148.04, abs=5e-3)
    assert found["k3(100) / k3(0.01)"].ours == pytest.approx(26.11, abs=5e-3)
    assert found["p = 0.001, T = 1024"].ours == pytest.approx(0.999**1024, rel=1e-12)
    assert found["accepted by [0.5, 2] at T = 20000"].ours == pytest.approx(1, abs=1e-9)
    assert found["accepted by [0.999, 1.001] at T = 20000"].ours < 0.6


def test_agreement_means_rounding_to_the_printed_digits():
    assert Row("", "35.0", 34.9525).agrees
    assert not Row("", "35.0", 34.9461).agrees
    assert Row("", "1.677e7", 16773120.0).agrees
    assert Row("", "<1e-7", 7.6e-8).agrees
    assert not Row("", "<1e-7", 1.1e-7).agrees
    assert Row("", "", 1.0).agrees is None


def test_tables_by_name():
    assert [t.name for t in all_tables()] == list(TABLES)
    assert all_tables("paper-bounds")[0].name == "paper-bounds"
    with pytest.raises(ValueError, match="Unknown table 'x'"):
        all_tables("x")
