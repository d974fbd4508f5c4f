"""What a text must look like: JSON Schema, regular expression, choice, Lark or GBNF, as one kind of text.

That text is `SamplingParams.grammar`: a grammar of llguidance, either Lark or its JSON form. Nothing is compiled in
this process: `validate` and `from_gbnf` let another one try, which may crash or never end.
"""

from __future__ import annotations

from llmx.grammar.check import from_gbnf, from_grammar, validate
from llmx.grammar.forms import choice, from_json_schema, from_lark, json_object, regex, schema_text

__all__ = [
    "choice",
    "from_gbnf",
    "from_grammar",
    "from_json_schema",
    "from_lark",
    "json_object",
    "regex",
    "schema_text",
    "validate",
]
