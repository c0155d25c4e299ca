"""What is signed about collected wheels, and every way in which a wheel is refused; with cosign and keys made here."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from pypi_attestations import AttestationType, Provenance

from recipes.catalogue.load import Catalogue
from recipes.errors import Refusal
from recipes.files import ROOT, sha256_of
from recipes.process import git_variables
from recipes.ship import attest, index, statements, verify
from recipes.ship.cosign import Signer
from recipes.tests.conftest import Tiny, made_key, script, spoil
from recipes.tests.shop import folder, run_of, shop_in, wheel_of

LOCAL = "cputorch1.0.tiny"
BUILDER = "https://github.com/owner/fusebox/.github/workflows/wheels.yml@refs/heads/main"


def commit(shop: Tiny) -> str:
    """Commit all of a checkout; returns the commit."""
    (shop.root / ".gitignore").write_text("build/\n__pycache__/\n")
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "--quiet"), ("add", "--all"), (*name, "commit", "--quiet", "--message=all")):
        subprocess.run(["git", *words], cwd=shop.root, env=git_variables(), check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=shop.root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@dataclasses.dataclass
class Signed:
    """A checkout with signed wheels; a claim about tinywheel is proved, and none is about tinypkg."""

    shop: Tiny
    keys: tuple[Path, Path]
    commit: str

    def faults(self, wheel: Path, commit: str | None = None, key: Path | None = None) -> list[str]:
        catalogue, signer = Catalogue(self.shop.root), Signer(key or self.keys[1])
        return verify.faults(attest.verify(catalogue, wheel, signer, commit or self.commit))

    def sign(self, wheel: Path, change: Callable[[str, dict[str, Any]], dict[str, Any] | None]) -> None:
        """Sign a wheel's statements again, with changed predicates, or without those that become None."""
        stated = [attest._statement(wheel, bundle) for bundle in attest.bundles(wheel)]
        changed = [(each["predicateType"], change(each["predicateType"], each["predicate"])) for each in stated]
        attest.sign(wheel, [(kind, predicate) for kind, predicate in changed if predicate], Signer(self.keys[0]))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, wheels: Path, keys: tuple[Path, Path]) -> Signed:
    """Tests leave it as it is."""
    shop = shop_in(tmp_path_factory.mktemp("shop"), wheels)
    run_of(shop, "proved")
    sha = commit(shop)
    shop.succeed("wheels", "tiny", "--key", keys[0])
    return Signed(shop, keys, sha)


@pytest.fixture
def signed(original: Signed, tmp_path: Path) -> Signed:
    """A copy of it, to be changed."""
    shop = original.shop.copy(tmp_path)
    shutil.copytree(original.shop.root / "build", shop.root / "build")
    return dataclasses.replace(original, shop=shop)


def test_every_collected_wheel_is_verified(original: Signed) -> None:
    shop, paths = original.shop, sorted(folder(original.shop).glob("*.whl"))
    output = "".join(
        shop.succeed("verify", *paths, "--key", original.keys[1]).split()
    )  # however the table breaks lines
    assert len(paths) == 2 and all(path.name in output for path in paths)
    assert "1provedonx86-64" in output and "built:noclaimhasrunwithit" in output
    assert re.search(rf"commit{original.commit[:12]},\d+inputsbydigest", output)
    for path in paths:
        stated = [attest._statement(path, bundle) for bundle in attest.bundles(path)]
        assert all(each["subject"] == [{"name": path.name, "digest": {"sha256": sha256_of(path)}}] for each in stated)
        assert str(shop.root) not in json.dumps(stated)


def test_a_wheel_without_statements_is_refused(signed: Signed) -> None:
    wheel = wheel_of(signed.shop, "tinywheel")
    for empty in (True, False):
        attest.beside(wheel).write_text("") if empty else attest.beside(wheel).unlink()
        assert signed.faults(wheel) == [
            f"{wheel.name} is not signed: {wheel.name}.sigstore.jsonl is missing or empty; use a signed wheel."
        ]


def test_another_key_is_refused(signed: Signed, tmp_path: Path) -> None:
    _, other = made_key(tmp_path, "other")
    wheel = wheel_of(signed.shop, "tinywheel")
    (fault,) = signed.faults(wheel, key=other)
    assert fault.startswith(f"{wheel.name} is signed, but not by {other} (")


def test_a_statement_changed_after_it_was_signed_is_refused(signed: Signed) -> None:
    """Whoever may write to the index turns a refuted claim into a proved one."""
    wheel = wheel_of(signed.shop, "tinywheel")
    bundles = attest.bundles(wheel)
    envelope = bundles[1]["dsseEnvelope"]
    text = base64.b64decode(envelope["payload"]).replace(b"passedTests", b"warnedTests", 1)
    envelope["payload"] = base64.b64encode(text).decode()
    attest.beside(wheel).write_text("".join(f"{json.dumps(bundle)}\n" for bundle in bundles))
    (fault,) = signed.faults(wheel)
    assert fault.startswith(f"{wheel.name} is signed, but not by {signed.keys[1]} (")


def test_a_changed_wheel_is_refused(signed: Signed) -> None:
    wheel = wheel_of(signed.shop, "tinywheel")
    before = sha256_of(wheel)
    spoil(wheel)
    assert signed.faults(wheel) == [
        f"{wheel.name} is not what was signed: its sha256 is {sha256_of(wheel)}, and the statements are about "
        f"{before}; bring the wheel again."
    ]


def test_a_wheel_with_refuted_claims_is_refused(signed: Signed) -> None:
    wheel, refuted = wheel_of(signed.shop, "tinywheel"), {"result": "FAILED", "failedTests": ["test_tiny.py::test_a"]}
    signed.sign(wheel, lambda kind, predicate: predicate | refuted if kind == statements.TESTS else predicate)
    assert signed.faults(wheel) == ["1 claims were refuted, such as test_tiny.py::test_a; take another wheel."]


def test_the_statements_of_another_wheel_are_refused(signed: Signed) -> None:
    wheel, other = (wheel_of(signed.shop, name) for name in ("tinypkg", "tinywheel"))
    shutil.copyfile(attest.beside(other), attest.beside(wheel))
    assert signed.faults(wheel) == [
        f"The statements beside {wheel.name} are about {other.name}; bring those of this wheel."
    ]


def test_a_wheel_of_another_commit_is_refused(original: Signed) -> None:
    assert original.faults(wheel_of(original.shop, "tinypkg"), commit="b" * 40) == [
        f"It was built from commit {original.commit[:12]}, and this checkout is bbbbbbbbbbbb; check out the first."
    ]


def test_an_input_that_is_not_pinned_is_refused(signed: Signed) -> None:
    def changed(kind: str, predicate: dict[str, Any]) -> dict[str, Any]:
        if kind == statements.PROVENANCE:
            predicate["buildDefinition"]["resolvedDependencies"][1]["digest"]["sha256"] = "0" * 64
        return predicate

    wheel = wheel_of(signed.shop, "tinywheel")
    signed.sign(wheel, changed)
    (fault,) = signed.faults(wheel)
    assert fault.startswith("2 inputs are not what this checkout pins, such as ")


def test_a_wheel_without_provenance_is_refused(signed: Signed) -> None:
    wheel = wheel_of(signed.shop, "tinywheel")
    signed.sign(wheel, lambda kind, predicate: None if kind == statements.PROVENANCE else predicate)
    assert signed.faults(wheel) == [
        f"{wheel.name} has no provenance (https://slsa.dev/provenance/v1); sign it again with `nox -s wheels`."
    ]


@pytest.mark.parametrize("text", ["nonsense", "[]", "3", "{}", '{"dsseEnvelope": {"payload": "e30="}}'])
def test_damaged_statements_are_refused(signed: Signed, text: str) -> None:
    wheel = wheel_of(signed.shop, "tinywheel")
    attest.beside(wheel).write_text(f"{text}\n")
    (fault,) = signed.faults(wheel)
    assert attest.beside(wheel).name in fault and fault.endswith("bring it again.")


def test_without_cosign_or_wheel_a_sentence_says_so(signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheel_of(signed.shop, "tinywheel")
    with pytest.raises(Refusal, match="is not there: name a wheel"):
        signed.faults(wheel.with_name("other.whl"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Refusal, match="not installed: install it"):
        signed.faults(wheel)


def test_what_is_signed_names_a_commit(signed: Signed) -> None:
    shop = signed.shop
    (shop.root / "stray.txt").write_text("not committed\n")
    done = shop.run("wheels", "tiny", "--key", signed.keys[0])
    assert done.returncode == 2 and "stray.txt" in done.stderr and "not committed" in done.stderr


def page(shop: Tiny, name: str) -> str:
    return (shop.root / "build" / "index" / "packages" / f"{name}.html").read_text()


def test_the_index_says_which_wheels_it_verified(signed: Signed) -> None:
    shop, key = signed.shop, ("--key", signed.keys[1])
    assert "proved: 1 proved on x86-64; signed, and not verified for this index" in shop.succeed("index")
    assert "verified" not in page(shop, "tinywheel").replace("not verified for this index", "")
    output = shop.succeed("index", *key)
    assert f"verified: commit {signed.commit[:12]}; 1 proved on x86-64" in output
    assert "built: no claim has run with it" in page(shop, "tinypkg")
    wheel = f"tinywheel-1.0%2B{LOCAL}-py3-none-any.whl"
    assert f'<a href="../files/{wheel}.sigstore.jsonl">verified</a>: commit' in page(shop, "tinywheel")
    (file,) = json.loads((shop.root / "build/index/simple/tinywheel/index.json").read_text())["files"]
    assert "provenance" not in file  # PEP 740 does not know a key as an identity
    shutil.rmtree(folder(shop))
    assert output == shop.succeed("index", *key)  # the index has the statements itself


def test_the_index_refuses_a_wheel_with_false_statements_and_shows_an_unsigned_one(signed: Signed) -> None:
    shop, (wheel, other) = signed.shop, (wheel_of(signed.shop, name) for name in ("tinypkg", "tinywheel"))
    shutil.rmtree(shop.root / "build" / "index")
    shutil.copyfile(attest.beside(other), attest.beside(wheel))
    shop.refuse("index", "--key", signed.keys[1], naming=(wheel.name, other.name, "bring those of this wheel"))
    attest.beside(wheel).unlink()
    assert f"{wheel.name}: built: no claim has run with it; not signed" in shop.succeed(
        "index", "--key", signed.keys[1]
    )


def test_a_wheel_refuted_after_it_was_signed_stays_yanked(signed: Signed) -> None:
    run_of(signed.shop, "refuted")
    output = signed.shop.succeed("index", "--key", signed.keys[1])
    assert "yanked: refuted on x86-64" in output and "verified: commit" in output


@pytest.fixture
def with_claims(signed: Signed) -> tuple[Signed, Path]:
    """The checkout with a signed wheel of its claims; and that wheel."""
    shop = signed.shop
    shutil.copy(ROOT / "LICENSE", shop.root)
    sha = commit(shop)
    shop.succeed("claims", "--key", signed.keys[0])
    (wheel,) = shop.root.glob("build/claims/wheels/fusebox_claims-*.whl")
    return dataclasses.replace(signed, commit=sha), wheel


def test_the_wheel_of_the_claims_is_verified(with_claims: tuple[Signed, Path]) -> None:
    signed, wheel = with_claims
    assert signed.faults(wheel) == []
    output = signed.shop.succeed("index", "--key", signed.keys[1])
    assert re.search(rf"{wheel.name}: built: it holds the claims; verified: commit {signed.commit[:12]}", output)
    (fault,) = signed.faults(wheel, commit="0" * 40)
    assert fault.startswith(f"It was built from commit {signed.commit[:12]}, and this checkout is 000000000000")

    def of_other_inputs(kind: str, predicate: dict[str, Any]) -> dict[str, Any]:
        predicate["buildDefinition"]["resolvedDependencies"][1]["digest"] = {"sha256": "0" * 64}
        return predicate

    signed.sign(wheel, of_other_inputs)
    (fault,) = signed.faults(wheel)
    assert fault == "2 inputs are not what this checkout pins, such as recipes/lock/tool.txt; build it again."
    spoil(wheel)
    (fault,) = signed.faults(wheel)
    assert fault.startswith(f"{wheel.name} is not what was signed")


def keyless(wheel: Path) -> Provenance:
    """As a workflow of GitHub would have signed the wheel: with a certificate made here, and no true log entry."""
    (first, *_), name = attest.bundles(wheel), x509.Name([])
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(minutes=10))
    certificate = made.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
    first["verificationMaterial"] = {
        "certificate": {"rawBytes": base64.b64encode(certificate).decode()},
        "tlogEntries": [{"logIndex": "1", "canonicalizedBody": "e30="}],
        "timestampVerificationData": {"rfc3161Timestamps": [{"signedTimestamp": "AAAA"}]},
    }
    statement = attest._statement(wheel, first)
    statement["predicate"]["runDetails"]["builder"]["id"] = BUILDER
    first["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    attest.beside(wheel).write_text(f"{json.dumps(first)}\n")
    written: Any = attest.pep740(wheel)
    material = written["attestation_bundles"][0]["attestations"][0]["verification_material"]
    assert material["timestamps"] == ["AAAA"]  # the library does not know them yet
    provenance = Provenance.model_validate(written)
    (bundle,) = provenance.attestation_bundles
    assert bundle.attestations[0].verification_material.certificate == certificate
    return provenance


def test_the_provenance_of_a_workflow_is_an_attestation_of_pep_740(signed: Signed) -> None:
    """As PyPI's own library reads it; whether the workflow's signature holds is cosign's affair."""
    wheel = wheel_of(signed.shop, "tinywheel")
    assert attest.pep740(wheel) is None  # signed with a key
    (bundle,) = keyless(wheel).attestation_bundles
    assert bundle.publisher.model_dump() == {
        "kind": "GitHub", "repository": "owner/fusebox", "workflow": "wheels.yml", "environment": None,
    }  # fmt: skip
    (attestation,) = bundle.attestations
    assert AttestationType(attestation.statement["predicateType"]) is AttestationType.SLSA_PROVENANCE_V1
    assert attestation.statement["subject"][0]["digest"] == {"sha256": sha256_of(wheel)}


def test_the_index_links_provenance_where_it_has_an_address(signed: Signed) -> None:
    shop = signed.shop
    keyless(wheel_of(shop, "tinywheel"))
    shop.succeed("index", "--files-url", "https://example.org/f/")
    simple = shop.root / "build" / "index" / "simple" / "tinywheel"
    address = f"https://example.org/f/tinywheel-1.0%2B{LOCAL}-py3-none-any.whl{index.PROVENANCE}"
    (file,) = json.loads((simple / "index.json").read_text())["files"]
    assert file["provenance"] == address
    assert f'data-provenance="{address}"' in (simple / "index.html").read_text()
    Provenance.model_validate_json(
        (shop.root / "build/index/files" / address.rpartition("/")[2].replace("%2B", "+")).read_text()
    )
    shop.succeed("index")
    (file,) = json.loads((simple / "index.json").read_text())["files"]
    assert "provenance" not in file


# Stand-ins for two programs of the workflow: `gh`, whose release `wheels` is a folder here, and `nox`.
GH = """#!/bin/bash
set -euo pipefail
release="$RELEASES/wheels" verb=$2
shift 2
case $verb in
  list) if [ -d "$release" ]; then echo true; else echo false; fi ;;
  create) mkdir "$release" ;;
  download)
    if [ "$2" = --dir ]; then mkdir -p "$3" && cp "$release"/* "$3"; else cat "$release/$3"; fi ;;
  upload)
    shift
    if [ "$1" = --clobber ]; then shift; else for path in "$@"; do [ ! -e "$release/${path##*/}" ]; done; fi
    cp "$@" "$release" ;;
esac
"""
NOX = """#!/bin/bash
verb=$2
shift 3
exec "$PYTHON" -m recipes "$verb" "$@"
"""


@dataclasses.dataclass
class Runner:
    """Runs steps of wheels.yml in a checkout, with a folder for the release and a key instead of the identity."""

    shop: Tiny
    scratch: Path
    key: Path

    def __post_init__(self) -> None:
        for name, text in {"gh": GH, "nox": NOX}.items():
            script(self.scratch / "bin" / name, text)
        (self.scratch / "releases").mkdir()

    @property
    def release(self) -> Path:
        return self.scratch / "releases" / "wheels"

    def job(self, name: str) -> subprocess.CompletedProcess[str]:
        """A job on a new machine: its steps that run commands, but for those that install a program."""
        temp, jobs = self.scratch / "temp", yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
        for left in (temp, self.shop.root / "build" / "index"):
            shutil.rmtree(left, ignore_errors=True)
        temp.mkdir()
        for collected in self.shop.root.glob("build/*/wheels"):  # they are in an artifact, not in the checkout
            (temp / "collected").mkdir(exist_ok=True)
            collected.rename(temp / "collected" / f"wheels-{collected.parent.name}")
        variables = self.shop.variables | {
            "PATH": f"{self.scratch / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable,
            "RELEASES": str(self.scratch / "releases"), "RUNNER_TEMP": str(temp), "GITHUB_OUTPUT": str(temp / "output"),
            "FILES": "https://example.org/wheels/", "TRUST": f"--key={self.key}",
        }  # fmt: skip
        for step in jobs[name]["steps"]:
            if "run" in step and "pip install" not in step["run"]:
                command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
                done = subprocess.run(
                    command, cwd=self.shop.root, env=variables, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    break
        return done

    def listed(self) -> list[tuple[str, str]]:
        """The targets that the workflow builds, and on which runner."""
        done = self.job("list")
        assert done.returncode == 0, done.stderr
        matrix = (self.scratch / "temp" / "output").read_text().removeprefix("matrix=")
        return [(row["target"], row["runner"]) for row in json.loads(matrix)]


def test_the_workflow_publishes_what_is_missing_and_keeps_what_there_was(signed: Signed, tmp_path: Path) -> None:
    runner, shop = Runner(signed.shop, tmp_path, signed.keys[1]), signed.shop
    only_tiny = shop.targets.read_text().partition("[tiny]\n")  # the others need a torch that this checkout lacks
    shop.targets.write_text("".join(only_tiny[1:]))
    collected = folder(shop).rename(tmp_path / "wheels-of-tiny")
    assert runner.listed() == [("tiny", "ubuntu-24.04")]
    shutil.copytree(collected, folder(shop))
    done = runner.job("publish")
    assert done.returncode == 0, done.stderr
    wheels = {path.name: sha256_of(path) for path in collected.glob("*.whl")}
    assert {path.name: sha256_of(path) for path in runner.release.glob("*.whl")} == wheels
    assert all((runner.release / f"{name}{end}").exists() for name in wheels for end in (".metadata", attest.SUFFIX))
    assert not (shop.root / "build" / "index" / "files").exists() and "verified" in page(shop, "tinywheel")
    assert runner.listed() == []
    shop.edit(shop.targets, 'tinywheel = "1.0"\n', "")  # the target no longer has it
    shop.edit(shop.recipe("tinypkg"), '"tinywheel"', '"tinydep"')
    done = runner.job("publish")
    assert done.returncode == 0, done.stderr
    (file,) = json.loads((shop.root / "build/index/simple/tinywheel/index.json").read_text())["files"]
    assert file["url"] == f"https://example.org/wheels/tinywheel-1.0%2B{LOCAL}-py3-none-any.whl"
    assert {path.name: sha256_of(path) for path in runner.release.glob("*.whl")} == wheels


def test_the_workflow_publishes_the_claims_again_only_when_they_change(
    with_claims: tuple[Signed, Path], tmp_path: Path
) -> None:
    signed, wheel = with_claims
    runner, first = Runner(signed.shop, tmp_path, signed.keys[1]), sha256_of(wheel)
    listed = wheel.with_name("wheels.json").read_text()
    done = runner.job("publish")
    assert done.returncode == 0, done.stderr
    assert sha256_of(runner.release / wheel.name) == first and "verified" in page(signed.shop, "fusebox-claims")
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"what another version of uv made of the same claims")
    wheel.with_name("wheels.json").write_text(listed)
    done = runner.job("publish")
    assert done.returncode == 0, done.stderr
    assert sha256_of(runner.release / wheel.name) == first and "verified" in page(signed.shop, "fusebox-claims")


def test_the_workflow_publishes_nothing_that_another_signed(signed: Signed, tmp_path: Path) -> None:
    _, other = made_key(tmp_path, "other")
    runner = Runner(signed.shop, tmp_path, other)
    done = runner.job("publish")
    assert done.returncode != 0 and "is signed, but not by" in done.stderr
    assert list(runner.release.iterdir()) == []
