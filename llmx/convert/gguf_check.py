"""What is written: whether it is numbers, and, before it has its name, whether a reader finds all of it."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmx.convert.arrays import Bytes
from llmx.errors import LlmxError, UsageError
from llmx.formats.checkpoint import Stored, by
from llmx.formats.gguf import open_part
from llmx.formats.gguf_write import NUMBERS, Part

# Where the blocks of a type have float16 scales, in bytes.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ3_S", "IQ1_S"), (0,)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}  # all ones: infinite, or no number


def holds_numbers(kind: str, rows: Bytes) -> bool:
    """Whether rows, as a file of this type has them, hold no infinities and nothing that is no number."""
    if kind == "F32":
        return bool(np.isfinite(rows.view(np.float32)).all())
    if kind in EXPONENT:
        return _finite(rows.view(np.uint16), EXPONENT[kind])
    if kind not in HALVES:
        return True
    blocks = rows.view(np.uint16).reshape(-1, NUMBERS[kind][2] // 2)
    return all(_finite(blocks[:, at // 2], EXPONENT["F16"]) for at in HALVES[kind])


def _finite(halves: NDArray[np.uint16], exponent: int) -> bool:
    return bool((halves & np.uint16(exponent)).max(initial=0) < exponent)


def read_back(written: Path, part: Part, path: Path) -> None:
    """`written` is to become `path`. LlmxError where its names, order, shapes and types are not those of `part`."""
    try:
        found = open_part(written)
    except UsageError as error:
        raise LlmxError(f"{path} does not read back as it was written. {error.message}") from error
    held = [_said(found.stored(name)) for name in found.names()]
    wanted = [_said(Stored(entry.name, entry.kind, entry.shape, entry.nbytes)) for entry in part.entries]
    for one, other in zip_longest(wanted, held, fillvalue="nothing"):
        if one != other:
            raise LlmxError(f"{path} does not read back as it was written: it has {other} where {one} should be.")


def _said(stored: Stored) -> str:
    return f"{stored.name} ({stored.kind} {by(stored.shape)})"
