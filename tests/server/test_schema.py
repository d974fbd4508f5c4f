"""schemathesis against the server's own description of itself: every field missing, null, wrong, at its bounds, …"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from server.running import Running

pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'llmx[test]'")

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_request_that_the_description_leads_to_is_answered_with_a_server_error(
    server: Running, tmp_path: Path
) -> None:
    """Its coverage phase is on, and 503 is an error here too: nothing overloads this server."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{server.port}/openapi.json"]
    command += ["--checks", CHECKS, "--phases", "examples,coverage", "--seed", "1", "--no-color", "--warnings", "off"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    generated = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
    assert generated, run.stdout[-1000:]
    assert int(generated[1]) == int(generated[2]) > 500
    assert server.call("GET", "/ready")[0] == 200
