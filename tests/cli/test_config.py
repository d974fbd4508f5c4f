"""Flags, variables and files: which wins, what each value's source is, and what is refused. For every command alike."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command
from typer.testing import CliRunner, Result

from llmx.cli import app
from llmx.commands import settings

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
FLAGS = [(name, parameter) for name, command in COMMANDS.items() for parameter in settings.settable(command)]
TYPES = {
    str(c.callback.__name__).replace("_", "-"): inspect.signature(c.callback).parameters
    for c in app.registered_commands
    if c.callback
}
# Read elsewhere, so that no flag may take their names.
OTHERS = settings.READ_ELSEWHERE


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, parameter in FLAGS:
        for name in COMMANDS:
            for variable in settings.variables(name, parameter):
                monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("LLMX_CONFIG", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "llmx.yaml"


def llmx(*arguments: object, **variables: str) -> Result:
    # Wide enough that Typer's error box breaks no path, wherever the test's folder lies.
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "400"} | variables)


def printed(*arguments: object, **variables: str) -> dict[str, tuple[Any, str]]:
    """--print-config's (value, source) by key."""
    result = llmx(*arguments, "--print-config", **variables)
    assert result.exit_code == 0, result.output
    values = yaml.safe_load(result.stdout)
    sources = [line.rpartition("  # ")[2] for line in result.stdout.splitlines() if not line.startswith("#")]
    return dict(zip(values, zip(values.values(), sources, strict=True), strict=True))


def other(command: str, parameter: Any) -> str:
    """A value of the flag's type that is not its default."""
    kind = str(TYPES[command][parameter.name].annotation)
    if getattr(parameter, "is_flag", False):
        return "false" if parameter.default else "true"
    if "int" in kind:
        return "7"
    return "0.25" if "float" in kind else "9:11"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_can_be_set_by_a_variable_and_by_a_file(command: str, file: Path) -> None:
    flags = [p for p in settings.settable(COMMANDS[command]) if not getattr(p, "hide_input", False)]
    texts = {settings.keys(parameter)[0]: other(command, parameter) for parameter in flags}
    want = {
        key: [text] if settings.takes_many(parameter) else text if text == "9:11" else yaml.safe_load(text)
        for (key, text), parameter in zip(texts.items(), flags, strict=True)
    }
    for prefix in ("LLMX_", f"LLMX_{command.upper().replace('-', '_')}_"):
        names = {key: prefix + key.replace("-", "_").upper() for key in texts}
        for key in [key for key in names if names[key].removeprefix("LLMX_") in OTHERS]:
            del names[key]  # something else reads it: only the command's own variable sets that flag
        found = printed(command, **{names[key]: texts[key] for key in names})
        assert {key: found[key] for key in names} == {key: (want[key], f"environment {names[key]}") for key in names}
    lines = {key: (want[key], f"{file}:{number}") for number, key in enumerate(texts, 2)}
    for before, line in (("# a comment", "{}: '{}'"), ("# a comment", "{}: {}"), (f"{command}:", "  {}: '{}'")):
        for dash in "-_":
            file.write_text(
                "\n".join([before, *(line.format(k.replace("-", dash), text) for k, text in texts.items())])
            )
            assert printed(command, "--config", file) == lines
    assert printed(command, LLMX_CONFIG=str(file)) == lines


def test_a_key_is_not_printed() -> None:
    result = llmx("serve", "--print-config", LLMX_API_KEY="sk-secret")
    assert "sk-secret" not in result.output
    shown = next(line for line in result.stdout.splitlines() if "api-key:" in line)
    assert shown.split() == ["#", "api-key:", "set,", "not", "shown", "#", "environment", "LLMX_API_KEY"]
    assert "api-key" not in printed("serve", "--api-key", "sk-secret")
    assert "sk-secret" not in llmx("serve", "--print-config", LLMX_API_KEY='["sk-secret]').output


def test_no_two_flags_share_a_variable_and_none_has_a_name_that_is_read_elsewhere() -> None:
    own = [f"LLMX_{name}_".upper().replace("-", "_") for name in COMMANDS]
    for name, parameter in FLAGS:
        for variable in settings.variables(name, parameter):
            assert variable.removeprefix("LLMX_") not in OTHERS
            shared = f"LLMX_{settings.keys(parameter)[0]}".replace("-", "_").upper()
            # What looks like a command's own variable is no flag that all commands share.
            assert not any(
                shared.startswith(prefix) and _is_flag(shared.removeprefix(prefix), prefix) for prefix in own
            )


def _is_flag(name: str, prefix: str) -> bool:
    command = prefix.removeprefix("LLMX_").removesuffix("_").lower()
    keys = {key for parameter in settings.settable(COMMANDS[command]) for key in settings.keys(parameter)}
    return name.replace("_", "-").lower() in keys


def test_the_flag_wins_over_the_variable_over_the_file_over_the_default(file: Path) -> None:
    file.write_text("port: 3\n")
    layers = {"LLMX_PORT": "2"}
    assert printed("serve", "--port", 1, "--config", file, **layers)["port"] == (1, "command line")
    assert printed("serve", "--config", file, **layers)["port"] == (2, "environment LLMX_PORT")
    assert printed("serve", "--config", file)["port"] == (3, f"{file}:1")
    assert printed("serve")["port"] == (8000, "default")


def test_a_commands_own_value_wins_over_the_shared_one(file: Path) -> None:
    file.write_text("serve:\n  port: 3\nport: 4\ndtype: float16\nbench: {dtype: bfloat16}\n")
    assert printed("serve", "--config", file)["port"] == (3, f"{file}:2")
    assert printed("serve", "--config", file)["dtype"] == ("float16", f"{file}:4")
    assert printed("bench", "--config", file)["dtype"] == ("bfloat16", f"{file}:5")
    both = {"LLMX_PORT": "5", "LLMX_SERVE_PORT": "6"}
    assert printed("serve", "--config", file, **both)["port"] == (6, "environment LLMX_SERVE_PORT")


def test_a_shared_key_is_passed_over_by_a_command_without_that_flag(file: Path) -> None:
    file.write_text("port: 4\ntemperature: 0\n")
    assert "port" not in printed("generate", "--config", file)
    assert printed("generate", "--config", file)["temperature"] == (0.0, f"{file}:2")


def test_aliases_lists_negations_and_nothing(file: Path) -> None:
    file.write_text('gpu_memory_utilization: 0.5\nstop: ["\\n\\n", " a b"]\nmax-model-len: null\nprefix-caching: off\n')
    values = printed("generate", "--config", file)
    assert values["memory-utilization"] == (0.5, f"{file}:1")
    assert values["stop"] == (["\n\n", " a b"], f"{file}:2")
    assert values["max-model-len"] == (None, "default")
    assert printed("serve", "--config", file)["prefix-caching"] == (False, f"{file}:4")
    assert printed("serve", LLMX_PREFIX_CACHING="0")["prefix-caching"][0] is False
    assert printed("serve", "--prefix-caching", LLMX_PREFIX_CACHING="0")["prefix-caching"] == (True, "command line")
    assert printed("generate", LLMX_STOP=" a b")["stop"][0] == [" a b"]
    assert printed("generate", LLMX_STOP='[" a b", "c"]')["stop"][0] == [" a b", "c"]
    assert printed("generate", LLMX_STOP="")["stop"] == ([], "default")
    assert printed("generate", "--stop", "x", "--config", file)["stop"] == (["x"], "command line")


def test_what_is_printed_is_a_file_that_says_the_same(file: Path) -> None:
    before = printed("generate", "-m", "a b.gguf", "--stop", "it's: #1", "--raw", "--seed", 3, LLMX_TOP_K="9")
    result = llmx(
        "generate", "-m", "a b.gguf", "--stop", "it's: #1", "--raw", "--seed", 3, "--print-config", LLMX_TOP_K="9"
    )
    file.write_text(result.stdout)
    after = printed("generate", "--config", file)
    assert {key: value for key, (value, _) in after.items()} == {key: value for key, (value, _) in before.items()}
    assert after["top-k"][1] == f"{file}:{list(after).index('top-k') + 2}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-modle-len: 7", "1: max-modle-len is no flag of any command.\nhint: Did you mean max-model-len?"),
        ("serve: {prot: 7}", "1: prot is no flag of llmx serve.\nhint: Did you mean port?"),
        ("serve: {url: http://x}", "1: url is no flag of llmx serve."),
        ("bench:\n  port: 7", "2: port is no flag of llmx bench."),
        ("sevre: {port: 7}", "1: sevre is no command.\nhint: Did you mean serve?"),
        ("no_prefix_caching: true", "1: no-prefix-caching is no key.\nhint: Write `prefix-caching: false`."),
        ("config: x.yaml", "1: config is no flag"),
        ("port: 7\nport: 8", "2: port is there twice; first at"),
        ("model-len: 7\nmax-model-len: 8", "2: max-model-len was set before, by"),
        ("port: [1, 2]", "1: port takes one value."),
        ("serve: {port: {a: 1}}", "1: port must be a plain value"),
        ("stop: [[a]]", "1: stop must be a list of plain values."),
        ("? [a]\n: b", "1: a key must be a plain word."),
        ("- a\n- b", "holds no `key: value` lines."),
        ("port: 7\n  x: [", "2 is not YAML:"),
        ("port: \x01", "is not YAML"),
        ("a: " + "[" * 2000, "is nested too deeply."),
    ],
)
def test_a_wrong_file_is_one_sentence_and_exit_code_2(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    result = llmx("serve", "--config", file, "--print-config")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith(f"error: {file}")
    assert not result.stdout


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"host: \xe9")
    for name, says in (("none.yaml", "No such file"), ("", "Is a directory"), ("latin.yaml", "is not UTF-8 text")):
        result = llmx("env", "--config", tmp_path / name)
        assert result.exit_code == 2
        assert says in result.stderr


def test_an_empty_file_sets_nothing(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert printed("serve", "--config", file) == printed("serve")


def test_a_wrong_value_is_refused_as_the_flags_is_and_says_where_it_stands(file: Path) -> None:
    file.write_text("repetitions: 0\n")
    for result, source in (
        (llmx("bench", "--config", file), f"{file}:1"),
        (llmx("bench", LLMX_REPETITIONS="0"), "environment LLMX_REPETITIONS"),
        (llmx("bench", "-r", 0), None),
    ):
        assert result.exit_code == 2
        said = " ".join(result.stderr.replace("│", " ").split())
        assert "Invalid value for '" in said
        assert ("(from" in said) == (source is not None)
        assert source is None or source.split("/")[-1] in said


def test_a_value_that_the_command_refuses_says_where_it_stands(file: Path) -> None:
    file.write_text("dtype: int3\n")
    result = llmx("serve", "--config", file)
    assert result.exit_code == 2
    assert "--dtype int3 is not built" in result.stderr
    assert f"--dtype was set by {file}:1." in result.stderr
    assert "was set by" not in llmx("serve", "--dtype", "int3").stderr


def test_a_broken_list_in_a_variable_is_one_sentence() -> None:
    result = llmx("generate", "x", LLMX_STOP="[a, b]")
    assert result.exit_code == 2
    assert "LLMX_STOP begins like a list" in result.stderr


def test_a_variable_that_was_nearly_right_is_told_of_and_no_other_is() -> None:
    result = llmx("serve", "--print-config", LLMX_MAX_MODL_LEN="7", LLMX_SERVE_PROT="1")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "warning: LLMX_MAX_MODL_LEN sets nothing; did you mean LLMX_MAX_MODEL_LEN?",
        "warning: LLMX_SERVE_PROT sets nothing; did you mean LLMX_SERVE_PORT?",
    ]
    quiet = llmx("env", "--print-config", **{f"LLMX_{name}": "" for name in OTHERS}, LLMX_PORT="7")
    assert quiet.stderr == ""


def test_help_needs_no_file_and_no_yaml(file: Path) -> None:
    code = (
        "import sys, llmx.cli\n"
        "try: llmx.cli.app(['serve', '--help'])\n"
        "except SystemExit as end: print(end.code, 'yaml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
    assert llmx("serve", "--help", LLMX_CONFIG=str(file)).exit_code == 0


def test_any_command_of_any_app_is_configurable() -> None:
    got: list[tuple[int, list[str]]] = []

    def work(count: int, names: list[str] = typer.Argument(default=None)) -> None:  # noqa: B008
        got.append((count, names))

    other_app = typer.Typer()
    other_app.command()(settings.configurable(work))
    result = CliRunner().invoke(other_app, [], env={"LLMX_COUNT": "3", "LLMX_WORK_NAMES": '["a", "b"]'})
    assert result.exit_code == 0, result.output
    assert got == [(3, ["a", "b"])]
