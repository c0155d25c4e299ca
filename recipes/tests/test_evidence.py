"""Evidence: claims are read from source, raw logs hold what was run, and what changed since a run is told."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.errors import Refusal
from recipes.files import ROOT, sha256_of
from recipes.prove import evidence, promotion, records, smoke
from recipes.prove.claims import Room
from recipes.tests.conftest import Checkout
from recipes.tests.rooms import checkout_room

CLAIMS = """
from claims import proves
import references
from fused_ops import table

SHAPE = (3, 5)

@proves("one is one", seed="A09")
def test_one(measured):
    assert references.one(SHAPE) == 1

@proves("two is two", seed=("B01", "B02"))
def test_two():
    assert table() == 2
"""
FILES = {
    "test_torch.py": CLAIMS,
    "references.py": """
def one(shape):
    return inner()

def inner():
    return 1

def other():
    return 3
""",
    "fused_ops.py": "def table():\n    return 2\n",
    "conftest.py": """
import pytest

@pytest.fixture(autouse=True)
def seeded():
    pass

@pytest.fixture
def measured():
    return {}
""",
    "claims.py": "def proves(*_, **__):\n    return lambda test: test\n",
}
ONE, TWO = "test_torch.py::test_one", "test_torch.py::test_two"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with nothing but smoke tests."""
    for name, text in FILES.items():
        (tmp_path / "smoke_tests").mkdir(exist_ok=True)
        (tmp_path / "smoke_tests" / name).write_text(text)
    return tmp_path


def test_claims_are_read_without_importing(root: Path) -> None:
    claims = Room(root).claims
    assert [(claim.sentence, claim.seeds) for claim in claims.values()] == [
        ("one is one", ("A09",)),
        ("two is two", ("B01", "B02")),
    ]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (b"one = 1\ntwo = (1 2)\n", r"broken\.py, line 2, is not Python \(invalid syntax\): correct it\.$"),
        (b"# \xe9", r"broken\.py cannot be read as Python \(.*utf-8.*\): correct it\.$"),
    ],
)
def test_code_that_is_no_python_is_refused(root: Path, code: bytes, message: str) -> None:
    (root / "smoke_tests" / "broken.py").write_bytes(code)
    with pytest.raises(Refusal, match=message):
        Room(root).key(ONE)


@pytest.fixture
def chosen() -> Plan:
    return plan(Catalogue(), "cpu")


def record(chosen: Plan, **changes: Any) -> dict[str, Any]:
    """Evidence of this checkout with one claim, with some fields changed."""
    claim = next(iter(checkout_room().claims.values()))
    row: dict[str, Any] = {
        "id": f"{claim.id}[row]",
        "claim": claim.sentence,
        "outcome": "proved",
        "key": checkout_room().key(claim.id),
        "package": "torch", "seed": [], "seconds": 0.1, "reason": "", "measured": {},
    }  # fmt: skip
    return {"stack": changes.pop("stack", chosen.stack), "claims": [row | changes]}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        pytest.param({}, "proved", id="current"),
        pytest.param({"outcome": "refuted"}, "refuted", id="refuted"),
        pytest.param({"outcome": "unproven"}, "unproven", id="unproven"),
        pytest.param({"key": "0" * 64}, "changed", id="another test"),
        pytest.param({"stack": "0" * 64}, "changed", id="another stack"),
        pytest.param({"id": "test_gone.py::test_gone"}, "changed", id="no such test"),
    ],
)
def test_state_of_a_run(chosen: Plan, changes: dict[str, str], state: str) -> None:
    run, room = record(chosen, **changes), checkout_room()
    assert evidence.states(chosen, room, run, run["claims"]) == [(run["claims"][0], state)]
    why = {"the stack"} if "stack" in changes else {"what it can reach"}
    assert set(evidence.changes(chosen, room, run)) == (why if state == "changed" else set())


def test_the_versions_of_a_claim_decide_where_it_runs_alone(root: Path) -> None:
    def key_with(more: str) -> str | None:
        (root / "smoke_tests" / "test_torch.py").write_text(CLAIMS.replace(', seed="A09")', f', seed="A09"{more})'))
        return Room(root).key(ONE)

    assert key_with("") == key_with(', since="2.4"') == key_with(', since="2.1", until="3.0"')
    assert key_with("") != key_with(', package="apex"')


@pytest.mark.parametrize(("since", "until"), [("99", ""), ("0", "0.1")], ids=["newer", "older"])
def test_a_claim_about_other_versions_now_has_changed(
    chosen: Plan, monkeypatch: pytest.MonkeyPatch, since: str, until: str
) -> None:
    run, room = record(chosen), checkout_room()
    (row,) = run["claims"]
    identity = row["id"].partition("[")[0]
    monkeypatch.setitem(room.claims, identity, dataclasses.replace(room.claims[identity], since=since, until=until))
    assert evidence.states(chosen, room, run, run["claims"]) == [(row, "changed")]


def test_the_worst_outcome_counts() -> None:
    assert evidence.worst([{"outcome": "proved"}, {"outcome": "unproven"}]) == "unproven"
    assert evidence.worst([{"outcome": "refuted"}, {"outcome": "unproven"}]) == "refuted"


def test_evidence_without_its_raw_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cpu--x86-64.json"
    log = path.with_suffix(".log")
    log.write_text("proved\n")
    machine = {"name": "x86-64", "cpu": "c"}
    whole: dict[str, Any] = {"name": "cpu--x86-64", "target": "cpu", "stack": "s", "hardware": machine}
    whole |= {"claims": [], "packages": {}}
    whole |= {"started": "2026-11-23T00:00:00+00:00", "commit": "c", "files": {}, "definitions": {}}
    whole["log_sha256"] = sha256_of(log)
    path.write_text(json.dumps(whole))
    assert evidence.read(path)
    for missing in whole:
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != missing}))
        with pytest.raises(Refusal, match=missing):
            evidence.read(path)
    path.write_text(json.dumps(whole))
    log.write_text("proved more\n")
    with pytest.raises(Refusal, match="raw log"):
        evidence.read(path)
    log.unlink()
    with pytest.raises(Refusal, match="raw log"):
        evidence.read(path)


def test_nothing_is_promoted_before_a_run(chosen: Plan, tmp_path: Path) -> None:
    elsewhere = Plan(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock)
    with pytest.raises(Refusal, match="holds no evidence"):
        promotion.promote(elsewhere)


def test_a_user_without_a_home_keeps_every_slash(chosen: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert smoke.without_paths(chosen, "3/4 of /usr/lib") == "3/4 of /usr/lib"
    monkeypatch.setenv("HOME", "/home/someone")
    assert smoke.without_paths(chosen, "/home/someone/x") == "~/x"


@pytest.mark.parametrize("place", ["/srv/env", "../env", "./build/cpu/env", "/opt/python/3.12.1"])
def test_no_place_of_a_machine_stays(chosen: Plan, place: str) -> None:
    printed = f"{place}/lib/python3.12/site-packages/torch/_ops.py:7: in call; '{chosen.root}/smoke_tests/claims.py'"
    cleaned = "ENV/lib/python3.12/site-packages/torch/_ops.py:7: in call; './smoke_tests/claims.py'"
    assert smoke.without_paths(chosen, printed) == cleaned
    built = f"Error: {place}/partial/build/apex-23.05/csrc/a.cu:12 in function b; outcomes in {place}/outcomes.json"
    assert (
        smoke.without_paths(chosen, built) == "Error: apex-23.05/csrc/a.cu:12 in function b; outcomes in outcomes.json"
    )


HARDWARE = {"name": "x86-64", "arch": "x86-64", "cpu": "some CPU", "gpus": []}


@pytest.fixture
def away(chosen: Plan, tmp_path: Path) -> Path:
    """The folder of a run elsewhere, with a manifest without packages and a log."""
    folder = tmp_path / "away"
    folder.mkdir()
    (folder / "smoke.log").write_text("proved\n")
    (folder / "manifest.json").write_text(json.dumps(manifest_of(chosen)))
    return folder


def manifest_of(chosen: Plan, **changes: Any) -> dict[str, Any]:
    """The manifest of a target's environment, without packages, and with some fields changed."""
    return {"target": chosen.target.name, "stack": chosen.stack, "packages": {}} | changes


@pytest.fixture
def here(chosen: Plan, tmp_path: Path) -> Plan:
    """The plan in a checkout whose tests can be changed."""
    shutil.copytree(chosen.root / "smoke_tests", tmp_path / "smoke_tests", ignore=shutil.ignore_patterns("evidence"))
    return Plan(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock)


def outcomes_away(chosen: Plan, tmp_path: Path) -> dict[str, Any]:
    """The outcomes of one claim, which read the references."""
    ran = record(chosen)
    (row,) = ran["claims"]
    row["measured"] = {"limit": f"raised in {tmp_path}/partial/build/apex-23.05/a.cu:3", "error": 0.5}
    files = {"operators/references.py": sha256_of(tmp_path / "smoke_tests" / "operators" / "references.py")}
    return {"target": "cpu", "files": files, "hardware": HARDWARE, "python": "3.12.1", **ran}


def test_a_run_elsewhere_is_of_these_tests(chosen: Plan, here: Plan, away: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"outcomes\.json is missing: bring it"):
        smoke.bring(here, away)
    outcomes = outcomes_away(chosen, tmp_path)
    settings = outcomes | {"ran": {"data": [f"pytest.ini:{'0' * 64}"]}}
    (away / "outcomes.json").write_text(json.dumps(settings))
    with pytest.raises(Refusal, match=r"come from other tests than .* \(pytest\.ini\)"):
        smoke.bring(here, away)
    (tmp_path / "smoke_tests" / "operators" / "references.py").write_text("# another\n")
    (away / "outcomes.json").write_text(json.dumps(outcomes))
    with pytest.raises(Refusal, match=r"come from other tests than .* \(operators/references\.py\)"):
        smoke.bring(here, away)


def test_a_damaged_run_elsewhere_is_refused(chosen: Plan, here: Plan, away: Path, tmp_path: Path) -> None:
    """The evidence that a sound run wrote, without paths of its machine, stays as it is."""
    outcomes = outcomes_away(chosen, tmp_path)
    (away / "outcomes.json").write_text(json.dumps(outcomes))
    smoke.bring(here, away)
    (path,) = (tmp_path / "build").rglob("cpu--x86-64.json")
    measured = json.loads(path.read_text())["claims"][0]["measured"]
    assert measured == {"limit": "raised in apex-23.05/a.cu:3", "error": 0.5}
    for name, text, why in (
        ("outcomes.json", '{"target": "c', "not valid JSON"),
        ("outcomes.json", "{}", r"damaged or incomplete \(target"),
        ("outcomes.json", json.dumps(outcomes | {"hardware": HARDWARE | {"name": "../up"}}), r".*\(hardware.name"),
        ("outcomes.json", json.dumps(outcomes | {"claims": ["x"]}), r".*\(claims.0"),
        ("outcomes.json", json.dumps({"foreign": True}), "about an environment that Fusebox did not build"),
        ("outcomes.json", json.dumps(outcomes | {"target": "ms-amp"}), "for the target ms-amp: bring the file of cpu"),
        ("manifest.json", "[]", "damaged or incomplete"),
        ("manifest.json", '{"packages": {"torch": {}}}', r".*\(packages.torch.built_with"),
    ):
        (away / name).write_text(text)
        with pytest.raises(Refusal, match=rf"{name} is {why}"):
            smoke.bring(here, away)
    assert json.loads(path.read_text())["claims"][0]["measured"] == measured  # the earlier evidence is unchanged


@pytest.mark.parametrize("other", [{"stack": "0" * 64}, {"target": "ms-amp"}])
def test_a_run_elsewhere_has_the_manifest_of_its_environment(
    chosen: Plan, here: Plan, away: Path, tmp_path: Path, other: dict[str, str]
) -> None:
    """The packages that evidence lists are those that the claims ran with."""
    (away / "outcomes.json").write_text(json.dumps(outcomes_away(chosen, tmp_path)))
    (away / "manifest.json").write_text(json.dumps(manifest_of(chosen, **other)))
    with pytest.raises(Refusal, match=r"manifest\.json are of different environments .*: bring both from one run"):
        smoke.bring(here, away)
    assert not list((tmp_path / "build").rglob("*.json"))


def test_a_run_in_an_image_names_it_and_what_ran_it(chosen: Plan, here: Plan, away: Path, tmp_path: Path) -> None:
    outcomes = {"target": "cpu", "files": {}, "hardware": HARDWARE, "python": "3.12.1", **record(chosen)}
    image = f"example.org/fusebox@sha256:{'0' * 64}"
    base = {"name": "debian", "digest": "sha256:1"}
    labels = {f"org.opencontainers.image.base.{key}": value for key, value in base.items()}
    about = {
        "image": image, "labels": {"fusebox.target": "cpu", **labels}, "user": "10001:10001",
        "runtime": {"name": "crun", "version": "1.8"}, "refused": {"enroot": "it is not installed"},
    }  # fmt: skip
    (away / "outcomes.json").write_text(json.dumps(outcomes))
    (away / "image.json").write_text(json.dumps(about))
    with pytest.raises(Refusal, match=r"smoke\.log does not begin with 'image example\.org.* in crun 1\.8, as 10001"):
        smoke.bring(here, away)
    (away / "smoke.log").write_text(f"image {image} in crun 1.8, as 10001:10001\nproved\n")
    smoke.bring(here, away)
    (path,) = (tmp_path / "build").rglob("*.json")
    run = json.loads(path.read_text())
    assert path.name == "cpu--x86-64--image.json"  # beside the evidence of the bare machine
    assert (run["image"], run["runtime"]["name"], run["base"]) == (image, "crun", "debian@sha256:1")
    assert run["refused"] == {"enroot": "it is not installed"}
    for changes, why in (
        ({"image": "fusebox:cpu"}, r"image\.json is damaged or incomplete \(image"),
        ({"labels": {"fusebox.target": "ms-amp"}}, "is about an image of the target ms-amp: bring the file of cpu"),
    ):
        (away / "image.json").write_text(json.dumps(about | changes))
        with pytest.raises(Refusal, match=why):
            smoke.bring(here, away)


DOCSTRING, CODE = ('"""', '"""In other words: '), ("return ", "return 1 and ")


@pytest.mark.parametrize(("edit", "is_refused"), [(DOCSTRING, False), (CODE, True)])
def test_a_run_elsewhere_is_kept_if_only_a_docstring_has_changed_since(
    chosen: Plan, here: Plan, tmp_path: Path, edit: tuple[str, str], is_refused: bool
) -> None:
    """The text that ran is read from git's history."""
    references = tmp_path / "smoke_tests" / "operators" / "references.py"
    files = {"operators/references.py": sha256_of(references)}
    outcomes = {"target": "cpu", "files": files, "hardware": HARDWARE, "python": "3.12.1", **record(chosen)}
    for name, text in (("smoke.log", "proved\n"), ("manifest.json", json.dumps(manifest_of(chosen)))):
        (tmp_path / name).write_text(text)
    (tmp_path / "outcomes.json").write_text(json.dumps(outcomes))
    ran = references.read_text()
    references.write_text(ran.replace(*edit, 1))
    with pytest.raises(Refusal, match=r"come from other tests than .* \(operators/references\.py\)"):
        smoke.bring(here, tmp_path)  # git does not have its text
    references.write_text(ran)
    committed(tmp_path)
    references.write_text(ran.replace(*edit, 1))
    if is_refused:
        with pytest.raises(Refusal, match=r"come from other tests than .* \(operators/references\.py\)"):
            smoke.bring(here, tmp_path)
    else:
        smoke.bring(here, tmp_path)


@pytest.mark.parametrize(("edit", "is_refused"), [(DOCSTRING, False), (CODE, True)])
def test_a_run_of_uncommitted_tests_is_promoted_if_only_a_docstring_has_changed_since(
    chosen: Plan, tmp_path: Path, run_here: Callable[..., Path], edit: tuple[str, str], is_refused: bool
) -> None:
    here = Plan(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock)
    harness = tmp_path / "smoke_tests" / "claims.py"
    path = run_here("cpu--x86-64")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {"claims.py": sha256_of(harness)}}))
    harness.write_text(harness.read_text().replace(*edit, 1))
    committed(tmp_path)
    if is_refused:
        with pytest.raises(Refusal, match="comes from tests that are not committed"):
            promotion.promote(here)
    else:
        assert [path.name for path in promotion.promote(here)] == ["cpu--x86-64.json", "cpu--x86-64.log"]


TWO_CUDNNS = "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"


@pytest.mark.parametrize(
    ("outcome", "log", "is_named"),
    [
        ({"outcome": "refuted", "reason": "RuntimeError: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"}, "", True),
        (
            {"outcome": "refuted", "reason": "AssertionError: 0.5 > 0.1"},
            "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH",
            False,
        ),
        ({}, "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", False),
    ],
)
def test_a_run_with_a_refuted_claim_names_a_known_cause(
    chosen: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: dict[str, str], log: str, is_named: bool
) -> None:
    """By the claim's own reason, not by what others printed."""
    for name in ("smoke_tests", "recipes"):
        shutil.copytree(chosen.root / name, tmp_path / name, ignore=shutil.ignore_patterns("evidence", "tests"))
    ran = record(chosen)
    ran["claims"][0] |= outcome
    (tmp_path / "smoke.log").write_text(f"{log}\n")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest_of(chosen)))
    (tmp_path / "outcomes.json").write_text(
        json.dumps({"target": "cpu", "files": {}, "hardware": HARDWARE, "python": "3.12.1", **ran})
    )
    smoke.bring(Plan(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock), tmp_path)
    assert ("cause: parts of two versions of cuDNN" in capsys.readouterr().out) == is_named


def committed(folder: Path) -> None:
    """Make a git checkout of a folder, with all of it committed."""
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "tests"]):
        subprocess.run([*git, *words], check=True)


@pytest.fixture
def run_here(chosen: Plan, tmp_path: Path) -> Callable[..., Path]:
    """Writes the evidence of a run of one claim in a checkout below tmp_path, as `smoke` leaves it."""
    shutil.copytree(chosen.root / "smoke_tests", tmp_path / "smoke_tests", ignore=shutil.ignore_patterns("evidence"))
    folder = tmp_path / "build" / "cpu" / "evidence"
    folder.mkdir(parents=True)

    def write(name: str, at: str = "2026-11-23T00:00:00+00:00", log: str | None = None, **changes: Any) -> Path:
        whole: dict[str, Any] = {"name": name, "target": "cpu", "hardware": {"name": "x86-64", "cpu": "c"}}
        whole |= {
            "started": at,
            "commit": "",
            "files": {},
            "definitions": {},
            "packages": {},
            **record(chosen, **changes),
        }
        line = evidence.imported("printed").line(whole["claims"][0])
        (folder / f"{name}.log").write_text(log.format(line=line) if log else f"{line}\n")
        whole["log_sha256"] = sha256_of(folder / f"{name}.log")
        (folder / f"{name}.json").write_text(json.dumps(whole))
        return folder / f"{name}.json"

    return write


def test_every_run_is_promoted_and_none_replaces_a_newer_one(
    chosen: Plan, tmp_path: Path, run_here: Callable[..., Path]
) -> None:
    """What changed since a run is shown, and holds nothing up."""
    here = Plan(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock)
    run_here("cpu--other", key="0" * 64)
    path = run_here("cpu--x86-64")
    message = "comes from tests that are not committed: commit smoke_tests/, and promote again"
    with pytest.raises(Refusal, match=message):
        promotion.promote(here)
    committed(tmp_path)
    names = [path.name for path in promotion.promote(here)]
    assert names == ["cpu--other.json", "cpu--other.log", "cpu--x86-64.json", "cpu--x86-64.log"]
    promoted = json.loads((tmp_path / "smoke_tests" / "evidence" / path.name).read_text())
    assert promoted["commit"] == smoke.commit_of(tmp_path) and len(promoted["commit"]) >= 7
    run_here("cpu--x86-64", at="2026-11-22T00:00:00+00:00", seconds=9.5)
    promotion.promote(here)
    assert json.loads((tmp_path / "smoke_tests" / "evidence" / path.name).read_text()) == promoted


def test_a_promotion_that_was_killed_is_made_again(chosen: Plan, tmp_path: Path, run_here: Callable[..., Path]) -> None:
    """What it left may be the log of one run beside the outcomes of another."""
    here = Plan(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock)
    path = run_here("cpu--x86-64", log="50 %\r100 %\n{line}\n")
    committed(tmp_path)
    promotion.promote(here)
    final = tmp_path / "smoke_tests" / "evidence" / path.name
    for left in ("", "half a"):
        final.with_suffix(".log").write_text(left)
        with pytest.raises(Refusal, match=r"raw log cpu--x86-64\.log is missing or was changed"):
            evidence.read(final)
        promotion.promote(here)
        assert evidence.read(final)["name"] == "cpu--x86-64"


def test_foreign_evidence_is_not_promoted(chosen: Plan, tmp_path: Path, run_here: Callable[..., Path]) -> None:
    """Not even if its target is changed by hand."""
    path = run_here("cpu--x86-64")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"foreign": True}))
    committed(tmp_path)
    with pytest.raises(Refusal, match=r"an environment that Fusebox did not build.*run `nox -s \"smoke\(TARGET\)"):
        promotion.promote(Plan(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock))


@pytest.mark.parametrize(
    ("log", "runs"),
    [
        ("{line}\n", 1),
        ("{line}\ntarget cpu on x86-64: 1 proved, 0 refuted, 0 unproven\n{line}\n", 2),
        ("{line}\n{line}\n", None),
        ("proved    torch         something else (0.1 s)\n", None),
        ("nothing\n", None),
    ],
)
def test_a_raw_log_holds_the_outcomes_line_by_line(
    chosen: Plan, tmp_path: Path, run_here: Callable[..., Path], log: str, runs: int | None
) -> None:
    here = Plan(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock)
    path = run_here("cpu--x86-64", log=log)
    committed(tmp_path)
    if runs is None:
        with pytest.raises(Refusal, match=r"cpu--x86-64\.log does not contain the outcomes beside it"):
            promotion.promote(here)
        return
    promotion.promote(here)
    assert json.loads((tmp_path / "smoke_tests" / "evidence" / path.name).read_text()).get("runs_in_log", 1) == runs


def test_what_an_interrupted_run_did_not_reach_is_in_no_log(tmp_path: Path) -> None:
    run = evidence.promoted(ROOT, "cpu")[0]
    log, row = ROOT / "smoke_tests" / "evidence" / "cpu--x86-64.log", {**run["claims"][0], "outcome": "unproven"}
    assert promotion.compare_log(log, [*run["claims"], {**row, "reason": "not run"}]) == run.get("runs_in_log", 1)
    with pytest.raises(Refusal, match="does not contain the outcomes beside it"):
        promotion.compare_log(log, [*run["claims"], {**row, "reason": "no GPU here"}])
    with pytest.raises(Refusal, match="does not contain the outcomes beside it"):
        promotion.compare_log(log, [*run["claims"], {**row, "outcome": "proved", "reason": "not run"}])


def test_the_committed_evidence_is_what_its_logs_hold() -> None:
    paths = sorted((ROOT / "smoke_tests" / "evidence").glob("*--*.json"))
    assert len(paths) >= len({path.name.partition("--")[0] for path in paths}) > 4
    for path in paths:
        run = evidence.read(path)
        assert promotion.compare_log(path.with_suffix(".log"), run["claims"]) == run.get("runs_in_log", 1), path
        assert run["commit"] and run["files"], path


def target_in(root: Path, stack: str = "1") -> Any:
    """The plan of a made-up target, cu."""
    return SimpleNamespace(root=root, target=SimpleNamespace(name="cu"), stack=stack, stacks={stack})


def test_a_record_names_the_commit_of_its_program(tmp_path: Path) -> None:
    """A training's report, say: as long as nothing changes that its program can reach."""
    room = tmp_path / "smoke_tests"
    (room / "training").mkdir(parents=True)
    (room / "training" / "parity.py").write_text("from training.pretrain import step\n\ndef run():\n    step()\n")
    (room / "training" / "pretrain.py").write_text("def step():\n    return 1\n\ndef shown():\n    return 1\n")
    path = room / "evidence" / "training" / "cu--H200--tiny.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    cu = target_in(tmp_path)
    assert [(noted.commit, noted.changed) for noted in records.every(tmp_path, {"cu": cu})] == [("", "record")]
    with pytest.raises(Refusal, match="tests that are not committed: commit smoke_tests/, and record it again"):
        records.note(cu, path)
    committed(tmp_path)
    for wrong in (tmp_path / "cu--H200--tiny.json", path.with_name("gone--H200--tiny.json"), path.with_name("x.txt")):
        with pytest.raises(Refusal, match=r"is not a record below .*: put it there under such a name"):
            records.note(cu, wrong)
    of_another = path.with_name("ms--H200--tiny.json")
    of_another.write_text("{}")
    with pytest.raises(Refusal, match=r'is a record of ms, not of cu: run `nox -s "promote\(ms\)"` with it'):
        records.note(cu, of_another)
    of_another.unlink()
    assert records.note(cu, path) == "training/cu--H200--tiny.json"
    (noted,) = records.every(tmp_path, {"cu": cu})
    assert (noted.commit, noted.changed, noted.program) == (smoke.commit_of(tmp_path), "", "training/parity.py")
    for plans in ({}, {"cu": target_in(tmp_path, stack="2")}):
        assert [noted.changed for noted in records.every(tmp_path, plans)] == ["stack"]
    path.write_text('{"end": 1.5}')
    assert [noted.changed for noted in records.every(tmp_path, {"cu": cu})] == ["record"]
    path.write_text("{}")
    program = room / "training" / "pretrain.py"
    edits = (
        ("shown():\n    return 1", "shown():\n    return 2", ""),
        ("step():\n    return 1", "step():\n    return 3", "program"),
    )
    for old, new, changed in edits:
        program.write_text(program.read_text().replace(old, new))
        assert [noted.changed for noted in records.every(tmp_path, {"cu": cu})] == [changed]


def test_each_run_in_a_file_of_rows_names_the_commit_of_its_program(tmp_path: Path) -> None:
    """Rows that are measured again stand beside older ones, which an older program measured."""
    program = tmp_path / "smoke_tests" / "bench" / "__main__.py"
    program.parent.mkdir(parents=True)
    path = tmp_path / "smoke_tests" / "evidence" / "bench" / "cu--H200.jsonl"
    path.parent.mkdir(parents=True)
    commits, cu = [], target_in(tmp_path)
    for shard, value in (("first", 1), ("second", 2), ("third", 2)):
        program.write_text(f"def run():\n    return {value}\n")
        with path.open("a") as file:
            for key in ("shard", "linear/x", "linear/y"):
                stack = "1" if shard == "third" else "0"
                of_run = {"target": "cu", "stack": stack} if key == "shard" else {"ms": 1.5}
                file.write(json.dumps({"key": key, "shard": shard, **of_run}) + "\n")
        committed(tmp_path)
        commits.append(smoke.commit_of(tmp_path))
        records.note(cu, path)
    noted = records.every(tmp_path, {"cu": cu})
    assert [(each.shard, each.commit, each.changed) for each in noted] == [
        ("first", commits[0], "program"),
        ("second", commits[1], "stack"),
        ("third", commits[2], ""),
    ]
    assert [runs for _, runs in records.counted(noted)] == ["1 of 3 runs"] * 3
    assert records.counted(noted[1:2]) == [(dataclasses.replace(noted[1], shard=""), "")]
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:4] + rows[5:]))  # a cell that was measured again stands in a later run alone
    assert records.every(tmp_path, {"cu": cu}) == noted
    path.write_text("".join([*rows[:4], rows[4].replace("1.5", "1.4"), *rows[5:]]))
    for _ in range(2):
        assert [each.changed for each in records.every(tmp_path, {"cu": cu})] == ["program", "record", ""]
        records.note(cu, path)  # does not take it for measured by the program of that run
    for damaged in ("{", "[]", "{}", '{"key": "shard"}'):
        path.write_text(f"{damaged}\n")
        with pytest.raises(Refusal, match=r"H200\.jsonl does not hold bench's rows .*: promote the rows again"):
            records.every(tmp_path, {"cu": cu})


@pytest.mark.parametrize(
    ("name", "gpus", "expected"), [("H200", 1, "H200"), ("H200", 4, "4xH200"), ("x86-64", 4, "x86-64")]
)
def test_a_machine_of_several_gpus_has_evidence_of_its_own(name: str, gpus: int, expected: str) -> None:
    assert evidence.machine_name({"name": name, "arch": "x86-64", "gpus": [{}] * gpus}, "x") == expected


def test_what_was_built_is_kept_of_this_stack_only(checkout: Checkout, tmp_path: Path) -> None:
    built = plan(Catalogue(checkout.root), "cu12.1-torch2.1")
    with pytest.raises(Refusal, match=r'manifest\.json is missing: run `nox -s "build\(cu12\.1-torch2\.1\)"` first'):
        promotion.keep_built(built, None)
    with pytest.raises(Refusal, match=r"manifest\.json is missing: bring it"):
        promotion.keep_built(built, tmp_path)
    manifest: dict[str, Any] = {"target": built.target.name, "stack": built.stack, "packages": {}}
    for changes in ({"stack": "0" * 64}, {"target": "ms-amp"}):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        with pytest.raises(Refusal, match="another state of this checkout"):
            promotion.keep_built(built, tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    written = checkout.root / promotion.keep_built(built, tmp_path)
    assert json.loads(written.read_text()) == manifest


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({}, None, id="all proved"),
        pytest.param({"outcome": "refuted"}, "is refuted in", id="refuted"),
        pytest.param({"outcome": "unproven"}, "is unproven in", id="unproven"),
        pytest.param({"key": "0" * 64}, "is changed in", id="changed"),
        pytest.param(None, "was not run in", id="missing"),
    ],
)
def test_a_floating_tag_moves_only_where_every_claim_is_proved(
    chosen: Plan, monkeypatch: pytest.MonkeyPatch, change: dict[str, str] | None, why: str | None
) -> None:
    room = checkout_room()
    rows: list[dict[str, Any]] = [
        {"id": claim.id, "claim": claim.sentence, "outcome": "proved", "key": room.key(claim.id)}
        for claim in room.claims.values()
        if claim.is_expected(chosen, room)
    ]
    assert len(rows) > 10
    rows = rows[1:] if change is None else [rows[0] | change, *rows[1:]]
    run = {"name": "cpu--x86-64", "stack": chosen.stack, "claims": rows, "packages": {}}
    monkeypatch.setattr(evidence, "promoted", lambda root, target: [run])
    reason = evidence.against_moving(chosen)
    assert reason is None if why is None else reason and why in reason
    whole = {**run, "name": "cpu--2xH200", "claims": [row | {"outcome": "proved"} for row in rows]}
    monkeypatch.setattr(evidence, "promoted", lambda root, target: [run, whole])
    if change == {"outcome": "unproven"}:  # another run shows what this one could not
        assert evidence.against_moving(chosen) is None
    else:
        assert evidence.against_moving(chosen) == reason
    monkeypatch.setattr(evidence, "promoted", lambda root, target: [])
    assert evidence.against_moving(chosen) == "nothing of this target was ever proved"


def test_wheels_of_some_architectures_alone_move_no_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plan(Catalogue(), "cu12.1-torch2.1")  # its committed run has wheels for sm 9.0, the image also for 8.0
    (run,) = evidence.promoted(chosen.root, chosen.target.name)
    proved = {**run, "claims": [row for row in run["claims"] if row["outcome"] == "proved"]}
    monkeypatch.setattr(evidence, "promoted", lambda root, target: [proved])
    reason = evidence.against_moving(chosen)
    assert reason and reason.endswith("H200, compiled for some of its GPUs only")


def test_wheels_with_kernels_for_some_architectures_are_of_the_whole_stack() -> None:
    """As those of a package that exists for some GPUs only, where nothing else is compiled."""
    whole = plan(Catalogue(), "cu13.2-torch2.15")
    run = {"stack": whole.stack, "packages": {"flash-attn-3": {"built_with": {"sm": ["9.0"]}}}}
    assert evidence.built_for(whole, run) == whole
    narrowed = plan(Catalogue(), "cu13.2-torch2.15", ["9.0"])
    assert evidence.built_for(whole, {**run, "stack": narrowed.stack}).stack == narrowed.stack


def test_the_claims_of_a_run_are_those_that_are_expected(chosen: Plan) -> None:
    """What is read from the source, without importing it, is what pytest selected for the committed run.

    Of files that have changed since, claims may be newer than the run.
    """
    room, (run,) = checkout_room(), evidence.promoted(chosen.root, "cpu")
    ran = {row["id"].split("[")[0] for row in run["claims"]}
    expected = {claim.id for claim in room.claims.values() if claim.is_expected(chosen, room)}
    known = {name for name in ran if name in room.claims and "patch" not in room.claims[name].rows}
    newer = {name for name in expected - known if name.partition("::")[0] in room.others_than(run["files"])}
    assert len(known) > 60
    assert expected - newer == known


TABLE = """
from typing import Any, NamedTuple, Tuple

class Entry(NamedTuple):
    call: Any
    cpu: Tuple[str, ...] = ()
    cuda: Tuple[str, ...] = ()
    forward: str = ""
    since: str = "0"
    until: str = ""

HALF = ("bfloat16",)
OPERATORS: Any = {
    "plain": {"torch": Entry(print, HALF, HALF)},
    "on_gpu": {"torch": Entry(print, (), HALF, "kernel")},
    "later": {"torch.new": Entry(print, HALF, since="99")},
    "over": {"torch.old": Entry(print, HALF, until="2.0")},
    "elsewhere": {"apex": Entry(print, HALF, HALF)},
    "added": {},
}
"""
ADAPTER = """
from smoke_tests.operators.table import HALF, implements

@implements("added", "apex", cuda=HALF, forward="kernel")
def apex_added(): ...
"""


@pytest.mark.parametrize(
    ("target", "options", "has"),
    [
        ("cpu", {}, {"plain"}),
        ("cpu", {"only": "apex"}, set()),
        ("cu13.0-torch2.11", {}, {"plain", "on_gpu", "elsewhere", "added"}),
        ("cu13.0-torch2.11", {"only": "apex"}, {"elsewhere", "added"}),
        ("cu13.0-torch2.11", {"seen": True}, {"on_gpu", "added"}),
    ],
)
def test_a_target_has_an_operator_whose_version_and_dtypes_fit(
    tmp_path: Path, target: str, options: dict[str, Any], has: set[str]
) -> None:
    """As conftest.py makes the rows of a test: from the table and the adapters, here read without importing them."""
    table = tmp_path / "smoke_tests" / "operators" / "table.py"
    table.parent.mkdir(parents=True)
    table.write_text(TABLE)
    table.with_name("apex_adapter.py").write_text(ADAPTER)
    room, chosen = Room(tmp_path), plan(Catalogue(), target)
    every = ("plain", "on_gpu", "later", "over", "elsewhere", "added")
    assert {name for name in every if room.has(name, chosen, **options)} == has


@pytest.mark.parametrize(("target", "expected"), [("ms-amp", True), ("cu13.0-torch2.11-fa4", False)])
def test_a_claim_of_each_implementation_is_expected_where_there_is_one(target: str, expected: bool) -> None:
    """FP8 linear layers: of Transformer Engine, and none in an image that has only FlashAttention 4."""
    chosen = plan(Catalogue(), target)
    room = checkout_room()
    claim = room.claims["test_training.py::test_llama_follows_high_precision"]
    assert claim.operators == ("linear",)
    assert claim.is_expected(chosen, room) is expected
