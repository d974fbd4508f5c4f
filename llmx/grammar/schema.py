"""JSON Schemas as trees: where their subschemas are, and what can be said in another way that the library has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")  # name -> schema
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
# What the library knows; any other is a note to the reader, as draft 2020-12 has it.
FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    *("idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "json-pointer", "relative-json-pointer"),
    *("uri-template", "regex", "unknown"),
)
KINDS = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
MOST_BRANCHES = 64  # of a oneOf that are compared with one another

Path = tuple[str | int, ...]


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The schemas right inside a schema, definitions first, with the path to each."""
    for key in NAMED:
        if isinstance(inner := schema.get(key), dict):
            yield from (((key, name), one) for name, one in inner.items() if isinstance(one, dict))
    for key in (*LISTED, "items"):
        if isinstance(inner := schema.get(key), list):
            yield from (((key, at), one) for at, one in enumerate(inner) if isinstance(one, dict))
    for key in SINGLE:
        if isinstance(inner := schema.get(key), dict):
            yield (key,), inner


def settled(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, changed in place where the library is stricter than the specification.

    A oneOf whose branches can't hold at once is an anyOf; a format that nobody knows is a note.
    """
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(known := node.get("format"), str) and known not in FORMATS:
            del node["format"]
        branches = node.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in node and _disjoint(branches, schema):
            node["anyOf"] = node.pop("oneOf")
        left += [inner for _, inner in subschemas(node)]
    return schema


def _disjoint(branches: list[Any], root: dict[str, Any]) -> bool:
    """Whether no value can fit two of them: by their types, or by a property that each requires and fixes."""
    if len(branches) > MOST_BRANCHES:
        return False
    found = [_followed(branch, root) for branch in branches]
    return all(_apart(a, b, root) for at, a in enumerate(found) for b in found[:at])


def _followed(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """What a schema that is but a reference to a definition refers to."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def _apart(a: dict[str, Any], b: dict[str, Any], root: dict[str, Any]) -> bool:
    kinds = _kinds(a), _kinds(b)
    if kinds[0] is not None and kinds[1] is not None and not kinds[0] & kinds[1]:
        return True
    values = _values(a), _values(b)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    if kinds != ({"object"}, {"object"}):
        return False
    shared = _required(a) & _required(b)
    fixed = ((_property(a, name, root), _property(b, name, root)) for name in sorted(shared))
    return any(one is not None and two is not None and not one & two for one, two in fixed)


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _property(schema: dict[str, Any], name: str, root: dict[str, Any]) -> set[tuple[str, Any]] | None:
    properties = schema.get("properties")
    return _values(_followed(properties.get(name), root)) if isinstance(properties, dict) else None


def _values(schema: dict[str, Any]) -> set[tuple[str, Any]] | None:
    """The plain values that a schema allows, each with its kind; None where these can't be listed."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or any(isinstance(value, list | dict) for value in listed):
        return None
    return {("null" if value is None else KINDS[type(value)], value) for value in listed}


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    given = schema.get("type")
    if given is None:
        values = _values(schema)
        return None if values is None else {kind for kind, _ in values}
    named = given if isinstance(given, list) else [given]
    return {"number" if name == "integer" else name for name in named if isinstance(name, str)}
