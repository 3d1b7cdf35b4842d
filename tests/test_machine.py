"""What a process may take: memory of its container, a share of it, threads, the workers of torchrun."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kflats.common import machine
from kflats.common.errors import KflatsError
from kflats.common.machine import started_workers, unused_bytes
from kflats.common.torch_settings import one_thread


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5000", "memory.max": "9000"}, [5000, 9000]),
        ("0::/of/the/host\n", {"memory.max": "7000"}, [7000]),  # a container sees its own group as the root
        ("5:cpu:/x\n4:memory,swap:/x\n", {"memory/x/memory.limit_in_bytes": "6000"}, [6000]),
        ("0::/\n", {"memory.max": "max"}, []),
        ("0::/\n", {}, []),
        ("nonsense", {}, []),
    ],
)
def test_limits_of_containers(groups: str, files: dict[str, str], limits: list[int], tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert machine._group_limits(tmp_path / "cgroup", tmp_path / "fs") == limits
    assert machine._group_limits(tmp_path / "none", tmp_path / "fs") == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n", "AuthenticAMD 25 17"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "0x41 0xd40"),
        ("processor\t: 0\ncpu\t\t: POWER9\nclock\t: 2MHz\n", "POWER9"),
        ("", ""),
    ],
)
def test_the_model_of_a_processor(lines: str, said: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"{lines}\n{lines.replace('0', '1')}")
    assert machine.cpu_model(info) == said


def test_workers_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2**50)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = unused_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert unused_bytes() < 0.26 * alone


def test_workers_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert started_workers() is None
    monkeypatch.setenv("RANK", "0")
    assert started_workers() == 3
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(KflatsError, match="'many' and RANK '0' are no numbers"):
        started_workers()


def test_threads_that_begin_meanwhile_keep_theirs() -> None:
    torch.set_num_threads(3)
    seen, inside, goes_on = list[int](), threading.Event(), threading.Event()

    def other() -> None:
        torch.ones(300, 300) @ torch.ones(300, 300)
        seen.append(torch.get_num_threads())
        inside.set()
        goes_on.wait(30)
        seen.append(torch.get_num_threads())

    with one_thread():
        assert torch.get_num_threads() == 1
        (thread := threading.Thread(target=other)).start()
        inside.wait(30)
        assert torch.get_num_threads() == 1
    goes_on.set()
    thread.join()
    assert seen == [3, 3]
    assert torch.get_num_threads() == 3
