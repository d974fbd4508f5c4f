"""What /metrics says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from server.running import Running


def scraped(server: Running) -> dict[str, float]:
    """Sample name, and its own labels if it has any, to value: as Prometheus' own parser reads it."""
    status, raw, headers = server.raw("GET", "/metrics")
    assert status == 200
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(raw.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            assert sample.labels["model_name"]
            found[sample.name + "".join(f" {key}={value}" for key, value in labels.items())] = sample.value
    return found
