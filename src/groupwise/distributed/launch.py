"""Scripts and manifests that start a recipe on several machines, as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from groupwise.config import Config
from groupwise.errors import UsageError

PORT, RAY_PORT = 29500, 6379
"""The port at which the processes of a run meet."""

AUTHENTICATION = (
    "# To have Ray check who connects: RAY_AUTH_MODE=token, one RAY_AUTH_TOKEN everywhere.",
    'export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}"',
)
"""Unset, the first machine asks for a token if it has one, and the others give none."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is to be started on several machines.

    Attributes:
        config: of the run.
        recipe: name or path, as the machines find it.
        overrides: `--set` arguments.
        nodes, per_node: machines, and processes on each of them under torchrun.
    """

    config: Config
    recipe: str
    overrides: Sequence[str]
    nodes: int = 1
    per_node: int = 1

    @property
    def name(self) -> str:
        """Name of the job: letters, digits and hyphens."""
        stem = re.sub(r"[^a-z0-9]+", "-", Path(self.recipe).stem.lower()).strip("-")
        return stem[:50].strip("-") or "groupwise"

    def train(self, *more: str) -> str:
        """The arguments of `groupwise`. A job that is started again continues its run."""
        words = ["train", self.recipe]
        for override in (*self.overrides, *more):
            words += ["--set", override]
        return shlex.join([*words, "--resume", self.config.output])

    def torchrun(self, node_rank: str, address: str) -> str:
        """The command of one machine."""
        return (
            f"torchrun --nnodes {self.nodes} --nproc-per-node {self.per_node} "
            f"--node-rank {node_rank} --master-addr {address} --master-port {PORT} "
            f"-m groupwise {self.train()}"
        )


def script(launch: Launch) -> str:
    """A shell script for every machine; with [cluster], for every machine of a Ray cluster.

    Without [cluster], NODE_RANK (0 on the first machine) and MASTER_ADDR (the first machine's
    address) are read from the environment.
    """
    lines = ["#!/bin/bash", "# Run on every machine, with the same files under the same paths."]
    if launch.config.cluster is None:
        lines += [
            "# NODE_RANK: 0 on the first machine, then 1, 2, …; MASTER_ADDR: address of the first.",
            "set -eu",
            launch.torchrun('"${NODE_RANK:-0}"', '"${MASTER_ADDR:-127.0.0.1}"'),
        ]
    else:
        lines += [
            "# NODE_RANK: 0 on the first machine, then 1, 2, …; MASTER_ADDR: address of the first.",
            *AUTHENTICATION,
            "set -eu",
            'if [ "${NODE_RANK:-0}" != 0 ]; then',
            f'    exec ray start --address "$MASTER_ADDR:{RAY_PORT}" --block',
            "fi",
            f"ray start --head --port {RAY_PORT}",
            "trap 'ray stop' EXIT",
            f"groupwise {launch.train('cluster.address=auto')}",
        ]
    return "\n".join(lines) + "\n"


def slurm(launch: Launch) -> str:
    """A batch script for SLURM: one task per machine."""
    own, cluster = launch.config, launch.config.cluster
    if cluster is None:
        cpus, gpus = launch.per_node * (own.threads or 1), launch.per_node
    else:
        cpus, gpus = (-(-total // launch.nodes) for total in _totals(own))
        cpus += 1  # for the driver
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={launch.name}",
        f"#SBATCH --nodes={launch.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={cpus}",
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
        "#SBATCH --requeue",
        "set -eu",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "",
    ]
    if cluster is None:
        command = launch.torchrun('"$SLURM_NODEID"', '"$1"')
        lines.append(f'srun --kill-on-bad-exit=1 bash -c {shlex.quote(command)} _ "$first"')
        return "\n".join(lines) + "\n"
    lines += [
        *AUTHENTICATION,
        f'srun --nodes=1 --ntasks=1 -w "$first" ray start --head --port {RAY_PORT} --block &',
    ]
    if launch.nodes > 1:
        lines.append(
            f'srun --nodes={launch.nodes - 1} --ntasks={launch.nodes - 1} --exclude "$first" '
            f'ray start --address "$first:{RAY_PORT}" --block &'
        )
    lines.append("sleep 20  # until the first machine answers")
    command = launch.train("cluster.address=auto")
    lines.append(f'srun --overlap --nodes=1 --ntasks=1 -w "$first" groupwise {command}')
    return "\n".join(lines) + "\n"


def kuberay(launch: Launch, *, image: str, claim: str) -> str:
    """A RayJob for the KubeRay operator.

    The driver runs on the head, which takes no other process; every rank, replica and scorer has a
    pod of its own.

    Args:
        image: with groupwise and its extra `ray`.
        claim: of a volume that all pods mount at /runs, which the recipe's output must lie under.

    Raises:
        UsageError: the recipe has no section [cluster], or its output is not on the volume.
    """
    config, of = launch.config, launch.config.cluster
    if of is None:
        raise UsageError(
            "[cluster]: a RayJob needs this section; add it, or take --on slurm or --on script."
        )
    if not Path(config.output).is_relative_to("/runs"):
        raise UsageError(
            f"output = {config.output!r}: must be under /runs, where all pods mount the volume; "
            f"--set output=/runs/{launch.name}."
        )

    def pod(cpus: float, gpus: float) -> dict[str, Any]:
        asked: dict[str, Any] = {"cpu": str(cpus), "memory": f"{4 * cpus:g}Gi"}
        if gpus:
            asked["nvidia.com/gpu"] = str(-(-gpus // 1)).removesuffix(".0")
        container = {
            "name": "ray",
            "image": image,
            "resources": {"requests": dict(asked), "limits": dict(asked)},
            "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
        }
        volume = {"name": "runs", "persistentVolumeClaim": {"claimName": claim}}
        return {"spec": {"containers": [container], "volumes": [volume]}}

    def workers(name: str, count: int, cpus: float, gpus: float) -> dict[str, Any]:
        return {
            "groupName": name,
            "replicas": count,
            "minReplicas": count,
            "maxReplicas": count,
            "rayStartParams": {},
            "template": pod(cpus, gpus),
        }

    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": launch.name},
        "spec": {
            "entrypoint": f"groupwise {launch.train('cluster.address=auto')}",
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": pod(2, 0),
                },
                "workerGroupSpecs": [
                    workers("ranks", of.ranks, of.rank_cpus, of.rank_gpus),
                    workers("replicas", of.replicas, of.replica_cpus, of.replica_gpus),
                    *(
                        [workers("scorers", of.scorers, of.scorer_cpus, of.scorer_gpus)]
                        if of.scorers
                        else []
                    ),
                ],
            },
        },
    }
    return yaml.safe_dump(job, sort_keys=False)


def _totals(config: Config) -> tuple[int, int]:
    """CPUs and GPUs of all ranks, replicas and scorers."""
    of = config.cluster
    assert of is not None
    cpus = of.ranks * of.rank_cpus + of.replicas * of.replica_cpus + of.scorers * of.scorer_cpus
    gpus = of.ranks * of.rank_gpus + of.replicas * of.replica_gpus + of.scorers * of.scorer_gpus
    return cpus, int(-(-gpus // 1))
