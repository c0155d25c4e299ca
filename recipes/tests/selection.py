"""The plugin of pytest that runs the proofs of patches on fewer releases: `nox -s tests -- --newest`.

A proof whose patch, text and harness have not changed since its record (`recipes.prove.proofs.state`) is known on its
older releases. Its run on the newest shows that the tool still fetches, patches and compares as it did.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from recipes.catalogue import patch
from recipes.catalogue.load import Catalogue
from recipes.files import ROOT
from recipes.prove import proofs
from recipes.prove.proofs import Case

OPTION = "--newest"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="run proofs that have not changed on their newest release only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the older releases of each patch whose proof has not changed since its record."""
    if config.getoption(OPTION):
        known = older(Catalogue(ROOT))
        left_out = [item for item in items if release_of(item) in known]
        items[:] = [item for item in items if release_of(item) not in known]
        config.hook.pytest_deselected(items=left_out)


def release_of(item: pytest.Item) -> tuple[Path, str] | None:
    """The patch and the identity of the release that a proof's test is about; None of any other test."""
    case = getattr(getattr(item, "callspec", None), "params", {}).get("proof")
    return (case.patch.path, case.source.identity) if isinstance(case, Case) else None


def older(catalogue: Catalogue) -> set[tuple[Path, str]]:
    """Each patch that has not changed since its record, with each release but the newest that its proof can run on."""
    now, releases = proofs.inputs(catalogue), set()
    for each in patch.every(catalogue.root):
        if proofs.state(each, now) == "proved":
            unproven = proofs.conditions(proofs.test_of(each)).unproven
            sources = [case.source for case in now.cases(each)]
            runnable = [source for source in sources if source.version not in unproven]
            newest = max(runnable, key=lambda source: Version(source.version))
            releases |= {(each.path, source.identity) for source in sources if source != newest}
    return releases
