"""The list of the cases that `make test` leaves to the sweep."""

from __future__ import annotations


def test_long_cases_are_cases(gone: frozenset[str]) -> None:
    assert not gone, "tests/long_cases.py says how to make the list again"
