"""Base images and their digests, with a real engine and a real registry; without them these tests are unproven."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import ImageNotFound

from recipes.catalogue.bases import bases
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.errors import Refusal
from recipes.files import ROOT, digest_of, sha256_of
from recipes.measure import runs
from recipes.ship import apt, dockerfile, image, publish, registry
from recipes.ship import bases as raising
from recipes.tests.conftest import SOURCE, Checkout, Tiny, script, wheel
from recipes.tests.objects import CUBIN, PORTABLE, fatbin, library


def test_the_module_docker_is_the_sdk() -> None:
    """The folder docker/ of this checkout is no package."""
    assert docker.__file__ and docker.DockerClient


def test_lock_resolves_digests_and_says_which_it_could_not(tiny: Tiny, pushed: tuple[str, str]) -> None:
    name, digest = pushed
    declared = tiny.targets.read_text()
    base = tiny.declared.base.wheels.image
    for part, put in (("wheels", name), ("runtime", f"{name}-absent")):
        before = f'{part} = {{ image = "{base}"'
        tiny.edit(tiny.targets, before, before.replace(base, put))
    assert "unresolved: the digest of" in tiny.succeed("plan", "tiny")
    digests, missing = image.resolve(tiny.targets, tiny.declared)
    assert digests == {name: digest}
    assert len(missing) == 1 and f"{name}-absent" in missing[0]
    assert tiny.declared.base.wheels.digest == digest
    assert tiny.declared.base.unresolved == [f"{name}-absent"]
    assert len(tiny.targets.read_text().splitlines()) == len(declared.splitlines())


def test_without_an_engine_the_digest_stays_unresolved(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tiny.root}/no.sock")
    before = tiny.targets.read_text()
    digests, missing = image.resolve(tiny.targets, tiny.declared)
    reason = f"No Docker engine answers at unix://{tiny.root}/no.sock (No such file or directory): start one"
    assert not digests and reason in missing[0]
    assert tiny.targets.read_text() == before


def test_the_table_of_targets_lists_what_is_unresolved() -> None:
    catalogue = Catalogue()
    page = (catalogue.root / "docs" / "status" / "targets.md").read_text()
    for name, target in catalogue.targets.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| [`{name}`]("))
        assert ("(digest unresolved)" in row) == (target.base.wheels.digest == "unresolved")


# --- what the Dockerfiles say


@pytest.mark.parametrize("name", list(Catalogue().targets))
def test_only_apt_and_the_sources_have_a_network(name: str) -> None:
    """After the stage `sources`, a RUN is offline or the one apt layer of its stage."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    after = text[text.index(" AS toolchain") :].replace("\\\n", " ")
    runs = re.findall(r"^RUN (.*)$", after, re.MULTILINE)
    assert runs
    for run in runs:
        assert "--network=none" in run or " apt-get update && " in run, run
    for stage in after.split("\nFROM "):
        assert stage.count("apt-get install") <= 1


@pytest.mark.parametrize("name", list(Catalogue().targets))
def test_a_base_is_named_by_digest_where_it_is_known(name: str) -> None:
    catalogue = Catalogue()
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    named = {line.split()[1] for line in text.splitlines() if line.startswith("FROM ")}
    images = {base for base in named if ":" in base}
    assert images == {
        each.reference
        for each in (bases().sources, catalogue.targets[name].base.wheels, catalogue.targets[name].base.runtime)
    }
    assert {base.partition("@")[0] for base in images if "@" not in base} == set(
        catalogue.targets[name].base.unresolved
    )


def test_a_label_says_what_the_data_say() -> None:
    """Letters stay letters, and docker puts no variable where a dollar stands."""
    chosen = plan(Catalogue(), "cpu")
    target = chosen.target.model_copy(update={"reason": 'für "5 $HOME"'})
    text = dockerfile.text(dataclasses.replace(chosen, target=target))
    assert r'LABEL org.opencontainers.image.description="für \"5 \$HOME\""' in text.splitlines()


def test_an_image_says_which_gpus_it_is_compiled_for_and_that_it_wants_the_driver() -> None:
    texts = {name: dockerfile.text(plan(Catalogue(), name)).splitlines() for name in ("cpu", "cu12.1-torch2.1")}
    assert 'LABEL fusebox.sm="${SM:-8.0 9.0}"' in texts["cu12.1-torch2.1"]
    assert 'ENV NVIDIA_VISIBLE_DEVICES="all"' in texts["cu12.1-torch2.1"]
    assert 'LABEL fusebox.sm="${SM:-none}"' in texts["cpu"]
    assert not any("NVIDIA" in line for line in texts["cpu"])


@pytest.mark.parametrize("sm", ["", "8.9"])
def test_a_label_names_no_package_that_docker_alone_leaves_out(sm: str) -> None:
    """Docker expands these variables as a shell does."""
    whole = plan(Catalogue(), "cu13.2-torch2.15")
    last = dockerfile.text(whole).rpartition("ARG SM=\n")[2].partition("USER ")[0]
    lines = [line for line in last.splitlines() if not line.startswith("#")]
    words = [re.sub(r"^(ARG|LABEL) ", "", line).replace("fusebox.", "label_") for line in lines]
    command = ["sh", "-c", "\n".join([*words, 'echo "$label_sm"; echo "$label_packages"'])]
    done = subprocess.run(command, env={**os.environ, "SM": sm}, capture_output=True, text=True, check=True)
    named = ["8.9", "those of /opt/fusebox/fusebox/manifest.json"]
    assert done.stdout.splitlines() == (named if sm else [" ".join(whole.target.sm), whole.packages])


@pytest.mark.parametrize(("sm", "has"), [((), None), (("9.0",), True), (("8.9",), False)])
def test_nox_gives_the_label_whole(sm: tuple[str, ...], has: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def ran(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", ran)
    image.buildx(plan(Catalogue(), "cu13.2-torch2.15", list(sm) or None), image.Options({}, sm=sm))
    labels = [word for word in commands[0] if word.startswith("--label=fusebox.packages=torch 2.15.0, ")]
    assert ["flash-attn-3" in label for label in labels] == ([] if has is None else [has])
    absent = "--label=fusebox.option.flash-attn-3=not in this image" in commands[0]
    assert absent == (has is False)


def test_a_published_image_says_until_when_it_is_supported() -> None:
    catalogue = Catalogue()
    for name, target in catalogue.targets.items():
        until = dockerfile.labels(plan(catalogue, name))["fusebox.supported-until"]
        assert (until == "none") <= (not target.publish), name


def test_an_image_on_a_standin_says_so() -> None:
    target = Catalogue().targets["cpu"]
    arguments = image.Options({target.base.runtime.image: "here/base@sha256:0"}).arguments(target)
    base = "--label=org.opencontainers.image.base"
    assert {f"{base}.name=here/base", f"{base}.digest=sha256:0"} <= set(arguments)
    assert "--build-arg=STANDIN=here/base@sha256:0" in arguments


def test_a_configuration_of_pip_is_a_secret(tmp_path: Path) -> None:
    arguments = image.Options({}, pip_conf=tmp_path / "pip.conf").arguments(Catalogue().targets["cpu"])
    assert arguments == [f"--secret=id=pip,src={tmp_path}/pip.conf"]
    for name in Catalogue().targets:
        text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
        assert text.count("--mount=type=secret,id=pip,target=/etc/pip.conf") == 2


def test_a_standin_for_no_base_is_refused() -> None:
    target = Catalogue().targets["cpu"]
    with pytest.raises(Refusal, match=r"python:3 is not a base of cpu: choose one of python:3\.12"):
        image.Options({"python:3": "x"}).arguments(target)


@pytest.mark.parametrize("name", ["a\nb", "a b", "a\tb"])
def test_a_name_that_no_image_has_is_refused(checkout: Checkout, name: str) -> None:
    naming = ("--standin", "is not the name of an image")
    checkout.refuse("image", "cpu", "--standin", f"python:3.11-slim-bookworm={name}", naming=naming)
    checkout.edit(checkout.targets, 'image = "python:3.11-slim-bookworm"', f"image = {json.dumps(name)}")
    checkout.refuse("plan", "cpu", naming=("targets.toml: cpu.base.", "does not match"))


def test_a_standin_that_names_no_image_is_refused(checkout: Checkout) -> None:
    checkout.refuse("image", "cpu", "--standin", "python:3.12-slim-bookworm", naming=("--standin", "NAME=REF"))


def test_a_link_out_of_a_mirror_is_refused(tmp_path: Path) -> None:
    """docker does not follow it; one that stays inside is none of that."""
    target, mirror = Catalogue().targets["cpu"], tmp_path / "mirror"
    (mirror / "github.com" / "one" / "it.git").mkdir(parents=True)
    (mirror / "github.com" / "two").symlink_to("one")
    assert image.Options({}, mirror).arguments(target) == [f"--build-context=mirror={mirror}"]
    (mirror / "github.com" / "one" / "its.git").symlink_to(tmp_path)
    with pytest.raises(Refusal, match=r"--mirror .*mirror: github\.com/one/its\.git is a link out of the folder"):
        image.Options({}, mirror).arguments(target)
    (mirror / "github.com" / "one" / "its.git").unlink()
    (mirror / "github.com" / "three").symlink_to(mirror / "github.com" / "one")
    with pytest.raises(Refusal, match=r"github\.com/three is an absolute link"):
        image.Options({}, mirror).arguments(target)


# --- base images are raised


@pytest.mark.usefixtures("crane")
def test_a_base_is_raised_to_the_digest_of_its_tag(tiny: Tiny, pushed: tuple[str, str]) -> None:
    """In every place that names it; what its registry does not give, stays and is told."""
    name, digest = pushed
    path = tiny.root / "recipes" / "bases.toml"
    for file, base in ((tiny.targets, tiny.declared.base.wheels), (path, bases().sources)):
        file.write_text(file.read_text().replace(f'image = "{base.image}"', f'image = "{name}"'))
    path.write_text(path.read_text().replace(bases().buildkit.image, f"{name}-absent"))
    lines = list(raising.raise_digests(Catalogue(tiny.root)))
    assert f"{name}: {bases().sources.digest}, unresolved -> {digest}" in lines
    assert any(line.startswith(f"{name}-absent keeps the digest {bases().buildkit.digest}: ") for line in lines)
    raised = Catalogue(tiny.root)
    assert {bases(tiny.root).sources.digest, raised.targets["tiny"].base.runtime.digest} == {digest}
    assert f"{name} is still {digest}" in raising.raise_digests(raised)


def test_without_crane_no_base_is_raised(checkout: Checkout, tmp_path: Path) -> None:
    checkout.refuse("bump", "--bases", naming=("Digests are asked with crane",), PATH=str(tmp_path))


# --- what apt installs


def test_what_apt_installs_is_locked_where_its_base_has_a_lock() -> None:
    """Published images have no package by name alone; elsewhere a missing lock is said in the provenance."""
    catalogue = Catalogue()
    for name, target in catalogue.targets.items():
        text = dockerfile.text(plan(catalogue, name))
        for base in (bases().sources, target.base.wheels, target.base.runtime):
            lock = apt.lock_of(ROOT, base)
            locked = f"&& /apt.sh /{lock.name} {' '.join(base.apt)}\n" if lock else "&& DEBIAN_FRONTEND="
            assert not base.apt or locked in text, (name, base.image)


def test_the_image_for_several_hosts_has_what_nccl_needs_for_infiniband() -> None:
    """Its build installs it from the lock. A claim could not ask for it: a bare machine may lack such a network."""
    runtime = Catalogue().targets[runs.TARGET].base.runtime
    needed = {"ibverbs-providers", "libibverbs1", "librdmacm1t64"}
    assert needed <= set(runtime.apt)
    lock = apt.lock_of(ROOT, runtime)
    assert lock and needed <= {line.partition("=")[0] for line in lock.read_text().splitlines()}


def test_a_lock_of_other_packages_is_refused(tiny: Tiny) -> None:
    base = bases().sources
    path = apt.path_of(tiny.root, base)
    tiny.edit(path, "# packages: git", "# packages: curl")
    tiny.refuse("render", naming=("python-3.12-slim-bookworm.txt is not of the package git", "nox -s lock -- apt"))
    path.unlink()
    assert apt.lock_of(tiny.root, base) is None


def test_a_standin_has_no_lock_unless_it_is_asked_for() -> None:
    target = Catalogue().targets["cpu"]
    given = {target.base.runtime.image: "here/base@sha256:0"}
    newest = "--build-arg=APT=newest"
    assert newest in image.Options(given).arguments(target)
    assert newest not in image.Options(given, apt="locked").arguments(target)
    assert newest not in image.Options({}).arguments(target)
    assert newest in image.Options({}, apt="newest").arguments(target)


def test_apt_installs_what_the_lock_has_and_nothing_else(standin: str, tmp_path: Path) -> None:
    """By the hash of each file; a refusal names the package and leaves nothing installed."""
    lock = tmp_path / "base.txt"
    lines = apt._asked(standin, ["tree"], "host")
    assert all(re.fullmatch(r"\S+=\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    step = "apt-get update -qq && { /apt.sh /base.txt tree; echo code $?; command -v tree; ls /etc/apt/preferences.d; }"

    def installed(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "run", "--rm", "--network=host", "--user=0", *options]
        command += [f"--volume={ROOT}/docker/apt.sh:/apt.sh:ro", f"--volume={lock}:/base.txt:ro", standin]
        return subprocess.run([*command, "sh", "-c", step], capture_output=True, text=True, check=False)

    lock.write_text("# packages: tree\n" + "".join(f"{line}\n" for line in lines))
    done = installed()
    assert done.stdout.splitlines()[-2:] == ["code 0", "/usr/bin/tree"], done.stdout + done.stderr
    lock.write_text(re.sub(r"^(tree=.*sha256:)\w+$", rf"\g<1>{'0' * 64}", lock.read_text(), flags=re.MULTILINE))
    done = installed()
    assert "code 2" in done.stdout.splitlines() and "/usr/bin/tree" not in done.stdout
    assert re.search(
        r"fusebox: tree \S+, which apt would install, is not in base\.txt \(1 such packages\): ", done.stderr
    )
    assert "/usr/bin/tree" in installed("--env=APT=newest").stdout


# --- stages `sources` and `audit`, without docker


@pytest.fixture
def laid_out(tiny: Tiny, tmp_path: Path) -> tuple[Plan, Path]:
    """What the stage `sources` writes for `tiny`."""
    tiny.succeed("patch", "tiny", "--into", tmp_path / "out")
    return plan(Catalogue(tiny.root), "tiny"), tmp_path / "out"


def audited(out: Path, folder: Path) -> tuple[object, ...]:
    """The command of the stage `audit`, on FOLDER/wheels."""
    places = {"out": out, **{name: folder / name for name in ("wheels", "built-in")}, "into": folder / "install"}
    return ("audit", "tiny", *(word for name, place in places.items() for word in (f"--{name}", place)))


def test_sources_hold_what_the_later_stages_read(tiny: Tiny, laid_out: tuple[Plan, Path]) -> None:
    _, out = laid_out
    house = {path.name for path in (out / "environment" / "wheelhouse").iterdir()}
    assert {"tinydep-1.0-py3-none-any.whl", "tinywheel-1.0-py3-none-any.whl"} < house
    pinned = (out / "environment" / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in pinned)
    assert len(pinned) == len(house)
    package = out / "packages" / "tinypkg"
    assert "value = 2" in (package / "source" / "tinypkg-1.0" / "tinypkg.py").read_text()
    assert (package / "build.env").read_text() == "TINY_SECONDS=0\n"


def test_a_wheel_compiled_on_a_standin_has_another_key(tiny: Tiny, tmp_path: Path) -> None:
    """Else exported wheels of a stand-in would enter images on the real base."""
    tiny.edit(tiny.recipe("tinypkg"), 'compiler = "none"', 'compiler = "c++"')
    keys = {}
    for name, options in {"base": (), "standin": ("--standin", "here/base@sha256:0")}.items():
        tiny.succeed("patch", "tiny", "--into", tmp_path / name, *options)
        inputs = json.loads((tmp_path / name / "inputs" / "tinypkg.json").read_text())["inputs"]
        keys[name] = inputs["base"]
    assert keys == {"base": tiny.declared.base.wheels.reference, "standin": "here/base@sha256:0"}
    wheels = tmp_path / "wheels" / "tinypkg"
    wheels.mkdir(parents=True)
    with zipfile.ZipFile(wheel(wheels, "tinypkg", ("tinydep",)), "a") as archive:
        archive.write(library(tmp_path, "op", "void op() {}", *PORTABLE), "op.so")
    (wheels / "compiler.txt").write_text("")
    tiny.succeed(*audited(tmp_path / "standin", tmp_path))
    manifest = json.loads((tmp_path / "install" / "fusebox" / "manifest.json").read_text())
    assert manifest["packages"]["tinypkg"]["built_with"]["where"] == "here/base@sha256:0"
    # An image takes this wheel only on request, and then with the wheel's own key and record.
    exported = tmp_path / "install" / "wheels"
    for name, options in {"strict": (), "elsewhere": ("--elsewhere", "yes")}.items():
        tiny.succeed("patch", "tiny", "--into", tmp_path / name, "--wheelcache", exported, *options)
        inputs = json.loads((tmp_path / name / "inputs" / "tinypkg.json").read_text())["inputs"]
        is_taken = (tmp_path / name / "packages" / "tinypkg" / "wheel").exists()
        assert is_taken == (name == "elsewhere")
        assert ((exported / digest_of(inputs)).exists(), inputs["base"] == keys["standin"]) == (is_taken, is_taken)
    (record,) = exported.glob("*/wheel.json")
    shutil.copytree(record.parent, exported / "another")
    again = ("patch", "tiny", "--wheelcache", exported, "--elsewhere", "yes", "--into")
    twice = "tinypkg 1.0: 2 exported wheels differ in compiler or base alone"
    tiny.refuse(*again, tmp_path / "twice", naming=(twice,))
    (exported / "another" / "wheel.json").write_text("{")
    tiny.refuse(
        *again, tmp_path / "damaged", naming=("another/wheel.json is not the record of a wheel: export it again",)
    )


def test_what_was_built_is_audited_and_described(tiny: Tiny, laid_out: tuple[Plan, Path], tmp_path: Path) -> None:
    _, out = laid_out
    wheels = tmp_path / "wheels" / "tinypkg"
    wheels.mkdir(parents=True)
    built = wheel(wheels, "tinypkg", ("tinydep",))
    (wheels / "compiler.txt").write_text("")
    tiny.succeed(*audited(out, tmp_path))
    manifest = json.loads((tmp_path / "install" / "fusebox" / "manifest.json").read_text())
    assert manifest["packages"]["tinypkg"]["sha256"] == sha256_of(built)
    sizes = json.loads((tmp_path / "install" / "fusebox" / "bytes.json").read_text())
    with zipfile.ZipFile(built) as archive:
        assert sizes["tinypkg"] == sum(len(archive.read(name)) for name in archive.namelist())
    assert {"tinydep", "tinywheel", "pip"} < sizes.keys()
    constraints = (tmp_path / "install" / "fusebox" / "constraints.txt").read_text().splitlines()
    assert {"tinydep==1.0", "tinypkg==1.0", "tinywheel==1.0"} < set(constraints)
    assert f"tinypkg==1.0 --hash=sha256:{sha256_of(built)}" in (tmp_path / "install" / "requirements.txt").read_text()
    # The wheel is kept as in a wheel cache, and taken from there instead of being built again.
    again = tmp_path / "again"
    tiny.succeed("patch", "tiny", "--into", again, "--wheelcache", tmp_path / "install" / "wheels")
    assert sha256_of(again / "packages" / "tinypkg" / "wheel" / built.name) == sha256_of(built)


def test_a_wheel_of_something_else_is_refused(tiny: Tiny, laid_out: tuple[Plan, Path], tmp_path: Path) -> None:
    _, out = laid_out
    (tmp_path / "wheels" / "tinypkg").mkdir(parents=True)
    other = wheel(tmp_path / "wheels" / "tinypkg", "tinywheel")
    (tmp_path / "wheels" / "tinypkg" / "compiler.txt").write_text("")
    (tmp_path / "install" / "wheelhouse").mkdir(parents=True)
    (tmp_path / "install" / "wheelhouse" / other.name).touch()  # as of the package that it is the wheel of
    tiny.refuse(*audited(out, tmp_path), naming=("tinywheel", "tinypkg 1.0"))


@pytest.mark.parametrize("cached", [False, True], ids=["just built", "from the wheel cache"])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (fatbin((CUBIN, 80)), "op.so is compiled for sm 8.0 and target tiny is for 9.0"),
        (
            fatbin((CUBIN, 90)) + "void of_another_torch(); void op() { of_another_torch(); }",
            "op.so has the undefined symbol _Z16of_another_torchv",
        ),
    ],
    ids=["another GPU", "another torch"],
)
def test_a_wheel_for_something_else_is_refused(
    tiny: Tiny, tmp_path: Path, code: str, message: str, cached: bool
) -> None:
    """By the name of what is wrong, in the build; a wheel from a cache is no exception, whatever its record says."""
    declared = 'cuda = "none"\nglibc = "2.28"\nsm = []\nproves_on = ["x86-64"]\npublish = false'
    gpu = 'cuda = "13.0"\ndriver = "580"\nglibc = "2.36"\nsm = ["9.0"]\nproves_on = ["H200"]\npublish = false'
    tiny.edit(tiny.targets, declared, gpu)
    tiny.edit(tiny.recipe("tinypkg"), 'compiler = "none"', 'compiler = "nvcc"')
    tiny.succeed("patch", "tiny", "--into", tmp_path / "out")
    folder = tmp_path / "wheels" / "tinypkg"
    folder.mkdir(parents=True)
    made = wheel(folder, "tinypkg", ("tinydep",))
    with zipfile.ZipFile(made, "a") as archive:
        archive.write(library(tmp_path, "op", code, *PORTABLE), "op.so")
    (folder / "compiler.txt").write_text("")
    if cached:
        (folder / "wheel.json").write_text(json.dumps({"file": made.name, "sha256": sha256_of(made)}))
    tiny.refuse(*audited(tmp_path / "out", tmp_path), naming=("tinypkg 1.0", message))


# --- docker build, with a stand-in for the bases


def buildx(tiny: Tiny, standin: str, mirror: Path, stage: str) -> str:
    """Build a stage of `tiny` and return what docker printed."""
    declared = (bases().sources, tiny.declared.base.wheels, tiny.declared.base.runtime)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    options = image.Options({base.image: standin for base in declared}, mirror, ca=certificates, network="host")
    command = ["docker", "buildx", "build", "--progress=plain", "--provenance=false"]
    command += ["--file", str(tiny.root / "docker" / "tiny.Dockerfile"), "--target", stage]
    done = subprocess.run(
        [*command, *options.arguments(tiny.declared), str(tiny.root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_what_stands_for_the_bases_is_no_richer_than_they_are(standin: str) -> None:
    """It has Python, and neither compiler nor git: what a build needs beyond that, its Dockerfile brings."""
    look = "command -v python3; for tool in cc gcc g++ make git nvcc; do command -v $tool; done; true"
    done = subprocess.run(["docker", "run", "--rm", standin, "sh", "-c", look], capture_output=True, text=True)
    assert (done.returncode, [Path(line).name for line in done.stdout.split()]) == (0, ["python3"])


def test_adding_a_package_builds_only_that_package(tiny: Tiny, standin: str, tmp_path: Path) -> None:
    """Each package is a stage of its own, cached by what it reads; what another package reads changes nothing."""
    more = {name.replace("tinypkg", "tinymore"): text.replace("tinypkg", "tinymore") for name, text in SOURCE.items()}
    tiny.plant("tinymore", more, requires=("tinydep",))
    tiny.succeed("render")
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "first")
    first = buildx(tiny, standin, tmp_path / "first", "audit")
    assert re.search(r"\[wheel-tinypkg 1/1\] RUN", first)
    tiny.edit(tiny.targets, 'tinywheel = "1.0"', 'tinywheel = "1.0"\ntinymore = "1.0"')
    tiny.succeed("render")
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "second")
    second = buildx(tiny, standin, tmp_path / "second", "audit")
    steps = dict(re.findall(r"^#(\d+) \[(wheel-\w+) 1/1\] RUN", second, re.MULTILINE))
    cached = set(re.findall(r"^#(\d+) CACHED$", second, re.MULTILINE))
    assert {name: number in cached for number, name in steps.items()} == {
        "wheel-tinypkg": True,
        "wheel-tinymore": False,
    }


def build_check(name: str, path: Path, standin: str) -> subprocess.CompletedProcess[str]:
    """What docker itself says against a target's Dockerfile; `standin` is its every base."""
    target = Catalogue().target(name)
    standins = {base.image: standin for base in (bases().sources, target.base.wheels, target.base.runtime)}
    given = image.Options(standins).arguments(target)
    command = ["docker", "buildx", "build", "--check", "--file", str(path), *given, str(ROOT)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", Catalogue().targets)
def test_docker_has_nothing_against_a_dockerfile(name: str, pushed: tuple[str, str]) -> None:
    done = build_check(name, ROOT / "docker" / f"{name}.Dockerfile", "@".join(pushed))
    assert done.returncode == 0 and "no warnings found" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "fault", "rule"),
    [
        (" AS toolchain", " as toolchain", "FromAsCasing"),
        ("WORKDIR /fusebox", "WORKDIR /$FUSEBOX", "UndefinedVar"),
        ("ARG SM=", "ARG GITHUB_TOKEN=", "SecretsUsedInArgOrEnv"),
    ],
)
def test_docker_sees_a_planted_fault(text: str, fault: str, rule: str, pushed: tuple[str, str], tmp_path: Path) -> None:
    declared = (ROOT / "docker" / "cpu.Dockerfile").read_text()
    assert text in declared
    (tmp_path / "Dockerfile").write_text(declared.replace(text, fault, 1))
    done = build_check("cpu", tmp_path / "Dockerfile", "@".join(pushed))
    assert done.returncode != 0 and rule in done.stdout, done.stdout + done.stderr


def test_a_compilation_says_every_minute_that_it_goes_on(tmp_path: Path) -> None:
    """What the compilers print is in build.log, which nobody sees until the stage ends."""
    scripts, given = tmp_path / "docker", tmp_path / "in"
    scripts.mkdir()
    shutil.copy(ROOT / "docker" / "build-package.sh", scripts)
    script(scripts / "build-wheel.sh", "#!/bin/sh\necho compiling; sleep 3\n")
    (given / "source" / "tiny").mkdir(parents=True)
    command = ["bash", str(scripts / "build-package.sh"), str(given), str(tmp_path / "out")]
    variables = {**os.environ, "FUSEBOX_BEAT": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "0 min, 1 lines: compiling" in done.stdout.splitlines()


def test_the_stage_of_a_package_that_is_left_out_says_so_and_makes_no_wheel(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "left_out.txt").write_text("a 1.0 is left out: it has kernels for sm 9.0 only.\n")
    command = ["bash", str(ROOT / "docker" / "build-package.sh"), str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "a 1.0 is left out: it has kernels for sm 9.0 only.\n" and not [*(tmp_path / "out").iterdir()]


def installed(site: Path, name: str, files: list[str]) -> str:
    """Write the empty files of a distribution, and its RECORD, which is returned."""
    record = f"{name}-1.0.dist-info/RECORD"
    for file in (*files, record):
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    rows = [f'"{file}",,' if "," in file else f"{file},sha256=x,0" for file in (*files, record)]
    (site / record).write_text("".join(f"{row}\n" for row in rows))
    return record


def test_an_environment_is_split_by_how_often_it_changes(tmp_path: Path) -> None:
    """Every file once, with its mode: NVIDIA's libraries, torch, the locked dependencies, the target's own packages."""
    prefix, site = tmp_path / "env", tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    owned = {
        "nvidia_nccl_cu13": ["nvidia/__init__.py", "nvidia/nccl/lib.so"],
        "nvidia_cublas": ["nvidia/__init__.py", "nvidia/cublas/lib.so"],
        "torch": ["torch/a file, with a comma.py", "../../../bin/torchrun"],
        "numpy": ["numpy/core.py"],
        "Flash_attn": ["flash_attn/op.so"],
    }
    records = {name: installed(site, name, files) for name, files in owned.items()}
    (prefix / "bin" / "torchrun").chmod(0o755)
    (prefix / "bin" / "python").symlink_to("/usr/bin/python3")
    (prefix / "fusebox").mkdir()
    for name in ("torch.RECORD", "flash-attn.RECORD", "manifest.json"):
        (prefix / "fusebox" / name).write_text("")
    command = [ROOT / "docker" / "split-layers.sh", prefix, tmp_path / "layers"]
    subprocess.run(command, check=True)
    split = {
        layer.name: {
            str(path.relative_to(layer / str(prefix)[1:]))
            for path in layer.rglob("*")
            if path.is_symlink() or path.is_file()
        }
        for layer in (tmp_path / "layers").iterdir()
    }
    place = "lib/python3.11/site-packages"
    records = {name: f"{place}/{record}" for name, record in records.items()}
    assert split == {
        "cuda": {records["nvidia_nccl_cu13"], records["nvidia_cublas"]}
        | {f"{place}/nvidia/{file}" for file in ("__init__.py", "nccl/lib.so", "cublas/lib.so")},
        "torch": {records["torch"], f"{place}/torch/a file, with a comma.py", "bin/torchrun"},
        "dependencies": {records["numpy"], f"{place}/numpy/core.py", "bin/python"},
        "packages": {records["Flash_attn"], f"{place}/flash_attn/op.so"}
        | {f"fusebox/{name}" for name in ("torch.RECORD", "flash-attn.RECORD", "manifest.json")},
    }
    assert os.access(tmp_path / "layers" / "torch" / str(prefix)[1:] / "bin" / "torchrun", os.X_OK)


def test_a_later_commit_keeps_the_layers_that_it_does_not_change(tiny: Tiny, standin: str, tmp_path: Path) -> None:
    """Labels alone name the commit, and a change of the claims or of a package comes in a late layer."""
    declared = (bases().sources, tiny.declared.base.wheels, tiny.declared.base.runtime)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    tiny.succeed("render")
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "mirror")
    options = image.Options(
        {base.image: standin for base in declared}, tmp_path / "mirror", ca=certificates, network="host"
    )

    def layers(name: str, seconds: int) -> tuple[str, list[str]]:
        commit = publish.Commit(name * 40, seconds)
        publish._build(plan(Catalogue(tiny.root), "tiny"), options, commit, tmp_path / name)
        blobs = tmp_path / name / "blobs" / "sha256"
        digest = registry.digest_in(tmp_path / name)
        manifest = json.loads((blobs / digest.removeprefix("sha256:")).read_text())
        return digest, [layer["digest"] for layer in manifest["layers"]]

    (first, held), (second, later) = layers("a", 1777939200), layers("b", 1778000000)
    assert first != second and held == later
    claims = tiny.root / "smoke_tests" / "claims.py"
    claims.write_text(claims.read_text() + "# another line\n")
    _, changed = layers("c", 1778100000)
    of_claims = [at for at, (old, new) in enumerate(zip(held, changed, strict=True)) if old != new]
    assert len(of_claims) == 1
    tiny.edit(tiny.root / "patches" / "tinypkg" / "0001-say-two.patch", "+value = 2", "+value = 3")
    _, patched = layers("d", 1778200000)
    of_packages = [at for at, (old, new) in enumerate(zip(changed, patched, strict=True)) if old != new]
    assert len(of_packages) == 1 and of_packages < of_claims


# --- the image of the target cpu, as `nox -s "image(cpu)"` left it in the engine


@pytest.fixture
def cpu(engine: docker.DockerClient) -> str:
    """The image's name."""
    name = image.tag(Catalogue().target("cpu"))
    try:
        engine.images.get(name)
    except ImageNotFound:
        pytest.skip(f'unproven here: the engine has no image {name}; `nox -s "image(cpu)"` builds it')
    return name


def run(name: str, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command in an image, offline."""
    line = ["docker", "run", "--rm", "--network=none", *options, name, *command]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_its_own_user_has_a_name(cpu: str) -> None:
    assert run(cpu, "whoami").stdout == "fusebox\n"


def test_a_container_stops_when_it_is_told(cpu: str) -> None:
    """Python as the first process would ignore it, and docker would kill it after 10 seconds (code 137)."""
    started = ["docker", "run", "--detach", "--network=none", cpu, "python", "-c", "import time; time.sleep(600)"]
    container = subprocess.run(started, capture_output=True, text=True, check=True).stdout.strip()
    try:
        subprocess.run(["docker", "stop", container], capture_output=True, check=True)
        asked = ["docker", "inspect", "--format={{.State.ExitCode}}", container]
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == "143"
    finally:
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, check=False)


def test_without_a_place_to_write_smoke_says_what_to_do(cpu: str) -> None:
    done = run(cpu, "smoke", options=("--read-only",))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fusebox: /tmp cannot be written, and the claims need it: run the container with --tmpfs /tmp:exec.\n"
    )


def test_a_login_shell_finds_the_environment(cpu: str) -> None:
    """/etc/profile sets the PATH anew; enroot starts everything through it."""
    assert run(cpu, "bash", "-lc", "command -v python").stdout == "/opt/fusebox/bin/python\n"


@pytest.fixture
def on_top(engine: docker.DockerClient, cpu: str, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Builds FROM the image plus an own package, as docs/use/images.md shows, after a step by root; returns its id."""
    wheel(tmp_path, "ownpkg", payload=b"value = 42\n")
    built = []

    def build(step: str) -> str:
        lines = [
            f"FROM {cpu}", "USER root", step, "COPY *.whl /own/", "RUN pip install --no-cache-dir /own/*.whl",
            "USER 10001:10001",
        ]  # fmt: skip
        (tmp_path / "Dockerfile").write_text("\n".join(lines) + "\n")
        command = ["docker", "build", "--quiet", "--network=none", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        built.append(done.stdout.strip())
        return built[-1]

    yield build
    for name in built:
        engine.images.remove(name, force=True)


def test_the_image_is_proved_also_with_an_own_package_on_top(on_top: Callable[[str], str]) -> None:
    """The claims that another package could refute: what is installed, what imports, who may write where."""
    own = on_top("")
    assert run(own, "python", "-c", "import ownpkg; print(ownpkg.value)").stdout == "42\n"
    assert "added on top of the image: ownpkg 1.0\n" in run(own, "smoke", "--collect-only", "--quiet").stdout
    for options in ((), ("--user=12345", "--read-only", "--tmpfs=/tmp")):
        done = run(own, "smoke", "-k", "test_environment or test_torchao", options=options)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_image_has_is_not_replaced(cpu: str, tmp_path: Path) -> None:
    """Not even for what is installed on top and asks for another version."""
    wheel(tmp_path, "transformers", version="5.23.0")
    wheel(tmp_path, "trl", ("transformers>=5",))
    refused = ["docker", "build", "--network=none", "--progress=plain", "-"]
    folder = f"--build-context=own={tmp_path}"
    step = "RUN --mount=from=own,target=/own pip install --no-index --find-links=/own"
    done = subprocess.run(
        [*refused, folder], input=f"FROM {cpu}\nUSER root\n{step} trl\n", capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "transformers==4.40.2" in done.stderr, done.stderr


def test_a_cache_folder_of_roots_is_caught(on_top: Callable[[str], str]) -> None:
    """Without the folder that everyone may write to, which the test above has, root's installation makes its own."""
    bad = run(on_top("RUN rm -rf /tmp/cache"), "smoke", "-k", "test_module_is_inside_the_environment and torchao")
    assert bad.returncode == 1 and "refuted  torchao" in bad.stdout, bad.stdout + bad.stderr


# Runs in the image: the bytes of its environment, of the files that only torch needs, and of each wheel.
MEASURE = """
import importlib.metadata, json, pathlib, re, sys
from packaging.requirements import Requirement

alone, more = set(), ["torch", "pip"]
while more:
    name = re.sub("[-_.]+", "-", more.pop()).lower()
    if name not in alone:
        alone.add(name)
        needs = [Requirement(text) for text in importlib.metadata.requires(name) or []]
        more += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
wheels = json.loads(pathlib.Path(sys.prefix, "fusebox", "bytes.json").read_text())
files = sum(path.lstat().st_size for path in pathlib.Path(sys.prefix).rglob("*") if not path.is_dir())
print(json.dumps([files, sum(wheels[name] for name in alone), {**wheels, **dict.fromkeys(alone, 0)}]))
"""


def test_the_image_is_little_larger_than_torch_alone(cpu: str) -> None:
    """At most 154 MB more than an environment of pip, torch and what torch requires, as their wheels unpack.

    Two of them are coverage.py, with which the claims record what they run below Python 3.12, and two are accelerate.
    """
    done = run(cpu, "python", "-c", MEASURE)
    assert done.returncode == 0, done.stderr
    held, alone, others = json.loads(done.stdout)
    largest = sorted(others, key=others.get, reverse=True)[:8]
    listed = ", ".join(f"{name} {others[name] / 1e6:.0f}" for name in largest)
    assert held - alone <= 154e6, f"{held / 1e6:.1f} MB and torch alone {alone / 1e6:.1f}; of the difference: {listed}"
