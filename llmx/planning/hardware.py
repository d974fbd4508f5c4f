"""What the machines can do: a table of accelerators by their data sheets, and rates measured on this one.

Data sheets give peaks. What kernels reach of them is BANDWIDTH_REACHED and PEAK_REACHED, the only guesses here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmx.errors import UsageError

MIB, GB, TERA = 2**20, 1e9, 1e12
BANDWIDTH_REACHED, PEAK_REACHED, LINK_REACHED = 0.8, 0.6, 0.8
LAYER_SECONDS = 30e-6  # about ten launches of 3 microseconds
STEP_SECONDS = 1e-3  # scheduling, sampling and the way back to the host
LINK_LATENCY, NETWORK_LATENCY = 4e-6, 12e-6  # seconds per hop of a collective
PER_NODE = 8


@dataclass(frozen=True)
class Device:
    """One accelerator. memory: bytes that the driver shows; bandwidth: bytes/s; peaks: dense flops/s by arithmetic.

    link: bytes/s in one direction to a neighbour in the machine; network: to another machine, for each device.
    """

    name: str
    memory: int
    bandwidth: float
    bf16: float
    fp8: float
    int8: float
    link: float
    network: float
    link_name: str = "NVLink"


def _sheet(
    name: str,
    mib: int,
    bandwidth: float,
    bf16: float,
    fp8: float,
    int8: float,
    link: float,
    network: float,
    by: str = "NVLink",
) -> Device:
    """In MiB, GB/s, Tflop/s and GB/s. No FP8 units (0): weights are widened, and multiplied in bfloat16."""
    return Device(
        name,
        mib * MIB,
        bandwidth * GB,
        bf16 * TERA,
        (fp8 or bf16) * TERA,
        int8 * TERA,
        link * GB,
        network * GB,
        by,
    )


# NVIDIA's and AMD's data sheets; peaks without sparsity. SXM modules where there are several. Memory as the driver
# shows it. The 4090's are those with float32 accumulation. network: one 200 (A100), 400 or 100 Gbit/s port a device.
DEVICES = {
    device.name.lower(): device
    for device in (
        _sheet("A100-40G", 40960, 1555, 312, 0, 624, 300, 25),
        _sheet("A100-80G", 81920, 2039, 312, 0, 624, 300, 25),
        _sheet("H100", 81559, 3350, 989.4, 1978.9, 1978.9, 450, 50),
        _sheet("H200", 143771, 4800, 989.4, 1978.9, 1978.9, 450, 50),
        _sheet("H800", 81559, 3350, 989.4, 1978.9, 1978.9, 200, 50),
        _sheet("B200", 183359, 8000, 2250, 4500, 4500, 900, 50),
        _sheet("L4", 23034, 300, 121, 242, 242, 32, 12.5, "PCIe 4"),
        _sheet("L40S", 46068, 864, 362, 733, 733, 32, 25, "PCIe 4"),
        _sheet("4090", 24564, 1008, 165.2, 330.3, 660.6, 32, 12.5, "PCIe 4"),
        _sheet("MI300X", 196592, 5300, 1307.4, 2614.9, 2614.9, 448, 50, "Infinity Fabric"),
    )
}
DEVICES |= {"a100": DEVICES["a100-80g"], "rtx4090": DEVICES["4090"], "h100-80g": DEVICES["h100"]}


@dataclass(frozen=True)
class Rates:
    """What one device does, as kernels reach it. Bytes/s, flops/s, seconds.

    rows: products are computed with a multiple of so many. attention_bandwidth: bytes of keys and values for a decode;
    attention_flops: for prefill. elementwise: bytes/s of everything between the products. layer_seconds, step_seconds,
    token_seconds: what a layer, a step and a sampled token cost whatever their sizes. head_bandwidth: of the head's
    matrix, which on a CPU is read at another rate than the small ones of the layers. measured: said in reports.
    """

    bandwidth: float
    head_bandwidth: float
    flops: dict[str, float]
    attention_bandwidth: float
    attention_flops: float
    elementwise: float
    layer_seconds: float
    step_seconds: float
    token_seconds: float
    link: float
    network: float
    rows: int = 1
    measured: bool = False


@dataclass(frozen=True)
class Hardware:
    """`nodes` machines of `per_node` devices. name: as it was asked for.

    held: bytes of a linear's weight in memory, where the engine keeps it in another form; None: as stored. budget:
    tokens of a step.
    """

    name: str
    device: str
    nodes: int
    per_node: int
    memory: int
    rates: Rates
    link_name: str
    held: float | None = None
    budget: int = 8192

    @property
    def count(self) -> int:
        return self.nodes * self.per_node

    def with_devices(self, count: int) -> Hardware:
        """As many devices of this kind, in as many machines as they need."""
        per_node = min(count, max(self.per_node, PER_NODE))
        nodes = -(-count // per_node)
        name = f"{count}x{self.device}" if nodes == 1 else f"{nodes}x{per_node}x{self.device}"
        return Hardware(
            name, self.device, nodes, per_node, self.memory, self.rates, self.link_name, self.held, self.budget
        )


def parse(text: str) -> Hardware:
    """ "H100", "4xA100-80G", "16x8xH800" (machines x devices). "cpu" is measured, and not for here. UsageError."""
    found = re.fullmatch(r"(?:(\d{1,5})x)?(?:(\d{1,3})x)?([A-Za-z0-9][A-Za-z0-9-]*)", text.strip())
    device = DEVICES.get(re.sub(r"(?<=\dg)b$", "", found[3].lower())) if found else None  # 80GB is 80G
    if found is None or device is None:
        known = ", ".join(dict.fromkeys(one.name for one in DEVICES.values()))
        raise UsageError(
            f"--hardware {text[:60]} is not known; there are cpu and {known}.",
            hint="write 4xA100-80G for four in one machine, 16x8xH800 for 16 machines of 8",
        )
    numbers = [int(n) for n in found.group(1, 2) if n is not None]
    if 0 in numbers:
        raise UsageError(f"--hardware {text} is no device at all.")
    nodes, per_node = numbers if len(numbers) == 2 else (1, *numbers) if numbers else (1, 1)
    if len(numbers) == 1 and per_node > PER_NODE:
        if per_node % PER_NODE:
            raise UsageError(
                f"--hardware {text}: {per_node} devices are no whole number of machines with {PER_NODE}.",
                hint=f"say how they are placed, such as 2x{per_node // 2}x{device.name}",
            )
        nodes, per_node = per_node // PER_NODE, PER_NODE
    return Hardware(text, device.name, nodes, per_node, device.memory, sheet_rates(device), device.link_name)


def sheet_rates(device: Device) -> Rates:
    """What kernels reach of a data sheet."""
    bandwidth = device.bandwidth * BANDWIDTH_REACHED
    peaks = {"bf16": device.bf16, "fp8": device.fp8, "int8": device.int8}
    flops = {name: peak * PEAK_REACHED for name, peak in peaks.items()}
    return Rates(
        bandwidth=bandwidth,
        head_bandwidth=bandwidth,
        flops=flops,
        attention_bandwidth=bandwidth,
        attention_flops=flops["bf16"],
        elementwise=bandwidth,
        layer_seconds=LAYER_SECONDS,
        step_seconds=STEP_SECONDS,
        token_seconds=0.0,
        link=device.link * LINK_REACHED,
        network=device.network * LINK_REACHED,
    )


def this_machine(memory: int, rates: Rates, held: float) -> Hardware:
    """This machine's processor, whose rates and free memory somebody has measured."""
    return Hardware("cpu", "cpu", 1, 1, memory, rates, "memory", held=held, budget=512)
