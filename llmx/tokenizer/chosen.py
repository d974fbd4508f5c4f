"""A chat template other than the model's default one: from a file, or another of the model's own."""

from __future__ import annotations

from pathlib import Path

from llmx.errors import UsageError
from llmx.templates import ChatTemplate
from llmx.templates.chat import MAX_SOURCE
from llmx.tokenizer.tokenizer import Tokenizer


def choose_template(tokenizer: Tokenizer, chosen: str) -> ChatTemplate:
    """chosen: a file of Jinja2 if it is there, else the name of one of the model's own templates. UsageError."""
    own = tokenizer.template
    if Path(chosen).is_file():
        specials = own.specials if own is not None else _specials(tokenizer)
        template = ChatTemplate(_read(Path(chosen)), specials)
        try:
            template.check()
        except UsageError as error:
            raise UsageError(error.message.replace("The model's chat template", chosen)) from None
    elif own is not None and chosen in own.named:
        template = own.named[chosen]
    else:
        names = ", ".join(own.named) if own is not None and own.named else "none with a name"
        raise UsageError(f"There is no chat template file {chosen!r}, and the model's templates are: {names}.")
    template.check()
    return template


def _specials(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that a template may name, for a model without one of its own."""
    found = {"eos_token": tokenizer.token(min(tokenizer.eos_ids))} if tokenizer.eos_ids else {}
    return found | ({"bos_token": tokenizer.token(tokenizer.bos_id)} if tokenizer.bos_id is not None else {})


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > 4 * MAX_SOURCE:
            raise UsageError(f"{file} is larger than a chat template may be: {MAX_SOURCE} characters.")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}.") from None
    except ValueError:
        raise UsageError(f"{file} is no UTF-8 text.") from None
