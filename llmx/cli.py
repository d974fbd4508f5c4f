"""The command line. Starts fast: a command imports what it needs inside itself."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llmx import __version__
from llmx.commands.bench import bench
from llmx.commands.chat import chat
from llmx.commands.compare import compare
from llmx.commands.convert_gguf import convert_gguf
from llmx.commands.convert_hf import convert_hf
from llmx.commands.diff import diff
from llmx.commands.env import env
from llmx.commands.eval import eval as evaluate
from llmx.commands.generate import generate
from llmx.commands.inspect import inspect
from llmx.commands.plan import plan
from llmx.commands.pull import pull
from llmx.commands.quantize import quantize
from llmx.commands.serve import serve
from llmx.commands.settings import configurable, explain
from llmx.errors import LlmxError

INTERRUPTED = 130


class Commands(TyperGroup):
    """Turns what a command raises into one sentence on stderr and an exit code; usage errors stay Typer's (code 2)."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The overview is plain text: loading Rich would be a third of the time of `llmx --help`."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here a closed pipe can still be caught
            return result
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read stdout has gone (`llmx env | head -1`): say nothing, also when Python flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except typer.BadParameter as error:
            explain(error)
            raise
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("typer", "click"):
                raise
            raise typer.Exit(_explain(error, debug=ctx.params.get("debug", False))) from None


def _explain(error: Exception, debug: bool) -> int:
    """Say what went wrong; the exit code: an LlmxError's own, 1 for any other, which is a bug of ours."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, LlmxError):
        message, hint, code = error.message, error.hint, error.exit_code
    else:
        message = f"unexpected {type(error).__name__}: {error}"
        hint, code = f"This is a bug. `llmx --debug {' '.join(sys.argv[1:2])} ...` shows where; please report it.", 1
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
    return code


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"llmx {__version__}")
        raise typer.Exit


@app.callback()
def llmx(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="LLMX_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Run, serve and benchmark open LLMs. A command given no model uses `demo`."""


for command in (
    *(generate, chat, serve, quantize, convert_gguf, convert_hf, inspect),
    *(bench, evaluate, compare, pull, plan, diff, env),
):
    app.command()(configurable(command))


def main() -> None:
    app(prog_name="llmx")


if __name__ == "__main__":
    main()
