"""Sign the statements about a collected wheel, and verify them as a stranger would: with cosign and a public key.

The statements lie beside the wheel in WHEEL.sigstore.jsonl, a line for each: a Sigstore bundle (v0.3), which holds the
in-toto statement in a DSSE envelope, and what verifies it. Signed by a workflow, the provenance is also an attestation
of PEP 740; that needs the workflow's certificate, which a key lacks.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.errors import Refusal
from recipes.files import read_text, sha256_of, write_text
from recipes.ship import cosign, statements
from recipes.ship.cosign import Signer
from recipes.ship.image import last_words
from recipes.ship.verify import Check, machine, origin, outcomes

SUFFIX = ".sigstore.jsonl"
NO_CLAIM = "built: no claim has run with it"


def beside(wheel: Path) -> Path:
    """The file of a wheel's statements."""
    return wheel.with_name(wheel.name + SUFFIX)


def stated(
    plan: Plan, row: Mapping[str, Any], commit: str, runs: Iterable[Mapping[str, Any]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """What is stated about a collected wheel, as (type, predicate): its provenance, and what each of these runs proved.

    `row` is the wheel's line in the list, and `runs` is the evidence of claims that ran with it.
    """
    made: list[tuple[str, Mapping[str, Any]]] = [
        (statements.PROVENANCE, statements.wheel_provenance(plan, commit, statements.builder(), row))
    ]
    for run in runs:
        made.append((statements.TESTS, statements.test_result(plan, run)))
        made.append((statements.ATTRIBUTES, statements.attributes(run)))
    return made


def sign(wheel: Path, predicates: Iterable[tuple[str, Mapping[str, Any]]], signer: Signer) -> None:
    """Write the signed statements of a wheel beside it; those that it had are replaced."""
    sha256, lines = sha256_of(wheel), []
    with cosign.signing(signer) as options, tempfile.TemporaryDirectory() as scratch:
        statement, bundle = Path(scratch, "statement.json"), Path(scratch, "bundle.json")
        for kind, predicate in predicates:
            statement.write_text(json.dumps(statements.about(wheel.name, sha256, kind, predicate), sort_keys=True))
            words = ("attest-blob", *options, f"--statement={statement}", f"--bundle={bundle}")
            cosign.must(f"the statement {kind} of {wheel.name} cannot be signed", *words)
            lines.append(json.dumps(json.loads(bundle.read_text()), sort_keys=True))
    write_text(beside(wheel), "".join(f"{line}\n" for line in lines))


def verify(catalogue: Catalogue, wheel: Path, signer: Signer, commit: str | None) -> list[Check]:
    """All that is wrong with a wheel and its statements, and what it was proved on.

    `commit` is the checkout's, from which the wheel has to be built; None accepts any.
    """
    cosign.refuse_without()
    if not wheel.is_file():
        raise Refusal(f"{wheel} is not there: name a wheel that has {wheel.name}{SUFFIX} beside it.")
    checks: list[Check] = []
    try:
        signed = list(_signed(wheel, signer))
        checks.append(Check("signature", str(signer.key or signer.identity)))
        checks.append(_provenance(catalogue, wheel, signed, commit))
    except Refusal as refusal:
        return [*checks, Check("provenance" if checks else "signature", fault=str(refusal))]
    claims = [outcomes(predicate, "wheel") for kind, predicate in signed if kind == statements.TESTS]
    machines = [machine(predicate) for kind, predicate in signed if kind == statements.ATTRIBUTES]
    return [*checks, *(claims or [Check("claims", NO_CLAIM)]), *machines]


def _signed(wheel: Path, signer: Signer) -> Iterator[tuple[str, dict[str, Any]]]:
    """(type, predicate) of each statement about this very wheel; a statement that is not, or not signed, is refused."""
    sha256, who = sha256_of(wheel), signer.key or signer.identity
    for bundle in bundles(wheel):
        statement = _statement(wheel, bundle)
        subject = statement["subject"][0]
        if subject["name"] != wheel.name:
            raise Refusal(f"The statements beside {wheel.name} are about {subject['name']}; bring those of this wheel.")
        if subject["digest"]["sha256"] != sha256:
            raise Refusal(
                f"{wheel.name} is not what was signed: its sha256 is {sha256}, and the statements are about "
                f"{subject['digest']['sha256']}; bring the wheel again."
            )
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps(bundle))
            file.flush()
            done = cosign.run(
                "verify-blob-attestation", *signer.to_verify, f"--type={statement['predicateType']}",
                f"--bundle={file.name}", f"--digest={sha256}", "--digestAlg=sha256",
            )  # fmt: skip
        if done.returncode != 0:
            reason = last_words(done.stderr.strip().rpartition("\n")[2])
            raise Refusal(f"{wheel.name} is signed, but not by {who} ({reason}); use a wheel that is.")
        yield statement["predicateType"], statement["predicate"]


def bundles(wheel: Path) -> list[dict[str, Any]]:
    """The Sigstore bundles beside a wheel; a wheel without any is refused."""
    path = beside(wheel)
    if not path.is_file() or not path.stat().st_size:
        raise Refusal(f"{wheel.name} is not signed: {path.name} is missing or empty; use a signed wheel.")
    try:
        return [dict(json.loads(line)) for line in read_text(path).splitlines()]
    except (ValueError, TypeError):
        raise Refusal(f"{path} is not a list of Sigstore bundles: bring it again.") from None


def _statement(wheel: Path, bundle: Mapping[str, Any]) -> dict[str, Any]:
    """The statement in a bundle, whether its signature holds or not."""
    try:
        statement: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        subject = statement["subject"][0]
        about = statement["predicateType"], statement["predicate"], subject["name"], subject["digest"]["sha256"]
        if statement["_type"] == statements.STATEMENT and all(about):
            return statement
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    raise Refusal(f"{beside(wheel)} holds something other than in-toto statements about a file: bring it again.")


def _provenance(
    catalogue: Catalogue, wheel: Path, signed: Iterable[tuple[str, Mapping[str, Any]]], commit: str | None
) -> Check:
    predicate = next((predicate for kind, predicate in signed if kind == statements.PROVENANCE), None)
    if predicate is None:
        raise Refusal(f"{wheel.name} has no provenance ({statements.PROVENANCE}); sign it again with `nox -s wheels`.")
    definition = predicate["buildDefinition"]
    if definition["buildType"] == statements.CLAIMS_BUILD:
        return origin(predicate, "", commit, partial(statements.checkout_inputs, catalogue.root))
    target, sm = definition["externalParameters"]["target"], definition["externalParameters"].get("sm")
    return origin(predicate, target, commit, lambda sha: statements.inputs(plan(catalogue, target, sm), sha))


def pep740(wheel: Path) -> dict[str, Any] | None:
    """The provenance object of PEP 740 that an index serves for a wheel; None if no workflow of GitHub signed it."""
    attestations, publisher = [], None
    for bundle in bundles(wheel):
        statement, material = _statement(wheel, bundle), bundle["verificationMaterial"]
        if "certificate" not in material or statement["predicateType"] != statements.PROVENANCE:
            continue
        envelope = bundle["dsseEnvelope"]
        # A Rekor v2 entry has no time of its own; the signed timestamps say when it was made.
        timestamps = material.get("timestampVerificationData", {}).get("rfc3161Timestamps", [])
        attestations.append(
            {
                "version": 1,
                "verification_material": {
                    "certificate": material["certificate"]["rawBytes"],
                    "transparency_entries": material["tlogEntries"],
                    **({"timestamps": [each["signedTimestamp"] for each in timestamps]} if timestamps else {}),
                },
                "envelope": {"statement": envelope["payload"], "signature": envelope["signatures"][0]["sig"]},
            }
        )
        publisher = _publisher(statement["predicate"]["runDetails"]["builder"]["id"])
    if publisher is None:
        return None
    return {"version": 1, "attestation_bundles": [{"publisher": publisher, "attestations": attestations}]}


def _publisher(builder: str) -> dict[str, Any] | None:
    """The workflow that a builder's URI names, as https://github.com/OWNER/NAME/.github/workflows/FILE@REF does."""
    path, _, _ = urlsplit(builder).path.partition("@")
    repository, _, workflow = path.strip("/").partition("/.github/workflows/")
    return {"kind": "GitHub", "repository": repository, "workflow": workflow} if workflow else None
