"""Fine-tunes the packaged all-MiniLM-L6-v2 for tasks, and keeps the models that the other experiments compress.

    python experiments/fine_tune.py --cache FOLDER [--tasks cola,mrpc] [--full]

Not a claim of its own: scores come from ``task_scores.py``. Without ``--full`` the training is the short one of
``_train.SHORT``, made for one core; with it, 3 epochs of everything at up to 128 tokens.
"""

from __future__ import annotations

import argparse
import time

from _results import parsed
from _train import SHORT, arguments_of_models, quick_models_, task_model

from kflats.tasks.scoring import score

QUICK = {"tasks": "cola"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    arguments_of_models(parser)
    parser.add_argument("--tasks", default=",".join(SHORT))
    asked = parsed(parser, argv, QUICK)
    quick_models_(asked, asked.tasks)
    for name in asked.tasks.split(","):
        began = time.monotonic()
        made = task_model(name, asked)
        taken = time.monotonic() - began
        found = score(made.model, made.tokenizer, name, task_data=asked.data, max_length=made.settings["max_length"])
        print(
            f"{name}: {found.metric} {found.value:.4f} on {found.n} dev examples, {taken:.0f} s, {made.said}",
            flush=True,
        )


if __name__ == "__main__":
    main()
