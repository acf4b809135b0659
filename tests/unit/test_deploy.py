"""The files under deploy/ are valid, and refer to options and metrics that exist."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import click
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet

from agent.cli.run_options import RUN_OPTIONS
from agent.config import TimingConfig
from agent.errors import EXIT_BUDGET, EXIT_STORE, EXIT_TIMEOUT, EXIT_UNSAVED, EXIT_USAGE
from agent.web import metrics
from trainer_runtime.contract import EXIT_NO_RESTART

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
HAS_HELM = importlib.util.find_spec("helm_python") is not None
needs_helm = pytest.mark.skipif(not HAS_HELM, reason="the extra `charts` is not installed")
VERSIONS = ("1.29", kubernetes_validate.latest_version())
RENDER = """
import helm_python, json, sys
with helm_python.Chart.load(sys.argv[1]) as chart:
    print("\\n---\\n".join(chart.render(json.loads(sys.argv[2]), name="digits").values()))
"""
OTHER_VALUES = {
    "command": ["-m", "mine.train", '--name="a b"'],
    "nodes": 4,
    "gpus": 8,
    "checkpoints": {"claim": "shared"},
    "graceSeconds": 120,
    "options": {"handoff_timeout": 60},
}


def manifests() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    files = [(KUBERNETES / name).read_text() for name in kustomization["resources"]]
    return [manifest for text in files for manifest in yaml.safe_load_all(text)]


def jobset() -> dict[str, Any]:
    return cast("dict[str, Any]", yaml.safe_load((KUBERNETES / "jobset.yaml").read_text()))


@functools.cache
def charted(values: str = "{}") -> list[dict[str, Any]]:
    """Render the chart with Helm's own code. In a process of its own: Go sets signal handlers."""
    command = [sys.executable, "-c", RENDER, str(DEPLOY / "helm" / "elastic-agent"), values]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifests_are_valid(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_in_the_jobset_is_valid(version: str) -> None:
    (replicated,) = jobset()["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
    kubernetes_validate.validate(job, version, strict=True)


def test_the_jobset_has_only_fields_of_its_api() -> None:
    """A field that the API does not have is not read, and so does not come back."""
    given = jobset()
    given["spec"]["replicatedJobs"][0]["template"]["spec"]["template"] = {}  # the job is checked above
    assert JobSet.from_dict(given).to_dict() == given


@needs_helm
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, OTHER_VALUES], ids=["defaults", "other values"])
def test_the_chart_is_valid(values: dict[str, Any], version: str) -> None:
    found = charted(json.dumps(values))
    for manifest in found:
        kubernetes_validate.validate(manifest, version, strict=True)
    assert_references_are_right(found, claims={"shared"} if values else set())


@needs_helm
def test_values_of_the_chart_reach_the_pod() -> None:
    (stateful_set,) = [each for each in charted(json.dumps(OTHER_VALUES)) if each["kind"] == "StatefulSet"]
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    assert stateful_set["spec"]["replicas"] == 4
    assert stateful_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    assert container["args"] == OTHER_VALUES["command"]
    assert container["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 8}
    assert {"name": "ELASTIC_AGENT_HANDOFF_TIMEOUT", "value": "60"} in container["env"]


def test_manifests_refer_to_each_other_correctly() -> None:
    assert_references_are_right(manifests())


def assert_references_are_right(manifests: list[dict[str, Any]], claims: Iterable[str] = ()) -> None:
    """Services select pods, sets name services, volumes have claims, and probes have ports."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for manifest in manifests:
        by_kind.setdefault(manifest["kind"], []).append(manifest)
    services = {each["metadata"]["name"]: each["spec"]["selector"] for each in by_kind["Service"]}
    all_claims = {*claims, *(each["metadata"]["name"] for each in by_kind.get("PersistentVolumeClaim", ()))}
    for each in by_kind["StatefulSet"]:
        spec, pod = each["spec"], each["spec"]["template"]
        labels = pod["metadata"]["labels"]
        assert services[spec["serviceName"]].items() <= labels.items()
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        for volume in pod["spec"].get("volumes", ()):
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *all_claims}
        for container in pod["spec"]["containers"]:
            ports = {port["name"] for port in container["ports"]}
            probes = [container.get(name, {}).get("httpGet") for name in ("readinessProbe", "livenessProbe")]
            assert {probe["port"] for probe in probes if probe} <= ports


def node_pods() -> list[dict[str, Any]]:
    """Return the pod templates whose pods are nodes: of the StatefulSets and of the JobSet."""
    sets = [each for each in (*manifests(), *(charted() if HAS_HELM else ())) if each["kind"] == "StatefulSet"]
    replicated = jobset()["spec"]["replicatedJobs"]
    templates = [*(each["spec"] for each in sets), *(each["template"]["spec"] for each in replicated)]
    pods: list[dict[str, Any]] = [each["template"] for each in templates]
    return [pod for pod in pods if pod["metadata"]["labels"]["app"] == "elastic-agent"]


def test_environment_variables_belong_to_options() -> None:
    known = {f"ELASTIC_AGENT_{name.upper()}" for name in option_names()} | {"POD_IP"}
    assert len(node_pods()) == 2 + HAS_HELM
    for pod in node_pods():
        (container,) = pod["spec"]["containers"]
        assert {variable["name"] for variable in container["env"]} <= known


def test_pods_get_the_time_that_an_agent_takes_to_leave() -> None:
    timing = TimingConfig()
    needed_s = timing.handoff_timeout_s + timing.lease_ttl_s + timing.stop_grace_s + timing.kill_timeout_s
    for pod in node_pods():
        assert pod["spec"]["terminationGracePeriodSeconds"] >= needed_s


@pytest.mark.parametrize(
    ("code", "action"),
    [
        *((code, "FailJob") for code in (EXIT_UNSAVED, EXIT_BUDGET, EXIT_NO_RESTART, 3, 134)),
        *((code, "Count") for code in (1, EXIT_USAGE, EXIT_STORE, 128 + 9, 128 + 11, 128 + 15)),
        (EXIT_TIMEOUT, "Ignore"),
    ],
)
def test_a_pod_is_replaced_unless_its_exit_code_is_that_of_the_job(code: int, action: str) -> None:
    (replicated,) = jobset()["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    matching = [
        rule["action"]
        for rule in rules
        if "onExitCodes" in rule
        and (code in rule["onExitCodes"]["values"]) == (rule["onExitCodes"]["operator"] == "In")
    ]
    assert (matching or ["Count"])[0] == action


def option_names() -> set[str]:
    command = click.command()(lambda: None)
    for decorate in RUN_OPTIONS:
        command = decorate(command)
    return {parameter.name for parameter in command.params if parameter.name}


def test_the_dashboard_uses_existing_metrics() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    shown = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    source = Path(metrics.__file__).read_text()
    known = {f"elastic_agent_{name}" for name in re.findall(r'_gauge\(\s*"(\w+)"', source)}
    known |= set(re.findall(r'"(elastic_agent_\w+)"', source))
    for name in re.findall(r"elastic_agent_\w+", shown):
        assert re.sub(r"_(total|sum|bucket|count)$", "", name) in known, name


def test_the_prometheus_example_has_targets_and_credentials() -> None:
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["authorization"]["credentials_file"]
