"""Error texts and what they mean: the rows of recipes/symptoms.toml, and the limits that name such a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from recipes.catalogue.limits import Facts, within
from recipes.catalogue.load import Catalogue, validated
from recipes.catalogue.schema import Limit, Symptom, Symptoms
from recipes.files import read_toml

# A compiler's error, or a Python exception, after which pip prints "error: metadata-generation-failed"; not a
# file or an option of that name.
ERROR = re.compile(r"(?<![\w./=-])(fatal )?error(?![\w/=-]|\.\w)|(error|exception): ", re.IGNORECASE)
# What a program that failed may say instead.
TROUBLE = re.compile(
    r"Traceback|\bfatal|[Ss]egmentation fault|Bus error|\b(Aborted|Killed|FAILED)\b|undefined (symbol|reference)|"
    r"\b([Cc]annot|[Cc]ould not|[Uu]nable to|[Ff]ailed to)\b|denied|refused"
)
# Colours and links of a terminal, which may stand between any two words.
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
# What Docker ("#12 4.98"), torchrun, GitHub's Actions, quotes and frames put before a line, or after it.
FRAME = re.compile(
    r"^[^\S\n]*(?:(?:\d{4}-\d\d-\d\dT[\d:.]+Z|#\d+(?= \d+\.\d)|\d+\.\d{1,3}(?= )|\[rank\d+\]:|[│>])[^\S\n]+)+|"
    r"[^\S\n]+│[^\S\n]*$",
    re.MULTILINE,
)
# A download that failed and that pip tries again, "total" times more; the message may be wrapped.
RETRY = re.compile(r"^.*\bRetrying \(Retry\(total=(\d+),.*(?:\n(?!.*\bRetrying \().*){0,3}?': /.*\n?", re.MULTILINE)
# A test that passed, whatever its name, an error that make ignored, a library that TensorFlow does without, and a
# pull that Podman tries again.
HARMLESS = re.compile(
    r"^.*(?:\bPASSED(?:\s+\[\s*\d+%\])?|\(ignored\)|Could not load dynamic library .*; dlerror: .*|"
    r"WARN\[\d+\] Failed, retrying in .*)[^\S\n]*$\n?",
    re.MULTILINE,
)
# Debug output about a program's own steps, and warnings, are not trouble.
QUIET = re.compile(r"^\s*(?:DEBUG |warning: )|\bNCCL INFO\b")
# A pattern's words for a missing header, which are gcc's; and what gcc, clang and nvcc print around its name.
MISSING = re.compile("fatal error: (.+?): No such file")
BEFORE = r"""(?:fatal error: ["']?|cannot open source file ["'])"""
BEHIND = r"""(?:: No such file|. file not found|"(?![^\n]))"""
QUOTES = str.maketrans("‘’“”", "''\"\"")


@dataclass(frozen=True)
class Diagnosis:
    """What a line of an error text means: its cause, what helps, and a report of it."""

    line: str
    cause: str
    fix: str
    thread: str


def read(root: Path) -> list[Symptom]:
    """All symptoms of a checkout, the most telling first: those of limits, then symptoms.toml in its own order."""
    path = root / "recipes" / "symptoms.toml"
    limits = (limit for limit in Catalogue(root).limits if limit.symptom)
    return [*map(_of_limit, limits), *validated(Symptoms, read_toml(path), path).symptom]


def _of_limit(limit: Limit) -> Symptom:
    """The symptom that a broken limit shows: the same fact, reason and thread."""
    needs = " and ".join(f"{thing} {need}" for thing, need in limit.needs.items())
    return Symptom(
        pattern=limit.symptom or "",
        example=limit.symptom or "",
        cause=f"{limit.package} {limit.versions} needs {needs}: {limit.reason}",
        fix=f"choose versions that fit, which `nox -s plan -- TARGET --with {limit.package}==VERSION` checks",
        thread=limit.thread,
        versions={limit.package: limit.versions},
    )


def diagnoses(
    symptoms: Iterable[Symptom], text: str, facts: Facts | None = None, package: str = "PACKAGE"
) -> list[Diagnosis]:
    """What an error text means, the likeliest cause first; empty if no symptom is in it.

    The text may be coloured, wrapped or framed by the program that logged it. Each line is explained by one pattern
    only, so that a general one further down adds nothing to it; symptoms with the same pattern are several causes of
    it. One whose versions contradict the facts (limits.facts) is left out. General ones speak only if no other does.
    """
    text = serious(text)
    held = [symptom for symptom in symptoms if facts is None or _holds(symptom, facts)]
    special = _found((symptom for symptom in held if not symptom.general), text, package)
    return special or _found((symptom for symptom in held if symptom.general), text, package)


def _found(symptoms: Iterable[Symptom], text: str, package: str) -> list[Diagnosis]:
    """What the lines of a serious text mean, each by the first symptom that fits."""
    explained: list[tuple[range, str]] = []
    causes = []
    for symptom in symptoms:
        for match in _wrapped(symptom.pattern).finditer(text):
            lines = _lines(text, match)
            if not any(_overlap(lines, other) and symptom.pattern != by for other, by in explained):
                explained.append((lines, symptom.pattern))
                line = " ".join(text[lines.start : lines.stop].split())
                cause, fix = (_filled(words, package, match) for words in (symptom.cause, symptom.fix))
                causes.append(Diagnosis(line, cause, fix, symptom.thread))
                break
    return causes


def plain(text: str) -> str:
    """A text without colours, frames, the ends of lines of Windows, and quotes that an editor made curly."""
    text = re.sub(r"\r+\n?", "\n", ESCAPE.sub("", text))
    return FRAME.sub("", text).translate(QUOTES)


def serious(text: str) -> str:
    """A plain text without what looks like an error and is none (HARMLESS, RETRY)."""
    text = HARMLESS.sub("", plain(text))
    return RETRY.sub(lambda match: match[0] if _gave_up(text[match.end() :], int(match[1])) else "", text)


def _gave_up(rest: str, left: int) -> bool:
    """Whether pip gave a download up after a try, by what it printed next and by how many tries were left."""
    rest = rest.lstrip()
    if not rest or rest.startswith("ERROR"):
        return True
    end = re.search(r"\bERROR:|\berror:|\bSuccessfully \w+ed\b", rest)
    return left == 0 and not (end and end[0].startswith("Successfully"))


@cache
def _wrapped(pattern: str) -> re.Pattern[str]:
    """A pattern that fits the words of each compiler, and whose spaces fit the end of a line too, unless escaped."""
    pattern = MISSING.sub(lambda words: f"{BEFORE}{words[1]}{BEHIND}", pattern)
    return re.compile(re.sub(r"(?<!\\) (\??)", lambda space: r"\s*" if space[1] else r"\s+", pattern))


def _holds(symptom: Symptom, facts: Facts) -> bool:
    """Whether nothing in the facts contradicts the versions of a symptom."""
    pairs = ((need, version) for thing, need in symptom.versions.items() for version in facts.get(thing, ()))
    return all(within(version, need) for need, version in pairs)


def _lines(text: str, match: re.Match[str]) -> range:
    """Where the whole lines of a match begin and end."""
    end = text.find("\n", match.end())
    return range(text.rfind("\n", 0, match.start()) + 1, len(text) if end < 0 else end)


def _overlap(left: range, right: range) -> bool:
    return left.start < right.stop and right.start < left.stop


def _filled(text: str, package: str, match: re.Match[str]) -> str:
    """A text with the package and the groups of a match in the places of {package}, {1}, {2}."""
    return re.sub(r"\{(\w+)\}", lambda place: package if place[1] == "package" else match[int(place[1])], text)


def errors(lines: Iterable[str]) -> Iterator[str]:
    """The lines that look like an error."""
    return (line.strip() for line in map(plain, lines) if ERROR.search(line))


def troubles(text: str) -> Iterator[str]:
    """The lines of a text that look like an error, or else like something that went wrong."""
    lines = serious(text).splitlines()
    yield from errors(lines)
    yield from (line.strip() for line in lines if TROUBLE.search(line) and not QUIET.search(line))
