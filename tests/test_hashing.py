"""Digests depend on every byte, on the type and shape of tensors, and on where parts end; files are read in blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from kflats.common.hashing import crc32, sha256, sha256_of_file


def test_equal_digests_mean_equal_parts() -> None:
    numbers = torch.arange(6, dtype=torch.float32)
    different = [
        [],
        [""],
        ["ab"],
        [b"ab"],
        ["a", "b"],
        [numbers],
        [numbers.reshape(2, 3)],
        [numbers.reshape(2, 3).T],
        [numbers.int()],
        [torch.zeros(0)],
        [torch.zeros(0, 2)],
        [torch.tensor(0.0)],
        [torch.tensor(True)],
    ]
    assert len({sha256(parts) for parts in different}) == len(different)
    assert sha256([numbers.reshape(2, 3).T]) == sha256([numbers.reshape(2, 3).T.contiguous()])
    assert crc32([numbers.bfloat16(), b"end"]) == crc32([numbers.bfloat16().view(torch.uint8), "end"])


def test_a_file_is_hashed_over_several_blocks(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    (tmp_path / "file").write_bytes(data)
    assert sha256_of_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()
