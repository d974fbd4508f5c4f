"""The process that tries a grammar, within limits on its stack, memory and time: one question on stdin, one answer."""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from llmx.grammar.schema import Path, subschemas

STACK_BYTES = 1 << 20  # an eighth of what the engine's threads have, so that what passes here can't overflow there
MORE_BYTES = 256 << 20  # of memory, over what the library itself takes
PROCESSOR_SECONDS = 3
STEPS = 24  # characters that are tried
LONGEST = 240  # characters of an error
LOCATE_SECONDS = 0.5
BYTES = 256
MOST_IDS, MOST_NAMES = 2**20, 1024  # of special tokens that a grammar may name
OVERLAP = "oneOf is only supported where its branches can't overlap"
NO_LIBRARY = "This server has no structured output: the package llguidance is not installed."


def answer(question: dict[str, str]) -> dict[str, Any]:
    """{"grammar"}, or {"error", "hint"} with one sentence."""
    try:
        from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark
    except ImportError:
        return {"error": NO_LIBRARY, "hint": "pip install 'llguidance>=1.9,<2'"}
    _limit_memory()
    grammar = question["text"]
    if question["form"] != "check":
        try:
            convert = gbnf_to_lark if question["form"] == "gbnf" else any_to_lark
            grammar = convert(grammar)
        except RecursionError:
            return {"error": "The grammar is nested too deeply."}
        except Exception as error:
            return {"error": f"The grammar is not valid: {_short(str(error) or 'it ends too early')}."}
    return _tried(grammar)


def _tried(grammar: str) -> dict[str, Any]:
    schema = _schema(grammar)
    try:
        check = _checker(grammar)
        said = check(grammar)
    except MemoryError:
        return {"error": "The grammar is too complex to compile."}
    if not said:
        return {"grammar": grammar}
    if schema is None:
        return {"error": f"The grammar is not valid: {_short(said)}."}
    path = _locate(schema, lambda one: check(json.dumps({"grammars": [{"json_schema": one}]})), said)
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")
    if said.startswith("oneOf constraints"):
        return {"error": f"{_prefix(where)}{OVERLAP}.", "hint": "use anyOf"}
    return {"error": f"{_prefix(where)}{_short(said)}."}


def _prefix(where: str) -> str:
    return f"The JSON schema can't be used: {where[:LONGEST]}: " if where else "The JSON schema can't be used: "


def _specials(grammar: str) -> list[bytes]:
    """As many special tokens as a grammar names, by name or by number: which there are, only the engine knows."""
    named = sorted(set(re.findall(r"<[^<>\[\]\s]{1,100}>", grammar)))[:MOST_NAMES]
    numbers = [int(n) for inside in re.findall(r"<\[([^\]]*)\]>", grammar) for n in re.findall(r"\d{1,8}", inside)]
    highest = min(max(numbers, default=0), MOST_IDS)
    return [name.encode() for name in named] + [b"<|%d|>" % n for n in range(BYTES + len(named), highest + 1)]


def _checker(grammar: str) -> Callable[[str], str]:
    """grammar -> what is wrong with it, perhaps after some characters; empty if nothing is.

    The vocabulary stands for that of any model: all bytes, the special tokens that `grammar` names, and an end.
    """
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    from llmx.grammar.limits import limits

    specials = _specials(grammar)
    end = BYTES + len(specials)

    class Bytes:
        eos_token_id = end
        bos_token_id = None
        tokens = [*(bytes([byte]) for byte in range(BYTES)), *specials, b"<end>"]  # noqa: RUF012
        special_token_ids = list(range(BYTES, end + 1))  # noqa: RUF012

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text if isinstance(text, bytes) else text.encode())

    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))

    def check(grammar: str) -> str:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        luck = random.Random(0)
        for _ in range(STEPS):
            if matcher.is_error() or matcher.is_stopped():
                break
            mask = int.from_bytes(matcher.compute_bitmask()[: BYTES // 8], "little")
            allowed = [byte for byte in range(BYTES) if mask >> byte & 1]
            if not allowed or not matcher.consume_token(luck.choice(allowed)):
                break
        return str(matcher.get_error()) if matcher.is_error() else ""

    return check


def _schema(grammar: str) -> dict[str, Any] | None:
    """The schema, if the grammar is one."""
    try:
        found = json.loads(grammar)["grammars"][0]["json_schema"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _locate(schema: dict[str, Any], check: Callable[[dict[str, Any]], str], said: str) -> Path:
    """The innermost subschema that is refused with the same words."""
    path: Path = ()
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    first, node = _first(said), schema
    deadline = time.monotonic() + LOCATE_SECONDS
    while True:
        for step, inner in subschemas(node):
            if time.monotonic() > deadline:
                return path
            if _first(check({**shared, **inner})) == first:
                path, node = (*path, *step), inner
                shared = {} if step[0] in ("$defs", "definitions") and not _refers(inner) else shared
                break
        else:
            return path


def _refers(schema: dict[str, Any]) -> bool:
    return "$ref" in json.dumps(schema)


def _first(said: str) -> str:
    return said.partition("\n")[0]


def _short(said: str) -> str:
    """One line of what the library says: where, and what; without the excerpts of the input that it draws."""
    lines = [line for line in said.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    carets = [line for line in lines if set(line.strip()) == {"^"}]
    if reasons:  # of a regular expression; four spaces stand before what is drawn
        at = f" at character {carets[0].index('^') - 3}" if carets else ""
        return f"the regular expression is not supported: {reasons[0]}{at}"
    text = re.sub(r"\s+", " ", lines[0] if lines else "no reason was given")
    text = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", text)
    return text[:LONGEST].rstrip(" .") + ("…" if len(text) > LONGEST else "")


def _limit_memory() -> None:
    """After the library is there: how much address space a process takes differs from machine to machine."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        most = pages * resource.getpagesize() + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))


if __name__ == "__main__":
    _limit_time()
    print(json.dumps(answer(json.loads(sys.stdin.read()))))
