"""Publish an image: built from a commit, pushed by digest, proved as it was pushed, tagged last."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

import docker
import docker.auth
import httpx2

from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Target
from recipes.errors import Refusal
from recipes.files import read_json, write_json, write_text
from recipes.make import environment
from recipes.process import ends_with_us, git_variables
from recipes.progress import say
from recipes.prove import smoke
from recipes.ship.image import Options, buildx, engine, last_words

# HOST[:PORT][/PATH]; a first part without a dot or a port is a path, which has small letters only.
REGISTRY = r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:)|[a-z0-9-]+)(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
PROVING = "fusebox.proving"  # the label of a container that proves an image, with the target
EPOCH = 315532800  # 1980-01-01, the time of every file in a layer, as docker/build-wheel.sh has it for wheels
PARTS = ("docker", "patches", "pyproject.toml", "recipes", "smoke_tests")  # what an image is made from


@dataclass(frozen=True)
class Commit:
    """The commit that an image is made from, and its time in seconds since 1970."""

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
                f"{root} cannot be read as a git checkout ({last_words(failed[0].partition(chr(10))[0])}), and an "
                "image is published from a commit: clone Fusebox."
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


def publish(plan: Plan, options: Options, registry: str, floating: str | None) -> Path:
    """Build again from the commit, push by digest, run what was pushed, and only then set its tags.

    `floating` says why the target's own tag must not move, or None. Returns the folder with image.json and image.md.
    """
    _refuse_unpublishable(plan, registry)
    commit, name = Commit.of(plan.root), f"{registry}/fusebox"
    try_upload(name)  # before the build, which can take an hour
    folder = environment.folder(plan.root, plan.target) / "image"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        _build(plan, options, commit, folder / "oci")
        digest = digest_in(folder / "oci")
        refuse_moving(name, tags(plan.target, commit)[0], digest)
        push(folder / "oci", name, digest)
        refuted, unproven = prove(plan, f"{name}@{digest}")
        if refuted:
            raise Refusal(
                f"{name}@{digest} was pushed, but a claim of it was refuted, so no tag was set: read its evidence."
            )
        unmoved = _unmoved(plan, options, name, commit, floating or _unproven_in(plan.target, unproven))
        moved = [tag for tag in tags(plan.target, commit) if tag not in unmoved]
        set_tags(name, digest, moved)
        _describe(plan, folder, name, digest, moved)
    finally:  # the registry has the image, or nobody wants it
        if (folder / "oci" / "index.json").exists():
            pulled = f"{name}@{digest_in(folder / 'oci')}"
            subprocess.run(["docker", "image", "rm", pulled], capture_output=True, check=False)
        shutil.rmtree(folder / "oci", ignore_errors=True)
    for tag in moved:
        say(f"published {name}:{tag}")
    for tag, reason in unmoved.items():
        say(f"{name}:{tag} was not moved: {reason}")
    return folder


def _refuse_unpublishable(plan: Plan, registry: str) -> None:
    """Refuse a target that the data or this machine do not allow us to publish."""
    if not plan.target.publish:
        reason = plan.target.unpublished
        raise Refusal(f"Target {plan.target.name} is not published ({reason}): build it with `nox -s image`.")
    if not re.fullmatch(REGISTRY, registry):
        raise Refusal(
            f"--registry {registry!r} is not a place to push to: write HOST[:PORT][/PATH], such as ghcr.io/owner."
        )
    if unresolved := plan.target.base.unresolved:
        raise Refusal(
            f"recipes/targets.toml [{plan.target.name}.base]: the digest of {unresolved[0]} is unresolved, and only a "
            f"pinned base is published: run `nox -s lock -- {plan.target.name}`."
        )
    if shutil.which("crane") is None:
        raise Refusal("Publishing needs crane (go-containerregistry), which is not installed: install it.")
    _refuse_classic_store()


def _build(plan: Plan, options: Options, commit: Commit, oci: Path) -> None:
    """Build the image into an OCI layout. Labels alone name the commit, so that the next one keeps the layers."""
    labels = {"revision": commit.sha, "created": commit.time.isoformat()}
    labelled = [f"--label=org.opencontainers.image.{key}={value}" for key, value in labels.items()]
    buildx(
        plan, options, *labelled, f"--label=fusebox.stack={plan.stack}",
        f"--build-arg=SOURCE_DATE_EPOCH={EPOCH}",
        f"--output=type=oci,dest={oci},tar=false,rewrite-timestamp=true",
    )  # fmt: skip


def _unmoved(plan: Plan, options: Options, name: str, commit: Commit, floating: str | None) -> dict[str, str]:
    """The tags that do not move, and why.

    A tag stays if it names an image of a later commit; the floating tag also stays if this image is not complete.
    """
    unmoved = {}
    for tag in tags(plan.target, commit)[1:]:
        created = _created(f"{name}:{tag}")
        if created > commit.time.isoformat():
            unmoved[tag] = f"it names an image of a later commit ({created})"
    if options.sm:
        floating = "it is compiled for some of its GPUs only"
    if options.standins and not _is_local(name):
        floating = "its base is a stand-in"
    return unmoved | ({plan.target.name: floating} if floating else {})


def _unproven_in(target: Target, unproven: Iterable[str]) -> str | None:
    """Why an image with these unproven claims does not get the floating tag; what the target excepts is no reason."""
    left = sorted(claim for claim in unproven if claim.split("[")[0] not in target.unproven_in_image)
    return f"{left[0]} is unproven in this image" if left else None


def prove(plan: Plan, image: str) -> tuple[bool, list[str]]:
    """Run an image's `smoke` and keep its evidence, which names the image.

    Returns whether a claim is refuted or the run failed, and the ids of the unproven claims. The container ends with
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
            evidence = smoke.keep(plan, Path(scratch, "outcomes.json"), code, log, read_json(manifest), image)
            refuted, unproven = (smoke.of_outcome(evidence, word) for word in ("refuted", "unproven"))
            return bool(code or refuted), unproven
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


def digest_in(oci: Path) -> str:
    """The digest of the one image manifest of an OCI layout."""
    (manifest,) = json.loads((oci / "index.json").read_text())["manifests"]
    return str(manifest["digest"])


def try_upload(name: str) -> None:
    """Begin an upload to a repository and take it back; a registry that is not there or takes none is refused."""
    host, _, path = name.partition("/")
    if not re.search(r"[.:]|^localhost$", host):
        host, path = "index.docker.io", name
    place = f"http{'' if _is_local(name) else 's'}://{host}/v2/{path}/blobs/uploads/"
    token = _run_crane("auth", "token", "--push", "--header", name)  # no registry without accounts gives any
    kind, _, header = token.stdout.strip().partition(": ") if token.returncode == 0 else ("", "", "")
    headers = {kind: header} if header else {}
    with httpx2.Client(timeout=60, follow_redirects=True, auth=_account(host) if not header else None) as client:
        try:
            begun = client.post(place, headers=headers)
            begun.raise_for_status()
            client.delete(urljoin(place, begun.headers["Location"]), headers=headers)
        except (httpx2.HTTPError, KeyError) as error:
            raise Refusal(
                f"{name} takes no upload ({last_words(error)}), so nothing was built: check the registry, log in with "
                "`docker login` and check your rights there."
            ) from None


def _account(host: str) -> tuple[str, str] | None:
    """The name and password that `docker login` keeps for a registry, if it does."""
    account = docker.auth.load_config().resolve_authconfig(host) or {}
    name, password = (account.get(key) or account.get(key.title()) for key in ("username", "password"))
    return (str(name), str(password)) if name and password else None


def refuse_moving(name: str, tag: str, digest: str) -> None:
    """Refuse to give a commit's tag to another image than it has: a commit names one image."""
    done = _run_crane("digest", f"{name}:{tag}")
    has = done.stdout.strip()
    if done.returncode == 0 and has != digest:
        raise Refusal(
            f"{name}:{tag} is {has}, and this build of the same commit is {digest}, so nothing was pushed: find out "
            "what differs, and publish from another commit."
        )


def push(oci: Path, name: str, digest: str) -> None:
    """Push an OCI layout by its digest, without a tag."""
    _crane(f"{name}@{digest} cannot be pushed, and no tag was set", "push", str(oci), f"{name}@{digest}")


def set_tags(name: str, digest: str, names: Iterable[str]) -> None:
    """Give a pushed digest its tags, in this order."""
    for tag in names:
        _crane(f"{name}:{tag} cannot be set", "tag", f"{name}@{digest}", tag)


def _created(image: str) -> str:
    """When the commit of the image that a tag names was made, according to its label; "" if there is none."""
    done = _run_crane("config", image)
    labels = json.loads(done.stdout)["config"].get("Labels") if done.returncode == 0 else {}
    return str((labels or {}).get("org.opencontainers.image.created", ""))


def _is_local(name: str) -> bool:
    return bool(re.match(r"(127\.0\.0\.1|localhost)[:/]", name))


def _run_crane(*words: str) -> subprocess.CompletedProcess[str]:
    """Run crane; a registry on this machine may lack TLS."""
    local = ["--insecure"] if any(map(_is_local, words)) else []
    command = ["crane", *local, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=ends_with_us)


def _crane(fault: str, *words: str) -> None:
    done = _run_crane(*words)
    if done.returncode != 0:
        message = last_words((done.stderr.strip().splitlines() or ["no message"])[-1])
        raise Refusal(f"{fault} ({message}): check the registry and your rights there, then publish again.")


def _describe(plan: Plan, folder: Path, name: str, digest: str, moved: list[str]) -> None:
    """Write image.json and image.md: what the image contains, from its own manifest, and the sizes of its layers."""
    blobs = folder / "oci" / "blobs" / "sha256"
    manifest = json.loads((blobs / digest.removeprefix("sha256:")).read_text())
    config = json.loads((blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_text())
    made_by = [entry.get("created_by", "base") for entry in config["history"] if not entry.get("empty_layer")]
    inside = engine().containers.run(f"{name}@{digest}", ["cat", "/opt/fusebox/fusebox/manifest.json"], remove=True)
    layers = [
        {"bytes": layer["size"], "digest": layer["digest"], "made_by": by.partition(" # ")[0]}
        for layer, by in zip(manifest["layers"], made_by, strict=True)
    ]
    packages = json.loads(inside)["packages"]
    for pin in plan.pins:
        if pin.name in packages:
            packages[pin.name]["source"] = pin.release.identity
    about = {
        "name": name, "digest": digest, "tags": moved, "labels": config["config"].get("Labels", {}),
        "layers": layers, "packages": packages,
    }  # fmt: skip
    write_json(folder / "image.json", about)
    rows = [
        f"| {package} | {entry.get('release', entry['version'])} | `{entry.get('source', '')[:12]}` | "
        f"{', '.join(Path(patch['file']).stem for patch in entry['patches'])} |"
        for package, entry in packages.items()
    ]
    sizes = [f"| {layer['bytes'] / 2**20:.1f} | {layer['made_by'][:90]} |" for layer in layers]
    total = sum(layer["bytes"] for layer in layers) / 2**20
    lines = [
        f"# {name}@{digest}", "", f"Tags: {', '.join(moved)}.", "",
        "| package | version | commit or sha256 | patches |", "| --- | --- | --- | --- |", *rows, "",
        f"{total:.1f} MiB in the registry:", "", "| MiB | layer |", "| --- | --- |", *sizes,
    ]  # fmt: skip
    write_text(folder / "image.md", "\n".join(lines) + "\n")
