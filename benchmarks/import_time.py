"""How long imports take: median wall seconds of fresh processes, the programs interleaved.

    python benchmarks/import_time.py --rounds 9

Differences are medians over the rounds of one process minus `import torch` of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "python": "pass",
    "torch": "import torch",
    "kflats": "import kflats",
    "torch, kflats": "import torch, kflats",
    "torch, transformers": "import torch, transformers",
    "torch, transformers, kflats": "import torch, transformers, kflats",
    "torch, kflats, transformers": "import torch, kflats, transformers",
    "kflats --help": "import kflats.cli.app as c, sys; sys.argv = ['kflats', '--help']; c.main()",
    "kflats compress MODEL --size 8": "import kflats.cli.app as c, sys; "
    "sys.argv = ['kflats', 'compress', 'm', '--size', '8', '--out', 'o']; c.main()",
}


def seconds(program: str) -> float:
    """Wall seconds of one fresh process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    return time.perf_counter() - start


def table(rounds: int) -> str:
    """Markdown: the median of each program, and what it adds to ``import torch``."""
    for program in PROGRAMS.values():
        seconds(program)  # files come into the cache, and Python compiles them
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            times[name].append(seconds(program))
    medians = {name: statistics.median(values) for name, values in times.items()}
    lines = ["| process | median s | more than torch, median s |", "| --- | ---: | ---: |"]
    for name, values in times.items():
        more = statistics.median(a - b for a, b in zip(values, times["torch"], strict=True))
        lines.append(f"| `{name}` | {medians[name]:.2f} | {more:+.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="processes of each program")
    print(table(parser.parse_args().rounds))
