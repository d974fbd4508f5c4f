"""A GGUF file as a Hugging Face folder that transformers loads: the same logits, the same token ids."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmx.convert.arrays import in_steps
from llmx.convert.folder import check_taken, put_in_place, short_name
from llmx.convert.gguf_about import card_of, generation_of
from llmx.convert.plain import FLOATS, Plain, bytes_of, finite, plain_dtype
from llmx.convert.texts import LIKE_ANY, tokenizer_texts, write_texts
from llmx.convert.threads import InOrder
from llmx.errors import LlmxError, UsageError
from llmx.formats.fields import Fields
from llmx.formats.hub import Located
from llmx.formats.safetensors import stream_shard
from llmx.layers.rope import RopeConfig, frequencies
from llmx.models import Names, Opened, family_of, open_model
from llmx.report import write_whole
from llmx.tokenizer import Tokenizer, load_tokenizer

Say = Callable[[str], None]
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
SHARD = 5 * 10**9  # bytes of tensors in a file
# What wrote files like these: transformers takes tokenizers of older versions for wrongly converted ones.
TRANSFORMERS = "5.0.0"
SAME = 1e-5  # relative, of frequencies: GGUF has float32


@dataclass(frozen=True)
class Files:
    """A GGUF model as transformers has it. opened: its tensors and config. texts: the other files, by their names."""

    opened: Opened
    texts: dict[str, str]
    left_out: Sequence[str]


def as_hf(located: Located, dtype: torch.dtype | None) -> Files:
    """Nothing is written, and no tensor read. dtype: None for the file's own, or bfloat16 if its weights are packed.

    UsageError for what transformers' model of the architecture hasn't.
    """
    opened = open_model(located)
    assert located.kind == "gguf"
    dtype = dtype or plain_dtype(opened) or torch.bfloat16
    tokenizer = load_tokenizer(located) if "tokenizer.ggml.model" in opened.metadata else None
    try:
        config = opened.config.to_hf(_biases(opened))
    except UsageError as error:
        raise UsageError(f"{located.path.name} can't be written for transformers. {error.message}") from None
    config |= _ids(opened, tokenizer)
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), "transformers_version": TRANSFORMERS}
    read = family_of(config["architectures"][0], "config.json")
    parsed = read.Config.from_hf(Fields(config, "config.json"))
    _compare(opened.config, parsed)
    plain = Plain(opened, dtype, offset=parsed.unit_offset and not opened.config.unit_offset)
    name = config["architectures"][0]
    made = Opened(read, name, parsed, plain, Names({}, {}), Fields(config, "config.json"), config["torch_dtype"])
    sampling = generation_of(opened.metadata.data)
    texts = {"config.json": _json(config), "generation_config.json": _json(_generation(config, tokenizer) | sampling)}
    texts |= {} if tokenizer is None else tokenizer_texts(tokenizer, parsed.max_position)
    if (card := card_of(opened.metadata.data)) is not None:
        texts["README.md"] = card
    return Files(made, texts, plain.left_out)


@dataclass(frozen=True)
class Converted:
    """path: the folder, or that a dry run would make."""

    path: Path
    results: dict[str, Any]


def convert(
    located: Located, out: Path | None, say: Say, *, dtype: torch.dtype | None = None, shard: int = SHARD,
    force: bool = False, dry_run: bool = False,
) -> Converted:  # fmt: skip
    """Write the folder, whole or not at all. shard: bytes of tensors in a file, unless one tensor has more.

    UsageError before anything is written if it can't be done.
    """
    began = time.monotonic()
    if located.kind != "gguf":
        raise UsageError(f"{located.name} is a Hugging Face folder already; convert-hf takes GGUF files.")
    path = out or Path(f"{short_name(located)}-hf")
    files = as_hf(located, dtype)
    shards = _shards(files.opened.checkpoint, shard)
    total = bytes_of(files.opened)
    facts = {
        "path": str(path), "architecture": files.opened.architecture, "dtype": files.opened.stored_dtype,
        "tensors": sum(map(len, shards.values())), "bytes": total, "source_bytes": bytes_of(open_model(located)),
        "files": sorted([*shards, *files.texts]), "left_out": list(files.left_out),
        "tokenizer": "tokenizer.json" in files.texts,
    }  # fmt: skip
    check_taken(path, force)
    if not facts["tokenizer"]:
        say(f"{located.path.name} has no tokenizer, so none is written.")
    if files.left_out:
        say(f"Note: {len(files.left_out)} tensors have no place in transformers' model: {files.left_out[0]}...")
    if dry_run:
        return Converted(path, facts)
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True)
        _write(files, shards, folder, say)
        checked = _check(located, files, folder, say)
        put_in_place(folder, path, force)
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Converted(path, facts | checked | {"seconds": time.monotonic() - began})


def _write(files: Files, shards: Mapping[str, Sequence[str]], folder: Path, say: Say) -> None:
    write_texts(files.texts, folder)
    checkpoint = files.opened.checkpoint
    with InOrder(torch.get_num_threads()) as threads:
        for n, (name, tensors) in enumerate(shards.items(), 1):
            stored = [checkpoint.stored(tensor) for tensor in tensors]
            say(f"writing {name} ({n} of {len(shards)}), {sum(s.nbytes for s in stored) / 1e6:,.0f} MB")
            stream_shard(folder / name, stored, lambda tensor: threads.map(_pieces(checkpoint, tensor)))
    if len(shards) > 1:
        placed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": bytes_of(files.opened)}, "weight_map": dict(sorted(placed.items()))}
        write_whole(folder / "model.safetensors.index.json", _json(index))


def _pieces(checkpoint: Any, name: str) -> Iterator[Callable[[], torch.Tensor]]:
    """A tensor's rows, some at a time. LlmxError for what is no number."""

    def read(rows: tuple[int, int]) -> torch.Tensor:
        made: torch.Tensor = checkpoint.read(name, {0: rows})
        if not finite(made):
            raise LlmxError(f"{name} holds infinities or what is no number; such weights can't be converted.")
        return made

    for rows in in_steps(checkpoint.stored(name).shape, checkpoint.together(name)):
        yield partial(read, rows)
    checkpoint.release(name)


def _shards(checkpoint: Any, most: int) -> dict[str, list[str]]:
    """File name -> tensors, in the checkpoint's order."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in checkpoint.names():
        nbytes = checkpoint.stored(name).nbytes
        if parts[-1] and size + nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{n:05d}-of-{len(parts):05d}.safetensors": names for n, names in enumerate(parts, 1)}


def _check(located: Located, files: Files, folder: Path, say: Say) -> dict[str, Any]:
    """Reopen what was written: every tensor; the tokenizers of file and folder on texts that are hard to cut.

    Returns how many texts gave other ids. LlmxError for what is our own fault or the disk's.
    """
    say("checking what was written")
    found, wanted = open_model(Located("hf", folder, folder.name)).checkpoint, files.opened.checkpoint
    other = [name for name in wanted.names() if name not in found or found.stored(name) != wanted.stored(name)]
    if other or len(found.names()) != len(wanted.names()):
        what = other[0] if other else f"{len(found.names())} tensors for {len(wanted.names())}"
        raise LlmxError(f"The folder for {located.name} does not read back as it was written: {what}. This is a bug.")
    if not (folder / "tokenizer.json").is_file():
        return {}
    ours, written = load_tokenizer(located), load_tokenizer(folder)
    same = (ours.bos_id, ours.eos_ids, ours.add_bos) == (written.bos_id, written.eos_ids, written.add_bos)
    if not same:
        raise LlmxError(f"The tokenizer that was written for {located.name} reads otherwise. This is a bug.")
    texts = [*LIKE_ANY, *(ours.decode([i]) for i in range(0, ours.vocab_size, max(1, ours.vocab_size // 1000)))]
    other = [text for text in texts if ours.encode(text) != written.encode(text)]
    if other:
        say(f"warning: {len(other)} of {len(texts)} texts give other ids than in the file, for one {other[0]!r:.60}")
    return {"texts_checked": len(texts), "texts_with_other_ids": len(other)}


def _biases(opened: Opened) -> frozenset[str]:
    """The linears, by the last component of their names, that have biases."""
    named = {target.removeprefix("blk.{i}."): pattern for pattern, target in opened.names.table.items()}
    found = {name.split(".", 2)[2].removesuffix(".bias") for name in opened.checkpoint.names()
             if name.startswith("blk.") and name.endswith(".bias")}  # fmt: skip
    return frozenset(named.get(part, part).rsplit(".", 1)[-1] for part in found)


def _ids(opened: Opened, tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """bos_token_id and the like; null where there is none, for transformers has defaults of its own."""
    named = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {f"{key}_token_id": opened.metadata.integer(f"tokenizer.ggml.{name}_token_id", None)
             for key, name in named.items()}  # fmt: skip
    if tokenizer is not None:
        found["bos_token_id"] = tokenizer.bos_id
        if found["eos_token_id"] is None:
            found["eos_token_id"] = min(tokenizer.eos_ids, default=None)
    return found


def _generation(config: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """All tokens that end a text, the config's first."""
    first = config["eos_token_id"]
    ends = [] if tokenizer is None else sorted(tokenizer.eos_ids, key=lambda i: (i != first, i))
    named = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    named["eos_token_id"] = ends if len(ends) > 1 else first
    return {**{key: i for key, i in named.items() if i is not None}, "transformers_version": TRANSFORMERS}


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _compare(ours: Any, read: Any) -> None:
    """Whether the config that was written says what the file says; else it is our own fault."""
    apart = {"rope", "ropes", "windows", "unit_offset"}
    differ = [f.name for f in fields(ours) if f.name not in apart and not _like(getattr(ours, f.name),
              getattr(read, f.name), ours, f.name)]  # fmt: skip
    layers = range(ours.layers)
    if any(ours.windows[i % len(ours.windows)] != read.windows[i % len(read.windows)] for i in layers):
        differ.append("windows")
    lengths = (min(ours.max_position, 512), ours.max_position)
    if not all(_turns_alike(ours.rope_of(i), read.rope_of(i), length) for i in layers for length in lengths):
        differ.append("rope")
    if differ:
        raise LlmxError(f"config.json can't say what the file does of {', '.join(differ)}. This is a bug.")


def _like(ours: Any, read: Any, config: Any, name: str) -> bool:
    if name == "scale":
        usual = config.head_dim**-0.5
        ours, read = usual if ours is None else ours, usual if read is None else read
    if isinstance(ours, float):
        return bool(abs(ours - read) <= SAME * max(abs(ours), 1e-30))
    return bool(ours == read)


def _turns_alike(ours: RopeConfig | None, read: RopeConfig | None, length: int) -> bool:
    if ours is None or read is None:
        return ours is read
    wanted, found = frequencies(ours, length), frequencies(read, length)
    if abs(ours.magnitude - read.magnitude) > SAME or wanted.shape != found.shape:
        return False
    return bool(torch.allclose(found, wanted, rtol=SAME, atol=0))
