"""Runs each patch's proof on every release that the patch applies to, and keeps or compares what it printed.

With --record, the outputs of proofs that passed are written beside their patches; without, they are compared with
those.
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
    said = proofs.conditions(request.path)
    if case.source.version in said.unproven:
        _record(request.node, unproven=said.unproven[case.source.version])
        pytest.skip(f"unproven here: {said.unproven[case.source.version]}")
    chosen = plan(all_plans()[0], said.runs_in)
    store = Cache()
    beside = [  # read from the module itself, because one proof may import another's
        Artifact(name, version, sha256, file)
        for versions, wheels in getattr(request.module, "BESIDE", {}).items()
        if SpecifierSet(versions).contains(case.source.version, prereleases=True)
        for name, version, file, sha256 in wheels
    ]
    artifact = file_of(case.patch.package, case.source)
    with Steps() as steps, store.held(steps.wait):  # for no longer than is needed, since all proofs share the cache
        builder = Builder(chosen, store, steps, Path(MIRROR) if MIRROR else None)
        if artifact is None:  # first, since it is what may be out of reach
            git_tree(builder, case, place / "git")
        env = proof_environment(builder, case.patch.package)
        files = builder.downloads.all([*beside, *([artifact] if artifact else [])])
    pristine, patched = trees(files[artifact.sha256] if artifact else place / "git", case, place)
    for one in beside:
        unpack_wheel(files[one.sha256], place / "beside")
    python = environment.python_of(env)
    interpreter, prefix = asked(python)
    places = {pristine: "TREE", patched: "TREE", place / "beside": "BESIDE", env: "ENV", prefix: "PYTHON"}
    made = Proof(pristine, patched, python, case.source.version, (place / "beside",), places)
    _record(
        request.node, target=said.runs_in, interpreter=interpreter, emulated=said.emulated,
        pristine=tree_hash(pristine), patched=tree_hash(patched), runs={},
    )  # fmt: skip
    return made


def trees(source: Path, case: Case, into: Path) -> tuple[Path, Path]:
    """The pristine and the patched tree of a wheel, an sdist or a git tree; what is patched is a copy of its own."""
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
    """Unpack a wheel. What is the same in another one, and its tree, is linked there: torch's files are gigabytes."""
    known = {}
    if like:
        with zipfile.ZipFile(like[0]) as other:
            known = {info.filename: (info.CRC, info.file_size) for info in other.infolist()}
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
    """A git release's tree; where its repositories cannot be had at all, the test is skipped."""
    try:
        builder.git.tree(case.label, case.source, into)
    except Refusal as refusal:
        if MIRROR is None and (silent := unreachable(case.source)):
            pytest.skip(f"unproven here: {silent} cannot be reached")
        raise AssertionError(str(refusal)) from None


def unreachable(source: Source) -> str | None:
    """The first repository of a source that does not answer, if one does not."""
    quiet = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    for repository in (source.repository, *(one.repository for one in source.submodules)):
        command = ["git", "-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30", "ls-remote", str(repository)]
        try:
            if subprocess.run([*command, "HEAD"], env=quiet, capture_output=True, check=False, timeout=60).returncode:
                return repository
        except subprocess.TimeoutExpired:
            return repository
    return None


def proof_environment(builder: Builder, package: str) -> Path:
    """A target's locked dependencies and ready-made wheels, without the package proved; nothing in it is compiled."""
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
def asked(python: Path) -> tuple[str, Path]:
    """Implementation and version of a Python, and where it is installed."""
    script = "import platform as p, sys; print(p.python_implementation(), p.python_version()); print(sys.base_prefix)"
    said = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    return said[0], Path(said[1])


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
    held = getattr(item, "funcargs", {}).get("proof")
    if isinstance(held, Proof):
        case: Case = item.callspec.params["proof"]  # type: ignore[attr-defined]
        given = {name: value for name, value in item.callspec.params.items() if name != "proof"}  # type: ignore[attr-defined]
        name = item.originalname + (f"[{', '.join(f'{k}={v}' for k, v in given.items())}]" if given else "")  # type: ignore[attr-defined]
        fresh = item.config.stash[RUNS][item.path][case.source.identity]
        fresh["runs"][name] = held.runs
        if not item.config.getoption("--record"):
            kept = proofs.entry(proofs.written(case.patch), case.source) or {}
            was = {side: kept.get(side) for side in ("pristine", "patched")} | {"runs": kept.get("runs", {}).get(name)}
            now = {side: fresh[side] for side in ("pristine", "patched")} | {"runs": held.runs}
            assert now == was, f"{case.patch.name} on {case.label}: not what its record says: {proofs.AGAIN}."
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note which patches are not proved by this run."""
    report = yield
    params = getattr(getattr(item, "callspec", None), "params", {})
    if isinstance(case := params.get("proof"), Case):
        explicit = case.source.version in proofs.conditions(item.path).unproven
        if report.failed or (report.skipped and not explicit):
            item.config.stash[UNFINISHED][item.path] = f"{item.name} {report.outcome}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --record, write the record of each patch whose proof passed on every release."""
    if not session.config.getoption("--record"):
        return
    for test, entries in session.config.stash[RUNS].items():
        missing = [
            one.label for one in proofs.cases(*all_plans(), patch_of(test)) if one.source.identity not in entries
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
            why = config.stash[UNFINISHED].get(test)
            name = proofs.record_of(patch_of(test)).name
            terminalreporter.line(f"not recorded: {name}: {why}" if why else f"recorded: {test.parent.name}/{name}")
