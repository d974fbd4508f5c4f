"""bf16 in Triton's interpreter. There a bf16 value is a uint16 in numpy: tl.dot and arithmetic on it give garbage
without a word, and float32 -> bf16 truncates. Here tl.dot and the casts are right, and arithmetic on bf16 raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(value: np.ndarray) -> np.ndarray:
    """Nearest, ties to even, as the hardware does."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)


def patch() -> None:
    builder = interpreter.InterpreterBuilder
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op
    fp_to_fp = builder.create_fp_to_fp

    def as_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(to_float32(handle.data), tl.float32)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        src = as_float32(src)
        if dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        return interpreter.TensorHandle(to_bfloat16(src.data), tl.bfloat16)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return dot(self, as_float32(a), as_float32(b), d, input_precision, max_num_imprecise_acc)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar == tl.bfloat16 and op not in (np.equal, np.not_equal):
            raise TypeError("arithmetic on bf16: write .to(tl.float32) first, the interpreter cannot do it")
        return binary(self, lhs, rhs, op)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    builder.create_dot, builder.binary_op = create_dot, binary_op
