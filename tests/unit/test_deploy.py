"""The files under deploy/ are valid, and refer to options and metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from agent.cli.run_options import RUN_OPTIONS
from agent.web import metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.29", kubernetes_validate.latest_version())


def manifests() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    files = [(KUBERNETES / name).read_text() for name in kustomization["resources"]]
    return [manifest for text in files for manifest in yaml.safe_load_all(text)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifests_are_valid(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_manifests_refer_to_each_other_correctly() -> None:
    """Services select pods, sets name services, volumes have claims, and probes have ports."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for manifest in manifests():
        by_kind.setdefault(manifest["kind"], []).append(manifest)
    services = {each["metadata"]["name"]: each["spec"]["selector"] for each in by_kind["Service"]}
    claims = {each["metadata"]["name"] for each in by_kind["PersistentVolumeClaim"]}
    for each in by_kind["StatefulSet"]:
        spec, pod = each["spec"], each["spec"]["template"]
        labels = pod["metadata"]["labels"]
        assert services[spec["serviceName"]].items() <= labels.items()
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        for volume in pod["spec"].get("volumes", ()):
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
        for container in pod["spec"]["containers"]:
            ports = {port["name"] for port in container["ports"]}
            probes = [container.get(name, {}).get("httpGet") for name in ("readinessProbe", "livenessProbe")]
            assert {probe["port"] for probe in probes if probe} <= ports


def test_environment_variables_belong_to_options() -> None:
    known = {f"ELASTIC_AGENT_{name.upper()}" for name in option_names()} | {"POD_IP", "POD_NAME"}
    for manifest in manifests():
        if manifest["kind"] == "StatefulSet":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            assert {variable["name"] for variable in container["env"]} <= known


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
