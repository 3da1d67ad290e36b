"""The manifests of the page Operations, checked against the operators' own definitions.

The programs in their pods are tested in tests/clusters.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.docs.blocks import ROOT

jsonschema: Any = pytest.importorskip("jsonschema")

FILES = ROOT / "docs" / "examples" / "operations"
CRDS = Path(__file__).with_name("crds")
MANIFESTS = {"rayjob.yaml": "rayjobs", "raycluster.yaml": "rayclusters", "daskjob.yaml": "daskjobs"}
USER = 1000


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load((FILES / name).read_text())
    return found


def definition(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((CRDS / f"{MANIFESTS[name]}.json.gz").read_bytes()))
    return found


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a definition as `kubectl --validate=strict` reads it: a key without a definition is a mistake."""
    schema = dict(schema)
    if schema.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    if "properties" in schema:
        schema["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = strict(schema["additionalProperties"])
    if isinstance(schema.get("items"), dict):
        schema["items"] = strict(schema["items"])
    return schema


def problems(name: str, given: dict[str, Any]) -> list[str]:
    found = definition(name)
    assert (given["kind"], given["apiVersion"]) == (found["kind"], found["apiVersion"])
    whole = strict(found["schema"])
    for key in ("apiVersion", "kind"):
        whole["properties"][key] = {"type": "string"}
    whole["properties"]["metadata"] = {"type": "object"}
    return [each.message for each in jsonschema.Draft7Validator(whole).iter_errors(given)]


def pods(name: str) -> dict[str, dict[str, Any]]:
    """Return the pods of a manifest, by their purpose."""
    spec = manifest(name)["spec"]
    if name == "daskjob.yaml":
        cluster = spec["cluster"]["spec"]
        found = {"driver": spec["job"], "scheduler": cluster["scheduler"], "worker": cluster["worker"]}
    else:
        ray = spec.get("rayClusterSpec", spec)
        groups = {f"worker {each['groupName']}": each["template"] for each in ray["workerGroupSpecs"]}
        found = {"head": ray["headGroupSpec"]["template"], **groups}
    return {what: each["spec"] for what, each in found.items()}


@pytest.mark.parametrize("name", MANIFESTS)
class TestManifests:
    def test_manifests_match_operator_schema(self, name: str) -> None:
        assert problems(name, manifest(name)) == []

    def test_a_mistake_is_found(self, name: str) -> None:
        """A misspelt key at any depth, and a value of another type, are reported."""
        given = manifest(name)
        containers = next(iter(_containers(given)))

        def broken(change: Callable[[dict[str, Any]], object]) -> list[str]:
            before = copy.deepcopy(containers)
            change(containers[0])
            found = problems(name, given)
            containers[:] = before
            return found

        assert broken(lambda container: container.update(volumeMount=[]))
        assert broken(lambda container: container["resources"].update(request={}))
        assert broken(lambda container: container.update(image=3))
        assert problems(name, {**given, "spec": {**given["spec"], "clusterSpecs": {}}})

    def test_gpus_are_the_workers_only(self, name: str) -> None:
        """Only workers have GPUs, and each container requests CPUs and memory."""
        for what, pod in pods(name).items():
            (container,) = pod["containers"]
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert ("nvidia.com/gpu" in container["resources"]["limits"]) == what.startswith("worker")

    def test_all_that_write_checkpoints_have_the_volume(self, name: str) -> None:
        for what, pod in pods(name).items():
            assert pod["securityContext"]["runAsUser"] == USER
            if what != "scheduler":
                mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
                assert mounts["runs"] == "/job/runs"
                assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]


def _containers(given: Any) -> Iterator[list[Any]]:
    for key, value in given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ():
        if key == "containers":
            yield value
        else:
            yield from _containers(value)


@pytest.mark.parametrize("name", ["rayjob.yaml", "daskjob.yaml"])
def test_driver_grace_is_shorter_than_pod_grace(name: str) -> None:
    """A driver's grace is shorter than its pod's: it could be killed while it writes."""
    pod = next(iter(pods(name).values()))
    told = {each["name"]: int(each["value"]) for each in pod["containers"][0]["env"]}
    assert all(value < pod["terminationGracePeriodSeconds"] for value in told.values())
    assert "COLOCATE_GRACE_S" in told
