"""Publish an image: built from a commit and pushed by digest, proved as it was pushed, signed and tagged last.

The three steps may run on three machines that have the same commit: they pass build/TARGET/image/ on.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Target
from recipes.errors import Refusal
from recipes.files import read_json, write_json, write_text
from recipes.make import environment
from recipes.process import git_variables
from recipes.progress import say
from recipes.prove import smoke
from recipes.prove.evidence import Built, brought
from recipes.ship import layers, registry, statements, verify
from recipes.ship.cosign import Signer, trusting
from recipes.ship.dockerfile import labels
from recipes.ship.image import Options, buildx, engine, last_words
from recipes.ship.statements import Contents

OCI = "org.opencontainers.image."
ANNOTATED = (
    "manifest",
    "manifest-descriptor",
)  # what gets the annotations: the manifest, and its entry in the layout
UNSIGNED = "it is not signed: pass --key, or publish it in GitHub's workflow"
PROVING = "fusebox.proving"  # the label of a container that proves an image, with the target
PARTS = ("docker", "patches", "pyproject.toml", "recipes", "smoke_tests")  # what an image is made from


@dataclass(frozen=True)
class Commit:
    """The commit that an image or a wheel is made from, and its time in seconds since 1970."""

    sha: str
    seconds: int

    @classmethod
    def of(cls, root: Path) -> Commit:
        """The checkout's commit; changes that are not committed are refused, since the tag would not name them.

        Files of the image's folders that git ignores and .dockerignore does not are refused too.
        """
        status = ["status", "--porcelain", "--untracked-files=all"]
        questions = (
            status,
            ["log", "-1", "--no-show-signature", "--format=%H %ct"],
            [*status, "--ignored", "--", *PARTS],
        )
        answers = [
            subprocess.run(
                ["git", "-C", str(root), *words], env=git_variables(), capture_output=True, text=True, check=False
            )
            for words in questions
        ]
        if failed := [answer.stderr for answer in answers if answer.returncode]:
            raise Refusal(
                f"{root} cannot be read as a git checkout ({last_words(failed[0].partition(chr(10))[0])}), and what is "
                "published or verified is of a commit: clone Fusebox."
            )
        if changes := answers[0].stdout.split("\n")[0].strip():
            raise Refusal(f"{root} has changes that are not committed ({changes}): commit them, then publish.")
        ignored = [line.removeprefix("!! ") for line in answers[2].stdout.splitlines()]
        if stray := [path for path in ignored if not re.search(r"(^|/)(__pycache__/|\.)", path)]:
            raise Refusal(
                f"{root} has {stray[0]}, which git ignores but an image would contain: remove it, then publish."
            )
        sha, seconds = answers[1].stdout.split()
        return cls(sha, int(seconds))

    @property
    def time(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.seconds, datetime.UTC)


def tags(target: Target, commit: Commit) -> list[str]:
    """Every tag of a published image, the floating one last."""
    return [f"{target.name}-{commit.sha[:12]}", f"{target.name}-{commit.time:%Y%m%d}", target.name]


def push(plan: Plan, options: Options, host: str) -> Path:
    """Build from the commit and push by digest, without a tag; returns the folder with image.json and image.md."""
    _refuse_unpublishable(plan, host)
    commit, name, started = Commit.of(plan.root), f"{host}/fusebox", datetime.datetime.now(datetime.UTC)
    registry.try_upload(name)  # before the build, which can take an hour
    folder = folder_of(plan)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        _build(plan, options, commit, folder / "oci")
        layers.refuse_grown(plan.target, folder / "oci", name)
        digest = registry.digest_in(folder / "oci")
        registry.refuse_moving(name, tags(plan.target, commit)[0], digest)
        registry.push(folder / "oci", name, digest)
        image = f"{name}@{digest}"
        contents = statements.Contents.of(image)
        stated = statements.provenance(
            plan,
            commit.sha,
            statements.builder(),
            started,
            options.sm,
            unlocked=options.unlocked,
            standins=options.standins,
        )
        _describe(plan, folder, image, contents, stated)
    finally:  # the registry has the image, or nobody needs it
        if (folder / "oci" / "index.json").exists():
            pulled = f"{name}@{registry.digest_in(folder / 'oci')}"
            subprocess.run(["docker", "image", "rm", pulled], capture_output=True, check=False)
        shutil.rmtree(folder / "oci", ignore_errors=True)
    say(f"pushed {image}")
    return folder


def prove_pushed(plan: Plan) -> None:
    """Run the claims in the image that was pushed, and keep their outcomes beside what is known about it."""
    image, path = _pushed(plan)["image"], folder_of(plan) / "evidence.json"
    path.unlink(missing_ok=True)  # of an earlier run, which this one may contradict
    failed, evidence = prove(plan, image)
    if failed:
        raise Refusal(f"{image} was pushed, but a claim of it was refuted, so no tag was set: read its evidence.")
    write_json(path, evidence)


def release(plan: Plan, floating: str | None, signer: Signer | None = None) -> None:
    """Sign an image that was pushed and proved, verify it, and then set its tags.

    `floating` says why the target's own tag must not move, or None. Without a signer, or if the verification finds a
    fault, it does not move either; the tags of the commit and of the day are set.
    """
    about, commit = _pushed(plan), Commit.of(plan.root)
    image, name, digest = about["image"], about["name"], about["digest"]
    path = folder_of(plan) / "evidence.json"
    if not path.exists():
        raise Refusal(f"{path} does not exist: prove the image first, or bring that folder from where it was proved.")
    evidence = read_json(path)
    if evidence.get("image") != image:
        raise Refusal(f"The evidence is of {evidence.get('image')}, and {image} was pushed: prove that one.")
    registry.refuse_moving(name, tags(plan.target, commit)[0], digest)
    floating = floating or unpublishable(about["provenance"], name)
    floating = floating or _unproven_in(plan.target, smoke.of_outcome(evidence, "unproven"))
    if signer:
        contents = statements.Contents.read(about)
        stated = {
            statements.SBOM: statements.sbom(plan, image, contents, evidence["packages"]),
            statements.PROVENANCE: about["provenance"],
            statements.TESTS: statements.test_result(plan, evidence),
            statements.ATTRIBUTES: statements.attributes(evidence),
            **({statements.VEX: vex} if (vex := statements.vex(plan)) else {}),
        }
        verify.sign(image, stated, signer)
        with trusting(signer) as trust:
            faults = verify.faults(verify.verify(plan, image, trust, commit.sha))
        floating = floating or next(iter(faults), None)
    unmoved = _unmoved(plan, name, commit, floating or (UNSIGNED if signer is None else None))
    moved = [tag for tag in tags(plan.target, commit) if tag not in unmoved]
    registry.set_tags(name, digest, moved)
    write_json(folder_of(plan) / "image.json", about | {"tags": moved})
    page = folder_of(plan) / "image.md"
    write_text(page, page.read_text().replace("\n", f"\n\nTags: {', '.join(moved)}.\n", 1))
    for tag in moved:
        say(f"published {name}:{tag}")
    for tag, reason in unmoved.items():
        say(f"{name}:{tag} was not moved: {reason}")


def folder_of(plan: Plan) -> Path:
    """Where the steps of publishing keep what they know about an image."""
    return environment.folder(plan.root, plan.target) / "image"


def _pushed(plan: Plan) -> dict[str, Any]:
    """What is known about the image that was pushed; refused if none was, or if it is of another commit."""
    path, commit = folder_of(plan) / "image.json", Commit.of(plan.root)
    if not path.exists():
        raise Refusal(f"{path} does not exist: push the image first, or bring that folder from where it was pushed.")
    about: dict[str, Any] = read_json(path)
    revision = about["labels"].get(f"{OCI}revision")
    if revision != commit.sha:
        raise Refusal(f"{path} is of commit {revision}, and this checkout is {commit.sha}: check out the first.")
    return about


def unpublishable(provenance: Mapping[str, Any], name: str) -> str | None:
    """Why the image `name` with this provenance does not get the floating tag."""
    definition = provenance["buildDefinition"]
    internal = definition["internalParameters"]
    if definition["externalParameters"].get("sm"):
        return "it is compiled for some of its GPUs only"
    if registry.is_local(name):
        return None
    if "standins" not in internal:
        return "its provenance does not say whether its base is a stand-in"
    if internal["standins"]:
        return "its base is a stand-in"
    return None if internal["aptLocks"] else "apt installed what the distribution had, whatever the locks say"


def _refuse_unpublishable(plan: Plan, host: str) -> None:
    """Refuse a target that the data or this machine do not allow us to publish."""
    if not plan.target.publish:
        reason = plan.target.unpublished
        raise Refusal(f"Target {plan.target.name} is not published ({reason}): build it with `nox -s image`.")
    if not re.fullmatch(registry.REGISTRY, host):
        raise Refusal(
            f"--registry {host!r} is not a place to push to: write HOST[:PORT][/PATH], such as ghcr.io/owner."
        )
    if unresolved := plan.target.base.unresolved:
        raise Refusal(
            f"recipes/targets.toml [{plan.target.name}.base]: the digest of {unresolved[0]} is unresolved, and only a "
            f"pinned base is published: run `nox -s lock -- {plan.target.name}`."
        )
    registry.refuse_without_crane("Publishing needs")
    _refuse_classic_store()


def described(plan: Plan, options: Options, commit: Commit) -> dict[str, str]:
    """What OCI's names say about an image that is published: its labels, and the annotations of its manifest."""
    about = {key: value for key, value in labels(plan).items() if key.startswith(OCI)} | options.base(plan.target)
    about |= {
        f"{OCI}revision": commit.sha,
        f"{OCI}created": commit.time.isoformat(),
        f"{OCI}version": tags(plan.target, commit)[0],
    }
    if source := _source(plan.root):
        page = f"{source}/blob/{commit.sha}/docs/status/targets.md"
        about |= {f"{OCI}source": source, f"{OCI}url": page}
    return about


def _source(root: Path) -> str:
    """The address of the repository: GitHub's, which runs the workflow, or that of the checkout's origin; or ""."""
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ['GITHUB_SERVER_URL']}/{repository}"
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    done = subprocess.run(command, env=git_variables(), capture_output=True, text=True, check=False)
    address = done.stdout.strip().removesuffix(".git")
    return address if re.fullmatch(r"https://[^@\s]+", address) else ""


def _build(plan: Plan, options: Options, commit: Commit, oci: Path) -> None:
    """Build the image into an OCI layout. Labels alone name the commit, so that the next one keeps the layers.

    It has one platform, so its manifest is in no index, and has the annotations itself.
    """
    about = described(plan, options, commit)
    annotated = [f"--annotation={kind}:{key}={value}" for kind in ANNOTATED for key, value in about.items()]
    buildx(
        plan, options, *(f"--label={key}={value}" for key, value in about.items()), *annotated,
        f"--label=fusebox.stack={plan.stack}",
        f"--output=type=oci,dest={oci},tar=false,rewrite-timestamp=true",
    )  # fmt: skip


def _unmoved(plan: Plan, name: str, commit: Commit, floating: str | None) -> dict[str, str]:
    """The tags that do not move, and why.

    A tag stays if it names an image of a later commit; the floating tag also stays if this image is not complete.
    """
    unmoved = {}
    for tag in tags(plan.target, commit)[1:]:
        created = registry.created(f"{name}:{tag}")
        if created > commit.time.isoformat():
            unmoved[tag] = f"it names an image of a later commit ({created})"
    return unmoved | ({plan.target.name: floating} if floating else {})


def _unproven_in(target: Target, unproven: Iterable[str]) -> str | None:
    """Why an image with these unproven claims does not get the floating tag; the target's exceptions do not count."""
    left = sorted(claim for claim in unproven if claim.split("[")[0] not in target.unproven_in_image)
    return f"{left[0]} is unproven in this image" if left else None


def prove(plan: Plan, image: str) -> tuple[bool, dict[str, Any]]:
    """Run an image's `smoke` and keep its evidence, which names the image.

    Returns whether a claim is refuted or the run failed, and the evidence. The container ends with
    the tool, also by kill -9; what is left of it is removed by the next run.
    """
    outcomes, label = "/tmp/outcomes.json", f"--label={PROVING}={plan.target.name}"
    gpus = ["--gpus=all"] if plan.target.cuda != "none" else []
    stopped = ["docker", "container", "prune", "--force", f"--filter=label={PROVING}={plan.target.name}"]
    subprocess.run(stopped, capture_output=True, check=False)
    made = subprocess.run(
        ["docker", "create", label, *gpus, image, "smoke", "--evidence", outcomes],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        raise Refusal(f"{image} cannot be run ({last_words(made.stderr)}): correct that and publish again.")
    container = made.stdout.strip()
    try:
        code, log = smoke.watched(["docker", "start", "--attach", container], plan.root, os.environ)
        with tempfile.TemporaryDirectory() as scratch:
            for path in (outcomes, "/opt/fusebox/fusebox/manifest.json"):
                copied = ["docker", "cp", f"{container}:{path}", scratch]
                subprocess.run(copied, capture_output=True, check=False)  # a missing file is refused below
            manifest = Path(scratch, "manifest.json")
            if not manifest.exists():
                raise Refusal(f"{image} has no manifest of its environment: build it with `nox -s image`.")
            ran_in = {"image": image, "runtime": {"name": "docker", "version": engine().version()["Version"]}}
            evidence = smoke.keep(plan, Path(scratch, "outcomes.json"), code, log, brought(Built, manifest), ran_in)
            return bool(code or smoke.of_outcome(evidence, "refuted")), evidence
    finally:
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, check=False)


def _refuse_classic_store() -> None:
    """An OCI layout needs the containerd image store, or a builder with one of its own."""
    store = str(engine().info().get("DriverStatus"))
    builder = subprocess.run(["docker", "buildx", "inspect"], capture_output=True, text=True, check=False).stdout
    if re.search(r"^Driver:\s+docker$", builder, re.MULTILINE) and "containerd" not in store:
        raise Refusal(
            "The engine's classic image store cannot write an image as it will be pushed: run "
            "`docker buildx create --use --driver docker-container` first, or turn on the containerd image store."
        )


def _describe(plan: Plan, folder: Path, image: str, contents: Contents, provenance: Mapping[str, Any]) -> None:
    """Write image.json and image.md: what the image contains, from its own manifest, and the sizes of its layers.

    image.json also hands the provenance on.
    """
    name, _, digest = image.partition("@")
    manifest = json.loads(layers.blob(folder / "oci", digest).read_text())
    config = json.loads(layers.blob(folder / "oci", manifest["config"]["digest"]).read_text())
    inside = engine().containers.run(image, ["cat", "/opt/fusebox/fusebox/manifest.json"], remove=True)
    listed = layers.of(manifest, config)
    packages = json.loads(inside)["packages"]
    for pin in plan.pins:
        if pin.name in packages:
            packages[pin.name]["source"] = pin.release.identity
    about = {
        "image": image, "name": name, "digest": digest, "provenance": provenance,
        "labels": config["config"].get("Labels", {}),
        "layers": [dataclasses.asdict(layer) for layer in listed], "packages": packages, **contents.as_json(),
    }  # fmt: skip
    write_json(folder / "image.json", about)
    rows = [
        f"| {package} | {entry.get('release', entry['version'])} | `{entry.get('source', '')[:12]}` | "
        f"{', '.join(Path(patch['file']).stem for patch in entry['patches'])} |"
        for package, entry in packages.items()
    ]
    sizes = [f"| {layer.bytes / 2**20:.1f} | {layer.made_by[:90]} |" for layer in listed]
    total = sum(layer.bytes for layer in listed) / 2**20
    lines = [
        f"# {image}", "",
        f"Supported until: {about['labels'].get('fusebox.supported-until')}.", "",
        "| package | version | commit or sha256 | patches |", "| --- | --- | --- | --- |", *rows, "",
        f"{len(contents.python)} Python distributions and {len(contents.debian)} packages of the system; "
        "image.json lists them.", "",
        f"{total:.1f} MiB in the registry:", "", "| MiB | layer |", "| --- | --- |", *sizes,
    ]  # fmt: skip
    write_text(folder / "image.md", "\n".join(lines) + "\n")
