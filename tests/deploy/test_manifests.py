"""The Kubernetes manifests, built by a real kustomize and held against the schemas and against our own command line."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

OVERLAYS = Path(__file__).resolve().parents[2] / "deploy/kubernetes/overlays"
NAMES = sorted(path.name for path in OVERLAYS.iterdir())

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here, so no kustomize")


def build(overlay: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["kubectl", "kustomize", OVERLAYS / overlay], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def workloads(overlay: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for document in build(overlay):
        if document["kind"] in {"Deployment", "StatefulSet"}:
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def test_the_three_overlays_are_there() -> None:
    assert NAMES == ["cpu-demo", "gpu", "tls"]


@pytest.mark.parametrize("overlay", NAMES)
def test_overlay_is_valid_by_the_strict_schemas(overlay: str) -> None:
    documents = build(overlay)
    kinds = {document["kind"] for document in documents}
    assert kinds >= {"Deployment", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    for document in documents:
        kubernetes_validate.validate(document, "1.32", strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    document = next(d for d in build("cpu-demo") if d["kind"] == "StatefulSet")
    document["spec"]["serviceNam"] = document["spec"].pop("serviceName")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.32", strict=True)


@pytest.mark.parametrize("overlay", NAMES)
def test_pods_run_locked_down(overlay: str) -> None:
    for name, pod in workloads(overlay):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False, name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"], name
            assert context["capabilities"] == {"drop": ["ALL"]}, name


@pytest.mark.parametrize("overlay", NAMES)
def test_drain_fits_inside_the_grace_period(overlay: str) -> None:
    for name, pod in workloads(overlay):
        arguments = " ".join(pod["containers"][0]["args"]).replace("=", " ").split()
        drain = int(arguments[arguments.index("--drain-timeout") + 1])
        assert drain < pod["terminationGracePeriodSeconds"], name


@pytest.mark.parametrize("overlay", NAMES)
def test_every_container_has_its_three_probes(overlay: str) -> None:
    for name, pod in workloads(overlay):
        container = pod["containers"][0]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            kinds = {"grpc", "exec"} & set(container[probe])
            assert kinds == ({"exec"} if overlay == "tls" else {"grpc"}), (name, probe)


def test_tls_overlay_leaves_nothing_in_clear() -> None:
    for name, pod in workloads("tls"):
        env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
        assert env["STAGEMESH_INSECURE"] == "0", name
        assert {"STAGEMESH_TLS_CERT", "STAGEMESH_TLS_KEY", "STAGEMESH_TLS_CA", "STAGEMESH_TOKENS"} <= set(env), name
