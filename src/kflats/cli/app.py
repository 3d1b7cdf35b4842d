"""The command line: each command parses, calls one function, and prints.

Exit codes: 0 done; 2 the request cannot be carried out (the message says why and what to try);
130 interrupted. Any other failure is a defect and shows its traceback.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from kflats.cli import commands
from kflats.cli.options import only_own_words
from kflats.common.errors import KflatsError
from kflats.common.formatting import visible
from kflats.common.release import version


def complain(message: str) -> None:
    """Print one error message or warning on stderr."""
    # Text, not markup: "[unused1]" in a message is a token.
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("kflats: ", "bold red"), visible(message)))


class _Group(TyperGroup):
    """Turns errors that the user can mend into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with only_own_words(lambda warning: complain(f"warning: {warning}")):
                return super().invoke(ctx)
        except KflatsError as error:
            complain(error.on_command_line())
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None:  # a broken pipe, for example: the user cannot mend it by another path
                raise
            refusal = KflatsError(
                f"{error.filename} cannot be used",
                cause=(error.strerror or "").lower(),
                hint="another path, or free space and the permissions for this one",
            )
            complain(str(refusal))
            raise typer.Exit(2) from None
        except KeyboardInterrupt as error:
            resumes = ctx.invoked_subcommand in ("compress", "recover")
            note = str(error) or ("the same command resumes where it stopped" if resumes else "")
            complain("interrupted" + (f"; {note}" if note else ""))
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Compress the weights of a model: smaller embeddings and layers in an ordinary Hugging Face folder.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kflats {version()}")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (
    *(commands.inspect, commands.plan, commands.compress, commands.trim, commands.compare),
    *(commands.evaluate, commands.recover, commands.export, commands.report, commands.demo),
):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
