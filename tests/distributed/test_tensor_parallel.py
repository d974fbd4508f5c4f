"""A model cut over several ranks says what it says whole: every family, from safetensors and GGUF, on every schedule.

The ranks are threads here; test_ranks.py has them as processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.threads import CPU, Member, load, on_ranks
from engine.common import LENGTH, STD, VOCAB, Watched, key_of, requests
from engine.common import said as said_of
from letters import Letters
from tiny_gguf import FORMATS, write_gguf
from tiny_models import TOLERANCE, Said, Tiny, build, every_tiny, open_folder, open_gguf_file, prompt_of, run, save
from torch import Tensor

from llmx.core import Request, SamplingParams
from llmx.engine.constraints import Grammars
from llmx.grammar import from_json_schema, regex
from llmx.kernels import Kernels
from llmx.layers.rope import RopeConfig
from llmx.loading import RandomWeights, Shard
from llmx.models import Opened
from llmx.models.llama import Config, Model
from llmx.parallel.group import Alone
from llmx.scheduler import Limits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers, of tiny configs
TINIES = every_tiny()
FILES = [
    (tiny, name)
    for tiny in TINIES
    for name, form in FORMATS.get(tiny.architecture, {}).items()
    if form.windows or not tiny.options.get("sliding_window")  # which the others don't store
]
WORDS, GREEDY = 72, 16  # of the prompt, more than any window; and of the output


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("tiny")
    built.cache_clear()


@cache
def built(tiny: Tiny, root: Path) -> tuple[dict[str, Any], Any, Path]:
    """config.json, transformers' model and its folder."""
    config = tiny.config_json()
    model = build(tiny.oracle, config, 2.0)
    return config, model, save(root / tiny.name, config, model)


def expect_same(whole: Said, cut: Said) -> None:
    """Equal texts and logits within noise; from a near tie on the texts may differ, and then so do the logits."""
    start = WORDS - 1
    same = next((i for i, pair in enumerate(zip(whole.output, cut.output, strict=True)) if len({*pair}) > 1), GREEDY)
    noise = TOLERANCE * whole.logits.std()
    assert (whole.logits - cut.logits)[: start + same + 1].abs().max() < noise
    if same < GREEDY:
        first, second = whole.logits[start + same].topk(2).values
        assert first - second < noise, f"token {same} differs, and it was no near tie"


def compare(opened: Callable[[], Opened], *ranks: int) -> None:
    """Files whole and cut, the prompt in chunks. Every rank has files and model of its own."""
    prompt = prompt_of(opened().config.vocab, WORDS)

    def speak(group: Any) -> Said:
        model, _ = load(opened(), WORDS + GREEDY, group)
        return run(model, prompt, outputs=GREEDY, budget=WORDS // 2)

    whole = speak(Alone())
    assert len({*whole.output}) > 2, "a text that repeats itself shows little"
    for size in ranks:
        cut = on_ranks(size, speak)
        assert all(torch.equal(one.logits, cut[0].logits) for one in cut), "the ranks don't agree to the bit"
        expect_same(whole, cut[0])


@pytest.mark.parametrize("tiny", TINIES, ids=lambda tiny: tiny.name)
def test_every_family_says_the_same_on_two_ranks_and_on_four_that_share_its_two_key_heads(
    tiny: Tiny, root: Path
) -> None:
    config, _, folder = built(tiny, root)
    assert config["num_key_value_heads"] == 2, "four ranks are to share them"
    compare(lambda: open_folder(folder), 2, 4)


@pytest.mark.parametrize(("tiny", "name"), FILES, ids=[f"{tiny.name}-{name}" for tiny, name in FILES])
def test_every_gguf_architecture_says_the_same_on_four_ranks(tiny: Tiny, name: str, root: Path, tmp_path: Path) -> None:
    config, model, _ = built(tiny, root)
    tensors = {name: p.detach().float() for name, p in model.named_parameters()}
    write_gguf(tmp_path / "model.gguf", tiny.architecture, name, config, tensors)
    compare(lambda: open_gguf_file(tmp_path / "model.gguf"), 4)


@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", "Qwen3ForCausalLM"])
def test_norms_of_q_and_k_are_over_what_they_were_over_where_all_ranks_share_one_key_head(
    architecture: str, tmp_path: Path
) -> None:
    tiny = next(tiny for tiny in TINIES if tiny.architecture == architecture)
    config = tiny.config_json() | {"num_key_value_heads": 1, "num_hidden_layers": 2, "layer_types": None}
    folder = save(tmp_path / "model", config, build(tiny.oracle, config, 2.0))
    compare(lambda: open_folder(folder), 2, 4)


def test_ranks_have_unequal_shares_of_features_that_they_do_not_divide(tmp_path: Path) -> None:
    tiny = next(tiny for tiny in TINIES if tiny.architecture == "LlamaForCausalLM")
    config = tiny.config_json() | {"intermediate_size": 90, "num_hidden_layers": 1}
    folder = save(tmp_path / "model", config, build(tiny.oracle, config, 2.0))
    compare(lambda: open_folder(folder), 4)


def test_biases_of_linears_whose_results_are_added_up_are_added_once(tmp_path: Path) -> None:
    tiny = next(tiny for tiny in TINIES if tiny.architecture == "LlamaForCausalLM")
    config = tiny.config_json() | {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}
    folder = save(tmp_path / "model", config, build(tiny.oracle, config, 2.0))
    assert "model.layers.0.mlp.down_proj.bias" in open_folder(folder).checkpoint
    compare(lambda: open_folder(folder), 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_the_ranks_do_not_divide_is_filled_up(tied: bool, tmp_path: Path) -> None:
    tiny = next(tiny for tiny in TINIES if tiny.architecture == "LlamaForCausalLM")
    config = tiny.config_json() | {"vocab_size": 149, "num_hidden_layers": 1, "tie_word_embeddings": tied}
    folder = save(tmp_path / "model", config, build(tiny.oracle, config, 2.0))
    compare(lambda: open_folder(folder), 2, 4)


# Schedules: requests of every kind, on engines that differ in what they do when.

HEADS, KV_HEADS = 6, 2


def random_model(group: Any, dtype: torch.dtype = torch.float32) -> Model:
    config = Config(
        vocab=VOCAB, hidden=32, layers=2, heads=HEADS, kv_heads=KV_HEADS, head_dim=8, inner=48, max_position=LENGTH,
        eps=1e-5, rope=RopeConfig(500.0, 8), windows=(None, 9),
    )  # fmt: skip
    kernels, shard = Kernels("cpu", "reference"), Shard(group.rank, group.size)
    weights = RandomWeights(1, dtype, CPU, kernels, shard=shard, std=STD)
    return Model(config, weights, kernels, length=LENGTH, device=CPU, group=group)


def engine(group: Any, *, blocks: int = 400, size: int = 8, **limits: Any) -> Watched:
    model = random_model(group)
    return Watched(
        model,
        limits=Limits(**({"budget": 800, "running": 32, "length": LENGTH} | limits)),
        blocks=[blocks] * 2,
        size=size,
        kv_dtype=torch.float32,
        device=CPU,
        poison=True,
    )


def chosen(*names: str) -> list[Request]:
    return [request for request in requests() if request.id in names]


SOME = chosen("greedy", "seeded", "penalties_sampled", "logprobs", "choices", "stop", "long_choices")


def texts(made: Watched, asked: Sequence[Request]) -> dict[Any, Any]:
    found = {key_of(sequence): said_of(made, sequence) for sequence in made.run(list(asked))}
    made.scheduler.blocks.check()
    assert made.whole
    return found


SCHEDULES: dict[str, dict[str, Any]] = {
    "chunks": {"budget": 33},
    "few at once": {"running": 4},
    "preempted": {"blocks": 20, "running": 32, "budget": 64},
    "overlapped": {"overlap": True},
}


@cache
def by_themselves(ranks: int) -> dict[Any, Any]:
    """Each request alone, in an engine of its own."""

    def one_by_one(group: Any) -> dict[Any, Any]:
        return {key: said for request in SOME for key, said in texts(engine(group), [request]).items()}

    return on_ranks(ranks, one_by_one)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_two_ranks_a_text_does_not_depend_on_how_it_is_scheduled(schedule: str) -> None:
    def all_at_once(group: Any) -> tuple[dict[Any, Any], int]:
        made = engine(group, **SCHEDULES[schedule])
        return texts(made, SOME), made.scheduler.preemptions

    first, second = on_ranks(2, all_at_once)
    assert first == second
    assert first[0] == by_themselves(2)
    assert (first[1] > 0) == (schedule == "preempted")


def test_three_ranks_can_not_share_two_key_heads() -> None:
    from llmx.errors import UsageError

    shape = random_model(Alone()).config
    with pytest.raises(UsageError, match=r"2 key-value heads can't be split over 3 ranks; 1, 2 or 6 would do\."):
        shape.check_ranks(3)


@pytest.mark.parametrize("ranks", [2, 6])
def test_sampled_texts_and_scores_are_those_of_one_rank(ranks: int) -> None:
    whole, cut = texts(engine(Alone()), SOME), on_ranks(ranks, lambda group: texts(engine(group), SOME))[0]
    assert whole.keys() == cut.keys()
    for key, one in whole.items():
        other = cut[key]
        assert (one.tokens, one.finish, one.stopped_by) == (other.tokens, other.finish, other.stopped_by), key
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token == theirs.token
            assert mine.value == pytest.approx(theirs.value, abs=1e-4)
        for (at, mine), (there, theirs) in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert at == there
            assert mine.value == pytest.approx(theirs.value, abs=1e-4)


def test_prefix_hits_and_aborts_leave_the_ranks_in_step() -> None:
    """What was aborted in mid-flight is followed by a request that finds its blocks."""
    prompt = tuple(range(3, 90))
    params = SamplingParams(temperature=0.0, max_tokens=12, seed=0)

    def play(group: Any) -> tuple[list[int], list[int], int]:
        made = engine(group, budget=40)
        (dropped,) = made.scheduler.add(Request("dropped", prompt, replace(params, n=1)))
        choices = made.scheduler.add(Request("choices", prompt[:50], replace(params, n=3, temperature=1.0)))
        for step in range(400):
            if step == 6:
                made.scheduler.abort(dropped)
                made.scheduler.abort(choices[1])
            if not made.scheduler.running and not made.scheduler.waiting:
                break
            made.step()
        (again,) = made.run([Request("again", prompt, params)])
        assert made.whole
        return again.output, choices[2].output, again.cached

    alone = play(Alone())
    assert alone[2] > 0
    assert on_ranks(2, play) == [alone, alone]


def test_ranks_follow_a_grammar_together() -> None:
    schema = from_json_schema({"type": "object", "properties": {"a": {"enum": ["x", 7]}}, "required": ["a"]})
    grammars = {"digits": regex("[0-9]{3}(-[0-9]{2})*"), "schema": schema}

    def play(group: Any) -> list[tuple[list[int], str | None]]:
        made = engine(group, budget=40, overlap=True)
        made.grammars = Grammars(Letters, VOCAB)  # type: ignore[arg-type]
        asked = [
            Request(name, (5, 6, 7), SamplingParams(grammar=grammar, seed=1, n=2, max_tokens=24), Letters.eos_ids)
            for name, grammar in grammars.items()
        ]
        return [(s.output, s.finish) for s in made.run(asked)]

    alone = play(Alone())
    assert all(re.match("[0-9]{3}", Letters().text(output).decode()) for output, _ in alone[:2])
    assert any(finish == "stop" for _, finish in alone)
    assert on_ranks(2, play) == [alone, alone]


def test_rank_0_has_the_say_where_the_others_would_draw_other_tokens() -> None:
    (asked,) = chosen("greedy")

    def play(group: Any) -> list[int]:
        made = engine(group)
        if group.rank:
            right = made.model.head
            made.model.head = lambda x: -right(x)
        return made.run([asked])[0].output

    assert on_ranks(2, play) == [play(Alone())] * 2


def test_bfloat16_ranks_agree_to_the_bit() -> None:
    def logits(group: Member) -> Tensor:
        model = random_model(group, torch.bfloat16)
        with torch.inference_mode():
            return model.head(model.embed(torch.arange(VOCAB)))

    first, second = on_ranks(2, logits)
    assert torch.equal(first, second)
    assert torch.equal(first, logits(Alone()))  # type: ignore[arg-type]  # nothing was added up here
