"""Context degrees within ring x ulysses."""

from __future__ import annotations

import pytest

from lightning_cp.mesh.degrees import check_degrees, context_shape


def test_a_smaller_context_group_has_neighbouring_ranks() -> None:
    assert [context_shape(n, ring=2, ulysses=4) for n in (1, 2, 4, 8)] == [(1, 1), (1, 2), (1, 4), (2, 4)]
    assert [context_shape(n, ring=4, ulysses=1) for n in (1, 2, 4)] == [(1, 1), (2, 1), (4, 1)]
    assert [context_shape(n, ring=3, ulysses=2) for n in (1, 2, 6)] == [(1, 1), (1, 2), (3, 2)]


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({64: 3}, r"3 is no context degree within ring=2 x ulysses=2: it must be one of \[1, 2, 4\]"),
        ({64: 8}, r"8 is no context degree"),
        ({64: 0}, r"0 must be a whole number of at least 1"),
        ({0: 1}, r"0 must be a whole number of at least 1"),
        ({64: 2, 128: 1}, r"longer samples must have the same or a larger degree"),
        ([1, 2], r"must be a dict"),
    ],
)
def test_invalid_degrees_are_named(degrees: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check_degrees(degrees, ring=2, ulysses=2)


def test_degrees_need_the_usual_mesh_and_equal_devices() -> None:
    check_degrees({128: 2, 64: 1}, ring=2, ulysses=2)
    with pytest.raises(ValueError, match="does not work with shares"):
        check_degrees({64: 1}, ring=2, ulysses=1, shares=(2, 1))
