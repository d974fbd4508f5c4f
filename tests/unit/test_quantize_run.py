"""Whole models through the quantizer: against transformers, against interruption, and against a planted fault."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from quantizing import LLAMA, TINIES, begin, effective, effective_in, loss, texts_of, tree, whole
from tiny_models import Saved, Tiny, distance, load, logits_of, make, open_folder, prompt_of
from tiny_models import run as run_model
from torch import Tensor

from llmx.errors import LlmxError, UsageError
from llmx.formats.hub import Located
from llmx.formats.safetensors import open_safetensors, write_shard
from llmx.quantize import output
from llmx.quantize.driver import open_source
from llmx.quantize.options import choose, group_for
from llmx.quantize.source import build, linears
from llmx.quantize.states import States, Stats


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            made[name] = make(TINIES[name], tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("tiny", TINIES.values(), ids=TINIES.keys())
def test_folded_scales_leave_every_familys_outputs_as_they_are(
    tiny: Tiny, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """With 8 bits nothing but rounding is lost; scales that were folded wrongly would lose much."""
    source = saved(tiny.name)
    options = choose("awq", form="compressed-tensors", bits=8)
    run = whole(source.folder, tmp_path / "out", options)
    hows = [layer["how"] for note in run.notes for layer in note["layers"]]
    assert any("scales" in how and "no scales" not in how for how in hows)
    assert loss(run, tmp_path / "out", source) < 0.08


@pytest.mark.parametrize("method", ["gptq", "awq", "int8", "fp8"])
def test_no_linear_is_worse_than_round_to_nearest_and_the_grids_are_better(
    method: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    run = whole(saved(LLAMA).folder, tmp_path / "out", choose(method))
    layers = [layer for note in run.notes for layer in note["layers"]]
    assert len(layers) == 21
    assert not any(layer["worse"] or layer["fell_back"] for layer in layers)
    error, nearest = (sum(layer[key] for layer in layers) for key in ("error", "nearest"))
    assert error < {"gptq": 0.7, "awq": 0.9, "int8": 1.0, "fp8": 1.01}[method] * nearest


@pytest.mark.parametrize(
    ("method", "more", "group", "bound"),
    [
        ("gptq", {}, 32, 0.8),
        ("gptq", {"bits": 8}, 32, 0.08),
        ("gptq", {"bits": 8, "symmetric": False}, 32, 0.08),
        ("gptq", {"bits": 8, "form": "compressed-tensors"}, 32, 0.08),
        ("awq", {}, 32, 0.8),
        ("int8", {}, None, 0.1),
        ("fp8", {}, None, 0.3),
        ("fp8", {"fp8_mode": "static"}, None, 0.3),
        ("fp8", {"fp8_mode": "block"}, None, 0.3),
    ],
    ids=str,
)
def test_what_is_written_is_the_model(
    method: str, more: dict[str, Any], group: int | None, bound: float, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    source = saved(LLAMA)
    out = tmp_path / "out"
    run = whole(source.folder, out, choose(method, **more), group=group)
    assert loss(run, out, source) < bound
    prompt = prompt_of(source.config["vocab_size"], 80)
    model, _ = load(open_folder(out), 100)
    said = run_model(model, prompt).logits
    with effective_in(run, out, source):
        assert distance(said, logits_of(source.model, prompt)) < 0.01


def test_hidden_states_of_ragged_texts_are_the_models(saved: Callable[[str], Saved]) -> None:
    for name in (LLAMA, "Gemma3-1", "Phi3-0"):
        source = saved(name)
        texts = texts_of(source.config["vocab_size"])
        model, weights = build(source.open(), 64)
        with torch.inference_mode():
            states = States(model, texts)
            for index, block in enumerate(model.layers):
                for lazy in linears(block):
                    lazy.load(weights.read)
                states.run(model, index, keep=True)
            hidden = model.norm(torch.cat(states.hidden))
            embedding = source.tensors.get("lm_head.weight", source.tensors["model.embed_tokens.weight"])
            logits = hidden @ embedding.T
        wanted = torch.cat([logits_of(source.model, text) for text in sorted(texts, key=len, reverse=True)])
        cap = source.config.get("final_logit_softcapping")
        assert distance(logits if not cap else torch.tanh(logits / cap) * cap, wanted) < 1e-3


def test_stats_are_sums_over_all_inputs() -> None:
    x = torch.randn(700, 1100, generator=torch.Generator().manual_seed(0))
    stats = Stats(1100, hessian=True)
    for part in x.split(300):
        stats.see(part)
    assert stats.hessian is not None
    torch.testing.assert_close(stats.hessian.square(0, 1100), x.T @ x, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(stats.mean, x.abs().mean(0))
    assert torch.equal(stats.most, x.abs().amax(0))
    few = Stats(1100, hessian=False)
    for part in x.split(300):
        few.see(part)
    assert torch.equal(few.sample, x[:512])


class Cut(Exception):
    """The process is gone."""


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_run_that_is_cut_off_anywhere_goes_on_to_the_same_bytes(
    method: str, saved: Callable[[str], Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = saved(LLAMA).folder, choose(method)
    whole(folder, tmp_path / "wanted", options)
    wanted = tree(tmp_path / "wanted")
    out, writes = tmp_path / "out", 0
    for fatal in range(1, 40):
        count = 0

        def counted(real: Callable[..., Any], fatal: int = fatal) -> Callable[..., Any]:
            def write(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == fatal:
                    raise Cut
                return real(*args, **kwargs)

            return write

        with monkeypatch.context() as patch:
            for name in ("write_shard", "write_whole", "_copy"):
                patch.setattr(output, name, counted(getattr(output, name)))
            try:
                whole(folder, out, options, force=True)
            except Cut:
                pass
            else:
                writes = fatal
                break
        notes = len(list(out.with_name("out.partial").glob(".unfinished/0000[0-2].json")))
        again = whole(folder, out, options, resume=fatal > 1, force=fatal == 1)
        assert again.resumed == notes
        assert tree(out) == wanted
        shutil.rmtree(out)
    assert writes > 8  # each of the shards, notes and files was once the one that was cut off


def test_a_run_that_is_cut_off_between_its_last_two_renamings_does_no_block_again(
    saved: Callable[[str], Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options, out = saved(LLAMA).folder, choose("gptq"), tmp_path / "out"
    whole(folder, tmp_path / "wanted", options)
    renames = 0

    def cut(self: Path, target: Path) -> Path:
        nonlocal renames
        if target == out:
            renames += 1
            raise Cut
        return real(self, target)

    real = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut)
        with pytest.raises(Cut):
            whole(folder, out, options)
    assert renames == 1
    assert not out.exists()
    again = whole(folder, out, options, resume=True)
    assert again.resumed == 3
    assert tree(out) == tree(tmp_path / "wanted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "wanted"]


def test_a_process_that_is_killed_is_resumed_without_doing_its_blocks_again(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    folder = saved(LLAMA).folder
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "import quantizing as t\n"
        "from llmx.quantize.options import choose\n"
        "t.torch.set_num_threads(1)\n"
        "run = t.begin(Path(sys.argv[2]), Path(sys.argv[3]), choose('gptq'), resume=sys.argv[4] == 'resume')\n"
        "run.quantize(); run.finish(); print(run.resumed)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}

    def start(out: Path, how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(Path(__file__).parent.parent), str(folder), str(out), how]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    first = start(tmp_path / "wanted", "new")
    first.communicate()
    assert first.returncode == 0
    cut = start(tmp_path / "out", "new")
    note = tmp_path / "out.partial" / ".unfinished" / "00000.json"
    while not note.exists() and cut.poll() is None:
        time.sleep(0.001)
    cut.send_signal(signal.SIGKILL)
    cut.communicate()
    if not (tmp_path / "out").exists():  # else it was faster than the signal
        again = start(tmp_path / "out", "resume")
        said = again.communicate()[0]
        assert again.returncode == 0
        assert int(said) >= 1
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_other_options_do_not_resume_a_run(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    run = begin(saved(LLAMA).folder, tmp_path / "out", choose("gptq"))
    run.quantize()
    with pytest.raises(UsageError, match="options"):
        begin(saved(LLAMA).folder, tmp_path / "out", choose("gptq", damp=0.5), resume=True)
    with pytest.raises(UsageError, match="did not finish"):
        begin(saved(LLAMA).folder, tmp_path / "out", choose("gptq"))


def test_the_check_finds_scales_that_weights_carry_and_norms_do_not(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """What AutoAWQ 0.2.9 writes on a CPU: weights with the square of the scales, norms with their inverse once."""
    source = saved(LLAMA)
    run = begin(source.folder, tmp_path / "out", choose("awq"))
    run.quantize()
    shard = run.output.open(1)
    tensors = {name: shard.read(name).clone() for name in shard.names()}
    name = "model.layers.1.input_layernorm.weight"
    before = source.tensors[name]
    ratio = before / tensors[name]
    tensors[name] = tensors[name] * ratio**2 * torch.where(torch.arange(len(ratio)) % 2 == 0, 3.0, 1 / 3)
    write_shard(run.output.shard(1), tensors)
    with pytest.raises(LlmxError, match="block 1 differs"):
        run.finish()
    assert not (tmp_path / "out").exists()


def test_the_check_finds_numbers_that_are_none(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    run = begin(saved(LLAMA).folder, tmp_path / "out", choose("gptq"))
    run.quantize()
    shard = run.output.open(2)
    tensors = {name: shard.read(name).clone() for name in shard.names()}
    tensors["model.layers.2.mlp.up_proj.scales"][1, 1] = torch.nan
    write_shard(run.output.shard(2), tensors)
    with pytest.raises(LlmxError, match=r"not finite in model\.layers\.2\.mlp\.up_proj\.scales"):
        run.finish()


def test_config_is_the_sources_and_files_are_copied_and_the_embedding_stays_tied(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    source = saved(LLAMA)
    folder = tmp_path / "source"
    folder.mkdir()
    config = {**source.config, "tie_word_embeddings": True, "oddity": [1.0, "é"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: t.bfloat16() for n, t in source.tensors.items() if n != "lm_head.weight"}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "generation_config.json").write_bytes(b'{ "do_sample":  false}\r\n')
    (folder / "chat_template.jinja").write_bytes(b"{{ x }}")
    run = whole(folder, tmp_path / "out", choose("gptq", ignore=r"layers\.0\.mlp\.down"))
    out = tmp_path / "out"
    written = json.loads((out / "config.json").read_text())
    quantization = written.pop("quantization_config")
    assert written == config
    assert list(written) == list(config)
    assert quantization["quant_method"] == "gptq"
    assert json.loads((out / "quantize_config.json").read_text()) == quantization
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    made: dict[str, Tensor] = {}
    for path in out.glob("*.safetensors"):
        made |= safetensors.torch.load_file(path)
    assert "lm_head.weight" not in made
    assert set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]) == set(made)
    kept = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(made[kept], tensors[kept])
    assert any("down_proj" in name for name in quantization["dynamic"])
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(made[name], tensors[name])
    assert {t.dtype for t in made.values()} == {torch.bfloat16, torch.float16, torch.int32}
    assert run.source.dtype == torch.bfloat16


def test_a_run_with_an_unusable_hessian_falls_back_and_strict_refuses(
    saved: Callable[[str], Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmx.quantize.gptq._factor", lambda *_: (None, None))
    run = begin(saved(LLAMA).folder, tmp_path / "out", choose("gptq"))
    run.quantize()
    assert all(layer["fell_back"] for note in run.notes for layer in note["layers"])
    strict = begin(saved(LLAMA).folder, tmp_path / "strict", choose("gptq", strict=True))
    with pytest.raises(LlmxError, match="--strict"):
        strict.quantize()


def test_groups_that_divide_nothing_are_named_before_anything_is_read() -> None:
    assert group_for(None, [("a", 256), ("b", 384)]) == 128
    assert group_for(None, [("a", 576), ("b", 1536)]) == 64
    with pytest.raises(UsageError, match=r"128 do not divide a \(576 inputs\)") as caught:
        group_for(128, [("a", 576), ("b", 1536)])
    assert "64" in (caught.value.hint or "")
    with pytest.raises(UsageError, match=r"b \(40 inputs\)"):
        group_for(None, [("a", 64), ("b", 40)])


@pytest.mark.parametrize(
    ("method", "more", "says"),
    [
        ("awq", {"bits": 3}, "4 bits, not 3"),
        ("gptq", {"form": "awq"}, "does not hold"),
        ("gptq", {"form": "gptq", "symmetric": False}, "--asym"),
        ("gptq", {"bits": 5}, "not 5"),
        ("fp8", {"bits": 4}, "8 bits"),
        ("fp8", {"form": "fp8"}, "block"),
        ("fp8", {"fp8_mode": "fast"}, "dynamic, static, block"),
        ("gptq", {"damp": 2.0}, "--damp"),
        ("gptq", {"ignore": "("}, "regular expression"),
    ],
)
def test_options_that_no_format_can_hold_are_refused(method: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose(method, **more)
    assert says in f"{caught.value.message} {caught.value.hint}"


HEADS = [
    ("gptq", {}, 32, 0.9),
    ("gptq", {"bits": 8}, 32, 0.08),
    ("gptq", {"bits": 8, "form": "compressed-tensors", "symmetric": False}, 32, 0.08),
    ("awq", {}, 32, 0.9),
    ("awq", {"form": "compressed-tensors", "bits": 8}, 32, 0.08),
    ("int8", {}, None, 0.1),
    ("fp8", {}, None, 0.3),
    ("fp8", {"fp8_mode": "static"}, None, 0.3),
    ("fp8", {"fp8_mode": "block", "form": "compressed-tensors"}, None, 0.3),
]


@pytest.mark.parametrize(("method", "more", "group", "bound"), HEADS, ids=str)
def test_a_quantized_head_is_the_models(
    method: str,
    more: dict[str, Any],
    group: int | None,
    bound: float,
    saved: Callable[[str], Saved],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read back by us, and by transformers with what it stands for; some rows at a time give the same."""
    source, out = saved(LLAMA), tmp_path / "out"
    options = choose(method, **more, head=True)
    run = whole(source.folder, out, options, group=group)
    head = run.notes[-1]["layers"][0]
    assert head["name"] == "lm_head"
    assert not head["worse"]
    assert head["error"] <= head["nearest"] * 1.001
    names = open_safetensors(out).names()
    assert any(one.startswith("lm_head.") for one in names)
    assert "lm_head.weight" not in names or open_safetensors(out).stored("lm_head.weight").kind in ("I8", "F8_E4M3")
    source_embedding = source.tensors["model.embed_tokens.weight"]
    assert torch.equal(open_safetensors(out).read("model.embed_tokens.weight"), source_embedding)
    assert loss(run, out, source) < bound
    prompt = prompt_of(source.config["vocab_size"], 80)
    model, weights = load(open_folder(out), 100)
    assert weights.unused() == ()
    said = run_model(model, prompt).logits
    with effective_in(run, out, source):
        assert distance(said, logits_of(source.model, prompt)) < 0.01
    monkeypatch.setattr("llmx.quantize.head.ROWS", 128)  # the head has 160 rows
    whole(source.folder, tmp_path / "again", options, group=group)
    one, two = (open_safetensors(folder) for folder in (out, tmp_path / "again"))
    assert set(one.names()) == set(two.names())
    if method in ("gptq", "fp8"):  # others' scales are found on other rows
        assert all(torch.equal(one.read(n), two.read(n)) for n in one.names() if n.startswith("lm_head."))


@pytest.mark.parametrize("method", ["gptq", "int8"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_transformers_reads_a_quantized_head(method: str, saved: Callable[[str], Saved], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors, with which transformers reads it, is missing")
    source, out = saved(LLAMA), tmp_path / "out"
    run = whole(source.folder, out, choose(method, form="compressed-tensors", head=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = prompt_of(source.config["vocab_size"], 40)
    with torch.no_grad():
        said = model(input_ids=torch.tensor([prompt]), output_hidden_states=True)
    hidden = said.hidden_states[-1][0]
    head = effective(run, out)["lm_head.weight"]
    bound = 0.01 if method == "gptq" else 0.1  # int8 rounds the head's inputs too
    assert distance(said.logits[0], hidden @ head.T) < bound
    assert not torch.allclose(head, source.tensors["lm_head.weight"], atol=1e-3)


def test_solved_heads_are_better_than_rounded_ones_and_their_scales_are_in_the_norm(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    source = saved(LLAMA)
    gains = {}
    for method in ("gptq", "awq"):
        run = whole(source.folder, tmp_path / method, choose(method, head=True))
        head = run.notes[-1]["layers"][0]
        gains[method] = head["error"] / head["nearest"]
        norm = open_safetensors(tmp_path / method).read("model.norm.weight")
        assert torch.equal(norm, source.tensors["model.norm.weight"]) == (method == "gptq")
    assert gains["gptq"] < 0.7
    assert gains["awq"] < 0.95


def test_a_run_with_a_head_that_is_cut_off_goes_on_to_the_same_bytes(
    saved: Callable[[str], Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = saved(LLAMA).folder, choose("awq", head=True)
    whole(folder, tmp_path / "wanted", options)
    real = output.write_shard
    for fatal in (3, 4):  # the last block's shard, the head's
        count = 0

        def write(*arguments: Any, fatal: int = fatal) -> None:
            nonlocal count
            count += 1
            if count == fatal:
                raise Cut
            real(*arguments)

        out = tmp_path / f"out{fatal}"
        with monkeypatch.context() as patch:
            patch.setattr(output, "write_shard", write)
            with pytest.raises(Cut):
                whole(folder, out, options)
        again = whole(folder, out, options, resume=True)
        assert again.resumed == fatal - 1
        assert tree(out) == tree(tmp_path / "wanted")


def test_the_check_finds_a_head_that_is_not_the_sources(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    run = begin(saved(LLAMA).folder, tmp_path / "out", choose("gptq", head=True))
    run.quantize()
    shard = run.output.open(3)
    tensors = {name: shard.read(name).clone() for name in shard.names()}
    tensors["lm_head.scales"] *= -1
    write_shard(run.output.shard(3), tensors)
    with pytest.raises(LlmxError, match="the head differs"):
        run.finish()


def test_a_tied_head_is_refused(saved: Callable[[str], Saved]) -> None:
    tied = next(name for name, tiny in TINIES.items() if tiny.config_json()["tie_word_embeddings"])
    source = open_source(Located("hf", saved(tied).folder, "it", False))
    with pytest.raises(UsageError, match="The head of it is tied to its embedding"):
        source.mine(choose("gptq", head=True))
