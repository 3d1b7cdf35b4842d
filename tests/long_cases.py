"""Finds cases that `make test` can leave to the sweep: the long ones of a test with several cases, but its quickest.

    python -m pytest -m "not slow" --all-cases --durations=0 --durations-min=0.1 > durations.txt
    python tests/long_cases.py durations.txt > tests/long_cases.txt

Each line of ``tests/long_cases.txt`` is one case. ``tests/conftest.py`` marks these cases as slow, but not with
``--all-cases``. Examples of the documentation and golden results always run.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

LONG = 0.15
"""Seconds of a case that is left to the sweep where its test has a quicker one."""
ALWAYS = ("tests/docs/", "tests/golden/")
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+?\.py::.*?)\s*$")


def long_cases(report: Iterable[str]) -> Iterator[str]:
    """The node ids of these cases, in order; ``report``: the lines that ``--durations=0`` printed.

    >>> report = ["3.00s call  tests/test_a.py::test[1]", "1.00s setup tests/test_a.py::test[2]",
    ...           "2.00s call  tests/test_a.py::alone", "0.20s call  tests/test_a.py::test[3]"]
    >>> list(long_cases(report))
    ['tests/test_a.py::test[1]', 'tests/test_a.py::test[2]']
    """
    seconds: dict[str, float] = defaultdict(float)
    for line in report:
        if match := _LINE.match(line):
            seconds[match[2]] += float(match[1])
    tests = defaultdict(list)
    for case in seconds:
        tests[case.split("[")[0]].append(case)
    for test in sorted(tests):
        quickest, *others = sorted(tests[test], key=lambda case: seconds[case])
        if not quickest.startswith(ALWAYS):
            yield from sorted(case for case in others if seconds[case] > LONG)


if __name__ == "__main__":
    with Path(sys.argv[1]).open() as lines:
        print(*long_cases(lines), sep="\n")
