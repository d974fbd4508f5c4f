"""llama.cpp's own server tests against our server: those that ask what we answer too. The rest are listed with reasons.

The tests are read from a source tree (--tests …/tools/server/tests; nothing of it is here). They start llama-server and
ask it; here each "start" serves a tiny model instead, with the chat template that the test names, and a test is skipped
where it needs what we haven't: a route, a request field, a server flag, a real model's words. Exit code 3 if a test
fails that nothing excuses.

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

import _llama_native as native
import pytest

HERE = Path(__file__).resolve().parent
RESULTS = "LLMX_LLAMA_TESTS_RESULTS"  # the variable in which the run finds where to write
ROUTES = {
    "/chat/completions": "/v1/chat/completions",
    "/models": "/v1/models",
    **{path: path for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/v1/health")},
    **{path: path for path in ("/definitely/not/a/real/path",)},
}
OTHER_FIELDS = (  # of requests, that would change the answer and that we lack
    *("timings_per_token", "lora", "return_progress", "reasoning_control", "reasoning_budget_tokens", "samplers"),
    *("thinking_budget_tokens", "n_probs", "post_sampling_probs", "parse_tool_calls", "response_fields"),
)
OTHER_FLAGS = {  # of llama-server, with the value that means "off"
    **dict.fromkeys(("slot_save_path", "lora_files", "spec_type", "mmproj_url", "media_path", "sleep_idle_seconds")),
    **dict.fromkeys(("server_tools", "mcp_servers_config", "mcp_servers_json", "cors_origins", "model_draft")),
    **dict.fromkeys(("model_tags", "models_dir", "models_preset", "cache_ram", "pooling")),
    **dict.fromkeys(("server_embeddings", "server_reranking", "enable_ctx_shift", "ui_mcp_proxy", "gcp_compat"), False),
}
OTHER_FILES = {  # of theirs, that are about what we don't have
    **dict.fromkeys(("compat_anthropic", "compat_gcp", "compat_oai_responses"), "another API"),
    **dict.fromkeys(("embedding", "rerank", "systemone"), "models that don't generate text"),
    **dict.fromkeys(("mcp_servers", "proxy", "tools_builtin"), "tools that the server itself runs"),
    **dict.fromkeys(("router", "stream"), "several models behind one server"),
    **dict.fromkeys(("slot_save", "kv_keep_only_active", "ctx_shift"), "how llama.cpp keeps its cache"),
    **{"vision_api": "images", "lora": "adapters", "infill": "filling in", "speculative": "drafts of a second model"},
    **{"sleep": "unloading of a model that nobody uses"},
}
WORDS = "wants a real model's words"
TINY = "ggml-org/test-model-stories260K"  # for which ours stands in
TEMPLATES = {  # of models that they load, by the beginning of the name: in models/templates of their tree
    "bartowski/Meta-Llama-3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "bartowski/Llama-3.2": "meta-llama-Llama-3.2-3B-Instruct",
    "bartowski/Qwen2.5": "Qwen-Qwen2.5-7B-Instruct",
    "bartowski/gemma-2": "google-gemma-2-2b-it",
    "bartowski/Phi-3.5": "microsoft-Phi-3.5-mini-instruct",
    "bartowski/DeepSeek-R1-Distill-Qwen": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
}
TURN = "{{ '<|start_header_id|>' ~ %s ~ '<|end_header_id|>\n\n' }}"
COMMAND = "{{ '<|START_OF_TURN_TOKEN|><|' ~ {'system': 'SYSTEM', 'user': 'USER'}.get(%s, 'CHATBOT') ~ '_TOKEN|>' }}"
BUILT_IN = {  # templates that llama-server knows by a name: what begins a turn, and what ends it
    "llama3": (TURN, "<|eot_id|>"),
    "command-r": (COMMAND, "<|END_OF_TURN_TOKEN|>"),
    "chatml": ("{{ '<|im_start|>' ~ %s ~ '\n' }}", "<|im_end|>\n"),
}
FORMS = ("response_format", "json_schema", "grammar")
THINKING = {"on": True, "auto": True, "off": False}  # enable_thinking, which llama-server tells every template
# Tests by the beginning of their names, and why they say nothing about us.
EXCUSED = {
    **dict.fromkeys(("test_weather", "test_calc_result", "test_thoughts", "test_hello_world"), WORDS),
    "test_chat_completion[": "counts tokens and words of another model, and wants a build number as system_fingerprint",
    "test_chat_completion_cached_tokens": "counts tokens of another model, and what llama.cpp's slots keep",
    "test_chat_completion_stream": "counts tokens of another model, and wants a build number as system_fingerprint",
    "test_chat_completion_with_openai_library": "wants a build number as system_fingerprint",
    "test_completion_with_openai_library": "wants a build number as system_fingerprint",
    "test_completion_stream_with_openai_library_stops": WORDS,
    "test_chat_template[": "wants another model's first token",
    "test_chat_template_assistant_prefill": "continues an answer unasked; here continue_final_message asks for it",
    "test_tokenize_with_bos": "wants another model's first token",
    "test_date_inside_prompt": "tells every template the date; here, as in transformers, one asks by strftime_now",
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
    "test_openai_library_correct_api_key": "routes without /v1",
}
LONGEST = 16384  # tokens
FIELDS = ("passed", "failed", "skipped")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of theirs is read: their helper module, with servers and addresses of ours."""
    sys.modules["wget"] = types.ModuleType("wget")  # they import it to download models
    sys.path[:0] = [os.getcwd(), str(HERE.parent / "tests")]
    import utils

    plugin = Ours(tempfile.mkdtemp(prefix="llama-tests-"))
    matches = utils.match_regex
    utils.ServerPreset.load_all = lambda: None
    utils.ServerProcess.start = lambda process, *_, **__: plugin.start(process)
    utils.ServerProcess.stop = lambda process: plugin.stop(process)
    # Another model says other words, except where they are prescribed.
    utils.match_regex = lambda regex, text: matches(regex, text) if plugin.bound else isinstance(text, str)
    utils.ServerProcess.make_request = plugin.asking(utils.ServerProcess.make_request)
    utils.ServerProcess.make_stream_request = plugin.streaming(utils.ServerProcess.make_stream_request)
    early_config.pluginmanager.register(plugin)


class Ours:
    """One engine per length of context for all tests; a server for each that starts one."""

    def __init__(self, scratch: str) -> None:
        self.scratch = Path(scratch)
        self.folder: Path | None = None
        self.engines: dict[int, Any] = {}
        self.own: Any = None  # the template that the model has
        self.bound = False  # whether the last request said what the text must look like
        self.open: dict[Any, tuple[Any, Any]] = {}
        self.found: dict[str, tuple[str, str]] = {}

    def start(self, process: Any) -> None:
        from server.running import running

        from llmx.server import keys
        from llmx.tokenizer.chosen import choose_template

        for flag, off in OTHER_FLAGS.items():
            if getattr(process, flag, off) not in (off, None):
                pytest.skip(f"llama-server's flag {flag}")
        template = self.template(process)
        llm = self.engine(process.n_ctx // (1 if process.kv_unified else process.n_slots or 1))
        llm.tokenizer.template = choose_template(llm.tokenizer, str(template)) if template else self.own
        defaults = {"temperature": process.temperature, "seed": process.seed}
        if process.n_predict and process.n_predict > 0:
            defaults["max_tokens"] = process.n_predict
        context = running(
            llm,
            served_names=(process.model_alias or "tinyllama-2",),
            keys=keys.read([process.api_key] if process.api_key else (), None),
            reasoning_parser="off" if process.reasoning_format == "none" else "auto",
            defaults=defaults,
        )
        started = context.__enter__()
        started.server.service.names += ("gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "davinci-002")
        self.open[process] = context, llm
        process.server_host, process.server_port = "127.0.0.1", started.port
        sys.modules["utils"].server_instances.add(process)

    def template(self, process: Any) -> Path | None:
        """The file of the chat template that a server is started with; None: the model's own."""
        tree = Path("../../../models/templates")
        if process.chat_template_file:
            return Path(process.chat_template_file)
        if given := process.chat_template:
            if given in BUILT_IN:
                begin, end = BUILT_IN[given]
                given = f"{{%- for m in messages -%}}{begin % 'm.role'}{{{{ m.content ~ {end!r} }}}}{{%- endfor -%}}"
                given += f"{{%- if add_generation_prompt -%}}{begin % repr('assistant')}{{%- endif -%}}"
            file = self.scratch / "template.jinja"
            file.write_text(given, encoding="utf-8")
            return file
        repository = process.model_hf_repo or ""
        for beginning, name in TEMPLATES.items():
            if repository.startswith(beginning):
                return tree / f"{name}.jinja"
        if repository != TINY:
            pytest.skip(WORDS)
        return None

    def engine(self, context: int) -> Any:
        from server.model import build

        from llmx.llm import LLM

        if self.folder is None:
            self.folder = build(self.scratch / "tiny", context=LONGEST)
        if context not in self.engines:
            self.engines[context] = LLM(
                str(self.folder),
                dtype="float32",
                device="cpu",
                threads=1,
                max_model_len=context,
                kv_cache_bytes=16 * 2**20,
            )
            self.own = self.own or self.engines[context].tokenizer.template
        return self.engines[context]

    def stop(self, process: Any) -> None:
        sys.modules["utils"].server_instances.discard(process)
        if opened := self.open.pop(process, None):
            opened[0].__exit__(None, None, None)

    def asking(self, original: Any) -> Any:
        def request(process: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Any:
            def ask(path: str, data: Any) -> Any:
                answer = original(process, method, path, data, *rest, **more)
                self.unless_unknown_calls(answer.body)
                return answer

            if path not in ROUTES and path not in native.ROUTES:
                # Not seen of test_completion_parallel_slots, which asks /slots in a thread and drops what goes wrong.
                pytest.skip(f"llama-server's route {path}")
            data = self.adapted(process, data)
            if path in native.ROUTES:
                return native.ROUTES[path](ask, data)
            answer = ask(ROUTES[path], data)
            if process.debug and answer.status_code == 200 and "messages" in (data or {}):
                answer.body["__verbose"] = native.apply_template(ask, data).body
            return answer

        return request

    def streaming(self, original: Any) -> Any:
        def request(process: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Any:
            if path not in ROUTES and path not in native.COMPLETIONS:
                pytest.skip(f"llama-server's route {path}")
            data = self.adapted(process, data)
            if path in native.COMPLETIONS:
                yield from native.stream(
                    original(process, method, "/v1/completions", native.completion(data), *rest, **more)
                )
                return
            try:
                for chunk in original(process, method, ROUTES[path], data, *rest, **more):
                    for choice in chunk["choices"]:
                        if choice.get("delta", {}).get("content") == "":
                            choice["delta"]["content"] = None  # how llama-server begins
                    yield chunk
            except sys.modules["utils"].ServerError as error:
                self.unless_unknown_calls(error.body)
                raise

        return request

    def adapted(self, process: Any, data: Any) -> Any:
        """A request's body with what the server's flags say, and so that a model with random words gets to an end."""
        if not isinstance(data, dict):
            return data
        for field in OTHER_FIELDS:
            if field in data:
                pytest.skip(f"the request field {field}")
        self.bound = any(data.get(field) for field in FORMS)
        if process.reasoning in THINKING and "messages" in data:
            data = data | {"chat_template_kwargs": {"enable_thinking": THINKING[process.reasoning]}}
        if data.get("tool_choice") == "required" or self.bound:
            tokenizer = self.open[process][1].tokenizer
            biases = {token: -100 for token in range(tokenizer.vocab_size) if tokenizer.piece(token).isspace()}
            biases |= {tokenizer.encode(text, add_special=False)[0]: bias for text, bias in (('"', 100), ("}", 90))}
            data = data | {"logit_bias": {str(token): bias for token, bias in biases.items()}}
        return data

    def unless_unknown_calls(self, body: Any) -> None:
        error = body.get("error") if isinstance(body, dict) else None
        if error and (error["param"], error["code"]) == ("tools", "unsupported_parameter"):
            pytest.skip(error["message"])

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
        for llm in self.engines.values():
            llm.close()
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
