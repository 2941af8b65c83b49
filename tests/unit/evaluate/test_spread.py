"""Distributions in eight numbers, checked by hand."""

from __future__ import annotations

import pytest

from heedful.evaluate.spread import by_group, spread, table


def test_by_hand():
    found = spread([4.0, 0.0, 2.0])
    assert (found.num, found.mean, found.min, found.p50, found.max) == (3, 2.0, 0.0, 2.0, 4.0)
    assert found.std == pytest.approx((8 / 3) ** 0.5)
    assert found.p5 == pytest.approx(0.2) and found.p95 == pytest.approx(3.8)
    one = spread([1.5])
    assert one.std == 0 and one.min == one.p5 == one.p95 == one.max == 1.5


def test_groups_by_size_and_without_the_nameless():
    found = by_group([1.0, 2.0, 3.0, 9.0, 5.0], ["b", "a", "b", "", "c"])
    assert list(found) == ["b", "a", "c"] and found["b"].mean == 2.0 and found["a"].num == 1
    assert by_group([1.0], [""]) == {}


def test_the_table_has_a_row_for_each():
    lines = table({"all answers": spread([1.0, 2.0]), "x" * 50: spread([-1000.5])})
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert lines[1].split()[-1] == "2.000" and lines[2].startswith("x" * 32 + " ") and "-1000.500" in lines[2]
