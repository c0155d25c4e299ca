"""Sign an image and what is stated about it, and verify both as a stranger would: with cosign and a public key.

Without a key, cosign signs with the identity of GitHub's workflow, and verifies against it ("keyless").
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.catalogue.plan import Plan
from recipes.errors import Refusal
from recipes.process import ends_with_us
from recipes.ship import registry, statements
from recipes.ship.image import last_words

DIGEST = re.compile(r"(?P<name>.+?)(:(?P<tag>[\w.-]+))?@(?P<digest>sha256:[0-9a-f]{64})")
SIGNATURE = "https://sigstore.dev/cosign/sign/v1"  # what cosign calls the statement that is a signature
WORKFLOW = ".github/workflows/image.yml@refs/heads/main"  # whose identity signs
ISSUER = "https://token.actions.githubusercontent.com"


@dataclass(frozen=True)
class Signer:
    """Who signs, or who is trusted: a key (private to sign, public to verify), or the identity of a workflow."""

    key: Path | None = None
    identity: str | None = None

    @property
    def to_sign(self) -> list[str]:
        return [f"--key={self.key}"] if self.key else []

    @property
    def to_verify(self) -> list[str]:
        """A signature with a key is in no public log; that of a workflow has to be."""
        if self.key:
            return [f"--key={self.key}", "--insecure-ignore-tlog=true"]
        return [f"--certificate-identity-regexp={self.identity}", f"--certificate-oidc-issuer={ISSUER}"]


@dataclass(frozen=True)
class Check:
    """One row of the table: what was asked, and either the `finding` or, in `fault`, what is wrong."""

    name: str
    finding: str = ""
    fault: str = ""


@contextlib.contextmanager
def trusting(signer: Signer) -> Iterator[Signer]:
    """Who is to be trusted where that signer signed: its public key, or its identity."""
    if signer.key is None:
        yield signer
        return
    with tempfile.TemporaryDirectory() as scratch:
        done = _run("public-key", f"--key={signer.key}")
        if done.returncode != 0:
            raise Refusal(f"{signer.key} is not a key of cosign ({last_words(done.stderr)}): check the file.")
        public = Path(scratch, "cosign.pub")
        public.write_text(done.stdout)
        yield Signer(public)


def workflow() -> Signer | None:
    """GitHub's workflow that releases images, if this runs in one that may sign with its identity."""
    if "ACTIONS_ID_TOKEN_REQUEST_URL" not in os.environ:
        return None
    repository = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    return Signer(identity=f"^{re.escape(f'{repository}/{WORKFLOW}')}$")


def sign(image: str, predicates: Mapping[str, Mapping[str, Any]], signer: Signer) -> None:
    """Sign an image (NAME@DIGEST), and attach each predicate to it as a signed statement."""
    _refuse_without_cosign()
    with tempfile.TemporaryDirectory() as scratch:
        services: list[str] = []
        if signer.key:  # nothing is asked or told but the registry
            services = [f"--signing-config={scratch}/services.json"]
            _cosign(
                "cosign cannot write its configuration", "signing-config", "create", f"--out={scratch}/services.json"
            )
        common = [*signer.to_sign, *services, "--yes"]
        _cosign(f"{image} cannot be signed", "sign", *common, image)
        for kind, path in statements.write(Path(scratch), predicates).items():
            words = ("attest", *common, f"--type={kind}", f"--predicate={path}", image)
            _cosign(f"the statement {kind} of {image} cannot be attached", *words)


def verify(plan: Plan, image: str, signer: Signer, commit: str | None) -> list[Check]:
    """All that is wrong with an image, and what it was proved on.

    `commit` is the checkout's, from which the image has to be built; None accepts any. `image` is NAME@DIGEST or
    NAME:TAG@DIGEST, whose tag must then still point to the digest.
    """
    match = DIGEST.fullmatch(image)
    if match is None:
        raise Refusal(f"{image} names no digest, and a tag can move: pass NAME@sha256:DIGEST.")
    _refuse_without_cosign()
    plain = f"{match['name']}@{match['digest']}"
    checks = [_tag(match["name"], match["tag"], match["digest"]), _layers(plain), _signature(plain, signer)]
    if checks[-1].fault:
        return checks
    of_kind: dict[str, tuple[str, Callable[[Mapping[str, Any]], Check]]] = {
        "provenance": (statements.PROVENANCE, lambda predicate: _provenance(plan, predicate, commit)),
        "SBOM": (statements.SBOM, _sbom),
        "claims": (statements.TESTS, lambda predicate: _claims(plan, predicate)),
        "machine": (statements.ATTRIBUTES, _machine),
    }
    for name, (kind, judge) in of_kind.items():
        try:
            checks.append(judge(_predicate(plain, match["digest"], name, kind, signer)))
        except Refusal as refusal:
            checks.append(Check(name, fault=str(refusal)))
    return checks


def faults(checks: list[Check]) -> list[str]:
    return [check.fault for check in checks if check.fault]


def _tag(name: str, tag: str | None, digest: str) -> Check:
    if tag is None:
        return Check("tag", "none given")
    has = registry.digest_of_tag(f"{name}:{tag}")
    if has == digest:
        return Check("tag", tag)
    moved = f"The tag {tag} has moved: it names {has or 'nothing'}, and {digest} was asked for; choose one of them."
    return Check("tag", fault=moved)


def _layers(image: str) -> Check:
    done = registry.run_crane("validate", "--fast", "--remote", image)
    if done.returncode == 0:
        return Check("layers", "all are in the registry")
    reason = last_words(done.stderr or done.stdout)
    return Check(
        "layers", fault=f"The registry does not have all of {image} ({reason}); push it again from its builder."
    )


def _signature(image: str, signer: Signer) -> Check:
    done = _run("verify", *signer.to_verify, image)
    if done.returncode == 0:
        return Check("signature", str(signer.key or signer.identity))
    digest = image.rpartition("@")[2]
    signed = _subjects(image, SIGNATURE)
    if not signed:
        return Check("signature", fault=f"{image} is not signed; take one that is.")
    if digest not in signed:
        return Check("signature", fault=f"The signature of {image} is of another image, {signed[0]}; take that one.")
    who = signer.key or signer.identity
    return Check("signature", fault=f"{image} is signed, but not by {who}; take one that is.")


def _predicate(image: str, digest: str, name: str, kind: str, signer: Signer) -> dict[str, Any]:
    """The predicate of the newest statement of a kind about this very image, signed by the signer."""
    done = _run("verify-attestation", *signer.to_verify, f"--type={kind}", image)
    if done.returncode != 0:
        stated = _subjects(image, kind)
        if not stated:
            raise Refusal(f"{image} has no {name} ({kind}); publish it again, with a signature.")
        if digest not in stated:
            raise Refusal(f"The {name} of {image} is about another image, {stated[0]}; take that one.")
        raise Refusal(f"The {name} of {image} is not signed by {signer.key or signer.identity}; take one that is.")
    payloads = [json.loads(line)["payload"] for line in done.stdout.splitlines() if line.strip()]
    verified = [json.loads(base64.b64decode(payload)) for payload in payloads]
    about = [
        statement
        for statement in verified
        if any(f"sha256:{subject['digest'].get('sha256')}" == digest for subject in statement["subject"])
    ]
    if not about:
        raise Refusal(f"The {name} of {image} is about another image; take the one that it names.")
    predicate: dict[str, Any] = about[-1]["predicate"]
    return predicate


def _subjects(image: str, kind: str) -> list[str]:
    """The digests that the statements of a kind attached to an image are about, whoever signed them."""
    done = _run("download", "attestation", image)
    envelopes = [json.loads(line).get("dsseEnvelope") or {} for line in done.stdout.splitlines() if line.strip()]
    stated = [json.loads(base64.b64decode(envelope["payload"])) for envelope in envelopes if "payload" in envelope]
    return [
        f"sha256:{subject['digest'].get('sha256')}"
        for statement in stated
        if statement["predicateType"] == kind
        for subject in statement["subject"]
    ]


def _provenance(plan: Plan, predicate: Mapping[str, Any], commit: str | None) -> Check:
    """The same inputs, by the same digests, as those of the checkout."""
    definition = predicate["buildDefinition"]
    stated = {_key(material) for material in definition["resolvedDependencies"]}
    built_from = next((digest for uri, digest in stated if uri == "git+fusebox"), "no commit")
    if commit is None:
        return Check("provenance", f"commit {built_from[:12]}, not compared with this checkout")
    if built_from != commit:
        fault = f"It was built from commit {built_from[:12]}, and this checkout is {commit[:12]}; check out the first."
        return Check("provenance", fault=fault)
    if definition["externalParameters"]["target"] != plan.target.name:
        other = definition["externalParameters"]["target"]
        return Check(
            "provenance", fault=f"The image is of target {other}; name that one instead of {plan.target.name}."
        )
    with_apt = definition["internalParameters"]["aptLocks"]
    pinned = {_key(material) for material in statements.materials(plan, commit, with_apt=with_apt)}
    if others := sorted(stated ^ pinned):
        fault = f"{len(others)} inputs are not what this checkout pins, such as {others[0][0]}; build the image again."
        return Check("provenance", fault=fault)
    loose = definition["internalParameters"]["notPinned"]["apt"]
    note = f", and by name alone {', '.join(loose)}" if loose else ""
    return Check("provenance", f"commit {commit[:12]}, {len(pinned)} inputs by digest{note}")


def _key(material: Mapping[str, Any]) -> tuple[str, str]:
    return material["uri"], ",".join(material["digest"].values())


def _sbom(predicate: Mapping[str, Any]) -> Check:
    components = predicate.get("components") or []
    if not components:
        return Check("SBOM", fault="The SBOM lists nothing; publish the image again.")
    return Check("SBOM", f"{len(components)} components")


def _claims(plan: Plan, predicate: Mapping[str, Any]) -> Check:
    """No claim is refuted, and none unproven but those that the target excepts for images."""
    if failed := predicate["failedTests"]:
        return Check("claims", fault=f"{len(failed)} claims were refuted, such as {failed[0]}; take another image.")
    unproven = [claim for claim in predicate["warnedTests"] if claim.split("[")[0] not in plan.target.unproven_in_image]
    if unproven:
        return Check(
            "claims", fault=f"{len(unproven)} claims are unproven, such as {unproven[0]}; prove the image again."
        )
    machine = predicate["configuration"][-1]["name"]
    return Check("claims", f"{len(predicate['passedTests'])} proved on {machine}")


def _machine(predicate: Mapping[str, Any]) -> Check:
    return Check("machine", "; ".join(row["attribute"] for row in predicate["attributes"]))


def _refuse_without_cosign() -> None:
    if shutil.which("cosign") is None:
        raise Refusal("Signatures need cosign (sigstore), which is not installed: install it.")


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    variables = {"COSIGN_PASSWORD": "", **os.environ}
    return subprocess.run(
        ["cosign", *words], env=variables, capture_output=True, text=True, check=False, preexec_fn=ends_with_us
    )


def _cosign(fault: str, *words: str) -> None:
    done = _run(*words)
    if done.returncode != 0:
        raise Refusal(f"{fault} ({last_words(done.stderr)}): check the key and your rights in the registry.")
