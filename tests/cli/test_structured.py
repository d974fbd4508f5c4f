"""`llmx generate --json-schema`, `--regex`, `--grammar`: what they ask for, and what is refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmx import grammar as g
from llmx.commands.options import text_grammar
from llmx.errors import UsageError

pytest.importorskip("llguidance", reason="structured output needs llguidance")


def test_each_flag_is_its_grammar(tmp_path: Path) -> None:
    schema, gbnf = tmp_path / "schema.json", tmp_path / "a.gbnf"
    schema.write_text('{"type": "boolean"}')
    gbnf.write_text('root ::= "a" [0-9]')
    assert text_grammar(None, None, None) is None
    assert text_grammar(str(schema), None, None) == g.from_json_schema({"type": "boolean"})
    assert text_grammar(' {"type": "boolean"}', None, None) == g.from_json_schema({"type": "boolean"})
    assert text_grammar(None, "a+", None) == g.regex("a+")
    assert text_grammar(None, None, gbnf) == g.from_gbnf(gbnf.read_text())


@pytest.mark.parametrize(
    ("schema", "regex", "grammar", "said"),
    [
        ("{}", "a", None, "--json-schema and --regex exclude"),
        ("/nowhere.json", None, None, "/nowhere.json can't be read"),
        ("{", None, None, "no JSON"),
        ('{"type": "strin"}', None, None, "strin"),
        (None, "(", None, "unclosed group"),
        (None, None, Path("/nowhere.gbnf"), "/nowhere.gbnf can't be read"),
    ],
)
def test_a_wrong_one_is_refused(schema: str | None, regex: str | None, grammar: Path | None, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        text_grammar(schema, regex, grammar)
    assert said in caught.value.message
