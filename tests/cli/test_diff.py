"""`llmx diff`: exit codes, what is said first, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llmx.cli import app
from tests.tokenizer_samples import byte_level, llama2, save

TINY = ["--device", "cpu", "--threads", "1", "--dtype", "float32"]


def diff(*flags: str) -> Result:
    return CliRunner().invoke(app, ["diff", *flags, *TINY])


def test_the_same_model_twice_is_equal_and_exits_0() -> None:
    result = diff("random:tiny", "--tokens", "3")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("A: random:tiny")
    assert lines[-1] == "A and B agree within 0.0001 on 35 tokens."
    assert "relative error as it grows: embedding 0, layer 0 0, layer 1 0, final norm 0, head 0" in lines


def test_other_settings_of_one_model_differ_within_a_strict_tolerance_and_exit_3() -> None:
    result = diff("random:tiny", "--tokens", "2", "--dtype-b", "bfloat16", "--tolerance", "1e-6")
    assert result.exit_code == 3
    assert "B: random:tiny, dtype bfloat16" in result.stdout
    assert "op embedding: relative error" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: A and B differ: the first op that differs by itself is")
    assert diff("random:tiny", "--tokens", "2", "--dtype-b", "bfloat16").exit_code == 0


def test_the_report_has_what_the_lines_have_and_more() -> None:
    result = diff(
        "random:tiny", "--ids", "1,2,3", "--tokens", "0", "--dtype-b", "bfloat16", "--tolerance", "0", "--json", "-"
    )
    assert result.exit_code == 3
    found: dict[str, Any] = json.loads(result.stdout)
    results = found["results"]
    assert found["command"] == "diff"
    assert results["differs"] is True
    assert results["tokens"] == [1, 2, 3]
    assert [one["place"] for one in results["growth"]] == ["embedding", "layer 0", "layer 1", "final norm", "head"]
    first = results["faults"][0]
    assert (first["layer"], first["op"], first["first_token"], first["input_error"]) == (None, "embedding", 0, 0.0)
    assert {one["kernel"] for one in results["faults"]} >= {"linear", "attention", "rope_and_write", "silu_mul"}
    assert results["crossing"]["op"] == "embedding"
    assert results["says"] in result.stderr


def test_the_kernels_of_a_side_can_be_chosen() -> None:
    assert diff("random:tiny", "--tokens", "1", "--kernels-b", "reference").exit_code == 0
    result = diff("random:tiny", "--kernels-b", "tpu")
    assert result.exit_code == 2
    assert "--kernels tpu is not a backend" in result.stderr


def test_tokenizers_that_part_are_said_first(tmp_path: Path) -> None:
    from llmx.inspect.compare import _tokenizers
    from llmx.tokenizer import load_tokenizer

    one, other = (load_tokenizer(save(made, tmp_path / name)) for name, made in (("a", byte_level()), ("b", llama2())))
    found = _tokenizers(one, other, "the cat")
    assert found is not None
    assert found.position == 0
    assert found.a != found.b
    assert _tokenizers(one, one, "the cat") is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["nowhere/at/all"], "nowhere/at/all"),
        (["random:tiny", "--ids", "1,x"], "--ids must be whole numbers"),
        (["random:tiny", "--ids", "999999"], "--ids must be token ids between 0 and 255"),
        (["random:tiny", "--dtype-b", "int3"], "Of B: --dtype int3 is not built"),
        (["random:tiny", "--kernels-b", "abacus"], "Of B: --kernels abacus is not a backend"),
        (["random:tiny", "--kernels-a", "abacus"], "Of A: --kernels abacus is not a backend"),
        (["random:tiny", "--tokens", "5000"], "--tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_with_exit_code_2(flags: list[str], says: str) -> None:
    result = diff(*flags)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
