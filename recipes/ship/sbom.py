"""The bill of materials inside a collected wheel: upstream's source, what was changed in it, what it bundles.

CycloneDX 1.6 as JSON. The wheel is the main component; its pedigree names the source as ancestor and holds each patch.
It says nothing of time or machine, so that the same wheel has the same text.
"""

from __future__ import annotations

import json
from urllib.parse import urlsplit

from cyclonedx.model import (
    AttachedText,
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.model.issue import IssueClassification, IssueType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from recipes.catalogue import patch
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Pin, Source, Submodule
from recipes.make.environment import Wheel


def text(plan: Plan, pin: Pin, wheel: Wheel, version: str) -> str:
    """The SBOM of a collected wheel with that version; `wheel` is the cache's wheel that it is made from."""
    main = Component(
        name=pin.name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref="wheel",
        description=pin.package.summary,
        purl=PackageURL("pypi", name=pin.name, version=version),
        pedigree=pedigree(plan, pin),
        properties=[Property(name=f"fusebox:{name}", value=value) for name, value in _facts(plan, wheel) if value],
    )
    bundled = [_submodule(part) for part in pin.release.submodules]
    bom = Bom(components=bundled, metadata=BomMetaData(component=main))
    bom.register_dependency(main, bundled)
    content = json.loads(JsonV1Dot6(bom).output_as_string())
    del content["serialNumber"], content["metadata"]["timestamp"]  # differ from run to run
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def pedigree(plan: Plan, pin: Pin, ref: str = "source") -> Pedigree:
    """Upstream's release that a package is made from, by this reference, and each patch in it."""
    return Pedigree(
        ancestors=[_source(pin.name, pin.release, ref)],
        patches=[_patch(applied) for applied in plan.patches[pin.name]],
    )


def _facts(plan: Plan, wheel: Wheel) -> list[tuple[str, str]]:
    target, built, inputs = plan.target, wheel.record.get("built_with", {}), wheel.record.get("inputs", {})
    return [
        ("target", target.name),
        ("python", target.python),
        ("cuda", target.cuda),
        ("torch", plan.torch.release.version if plan.torch else ""),
        ("torch:sha256", (plan.torch.release.sha256 or "") if plan.torch else ""),
        ("sm", " ".join(built.get("sm", []))),
        ("compiler", str(built.get("compiler", ""))),
        ("source:tree-sha256", str(inputs.get("tree", ""))),
        ("made-from:sha256", wheel.sha256),
    ]


def _source(name: str, source: Source, ref: str) -> Component:
    """Upstream's release: a file by its hash, or a commit."""
    if source.repository:
        return Component(
            name=name,
            version=source.version,
            bom_ref=ref,
            purl=_git(source.repository, source.commit),
            external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(source.repository))],
        )
    return Component(
        name=name,
        version=source.version,
        bom_ref=ref,
        purl=PackageURL("pypi", name=name, version=source.version, qualifiers={"file_name": source.file or ""}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=source.sha256 or "")],
    )


def _submodule(part: Submodule) -> Component:
    return Component(
        name=part.repository.rpartition("/")[2],
        version=part.commit,
        bom_ref=part.path,
        purl=_git(part.repository, part.commit),
        external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(part.repository))],
        properties=[Property(name="fusebox:path", value=part.path)],
    )


def _git(repository: str, commit: str | None) -> PackageURL | None:
    """A package URL of a commit; the format knows GitHub's repositories."""
    place = urlsplit(repository)
    if place.hostname != "github.com":
        return None
    owner, _, name = place.path.strip("/").partition("/")
    return PackageURL("github", owner.lower(), name.lower(), commit)


def _patch(applied: patch.Patch) -> Patch:
    links = [
        str(applied.header[field])
        for field in ("Bug", "Origin")
        if str(applied.header[field] or "").startswith("https://")
    ]
    issue = IssueType(
        type=IssueClassification.DEFECT,
        id=applied.name,
        description=applied.summary,
        references=[XsUri(link.split()[0]) for link in links],
    )
    return Patch(
        type=PatchClassification.BACKPORT if applied.header["Applied-Upstream"] else PatchClassification.UNOFFICIAL,
        diff=Diff(text=AttachedText(content=applied.diff, content_type="text/x-diff")),
        resolves=[issue],
    )
