"""One evaluation: text, reference, model; and what was found so far, so that an interrupt leaves a report."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.config import EngineConfig, EngineInfo
from llmx.errors import UsageError
from llmx.evals.logits_file import Layout, LogitsFile, LogitsWriter
from llmx.evals.protocol import DEFAULT_CTX, LLAMA, Protocol
from llmx.evals.text import GENERATED_WINDOWS, Text, Written, bos_of, generate, sha256_of, tokenise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmx.evals.scoring import Say, Scores
    from llmx.formats.hub import Located
    from llmx.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """What to measure. `written` None: the tokens of `logits`, else text by the reference, else by the model itself."""

    protocol: Protocol
    chunks: int | None = None
    seed: int = 0
    written: Written | None = None
    logits: LogitsFile | None = None
    save_logits: Path | None = None


def make_plan(
    protocol: str, ctx: int | None, chunks: int | None, seed: int, written: Written | None, logits: Path | None,
    save_logits: Path | None, compares: bool,
) -> Plan:  # fmt: skip
    """UsageError where the parts don't go together. Reads no more than the logits file's header and tokens."""
    if protocol not in DEFAULT_CTX:
        raise UsageError(f"--protocol {protocol} is not known; there are {' and '.join(DEFAULT_CTX)}.")
    if protocol != LLAMA and (compares or logits or save_logits):
        raise UsageError(
            f"--protocol {protocol} scores whole windows; reference logits hold the second half of each.",
            hint=f"leave --protocol out, or --reference, --logits and --save-logits; --ctx {ctx or 2048} may stay",
        )
    if logits is not None and written is not None:
        raise UsageError("--logits brings its own text; --text and --dataset can't be given beside it.")
    file = LogitsFile(logits) if logits is not None else None
    if file is not None:
        if ctx not in (None, file.layout.ctx):
            raise UsageError(f"--ctx {ctx}: {logits} was computed with {file.layout.ctx}.", hint="leave --ctx out")
        ctx = file.layout.ctx
    return Plan(Protocol(protocol, ctx or DEFAULT_CTX[protocol]), chunks, seed, written, file, save_logits)


@dataclass
class Findings:
    """What an evaluation has found so far. `identity`: which weights the two models are, as the report shows it."""

    plan: Plan
    info: EngineInfo | None = None
    reference: EngineInfo | None = None
    text: Text | None = None
    windows: int = 0
    bos: int | None = None
    tokenised_alike: bool | None = None
    scores: Scores | None = None
    interrupted: bool = False
    tasks: dict[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    reference_identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scored(self) -> int:
        return int(self.scores.done.sum()) if self.scores is not None else 0

    def results(self) -> dict[str, Any]:
        """The report's `results`."""
        from llmx.evals import figures

        found: dict[str, Any] = {"interrupted": self.interrupted}
        if self.text is not None:
            protocol = self.plan.protocol
            found["text"] = self.text.about | {
                "tokens": len(self.text.tokens),
                "protocol": protocol.name,
                "ctx": protocol.ctx,
                "windows": self.scored,
                "windows_asked": self.windows,
                "scored": self.scored * protocol.scored,
                "bos": self.bos,
            }
            if self.tokenised_alike is not None:
                found["text"]["tokenised_alike"] = self.tokenised_alike
        if self.scored and self.scores is not None:
            values = self.scores.whole()
            found |= figures.perplexity(values["ln_p"])
            if "kld" in values:
                found |= figures.distance(values)
        if self.reference is not None:
            found["reference"] = facts(self.reference) | dict(self.reference_identity)
        if self.tasks:
            found["tasks"] = self.tasks
        return found


def facts(info: EngineInfo) -> dict[str, Any]:
    """What the report says of a reference: its kernels too, which have no other place."""
    return asdict(info) | {"kernels": dict(info.kernels)}


@dataclass(frozen=True)
class Model:
    """A model to run: checked files, its tokenizer, and what the engine is built from."""

    config: EngineConfig
    located: Located | None
    tokenizer: Tokenizer | None


def open_tokenizer(located: Located | None) -> Tokenizer | None:
    """None for random weights."""
    from llmx.tokenizer import load_tokenizer

    return None if located is None else load_tokenizer(located)


def evaluate(model: Model, reference: Model | None, found: Findings, say: Say) -> None:
    """Fill `found`: the reference's logits first, if there is a reference model, then the model's figures."""
    from llmx.evals.scoring import Scorer

    plan, base = found.plan, found.plan.logits
    check_context(model, plan.protocol)
    with tempfile.TemporaryDirectory(prefix="llmx-eval-", dir=_scratch(reference, plan)) as folder:
        try:
            if reference is not None:
                check_context(reference, plan.protocol)
                base = _refer(reference, model, found, plan.save_logits or Path(folder) / "reference.logits", say)
                if base is None:
                    return
            say(f"loading {model.config.model}")
            with Scorer(model.config, plan.protocol) as scorer:
                found.info = scorer.info
                windows = _windows(scorer, model, found, say)
                own = plan.save_logits if reference is None else None
                with _writer(own, found, windows, scorer.info.vocab_size) as out:
                    found.scores, found.interrupted = scorer.score(
                        windows, found.bos, base=base, out=out, say=lambda line: say(f"{model.config.model}: {line}")
                    )
                    if out is not None and not found.interrupted:
                        out.finish()
        except KeyboardInterrupt:
            found.interrupted = True


def _refer(reference: Model, model: Model, found: Findings, path: Path, say: Say) -> LogitsFile | None:
    """The reference's logits over the text, in a file; None after an interrupt."""
    from llmx.evals.scoring import Scorer

    say(f"loading {reference.config.model}")
    with Scorer(reference.config, found.plan.protocol) as scorer:
        found.reference = scorer.info
        windows = _windows(scorer, reference, found, say)
        if found.plan.written is not None and model.tokenizer is not None and found.text is not None:
            mine = tokenise(found.plan.written, model.tokenizer, found.plan.protocol.name, model.config.model).tokens
            found.tokenised_alike = list(mine) == list(found.text.tokens)
            if not found.tokenised_alike:
                say("Note: the two models' tokenizers read the text differently; the reference's tokens are scored.")
        with _writer(path, found, windows, scorer.info.vocab_size) as out:
            assert out is not None
            _, found.interrupted = scorer.score(
                windows, found.bos, out=out, say=lambda line: say(f"reference {reference.config.model}: {line}")
            )
            return None if found.interrupted else out.finish()


def _windows(scorer: Any, model: Model, found: Findings, say: Say) -> list[tuple[int, ...]]:
    """The windows to score, by the first model that asks; `found` then says which text they are of."""
    plan = found.plan
    if found.text is None:
        if plan.logits is not None:
            about = {"source": "logits file", "name": str(plan.logits.path), "sha256": sha256_of(plan.logits.tokens)}
            found.text = Text(plan.logits.tokens, about)
        elif plan.written is not None:
            found.text = tokenise(plan.written, model.tokenizer, plan.protocol.name, model.config.model)
        else:
            count = plan.chunks or GENERATED_WINDOWS
            tell = lambda line: say(f"{model.config.model}: {line}")  # noqa: E731
            found.text = generate(scorer, model.config, model.located, model.tokenizer, count, plan.seed, tell)
        found.bos = bos_of(model.tokenizer) if plan.protocol.name == LLAMA else None
    windows = plan.protocol.windows(found.text.tokens, plan.chunks)
    found.windows = len(windows)
    return windows


@contextmanager
def _writer(
    path: Path | None, found: Findings, windows: list[tuple[int, ...]], vocab: int
) -> Iterator[LogitsWriter | None]:
    if path is None:
        yield None
        return
    with LogitsWriter(path, Layout(found.plan.protocol.ctx, vocab, len(windows)), windows) as out:
        yield out


def _scratch(reference: Model | None, plan: Plan) -> Path | None:
    """Where reference logits that nobody keeps lie meanwhile: they may be larger than what /tmp holds."""
    if reference is None or plan.save_logits is not None:
        return None
    from llmx.formats.hub import cache_dir

    folder = cache_dir() / "evals"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"There is no place for the reference's logits at {folder}: {error.strerror}.",
            hint="name one with --save-logits",
        ) from error
    return folder


def check_context(model: Model, protocol: Protocol) -> None:
    """UsageError where the model wasn't made for windows as long as these."""
    from llmx.models import open_model, random_shape

    name = model.config.model
    shape = open_model(model.located).config if model.located else random_shape(name.partition(":")[2])[1]
    if protocol.ctx > shape.max_position:
        raise UsageError(f"--ctx {protocol.ctx} is more than the {shape.max_position} positions that {name} has.")
