"""Every file of llmx/models against transformers: the same logits and texts, from safetensors and from GGUF.

A family's file holds, for this test:
- `TINY`: keyword arguments for transformers' config class, or a tuple of (architecture, arguments). Each of its
  ARCHITECTURES needs one; a window, an original context, must be shorter than the prompts here (300, in one test 160).
- `QUIRKS`: a dict from the name of each thing that makes the family what it is to what takes it away: a function from
  our Config to another one (`dataclasses.replace`), or, where the quirk lies in weights, a tuple of the ends of tensor
  names ("q_proj.bias"), whose tensors are then made neutral: biases 0, factors of norms 1. One that leaves a TINY as it
  is isn't tried there; each must move some TINY's logits by a hundred times the tolerance wherever it changes it.

And, in tests/tiny_gguf.py, what llama.cpp's converter does to the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_changes
import torch
from tiny_changes import ABSENT, HEAVY, Change
from tiny_gguf import FORMATS, Inexpressible, write_gguf
from tiny_models import (
    GREEDY,
    PROMPT,
    TOLERANCE,
    Said,
    Saved,
    Tiny,
    attention_of,
    build,
    distance,
    every_tiny,
    load,
    logits_of,
    make,
    open_folder,
    open_gguf_file,
    parse,
    prompt_of,
    run,
    save,
    tinies,
)
from torch import Tensor

from llmx.errors import UsageError
from llmx.models import Opened, families

# transformers warns of token ids beyond a tiny vocabulary, of unknown keys and the like, by logging and by warnings
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
each_tiny = pytest.mark.parametrize("tiny", every_tiny(), ids=lambda tiny: tiny.name)
each_family = pytest.mark.parametrize("family", families(), ids=lambda f: f.__name__.rpartition(".")[2])
FILES = [(t, name) for t in every_tiny() for name in FORMATS.get(t.architecture, {})]
WALK = 160  # prompt of the walks, whose forwards are many
AGREE = 3 * TOLERANCE  # in the walks, where a change may make a model that amplifies rounding more
SHOWS = 100 * TOLERANCE
MOVED = {  # fields whose change must have been seen to move the logits, whatever the family
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("tiny")
    saved.cache_clear()


@cache
def saved(tiny: Tiny, root: Path) -> Saved:
    return make(tiny, root / tiny.name)


def check(opened: Opened, of: Saved, *, unused: Sequence[str] = ()) -> Said:
    """Logits of prompt and output, whole and in chunks, and the greedy text."""
    prompt = prompt_of(of.config["vocab_size"])
    model, weights = load(opened, PROMPT + GREEDY)
    assert [n for n in weights.unused() if n not in unused] == [], "tensors of the file that nobody asked for"
    said, chunked = run(model, prompt, outputs=GREEDY), run(model, prompt, outputs=1, budget=37)
    assert max(said.steps) == PROMPT
    assert max(chunked.steps) == 37
    wanted = logits_of(of.model, (prompt + said.output)[:-1])
    # Equal at each step to the likeliest token after the same text: so, by induction, to a naive greedy loop.
    assert wanted[PROMPT - 1 :].argmax(-1).tolist() == list(said.output)
    assert distance(said.logits, wanted) < TOLERANCE
    assert distance(chunked.logits, wanted[:PROMPT]) < TOLERANCE
    return said


@each_family
def test_a_family_says_what_is_to_be_tested(family: ModuleType) -> None:
    tested = {tiny.architecture for tiny in tinies(family)}
    assert tested == set(family.ARCHITECTURES), "each of ARCHITECTURES needs a TINY"
    assert family.QUIRKS, "a family without quirks is another family's"
    formats = {name for tiny in tinies(family) for name in FORMATS.get(tiny.architecture, {})}
    assert set(family.GGUF_ARCHITECTURES) <= formats, "tests/tiny_gguf.py must know how these are written"


def test_no_architecture_is_claimed_by_two_families() -> None:
    for table in ("ARCHITECTURES", "GGUF_ARCHITECTURES"):
        claimed = [name for family in families() for name in getattr(family, table)]
        assert len(set(claimed)) == len(claimed)


@each_tiny
def test_nothing_hides_in_the_tiny_model(tiny: Tiny, root: Path) -> None:
    """The oracle itself: large logits that vary, attention far from uniform and from one-hot, windows that cut."""
    of = saved(tiny, root)
    prompt = prompt_of(of.config["vocab_size"])
    assert logits_of(of.model, prompt).std() >= 2
    for layer in attention_of(of.model, prompt):
        late = layer[:, PROMPT // 2 :]
        seen = (late > 0).sum(-1)
        share = (torch.exp(-(late * late.clamp(min=1e-300).log()).sum(-1)) / seen).mean()
        assert 1.5 / seen.float().mean() < share < 0.5, "the share of the tokens that attention rests on"
    assert all(w is None or w < WALK // 2 for w in of.open().config.windows)


@each_tiny
def test_logits_and_text_are_those_of_transformers(tiny: Tiny, root: Path) -> None:
    of = saved(tiny, root)
    said = check(of.open(), of)
    assert len(set(said.output)) > GREEDY // 5, "a text that repeats itself tests little"


@pytest.mark.parametrize(("tiny", "name"), FILES, ids=[f"{t.name}-{name}" for t, name in FILES])
def test_a_gguf_of_the_same_weights_says_the_same(tiny: Tiny, name: str, root: Path, tmp_path: Path) -> None:
    of, path = saved(tiny, root), tmp_path / "model.gguf"
    try:
        write_gguf(path, tiny.architecture, name, of.config, of.tensors)
    except Inexpressible as reason:
        others = [t for t in every_tiny() if name in FORMATS[t.architecture] and t is not tiny]
        assert any(_expressible(t, name, saved(t, root), tmp_path / t.name) for t in others), f"no TINY fits {name}"
        pytest.skip(str(reason))
    # RoPE factors are read with the config, not as weights.
    check(open_gguf_file(path), of, unused=("rope_factors_long.weight", "rope_factors_short.weight"))


def _expressible(tiny: Tiny, name: str, of: Saved, path: Path) -> bool:
    try:
        write_gguf(path, tiny.architecture, name, of.config, of.tensors)
    except Inexpressible:
        return False
    return True


@dataclass(frozen=True)
class Neutral:
    """A checkpoint in which tensors whose names end in one of `ends` do nothing: zeros, norms that multiply by 1."""

    inner: Any
    ends: tuple[str, ...]
    one: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __contains__(self, name: str) -> bool:
        return name in self.inner

    def hit(self, name: str) -> bool:
        return any(f".{name}".endswith(f".{end}") for end in self.ends)

    def read(self, name: str, slices: Mapping[int, tuple[int, int]] | None = None) -> Tensor:
        tensor = self.inner.read(name, slices or {})
        if not self.hit(name):
            return tensor
        return torch.full_like(tensor, self.one if "norm" in name else 0.0)


def changed(opened: Opened, quirk: Any) -> tuple[Opened, Any] | None:
    """The files and the config without the quirk; None if they are as before."""
    if callable(quirk):
        config = quirk(opened.config)
        return None if config == opened.config else (opened, config)
    assert isinstance(quirk, tuple), "a quirk is a function of the config, or a tuple of ends of tensor names"
    checkpoint = Neutral(opened.checkpoint, quirk, 0.0 if opened.config.unit_offset else 1.0)
    if not any(checkpoint.hit(name) for name in opened.checkpoint.names()):
        return None
    return replace(opened, checkpoint=checkpoint), opened.config


QUIRKS = [(family, quirk) for family in families() for quirk in getattr(family, "QUIRKS", {})]


@pytest.mark.parametrize(("family", "quirk"), QUIRKS, ids=[f"{f.__name__.rpartition('.')[2]}-{q}" for f, q in QUIRKS])
def test_a_quirk_shows(family: ModuleType, quirk: str, root: Path) -> None:
    tried = 0
    for tiny in tinies(family):
        opened = saved(tiny, root).open()
        if (other := changed(opened, family.QUIRKS[quirk])) is None:
            continue
        tried += 1
        prompt = prompt_of(opened.config.vocab, WALK)
        both = (other, (opened, opened.config))
        found, before = (run(load(files, WALK, config)[0], prompt).logits for files, config in both)
        assert torch.isfinite(found).all(), f"{tiny.name}: what is broken shows nothing"
        assert distance(found, before) >= SHOWS, f"{tiny.name}: the logits hardly move"
    assert tried, "it changes none of the family's TINY"


@dataclass
class Walk:
    """What became of each changed field. `before`: transformers' config as it was."""

    before: dict[str, Any]
    moved: set[str] = field(default_factory=set)
    still: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)  # by transformers
    wrong: list[str] = field(default_factory=list)

    def try_change(self, change: Change, of: Saved, folder: Path) -> bool:
        """True when it moved what transformers computes far enough."""
        wanted, like = base(of), of.folder
        try:
            parsed, before = parse(of.tiny.oracle, change.config).to_dict(), self.before
            keys = parsed.keys() | before.keys()
            differs = {key for key in keys if parsed.get(key, ABSENT) != before.get(key, ABSENT)}
            model = of.model
            if differs & of.reads:  # else transformers computes the same
                model = build(of.tiny.oracle, change.config, of.gain)
                wanted = logits_of(model, prompt_of(of.config["vocab_size"], WALK))
        except Exception:  # whatever transformers raises for a config that it can't build or run
            self.rejected.add(change.field)
            return False
        moved = distance(wanted, base(of)) if wanted.shape == base(of).shape else math.inf
        moves = moved > AGREE
        (self.moved if moves else self.still).add(change.field)
        same = {n: p.shape for n, p in model.named_parameters()} == {n: t.shape for n, t in of.tensors.items()}
        save(folder, change.config, model, like if same else None)
        value = "absent" if change.value is ABSENT else repr(change.value)
        if (found := self._judge(change, folder, wanted, moves, parsed, of)) is not None:
            self.wrong.append(f"{change.field} = {value}: {found}")
        return moved > SHOWS

    def _judge(self, change: Change, folder: Path, wanted: Tensor, moves: bool, parsed: Any, of: Saved) -> str | None:
        """What is wrong about what we make of it."""
        try:
            opened = open_folder(folder)
            if (quiet := _quiet(opened.config)) != (theirs := {key: parsed[key] for key in quiet}):
                return f"read as {quiet}, by transformers as {theirs}"
            if not moves and opened.config == of.open().config:
                return None
            model, _ = load(opened, WALK)
        except UsageError as error:
            self.refused.add(change.field)
            if any(word in error.message for word in change.named):
                return None
            return f"refused without its name: {error.message}"
        found = run(model, prompt_of(of.config["vocab_size"], WALK)).logits
        if found.shape == wanted.shape and distance(found, wanted) < AGREE:
            return None
        away = distance(found, wanted) if found.shape == wanted.shape else found.shape
        return f"transformers' logits {'move' if moves else 'stay'}, and ours are {away} away"


def _quiet(config: Any) -> dict[str, Any]:
    """What a change of hardly shows in the logits, or not at this length, by transformers' names."""
    windows = {window for window in config.windows if window}
    found = {"max_position_embeddings": config.max_position, "rms_norm_eps": config.eps}
    return found | ({"sliding_window": windows.pop()} if windows else {})


@cache
def base(of: Saved) -> Tensor:
    return logits_of(of.model, prompt_of(of.config["vocab_size"], WALK))


@each_tiny
def test_what_moves_transformers_moves_us_or_is_refused(tiny: Tiny, root: Path, tmp_path: Path) -> None:
    """Every field of config.json changed in turn, left out, and what other configs have put in."""
    of, count = saved(tiny, root), 0
    walk = Walk(parse(tiny.oracle, of.config).to_dict())
    for tries in [*tiny_changes.changes(of.config), *([c] for c in tiny_changes.rope_kinds(of.config))]:
        for change in tries:
            count += 1
            if walk.try_change(change, of, tmp_path / str(count)):
                break
    rejected = sorted(walk.rejected - walk.moved - walk.still)
    print(f"moved: {sorted(walk.moved)}\nrefused: {sorted(walk.refused)}\ntransformers rejects: {rejected}")
    assert not walk.wrong, "\n".join(walk.wrong)
    assert walk.moved | set(rejected) >= MOVED
    assert any(field.endswith("rope_theta") for field in walk.moved)


@pytest.mark.parametrize("field", sorted(HEAVY))
@each_family
def test_a_size_that_is_missing_is_named(family: ModuleType, field: str, root: Path, tmp_path: Path) -> None:
    """transformers has defaults for them, of some billion weights."""
    of = saved(tinies(family)[0], root)
    config = {key: value for key, value in of.config.items() if key != field}
    with pytest.raises(UsageError, match=field):
        open_folder(save(tmp_path / "model", config, of.model, of.folder))


ORIGINAL = 128
TRAINED = {"original_max_position_embeddings": ORIGINAL}
FACTORS = {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [1 + 0.5 * i for i in range(8)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **TRAINED},
    "yarn without factor": {"rope_type": "yarn", "factor": None, **TRAINED},
    "yarn with all": {
        "rope_type": "yarn", "factor": 4.0, **TRAINED, "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 1.0,
        "mscale_all_dim": 0.5, "truncate": False,
    },
    "yarn with a factor of attention": {"rope_type": "yarn", "factor": 4.0, **TRAINED, "attention_factor": 1.7},
    "longrope": {"rope_type": "longrope", **FACTORS, **TRAINED},
    "longrope with factors": {"rope_type": "longrope", **FACTORS, **TRAINED, "factor": 3.0, "attention_factor": 1.3},
}  # fmt: skip
PHI = {  # what its config lets pass, and its names for longrope
    "default": SCALINGS["default"],
    "longrope": SCALINGS["longrope"],
    "su": {"rope_type": "su", **FACTORS, **TRAINED},
    "yarn": {"rope_type": "yarn", **FACTORS, **TRAINED},
    "partial": {
        "rope_type": "longrope", "partial_rotary_factor": 0.5, **{key: f[:4] for key, f in FACTORS.items()}, **TRAINED,
    },
}  # fmt: skip
KINDS = [("LlamaForCausalLM", k) for k in SCALINGS] + [("Phi3ForCausalLM", k) for k in PHI]


@pytest.mark.parametrize("length", [100, PROMPT])
@pytest.mark.parametrize(("architecture", "kind"), KINDS, ids=[f"{a[:4]}-{k}" for a, k in KINDS])
def test_every_kind_of_rope_in_both_styles_of_config(
    architecture: str, kind: str, length: int, root: Path, tmp_path: Path
) -> None:
    """Contexts shorter and longer than the original one; transformers 5's rope_parameters, and 4's two keys."""
    of = saved(next(t for t in every_tiny() if t.architecture == architecture), root)
    phi = architecture == "Phi3ForCausalLM"
    rope = {"rope_theta": 500.0, **(PHI if phi else SCALINGS)[kind]}
    config = of.config | {"rope_parameters": rope, "max_position_embeddings": 256 if kind == "dynamic" else 512}
    if phi:
        config["original_max_position_embeddings"] = ORIGINAL
    prompt = prompt_of(of.config["vocab_size"], length)
    wanted = logits_of(build(of.tiny.oracle, config, of.gain), prompt)
    if kind != "default" and (kind, length) != ("dynamic", 100):
        assert distance(wanted, logits_of(of.model, prompt)) > SHOWS, "the kind shows"
    old = {k: v for k, v in config.items() if k != "rope_parameters"} | {"rope_theta": 500.0}
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    first = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    for i, style in enumerate((config, old | {"rope_scaling": scaling}, old | {"rope_scaling": first})):
        opened = open_folder(save(tmp_path / str(i), style, None, of.folder))
        assert distance(run(load(opened, length)[0], prompt).logits, wanted) < TOLERANCE, style
    if kind in ("linear", "llama3", "yarn") and not phi:
        path = tmp_path / "model.gguf"
        write_gguf(path, architecture, "llama", config, of.tensors)
        assert distance(run(load(open_gguf_file(path), length)[0], prompt).logits, wanted) < TOLERANCE, "GGUF"


def test_gemma_3_in_the_style_of_transformers_4(root: Path, tmp_path: Path) -> None:
    """Two bases and a pattern where transformers 5 has rope_parameters and layer_types; only full layers are scaled."""
    of = saved(next(t for t in every_tiny() if t.architecture == "Gemma3ForCausalLM"), root)
    config = {k: v for k, v in of.config.items() if k not in ("rope_parameters", "layer_types")}
    config |= {"rope_theta": 3000.0, "rope_local_base_freq": 77.0, "sliding_window_pattern": 3}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    prompt = prompt_of(of.config["vocab_size"], WALK)
    wanted = logits_of(build(of.tiny.oracle, config, of.gain), prompt)
    assert distance(wanted, base(of)) > SHOWS
    opened = open_folder(save(tmp_path / "model", config, None, of.folder))
    assert distance(run(load(opened, WALK)[0], prompt).logits, wanted) < TOLERANCE


@pytest.mark.parametrize("key", ["attention.temperature_scale", "rope.scaling.yarn_log_multiplier"])
def test_what_a_mistral3_gguf_may_hold_beyond_mistral_is_refused(key: str, root: Path, tmp_path: Path) -> None:
    of = saved(next(t for t in every_tiny() if t.options.get("sliding_window", 1) is None), root)
    more = {f"mistral3.{key}": 0.1}
    write_gguf(tmp_path / "model.gguf", "MistralForCausalLM", "mistral3", of.config, of.tensors, more)
    with pytest.raises(UsageError, match=key):
        open_gguf_file(tmp_path / "model.gguf")
