"""Every kind of matrix, and the plug-in."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.0")

from matrices import flats, interpolative, low_rank

from kflats.io import register_plugin

register_plugin()


@pytest.fixture(params=[low_rank, interpolative, flats], ids=["low_rank", "interpolative", "flats"])
def make_matrix(request):
    """Every kind of matrix, by shape."""
    return request.param


@pytest.fixture
def matrix_kinds():
    """All at once, for tests that start a process of their own."""
    return low_rank, interpolative, flats
