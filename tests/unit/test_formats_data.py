"""Files of data sets: their names, rows of each format, and the way from a fake hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import pytest
from fake_hub import TOKEN, Hub
from huggingface_hub import constants

from llmx.errors import LlmxError, UsageError
from llmx.formats.hub_data import is_hub_name, locate_data
from llmx.formats.rows import read_rows

ROWS = [{"text": "one\u2028and more", "n": 1}, {"text": "two", "n": 2}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with fake_hub.serve() as served:
        yield served


@pytest.fixture
def remote(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    vars(server).update(vars(Hub(server.url)))
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path / "hf"),
        "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    return server


def fetched(name: str) -> bytes:
    return locate_data(name, lambda line: None).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "hf:org/set/data/rows.jsonl",
        "hf:org/set:data/rows.jsonl",
        "org/set:data/rows.jsonl",
        "hf:org/set@v1/data/rows.jsonl",
        "org/set@refs/pr/1:data/rows.jsonl",
    ],
)
def test_a_file_is_fetched_once_and_then_found_without_a_network(
    remote: Hub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.add("org/set", {"data/rows.jsonl": LINES, "other.jsonl": b"{}"})
    assert fetched(name) == LINES
    assert all(path.startswith("/datasets/org/set/") for _, path in remote.requests)
    asked = len(remote.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched(name) == LINES
    assert len(remote.requests) == asked


@pytest.mark.parametrize(
    ("name", "says", "hint"),
    [
        ("hf:org/none/x.jsonl", "There is no data set org/none", "/datasets/org/none"),
        ("hf:org/set/x.jsonl", "org/set has no file 'x.jsonl'", "/datasets/org/set/tree/main"),
        ("hf:org/set@no/rows.jsonl", "org/set has no revision 'no'", "/datasets/org/set/tree/main"),
        ("hf:org/shut/rows.jsonl", "org/shut is gated", "/datasets/org/shut"),
    ],
)
def test_what_the_hub_does_not_give_is_a_sentence(remote: Hub, name: str, says: str, hint: str) -> None:
    remote.add("org/set", {"rows.jsonl": LINES})
    remote.add("org/shut", {"rows.jsonl": LINES}, gated=True)
    with pytest.raises(LlmxError, match=says) as error:
        fetched(name)
    assert hint in (error.value.hint or "")


def test_a_token_opens_a_gated_data_set(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.add("org/shut", {"rows.jsonl": LINES}, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetched("hf:org/shut/rows.jsonl") == LINES


@pytest.mark.parametrize("name", ["hf:", "hf:rows.jsonl", "hf:org/set", "hf:org/set/", "hf:org/set/../x", "hf:a/b//c"])
def test_a_name_of_no_file_is_refused_before_any_request(remote: Hub, name: str) -> None:
    with pytest.raises(UsageError, match="names no file of a data set"):
        fetched(name)
    assert remote.requests == []


def test_a_path_is_itself_also_where_it_looks_like_a_hubs_name(remote: Hub, tmp_path: Path) -> None:
    assert not is_hub_name("data/rows.jsonl")
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "set:rows.jsonl").write_bytes(LINES)
    assert fetched("org/set:rows.jsonl") == LINES
    assert remote.requests == []


def test_lines_and_lists_give_the_same_rows(tmp_path: Path) -> None:
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_bytes(LINES.replace(b"\n", b"\r\n\r\n"))
    array.write_text(json.dumps(ROWS, indent=2))
    assert [row.data for row in read_rows(lines, "x")] == ROWS
    assert [row.data for row in read_rows(array, "x")] == ROWS
    assert [row.where for row in read_rows(lines, "x")] == ["x, line 1", "x, line 3"]
    assert [row.where for row in read_rows(array, "x")] == ["x, entry 1", "x, entry 2"]


@pytest.mark.parametrize("line", ["{", "3", "[" * 100_000, '"text"'])
def test_what_is_no_object_has_no_data_and_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n" + line)
    assert [(row.where, row.data) for row in read_rows(path, "x")] == [("x, line 1", {}), ("x, line 2", None)]


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"text": "\xe9"}')
    with pytest.raises(UsageError, match="x is not UTF-8 text: byte 10"):
        read_rows(tmp_path / "latin", "x")
    with pytest.raises(UsageError, match="x can't be read: Is a directory"):
        read_rows(tmp_path, "x")


def test_parquet_gives_the_same_rows_and_only_the_columns_asked_for(tmp_path: Path) -> None:
    why = "pyarrow is not installed: pip install 'llmx[eval]'"
    arrow, parquet = (pytest.importorskip(name, reason=why) for name in ("pyarrow", "pyarrow.parquet"))
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    assert [row.data for row in read_rows(path, "x")] == ROWS
    assert [row.data for row in read_rows(path, "x", ("text", "absent"))] == [{"text": row["text"]} for row in ROWS]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="x can't be read"):
        read_rows(path, "x")


def test_parquet_without_pyarrow_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="needs pyarrow") as error:
        read_rows(tmp_path / "a", "x")
    assert error.value.hint == "Run: pip install pyarrow"
