"""Runs each patch's proof on every release that the patch applies to, and records or compares what it printed.

With --record, the outputs of the proofs that passed are written beside their patches. Without it, they are compared
with what is written there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from patches.proof import Proof
from recipes.catalogue import patch
from recipes.catalogue.load import Catalogue
from recipes.catalogue.lock import Artifact, artifact_of, file_of
from recipes.catalogue.patch import Patch
from recipes.catalogue.plan import Plan, plan
from recipes.catalogue.schema import Source
from recipes.errors import Refusal
from recipes.files import digest_of
from recipes.make import environment
from recipes.make.build import Builder, patched_wheel
from recipes.make.cache import Cache
from recipes.make.environment import Wheel
from recipes.make.fetch import unpack
from recipes.make.patch import apply_all, tree_hash
from recipes.progress import Steps
from recipes.prove import proofs
from recipes.prove.proofs import Case

MIRROR = os.environ.get("FUSEBOX_MIRROR")
RUNS = pytest.StashKey[dict[Path, dict[str, dict[str, Any]]]]()  # by patch file and source, what its record will say
UNFINISHED = pytest.StashKey[dict[Path, str]]()  # by patch file, why no record can be written


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write what the patches' proofs print beside the patches")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--record needs all proofs in one process: leave out -n")
    config.stash[RUNS], config.stash[UNFINISHED] = {}, {}


@cache
def all_plans() -> tuple[Catalogue, list[Plan]]:
    catalogue = Catalogue()
    return catalogue, proofs.plans(catalogue)


@cache
def patch_of(test: Path) -> Patch:
    """test_0001_some_slug.py proves 0001-some-slug.patch."""
    return patch.read(test.with_name(test.stem.removeprefix("test_").replace("_", "-") + ".patch"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A proof runs once per release that its patch applies to; a patch that applies to none has no proof."""
    if "proof" in metafunc.fixturenames:
        cases = proofs.cases(*all_plans(), patch_of(metafunc.definition.path))
        assert cases, f"{metafunc.definition.path} proves a patch that applies to no release: delete both."
        metafunc.parametrize("proof", cases, indirect=True, ids=[case.label for case in cases])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for both trees, emptied afterwards: gigabytes, of which pytest would keep three runs."""
    yield tmp_path
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(name="proof")
def both_trees(request: pytest.FixtureRequest, place: Path) -> Proof:
    """Both trees, unpacked anew, and the environment that the proof asks for."""
    case: Case = request.param
    conditions = proofs.conditions(request.path)
    if case.source.version in conditions.unproven:
        _record(request.node, unproven=conditions.unproven[case.source.version])
        pytest.skip(f"unproven here: {conditions.unproven[case.source.version]}")
    store = Cache()
    beside = [  # read from the module itself, because a proof may import that of another
        Artifact(name, version, sha256, file)
        for versions, wheels in getattr(request.module, "BESIDE", {}).items()
        if SpecifierSet(versions).contains(case.source.version, prereleases=True)
        for name, version, file, sha256 in wheels
    ]
    artifact = file_of(case.patch.package, case.source)
    with Steps() as steps, store.held(steps.wait):  # for no longer than is needed, since all proofs share the cache
        builder = Builder(plan(all_plans()[0], conditions.runs_in), store, steps, Path(MIRROR) if MIRROR else None)
        if artifact is None:  # first, since it is what may be out of reach
            git_tree(builder, case, place / "git")
        env = proof_environment(builder, case.patch.package)
        files = builder.downloads.all([*beside, *([artifact] if artifact else [])])
    pristine, patched = trees(files[artifact.sha256] if artifact else place / "git", case, place)
    for wheel in beside:
        unpack_wheel(files[wheel.sha256], place / "beside")
    python = environment.python_of(env)
    interpreter, prefix = interpreter_of(python)
    places = {pristine: "TREE", patched: "TREE", place / "beside": "BESIDE", env: "ENV", prefix: "PYTHON"}
    proof = Proof(pristine, patched, python, case.source.version, (place / "beside",), places)
    _record(
        request.node, target=conditions.runs_in, interpreter=interpreter, emulated=conditions.emulated,
        pristine=tree_hash(pristine), patched=tree_hash(patched), runs={},
    )  # fmt: skip
    return proof


def trees(source: Path, case: Case, into: Path) -> tuple[Path, Path]:
    """The pristine and the patched tree of a wheel, an sdist or a git tree; the patched tree is a copy."""
    places = into / "pristine", into / "patched"
    if source.suffix == ".whl":
        patched_wheel(source, list(case.patches), into / source.name, into / "touched")
        return unpack_wheel(source, places[0]), unpack_wheel(into / source.name, places[1], like=(source, places[0]))
    if source.is_dir():
        pristine, patched = source, shutil.copytree(source, places[1], symlinks=True)
    else:
        for place in places:
            place.mkdir()
        pristine, patched = unpack(source, places[0]), unpack(source, places[1])
    apply_all(list(case.patches), patched)
    return pristine, patched


def unpack_wheel(file: Path, into: Path, like: tuple[Path, Path] | None = None) -> Path:
    """Unpack a wheel.

    like: another wheel and its tree; files that are the same in both are linked, because those of torch are gigabytes.
    """
    known = {}
    if like:
        with zipfile.ZipFile(like[0]) as archive:
            known = {info.filename: (info.CRC, info.file_size) for info in archive.infolist()}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            path = into / info.filename
            if like and not info.is_dir() and known.get(info.filename) == (info.CRC, info.file_size):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.hardlink_to(like[1] / info.filename)
            else:
                archive.extract(info, into)
    return into


def git_tree(builder: Builder, case: Case, into: Path) -> None:
    """Make the tree of a git release; where its repositories cannot be reached, the test is skipped."""
    try:
        builder.git.tree(case.label, case.source, into)
    except Refusal as refusal:
        if MIRROR is None and (repository := unreachable(case.source)):
            pytest.skip(f"unproven here: {repository} cannot be reached")
        raise AssertionError(str(refusal)) from None


def unreachable(source: Source) -> str | None:
    """The first repository of a source that does not answer; None if all do."""
    quiet = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    for repository in (source.repository, *(submodule.repository for submodule in source.submodules)):
        command = ["git", "-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30", "ls-remote", str(repository)]
        try:
            if subprocess.run([*command, "HEAD"], env=quiet, capture_output=True, check=False, timeout=60).returncode:
                return repository
        except subprocess.TimeoutExpired:
            return repository
    return None


def proof_environment(builder: Builder, package: str) -> Path:
    """An environment of a target's locked dependencies and ready-made wheels, without the package that is proved."""
    target = builder.plan.target
    try:
        python = environment.interpreter(target, builder.cache, builder.steps)
    except Refusal as refusal:
        pytest.skip(f"unproven here: {refusal}")
    pins = [pin for pin in builder.plan.pins if pin.release.kind == "wheel" and pin.name != package]
    artifacts = [*builder.plan.locked.artifacts, *(artifact for pin in pins if (artifact := artifact_of(pin)))]
    name = digest_of([python, *sorted(artifact.sha256 for artifact in artifacts)])[:16]
    final = builder.plan.root / "build" / "proofs" / name
    if not final.exists():
        files = builder.downloads.all(artifacts)
        locked = [(artifact, files[artifact.sha256]) for artifact in builder.plan.locked.artifacts]
        wheels = [Wheel(pin, files[pin.release.identity], pin.release.identity, {}) for pin in pins]
        partial = final.with_name(f".{name}")
        shutil.rmtree(partial, ignore_errors=True)
        environment.create(partial, python, locked, wheels, builder.cache)
        partial.rename(final)
    return final


@cache
def interpreter_of(python: Path) -> tuple[str, Path]:
    """Implementation and version of a Python, and where it is installed."""
    script = "import platform as p, sys; print(p.python_implementation(), p.python_version()); print(sys.base_prefix)"
    lines = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    return lines[0], Path(lines[1])


def _record(item: pytest.Item, **facts: Any) -> None:
    """Note what this test's run says of its release."""
    source = item.callspec.params["proof"].source  # type: ignore[attr-defined]
    entries = item.config.stash[RUNS].setdefault(item.path, {})
    known = entries.setdefault(source.identity, {"version": source.version, "source": source.identity, **facts})
    assert all(known[name] == value for name, value in facts.items() if name != "runs"), f"{facts} differs from {known}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """After a proof passed: keep what it printed, or compare it with the record."""
    result = yield
    proof = getattr(item, "funcargs", {}).get("proof")
    if isinstance(proof, Proof):
        case: Case = item.callspec.params["proof"]  # type: ignore[attr-defined]
        parameters = {name: value for name, value in item.callspec.params.items() if name != "proof"}  # type: ignore[attr-defined]
        name = item.originalname + (f"[{', '.join(f'{k}={v}' for k, v in parameters.items())}]" if parameters else "")  # type: ignore[attr-defined]
        entry = item.config.stash[RUNS][item.path][case.source.identity]
        entry["runs"][name] = proof.runs
        if not item.config.getoption("--record"):
            recorded = proofs.entry(proofs.written(case.patch), case.source) or {}
            before = {side: recorded.get(side) for side in ("pristine", "patched")}
            before["runs"] = recorded.get("runs", {}).get(name)
            now = {side: entry[side] for side in ("pristine", "patched")} | {"runs": proof.runs}
            assert now == before, f"{case.patch.name} on {case.label}: not what its record says: {proofs.AGAIN}."
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note which patches are not proved by this run."""
    report = yield
    params = getattr(getattr(item, "callspec", None), "params", {})
    if isinstance(case := params.get("proof"), Case):
        is_declared = case.source.version in proofs.conditions(item.path).unproven
        if report.failed or (report.skipped and not is_declared):
            item.config.stash[UNFINISHED][item.path] = f"{item.name} {report.outcome}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --record, write the record of each patch whose proof passed on every release."""
    if not session.config.getoption("--record"):
        return
    for test, entries in session.config.stash[RUNS].items():
        missing = [
            case.label for case in proofs.cases(*all_plans(), patch_of(test)) if case.source.identity not in entries
        ]
        if missing:
            session.config.stash[UNFINISHED].setdefault(test, f"{missing[0]} did not run")
        if test not in session.config.stash[UNFINISHED]:
            proofs.write(patch_of(test), list(entries.values()))
    if session.config.stash[UNFINISHED]:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--record"):
        for test in config.stash[RUNS] | config.stash[UNFINISHED]:
            reason = config.stash[UNFINISHED].get(test)
            name = proofs.record_of(patch_of(test)).name
            terminalreporter.line(
                f"not recorded: {name}: {reason}" if reason else f"recorded: {test.parent.name}/{name}"
            )
