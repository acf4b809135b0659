"""metrics.md: the metrics that an agent with `--http` serves."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from reference_pages.source import Source, cell, code_cell, page, sources_in, table

_KINDS = {
    "Counter": ("counter", "_total"),
    "CounterMetricFamily": ("counter", "_total"),
    "Histogram": ("histogram", ""),
    "GaugeMetricFamily": ("gauge", ""),
    "Gauge": ("gauge", ""),
}


def metrics_page() -> str:
    """The metrics of an agent with `--http`."""
    rows = sorted({row for source in sources_in("agent/web") for row in _metrics_of(source)})
    parts = [_intro(source) for source in sources_in("agent/web") if source.path.stem == "metrics"]
    return page(
        "Metrics",
        "An agent with `--http` serves these at `/metrics`, in the format of Prometheus. A histogram has the series "
        "`_bucket`, `_sum` and `_count`.\n",
        *parts,
        table(
            ("metric", "type", "labels", "meaning"),
            ((code_cell(name), kind, labels, cell(text)) for name, kind, labels, text in rows),
        ),
    )


def _intro(source: Source) -> str:
    return source.doc.partition("\n\n")[2] + "\n"


def _metrics_of(source: Source) -> Iterator[tuple[str, str, str, str]]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        name, text = node.args[0], node.args[1]
        if not isinstance(name, ast.Constant) or not isinstance(text, ast.Constant):
            continue
        if called in _KINDS:
            kind, suffix = _KINDS[called]
            listed = next((each.value for each in node.keywords if each.arg == "labels"), None)
            listed = listed if listed is not None else node.args[2]
            labels = ", ".join(f"`{label}`" for label in ast.literal_eval(listed))
            yield f"{name.value}{suffix}", kind, labels, str(text.value)
        elif called.endswith("gauge"):
            yield f"elastic_agent_{name.value}", "gauge", "`job_id`", str(text.value)
