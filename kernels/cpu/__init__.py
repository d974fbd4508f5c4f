"""C++ kernels, several instruction sets in one library; absent when llmx was installed without a compiler."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

from llmx.errors import UsageError

KERNELS: dict[str, str] = {
    "philox_uniform": "random:philox_uniform",
    "draw": "sample:draw",
    "draw_rule": "sample:Rule",
    "redraw": "sample:Redraw",
    **{op: f"linear:{op}" for op in ("linear_packed", "new_packed", "pack_codes", "pack_numbers", "unpack_linear")},
    "pack_blocks": "pack:pack_blocks",
    **{op: f"quantize:{op}" for op in ("quantize_blocks", "widen_halves")},
    **{op: f"grids:{op}" for op in ("can_group", "round_groups", "search_groups", "gptq_sweep")},
    **{op: f"attention:{op}" for op in ("plan_attention", "attention")},
    **{op: f"rows:{op}" for op in ("rms_norm", "add_rms_norm", "norm_heads", "rope_and_write")},
    **{op: f"rows:{op}" for op in ("silu_mul", "gelu_mul", "gelu_tanh_mul", "add_scaled", "take_rows", "join_columns")},
    "to_float32": "convert:wide",
    **{op: f"stored:{op}" for op in ("look_up", "can_look_up")},
    "recorder": "recording:Recorder",
}


@cache
def native() -> ModuleType | None:
    """The compiled library, switched to what LLMX_ISA asks for; None when this install has none."""
    try:
        from llmx.kernels.cpu import _native
    except ImportError:
        return None
    if (isa := os.environ.get("LLMX_ISA")) and isa != _native.active():
        if isa not in _native.isas():
            raise UsageError(
                f"LLMX_ISA={isa}: this processor or build has no such kernels.",
                hint=f"Unset it, or use one of: {', '.join(_native.isas())}.",
            )
        _native.use(isa)
    return _native


def available() -> bool:
    return native() is not None


def describe() -> str:
    """One line for `llmx env` and the reports."""
    if (found := native()) is None:
        return "none (installed without a C++ compiler); the torch reference serves"
    return f"{found.active()} (of {', '.join(found.isas())})"
