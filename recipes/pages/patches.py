"""The blocks of docs/status/patches.md: every patch, its proof, and why it is needed."""

from __future__ import annotations

import re

from recipes.catalogue.patch import Patch
from recipes.pages import markdown
from recipes.pages.tables import Facts, since
from recipes.prove import evidence, proofs


def patches(facts: Facts) -> str:
    """Every patch: what it does, for which versions, whether upstream has it, and in which targets."""
    rows = []
    for row in proofs.rows(facts.proofs):
        patch, targets = row.patch, ", ".join(f"`{name}`" for name in row.targets)
        link = f"[{_title(patch)}](#{markdown.anchor(_title(patch))})"
        rows.append([link, patch.summary, str(patch.header["X-Applies-To"]), row.upstream, targets])
    return markdown.table("patch|what it does|versions|upstream|targets", rows)


def proofs_of_patches(facts: Facts) -> str:
    """The state of each patch's proof, and what it ran on."""
    lines = []
    for row in proofs.rows(facts.proofs):
        record, patch = proofs.record_of(row.patch).relative_to(facts.root).as_posix(), row.patch
        commit = (proofs.written(patch) or {}).get("commit")
        state = row.state
        if state == evidence.CHANGED and commit:
            state += since(commit)
        lines.append([f"[{_title(patch)}]({record})", state, row.proved_on])
    return markdown.table("proof|state|ran on", lines)


def reasons(facts: Facts) -> str:
    """A section for each patch, from its header: the symptom, the cause, and the threads upstream."""
    return "\n\n".join(_reason(row.patch) for row in proofs.rows(facts.proofs))


def _reason(patch: Patch) -> str:
    parts = [f"### {_title(patch)}", f"[{patch.summary}]({patch.name})", *_paragraphs(patch.reason)]
    if links := _links(patch):
        parts.append(f"Upstream: {', '.join(links)}")
    return "\n\n".join(parts)


def _title(patch: Patch) -> str:
    return f"{patch.package} {patch.path.name[:4]}"


def _paragraphs(reason: str) -> list[str]:
    """The lines of a reason as Markdown: quoted lines are what a program printed, and become a block of code."""
    parts = re.split(r"((?:^> .*\n?)+)", reason, flags=re.MULTILINE)
    return [_quoted(part) if part.startswith("> ") else _escaped(part) for part in parts if part.strip()]


def _quoted(part: str) -> str:
    return "\n".join(f"    {line.removeprefix('> ')}" for line in part.splitlines())


def _escaped(part: str) -> str:
    """Prose in which Markdown sees no emphasis and no HTML, outside of code."""
    pieces = re.split(r"(`[^`]*`)", part.strip())
    return "".join(
        piece if piece.startswith("`") else re.sub(r"[*<]|(?<!\w)_|_(?!\w)", r"\\\g<0>", piece) for piece in pieces
    )


def _links(patch: Patch) -> list[str]:
    """The addresses that a header names: where upstream has the report, the change or the proposal."""
    addresses: dict[str, str] = {}
    for field in ("Bug", "Origin", "Forwarded"):
        for address in re.findall(r"https://\S+", str(patch.header[field] or "")):
            addresses.setdefault(address, f"[{_words(address)}]({address})")
    return list(addresses.values())


def _words(address: str) -> str:
    """A short name of a thread on GitHub: "NVIDIA/apex issue 550"."""
    kinds = {"issues": "issue", "pull": "pull request", "commit": "commit"}
    match = re.match(r"https://github\.com/([^/]+/[^/]+)/(issues|pull|commit)/(\w+)", address)
    return f"{match[1]} {kinds[match[2]]} {match[3][:7]}" if match else address
