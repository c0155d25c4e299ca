"""Runs on several GPUs, described in recipes/runs.toml: the engine's arguments, and what starts a run.

The engine is torchtitan with smoke_tests/training/distributed/engine.py, started by torchrun: alone on one or several
hosts, by Slurm with enroot and pyxis, or by Kubernetes as a JobSet or a PyTorchJob. All five start the same command.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from recipes.catalogue.load import validated
from recipes.catalogue.schema import Name, Strict, Text
from recipes.errors import Refusal
from recipes.files import ROOT, read_json, read_toml

Count = Annotated[int, Field(ge=1)]
Float8 = Literal["none", "tensorwise", "tensorwise-gathered", "rowwise"]
Launcher = Literal["torchrun", "slurm", "jobset", "pytorchjob"]
TARGET = "cu13.0-torch2.11-dist"
ENGINE = "smoke_tests.training.distributed.engine"  # a module that each process finds through its PYTHONPATH
IMAGE_FOLDER = "/opt/fusebox"  # contains smoke_tests/ in an image
PORT = 29400
RESTARTS = 3  # of the whole job, each from the last checkpoint
GPUS = (2, 4, 8)  # numbers of GPUs of one host on which the runs of these shapes can be measured
MEASURED = ("1.8B", "8B")
SHARED = "/out"  # in a container: the storage that all hosts share
MOUNT = f'--container-mounts="$out:{SHARED}"'  # for pyxis: the folder that the script makes


def _float8(**settings: Any) -> dict[str, dict[str, Any]]:
    """A recipe; the head stays in high precision, as every published one has it."""
    return {"model": {"converters": "float8"}, "quantize.linear.float8": {"filter_fqns": "output", **settings}}


FLOAT8: Mapping[Float8, dict[str, dict[str, Any]]] = {
    "none": {},
    "tensorwise": _float8(),
    "tensorwise-gathered": _float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True),
    "rowwise": _float8(recipe_name="rowwise"),
}


class Fabric(NamedTuple):
    """The network between hosts as a device plugin of Kubernetes offers it: its resource, and how many a host gets."""

    resource: str
    number: int

    @classmethod
    def parsed(cls, text: str) -> Fabric:
        """RESOURCE=COUNT, such as "rdma/ib=8"; ValueError if the text is something else."""
        match = re.fullmatch(r"([a-z0-9.-]+/[A-Za-z0-9._-]+)=([1-9]\d*)", text)
        if match is None:
            raise ValueError(f"{text!r} is not RESOURCE=COUNT, such as rdma/ib=8 or vpc.amazonaws.com/efa=32")
        return cls(match[1], int(match[2]))


def _flags(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Settings as the engine's arguments; what is off is left out, as it is the engine's default."""
    listed = []
    for table, settings in tables.items():
        for key, value in settings.items():
            if value is not False:
                listed += [f"--{table}.{key}"] + ([] if value is True else [str(value)])
    return listed


class Run(Strict):
    """One run. `gpus` are those of each host, `length` tokens a sequence, `microbatch` sequences a forward pass.

    `tensor` and `pipeline` are the degrees of parallelism; the rest of the GPUs are replicas, sharded. One of
    `global_batch` (sequences a step) and `accumulate` is given, and the other follows. `checkpointing` is what of the
    activations is computed again, `interval` the steps between two checkpoints.
    """

    name: Name
    seeds: list[Text] = Field(default=[])
    shape: Literal["tiny", "1.8B", "8B", "70B", "405B"]
    length: Count
    hosts: Count
    gpus: Count
    tensor: Count = 1
    pipeline: Count = 1
    microbatch: Count
    accumulate: Count | None = None
    global_batch: Count | None = None
    checkpointing: Literal["none", "selective", "full"] = "selective"
    compiled: bool = True
    asynchronous: bool = False
    float8: Float8 = "none"
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    steps: Count = 1000
    interval: Count = 500

    @model_validator(mode="after")
    def _the_identity_holds(self) -> Self:
        if (self.accumulate is None) == (self.global_batch is None):
            raise ValueError('give one of "global_batch" and "accumulate": the other follows')
        if self.world % (self.tensor * self.pipeline):
            raise ValueError(f"{self.world} GPUs are not a multiple of tensor {self.tensor} x pipeline {self.pipeline}")
        if self.global_batch and self.global_batch % (self.replicas * self.microbatch):
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of {self.replicas} replicas x microbatch "
                f"{self.microbatch}"
            )
        if self.float8 == "tensorwise-gathered" and self.replicas == 1:
            raise ValueError("a single replica gathers no weights: choose tensorwise")
        if self.asynchronous and not (self.tensor > 1 and self.compiled):
            raise ValueError("asynchronous tensor parallelism needs tensor > 1 and a compiled model")
        return self

    @property
    def world(self) -> int:
        """GPUs, one process each."""
        return self.hosts * self.gpus

    @property
    def replicas(self) -> int:
        return self.world // self.tensor // self.pipeline

    @property
    def accumulated(self) -> int:
        """Microbatches of a replica in a step: one after the other, or on their way through the pipeline."""
        return self.accumulate or (self.global_batch or 0) // self.replicas // self.microbatch

    @property
    def batch(self) -> int:
        """Sequences of a step: hosts x gpus x microbatch x accumulated / tensor / pipeline."""
        return self.world * self.microbatch * self.accumulated // self.tensor // self.pipeline

    def settings(self, out: str) -> dict[str, dict[str, Any]]:
        """What the engine is told, table by table; checkpoints and numbers go to the folder `out`."""
        piped = self.pipeline > 1  # then the engine's batch is all that passes through the pipeline in a step
        settings: dict[str, dict[str, Any]] = {
            "job": {"description": self.name, "dump_folder": out},
            "model": {"name": "fusebox", "flavor": self.shape, "hf_assets_path": "."},
            "optimizer": {"lr": self.learning_rate},
            "lr_scheduler": {"warmup_steps": min(20, self.steps)},
            "training": {
                "local_batch_size": self.microbatch * (self.accumulated if piped else 1),
                "global_batch_size": self.batch,
                "seq_len": self.length,
                "steps": self.steps,
            },
            "parallelism": {
                "tensor_parallel_degree": self.tensor,
                "pipeline_parallel_degree": self.pipeline,
                "pipeline_parallel_microbatch_size": self.microbatch,
                "enable_async_tensor_parallel": self.asynchronous,
            },
            "activation_checkpoint": {"mode": self.checkpointing},
            "compile": {"enable": self.compiled},
            "checkpoint": {"enable": True, "interval": self.interval, "last_save_model_only": False},
            "comm": {"train_timeout_seconds": 50},  # a lost rank ends the job within a minute
            "metrics": {"log_freq": 1, "disable_color_printing": True},
            "debug": {"seed": 0},
        }
        return settings

    def arguments(self, out: str) -> list[str]:
        """The same as the engine's arguments, and those of the float8 recipe."""
        return [*_flags(self.settings(out)), *_flags(FLOAT8[self.float8])]

    def command(self, rendezvous: str, out: str) -> list[str]:
        """torchrun on each host, which meet at `rendezvous` (HOST:PORT); each shows its own ranks' output."""
        where = ["--nnodes", str(self.hosts), "--nproc-per-node", str(self.gpus), "--rdzv-id", self.name]
        where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous, "--role", self.name]
        return ["torchrun", *where, "-m", ENGINE, *self.arguments(out)]


def load(root: Path = ROOT) -> dict[str, Run]:
    """Every run, by name."""
    path, runs = root / "recipes" / "runs.toml", {}
    for name, table in read_toml(path).items():
        if not isinstance(table, dict):
            raise Refusal(f"{path}: {name} is not a table, and every top-level key is a run: write [{name}].")
        runs[name] = validated(Run, {"name": name, **table}, path, name)
    return runs


def module(root: Path = ROOT) -> str:
    """smoke_tests/training/distributed/engine_arguments.py: the same for the claims, which know no recipes."""
    lines = [
        '"""The runs of recipes/runs.toml as the engine is told them; rendered by `nox -s render`."""\n',
        "# fmt: off",
        "# ruff: noqa: E501",
        "RUNS = {",
    ]
    for run in load(root).values():
        shape = {key: getattr(run, key) for key in ("hosts", "gpus", "tensor", "pipeline", "microbatch", "accumulated")}
        lines.append(f'    "{run.name}": {json.dumps({**shape, "batch": run.batch})},')
    lines += ["}", "ARGUMENTS = {"]
    lines += [f'    "{run.name}": "{" ".join(run.arguments("."))}",' for run in load(root).values()]
    lines += ["}", "# The same on one host of so many GPUs.", "ON_ONE_HOST = {"]
    for run, gpus in itertools.product(load(root).values(), GPUS):
        if run.shape in MEASURED:
            lines += _on_one_host(run, gpus)
    lines += ["}", "FLOAT8 = {"]
    lines += [f'    "{name}": "{" ".join(_flags(settings))}",' for name, settings in FLOAT8.items()]
    return "\n".join([*lines, "}"]) + "\n"


def _on_one_host(run: Run, gpus: int) -> list[str]:
    """The run on one host of that many GPUs, as a line of the module; none where its layout needs more."""
    try:
        fewer = changed(run, {"hosts": 1, "gpus": gpus})
    except Refusal:
        return []
    return [f'    ("{run.name}", {gpus}): "{" ".join(fewer.arguments("."))}",']


def chosen(name: str, changes: Mapping[str, Any]) -> Run:
    """The run of that name with what the command line changes; refused where the identity then fails."""
    known = load()
    if name not in known:
        raise Refusal(f"There is no run {name!r}; choose one of {', '.join(known)}.")
    return changed(known[name], {key: value for key, value in changes.items() if value is not None})


def changed(run: Run, changes: Mapping[str, Any]) -> Run:
    """The run with other values; refused where the identity then fails."""
    return validated(Run, {**run.model_dump(), **changes}, "the command line", run.name)


def published(root: Path = ROOT) -> str | None:
    """The image that `publish` last made of this checkout's target, by digest; None if it made none."""
    path = root / "build" / TARGET / "image" / "image.json"
    if not path.exists():
        return None
    about = read_json(path)
    return f"{about['name']}@{about['digest']}"


def rendered(run: Run, launcher: Launcher, image: str | None, out: str, fabric: Fabric | None = None) -> str:
    """What starts the run: a script, or a manifest as JSON, which kubectl takes as it takes YAML.

    `image` is needed where a launcher starts containers, and `fabric` is for Kubernetes alone.
    """
    if fabric and launcher not in ("jobset", "pytorchjob"):
        raise Refusal(f"--fabric names a resource of Kubernetes, and --as is {launcher}: choose jobset or pytorchjob.")
    if launcher == "torchrun":
        return torchrun(run, out)
    if image is None:
        raise Refusal(
            f"No image of {TARGET} was published from this checkout: pass --image REGISTRY/NAME@sha256:DIGEST, which "
            "is the same image on every host."
        )
    if "@sha256:" not in image and not (launcher == "slurm" and _is_file(image)):
        raise Refusal(f"--image {image!r} names no digest, and a tag can move: pass REGISTRY/NAME@sha256:DIGEST.")
    if launcher == "slurm":
        return slurm(run, image, out)
    made = jobset(run, image, out, fabric) if launcher == "jobset" else pytorchjob(run, image, out, fabric)
    return json.dumps(made, indent=2) + "\n"


def _shell(command: list[str]) -> str:
    """A command with an option a line, and "$..." left to the shell."""
    words = [word if word.startswith(('"$', MOUNT)) else shlex.quote(word) for word in command]
    return " ".join(f"\\\n  {word}" if word.startswith("--") else word for word in words)


def torchrun(run: Run, out: str) -> str:
    """A script to run on every host, with the name of one of them as its argument."""
    command = run.command(f'"${{1:?the host where all meet}}:{PORT}"', out)
    command.append('"${@:2}"')  # more arguments for the engine, which takes the last of a repeated one
    return (
        f"#!/usr/bin/env bash\n# {run.name}: on each of {run.hosts} hosts, in the target's environment and in the\n"
        "# checkout: bash SCRIPT FIRST_HOST. Started again, it goes on from the last checkpoint.\n"
        f"set -euo pipefail\nexport PYTHONPATH=$PWD\nexec {_shell(command)}\n"
    )


def slurm(run: Run, image: str, out: str) -> str:
    """A batch script for Slurm with pyxis: one task a host, requeued and resumed when a host fails."""
    command = run.command(f'"$first:{PORT}"', SHARED)
    container = [f"--container-image={_pyxis(image)}", MOUNT, "--no-container-mount-home"]
    asked = {"job-name": run.name, "nodes": run.hosts, "ntasks-per-node": 1, "gpus-per-node": run.gpus}
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH --{key}={value}" for key, value in asked.items())]
    lines += ["#SBATCH --exclusive", "#SBATCH --requeue", "#SBATCH --open-mode=append", "set -euo pipefail"]
    # "| head -n 1" would end the job by SIGPIPE if it exits before scontrol has written all names
    lines += ['hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")', "first=${hosts%%$'\\n'*}"]
    lines += ["# pyxis mounts what is there and has a whole path", f"out=$(realpath -m -- {shlex.quote(out)})"]
    lines += ['mkdir -p "$out"']
    inside = ["env", f"PYTHONPATH={IMAGE_FOLDER}", *command]
    return "\n".join([*lines, f"srun --kill-on-bad-exit=1 {_shell([*container, *inside])}"]) + "\n"


def _pyxis(image: str) -> str:
    """An image as pyxis takes it: REGISTRY#NAME:TAG as enroot writes it, a path, or a name on enroot's own registry."""
    registry, slash, name = image.partition("/")
    is_host = "." in registry or ":" in registry or registry == "localhost"
    return f"{registry}#{name}" if slash and is_host and not _is_file(image) else image


def _is_file(image: str) -> bool:
    """Whether pyxis takes an image as the path of a file, which all hosts share."""
    return image.startswith(("/", "."))


def _pod(
    run: Run, image: str, out: str, rendezvous: str, container: str, fabric: Fabric | None = None
) -> dict[str, Any]:
    """The pod of one host; `out` is a volume claim that many hosts may write, `fabric` the network between them."""
    limits = {"nvidia.com/gpu": str(run.gpus)} | ({fabric.resource: str(fabric.number)} if fabric else {})
    # The adapters read and write registered memory, which must stay in place.
    locking = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if fabric else {}
    return {
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": container,
                    "image": image,
                    "command": run.command(rendezvous, SHARED),
                    "env": [{"name": "PYTHONPATH", "value": IMAGE_FOLDER}],
                    "resources": {"limits": limits},
                    **locking,
                    "volumeMounts": [{"name": "out", "mountPath": SHARED}, {"name": "shm", "mountPath": "/dev/shm"}],
                }
            ],
            "volumes": [
                {"name": "out", "persistentVolumeClaim": {"claimName": out}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }


def jobset(run: Run, image: str, out: str, fabric: Fabric | None = None) -> dict[str, Any]:
    """One indexed Job with a pod a host; a pod that fails restarts all of them."""
    first = f"{run.name}-host-0-0.{run.name}:{PORT}"  # the pod's name in the set's own subdomain
    job = {
        "parallelism": run.hosts,
        "completions": run.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": _pod(run, image, out, first, "engine", fabric),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": run.name},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": RESTARTS},
            "replicatedJobs": [{"name": "host", "replicas": 1, "template": {"spec": job}}],
        },
    }


def pytorchjob(run: Run, image: str, out: str, fabric: Fabric | None = None) -> dict[str, Any]:
    """A master and the other hosts as workers; the operator's own rendezvous variables give way to the arguments."""
    pod = _pod(run, image, out, f"{run.name}-master-0:{PORT}", "pytorch", fabric)
    del pod["spec"]["restartPolicy"]  # the replica sets it
    replicas = {"Master": 1, "Worker": run.hosts - 1}
    specs = {
        role: {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
        for role, count in replicas.items()
        if count
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": run.name},
        "spec": {
            "nprocPerNode": str(run.gpus),
            "runPolicy": {"backoffLimit": RESTARTS, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": specs,
        },
    }


LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
