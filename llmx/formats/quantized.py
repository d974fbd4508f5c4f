"""The tensors of quantised linears, compared with each other and with what the config says, before torch is imported.

Every message names the tensor at fault. Linears that are stored plainly are left alone: a config may leave some out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from llmx.errors import UsageError
from llmx.formats.checkpoint import MappedCheckpoint, Stored, by
from llmx.formats.quantization import Rule

FLOATS = ("F32", "F16", "BF16")
EIGHT = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8")
SCALES = ("weight_scale", "weight_scale_inv")

Linear = dict[str, Stored]  # by the last component of their names


def check(checkpoint: MappedCheckpoint) -> None:
    """UsageError where the tensors of a linear do not fit together, or not what `checkpoint.quantization` says."""
    for _, error in faults(checkpoint):
        raise error


def faults(checkpoint: MappedCheckpoint) -> Iterator[tuple[str, UsageError]]:
    """Each linear that `check` would refuse, by name, and why."""
    for module, linear in by_module(checkpoint).items():
        if (found := sign(linear)) is not None:
            try:
                _check_linear(checkpoint, module, linear, found)
            except UsageError as error:
                yield module, error


def by_module(checkpoint: MappedCheckpoint) -> dict[str, Linear]:
    """The stored tensors by what comes before the last point of their names."""
    groups: dict[str, Linear] = {}
    for name in checkpoint.names():
        module, _, suffix = name.rpartition(".")
        groups.setdefault(module, {})[suffix] = checkpoint.stored(name)
    return groups


def sign(linear: Mapping[str, Stored]) -> Stored | None:
    """The tensor that shows that a linear is quantised."""
    for suffix in ("qweight", "weight_packed"):
        if suffix in linear:
            return linear[suffix]
    weight = linear.get("weight")
    quantised = weight is not None and (weight.kind in EIGHT or any(scale in linear for scale in SCALES))
    return weight if quantised else None


def _check_linear(checkpoint: MappedCheckpoint, module: str, linear: Linear, shown: Stored) -> None:
    quantization = checkpoint.quantization
    if quantization is None:
        if len(linear) == 1:  # nothing that a scheme needs is there: who asks for it will hear what it is
            return
        raise UsageError(
            f"{shown.name} is stored as {shown.kind}, quantised, but no quantization_config says how.",
            hint="config.json has it, or in old GPTQ models quantize_config.json",
        )
    rule = quantization.rule(module)
    suffix = shown.name.rpartition(".")[2]
    found = "int8" if shown.kind == "I8" else "fp8" if suffix == "weight" else "packed"
    fits = rule is not None and (rule.format in ("awq", "gptq") if suffix == "qweight" else rule.format == found)
    if rule is None or not fits:
        says = "leaves this linear out" if rule is None else f"says {rule.format}"
        raise UsageError(f"{shown.name} is stored as {shown.kind}, but quantization_config {says}.")
    CHECKS[rule.format](checkpoint, linear, rule, module)


def _stored(linear: Linear, module: str, suffix: str, dims: int, kinds: tuple[str, ...]) -> Stored:
    """A tensor that must be there, with so many axes and of one of these kinds."""
    if suffix not in linear:
        there = ", ".join(sorted(linear))
        raise UsageError(f"{module}.{suffix} is missing; of this quantised linear there are {there}.")
    stored = linear[suffix]
    if stored.kind not in kinds or len(stored.shape) != dims:
        raise UsageError(
            f"{stored.name} is stored as {stored.kind} {by(stored.shape)}; it must be {' or '.join(kinds)}, "
            f"with {dims} {'axis' if dims == 1 else 'axes'}."
        )
    return stored


def _shaped(stored: Stored, shape: tuple[int, ...], why: str) -> None:
    if stored.shape != shape:
        raise UsageError(f"{stored.name} is stored as {by(stored.shape)}, but {why} make it {by(shape)}.")


def _groups(stored: Stored, n_in: int, groups: int, rule: Rule, whole: bool = False) -> None:
    """`stored` has `groups` scales for each output. `whole`: the last one may not be of fewer inputs."""
    size = rule.group or n_in
    if whole and size and n_in % size:
        raise UsageError(f"{stored.name}: {n_in} inputs are not whole groups of {size}, which this format needs.")
    if not rule.varies and groups != -(-n_in // max(1, size)):
        raise UsageError(
            f"{stored.name} has {groups} scales for {n_in} inputs, but quantization_config says groups of {size}."
        )
    if groups < 1 or groups > n_in:
        raise UsageError(f"{stored.name} has {groups} scales for {n_in} inputs.")


def _check_awq(checkpoint: MappedCheckpoint, linear: Linear, rule: Rule, module: str) -> None:
    codes = _stored(linear, module, "qweight", 2, ("I32",))
    scales = _stored(linear, module, "scales", 2, FLOATS)
    zeros = _stored(linear, module, "qzeros", 2, ("I32",))
    n_in, words = codes.shape
    groups, n_out = scales.shape
    if n_out != 8 * words:
        raise UsageError(
            f"{codes.name} is stored as {by(codes.shape)} and {scales.name} as {by(scales.shape)}: AWQ stores a word "
            f"for each 8 of the scales' {n_out} outputs."
        )
    _groups(scales, n_in, groups, rule, whole=True)
    _shaped(zeros, (groups, words), "the scales")


def _check_gptq(checkpoint: MappedCheckpoint, linear: Linear, rule: Rule, module: str) -> None:
    codes = _stored(linear, module, "qweight", 2, ("I32",))
    scales = _stored(linear, module, "scales", 2, FLOATS)
    zeros = _stored(linear, module, "qzeros", 2, ("I32",))
    groups, n_out = scales.shape
    bits = zeros.shape[1] * 32 // max(1, n_out)
    if bits not in (2, 3, 4, 8) or zeros.shape != (groups, n_out * bits / 32):
        raise UsageError(
            f"{zeros.name} is stored as {by(zeros.shape)}, which are not the zero points of {by(scales.shape)} scales."
        )
    if bits != rule.bits and not rule.varies:
        raise UsageError(f"{zeros.name} has numbers of {bits} bits, but quantization_config says {rule.bits}.")
    n_in, rest = divmod(codes.shape[0] * 32, bits)
    if rest or codes.shape[1] != n_out:
        raise UsageError(
            f"{codes.name} is stored as {by(codes.shape)}, which is no words of {bits} bits for {n_out} outputs."
        )
    if "g_idx" not in linear:
        return _groups(scales, n_in, groups, rule)
    _groups(scales, n_in, groups, rule)
    _check_index(checkpoint, _stored(linear, module, "g_idx", 1, ("I32",)), n_in, groups)


def _check_index(checkpoint: MappedCheckpoint, index: Stored, n_in: int, groups: int) -> None:
    """The group of each input."""
    _shaped(index, (n_in,), "the weights")
    values = whole_numbers(checkpoint, index)
    if values and (min(values) < 0 or max(values) >= groups):
        raise UsageError(f"{index.name} names groups {min(values)} to {max(values)}; there are {groups}.")


def whole_numbers(checkpoint: MappedCheckpoint, stored: Stored) -> memoryview | tuple[int, ...]:
    """Of an I32 or I64 tensor, in its order."""
    region = checkpoint.region(stored.name)
    data = memoryview(region.file.data)[region.offset : region.offset + stored.nbytes]
    return data.cast("i" if stored.kind == "I32" else "q") if stored.nbytes else ()


def _check_packed(checkpoint: MappedCheckpoint, linear: Linear, rule: Rule, module: str) -> None:
    codes = _stored(linear, module, "weight_packed", 2, ("I32",))
    scales = _stored(linear, module, "weight_scale", 2, FLOATS)
    shape = _stored(linear, module, "weight_shape", 1, ("I64", "I32"))
    _shaped(shape, (2,), "outputs and inputs")
    n_out, n_in = whole_numbers(checkpoint, shape)
    words, groups = codes.shape[1], scales.shape[1]
    dense, apart = -(-n_in * rule.bits // 32), -(-n_in // (32 // rule.bits))
    wanted = f"{by((n_out, n_in))} weights of {rule.bits} bits"
    if codes.shape[0] != n_out or words not in (dense, apart):
        raise UsageError(f"{codes.name} is stored as {by(codes.shape)}, which are not {wanted}.")
    if (rule.group is None or n_in % rule.group) and (n_in * rule.bits % 32 or words != dense):
        raise UsageError(f"{codes.name}: {wanted}, whose rows end inside a word, can't be read.")
    if scales.shape[0] != n_out:
        raise UsageError(f"{scales.name} is stored as {by(scales.shape)}; there are {n_out} outputs.")
    _groups(scales, n_in, groups, rule)
    if not rule.symmetric or "weight_zero_point" in linear:
        zeros = _stored(linear, module, "weight_zero_point", 2, ("I32",))
        if zeros.shape not in [(-(-n_out * rule.bits // 32), groups), (-(-n_out // (32 // rule.bits)), groups)]:
            raise UsageError(
                f"{zeros.name} is stored as {by(zeros.shape)}, which is not {by((n_out, groups))} zero points."
            )
    if "weight_g_idx" in linear:
        _check_index(checkpoint, _stored(linear, module, "weight_g_idx", 1, ("I32",)), n_in, groups)


def _check_eight(checkpoint: MappedCheckpoint, linear: Linear, rule: Rule, module: str) -> None:
    """FP8 and INT8: one number a byte, and scales of some shape."""
    kind = "F8_E4M3" if rule.format == "fp8" else "I8"
    weight = _stored(linear, module, "weight", 2, (kind,))
    suffix = next((name for name in SCALES if name in linear), SCALES[0])
    if suffix not in linear:
        _stored(linear, module, suffix, 2, FLOATS)  # says that it is missing
    scales = linear[suffix]
    n_out, n_in = weight.shape
    allowed: list[tuple[int, ...]] = [(), (1,), (1, 1), (n_out,), (n_out, 1)]
    if rule.block is not None:
        allowed = [(-(-n_out // rule.block[0]), -(-n_in // rule.block[1]))]
    elif rule.group is not None:
        allowed = [(n_out, -(-n_in // rule.group))]
    if scales.shape not in allowed or scales.kind not in (*FLOATS, "F8_E8M0"):
        raise UsageError(
            f"{scales.name} is stored as {scales.kind} {by(scales.shape)}, but for {by(weight.shape)} weights "
            f"quantization_config makes it {' or '.join(map(by, allowed))}."
        )
    if rule.format == "int8" and (not rule.symmetric or "weight_zero_point" in linear):
        zeros = _stored(linear, module, "weight_zero_point", len(scales.shape), ("I8",))
        _shaped(zeros, scales.shape, "the scales")


CHECKS: Mapping[str, Callable[[MappedCheckpoint, Linear, Rule, str], None]] = {
    "awq": _check_awq,
    "gptq": _check_gptq,
    "packed": _check_packed,
    "int8": _check_eight,
    "fp8": _check_eight,
}
