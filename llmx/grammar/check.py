"""Whether a grammar can be used: another process tries, since compiling one may crash, take all memory or never end."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Any

from llmx.errors import LlmxError, RequestError
from llmx.grammar.forms import check_size, from_lark

MOST_COMPOSED = 4 * 64 * 1024  # bytes of a grammar that holds several schemas
CHECK_SECONDS = 10.0
AT_ONCE = 2  # processes that check
REMEMBERED = 1024  # grammars that were tried, by their hashes

_slots = threading.BoundedSemaphore(AT_ONCE)
_lock = threading.Lock()
_known: OrderedDict[bytes, dict[str, Any]] = OrderedDict()  # hash of the question -> the answer
TOO_COMPLEX = "The grammar is too complex to compile."


def validate(grammar: str, *, param: str = "grammar") -> None:
    """RequestError (400), with the place of the fault where it is known, if a grammar can't be used.

    Takes 0.1 s for a grammar that was not seen before, at most `CHECK_SECONDS`, in which the caller's thread waits.
    """
    if not isinstance(grammar, str):
        raise RequestError(f"A grammar must be a text, not {type(grammar).__name__}.", param=param)
    if len(grammar) > MOST_COMPOSED:
        raise RequestError(
            f"The grammar has {len(grammar)} characters; at most {MOST_COMPOSED} are allowed.", param=param
        )
    _ask("check", grammar, param)


def from_gbnf(text: str, *, param: str = "grammar") -> str:
    """A grammar of llama.cpp's kind, whose first rule is `root`, as Lark. RequestError as `validate`."""
    check_size(from_lark(text, param=param), "grammar", param)
    return _ask("gbnf", text, param)


def from_grammar(text: str, *, param: str = "grammar") -> str:
    """A grammar that is Lark if it has a rule `start`, else GBNF. RequestError as `validate`."""
    check_size(from_lark(text, param=param), "grammar", param)
    return _ask("grammar", text, param)


def _ask(form: str, text: str, param: str) -> str:
    """The grammar that the other process made of it, after it was found good."""
    key = _key(form, text)
    with _lock:
        answer = _known.get(key)
        if answer is not None:
            _known.move_to_end(key)
    if answer is None:
        answer = _run({"form": form, "text": text}, param)
        if answer.get("grammar") == text:
            answer = {}
        with _lock:
            _known[key] = answer
            if "grammar" in answer:
                _known[_key("check", answer["grammar"])] = {}
            while len(_known) > REMEMBERED:
                _known.popitem(last=False)
    if "error" in answer:
        raise RequestError(str(answer["error"]), param=param, hint=answer.get("hint"))
    return str(answer.get("grammar", text))


def _key(form: str, text: str) -> bytes:
    return hashlib.blake2b(f"{form}:{text}".encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _run(question: dict[str, str], param: str) -> dict[str, Any]:
    if not _slots.acquire(timeout=CHECK_SECONDS):
        raise RequestError(
            "Too many other grammars are being checked.", param=param, status=503, code="grammar_checks_busy"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "llmx.grammar.worker"],
            input=json.dumps(question).encode(),
            capture_output=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            timeout=CHECK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"The grammar could not be compiled within {CHECK_SECONDS:g} s.", param=param, hint=_SIMPLER
        ) from None
    except OSError as error:
        raise LlmxError(f"The process that checks grammars can't be started: {error.strerror}.") from None
    finally:
        _slots.release()
    if done.returncode < 0:  # killed by its own limits, or it crashed
        raise RequestError(TOO_COMPLEX, param=param, hint=_SIMPLER)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise LlmxError(f"The process that checks grammars failed: {(said or ['it said nothing'])[-1][:200]}") from None
    if not isinstance(answer, dict):
        raise LlmxError("The process that checks grammars gave no answer.")
    return answer


_SIMPLER = "make it shorter, or give it less repetition and nesting"
