"""What fits, what is fastest of it, and what to change where nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from llmx.errors import UsageError
from llmx.planning.anatomy import Anatomy
from llmx.planning.hardware import Hardware
from llmx.planning.roofline import Speed, predict
from llmx.planning.sizes import Layout, Load, Memory, layouts, memory
from llmx.planning.storage import KV_SCALES, QUANTS

SMALLER = ("fp8", "awq", "q4_k_m")  # schemes that are tried where a model doesn't fit, finest first
RESERVE = 0.05  # of the memory: the engine keeps it for what is not counted (engine.build.ACTIVATION_SHARE)
MOST_DEVICES = 4096


@dataclass(frozen=True)
class Choice:
    """One way to spread the model, what it takes and, if it fits, how fast it is."""

    layout: Layout
    memory: Memory
    speed: Speed | None


@dataclass(frozen=True)
class Change:
    """Something that would help. saves: bytes of the fullest device; fits: whether it is enough alone."""

    text: str
    saves: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """choices: those that fit come first, the fastest first of all; then the others, the nearest to fitting first."""

    anatomy: Anatomy
    hardware: Hardware
    load: Load
    choices: tuple[Choice, ...]
    changes: tuple[Change, ...]

    @property
    def best(self) -> Choice | None:
        return self.choices[0] if self.choices and self.choices[0].memory.fits else None


def usable(hardware: Hardware, utilization: float) -> int:
    """Bytes of a device that weights, keys and values, and activations may take: as the engine counts."""
    return int(hardware.memory * (utilization - RESERVE))


def make(anatomy: Anatomy, hardware: Hardware, load: Load, utilization: float = 0.9) -> Plan:
    """UsageError for a context that the model was not made for."""
    if load.context > anatomy.max_position:
        raise UsageError(
            f"--context {load.context} is more than the {anatomy.max_position} positions that the model was made for.",
            hint=f"ask for at most {anatomy.max_position}",
        )
    if load.input_len + load.output_len > load.context:
        raise UsageError(
            f"--input-len {load.input_len} and --output-len {load.output_len} are more than --context {load.context}."
        )
    room = usable(hardware, utilization)
    choices = [_choice(anatomy, layout, hardware, load, room) for layout in layouts(anatomy, hardware)]
    choices.sort(key=lambda c: (-c.speed.throughput, str(c.layout)) if c.speed else (0.0, f"{c.memory.needed:030d}"))
    changes: tuple[Change, ...] = ()
    if not choices[0].memory.fits:
        changes = tuple(_changes(anatomy, hardware, load, room))
    return Plan(anatomy, hardware, load, tuple(choices), changes)


def _choice(anatomy: Anatomy, layout: Layout, hardware: Hardware, load: Load, room: int) -> Choice:
    needs = memory(anatomy, layout, hardware, load, room)
    return Choice(layout, needs, predict(anatomy, layout, hardware, load) if needs.fits else None)


def _least(anatomy: Anatomy, hardware: Hardware, load: Load, room: int) -> Memory:
    """Of all layouts, the one that needs the least of its fullest device."""
    return min(
        (memory(anatomy, one, hardware, load, room) for one in layouts(anatomy, hardware)), key=lambda m: m.needed
    )


def _changes(anatomy: Anatomy, hardware: Hardware, load: Load, room: int) -> Iterator[Change]:
    now = _least(anatomy, hardware, load, room).needed

    def change(text: str, then: Memory) -> Change:
        return Change(text, now - then.needed, then.fits)

    if hardware.held is None:
        for name in SMALLER:
            then = _least(anatomy.quantised(QUANTS[name]), hardware, load, room)
            if then.needed < now:
                yield change(f"store the weights in {name} (--quant {name})", then)
    for name, size, scales in (("bfloat16", 2, 0), ("int8", 1, KV_SCALES)):
        if size < load.kv_bytes:
            then = _least(anatomy, hardware, replace(load, kv_bytes=size, kv_scales=scales), room)
            yield change(f"store keys and values in {name} (--kv-dtype {name})", then)
    alone = list(_fewer(anatomy, hardware, load, room, now))
    yield from alone
    if not any(one.fits for one in alone):
        yield from _together(anatomy, hardware, load, room, now)
    yield _more(anatomy, hardware, load, room, now)


def _fewer(anatomy: Anatomy, hardware: Hardware, load: Load, room: int, now: int) -> Iterator[Change]:
    """The largest context, and the largest concurrency, that fits with all else as it is."""

    def shorter(context: int) -> Load:
        input_len = min(load.input_len, max(1, context - load.output_len))
        return replace(load, context=context, input_len=input_len, output_len=max(1, min(load.output_len, context - 1)))

    changes: tuple[tuple[str, int, Callable[[int], Load]], ...] = (
        ("--context", load.context, shorter),
        ("--concurrency", load.concurrency, lambda n: replace(load, concurrency=n)),
    )
    for flag, most, of in changes:
        low = _largest(most, lambda n, of=of: _least(anatomy, hardware, of(n), room).fits)  # type: ignore[misc]
        then = _least(anatomy, hardware, of(max(low, 1)), room)
        if low:
            yield Change(f"lower {flag} from {most} to at most {low}", now - then.needed, True)
        elif then.needed < now:
            yield Change(f"lower {flag} from {most}: not even 1 fits with all else as it is", now - then.needed, False)


def _together(anatomy: Anatomy, hardware: Hardware, load: Load, room: int, now: int) -> Iterator[Change]:
    """Four-bit weights and 8-bit keys and values, with as many requests as then fit."""
    if hardware.held is not None:
        return
    smaller = anatomy.quantised(QUANTS["awq"])
    if load.kv_bytes > 1:
        load = replace(load, kv_bytes=1, kv_scales=KV_SCALES)
    most = _largest(
        load.concurrency,
        lambda n: _least(smaller, hardware, replace(load, concurrency=n), room).fits,
    )
    if most:
        then = _least(smaller, hardware, replace(load, concurrency=most), room)
        text = f"--quant awq and --kv-dtype int8 and --concurrency {most} together"
        yield Change(text, now - then.needed, True)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits; 0 if 1 does not."""
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        if fits(middle):
            low = middle
        else:
            most = middle - 1
    return low


def _more(anatomy: Anatomy, hardware: Hardware, load: Load, room: int, now: int) -> Change:
    if hardware.device == "cpu":
        short = now - room
        return Change(f"a machine with {short / 2**30:.1f} GiB more free memory", short, True)
    count = hardware.count
    while count < MOST_DEVICES:
        count *= 2
        larger = hardware.with_devices(count)
        then = _least(anatomy, larger, load, room)
        if then.fits:
            return Change(
                f"{count} devices instead of {hardware.count} (--hardware {larger.name})", now - then.needed, True
            )
    return Change(f"devices with more memory than the {hardware.device}", 0, False)
