"""Planted faults are found by name, and only they; errors and tensors against numbers computed apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from llmx.config import EngineConfig
from llmx.errors import UsageError
from llmx.formats.hub import Located
from llmx.inspect.compare import Difference, compare, named
from llmx.inspect.probe import row_errors
from llmx.inspect.show import lines
from llmx.inspect.side import Side
from llmx.inspect.tensors import compared
from llmx.kernels import reference
from llmx.models import families, open_model
from tests.tiny_gguf import write_gguf
from tests.tiny_models import build, every_tiny, make, save, tinies

IDS = tuple(range(3, 40))
LAYERS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of nine layers."""
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 512}
    made = transformers.LlamaForCausalLM.config_class(**config)
    described = json.loads(made.to_json_string(use_diff=False)) | {"architectures": ["LlamaForCausalLM"]}
    model = build(transformers.LlamaForCausalLM, described)
    return save(tmp_path_factory.mktemp("inspect") / "model", described, model)


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
    """A copy whose config and tensors `change` may alter."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").unlink()
    safetensors.torch.save_file(tensors, target / "model.safetensors")
    return target


def side(path: Path | str, **options: Any) -> Side:
    kernels = options.pop("kernels", None)
    return Side(EngineConfig(str(path), device="cpu", threads=1, **({"dtype": "float32"} | options)), kernels)


def found(a: Side, b: Side, tokens: int = 4, tolerance: float | None = None) -> Difference:
    return compare(a, b, prompt="", ids=IDS, tokens=tokens, tolerance=tolerance, say=lambda line: None)


def test_a_model_is_equal_to_itself(folder: Path) -> None:
    same = found(side(folder), side(folder))
    assert not same.differs
    assert [place for place, _ in same.growth] == [
        "embedding",
        *(f"layer {i}" for i in range(LAYERS)),
        "final norm",
        "head",
    ]
    assert all(error == 0 for _, error in same.growth)
    assert same.sentence().startswith("A and B agree within 0.0001 on 41 tokens")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("self_attn.q_proj", "q_proj"),
        ("self_attn.k_proj", "k_proj"),
        ("self_attn.v_proj", "v_proj"),
        ("self_attn.o_proj", "o_proj"),
        ("mlp.gate_proj", "gate_proj"),
        ("mlp.up_proj", "up_proj"),
        ("mlp.down_proj", "down_proj"),
    ],
)
def test_one_weight_changed_in_layer_7_is_found(folder: Path, tmp_path: Path, name: str, part: str) -> None:
    stored = f"model.layers.7.{name}.weight"

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[stored][5, 11] += 1.0

    one = found(side(folder), side(changed(folder, tmp_path / "b", change)))
    assert [named(error) for error in one.faults] == [f"layer 7: {part}"]
    (tensor,) = one.tensors
    assert (tensor.a, tensor.b, tensor.count, tensor.at) == (stored, stored, 1, (5, 11))
    assert tensor.now - tensor.was == pytest.approx(1.0)
    growth = dict(one.growth)
    assert all(growth[f"layer {i}"] == 0 for i in range(7))
    assert growth["layer 7"] > 1e-4
    assert one.crossing is not None
    assert named(one.crossing) == f"layer 7: {part}"
    assert any(line.startswith(f"op layer 7: {part}: relative error") for line in lines(one))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.7.input_layernorm.weight", "layer 7: input_layernorm"),
        ("model.layers.7.post_attention_layernorm.weight", "layer 7: pre_mlp_norm"),
        ("model.norm.weight", "final norm"),
        ("lm_head.weight", "head"),
        ("model.embed_tokens.weight", "embedding"),
    ],
)
def test_a_changed_vector_or_end_is_found(folder: Path, tmp_path: Path, name: str, place: str) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] *= 1.01

    one = found(side(folder), side(changed(folder, tmp_path / "b", change)))
    assert [named(error) for error in one.faults] == [place]
    assert [tensor.a for tensor in one.tensors] == [name]
    assert one.tensors[0].relative == pytest.approx(0.01, rel=1e-3)


def test_two_faults_are_both_found(folder: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for i in (2, 7):
            tensors[f"model.layers.{i}.mlp.up_proj.weight"][0] += 1.0

    one = found(side(folder), side(changed(folder, tmp_path / "b", change)))
    assert [named(error) for error in one.faults] == ["layer 2: up_proj", "layer 7: up_proj"]


def test_a_wrong_rope_base_is_found_as_rope_and_as_a_setting(folder: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["rope_parameters"]["rope_theta"] *= 2

    one = found(side(folder), side(changed(folder, tmp_path / "b", change)))
    assert [named(error) for error in one.faults] == [f"layer {i}: rope" for i in range(LAYERS)]
    assert one.faults[0].first_token(one.tolerance) == 1  # position 0 does not turn
    assert one.config == [("rope.theta", "10000.0", "20000.0")]
    assert one.tensors == []


@pytest.mark.parametrize(
    ("op", "place"),
    [
        ("silu_mul", "activation"),
        ("attention", "attention"),
        ("rope_and_write", "rope"),
        ("add_rms_norm", "pre_mlp_norm"),
        ("rms_norm", "input_layernorm"),
    ],
)
def test_one_swapped_kernel_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch, op: str, place: str) -> None:
    """B's kernel is A's with every result one per cent too large."""
    from llmx.inspect import side as sides

    build_engine = sides.build_engine
    module, function = reference.KERNELS[op].split(":")
    owner = __import__(f"llmx.kernels.reference.{module}", fromlist=[function])
    right = getattr(owner, function)

    def wrong(*args: Any, **options: Any) -> Any:
        given = right(*args, **options)
        return tuple(one * 1.01 for one in given) if isinstance(given, tuple) else given * 1.01

    def swapped(config: EngineConfig) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if config.kv_cache_dtype == "float32":  # B's mark
                patch.setattr(owner, function, wrong)
            return build_engine(config)

    monkeypatch.setattr(sides, "build_engine", swapped)
    a, b = side(folder, kernels="reference"), side(folder, kernels="reference", kv_cache_dtype="float32")
    one = found(a, b)
    expected = [f"layer {i}: {place}" for i in range(LAYERS)] + (["final norm"] if op == "rms_norm" else [])
    assert [named(error) for error in one.faults] == expected
    assert all(error.worst() == pytest.approx(0.01, rel=1e-3) for error in one.faults)
    assert any("kernel" in line and op in line for line in lines(one))


def test_another_scale_of_what_a_layer_adds_is_found_between_the_ops(tmp_path: Path) -> None:
    tiny = next(tiny for tiny in every_tiny() if tiny.architecture == "GraniteForCausalLM")
    original = make(tiny, tmp_path / "a").folder

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["residual_multiplier"] = config.get("residual_multiplier", 1.0) * 2

    one = found(side(original), side(changed(original, tmp_path / "b", change)))
    assert {error.place.name for error in one.faults} >= {"residual sum"}
    assert {error.part for error in one.faults} <= {"residual sum", "pre_mlp_norm"}


def test_the_first_token_that_differs_is_found(folder: Path, tmp_path: Path) -> None:
    """B's head prefers another token wherever A's best was the one that A drew third."""
    a = side(folder)
    drawn = found(a, a, tokens=6).ids[len(IDS) :]
    third = next(i for i in range(6) if drawn[i] not in drawn[:i] and i >= 1)

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        head = tensors["lm_head.weight"]
        head[[drawn[third], 159]] = head[[159, drawn[third]]]

    one = found(a, side(changed(folder, tmp_path / "b", change)), tokens=6)
    assert one.token is not None
    assert (one.token.index, one.token.position) == (third, len(IDS) + third)
    assert (one.token.a_id, one.token.b_id) == (drawn[third], 159)
    assert [named(error) for error in one.faults] == ["head"]


def test_settings_that_round_are_equal_within_what_they_round(folder: Path) -> None:
    one = found(side(folder), side(folder, dtype="bfloat16"))
    assert one.tolerance == 0.02
    assert not one.faults
    strict = found(side(folder), side(folder, dtype="bfloat16"), tolerance=1e-5)
    assert strict.differs
    assert named(strict.faults[0]) == "embedding"


def test_a_folder_is_compared_with_its_gguf(folder: Path, tmp_path: Path) -> None:
    """Rows that the format permutes are put back; names are those of each file."""
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    write_gguf(tmp_path / "same.gguf", "LlamaForCausalLM", "llama", config, tensors)
    same = found(side(folder), side(tmp_path / "same.gguf"))
    assert not same.differs
    assert same.tensors == []
    tensors["model.layers.7.self_attn.q_proj.weight"][20, 3] += 1.0
    write_gguf(tmp_path / "other.gguf", "LlamaForCausalLM", "llama", config, tensors)
    other = found(side(folder), side(tmp_path / "other.gguf"))
    (tensor,) = other.tensors
    assert (tensor.a, tensor.b) == ("model.layers.7.self_attn.q_proj.weight", "blk.7.attn_q.weight")
    assert tensor.at == (20, 3)
    assert [named(error) for error in other.faults] == ["layer 7: q_proj"]


@pytest.mark.parametrize("family", families(), ids=lambda family: family.__name__.rpartition(".")[2])
def test_every_family_can_be_probed(family: Any, tmp_path: Path) -> None:
    path = make(tinies(family)[0], tmp_path / "a").folder
    same = found(side(path), side(path))
    assert not same.differs
    opened = open_model(Located("hf", path, str(path)))
    assert list(compared(opened, opened)) == []


def test_models_of_other_sizes_have_nothing_to_compare(folder: Path) -> None:
    one = found(side(folder), side("random:tiny"))
    assert one.differs
    assert one.sentence() == "A and B differ: layers is 9 in A and 2 in B."


def test_relative_errors_are_those_of_rows() -> None:
    a = torch.tensor([[3.0, 4.0], [1.0, 0.0], [torch.inf, 1.0], [0.0, 0.0]])
    b = torch.tensor([[3.0, 4.5], [1.0, 0.0], [torch.inf, 1.0], [0.0, 0.0]])
    assert row_errors(a, b).tolist() == pytest.approx([0.1, 0, 0, 0])
    b[2, 0] = torch.nan
    b[1, 1] = torch.inf
    assert row_errors(a, b)[1] == torch.inf
    assert row_errors(a, b)[2] == 0  # neither is finite


def test_what_cannot_be_given_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="has no tokenizer"):
        compare(side(folder), side(folder), prompt="hello", ids=None, tokens=1, tolerance=None, say=print)
    with pytest.raises(UsageError, match="between 0 and 159"):
        compare(side(folder), side(folder), prompt="", ids=[160], tokens=1, tolerance=None, say=print)
    with pytest.raises(UsageError, match="--kernels tpu is not a backend"):
        side(folder, kernels="tpu")
