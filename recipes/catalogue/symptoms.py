"""What failed builds show in their logs, and what it means (recipes/symptoms.toml)."""

from __future__ import annotations

import re
from pathlib import Path

from recipes.catalogue.load import validated
from recipes.catalogue.schema import Symptom, Symptoms
from recipes.files import read_toml


def read(root: Path) -> list[Symptom]:
    """All symptoms of a checkout, in the order in which a log is searched for them."""
    path = root / "recipes" / "symptoms.toml"
    return validated(Symptoms, read_toml(path), path).symptom


def diagnosis(symptoms: list[Symptom], package: str, log: str) -> tuple[str, str] | None:
    """Cause and fix of the first symptom that is in a build's log, filled in; None where none is."""
    for symptom in symptoms:
        if match := re.search(symptom.pattern, log):
            cause, fix = (_filled(text, package, match) for text in (symptom.cause, symptom.fix))
            return cause, fix
    return None


def _filled(text: str, package: str, match: re.Match[str]) -> str:
    """A text with the package and the groups of a match in the places of {package}, {1}, {2}."""
    return re.sub(r"\{(\w+)\}", lambda place: package if place[1] == "package" else match[int(place[1])], text)
