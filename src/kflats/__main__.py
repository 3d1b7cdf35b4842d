"""``python -m kflats``: the command line, where the command ``kflats`` is not on the path."""

from kflats.cli.app import main

if __name__ == "__main__":
    main()
