"""What is signed about an image, and every way in which an image is refused; with cosign and a registry here."""

from __future__ import annotations

import dataclasses
import datetime
import http.client
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.version import Version

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.files import ROOT, read_json
from recipes.prove import evidence
from recipes.ship import attest, cosign, registry, statements, verify
from recipes.ship.cosign import Signer
from recipes.tests.conftest import REGISTRY, Checkout, made_key, oci_image

COMMIT = "a" * 40
TIME = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
CONTENTS = statements.Contents(
    {"torch": "2.13.0+cpu", "transformers": "4.40.2"}, (("g++", "4:12.2.0-3", "amd64"),), "debian"
)


@dataclasses.dataclass
class Published:
    """An image in the registry with what is stated about it, and the keys."""

    plan: Plan
    name: str
    digest: str
    keys: tuple[Path, Path]

    @property
    def image(self) -> str:
        return f"{self.name}@{self.digest}"

    def predicates(self) -> dict[str, dict[str, Any]]:
        run = evidence.promoted(self.plan.root, "cpu")[0]
        stated = statements.provenance(self.plan, COMMIT, "host:here", TIME, ())
        return {
            statements.SBOM: statements.sbom(self.plan, self.image, CONTENTS, {}),
            statements.PROVENANCE: stated,
            statements.TESTS: statements.test_result(self.plan, run),
            statements.ATTRIBUTES: statements.attributes(run),
        }

    def sign(self, **changes: Any) -> None:
        """Sign it; a change of a predicate by its name, or None to leave it out."""
        stated = self.predicates() | {getattr(statements, kind): value for kind, value in changes.items()}
        verify.sign(self.image, {kind: value for kind, value in stated.items() if value}, Signer(self.keys[0]))

    def faults(self, image: str | None = None, commit: str = COMMIT, key: Path | None = None) -> list[str]:
        checks = verify.verify(self.plan, image or self.image, Signer(key or self.keys[1]), commit)
        return verify.faults(checks)


@pytest.fixture
def published(tmp_path: Path, crane: None, keys: tuple[Path, Path]) -> Published:
    """An image that is pushed and not signed yet."""
    name = f"{REGISTRY}/fusebox/{uuid.uuid4().hex[:8]}"
    oci, digest = oci_image(tmp_path / "oci", **{"fusebox.target": "cpu"})
    registry.push(oci, name, digest)
    return Published(plan(Catalogue(), "cpu"), name, digest, keys)


def test_a_sound_image_is_verified(published: Published) -> None:
    published.sign()
    checks = verify.verify(published.plan, published.image, Signer(published.keys[1]), COMMIT)
    assert verify.faults(checks) == []
    findings = {check.name: check.finding for check in checks}
    assert re.fullmatch(r"\d+ proved on x86-64", findings["claims"])
    assert findings["SBOM"] == "3 components"
    assert re.fullmatch(r"commit a{12}, \d+ inputs by digest", findings["provenance"])


def test_packages_that_apt_took_by_name_are_told(published: Published) -> None:
    """Those of a stand-in, or of a base without a lock."""
    loose = statements.provenance(published.plan, COMMIT, "host:here", TIME, (), unlocked=True)
    locks = {material["uri"] for material in statements.materials(published.plan, COMMIT)}
    locks -= {material["uri"] for material in loose["buildDefinition"]["resolvedDependencies"]}
    assert locks == {f"recipes/lock/apt/python-3.{minor}-slim-bookworm.txt" for minor in (11, 12)}
    published.sign(PROVENANCE=loose)
    checks = verify.verify(published.plan, published.image, Signer(published.keys[1]), COMMIT)
    assert verify.faults(checks) == []
    (finding,) = [check.finding for check in checks if check.name == "provenance"]
    assert finding.endswith("inputs by digest, and by name alone g++, git, python3-dev")


def test_in_githubs_workflow_its_identity_signs_and_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key, and told to the public log; the workflow is the one that may ask for an identity."""
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_URL", raising=False)
    assert cosign.workflow("image.yml") is None
    called, program = tmp_path / "called", tmp_path / "cosign"
    program.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", "https://actions.invalid/token")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/fusebox")
    signer = cosign.workflow("image.yml")
    assert signer
    verify.sign("here@sha256:0", {statements.SBOM: {}}, signer)
    verify._signature("here@sha256:0", signer)
    signed, attested, verified = called.read_text().splitlines()
    assert signed == "sign --yes here@sha256:0"
    assert attested.startswith(f"attest --yes --type={statements.SBOM} --predicate=")
    identity = r"^https://github\.com/owner/fusebox/\.github/workflows/image\.yml@refs/heads/main$"
    assert verified == (
        f"verify --certificate-identity-regexp={identity} --certificate-oidc-issuer={cosign.ISSUER} here@sha256:0"
    )
    workflow = yaml_jobs(ROOT / ".github" / "workflows" / "image.yml")
    assert [name for name, text in workflow.items() if "id-token: write" in text] == ["release"]


def yaml_jobs(path: Path) -> dict[str, str]:
    """The text of each job of a workflow."""
    parts = re.split(r"^  (\w+):\n", path.read_text().partition("\njobs:\n")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_an_unsigned_image_is_refused(published: Published) -> None:
    assert published.faults() == [f"{published.image} is not signed; use a signed image."]


def test_another_key_is_refused(published: Published, tmp_path: Path) -> None:
    published.sign()
    _, other = made_key(tmp_path, "other")
    (fault,) = published.faults(key=other)
    assert f"is signed, but not by {other}" in fault


def test_a_statement_about_another_digest_is_refused(published: Published, tmp_path: Path) -> None:
    """The statements of a sound image, attached to another one by whoever may write to the registry."""
    published.sign()
    oci, digest = oci_image(tmp_path / "other", **{"fusebox.target": "cpu"})
    registry.push(oci, published.name, digest)
    other = dataclasses.replace(published, digest=digest)
    tag = published.digest.replace(":", "-")
    registry.run_crane("copy", f"{published.name}:{tag}", f"{published.name}:{digest.replace(':', '-')}")
    ending = f"of another image, {published.digest}; use that image."
    assert other.faults() == [f"The signature of {other.image} is {ending}"]
    verify.sign(other.image, {}, Signer(published.keys[0]))
    about = f"about another image, {published.digest}; use that image."
    assert other.faults() == [
        f"The {name} of {other.image} is {about}" for name in ("provenance", "SBOM", "claims", "machine")
    ]


def test_a_statement_of_another_signer_is_refused(published: Published, tmp_path: Path) -> None:
    """Whoever may write to the registry can attach one to a signed image."""
    published.sign(SBOM=None)
    private, _ = made_key(tmp_path, "other")
    sbom = published.predicates()[statements.SBOM]
    verify.sign(published.image, {statements.SBOM: sbom}, Signer(private))
    (fault,) = published.faults()
    assert fault == f"The SBOM of {published.image} is not signed by {published.keys[1]}; use an image that is."


def test_an_image_with_refuted_claims_is_refused(published: Published) -> None:
    refuted = published.predicates()[statements.TESTS] | {"result": "FAILED", "failedTests": ["test_torch.py::test_a"]}
    published.sign(TESTS=refuted)
    assert published.faults() == ["1 claims were refuted, such as test_torch.py::test_a; take another image."]


def test_unproven_claims_are_refused_unless_excepted(published: Published) -> None:
    excepted = list(published.plan.target.unproven_in_image)
    stated = published.predicates()[statements.TESTS]
    published.sign(TESTS=stated | {"warnedTests": [*excepted, "test_torch.py::test_b"]})
    assert published.faults() == ["1 claims are unproven, such as test_torch.py::test_b; prove the image again."]


def test_the_provenance_of_another_commit_is_refused(published: Published) -> None:
    published.sign()
    assert published.faults(commit="b" * 40) == [
        "It was built from commit aaaaaaaaaaaa, and this checkout is bbbbbbbbbbbb; check out the first."
    ]


def test_an_input_that_is_not_pinned_is_refused(published: Published) -> None:
    stated = published.predicates()[statements.PROVENANCE]
    stated["buildDefinition"]["resolvedDependencies"][4]["digest"]["sha256"] = "0" * 64
    published.sign(PROVENANCE=stated)
    (fault,) = published.faults()
    assert fault.startswith("2 inputs are not what this checkout pins, such as pkg:pypi/")


def test_the_provenance_names_a_standin_and_is_refused(published: Published) -> None:
    """An image on another base than the checkout pins is not the checkout's."""
    base = published.plan.target.base.runtime
    given = {base.image: "here/base@sha256:" + "1" * 64}
    stated = statements.provenance(published.plan, COMMIT, "host:here", TIME, (), unlocked=True, standins=given)
    listed = stated["buildDefinition"]["resolvedDependencies"]
    assert {"uri": "pkg:docker/here/base", "digest": {"sha256": "1" * 64}} in listed
    assert not [material for material in listed if material["uri"] == f"pkg:docker/{base.image}"]
    published.sign(PROVENANCE=stated)
    (fault,) = published.faults()
    assert fault.startswith("2 inputs are not what this checkout pins, such as pkg:docker/here/base")


def test_what_is_compiled_for_some_gpus_has_fewer_inputs() -> None:
    """A package without kernels for them is left out, of an image as of the wheels."""
    catalogue, name = Catalogue(), "cu13.2-torch2.15"
    whole, narrowed = plan(catalogue, name), plan(catalogue, name, ["8.0"])
    assert [pin.name for pin in narrowed.left_out] == ["flash-attn-3"]
    of_image = statements.provenance(narrowed, COMMIT, "host:here", TIME, narrowed.narrowed)
    check = verify.origin(of_image, name, COMMIT, lambda sha: verify._materials(whole, sha, of_image))
    assert not check.fault and check.finding.startswith(f"commit {COMMIT[:12]}, ")
    of_wheel = statements.wheel_provenance(narrowed, COMMIT, "host:here", {"package": "torchao", "made_from": "0"})
    check = attest._provenance(catalogue, Path("torchao.whl"), [(statements.PROVENANCE, of_wheel)], COMMIT)
    assert not check.fault and check.finding.startswith(f"commit {COMMIT[:12]}, ")
    check = verify.origin(of_image, "cpu", None, lambda sha: [])
    assert check.fault == f"It is of target {name}; name that one instead of cpu.", "a rollback moves that target's tag"
    of_image["buildDefinition"]["externalParameters"].pop("sm")
    check = verify.origin(of_image, name, COMMIT, lambda sha: verify._materials(whole, sha, of_image))
    assert check.fault.startswith("2 inputs are not what this checkout pins, such as git+https://")


def test_an_image_without_sbom_is_refused(published: Published) -> None:
    published.sign(SBOM=None)
    assert published.faults() == [
        f"{published.image} has no SBOM (https://cyclonedx.org/bom); publish it again, with a signature."
    ]


def test_a_stripped_layer_is_refused(published: Published) -> None:
    published.sign()
    manifest = json.loads(registry.run_crane("manifest", published.image).stdout)
    host, _, repository = published.name.partition("/")
    connection = http.client.HTTPConnection(host)
    connection.request("DELETE", f"/v2/{repository}/blobs/{manifest['layers'][0]['digest']}")
    assert connection.getresponse().status == 202
    (fault,) = published.faults()
    assert fault.startswith(f"The registry does not have all of {published.image} ")


def test_a_tag_that_moved_is_refused(published: Published, tmp_path: Path) -> None:
    published.sign()
    registry.set_tags(published.name, published.digest, ["cpu"])
    tagged = f"{published.name}:cpu@{published.digest}"
    assert published.faults(tagged) == []
    oci, other = oci_image(tmp_path / "other")
    registry.push(oci, published.name, other)
    registry.set_tags(published.name, other, ["cpu"])
    (fault,) = published.faults(tagged)
    assert fault == (
        f"The tag cpu has moved: it names {other}, and {published.digest} was asked for; choose one of them."
    )
    (fault,) = published.faults(f"{published.name}:gone@{published.digest}")
    assert fault.startswith(f"The tag gone has moved: it names nothing, and {published.digest} was asked for")


def test_the_verb_refuses_a_tag_that_moved(published: Published, checkout: Checkout, tmp_path: Path) -> None:
    """As a stranger sees it: a row of the table, and the exit code."""
    published.sign()
    oci, other = oci_image(tmp_path / "other", **{"fusebox.target": "cpu"})
    registry.push(oci, published.name, other)
    registry.set_tags(published.name, other, ["cpu"])
    tagged = f"{published.name}:cpu@{published.digest}"
    done = checkout.run("rollback", tagged, "--key", published.keys[1])
    assert done.returncode == 1 and f"it names {other}" in " ".join(done.stdout.split())
    assert registry.digest_of_tag(f"{published.name}:cpu") == other


def test_the_verb_prints_a_table_and_rolls_back(published: Published, checkout: Checkout, tmp_path: Path) -> None:
    key = ("--key", published.keys[1])
    done = checkout.run("rollback", published.image, *key)
    assert done.returncode == 1 and "is not signed" in " ".join(done.stdout.split())
    published.sign()
    oci, bad = oci_image(tmp_path / "bad")
    registry.push(oci, published.name, bad)
    registry.set_tags(published.name, bad, ["cpu"])
    assert f"{published.name}:cpu is {published.digest}" in checkout.succeed("rollback", published.image, *key)
    assert registry.digest_of_tag(f"{published.name}:cpu") == published.digest
    checkout.refuse("rollback", f"{published.name}:cpu", *key, naming=("names no digest",))


def test_the_verb_leaves_the_tag_where_a_release_would(published: Published, checkout: Checkout) -> None:
    """An image for some GPUs only is verified, and does not get the floating tag."""
    stated = statements.provenance(published.plan, COMMIT, "host:here", TIME, ("8.0",))
    published.sign(PROVENANCE=stated)
    named = (f"{published.name}:cpu was not moved", "some of its GPUs only")
    checkout.refuse("rollback", published.image, "--key", published.keys[1], naming=named)
    assert not registry.digest_of_tag(f"{published.name}:cpu")


def test_what_cannot_be_verified_is_refused_before_anything_runs(checkout: Checkout) -> None:
    """Also where the checkout is not clean."""
    (checkout.root / "stray.txt").touch()
    for verb in ("verify", "rollback"):
        for image in ("foo", "", "foo:cpu"):
            checkout.refuse(verb, image, "--key", "k", naming=("names no digest", repr(image)))
        image = f"foo@sha256:{'0' * 64}"
        checkout.refuse(verb, image, "--key", "k", PATH="/nowhere", naming=("not installed",))


def test_the_sbom_says_what_we_changed() -> None:
    chosen = plan(Catalogue(), "cpu")
    made = statements.sbom(chosen, "here/fusebox@sha256:0", CONTENTS, {})
    components = {component["name"]: component for component in made["components"]}
    assert {component["purl"] for component in made["components"]} == CONTENTS.purls()
    patches = components["transformers"]["pedigree"]["patches"]
    assert len(patches) == len(chosen.patches["transformers"]) > 0
    assert "pedigree" not in components["torch"]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(made)) is None


def test_known_vulnerabilities_of_old_targets_are_stated() -> None:
    """Each torch without the fix is named, and nothing that no target pins."""
    catalogue = Catalogue()
    pins = {
        f"pkg:pypi/{pin.name}@{pin.release.version}" for name in catalogue.targets for pin in plan(catalogue, name).pins
    }
    document = read_json(ROOT / "docker" / "vex.json")
    assert {product["@id"] for row in document["statements"] for product in row["products"]} <= pins
    for name in catalogue.targets:
        chosen = plan(catalogue, name)
        assert chosen.torch
        stated = {row["vulnerability"]["name"] for row in (statements.vex(chosen) or {"statements": []})["statements"]}
        assert ("CVE-2025-32434" in stated) == (Version(chosen.torch.release.version) < Version("2.6")), name
        assert ("CVE-2022-45907" in stated) == (Version(chosen.torch.release.version) < Version("1.13.1")), name


def test_the_materials_are_exactly_what_the_lock_and_the_recipes_pin() -> None:
    """Each by a digest; of the target's dependencies none is missing."""
    for name, target in Catalogue().targets.items():
        if target.base.unresolved:
            continue
        chosen = plan(Catalogue(), name)
        made = statements.materials(chosen, COMMIT)
        assert all(
            re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", next(iter(material["digest"].values()))) for material in made
        )
        stated = {next(iter(material["digest"].values())) for material in made}
        assert {artifact.sha256 for artifact in chosen.locked.artifacts} < stated
        assert {pin.release.identity for pin in chosen.pins if pin.release.kind != "provided"} < stated
