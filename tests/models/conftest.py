"""Both kinds of vocabulary tables, and the plug-in."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.0")

from matrices import flats, low_rank

from kflats.files import register_plugin

register_plugin()


@pytest.fixture(params=[low_rank, flats], ids=["low_rank", "flats"])
def make_matrix(request):
    """Both kinds of matrix, by shape."""
    return request.param


@pytest.fixture
def matrix_kinds():
    """Both at once, for tests that start a process of their own."""
    return low_rank, flats
