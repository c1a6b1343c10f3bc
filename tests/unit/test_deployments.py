"""Every file under cluster_configs/ is read by the tool that it is for, or, where that is a Kubernetes operator, by a
model of the fields that the operator documents. What they ask for is what the product takes."""

from __future__ import annotations

import copy
import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray.serve.schema import ServeDeploySchema

from ray_moe.cli.main import app
from ray_moe.config import load_config
from ray_moe.serve import keeper
from ray_moe.serve.schema import AppArgs

CONFIGS = Path(__file__).parents[2] / "cluster_configs"
CLUSTERS = ["local-cpu.yaml", "one-node-gpu.yaml", "one-node-gpus.yaml", "multi-node.yaml"]


def document(name: str) -> Any:
    return yaml.safe_load((CONFIGS / name).read_text())


def test_the_readme_lists_every_file() -> None:
    listed = set(re.findall(r"\]\(([^)#]+)\)", (CONFIGS / "README.md").read_text()))
    files = {str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*") if path.is_file()}
    grouped = {name for name in files if name.startswith(("plans/", "topologies/"))}
    assert files - grouped - {"README.md", "jobs/runtime-env.yaml"} <= listed
    assert all((CONFIGS / name).exists() for name in listed)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_configuration_is_valid(name: str) -> None:
    assert load_config(CONFIGS / name).name == "default"


# -- Serve


def serve_documents() -> dict[str, Any]:
    service = document("kuberay/rayservice.yaml")["spec"]["serveConfigV2"]
    return {
        "api": document("serve/api.yaml"),
        "service": document("serve/service.yaml"),
        "rayservice": yaml.safe_load(service),
    }


@pytest.mark.parametrize("name", ["api", "service", "rayservice"])
def test_a_serve_configuration_is_one_to_serve_and_its_arguments_are_to_us(name: str) -> None:
    schema = ServeDeploySchema.model_validate(serve_documents()[name])
    assert schema.http_options.port == 8000
    for application in schema.applications:
        module, _, function = application.import_path.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        if module == keeper.__name__:
            bound = keeper.build(application.args)
            assert application.route_prefix is None
        else:
            AppArgs.parse(application.args)
            bound = None
        names = {deployment.name for deployment in application.deployments}
        assert names <= {bound._bound_deployment.name if bound is not None else "OpenAI"}


@pytest.mark.parametrize("name", ["api", "service", "rayservice"])
def test_the_api_asks_for_keys_drains_slowly_and_refuses_before_serve_does(name: str) -> None:
    schema = ServeDeploySchema.model_validate(serve_documents()[name])
    (application,) = [one for one in schema.applications if one.import_path == "ray_moe.serve.app:build"]
    (deployment,) = application.deployments
    args = AppArgs.parse(application.args)
    assert args.api_keys_file is not None and not args.no_auth
    assert deployment.graceful_shutdown_timeout_s == 600
    assert deployment.max_ongoing_requests > args.max_concurrent + args.max_queued


def test_the_service_on_kubernetes_has_the_applications_of_the_one_beside_it() -> None:
    ours, theirs = serve_documents()["service"], serve_documents()["rayservice"]
    assert [(one["name"], one["import_path"]) for one in ours["applications"]] == [
        (one["name"], one["import_path"]) for one in theirs["applications"]
    ]
    assert ours["applications"][1] == theirs["applications"][1]


# -- KubeRay: the fields of its v1 API that these files use; unknown ones are refused, as its schema does. Names, types
# and what may be left out were compared by hand with the operator's Go types (`ray-operator/apis/ray/v1`), from which
# it generates that schema.


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Port(Strict):
    containerPort: int
    name: str = Field(max_length=15)


class Mount(Strict):
    name: str
    mountPath: str
    readOnly: bool = False


class Resources(Strict):
    requests: dict[Literal["cpu", "memory", "nvidia.com/gpu"], str]
    limits: dict[Literal["cpu", "memory", "nvidia.com/gpu"], str]


class Container(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    image: str
    ports: list[Port] = []
    resources: Resources
    volumeMounts: list[Mount] = []


class Claim(Strict):
    claimName: str


class Secret(Strict):
    secretName: str


class Volume(Strict):
    name: str
    persistentVolumeClaim: Claim | None = None
    secret: Secret | None = None


class PodSpec(Strict):
    terminationGracePeriodSeconds: int = 30
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume] = []


class Pod(Strict):
    spec: PodSpec


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: Pod


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int


class RayCluster(Strict):
    rayVersion: str
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]

    @property
    def groups(self) -> list[HeadGroup]:
        return [self.headGroupSpec, *self.workerGroupSpecs]


class ServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: RayCluster


class JobSpec(Strict):
    entrypoint: str
    backoffLimit: int
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: int
    rayClusterSpec: RayCluster


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=47)


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: ServiceSpec


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec


def ray_clusters() -> dict[str, RayCluster]:
    return {
        "rayservice": RayService.model_validate(document("kuberay/rayservice.yaml")).spec.rayClusterConfig,
        "rayjob": RayJob.model_validate(document("kuberay/rayjob.yaml")).spec.rayClusterSpec,
    }


@pytest.mark.parametrize("name", ["rayservice", "rayjob"])
def test_a_ray_cluster_on_kubernetes_is_whole(name: str) -> None:
    cluster = ray_clusters()[name]
    pinned = re.search(r"^ray==(\S+)$", (CONFIGS.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and cluster.rayVersion == pinned[1], "the operator starts Ray by this version's rules"
    for group in cluster.groups:
        spec = group.template.spec
        volumes = {volume.name for volume in spec.volumes}
        mounted = {mount.name for container in spec.containers for mount in container.volumeMounts}
        assert mounted == volumes
        assert all((volume.persistentVolumeClaim is None) != (volume.secret is None) for volume in spec.volumes)
        for container in spec.containers:
            assert container.resources.requests["memory"] == container.resources.limits["memory"]
    for workers in cluster.workerGroupSpecs:
        assert workers.minReplicas <= workers.replicas <= workers.maxReplicas
    images = {container.image for group in cluster.groups for container in group.template.spec.containers}
    assert len(images) == 1, "Ray wants one environment on all nodes"


def test_the_peers_of_both_find_room_on_their_workers() -> None:
    clusters = ray_clusters()
    keeper_args = serve_documents()["rayservice"]["applications"][0]["args"]
    job = options_of(document("kuberay/rayjob.yaml")["spec"]["entrypoint"])
    per_peer = float(next(text for text in job["settings"] if text.startswith("cpus_per_peer")).partition("=")[2])
    asked = {"rayservice": (keeper_args["peers"], keeper_args["cpus_per_peer"]), "rayjob": (job["peers"], per_peer)}
    for name, (peers, cpus) in asked.items():
        (workers,) = clusters[name].workerGroupSpecs
        room = int(workers.template.spec.containers[0].resources.requests["cpu"]) // cpus
        assert workers.replicas * room >= peers
    assert keeper_args["max_peers"] <= clusters["rayservice"].workerGroupSpecs[0].maxReplicas


# -- Commands in them


def options_of(line: str) -> dict[str, Any]:
    """What our own command line makes of a line; a usage error fails the test."""
    program, verb, *arguments = shlex.split(line)
    assert program == "ray-moe"
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    return dict(command.make_context(verb, arguments).params)


def test_the_job_on_kubernetes_is_a_batch_on_a_volume_that_outlives_it() -> None:
    job = RayJob.model_validate(document("kuberay/rayjob.yaml"))
    options = options_of(job.spec.entrypoint)
    mounts = {
        mount.mountPath for mount in job.spec.rayClusterSpec.headGroupSpec.template.spec.containers[0].volumeMounts
    }
    assert all(any(str(options[path]).startswith(f"{mount}/") for mount in mounts) for path in ("source", "target"))
    assert job.spec.backoffLimit > 0
    assert options["model"] is not None, "its Ray cluster has no cluster of ours yet"


def test_the_job_script_is_a_script_and_its_environment_is_one_to_ray() -> None:
    script = CONFIGS / "jobs" / "batch.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    assert script.stat().st_mode & 0o111
    RuntimeEnv(**document("jobs/runtime-env.yaml"))


# -- ray up


def test_the_cluster_launchers_configuration_is_valid_with_its_defaults() -> None:
    given = document("ray-up/aws.yaml")
    prepared = prepare_config(copy.deepcopy(given))
    validate_config(prepared)
    assert prepared["available_node_types"]["peers"]["min_workers"] == 4
    assert given["head_node_type"] in given["available_node_types"]
    assert sum(kind.get("max_workers", 0) for kind in given["available_node_types"].values()) <= given["max_workers"]


def test_the_image_has_the_pinned_ray() -> None:
    text = (CONFIGS / "Dockerfile").read_text()
    pinned = re.search(r"^ray==(\S+)$", (CONFIGS.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and set(re.findall(r"rayproject/ray:([\d.]+)-py", text)) == {pinned[1]}
