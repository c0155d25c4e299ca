"""Every patch has a record of its proof, which holds for this patch, proof and releases; what changed is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.catalogue import patch
from recipes.catalogue.load import Catalogue
from recipes.catalogue.patch import Patch
from recipes.errors import Refusal
from recipes.files import ROOT, sha256_of
from recipes.pages import render
from recipes.prove import proofs
from recipes.tests import selection
from recipes.tests.conftest import PATCH, PYTHON, SOURCE, Checkout, Tiny, wheel

PATCHES = patch.every(ROOT)
for_each_patch = pytest.mark.parametrize("proved", PATCHES, ids=lambda proved: proved.name.removeprefix("patches/"))


def faults(root: Path) -> list[str]:
    """What is wrong with the patches of a checkout; a refusal, which fails every test, is one fault."""
    try:
        catalogue = Catalogue(root)
        return proofs.faults(catalogue, proofs.plans(catalogue))
    except Refusal as refusal:
        return [str(refusal)]


def changed(root: Path) -> list[str]:
    """The patches of a checkout that changed after their proofs ran, or whose proofs did."""
    now = proofs.inputs(Catalogue(root))
    return [proved.name for proved in patch.every(root) if proofs.state(proved, now) == "changed"]


def record_anew(root: Path) -> None:
    """Write each record as if its proof had run just now, with the outcome that it holds."""
    now = proofs.inputs(Catalogue(root))
    for proved in patch.every(root):
        proofs.write(proved, (proofs.written(proved) or {"releases": []})["releases"], now)


def test_every_record_holds() -> None:
    assert faults(ROOT) == []


def moved(checkout: Checkout, path: Path) -> Path:
    """The same file in a copy of the checkout."""
    return checkout.root / path.relative_to(ROOT)


@pytest.mark.parametrize("package", ["torch", "deepspeed", "transformers"])
def test_a_patch_that_is_gone_is_missed(checkout: Checkout, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/status/patches.md"  # the only page that lists the patches without any evidence
    monkeypatch.setattr(render, "PAGES", {page: render.PAGES[page]})
    assert render.check(Catalogue(checkout.root)) == 0
    proved = next(each for each in PATCHES if each.package == package)
    for path in (proved.path, proofs.test_of(proved), proofs.record_of(proved)):
        moved(checkout, path).unlink()
    # If another patch needs it or a document's statement names it, that is refused before the page is rendered.
    with pytest.raises(Refusal, match=rf"^patches\.md does not match|{re.escape(proved.path.name)}"):
        render.check(Catalogue(checkout.root))


def test_what_is_left_of_each_patch_that_is_gone_is_named(checkout: Checkout) -> None:
    for proved in PATCHES:
        moved(checkout, proved.path).unlink()
    listed = faults(checkout.root)
    for path in (file(proved) for proved in PATCHES for file in (proofs.test_of, proofs.record_of)):
        assert sum(f"patches/{path.parent.name}/{path.name} " in fault for fault in listed) == 1, path


@pytest.mark.parametrize("part", ["proof", "record"])
def test_each_patch_without_proof_or_record_is_named(checkout: Checkout, part: str) -> None:
    for proved in PATCHES:
        moved(checkout, proofs.test_of(proved) if part == "proof" else proofs.record_of(proved)).unlink()
    listed = faults(checkout.root)
    for proved in PATCHES:
        assert sum(f"{proved.name} has no {part}" in fault for fault in listed) == 1, proved.name


@for_each_patch
def test_a_record_names_no_place_of_the_machine_that_made_it(proved: Patch) -> None:
    assert not re.search(r"/(home|opt|root|tmp|usr|var|work)/", proofs.record_of(proved).read_text())


# Of the newest release, for all targets that have it.
ONE = next(proved for proved in PATCHES if proved.package == "deepspeed")


@pytest.fixture
def spoilt(checkout: Checkout) -> Checkout:
    """A copy of the checkout with only one patch, to spoil."""
    for proved in PATCHES:
        if proved != ONE:
            for path in (proved.path, proofs.test_of(proved), proofs.record_of(proved)):
                moved(checkout, path).unlink()
    record_anew(checkout.root)
    assert faults(checkout.root) == [] and changed(checkout.root) == []
    return checkout


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (f"{ONE.package}/{ONE.path.name}", "'-march=' + os", "'-mtune=' + os"),
        (f"{ONE.package}/{proofs.test_of(ONE).name}", "-> None:\n", "-> None:\n    assert True\n"),
        ("proof.py", 'self.runs.append({"pristine": self.', 'self.runs.append({"pristine": not self.'),
        ("conftest.py", "assert now == before", "assert now != before"),
    ],
)
def test_a_patch_reads_changed_after_what_decided_its_proof_changed(
    spoilt: Checkout, file: str, old: str, new: str
) -> None:
    path = spoilt.root / "patches" / file
    text = path.read_text()
    assert text.count(old) == 1 or file.endswith(".py")
    path.write_text("# a remark\n" + text if file.endswith(".py") else text)
    assert changed(spoilt.root) == []
    path.write_text(text.replace(old, new))
    assert changed(spoilt.root) == [ONE.name] and faults(spoilt.root) == []
    assert re.search(rf"^{re.escape(ONE.package)} .* changed ", spoilt.succeed("patches"), re.MULTILINE)


def test_only_older_releases_of_unchanged_proofs_are_left_out(checkout: Checkout) -> None:
    record_anew(checkout.root)
    catalogue = Catalogue(checkout.root)
    plans, left_out = proofs.plans(catalogue), selection.older(catalogue)
    for proved in patch.every(checkout.root):
        ran = [case.source.identity for case in proofs.cases(catalogue, plans, proved)]
        chosen = [identity for identity in ran if (proved.path, identity) not in left_out]
        assert chosen == [proofs.ran(proved)[-1]["source"]], proved.name  # a record lists the newest release last
    changed = min(path for path, _ in left_out)
    test = proofs.test_of(patch.read(changed))
    test.write_text(test.read_text() + "\n\ndef test_another() -> None:\n    assert True\n")
    assert left_out - selection.older(catalogue) == {release for release in left_out if release[0] == changed}


def test_a_patch_is_as_it_was_at_the_lines_of_another_release(checkout: Checkout) -> None:
    record_anew(checkout.root)
    now, elsewhere = proofs.inputs(Catalogue(checkout.root)), 0
    for proved in patch.every(checkout.root):
        for version in proved.lines:
            assert proofs.changes(proved.at(str(version)), now) == [], (proved.name, version)
            elsewhere += proved.at(str(version)).sha256 != proved.sha256
    assert elsewhere > 10


LOAD, SAVE = "0003-skip-missing-non-tensor-state-on-load.patch", "0004-keep-only-tensors-and-strings-on-save.patch"


@pytest.fixture
def transformers(checkout: Checkout) -> Path:
    """patches/transformers/ of a copy of the checkout, where one patch is applied after another."""
    record_anew(checkout.root)
    assert parts(checkout.root) == {}
    return checkout.root / "patches" / "transformers"


def parts(root: Path) -> dict[str, list[str]]:
    """What has changed since the proofs of the patches of transformers ran, by patch."""
    now = proofs.inputs(Catalogue(root))
    changes = {each.path.name: proofs.changes(each, now) for each in patch.of_package(root, "transformers")}
    return {name: parts for name, parts in changes.items() if parts}


def test_a_patch_reads_changed_after_another_patch_is_applied_before_it(checkout: Checkout, transformers: Path) -> None:
    checkout.edit(transformers / LOAD, "Description: ", "Description: In other words, ")
    assert parts(checkout.root) == {}
    before = (transformers / LOAD).read_text()
    other = re.sub(r"^(\+[^+].*)$", r"\1  # otherwise", before, count=1, flags=re.MULTILINE)
    (transformers / LOAD).write_text(other)
    assert parts(checkout.root) == {LOAD: ["the patch"], SAVE: [f"an earlier patch ({LOAD})"]}
    (transformers / LOAD).write_text(before)
    (transformers / "0000-new.patch").write_text(other)
    assert parts(checkout.root) == {name: ["an earlier patch (0000-new.patch)"] for name in (LOAD, SAVE)}
    (transformers / "0000-new.patch").unlink()
    (transformers / LOAD).unlink()
    assert parts(checkout.root) == {SAVE: [f"an earlier patch ({LOAD})"]}


def test_a_patch_reads_changed_after_it_moves_in_one_release(checkout: Checkout, transformers: Path) -> None:
    name, *later = (next(transformers.glob(f"{number}-*.patch")).name for number in ("0001", "0002", "0005"))
    checkout.edit(transformers / name, " 4.37.2 4042\n", " 4.37.2 4043\n")
    applied_after = {each: [f"an earlier patch ({name})"] for each in later}
    assert parts(checkout.root) == {name: ["its lines in a release"], **applied_after}


def test_a_record_that_does_not_list_the_patches_applied_reads_changed(checkout: Checkout, transformers: Path) -> None:
    path = (transformers / LOAD).with_suffix(".json")
    record = json.loads(path.read_text())
    del record["releases"][0]["patches"]
    path.write_text(json.dumps(record))
    assert parts(checkout.root) == {LOAD: ["its record, which does not list the patches applied"]}


def test_a_proof_is_as_it_was_after_a_module_of_the_tool_moves(spoilt: Checkout) -> None:
    for path in (spoilt.root / "patches").rglob("*.py"):
        path.write_text(path.read_text().replace("from recipes.catalogue.plan import", "from recipes.plans import"))
    assert changed(spoilt.root) == []


def test_a_release_that_is_not_in_the_record_is_named(spoilt: Checkout) -> None:
    recipe = spoilt.recipe(ONE.package)
    recipe.write_text(recipe.read_text().replace(first_identity(), "0" * 64))
    (named, *_) = faults(spoilt.root)
    assert "was not proved on" in named and proofs.AGAIN in named


def test_a_changed_script_changes_the_proofs_that_import_it(checkout: Checkout) -> None:
    record_anew(checkout.root)
    scripts = checkout.root / "patches" / "scripts.py"
    tests = {proofs.test_of(proved): proved.name for proved in PATCHES}
    part = re.compile(r"^from patches\.scripts import .*\bSETUP\b", re.MULTILINE)
    files = [path for path in scripts.parent.rglob("*.py") if part.search(path.read_text())]
    modules = {".".join(path.relative_to(checkout.root).with_suffix("").parts) for path in files}
    through = re.compile(rf"^from ({'|'.join(map(re.escape, modules))}) import", re.MULTILINE)
    users = [name for test, name in tests.items() if part.search(test.read_text()) or through.search(test.read_text())]
    assert 5 < len(users) < len(tests)
    before = scripts.read_text()
    scripts.write_text("# a remark\n" + before)
    assert changed(checkout.root) == []
    scripts.write_text(before.replace("makedirs", "removedirs"))
    assert changed(checkout.root) == users
    scripts.unlink()
    assert {*users} <= {*changed(checkout.root)}


def first_identity() -> str:
    record = proofs.written(ONE)
    assert record
    return str(record["releases"][0]["source"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": {}}, "lacks an output"),
        ({"runs": {"test": [{"pristine": {"code": 1, "output": ["x"]}}]}}, "lacks an output"),
        (
            {"runs": {"test": [{side: {"code": 0, "output": []} for side in ("pristine", "patched")}]}},
            "lacks an output",
        ),
        ({"unproven": "no time"}, "says why"),
        ({"source": "0" * 64}, "was not proved on"),
        ({"version": "99.0"}, "to which it no longer applies"),
    ],
    ids=["no run", "one side", "no lines", "unproven without a reason", "another source", "another version"],
)
def test_a_record_that_does_not_hold_is_named(spoilt: Checkout, change: dict[str, Any], message: str) -> None:
    path = moved(spoilt, proofs.record_of(ONE))
    record = json.loads(path.read_text())
    record["releases"][0].update(change)
    path.write_text(json.dumps(record))
    listed = faults(spoilt.root)
    assert any(message in fault for fault in listed), listed


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"releases": 1}'])
def test_a_record_that_is_none_is_named(spoilt: Checkout, text: str) -> None:
    moved(spoilt, proofs.record_of(ONE)).write_text(text)
    assert any("has no record" in fault for fault in faults(spoilt.root))


def test_unproven_is_accepted_with_the_proof_s_own_reason_only(spoilt: Checkout) -> None:
    (proved,) = patch.every(spoilt.root)
    record = json.loads(proofs.record_of(proved).read_text())
    extra = {"version": "99.0", "file": f"{ONE.package}-99.0.tar.gz", "sha256": "1" * 64}
    recipe = spoilt.recipe(ONE.package)
    listed = ", ".join(f'{key} = "{value}"' for key, value in extra.items())
    recipe.write_text(recipe.read_text().replace("\n[build]", f"\nproved_on = [{{ {listed} }}]\n\n[build]", 1))
    proved.path.write_text(proved.path.read_text().replace(str(proved.header["X-Applies-To"]), ">=0.19.8", 1))
    test = proofs.test_of(proved)
    test.write_text(test.read_text() + '\nUNPROVEN = {"99.0": "nobody has it"}\n')
    releases = [*record["releases"], {"version": "99.0", "source": "1" * 64, "unproven": "nobody has it"}]
    proofs.write(patch.read(proved.path), releases)
    assert faults(spoilt.root) == []
    assert "unproven on 99.0: nobody has it" in proofs.proved_on(proved)
    proofs.write(patch.read(proved.path), releases[1:])
    assert any("is proved on no release" in fault for fault in faults(spoilt.root))


@pytest.mark.parametrize(
    ("text", "message"), [("", "does not say where it runs"), ("RUNS_IN = str(1)", "RUNS_IN is not a plain value")]
)
def test_a_proof_that_does_not_say_where_it_runs_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "test_0001_x.py").write_text(text)
    with pytest.raises(Refusal, match=message):
        proofs.conditions(tmp_path / "test_0001_x.py")


def test_the_table_shows_every_patch(checkout: Checkout) -> None:
    output = checkout.succeed("patches")
    for proved in PATCHES:
        (line,) = [line for line in output.splitlines() if line.startswith(f"{proved.package} {proved.path.name[:4]} ")]
        assert str(proved.applies_to.specifier) in line
    (torch,) = [proved for proved in PATCHES if proved.package == "torch"]
    assert proofs.proved_on(torch).startswith("1.12.1, 1.13.0, 1.13.1 (CPython 3.8")
    assert "; unproven on 1.12.1+cu113: " in proofs.proved_on(torch)


PROOF = '''"""It says two with the patch, and not without it."""

from patches.proof import Proof

RUNS_IN = "tiny"
BESIDE = {{"==1.0": [("tinyside", "1.0", "tinyside-1.0-py3-none-any.whl", "{side}")], ">1": [("no", "1", "no", "0")]}}


def test_it_says_two(proof: Proof) -> None:
    script = "import sys, tempfile, tinyside, {name}; print({name}.value, tinyside.value, tempfile.gettempdir())"
    pristine, patched = proof.run(script + "; sys.exit({name}.value)")
    assert (pristine.returncode, patched.returncode) == (1, 2), pristine.stderr
'''


class Proving:
    """`tiny` with a proof of one patch, and the command that runs it."""

    def __init__(self, tiny: Tiny, name: str) -> None:
        self.tiny, self.folder = tiny, tiny.root / "patches" / name
        wheel(tiny.shelf, "tinyside")
        side = sha256_of(tiny.shelf / "tinyside-1.0-py3-none-any.whl")
        self.test = self.folder / "test_0001_say_two.py"
        self.test.write_text(PROOF.format(name=name, side=side))
        self.record = self.folder / "0001-say-two.json"

    def run(self, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the proof in the copy of the checkout."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(self.folder), *options]
        ours = self.tiny.variables | variables
        return subprocess.run(command, cwd=self.tiny.root, env=ours, capture_output=True, text=True, check=False)

    def passes(self, *options: str, **variables: str) -> str:
        done = self.run(*options, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fails(self, *options: str, **variables: str) -> str:
        done = self.run(*options, **variables)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def proving(tiny: Tiny) -> Proving:
    return Proving(tiny, "tinypkg")


def test_a_proof_that_passes_is_recorded_and_compared(proving: Proving) -> None:
    assert "not what its record says" in proving.fails()
    assert "recorded: tinypkg/0001-say-two.json" in proving.passes("--record")
    record = json.loads(proving.record.read_text())
    (release,) = record["releases"]
    assert release["version"] == "1.0" and release["source"] == proving.tiny.pinned
    assert release["pristine"] != release["patched"]
    say_two = proving.folder / "0001-say-two.patch"
    assert release["patches"] == {say_two.name: patch.read(say_two).sha256}
    assert release["interpreter"].startswith("CPython 3.") and release["target"] == "tiny"
    (run,) = release["runs"]["test_it_says_two"]
    assert run["pristine"] == {"code": 1, "output": ["1 1 HOME"]}
    assert run["patched"] == {"code": 2, "output": ["2 1 HOME"]}
    written = proving.record.read_bytes()
    assert "1 passed" in proving.passes()
    proving.passes("--record")
    assert proving.record.read_bytes() == written
    for old, new in (("1 1 HOME", "1 1 HOUSE"), (release["patched"], "0" * 64)):
        proving.record.write_text(written.decode().replace(old, new))
        assert proofs.AGAIN in proving.fails()


def test_a_proof_that_fails_is_not_recorded(proving: Proving) -> None:
    proving.tiny.edit(proving.test, "(1, 2)", "(2, 2)")
    assert "not recorded: 0001-say-two.json" in proving.fails("--record")
    assert not proving.record.exists()


def test_recording_in_several_processes_is_refused(proving: Proving) -> None:
    done = proving.run("--record", "-n", "2")
    assert done.returncode == 4 and "leave out -n" in done.stderr


def test_a_wheel_s_proof_runs_on_the_repacked_wheel(tiny: Tiny) -> None:
    folder = tiny.root / "patches" / "tinywheel"
    folder.mkdir()
    diff = PATCH.replace("tinypkg.py", "tinywheel.py").replace("@@ -2,2 +2,2 @@\n\n", "@@ -1 +1 @@\n")
    (folder / "0001-say-two.patch").write_text(diff)
    proving = Proving(tiny, "tinywheel")
    assert "1 passed" in proving.passes("--record")


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_repository_out_of_reach_leaves_a_proof_unproven_here(proving: Proving, mirrored: bool) -> None:
    tiny = proving.tiny
    source = f'repository = "https://127.0.0.1:9/own/er"\ncommit = "{"1" * 40}"'
    tiny.plant("tinypkg", SOURCE, requires=("tinydep",), identity=source)
    if mirrored:
        mirror = tiny.root / "mirror"
        mirror.mkdir()
        assert "git fetch failed" in proving.fails(FUSEBOX_MIRROR=str(mirror))
    else:
        output = proving.passes()
        assert "unproven here: https://127.0.0.1:9/own/er cannot be reached" in output and "1 skipped" in output
        assert "not recorded" in proving.fails("--record")
        assert not proving.record.exists()


def test_a_python_that_cannot_be_had_leaves_a_proof_unproven_here(proving: Proving) -> None:
    tiny = proving.tiny
    table = tiny.targets.read_text().partition("[tiny]")
    tiny.targets.write_text(table[0] + table[1] + table[2].replace(f'python = "{PYTHON}"', 'python = "3.99"', 1))
    output = proving.passes()
    assert "unproven here: No Python 3.99 is on this machine" in output and "1 skipped" in output
    assert "not recorded" in proving.fails("--record")
