"""A run's numbers agree, bad ones are refused, and what starts it is what Slurm, Kubernetes and a shell accept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import kubeflow.training.models
import kubernetes.client.models
import pytest
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from recipes.catalogue.load import Catalogue
from recipes.errors import Refusal
from recipes.measure import runs
from recipes.measure.runs import Run
from recipes.tests.conftest import Checkout

RUNS = runs.load()
IMAGE = f"ghcr.io/someone/fusebox@sha256:{'0' * 64}"
for_each_run = pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))


@for_each_run
def test_the_identity_of_the_batch(run: Run) -> None:
    steps_of_a_gpu = run.microbatch * run.accumulated / run.tensor / run.pipeline
    assert run.batch == run.hosts * run.gpus * steps_of_a_gpu
    settings = run.settings("out")
    replicas = run.hosts * run.gpus // run.tensor // run.pipeline
    assert settings["training"]["global_batch_size"] % (settings["training"]["local_batch_size"] * replicas) == 0
    if run.pipeline > 1:  # one pass through the pipeline is a step
        assert settings["training"]["global_batch_size"] == settings["training"]["local_batch_size"] * replicas


@pytest.mark.parametrize(
    ("name", "accumulated", "batch"),
    [("fsdp-step", 1, 8), ("fsdp", 16, 128), ("pp2", 32, 128), ("tp2-pp2", 64, 128)],
)
def test_the_layouts_of_seed_004_have_its_numbers(name: str, accumulated: int, batch: int) -> None:
    run = RUNS[f"llama-8b-{name}"]
    assert (run.world, run.microbatch, run.accumulated, run.batch) == (8, 1, accumulated, batch)


def test_fewer_gpus_accumulate_more() -> None:
    run = runs.chosen("llama-8b-pp2", {"gpus": 4})
    assert (run.replicas, run.accumulated, run.batch) == (2, 64, 128)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-8b-tp2-pp2", {"gpus": 6}, "6 GPUs are not a multiple of tensor 2 x pipeline 2"),
        ("llama-8b-fsdp", {"hosts": 3}, "global_batch 128 is not a multiple of 24 replicas x microbatch 1"),
        ("llama-8b-fsdp", {"accumulate": 2}, 'give one of "global_batch" and "accumulate"'),
        ("llama-8b-tp2", {"gpus": 2, "float8": "tensorwise-gathered"}, "a single replica gathers no weights"),
        ("llama-8b", {"asynchronous": True}, "needs tensor > 1"),
        ("llama-8b", {"gpus": 0}, "greater than or equal to 1"),
        ("lama", {}, "There is no run 'lama'; choose one of llama-1b8,"),
    ],
)
def test_numbers_that_do_not_agree_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        runs.chosen(name, changes)


def test_the_verb_prints_it_or_refuses_in_one_sentence(checkout: Checkout) -> None:
    assert "--nnodes 2" in checkout.succeed("launch", "tiny", "--hosts", 2)
    assert "argument --out: is empty" in checkout.run("launch", "tiny", "--out", "").stderr
    for number in ("0", "-1", "two"):
        done = checkout.run("launch", "tiny", f"--gpus={number}")
        assert done.returncode == 2 and f"--gpus: {number} is not a number from 1 on" in done.stderr
    assert "not a multiple of tensor 2" in checkout.refuse("launch", "tiny-tp2", "--gpus", 3)
    (checkout.root / "recipes" / "runs.toml").write_text("tiny = 1\n")
    assert "tiny is not a table" in checkout.refuse("launch", "tiny")


def test_a_container_is_named_by_digest(checkout: Checkout) -> None:
    """Else hosts that pull a tag at different times run different images."""
    for launcher in ("slurm", "jobset", "pytorchjob"):
        checkout.refuse("launch", "tiny", "--as", launcher, naming=("--image", "@sha256:"))
        given = ("launch", "tiny", "--as", launcher, "--image", "here/fusebox:latest")
        checkout.refuse(*given, naming=("--image 'here/fusebox:latest' names no digest", "@sha256:DIGEST"))
    checkout.succeed("launch", "tiny", "--as", "slurm", "--image", "/shared/fusebox.sqsh")
    assert "torchrun" in checkout.succeed("launch", "tiny")
    about = checkout.root / "build" / runs.TARGET / "image" / "image.json"
    about.parent.mkdir(parents=True)
    about.write_text(json.dumps({"name": "ghcr.io/someone/fusebox", "digest": "sha256:0"}))
    output = checkout.succeed("launch", "tiny", "--as", "slurm")
    assert "--container-image=ghcr.io#someone/fusebox@sha256:0" in output


def test_the_image_for_several_hosts_has_what_rdma_needs() -> None:
    """Without these NCCL finds no InfiniBand, and falls back to TCP."""
    apt = Catalogue().targets[runs.TARGET].base.runtime.apt
    assert {"libibverbs1", "ibverbs-providers"} < set(apt) and any(name.startswith("librdmacm1") for name in apt)


def test_a_pod_asks_for_the_fabric(checkout: Checkout) -> None:
    given = ("launch", "llama-70b", "--image", IMAGE, "--fabric")
    made = json.loads(checkout.succeed(*given, "rdma/ib=8", "--as", "jobset"))
    assert JobsetV1alpha2JobSet.from_dict(made).to_dict() == made
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert pod["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/ib": "8"}
    assert pod["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    made = json.loads(checkout.succeed(*given, "vpc.amazonaws.com/efa=32", "--as", "pytorchjob"))
    assert strangers("KubeflowOrgV1PyTorchJob", made, MODELS) == []
    assert "is not RESOURCE=COUNT" in checkout.run(*given, "rdma/ib", "--as", "jobset").stderr
    checkout.refuse(*given, "rdma/ib=8", "--as", "slurm", naming=("--fabric", "slurm"))


def strangers(model: Any, data: Any, models: Any) -> list[str]:
    """Keys and values of a Kubernetes object that its client's types do not have."""
    if model.startswith(("dict(", "list[")):
        inner = model.partition(", ")[2][:-1] if model.startswith("dict(") else model[5:-1]
        parts = data.values() if isinstance(data, dict) else data
        return [stranger for part in parts for stranger in strangers(inner, part, models)]
    if model in ("str", "int", "bool", "object"):
        return [] if model == "object" or type(data).__name__ == model else [f"{data!r} is no {model}"]
    kind = models[model]
    types = {kind.attribute_map[name]: text for name, text in kind.openapi_types.items()}
    unknown = [f"{model} has no {key}" for key in data if key not in types]
    return unknown + [
        stranger for key, part in data.items() if key in types for stranger in strangers(types[key], part, models)
    ]


MODELS = {**vars(kubernetes.client.models), **vars(kubeflow.training.models)}


@for_each_run
def test_a_jobset_is_one(run: Run) -> None:
    made = runs.jobset(run, IMAGE, "shared")
    assert JobsetV1alpha2JobSet.from_dict(made).to_dict() == made
    wrong = json.loads(json.dumps(made))
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 2
    assert JobsetV1alpha2JobSet.from_dict(wrong).to_dict() != wrong


@for_each_run
def test_a_pytorchjob_is_one(run: Run) -> None:
    made = runs.pytorchjob(run, IMAGE, "shared")
    assert strangers("KubeflowOrgV1PyTorchJob", made, MODELS) == []
    assert sum(replica["replicas"] for replica in made["spec"]["pytorchReplicaSpecs"].values()) == run.hosts
    wrong = json.loads(json.dumps(made))
    wrong["spec"]["nprocPerNode"] = 8
    wrong["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["resorces"] = {}
    assert strangers("KubeflowOrgV1PyTorchJob", wrong, MODELS) == ["8 is no str", "V1Container has no resorces"]


def arguments_of(script: str, folder: Path, *given: str) -> list[str]:
    """What a rendered script hands to the program that it starts, with Slurm's and torch's commands stood in for."""
    commands = folder / "bin"
    commands.mkdir()
    for name, does in {
        "srun": 'printf "%s\\n" "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
        "scontrol": "echo a; echo b",
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{does}\n")
        (commands / name).chmod(0o755)
    variables = {"PATH": f"{commands}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a,b"}
    done = subprocess.run(
        ["bash", "-s", *given], input=script, env=variables, cwd=folder, text=True, capture_output=True, check=True
    )
    return done.stdout.splitlines()


def test_every_launcher_starts_the_same_command(tmp_path: Path) -> None:
    run = runs.chosen("llama-8b-tp2-pp2", {"hosts": 2, "float8": "tensorwise"})
    engine = [runs.ENGINE, *run.arguments("/out")]
    for launcher, folder in ((runs.slurm, tmp_path / "slurm"), (runs.jobset, None), (runs.pytorchjob, None)):
        made = launcher(run, IMAGE, "shared")
        if folder is not None:
            folder.mkdir()
            listed = arguments_of(str(made), folder)
            assert f"--container-image={IMAGE.replace('/', '#', 1)}" in listed
            assert f"--container-mounts={folder / 'shared'}:/out" in listed
            assert (folder / "shared").is_dir()
            assert listed[listed.index("--rdzv-endpoint") + 1] == f"a:{runs.PORT}"
            assert listed[-len(engine) :] == engine
        else:
            pods = json.dumps(made)
            assert json.dumps(engine)[1:-1] in pods
    (tmp_path / "torchrun").mkdir()
    listed = arguments_of(runs.torchrun(run, "/out"), tmp_path / "torchrun", "first")
    assert listed[listed.index("--rdzv-endpoint") + 1] == f"first:{runs.PORT}"
    assert listed[-len(engine) + 1 :] == engine[1:]


@pytest.mark.parametrize(
    ("image", "as_pyxis_takes_it"),
    [
        ("localhost:5000/fusebox:cpu", "localhost:5000#fusebox:cpu"),
        ("someone/fusebox:cpu", "someone/fusebox:cpu"),
        ("fusebox:cpu", "fusebox:cpu"),
        ("/shared/fusebox.sqsh", "/shared/fusebox.sqsh"),
        ("./images/fusebox.sqsh", "./images/fusebox.sqsh"),
    ],
)
def test_pyxis_gets_an_image_as_it_takes_one(image: str, as_pyxis_takes_it: str, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/pyxis: [USER@][REGISTRY#]IMAGE[:TAG], or a path."""
    listed = arguments_of(runs.slurm(RUNS["llama-8b"], image, "out"), tmp_path)
    assert f"--container-image={as_pyxis_takes_it}" in listed


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_a_script_is_one_that_shellcheck_accepts(launcher: runs.Launcher, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(runs.rendered(RUNS["llama-8b"], launcher, IMAGE, "a folder"))
    done = subprocess.run(["shellcheck", "--severity=style", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
