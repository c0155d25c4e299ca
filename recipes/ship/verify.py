"""Sign an image and the statements about it, and verify both as a stranger would: with cosign and a public key."""

from __future__ import annotations

import base64
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.catalogue.plan import Plan, for_architectures
from recipes.errors import Refusal
from recipes.ship import cosign, registry, statements
from recipes.ship.cosign import Signer
from recipes.ship.image import last_words

DIGEST = re.compile(r"(?P<name>.+?)(:(?P<tag>[\w.-]+))?@(?P<digest>sha256:[0-9a-f]{64})")
SIGNATURE = "https://sigstore.dev/cosign/sign/v1"  # cosign's name for a statement that is a signature


@dataclass(frozen=True)
class Check:
    """One row of the table: the check, and either its `finding` or, in `fault`, what is wrong."""

    name: str
    finding: str = ""
    fault: str = ""


def sign(image: str, predicates: Mapping[str, Mapping[str, Any]], signer: Signer) -> None:
    """Sign an image (NAME@DIGEST), and attach each predicate to it as a signed statement."""
    with cosign.signing(signer) as options, tempfile.TemporaryDirectory() as scratch:
        cosign.must(f"{image} cannot be signed", "sign", *options, image)
        for kind, path in statements.write(Path(scratch), predicates).items():
            words = ("attest", *options, f"--type={kind}", f"--predicate={path}", image)
            cosign.must(f"the statement {kind} of {image} cannot be attached", *words)


def verify(plan: Plan, image: str, signer: Signer, commit: str | None) -> list[Check]:
    """Everything that is wrong with an image, and the hardware that it was proved on.

    `commit` is the checkout's, from which the image has to be built; None accepts any. `image` is NAME@DIGEST or
    NAME:TAG@DIGEST, whose tag must then still point to the digest.
    """
    match = digest_of(image)
    plain = f"{match['name']}@{match['digest']}"
    checks = [_tag(match["name"], match["tag"], match["digest"]), _layers(plain), _signature(plain, signer)]
    if checks[-1].fault:
        return checks
    of_kind: dict[str, tuple[str, Callable[[Mapping[str, Any]], Check]]] = {
        "provenance": (
            statements.PROVENANCE,
            lambda predicate: origin(predicate, plan.target.name, commit, lambda sha: _materials(plan, sha, predicate)),
        ),
        "SBOM": (statements.SBOM, _sbom),
        "claims": (statements.TESTS, lambda predicate: _claims(plan, predicate)),
        "machine": (statements.ATTRIBUTES, machine),
    }
    for name, (kind, judge) in of_kind.items():
        try:
            checks.append(judge(_predicate(plain, match["digest"], name, kind, signer)))
        except Refusal as refusal:
            checks.append(Check(name, fault=str(refusal)))
    return checks


def provenance(image: str, signer: Signer) -> dict[str, Any]:
    """The signed provenance of an image, NAME@DIGEST."""
    return _predicate(image, image.rpartition("@")[2], "provenance", statements.PROVENANCE, signer)


def digest_of(image: str) -> re.Match[str]:
    """The name, tag and digest of an image; refused without a digest, or without the programs that verify it."""
    match = DIGEST.fullmatch(image)
    if match is None:
        raise Refusal(f"{image!r} names no digest, and a tag can move: pass NAME@sha256:DIGEST.")
    cosign.refuse_without()
    registry.refuse_without_crane("Verifying an image needs")
    return match


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
    done = cosign.run("verify", *signer.to_verify, image)
    if done.returncode == 0:
        return Check("signature", str(signer.key or signer.identity))
    digest = image.rpartition("@")[2]
    signed = _subjects(image, SIGNATURE)
    if not signed:
        return Check("signature", fault=f"{image} is not signed; use a signed image.")
    if digest not in signed:
        return Check("signature", fault=f"The signature of {image} is of another image, {signed[0]}; use that image.")
    who = signer.key or signer.identity
    return Check("signature", fault=f"{image} is signed, but not by {who}; use an image that is.")


def _predicate(image: str, digest: str, name: str, kind: str, signer: Signer) -> dict[str, Any]:
    """The predicate of the newest statement of a kind about this very image, signed by the signer."""
    done = cosign.run("verify-attestation", *signer.to_verify, f"--type={kind}", image)
    if done.returncode != 0:
        stated = _subjects(image, kind)
        if not stated:
            raise Refusal(f"{image} has no {name} ({kind}); publish it again, with a signature.")
        if digest not in stated:
            raise Refusal(f"The {name} of {image} is about another image, {stated[0]}; use that image.")
        raise Refusal(f"The {name} of {image} is not signed by {signer.key or signer.identity}; use an image that is.")
    payloads = [json.loads(line)["payload"] for line in done.stdout.splitlines() if line.strip()]
    verified = [json.loads(base64.b64decode(payload)) for payload in payloads]
    about = [
        statement
        for statement in verified
        if any(f"sha256:{subject['digest'].get('sha256')}" == digest for subject in statement["subject"])
    ]
    if not about:
        raise Refusal(f"The {name} of {image} is about another image; use the image that it names.")
    predicate: dict[str, Any] = about[-1]["predicate"]
    return predicate


def _subjects(image: str, kind: str) -> list[str]:
    """The digests that the statements of a kind attached to an image are about, whoever signed them."""
    done = cosign.run("download", "attestation", image)
    envelopes = [json.loads(line).get("dsseEnvelope") or {} for line in done.stdout.splitlines() if line.strip()]
    stated = [json.loads(base64.b64decode(envelope["payload"])) for envelope in envelopes if "payload" in envelope]
    return [
        f"sha256:{subject['digest'].get('sha256')}"
        for statement in stated
        if statement["predicateType"] == kind
        for subject in statement["subject"]
    ]


def origin(
    predicate: Mapping[str, Any],
    target: str,
    commit: str | None,
    pinned_at: Callable[[str], Iterable[Mapping[str, Any]]],
) -> Check:
    """Whether a provenance names the same inputs, by the same digests, as a checkout pins (`pinned_at` its commit).

    Without a commit, the inputs are not compared.
    """
    definition = predicate["buildDefinition"]
    stated = {_key(material) for material in definition["resolvedDependencies"]}
    built_from = next((digest for uri, digest in stated if uri == "git+fusebox"), "no commit")
    if commit and built_from != commit:
        fault = f"It was built from commit {built_from[:12]}, and this checkout is {commit[:12]}; check out the first."
        return Check("provenance", fault=fault)
    if (other := definition["externalParameters"]["target"]) != target:
        return Check("provenance", fault=f"It is of target {other}; name that one instead of {target}.")
    if commit is None:
        return Check("provenance", f"commit {built_from[:12]}, not compared with this checkout")
    pinned = {_key(material) for material in pinned_at(commit)}
    if others := sorted(stated ^ pinned):
        fault = f"{len(others)} inputs are not what this checkout pins, such as {others[0][0]}; build it again."
        return Check("provenance", fault=fault)
    loose = definition["internalParameters"].get("notPinned", {}).get("apt")
    note = f", and by name alone {', '.join(loose)}" if loose else ""
    return Check("provenance", f"commit {commit[:12]}, {len(pinned)} inputs by digest{note}")


def _materials(plan: Plan, commit: str, predicate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a checkout pins for an image of these GPU architectures, with apt's locks if they were used."""
    definition = predicate["buildDefinition"]
    built = for_architectures(plan, definition["externalParameters"].get("sm"))
    return statements.materials(built, commit, with_apt=definition["internalParameters"]["aptLocks"])


def _key(material: Mapping[str, Any]) -> tuple[str, str]:
    return material["uri"], ",".join(material["digest"].values())


def _sbom(predicate: Mapping[str, Any]) -> Check:
    components = predicate.get("components") or []
    if not components:
        return Check("SBOM", fault="The SBOM lists nothing; publish the image again.")
    return Check("SBOM", f"{len(components)} components")


def _claims(plan: Plan, predicate: Mapping[str, Any]) -> Check:
    """No claim is refuted, and none unproven but those that the target excepts for images."""
    unproven = [claim for claim in predicate["warnedTests"] if claim.split("[")[0] not in plan.target.unproven_in_image]
    if unproven and not predicate["failedTests"]:
        return Check(
            "claims", fault=f"{len(unproven)} claims are unproven, such as {unproven[0]}; prove the image again."
        )
    return outcomes(predicate, "image")


def outcomes(predicate: Mapping[str, Any], subject: str) -> Check:
    """What a test-result says of an image or a wheel; a refuted claim is a fault."""
    if failed := predicate["failedTests"]:
        return Check("claims", fault=f"{len(failed)} claims were refuted, such as {failed[0]}; take another {subject}.")
    where = predicate["configuration"][-1]["name"]
    unproven = f", {len(predicate['warnedTests'])} unproven" if predicate["warnedTests"] else ""
    return Check("claims", f"{len(predicate['passedTests'])} proved{unproven} on {where}")


def machine(predicate: Mapping[str, Any]) -> Check:
    """The GPU and the driver that the claims ran on."""
    return Check("machine", "; ".join(row["attribute"] for row in predicate["attributes"]))
