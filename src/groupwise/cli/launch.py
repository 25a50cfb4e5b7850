"""The command that prints how to start a recipe on several machines: launch."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from groupwise.cli.options import Overrides, Recipe, TrustRecipe

System = Literal["script", "slurm", "kubernetes"]


def launch(
    recipe: Recipe,
    on: Annotated[
        System, typer.Option("--on", help="A script for each machine, SLURM, or Kubernetes.")
    ] = "script",
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Number of machines.")] = 1,
    per_node: Annotated[
        int,
        typer.Option("--per-node", min=1, help="Processes per machine, for torchrun."),
    ] = 1,
    image: Annotated[
        str, typer.Option("--image", help="Container image (Kubernetes).")
    ] = "groupwise:latest",
    claim: Annotated[
        str, typer.Option("--claim", help="Persistent volume claim to mount at /runs (Kubernetes).")
    ] = "runs",
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
) -> None:
    """Print the script or manifest that starts a recipe on several machines.

    Without a [cluster] section, processes are started by torchrun; with it, on a Ray cluster.
    """
    from groupwise.config import load
    from groupwise.distributed.launch import Launch, kuberay, script, slurm

    given = list(overrides or [])
    config = load(recipe, given, trust_recipe=trust_recipe)
    job = Launch(config=config, recipe=recipe, overrides=given, nodes=nodes, per_node=per_node)
    if on == "kubernetes":
        print(kuberay(job, image=image, claim=claim), end="")
    else:
        print(slurm(job) if on == "slurm" else script(job), end="")
