"""safetensors files, single or sharded: a checked header, then mapped bytes. Pickled weights are refused.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, the data without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from llmx.errors import UsageError
from llmx.formats.checkpoint import PLAIN, MappedCheckpoint, MappedFile, Region, Stored, by
from llmx.formats.fields import Fields, load_json, parse_json, shown
from llmx.formats.quantization import of_folder
from llmx.formats.quantized import check

if TYPE_CHECKING:
    import torch

HEADER_LIMIT = 16 * 2**20  # bytes: about 120,000 tensors in one file
MAX_DIMS = 8
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def open_safetensors(folder: Path) -> MappedCheckpoint:
    """The weights of a Hugging Face folder: `model.safetensors`, the shards that its index names, or the only file.

    Tensors of quantised linears are compared with what the folder's config says of them.
    """
    checkpoint = MappedCheckpoint("safetensors", read_regions(folder), of_folder(folder))
    check(checkpoint)
    return checkpoint


def read_regions(folder: Path) -> dict[str, Region]:
    """Where each tensor of a folder lies; what quantised linears are made of is not compared."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _read_file(single)
    if index.is_file():
        return _read_shards(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _read_file(files[0])
    if files:
        raise UsageError(
            f"{folder} holds {len(files)} safetensors files and no {index.name} that says what is in each."
        )
    if pickled := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES):
        raise UsageError(
            f"{folder} holds its weights as {pickled[0]}, a pickle, which could run code; llmx reads safetensors.",
            hint="Convert it with safetensors' convert tool, or download the safetensors version of the model.",
        )
    raise UsageError(f"{folder} holds no safetensors file.", hint="Was the download complete?")


def open_shard(path: Path) -> MappedCheckpoint:
    """One safetensors file by itself."""
    return MappedCheckpoint("safetensors", _read_file(path))


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file whole or not at all, on the disk when this returns. The same tensors, the same bytes.

    The largest elements come first, so that each tensor lies on whole elements.
    """
    import torch

    kinds = {getattr(torch, name): kind for kind, (_, name) in PLAIN.items() if hasattr(torch, name)}
    stored = [
        Stored(name, kinds[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    ]
    stream_shard(path, stored, lambda name: (tensors[name],))


def stream_shard(path: Path, tensors: Iterable[Stored], read: Callable[[str], Iterable[torch.Tensor]]) -> None:
    """As `write_shard`, with little in memory: `read` gives each tensor as it is described, in pieces of whole rows."""
    import torch

    order = sorted(tensors, key=lambda stored: (-PLAIN[stored.kind][0], stored.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for stored in order:
        begin, end = end, end + stored.nbytes
        header[stored.name] = {"dtype": stored.kind, "shape": list(stored.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for stored in order:
                written = 0
                for piece in read(stored.name):
                    assert tuple(piece.shape[1:]) == stored.shape[1:], stored.name
                    if piece.numel():
                        written += file.write(piece.detach().contiguous().flatten().view(torch.uint8).numpy().data)
                assert written == stored.nbytes, stored.name
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_shards(folder: Path, index: Path) -> dict[str, Region]:
    placed = load_json(index).section("weight_map")
    regions: dict[str, Region] = {}
    shard_of = {name: placed.text(name) for name in placed.data}
    for shard in dict.fromkeys(shard_of.values()):
        if shard != Path(shard).name or not shard.endswith(".safetensors"):
            raise UsageError(f"{index.name} names the file {shown(shard)}; only safetensors files beside it are read.")
        if not (folder / shard).is_file():
            raise UsageError(f"{folder} lacks {shard}, which {index.name} names.", hint="Was the download complete?")
        for name, region in _read_file(folder / shard).items():
            if name in regions:
                raise UsageError(f"{name!r} is stored twice: in {regions[name].file.path.name} and in {shard}.")
            regions[name] = region
    for name, shard in shard_of.items():
        if name not in regions or regions[name].file.path.name != shard:
            raise UsageError(f"{shard} lacks {shown(name)}, which {index.name} says is in it.")
    return regions


def _read_file(path: Path) -> dict[str, Region]:
    file = MappedFile(path)
    if file.size < 8:
        raise UsageError(f"{path} has {file.size} bytes, too few for a safetensors file.")
    length = int.from_bytes(file.data[:8], "little")
    if length > HEADER_LIMIT:
        raise UsageError(f"{path} says its header has {length:,} bytes; at most {HEADER_LIMIT:,} are read.")
    if 8 + length > file.size:
        raise UsageError(
            f"{path} is cut short: its header should have {length:,} bytes and the file has {file.size:,} in all.",
            hint="Was the download complete?",
        )
    header = parse_json(file.data[8 : 8 + length], f"{path.name}'s header", unique=True)
    regions = {}
    for name in header.data:
        if name != "__metadata__":
            regions[name] = _region(name, header.section(name), file, 8 + length)
    _check_cover(list(regions.values()), file, 8 + length)
    return regions


def _region(name: str, entry: Fields, file: MappedFile, base: int) -> Region:
    """Where a tensor lies, its shape and dtype checked against its bytes."""
    where = f"{file.path.name}: tensor {shown(name)}"
    kind = entry.text("dtype")
    if kind not in PLAIN:
        raise UsageError(f"{where} has dtype {shown(kind)}, which llmx does not read.")
    shape = entry.integers("shape", low=0)
    if len(shape) > MAX_DIMS or prod(max(size, 1) for size in shape) > 2**62:
        raise UsageError(f"{where} has an absurd shape of {len(shape)} dimensions.")
    span = entry.integers("data_offsets", low=0)
    if len(span) != 2 or span[0] > span[1]:
        raise UsageError(f"{where} has data_offsets {shown(list(span))}; they must be a beginning and an end.")
    nbytes = prod(shape) * PLAIN[kind][0] // 8
    if nbytes != span[1] - span[0]:
        raise UsageError(f"{where} is {kind} {by(shape)}: {nbytes:,} bytes, but holds {span[1] - span[0]:,}.")
    if base + span[1] > file.size:
        raise UsageError(
            f"{where} ends at byte {base + span[1]:,} and the file has {file.size:,}.",
            hint="Was the download complete?",
        )
    return Region(Stored(name, kind, shape, nbytes), file, base + span[0])


def _check_cover(regions: list[Region], file: MappedFile, base: int) -> None:
    """The format allows neither overlaps nor gaps nor bytes that belong to no tensor."""
    end = base
    for region in sorted(regions, key=lambda region: (region.offset, region.stored.nbytes)):
        if region.offset != end:
            how = (
                "overlaps the one before it"
                if region.offset < end
                else f"follows a gap of {region.offset - end:,} bytes"
            )
            raise UsageError(f"{file.path.name}: tensor {shown(region.stored.name)} {how}.")
        end += region.stored.nbytes
    if end != file.size:
        raise UsageError(f"{file.path.name} has {file.size:,} bytes, and its header accounts for {end:,}.")
