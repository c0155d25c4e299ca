"""Copy evidence from build/ to smoke_tests/evidence/ for a commit, checked against its raw log."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.catalogue.plan import Plan
from recipes.errors import Refusal
from recipes.files import read_text, write_json, write_text
from recipes.make import environment
from recipes.prove.claims import Room
from recipes.prove.evidence import Built, Evidence, brought, built_for, built_path, imported, read
from recipes.prove.smoke import commit_of


def promote(plan: Plan) -> list[Path]:
    """Copy the evidence of a target's smoke runs to smoke_tests/evidence/, one file per hardware; the copied files.

    Refused: outcomes that the raw log does not contain, and tests that are not committed.
    """
    folder = environment.folder(plan.root, plan.target) / "evidence"
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise Refusal(f'{folder} holds no evidence: run `nox -s "smoke({plan.target.name})"` first.')
    promoted = []
    for path, run in [(path, _promotable(plan, path)) for path in paths]:
        final = plan.root / "smoke_tests" / "evidence" / path.name
        # Without its log, which a killed `promote` may not have written.
        if final.exists() and brought(Evidence, final)["started"] > run["started"]:
            continue  # a run of another checkout is newer
        write_text(final.with_suffix(".log"), read_text(path.with_suffix(".log")))
        write_json(final, run)
        promoted += [final.relative_to(plan.root), final.with_suffix(".log").relative_to(plan.root)]
    built_path(plan.root, plan.target.name).unlink(missing_ok=True)  # a run of claims says more
    return promoted


def _promotable(plan: Plan, path: Path) -> dict[str, Any]:
    """Evidence that its raw log contains line by line, with the commit of its tests."""
    run = read(path)
    runs = compare_log(path.with_suffix(".log"), run["claims"])
    commit = run["commit"] or ("" if _is_of_other_tests(Room(plan.root), run) else commit_of(plan.root))
    if not commit:
        raise Refusal(f"{path} comes from tests that are not committed: commit smoke_tests/, and promote again.")
    return {**run, "commit": commit, **({"runs_in_log": runs} if runs > 1 else {})}


def _is_of_other_tests(room: Room, run: Mapping[str, Any]) -> bool:
    """Whether definitions that decided an outcome have changed since the run; comments and docstrings do not count."""
    others = room.others_than(run["files"])
    return bool(others) and room.keys_of(run, run["claims"]) != [row["key"] for row in run["claims"]]


def compare_log(log: Path, claims: Iterable[Mapping[str, Any]]) -> int:
    """How many runs a raw log holds; refused where none of them printed exactly these claims.

    Claims that an interrupted run did not reach are unproven, "not run", and missing from the log.
    """
    printed = imported("printed")
    reached = (claim for claim in claims if (claim["outcome"], claim["reason"]) != ("unproven", "not run"))
    expected = collections.Counter(_parts(printed.line(claim)) for claim in reached)
    runs: list[collections.Counter[tuple[str, ...]]] = [collections.Counter()]
    for line in log.read_text(encoding="utf-8").splitlines():
        if re.match(r"(proved|refuted|unproven) +\S+ .* \(\d+\.\d s\)$", line):
            runs[-1][_parts(line)] += 1
        elif re.match(r"target \S+ on .*: \d+ proved, \d+ refuted, \d+ unproven", line):
            runs.append(collections.Counter())
    runs = [lines for lines in runs if lines]
    if expected not in runs:
        apart = (expected - (runs or [expected])[-1]) or ((runs or [expected])[-1] - expected)
        example = ", ".join(next(iter(apart), ("no claim at all",)))
        raise Refusal(f"{log} does not contain the outcomes beside it (such as {example!r}): bring both from one run.")
    return len(runs)


def _parts(line: str) -> tuple[str, ...]:
    """A printed line, split so that order does not matter: JSON sorts numbers by name, the log by time."""
    text, _, seconds = line.rpartition(" (")
    return (*sorted(re.split("[;,] ", text)), seconds)


def keep_built(plan: Plan, folder: Path | None) -> Path:
    """Keep the description of a target's environment for a commit, whether claims ran in it or not."""
    source = (folder or environment.folder(plan.root, plan.target) / "env" / "fusebox") / "manifest.json"
    if not source.is_file():
        how = "bring it from where the environment is" if folder else f'run `nox -s "build({plan.target.name})"` first'
        raise Refusal(f"{source} is missing: {how}.")
    manifest = brought(Built, source)
    if manifest["target"] != plan.target.name or manifest["stack"] != built_for(plan, manifest).stack:
        raise Refusal(
            f'{source} was made from another state of this checkout: run `nox -s "build({plan.target.name})"` again.'
        )
    final = built_path(plan.root, plan.target.name)
    write_json(final, manifest)
    return final.relative_to(plan.root)
