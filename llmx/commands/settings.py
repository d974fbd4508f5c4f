"""Every parameter of every command also as a variable LLMX_* and as a key of a YAML file: generic, no table of flags.

A value comes from the command line, else the environment, else the file of --config, else the default. Each is the text
that one would write after the flag, so Typer checks them all by the same rules.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmx.errors import UsageError

if TYPE_CHECKING:
    from llmx.commands.settings_file import Entry

PREFIX = "LLMX_"
READ_ELSEWHERE = ("CACHE", "KERNELS", "ISA", "PREPARE", "DEMO_WHEEL", "REQUIRE_NATIVE", "PURE", "CONFIG", "DEBUG")
OWN = ("config", "print_config")  # this module's parameters, which no file sets
ORIGINS = "llmx.origins"  # in the context: parameter -> where its value was written
_PANEL = "Settings"
# So close to a setting's name that it was meant: wide enough for one slip, too narrow for any other variable of ours.
NEAR = 0.9


@dataclass(frozen=True)
class Found:
    """A value as it was written, None for YAML's null (the default again), and where."""

    value: str | list[str] | None
    origin: str


def keys(parameter: Any) -> list[str]:
    """What a file may call the parameter: each long flag without its dashes, or the argument's name."""
    names = [flag[2:] for flag in parameter.opts if flag.startswith("--")]
    return names or [parameter.name.replace("_", "-")]


def variables(command: str, parameter: Any) -> Iterator[str]:
    """The variables that set it, first come first served: the command's own, then those that all commands share (but
    for names that something else reads: LLMX_PURE is the build's)."""
    for prefix in (f"{PREFIX}{command}_", PREFIX):
        for key in keys(parameter):
            name = (prefix + key).replace("-", "_").upper()
            if name.removeprefix(PREFIX) not in READ_ELSEWHERE:
                yield name


def settable(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.name not in OWN]


def takes_many(parameter: Any) -> bool:
    return bool(getattr(parameter, "multiple", False)) or parameter.nargs != 1


def configurable(command: Callable[..., None]) -> Callable[..., None]:
    """The command with --config and --print-config. Register its result with Typer."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        context: typer.Context = values["ctx"]
        if not wants_context:
            del values["ctx"]
        del values["config"]
        if values.pop("print_config"):
            typer.echo("\n".join(describe(context)))
            return
        try:
            command(**values)
        except UsageError as error:
            error.hint = " ".join(filter(None, (error.hint, *_blamed(context, error.message)))) or None
            raise

    signature = inspect.signature(command, eval_str=True)  # a signature that is set is not evaluated any more
    wants_context = "ctx" in signature.parameters
    added: dict[str, tuple[Any, Any]] = {"config": (CONFIG, None), "print_config": (PRINT_CONFIG, False)}
    if not wants_context:
        added["ctx"] = (typer.Context, inspect.Parameter.empty)
    new = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in added.items()
    ]
    parameters = [*signature.parameters.values(), *new]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def given(context: typer.Context, name: str) -> str | None:
    """Where the parameter's value was written: "command line", a variable, or a line of a file; None: nowhere."""
    source = context.get_parameter_source(name)
    if source is None or source.name == "DEFAULT":
        return None
    if source.name == "COMMANDLINE":
        return "command line"
    origin: str | None = context.meta.get(ORIGINS, {}).get(name)
    return origin or "environment"


def describe(context: typer.Context) -> Iterator[str]:
    """The values and their sources, as a file that --config takes. What is hidden where it is typed is hidden here."""
    yield f"# llmx {context.info_name}"
    lines = []
    for parameter in settable(context.command):
        value, key = context.params[parameter.name], keys(parameter)[0]
        plain = value if value is None or isinstance(value, bool | int | float) else _text(value)
        line = f"{key}: {json.dumps(plain, ensure_ascii=False)}"
        if getattr(parameter, "hide_input", False):
            line = f"# {key}: {'set, not shown' if value else 'not set'}"
        lines.append((line, given(context, parameter.name)))
    width = min(40, max((len(line) for line, _ in lines), default=0))
    for line, origin in lines:
        yield f"{line:<{width}}  # {origin or 'default'}"


def _text(value: Any) -> Any:
    return [str(one) for one in value] if isinstance(value, list | tuple) else str(value)


def explain(error: typer.BadParameter) -> None:
    """Let Typer's sentence about a wrong value say where it was written, if that was not the command line."""
    if error.ctx is None or error.param is None:
        return
    origin = given(error.ctx, error.param.name)  # type: ignore[arg-type]
    if origin not in (None, "command line"):
        error.param_hint = f"'{_flag(error.param)}' (from {origin})"


def _flag(parameter: Any) -> str:
    return str(parameter.name.upper() if parameter.param_type_name == "argument" else parameter.opts[0])


def _blamed(context: typer.Context, message: str) -> Iterator[str]:
    """A sentence for each flag of the message that was set elsewhere than on the command line."""
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", message))
    for parameter in settable(context.command):
        origin = given(context, parameter.name)
        if origin not in (None, "command line") and (flags := named & {*parameter.opts, *parameter.secondary_opts}):
            yield f"{min(flags)} was set by {origin}."


def _load(ctx: typer.Context, config: Path | None) -> Path | None:
    """What --config does before any other parameter is looked at: put file and environment where Typer finds them."""
    if ctx.resilient_parsing:
        return config
    commands: Mapping[str, Any] = getattr(ctx.find_root().command, "commands", {ctx.info_name: ctx.command})
    found = {} if config is None else from_file(config, str(ctx.info_name), commands)
    found |= from_environment(os.environ, str(ctx.info_name), ctx.command)
    found = {name: one for name, one in found.items() if one.value is not None}
    ctx.default_map = {name: one.value for name, one in found.items()}
    ctx.meta[ORIGINS] = {name: one.origin for name, one in found.items()}
    for line in strays(os.environ, commands):
        typer.echo(f"warning: {line}", err=True)
    return config


def from_environment(environ: Mapping[str, str], name: str, command: Any) -> dict[str, Found]:
    """By parameter. An empty variable is as good as none. Several values are a JSON list. UsageError if that's none."""
    found: dict[str, Found] = {}
    for parameter in settable(command):
        variable = next((one for one in variables(name, parameter) if environ.get(one)), None)
        if variable is not None:
            text = environ[variable]
            value = _several(text, variable) if takes_many(parameter) else text
            found[parameter.name] = Found(value, f"environment {variable}")
    return found


def _several(text: str, variable: str) -> list[str]:
    if not text.startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise UsageError(f"{variable} begins like a list, and is no JSON list of strings.")
    return values


def strays(environ: Mapping[str, str], commands: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about variables that set nothing and look like a slip in the name of one that does."""
    known = {one for name, command in commands.items() for p in command.params for one in variables(name, p)}
    read = {PREFIX + name for name in READ_ELSEWHERE}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known | read and (meant := _closest(variable, known, NEAR)):
            yield f"{variable} sets nothing; did you mean {meant}?"


def _closest(word: str, words: Any, cutoff: float = 0.6) -> str | None:
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, sorted(words), 1, cutoff)), None)


def from_file(path: Path, name: str, commands: Mapping[str, Any]) -> dict[str, Found]:
    """By parameter of the command called `name`.

    A key at the top is for every command that has such a flag; one inside `serve:` is for `llmx serve`, and goes first.
    UsageError for a key that is no flag of any command, or not of the section's.
    """
    from llmx.commands.settings_file import read

    shared: dict[str, Found] = {}
    own: dict[str, Found] = {}
    anywhere = {key for command in commands.values() for parameter in settable(command) for key in keys(parameter)}
    for entry in read(path):
        if isinstance(entry.value, tuple):
            if entry.key not in commands:
                raise _unknown(entry.key, entry.origin, commands, "command", [])
            for inner in entry.value:
                _put(own if entry.key == name else {}, inner, commands[entry.key], entry.key)
        elif entry.key in anywhere:
            if parameter := _named(commands[name], entry.key):
                _set(shared, parameter, entry)
        else:
            every = [parameter for command in commands.values() for parameter in settable(command)]
            raise _unknown(entry.key, entry.origin, anywhere | set(commands), "flag of any command", every)
    return shared | own


def _put(found: dict[str, Found], entry: Entry, command: Any, name: str) -> None:
    parameter = _named(command, entry.key)
    if parameter is None:
        words = {key for one in settable(command) for key in keys(one)}
        raise _unknown(entry.key, entry.origin, words, f"flag of llmx {name}", settable(command))
    _set(found, parameter, entry)


def _set(found: dict[str, Found], parameter: Any, entry: Entry) -> None:
    if parameter.name in found:
        raise UsageError(f"{entry.origin}: {entry.key} was set before, by {found[parameter.name].origin}.")
    value = entry.value
    if isinstance(value, tuple) or (isinstance(value, list) and not takes_many(parameter)):
        raise UsageError(f"{entry.origin}: {entry.key} takes one value.")
    found[parameter.name] = Found([value] if isinstance(value, str) and takes_many(parameter) else value, entry.origin)


def _named(command: Any, key: str) -> Any | None:
    return next((parameter for parameter in settable(command) if key in keys(parameter)), None)


def _unknown(key: str, origin: str, words: Any, what: str, parameters: list[Any]) -> UsageError:
    for parameter in parameters:
        if f"--{key}" in parameter.secondary_opts:
            return UsageError(f"{origin}: {key} is no key.", f"Write `{keys(parameter)[0]}: false`.")
    meant = _closest(key, words)
    return UsageError(f"{origin}: {key} is no {what}.", f"Did you mean {meant}?" if meant else None)


CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar=f"{PREFIX}CONFIG",
        is_eager=True,
        callback=_load,
        help="YAML with values for these flags. Each is a variable too: LLMX_PORT for --port of every command, "
        "LLMX_SERVE_PORT for serve's alone. Flags win over variables, variables over the file.",
        rich_help_panel=_PANEL,
    ),
]
PRINT_CONFIG = Annotated[
    bool,
    typer.Option("--print-config", help="Print each value and where it comes from, and stop.", rich_help_panel=_PANEL),
]
