"""Do the clients that people have get on with a server? Each lists models and streams a chat; one not installed is
skipped. `--url` names a running server, else one with a tiny model is started. Exit code 3 if a client fails."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from _common import publish, say, versions
from _serving import serving

from llmx.report import Report

ASK = [{"role": "user", "content": "the quick brown fox"}]


def with_openai(url: str, key: str) -> str:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, messages=ASK, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[-1].usage is not None, "no usage at the end"
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def with_litellm(url: str, key: str) -> str:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import waits for the network
    import litellm

    models = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_key=key, api_base=url.removesuffix("/v1")
    )
    assert models, "no model listed"
    # `openai/` says which API it speaks.
    stream = litellm.completion(
        model=f"openai/{models[0].removeprefix('openai/')}",
        api_base=url,
        api_key=key,
        messages=ASK,
        max_tokens=8,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def with_langchain(url: str, key: str) -> str:
    from langchain_openai import ChatOpenAI
    from openai import OpenAI

    with OpenAI(base_url=url, api_key=key, max_retries=0) as client:  # langchain has no call that lists models
        model = client.models.list().data[0].id
    chat = ChatOpenAI(model=model, base_url=url, api_key=key, max_tokens=8, max_retries=0, stream_usage=True)  # type: ignore[arg-type, call-arg]
    chunks = list(chat.stream("the quick brown fox"))
    assert any(chunk.usage_metadata for chunk in chunks), "no usage in the stream"
    return "".join(str(chunk.content) for chunk in chunks)


CLIENTS: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "openai": ("openai", with_openai),
    "litellm": ("litellm", with_litellm),
    "langchain-openai": ("langchain_openai", with_langchain),
}


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with serving(None) as started:
        yield f"http://127.0.0.1:{started.port}/v1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    with server(options.url) as url:
        for name, (package, ask) in CLIENTS.items():
            if importlib.util.find_spec(package) is None:
                found[name] = "skipped: it is not installed"
            else:
                try:
                    found[name] = "works" if ask(url, options.key) else "failed: the chat is empty"
                except Exception as error:  # whatever a client raises is what this script is to find
                    traceback.print_exc()
                    found[name] = f"failed: {type(error).__name__}: {error}"
            say(f"{name}: {found[name]}")
    publish(Report("clients", {"clients": found, "versions": versions(*CLIENTS)}), options.json)
    return 3 if any(said.startswith("failed") for said in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
