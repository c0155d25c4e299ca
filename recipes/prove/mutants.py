"""How strong the claims are: plant faults in a target's environment, and keep the outcome of each.

smoke_tests/mutants.py does the work, inside the environment; faults of upstream's compiled code
(smoke_tests/compiled_faults.toml) are compiled here first. The outcomes are committed beside the evidence and shown
in docs/status/mutants.md. Each has the key of what decided it, so that a change is noticed; those alone can be planted
again.
"""

from __future__ import annotations

import collections
import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from recipes.catalogue.load import validated
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Strict, Text
from recipes.errors import Refusal
from recipes.files import digest_of, read_toml, write_json
from recipes.make import audit, environment
from recipes.make.build import Builder
from recipes.make.environment import Wheel
from recipes.prove import evidence, smoke
from recipes.prove.claims import HARNESS, OUTSIDE, Room, of_row, table_of
from recipes.prove.definitions import Code, Recorded, packed
from recipes.prove.parsing import Place

Row = dict[str, Any]
COUNTED = ("caught", "survived", "crashed")
PROCESSES = 12  # at most: more of them compete for memory
REASONS = "faults/survivors.py"  # each function there says why some mutants survive, and affects no outcome
RECORDED = ("functions", "compiled")  # of a row: what ran, and what of it torch.compile had compiled
PLANTER = "mutants.py"  # plants and judges every mutant
COMPILED = "compiled_faults.toml"  # the faults of upstream's code
RULED = "faults/ruled.json"  # the code of training that a rule changes, and the claims that judge each


class CompiledFault(Strict):
    """One change of a package's source, and where it shows."""

    name: Text
    kind: Text
    package: Text
    file: Text
    old: Text
    new: Text
    extension: Text
    operator: Text
    column: Text
    claims: list[Text]


class CompiledFaults(Strict):
    """The file."""

    fault: list[CompiledFault]


def compiled(builder: Builder) -> Path:
    """Compile each fault of a package that the target compiles; the folder of the libraries and their faults.json.

    What was compiled from the same wheel with the same change is not compiled again.
    """
    plan, path = builder.plan, builder.plan.root / "smoke_tests" / COMPILED
    faults = validated(CompiledFaults, read_toml(path), path).fault
    folder = environment.folder(plan.root, plan.target) / "mutants"
    planted = []
    for wheel in builder.wheels()[1]:
        # The libraries of a target without CUDA contain no CUDA code.
        possible = [fault for fault in faults if plan.target.cuda != "none" or Path(fault.file).suffix != ".cu"]
        if chosen := [fault for fault in possible if fault.package == wheel.pin.name]:
            with audit.opened(wheel.path) as archive:
                members = {name.partition(".")[0].replace("/", "."): name for name in archive.namelist()}
            libraries = {folder / f"{_key(wheel, fault)}.so": fault for fault in chosen if fault.extension in members}
            missing = {library: fault for library, fault in libraries.items() if not library.exists()}
            if missing:
                _compile(builder, wheel, missing, members)
            shown = {"name", "kind", "operator", "column", "claims", "extension"}
            planted += [{**fault.model_dump(include=shown), "library": path.name} for path, fault in libraries.items()]
    write_json(folder / "faults.json", planted)
    return folder


def _key(wheel: Wheel, fault: CompiledFault) -> str:
    return digest_of([wheel.sha256, fault.file, fault.old, fault.new])[:16]


def _compile(builder: Builder, wheel: Wheel, faults: dict[Path, CompiledFault], members: dict[str, str]) -> None:
    changes = [(fault.file, fault.old, fault.new) for fault in faults.values()]
    for (library, fault), wheel_with_fault in zip(faults.items(), builder.changed(wheel.pin, changes), strict=True):
        member = members[fault.extension]
        with audit.opened(wheel_with_fault) as archive, audit.opened(wheel.path) as correct:
            content = archive.read(member)
            if content == correct.read(member):
                raise Refusal(
                    f"{fault.name!r} changes nothing in {member}: plant it in {fault.package}'s code that runs."
                )
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(library)


def run(plan: Plan, env: Path, libraries: Path, seeds: int, *, only_changed: bool = False) -> int:
    """Plant every fault in the environment and keep the outcomes; 1 if correct code raised a false alarm.

    With `only_changed`, the kept run goes on: what has changed since is planted, and without seeds its seeds count.
    """
    out = environment.folder(plan.root, plan.target) / "mutants.json"
    words = ["--seeds", str(seeds), "--compiled", str(libraries)]
    again: Row = {}
    if only_changed:
        _earlier(plan)  # before the claims, which take minutes
        _watched(plan, env, out, ["--seeds", "0", "--share", "0/0", "--processes", "1"])
        state = evidence.brought(Planted, out)
        again = _earlier(plan, state["hardware"]["name"])
        processes = max(2, min(len(os.sched_getaffinity(0)), PROCESSES))
        _resume(out, _with_unchanged(plan, state, again), processes)
        words += ["--processes", str(processes)]
    code = _watched(plan, env, out, words)
    if again and not seeds:
        clean = {**again["clean"], "commit": again["clean"].get("commit") or again["commit"]}
        write_json(out, {**evidence.brought(Planted, out), "clean": clean})
    keep(plan, out)
    for path in (out, *out.parent.glob(f"{out.name}.*-of-*")):  # the next run would go on from these
        path.unlink()
    return code


def _watched(plan: Plan, env: Path, out: Path, words: list[str]) -> int:
    command = [str(environment.python_of(env)), "-m", "smoke_tests.mutants", "--out", str(out), *words]
    code, _ = smoke.watched(command, plan.root, environment.run_variables(plan.target, env))
    if code > 1:
        raise Refusal(
            f"{plan.target.name}: the mutants ended with code {code}: read their output, and run again to continue."
        )
    return code


def _earlier(plan: Plan, hardware: str = "") -> Row:
    """The kept outcomes of the target on this hardware, or on any."""
    for outcomes in committed(plan.root):
        if outcomes["target"] == plan.target.name and hardware in ("", outcomes["hardware"]["name"]):
            return outcomes
    where = f" on {hardware}" if hardware else ""
    raise Refusal(f"No mutants of {plan.target.name}{where} are kept: leave --changed out to plant all of them.")


def _with_unchanged(plan: Plan, state: Row, again: Row) -> Row:
    """The state of a run that begins with the earlier outcomes that nothing has changed, each with its commit.

    A mutant that survived without a known reason is planted again: there may be a reason now.
    """
    if state["stack"] != again["stack"]:
        raise Refusal(
            f"The kept mutants of {plan.target.name} were planted beside other packages: leave --changed out to plant "
            "all of them."
        )
    keys = Keys(plan.root)
    unexplained = [row for row in again["mutants"] if row["outcome"] == "survived" and not row["why"]]
    gone = {identity(row) for row in [*changed(keys, again, plan), *unexplained]}
    failing = {*state["failing"], *again["failing"]}
    same = [
        {**keys.as_from_a_run(row, table_of(again)), "commit": row.get("commit") or again["commit"]}
        for row in again["mutants"]
        if identity(row) not in gone and not failing & {row["by"], *row["claims"]}
    ]
    machines = {**again.get("earlier", {}), again["commit"]: again["hardware"]}
    named = {row["commit"] for row in same}
    before = {commit: machine for commit, machine in machines.items() if commit in named}
    return {**state, "mutants": same, "earlier": before}


def _resume(out: Path, state: Row, processes: int) -> None:
    """Write the files from which a stopped run goes on: its own, and that of each of its processes."""
    state = {key: value for key, value in state.items() if key != "clean"}
    write_json(out, state)
    for number in range(processes):
        share = out.with_name(f"{out.name}.{number}-of-{processes}")
        stopped = json.loads(share.read_text(encoding="utf-8")) if share.exists() else {}
        if stopped.get("files") != state["files"] or stopped.get("earlier") != state["earlier"]:
            write_json(share, state)


def identity(row: Row) -> tuple[str, ...]:
    """What tells a mutant from every other."""
    return tuple(str(row[key]) for key in ("name", "kind", "origin", "operator", "column"))


class Clean(evidence.Brought):
    """The seeds on correct code. `commit` is where they ran, if the mutants ran at a later one."""

    commit: str = ""
    seeds: int
    claims: int
    alarms: list[Any]
    processes: int


class Mutant(evidence.Brought):
    """A row. `commit` is where it was planted, if the run took it from an earlier one."""

    name: str
    kind: str
    origin: str
    operator: str
    column: str
    claims: list[str]
    outcome: str
    by: str
    why: str
    commit: str = ""


class Planted(evidence.Brought):
    """A file of outcomes. `earlier` has the machine of each commit that rows name."""

    target: str
    stack: str
    hardware: evidence.Machine
    files: dict[str, str]
    failing: list[str]
    clean: Clean
    mutants: list[Mutant]
    commit: str = ""
    earlier: dict[str, evidence.Machine] = Field(default_factory=dict)


def keep(plan: Plan, path: Path) -> None:
    """Write the outcomes of a whole run for you to commit; it must have had this checkout's tests."""
    planted = evidence.brought(Planted, path) if path.is_file() else {}
    room = Room(plan.root)
    if not planted.get("mutants") or planted["target"] != plan.target.name or room.others_than(planted["files"]):
        raise Refusal(
            f"{path} is not a complete run of {plan.target.name} with the tests of this checkout: run "
            "`python -m smoke_tests.mutants` there, to its end and with seeds."
        )
    outcomes = json.loads(smoke.without_paths(plan, json.dumps(planted)))
    _with_keys(Keys(plan.root), outcomes)
    name = f"{outcomes['target']}--{outcomes['hardware']['name']}.json"
    final = plan.root / "smoke_tests" / "evidence" / "mutants" / name
    write_json(final, {**outcomes, "commit": smoke.commit_of(plan.root)})


def _with_keys(keys: Keys, outcomes: Row) -> None:
    """Give each mutant its key, and by their numbers in one table the functions that ran while it was planted."""
    rows = [row for row in outcomes["mutants"] if "functions" in row]
    placed = {text: keys.place(text) for row in rows for text in row["functions"]}
    table = sorted({place for place in placed.values() if place})
    numbers = {place: number for number, place in enumerate(table)}
    outcomes["definitions"] = {":".join(place): keys.digest(place) for place in table}
    for row in rows:
        for field in RECORDED:
            row[field] = packed({numbers[place] for text in row[field] if (place := placed[text])})
    ran = table_of(outcomes)
    for row in outcomes["mutants"]:
        row["key"] = keys.of(row, ran)


class Keys:
    """The keys of mutants in the checkout as it is.

    A mutant depends on mutants.py, on what plants it, on the functions that ran while it was planted or, where that is
    not recorded, on all that its claims and mutants.py can reach. One with a reason depends on that reason as well.
    """

    def __init__(self, root: Path) -> None:
        folder = root / "smoke_tests"
        outside = (*OUTSIDE, RULED)  # each key has its own row of that table
        self._code, self._with_reasons = Code(folder, HARNESS, (*outside, REASONS)), Code(folder, HARNESS, outside)
        self._planting = Planting.of(self._code)
        self._planter = frozenset(place for place in self._code.definitions if place[0] == PLANTER)
        self._room = Room(root)

    def place(self, text: str) -> Place | None:
        """The definition of a function that ran, which the recorder calls FILE:QUALIFIED.NAME."""
        file, _, name = text.partition(":")
        return self._code.place(file, name)

    def digest(self, place: Place) -> str:
        """The digest of a definition in the checkout."""
        return self._code.definitions[place].digest

    def as_from_a_run(self, row: Row, ran: Recorded) -> Row:
        """A kept row in which nothing has changed, with the names that its functions have now."""
        recorded = {field: of_row(ran, row[field]) for field in RECORDED if field in row}
        now = {field: self._code.places_now(definitions) or () for field, definitions in recorded.items()}
        return {**row, **{field: sorted(":".join(place) for place in places) for field, places in now.items()}}

    def of(self, row: Row, ran: Recorded = ()) -> str | None:
        """The key of a mutant; None if what decided it is gone. `ran` are the recorded definitions of its run.

        The claim that caught a mutant decides it; all of its claims decide a mutant that was not caught, also those
        that are new since.
        """
        planted, reasons = self._planting.places(row), self._reasons(row["why"])
        is_gone = not _claims_are_there(self._code, row) or (row["why"] and not reasons)
        if is_gone or not (planted or row["origin"] == "compiled"):
            return None
        if "functions" in row:
            recorded = (of_row(ran, row[field]) for field in RECORDED)
            key = self._key_by_record(*recorded, tuple(planted), reasons)
        else:
            key = self._key_by_reach(frozenset([*_deciding(self._code, row), *planted]), reasons)
        beside = self._beside(row)
        return digest_of([key, beside]) if key and beside is not None else None

    @functools.cache  # noqa: B019  # as long as the verb
    def _reasons(self, why: str) -> frozenset[Place]:
        """Everything that the reasons with these words can reach."""
        named = [place for place in self._planting.holding.get(why, []) if place[0] == REASONS]
        return self._with_reasons.reach(named) if why else frozenset()

    def _beside(self, row: Row) -> list[Any] | None:
        """What decides a mutant beside definitions: the claims that may catch it, and the fault that was compiled."""
        if row["origin"] == "rule" and row["column"] == "training":
            claims = self._judges.get(row["name"].partition(" ")[0])
        else:
            claims = [":".join(place) for place in _deciding(self._code, row)]
        of_list = self._compiled if row["origin"] == "compiled" else []
        faults = [fault for fault in of_list if fault["name"] == row["name"]]
        if claims is None or (row["origin"] == "compiled" and not faults):
            return None
        return [[] if row["by"] or row["outcome"] == "too loud" else sorted(claims), faults]

    def is_left_out(self, row: Row, plan: Plan) -> bool:
        """Whether no claim that decided a mutant is about the target's version of its package any more."""
        if row["outcome"] not in COUNTED:
            return False
        return all(self._room.leaves_out(claim, plan) for claim in ([row["by"]] if row["by"] else row["claims"]))

    def not_planted(self, outcomes: Row) -> list[str]:
        """The faults of compiled code in implementations that the run's target has, which the run did not plant."""
        has = {(row["operator"], row["column"]) for row in outcomes["mutants"]}
        planted = {row["name"] for row in outcomes["mutants"] if row["origin"] == "compiled"}
        faults = [fault for fault in self._compiled if (fault["operator"], fault["column"]) in has]
        return [str(fault["name"]) for fault in faults if fault["name"] not in planted]

    @functools.cached_property
    def _judges(self) -> dict[str, list[str]]:
        """The claims that judge each function of training, by module and name."""
        listed = json.loads((self._room.folder / RULED).read_text(encoding="utf-8"))
        return {f"{row['module']}.{name}": row["claims"] for row in listed for name in row["names"]}

    @functools.cached_property
    def _compiled(self) -> list[Row]:
        """The faults that are compiled into packages."""
        return list(read_toml(self._room.folder / COMPILED)["fault"])

    @functools.cache  # noqa: B019  # as long as the verb
    def _key_by_reach(self, roots: frozenset[Place], reasons: frozenset[Place]) -> str:
        return self._code.key(self._code.floor(roots | self._planter) | reasons)

    @functools.cache  # noqa: B019  # many mutants ran the same
    def _key_by_record(
        self, ran: Recorded, compiled: Recorded, planted: tuple[Place, ...], reasons: frozenset[Place]
    ) -> str | None:
        code = self._code
        functions, of_torch = code.places_now(ran), code.places_now(compiled)
        if functions is None or of_torch is None:
            return None
        # What an earlier mutant of the process left in a cache was not recorded for this one.
        places = code.ran([*functions, *planted], frozenset(code.definitions), of_torch)
        return code.key(places | self._planter | reasons)


def has_other_packages(outcomes: Row, plan: Plan | None) -> bool:
    """Whether a pinned input of a run's target has changed since, or the target (of that plan) is gone."""
    return plan is None or outcomes["stack"] not in plan.stacks


def changed(keys: Keys, outcomes: Row, plan: Plan | None) -> list[Row]:
    """The mutants of a run for which something that decided the outcome has changed since, or is gone.

    Those are all of them if a pinned input of the target has changed. `plan` is the target's; None if it is gone.
    """
    if plan is None or has_other_packages(outcomes, plan):
        return list(outcomes["mutants"])
    ran = table_of(outcomes)
    rows = [(row, keys.of(row, ran)) for row in outcomes["mutants"]]
    return [row for row, key in rows if not key or row.get("key") != key or keys.is_left_out(row, plan)]


def _deciding(code: Code, row: Row) -> Iterator[Place]:
    for claim in [row["by"]] if row["by"] else row["claims"]:
        file, _, test = claim.split("[")[0].partition("::")
        names = [test] if test else [name for name in code.modules[file].definitions if name.startswith("test_")]
        yield from ((file, name) for name in names)


@dataclass(frozen=True)
class Planting:
    """The definitions outside of tests, by their names and by the texts in them: what may plant a fault."""

    code: Code
    named: Mapping[str, list[Place]]
    holding: Mapping[str, list[Place]]

    @classmethod
    def of(cls, code: Code) -> Planting:
        named, holding = (
            collections.defaultdict[str, list[Place]](list),
            collections.defaultdict[str, list[Place]](list),
        )
        for place, definition in code.definitions.items():
            if not place[0].rpartition("/")[2].startswith("test_"):
                named[place[1]].append(place)
                for text in definition.strings:
                    holding[text].append(place)
        return cls(code, named, holding)

    def places(self, row: Row) -> list[Place]:
        """The function that plants a fault, or a table that names it, or the function that a rule changed."""
        name = row["name"].partition(" ")[0] if row["origin"] == "rule" else row["name"].replace(" ", "_")
        if row["origin"] == "rule" and row["column"] == "training":
            module, _, name = name.partition(".")  # "guard.Guard._compare" is in training/guard.py
            changed = [(f"training/{module}.py", part) for part in (name, name.rpartition(".")[0])]
            return [place for place in changed if place in self.code.definitions][:1]
        return [*self.named.get(name, []), *self.holding.get(row["name"], [])]


def _claims_are_there(code: Code, row: Row) -> bool:
    """Whether the claims that decided a mutant are in the checkout."""
    claims = [row["by"]] if row["by"] else row["claims"]
    places = [tuple(claim.split("[")[0].split("::")) for claim in claims]
    return all(place in code.definitions if len(place) == 2 else place[0] in code.modules for place in places)


def committed(root: Path) -> list[Row]:
    """The kept outcomes, one per target and hardware."""
    paths = sorted((root / "smoke_tests" / "evidence" / "mutants").glob("*.json"))
    return [evidence.brought(Planted, path) for path in paths]
