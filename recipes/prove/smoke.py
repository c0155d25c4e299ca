"""Run the claims, here or by a command of another room, and turn their outcomes into evidence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version
from rich.markup import escape
from rich.table import Table

from recipes import process
from recipes.catalogue import limits, symptoms
from recipes.catalogue.plan import Plan
from recipes.catalogue.symptoms import Diagnosis
from recipes.errors import Refusal
from recipes.files import read_json, sha256_of, write_json, write_text
from recipes.make import environment
from recipes.process import group
from recipes.progress import console, say
from recipes.prove.claims import Room
from recipes.prove.definitions import Code, packed
from recipes.prove.evidence import Built, Carried, Outcomes, brought, grouped, machine_name, worst
from recipes.prove.parsing import Place

KILLED_UNSEEN = Version("3.12")  # before 3.12, a process that is killed leaves no record of what it ran


def smoke(plan: Plan, env: Path) -> int:
    """Run every claim in the environment, write evidence and log, print the table; 1 if one is refuted."""
    folder = folder_of(plan)
    outcomes = folder / "outcomes.json"
    python, tests = str(environment.python_of(env)), str(plan.root / "smoke_tests")
    command = [python, "-m", "pytest", tests, "--no-header", "--evidence", str(outcomes)]
    command += ["--color", "yes" if console.is_terminal else "no"]
    code, log = watched(command, plan.root, environment.run_variables(plan.target, env))
    manifest = read_json(env / "fusebox" / "manifest.json")
    evidence = keep(plan, outcomes, code, log, manifest)
    outcomes.unlink()
    return 1 if code or of_outcome(evidence, "refuted") else 0


def of_outcome(evidence: Mapping[str, Any], outcome: str) -> list[str]:
    """The ids of the claims that had this outcome."""
    return [claim["id"] for claim in evidence["claims"] if claim["outcome"] == outcome]


def folder_of(plan: Plan) -> Path:
    folder = environment.folder(plan.root, plan.target) / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def watched(command: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a command, show what it prints, and return its exit code and all of that."""
    lines = []
    with group(command, folder, variables) as process:
        assert process.stdout
        for line in process.stdout:
            console.file.write(line)
            console.file.flush()
            lines.append(line)
        return process.wait(), "".join(lines)


def keep(
    plan: Plan,
    outcomes: Path,
    code: int,
    log: str,
    manifest: dict[str, Any],
    image: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Turn a run's outcomes into evidence, show it and return it; `code` is how the run ended.

    `image` is what the evidence says about the image that it ran in: `image`, NAME@DIGEST, and what ran it.
    """
    if not outcomes.exists():
        causes = _causes(plan, [], log)
        why = f", since {causes[0].cause}: {causes[0].fix}" if causes else ": read what they printed above"
        raise Refusal(f"{plan.target.name}: the smoke tests ended with code {code} and left no outcomes{why}.")
    content = brought(Outcomes, outcomes)
    if content["target"] != plan.target.name:
        raise Refusal(f"{outcomes} is for the target {content['target']}: bring the file of {plan.target.name}.")
    if (manifest["target"], manifest["stack"]) != (content["target"], content["stack"]):
        raise Refusal(
            f"{outcomes} and manifest.json are of different environments ({content['stack'][:12]} and "
            f"{manifest['target']} {manifest['stack'][:12]}): bring both from one run."
        )
    written = _assemble(plan, content, log, manifest, image)
    console.print(_table(written))
    say(f"evidence: {folder_of(plan)}/{written['name']}.json")
    reasons = [claim["reason"] for claim in written["claims"] if claim["outcome"] == "refuted"]
    if code or reasons:
        causes = _causes(plan, reasons, log)
        for cause in causes:
            say(f"cause: {cause.cause}: {cause.fix} ({cause.thread})")
        if not causes:
            say(f"cause: unknown: report it with {folder_of(plan)}/{written['name']}.log")
    return written


def _causes(plan: Plan, reasons: list[str], log: str) -> list[Diagnosis]:
    """What the reasons of refuted claims mean, or if there are none, the log."""
    facts = limits.facts(plan.target, plan.lock, {})
    return symptoms.diagnoses(symptoms.read(plan.root), "\n".join(reasons) or log, facts)


def _assemble(
    plan: Plan, outcomes: dict[str, Any], log: str, manifest: dict[str, Any], image: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Write the outcomes with keys and what was tested beside the log, without paths of this machine."""
    room, folder = Room(plan.root), folder_of(plan)
    if others := room.others_than({**outcomes["files"], **_data_read(outcomes)}):
        raise Refusal(
            f"{plan.target.name}: these outcomes come from other tests than {room.folder} ({', '.join(others)}): "
            "run the claims again where the environment is."
        )
    name = f"{plan.target.name}--{machine_name(outcomes['hardware'], 'x')}{'--image' if image else ''}"
    write_text(folder / f"{name}.log", without_paths(plan, re.sub(r"\x1b\[[\d;]*m", "", log)))
    for claim in outcomes["claims"]:
        claim["reason"] = without_paths(plan, claim["reason"])
        texts = {name: value for name, value in claim["measured"].items() if isinstance(value, str)}
        claim["measured"].update({name: without_paths(plan, value) for name, value in texts.items()})
    is_whole = Version(outcomes["python"]) >= KILLED_UNSEEN
    definitions = _with_keys(room, outcomes["claims"], outcomes.pop("ran", None), is_whole)
    evidence = {
        "name": name,
        **outcomes,
        **(image or {}),
        "commit": commit_of(plan.root),
        "definitions": definitions,
        "packages": manifest["packages"],
        "log_sha256": sha256_of(folder / f"{name}.log"),
    }
    write_json(folder / f"{name}.json", evidence)
    return evidence


def _data_read(outcomes: Mapping[str, Any]) -> dict[str, str]:
    """The files of data that pytest and the claims read, name -> sha256, as the recorder noted them."""
    noted = (outcomes.get("ran") or {}).get("data", [])
    return {file: digest for file, _, digest in (text.partition(":") for text in noted)}


def _with_keys(
    room: Room, claims: list[dict[str, Any]], ran: dict[str, list[str]] | None, is_whole: bool
) -> dict[str, str]:
    """Give each claim its key and what it ran; the table of all definitions that claims ran, with their digests.

    `functions` of a row are those that were seen to run, `ran` all that decided the outcome with them. is_whole: also
    processes that were killed left their record; if not, all counts that the programs which a claim names can reach.
    """
    code, places = room.code, {}
    functions = {claim: set(_places(code, names)) for claim, names in (ran or {}).items()}
    functions.pop("data", None)  # these names are those of smoke_tests/recorder.py
    compiled, always = functions.pop("compiled", set()), functions.get("", set())
    anywhere = frozenset().union(*functions.values()) if functions else frozenset()
    for claim in claims:
        if functions_run := functions.get(claim["id"]):
            started = frozenset() if is_whole else code.started(functions_run)
            places[claim["id"]] = code.ran(functions_run, anywhere, functions_run & compiled) | always | started
    table = sorted(set().union(*places.values())) if places else []
    numbers = {place: number for number, place in enumerate(table)}
    for claim in claims:
        if claim["id"] in places:
            claim["functions"] = packed(numbers[place] for place in functions[claim["id"]])
            claim["ran"] = packed(numbers[place] for place in places[claim["id"]])
            claim["key"] = code.key(places[claim["id"]])
        else:
            claim["key"] = room.key(claim["id"])
    return {f"{file}:{name}": code.definitions[file, name].digest for file, name in table}


def _places(code: Code, names: Iterable[str]) -> Iterator[Place]:
    for file, _, name in (text.partition(":") for text in names):
        if place := code.place(file, name):
            yield place


def commit_of(root: Path) -> str:
    """The commit that contains this smoke_tests/, shortened; "" if there is none, as with uncommitted changes."""
    return process.commit_of(root, "smoke_tests/*.py", "smoke_tests/*.ini", "smoke_tests/*.toml")


def without_paths(plan: Plan, text: str) -> str:
    """A text to commit, without the paths of the checkout, the home folder and build folders."""
    home = os.path.expanduser("~")  # noqa: PTH111  # Path.home() raises where the user has none
    text = text.replace(str(plan.root), ".")
    text = text if home == "/" else text.replace(home, "~")
    text = re.sub(r"[/~.][^\s'\":]*/(?=outcomes\.json)|[/~.][^\s'\":]*/partial/build/", "", text)
    return re.sub(r"[/~.][^\s'\":]*(?=/lib/python3\.\d+/|/bin/python\b)", "ENV", text)


def _table(evidence: dict[str, Any]) -> Table:
    """A table with one row per claim, which counts the claim's parameters."""
    table = Table(
        title=f"{evidence['target']} on {evidence['hardware']['name']} ({evidence['hardware']['cpu']})",
        box=None,
        pad_edge=False,
    )
    for column in ("outcome", "package", "claim", "seed", "seconds"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for rows in grouped(evidence["claims"]).values():
        good, outcome = sum(row["outcome"] == "proved" for row in rows), worst(rows)
        count = f" ({good} of {len(rows)})" if len(rows) > 1 else ""
        colour = {"proved": "green", "refuted": "red", "unproven": "yellow"}[outcome]
        seconds = sum(row["seconds"] for row in rows)
        sentence = escape(rows[0]["claim"])
        table.add_row(
            f"[{colour}]{outcome}[/{colour}]{count}",
            rows[0]["package"],
            sentence,
            " ".join(rows[0]["seed"]),
            f"{seconds:.1f}",
        )
    return table


def bring(plan: Plan, folder: Path) -> None:
    """Make evidence from a run on another machine: outcomes.json, smoke.log and manifest.json of its environment.

    Where the claims ran in an image, image.json says in which, and by what it was run.
    """
    outcomes, log, manifest = (folder / name for name in ("outcomes.json", "smoke.log", "manifest.json"))
    for path in (outcomes, log, manifest):
        if not path.is_file():
            where = "bring it from where the smoke tests ran (docs/use/elsewhere.md says how)"
            raise Refusal(f"{path} is missing: {where}.")
    described, text = brought(Built, manifest), log.read_text(encoding="utf-8", errors="replace")
    carried = folder / "image.json"
    keep(plan, outcomes, 0, text, described, _ran_in(plan, carried, text) if carried.exists() else None)


def _ran_in(plan: Plan, path: Path, log: str) -> dict[str, Any]:
    """What evidence says about the image that the claims ran in; refused where the log is not of that image."""
    carried = brought(Carried, path)
    if (target := carried["labels"].get("fusebox.target")) != plan.target.name:
        raise Refusal(f"{path} is about an image of the target {target}: bring the file of {plan.target.name}.")
    runtime = carried["runtime"]
    line = f"image {carried['image']} in {runtime['name']} {runtime['version']}, as {carried['user']}"
    if line not in log.splitlines():
        raise Refusal(f"{path.with_name('smoke.log')} does not begin with {line!r}: bring both from one run.")
    labels = carried["labels"]
    base = "@".join(labels.get(f"org.opencontainers.image.base.{key}", "unknown") for key in ("name", "digest"))
    return {
        "image": carried["image"],
        "base": base,
        "runtime": runtime,
        "refused": carried.get("refused", {}),
        "user": carried["user"],
    }
