"""llama.cpp's own server tests against our server: those that ask what we answer too. The rest are listed with reasons.

The tests are read from a source tree (--tests …/tools/server/tests; nothing of it is here). They start llama-server and
ask it; here each "start" serves a tiny model instead, and a test is skipped where it needs what we haven't: a route, a
request field, a server flag, another model's words. Exit code 3 if a test fails that nothing excuses.

It also is the pytest plugin that does this, loaded into the run that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
RESULTS = "LLMX_LLAMA_TESTS_RESULTS"  # the variable in which the run finds where to write
ROUTES = {
    "/chat/completions": "/v1/chat/completions",
    "/models": "/v1/models",
    **{path: path for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/v1/health")},
    **{path: path for path in ("/definitely/not/a/real/path",)},
}
OTHER_FIELDS = (  # of requests, that we refuse (structured output and tools come with an issue of their own) or lack
    *("response_format", "json_schema", "grammar", "tools", "tool_choice", "n_predict", "timings_per_token", "lora"),
    *("return_progress", "reasoning_control", "reasoning_budget_tokens", "thinking_budget_tokens", "n_probs"),
    *("post_sampling_probs", "parse_tool_calls", "id_slot", "cache_prompt", "chat_template_kwargs", "samplers"),
)
OTHER_FLAGS = {  # of llama-server, with the value that means "off"
    **dict.fromkeys(("slot_save_path", "lora_files", "spec_type", "mmproj_url", "media_path", "sleep_idle_seconds")),
    **dict.fromkeys(("server_tools", "mcp_servers_config", "mcp_servers_json", "cors_origins", "model_draft")),
    **dict.fromkeys(("chat_template", "chat_template_file", "model_tags", "models_dir", "models_preset", "cache_ram")),
    **dict.fromkeys(("reasoning", "reasoning_format", "pooling")),
    **dict.fromkeys(("server_embeddings", "server_reranking", "enable_ctx_shift", "ui_mcp_proxy", "gcp_compat"), False),
}
OTHER_FILES = {  # of theirs, that are about what we don't have
    **dict.fromkeys(("compat_anthropic", "compat_gcp", "compat_oai_responses"), "another API"),
    **dict.fromkeys(("embedding", "rerank", "systemone"), "models that don't generate text"),
    **dict.fromkeys(("mcp_servers", "proxy", "tools_builtin"), "tools that the server itself runs"),
    **dict.fromkeys(("router", "stream"), "several models behind one server"),
    **dict.fromkeys(("slot_save", "kv_keep_only_active", "ctx_shift"), "how llama.cpp keeps its cache"),
    **{"vision_api": "images", "lora": "adapters", "infill": "filling in", "speculative": "drafts of a second model"},
    **{"sleep": "unloading of a model that nobody uses", "tool_call": "calls of tools"},
}
# Tests by the beginning of their names, and why they say nothing about us.
EXCUSED = {
    "test_chat_completion[": "counts tokens and words of another model, and wants a build number as system_fingerprint",
    "test_chat_completion_cached_tokens": "counts tokens of another model, and what llama.cpp's slots keep",
    "test_chat_completion_stream": "counts tokens of another model, and wants null where we begin with an empty text",
    "test_chat_completion_with_openai_library": "wants a build number as system_fingerprint",
    "test_completion_with_openai_library": "wants a build number as system_fingerprint",
    "test_completion_stream_with_openai_library_stops": "wants another model's words",
    "test_no_ui": "a web page",
    "test_access_static_assets": "a web page",
    "test_cors_options": "pages of any origin are let in there by default; here only those that were named",
    "test_cors_proxy": "a proxy",
    "test_server_multiple_addresses": "several addresses of one server",
    "test_server_model_aliases_and_tags": "tags",
    "test_invalid_chat_completion_req[messages7]": "refuses two answers in a row; here the template decides",
    "test_logprobs_stream": "wants null where we begin with an empty text",
    "test_logprobs": "joins tokens; here, as in OpenAI's API, one that is no text is shown by its bytes",
    "test_context_size_exceeded": "a type of error of its own, where OpenAI has invalid_request_error and a code",
    "test_verbose_debug": "the request field __verbose",
    "test_completion_parallel_slots": "llama-server's route /completion",
    "test_completion_unified": "llama-server's route /completion",
    "test_openai_library_correct_api_key": "routes without /v1",
}
FIELDS = ("passed", "failed", "skipped")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of theirs is read: their helper module, with servers and addresses of ours."""
    sys.modules["wget"] = types.ModuleType("wget")  # they import it to download models
    sys.path[:0] = [os.getcwd(), str(HERE.parent / "tests")]
    import utils

    plugin = Ours(tempfile.mkdtemp(prefix="llama-tests-"))
    utils.ServerPreset.load_all = lambda: None
    utils.ServerProcess.start = lambda process, *_, **__: plugin.start(process)
    utils.ServerProcess.stop = lambda process: plugin.stop(process)
    utils.match_regex = lambda regex, text: isinstance(text, str)  # another model says other words
    for name in ("make_request", "make_stream_request", "make_any_request"):
        setattr(utils.ServerProcess, name, plugin.asking(getattr(utils.ServerProcess, name)))
    early_config.pluginmanager.register(plugin)


class Ours:
    """One engine for all tests; a server for each that starts one."""

    def __init__(self, scratch: str) -> None:
        self.scratch = scratch
        self.llm: Any = None
        self.open: dict[Any, Any] = {}
        self.found: dict[str, tuple[str, str]] = {}

    def start(self, process: Any) -> None:
        from server.running import running

        from llmx.llm import LLM
        from llmx.server import keys

        for flag, off in OTHER_FLAGS.items():
            if getattr(process, flag, off) not in (off, None):
                pytest.skip(f"llama-server's flag {flag}")
        if self.llm is None:
            from server.model import build

            folder = str(build(Path(self.scratch) / "tiny"))
            self.llm = LLM(folder, dtype="float32", device="cpu", threads=1, kv_cache_bytes=16 * 2**20)
        mine = keys.read([process.api_key] if process.api_key else (), None)
        context = running(self.llm, served_names=(process.model_alias or "tinyllama-2",), keys=mine)
        started = context.__enter__()
        started.server.service.names += ("gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "davinci-002")
        self.open[process] = context
        process.server_host, process.server_port = "127.0.0.1", started.port
        sys.modules["utils"].server_instances.add(process)

    def stop(self, process: Any) -> None:
        sys.modules["utils"].server_instances.discard(process)
        if context := self.open.pop(process, None):
            context.__exit__(None, None, None)

    def asking(self, original: Any) -> Any:
        def ask(process: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Any:
            if path not in ROUTES:
                pytest.skip(f"llama-server's route {path}")
            for field in OTHER_FIELDS:
                if isinstance(data, dict) and field in data:
                    pytest.skip(f"the request field {field}")
            return original(process, method, ROUTES[path], data, *rest, **more)

        return ask

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for beginning, reason in EXCUSED.items():
            if f"{item.name}[".startswith(beginning) or item.name.startswith(beginning):
                pytest.skip(reason)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            said = str(report.longrepr)[-300:] if report.outcome == "failed" else reason.removeprefix("Skipped: ")
            self.found[report.nodeid] = (report.outcome, said)

    def pytest_sessionfinish(self) -> None:
        if self.llm is not None:
            self.llm.close()
        Path(os.environ[RESULTS]).write_text(json.dumps(self.found), encoding="utf-8")


def main() -> int:
    from _common import publish

    from llmx.report import Report

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=Path, required=True, help="tools/server/tests of a llama.cpp source tree")
    parser.add_argument("-k", default="", help="only tests whose names match, as pytest's -k")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.tests.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.json"
        environment = os.environ | {RESULTS: str(results), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
        command = [sys.executable, "-m", "pytest", "-p", "llama_server_tests", "-p", "no:cacheprovider", "-q"]
        command = [*command, "--rootdir", str(folder), "-k", options.k, "unit"]
        command += [f"--ignore=unit/test_{name}.py" for name in OTHER_FILES]
        subprocess.run(command, cwd=folder, env=environment, check=False, stdout=sys.stderr)
        found: dict[str, tuple[str, str]] = json.loads(results.read_text(encoding="utf-8"))
    by = {outcome: [name for name, (said, _) in found.items() if said == outcome] for outcome in FIELDS}
    reasons = Counter(reason for said, reason in found.values() if said == "skipped")
    report = {
        **{outcome: len(names) for outcome, names in by.items()},
        "passed_tests": by["passed"],
        "failed_tests": {name: found[name][1] for name in by["failed"]},
        "left_out": {f"test_{name}.py": reason for name, reason in OTHER_FILES.items()},
        "reasons": dict(reasons.most_common()),
        "skipped_tests": {name: found[name][1] for name in by["skipped"]},
    }
    publish(Report("llama-server-tests", report), options.json)
    return 3 if by["failed"] or not by["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
