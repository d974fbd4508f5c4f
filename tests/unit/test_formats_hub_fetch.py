"""Fetching from a fake hub: what is asked for, what is kept, and what each failure says."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_hub
import pytest
from fake_hub import TOKEN, Hub
from huggingface_hub import constants, file_download, hf_hub_download
from weight_files import safetensors

from llmx.errors import LlmxError, UsageError
from llmx.formats import hub
from llmx.formats.hub_names import INDEX

CONFIG = {"config.json": b"{}", "tokenizer.json": b'{"x": 1}', "tokenizer_config.json": b'{"y": 1}'}
OTHERS = {"README.md": b"#", "pytorch_model.bin": b"pickle", "modeling.py": b"raise", "original/params.json": b"{}"}
WEIGHTS = safetensors({"a": {"dtype": "F32", "shape": [50_000], "data_offsets": [0, 200_000]}}, bytes(200_000))
SHARDS = {f"model-0000{i}-of-00002.safetensors": WEIGHTS for i in (1, 2)}
SHARDED = {**SHARDS, INDEX: json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()}
GGUF = b"GGUF" + bytes(100_000)


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with fake_hub.serve() as served:
        yield served


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub's cache; it has read its folder and much else from the environment already."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf"


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def remote(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fresh = Hub(server.url)
    vars(server).update(vars(fresh))
    use(monkeypatch, server.url)
    return server


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def blobs(cache: Path) -> list[Path]:
    """Finished files."""
    return sorted(path for path in cache.rglob("blobs/*") if path.is_file() and path.suffix != ".incomplete")


def nothing(done: int, total: int) -> None:
    pass


def test_a_repository_is_fetched_with_its_safetensors_and_nothing_else(remote: Hub, cache: Path) -> None:
    remote.add("org/name", CONFIG | OTHERS | {"model.safetensors": WEIGHTS, "model.fp16.safetensors": WEIGHTS[::-1]})
    seen: list[tuple[int, int]] = []
    located = hub.pull("org/name", lambda *at: seen.append(at))
    assert located == hub.Located("hf", located.path, "org/name")
    assert located.path.is_relative_to(cache / "models--org--name" / "snapshots")
    assert names(located.path) == sorted([*CONFIG, "model.safetensors"])
    assert (located.path / "model.safetensors").read_bytes() == WEIGHTS
    total = len(WEIGHTS) + sum(map(len, CONFIG.values()))
    assert {of for _, of in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == total
    assert any("llmx/" in agent for agent in remote.agents)


def test_shards_are_those_of_the_index_and_come_last(remote: Hub) -> None:
    remote.add("org/name", CONFIG | SHARDED | {"consolidated.safetensors": b"the same again"})
    seen: list[tuple[int, int]] = []
    located = hub.pull("org/name", lambda *at: seen.append(at))
    assert names(located.path) == sorted([*CONFIG, *SHARDED])
    assert remote.fetched() == [INDEX, *sorted(CONFIG), "model-00001-of-00002.safetensors"]  # equal bytes come once
    assert seen[-1] == (seen[-1][1],) * 2
    from llmx.formats.safetensors import open_safetensors

    with pytest.raises(UsageError, match="stored twice"):  # the files are found through their links
        open_safetensors(located.path)


def test_what_is_there_needs_no_request(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.add("org/name", CONFIG | SHARDED | {"x-Q8_0.gguf": GGUF})
    for name in ("org/name", "org/name:q8_0"):
        with pytest.raises(UsageError, match="no complete model of that name") as caught:
            hub.locate(name)
        assert caught.value.hint == f"Run: llmx pull {name}"
        assert not remote.requests
        located = hub.pull(name)
        remote.requests.clear()
        assert hub.locate(name) == hub.pull(name) == located
        assert not remote.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.pull("org/name", newest=True).path.is_dir()
    assert not remote.requests


def test_what_huggingface_hub_has_fetched_for_others_is_used(remote: Hub) -> None:
    remote.add("org/name", CONFIG | SHARDED | {"x-Q8_0.gguf": GGUF})
    folder = {Path(hf_hub_download("org/name", file)).parent for file in (*CONFIG, *SHARDED, "x-Q8_0.gguf")}.pop()
    remote.requests.clear()
    assert hub.locate("org/name").path == folder
    assert hub.pull("org/name:Q8_0").path == folder / "x-Q8_0.gguf"
    assert not remote.requests


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", INDEX, *SHARDS])
def test_a_snapshot_that_lacks_a_file_is_not_used_and_completed(remote: Hub, missing: str) -> None:
    remote.add("org/name", CONFIG | SHARDED)
    located = hub.pull("org/name")
    (located.path / missing).unlink()
    with pytest.raises(UsageError, match="no complete model"):
        hub.locate("org/name")
    assert hub.pull("org/name") == located
    assert (located.path / missing).is_file()


def test_a_new_commit_is_fetched_only_when_asked_for(remote: Hub) -> None:
    old = remote.add("org/name", CONFIG | {"model.safetensors": WEIGHTS})
    first = hub.pull("org/name")
    remote.repositories["org/name"] = fake_hub.Repository(old.files | {"config.json": b'{"new": 1}'})
    assert hub.pull("org/name") == first
    remote.requests.clear()
    second = hub.pull("org/name", newest=True)
    assert second.path != first.path
    assert (second.path / "config.json").read_bytes() == b'{"new": 1}'
    assert remote.fetched() == ["config.json"]
    assert hub.locate("org/name") == second


def test_an_update_that_fails_leaves_the_old_commit_in_use(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    old = remote.add("org/name", CONFIG | {"model.safetensors": WEIGHTS})
    first = hub.pull("org/name")
    new = old.files | {"model.safetensors": WEIGHTS[:-1] + b"!", "config.json": b'{"new": 1}'}
    remote.repositories["org/name"] = fake_hub.Repository(new, gated=True)
    with pytest.raises(LlmxError, match="gated"):
        hub.pull("org/name", newest=True)
    assert hub.locate("org/name") == first


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1", "commit"])
def test_a_revision_is_a_tag_a_branch_or_a_commit(remote: Hub, revision: str) -> None:
    repository = remote.add("org/name", CONFIG | {"model.safetensors": WEIGHTS, "x-Q8_0.gguf": GGUF})
    revision = repository.commit if revision == "commit" else revision
    located = hub.pull(f"org/name@{revision}")
    assert hub.locate(f"org/name@{revision}") == located
    with pytest.raises(UsageError, match="no complete model"):
        hub.locate("org/name")
    assert hub.pull(f"org/name@{revision}:Q8_0").path == located.path / "x-Q8_0.gguf"


def test_a_gguf_file_is_fetched_alone_and_a_split_one_whole(remote: Hub) -> None:
    parts = {f"Q8_0/x-Q8_0-0000{i}-of-00003.gguf": GGUF + bytes([i]) for i in (3, 1, 2)}
    remote.add("org/name", CONFIG | parts | {"x-Q4_K_M.gguf": GGUF, "mmproj-f16.gguf": GGUF})
    located = hub.pull("org/name:Q4_K_M")
    assert located == hub.Located("gguf", located.path, "org/name:Q4_K_M")
    assert located.path.read_bytes() == GGUF
    assert remote.fetched() == ["x-Q4_K_M.gguf"]
    remote.requests.clear()
    seen: list[tuple[int, int]] = []
    located = hub.pull("org/name:Q8_0", lambda *at: seen.append(at))
    assert remote.fetched() == sorted(parts)
    assert located.path.name == "x-Q8_0-00001-of-00003.gguf"
    assert names(located.path.parent) == [Path(part).name for part in sorted(parts)]
    assert seen[-1] == (3 * len(GGUF) + 3,) * 2
    assert hub.locate("org/name:x-Q8_0-00001-of-00003.gguf").path == located.path
    (located.path.parent / "x-Q8_0-00002-of-00003.gguf").unlink()
    with pytest.raises(UsageError, match="no complete model"):
        hub.locate("org/name:Q8_0")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/ggufs", "2 types, Q4_0 and Q8_0"),
        ("org/ggufs:Q6_K", "it has Q4_0 and Q8_0"),
        ("org/ggufs:Q8_0", "any of 2 files"),
        ("org/ggufs:z.gguf", "no GGUF file 'z.gguf'"),
        ("org/pickles", "pickles"),
        ("org/shards", r"lacks '\.\./x\.safetensors'"),
        ("org/nothing", "no such repository on the hub"),
        ("org/private", "no such repository on the hub"),
        ("org/ggufs@v9:Q4_0", "no revision 'v9'"),
    ],
)
def test_a_name_that_cannot_be_fetches_nothing_large(remote: Hub, cache: Path, name: str, message: str) -> None:
    remote.add("org/ggufs", {"a-Q8_0.gguf": GGUF, "b-Q8_0.gguf": GGUF, "a-Q4_0.gguf": GGUF, "config.json": b"{}"})
    remote.add("org/pickles", CONFIG | OTHERS)
    remote.add("org/private", CONFIG, private=True)
    index = json.dumps({"weight_map": {"a": "../x.safetensors"}}).encode()
    remote.add("org/shards", CONFIG | SHARDED | {INDEX: index})
    with pytest.raises(UsageError, match=message) as caught:
        hub.pull(name)
    assert caught.value.exit_code == 2
    assert set(remote.fetched()) <= {INDEX}
    assert len(blobs(cache)) == len(remote.fetched())


def test_a_token_opens_what_is_private_and_what_is_gated(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.add("org/private", CONFIG | {"model.safetensors": WEIGHTS}, private=True)
    remote.add("org/gated", CONFIG | {"model.safetensors": WEIGHTS}, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.pull("org/private").path.is_dir()
    assert hub.pull("org/gated").path.is_dir()


@pytest.mark.parametrize(
    ("token", "message", "hint"),
    [
        (None, "org/gated is gated: its owners", "set HF_TOKEN to a token from {url}/settings/tokens"),
        (
            "hf_someone_else",
            "org/gated is gated: its owners",
            "Accept them at {url}/org/gated with the account of your",
        ),
        ("broken", r"refuses org/gated with status 401: .*Invalid credentials", "Is HF_TOKEN right?"),
    ],
)
def test_a_gated_repository_says_what_to_do(
    remote: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path, token: str | None, message: str, hint: str
) -> None:
    remote.add("org/gated", CONFIG | {"model.safetensors": WEIGHTS}, gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(LlmxError, match=message) as caught:
        hub.pull("org/gated")
    assert caught.value.exit_code == 1
    assert hint.format(url=remote.url) in f"{caught.value.hint}"
    assert not blobs(cache)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": 404}, "answers with status 404"),
        ({"status": 503}, "answers with status 503"),
        ({"status": 403}, "refuses org/name with status 403"),
        ({"body": b"<html>Please log in.</html>"}, "answers as no hub does"),
        ({"body": b"{}"}, "answers as no hub does"),
        ({"body": b"[1]"}, "answers as no hub does"),
    ],
)
def test_a_hub_that_fails_is_a_sentence(remote: Hub, answer: dict[str, Any], message: str) -> None:
    vars(remote).update(answer)
    with pytest.raises(LlmxError, match=message) as caught:
        hub.pull("org/name")
    assert caught.value.exit_code == 1
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_no_network_and_a_wrong_address_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        for url in (f"http://127.0.0.1:{unused.getsockname()[1]}", "nonsense", "http://[nonsense"):
            use(monkeypatch, url)
            with pytest.raises(LlmxError, match="org/name can't be fetched from") as caught:
                hub.pull("org/name")
            assert caught.value.exit_code == 1
            assert "Check the network" in f"{caught.value.hint}"


def test_offline_without_the_model_is_a_sentence(remote: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    remote.add("org/name", CONFIG | {"model.safetensors": WEIGHTS})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LlmxError, match="HF_HUB_OFFLINE forbids to fetch it") as caught:
        hub.pull("org/name")
    assert str(cache) in caught.value.message
    assert caught.value.exit_code == 1
    assert not remote.requests


def test_a_broken_connection_is_resumed_where_it_broke(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    remote.add("org/name", {"x-Q8_0.gguf": GGUF})
    remote.cut["x-Q8_0.gguf"] = 40_000
    seen: list[int] = []
    assert hub.pull("org/name:Q8_0", lambda done, total: seen.append(done)).path.read_bytes() == GGUF
    assert remote.ranges == ["bytes=40000-"]
    assert seen[-1] == len(GGUF)


def test_an_interrupt_leaves_nothing_in_use_and_keeps_finished_files(remote: Hub, cache: Path) -> None:
    remote.add("org/name", CONFIG | SHARDED | {"model-00002-of-00002.safetensors": WEIGHTS[:-1] + b"!"})

    def interrupt(done: int, total: int) -> None:
        if done > len(WEIGHTS) + 100_000:  # inside the second shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("org/name", interrupt)
    with pytest.raises(UsageError, match="no complete model"):
        hub.locate("org/name")
    assert not (cache / "models--org--name" / "refs").exists()
    remote.requests.clear()
    located = hub.pull("org/name")
    assert remote.fetched() == ["model-00002-of-00002.safetensors"]
    assert names(located.path) == sorted([*CONFIG, *SHARDED])


def test_a_disk_that_is_too_small_is_said_before_anything_large_comes(
    remote: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.add("org/name", CONFIG | SHARDED | {"model-00002-of-00002.safetensors": WEIGHTS[:-1] + b"!"})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 300_000))
    with pytest.raises(LlmxError, match=r"org/name needs 0\.4 MB, and .* has 0\.3 MB free") as caught:
        hub.pull("org/name")
    assert "HF_HOME" in f"{caught.value.hint}"
    assert remote.fetched() == [INDEX]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 500_000))
    located = hub.pull("org/name")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 250_000))
    (located.path / "model-00001-of-00002.safetensors").unlink()  # its blob is still there
    assert hub.pull("org/name") == located


def test_a_write_that_fails_is_a_sentence_and_nothing_is_used(
    remote: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    remote.add("org/name", {"x-Q8_0.gguf": GGUF})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(LlmxError, match=f"can't be kept in .*: {os.strerror(errno.EFBIG)}"):
            hub.pull("org/name:Q8_0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not blobs(cache)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(LlmxError, match=r"can't be kept in .*: the disk is full") as caught:
        hub.pull("org/name:Q8_0")
    assert "HF_HOME" in f"{caught.value.hint}"


def test_a_cache_that_cannot_be_written_is_a_sentence(remote: Hub, cache: Path) -> None:
    remote.add("org/name", {"x-Q8_0.gguf": GGUF})
    cache.write_text("a file where the folder should be")
    with pytest.raises(LlmxError, match="org/name:Q8_0 can't be kept in"):
        hub.pull("org/name:Q8_0")


def test_a_local_path_wins_over_the_hub(remote: Hub, tmp_path: Path) -> None:
    remote.add("org/name", CONFIG | {"model.safetensors": WEIGHTS})
    (tmp_path / "org" / "name").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        hub.pull("org/name")
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    assert hub.pull("org/name").path == hub.locate("org/name").path == Path("org/name")
    assert not remote.requests
