"""Collected wheels: their names, tags, requirements, SBOM and RECORD, and the index of them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.files import ROOT, digest_of, sha256_of, write_json
from recipes.make.environment import Wheel
from recipes.ship import fitting, sbom
from recipes.ship import wheels as collecting
from recipes.tests.conftest import PYTHON, Checkout, Tiny, entry, spoil
from recipes.tests.shop import SHOPPED, folder, run_of, shop_in, wheel_of

LOCAL = "cputorch1.0.tiny"


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Tiny:
    """A checkout whose wheels are collected and indexed; tests leave it as it is."""
    return shop_in(tmp_path_factory.mktemp("shop"), wheels)


@pytest.fixture
def shop(collected: Tiny, tmp_path: Path) -> Tiny:
    """A copy of it, with its build/ and its cache, to be changed."""
    other = collected.copy(tmp_path)
    shutil.copytree(collected.root / "build", other.root / "build")
    shutil.copytree(collected.cache, other.cache)
    return other


def part(path: Path, name: str) -> str:
    """A file of the wheel's .dist-info folder."""
    with zipfile.ZipFile(path) as archive:
        (name_in_wheel,) = [file for file in archive.namelist() if file.endswith(f".dist-info/{name}")]
        return archive.read(name_in_wheel).decode()


def metadata(path: Path) -> Message:
    return HeaderParser().parsestr(part(path, "METADATA"))


def hashes(tiny: Tiny) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder(tiny).iterdir()}


def test_what_was_built_or_patched_is_collected(collected: Tiny) -> None:
    names = sorted(path.name for path in folder(collected).glob("*.whl"))
    assert [name.split("-")[0] for name in names] == ["tinypkg", "tinywheel"]  # torch is the user's own
    assert names[1] == f"tinywheel-1.0+{LOCAL}-py3-none-any.whl"
    assert metadata(wheel_of(collected, "tinywheel"))["Version"] == f"1.0+{LOCAL}"


def test_the_platform_is_the_one_that_auditwheel_finds(collected: Tiny) -> None:
    path = wheel_of(collected, "tinypkg")
    *_, tags = parse_wheel_filename(path.name)
    assert all(tag.platform.startswith("manylinux") for tag in tags)
    assert {str(tag) for tag in tags} == set(re.findall(r"^Tag: (.*)$", part(path, "WHEEL"), re.MULTILINE))
    assert "Root-Is-Purelib: false" in part(path, "WHEEL")


def test_the_requirements_name_torch_the_own_wheels_and_the_libraries(collected: Tiny) -> None:
    needs = {
        asked.name: asked.specifier
        for asked in map(Requirement, metadata(wheel_of(collected, "tinypkg")).get_all("Requires-Dist", []))
    }
    assert needs["torch"].contains("1.0") and needs["torch"].contains("1.0+cpu")
    assert not any(needs["torch"].contains(wrong) for wrong in ("1.0.1", "1.1", "1.0+cu130", "1.0+rocm6.4", "0.9"))
    assert str(needs["tinywheel"]) == f"==1.0+{LOCAL}"
    assert str(needs["nvidia-tiny"]) == "<14,>=13.0"
    assert "tinydep" in needs


def test_record_lists_every_file_as_it_is(collected: Tiny) -> None:
    for path in folder(collected).glob("*.whl"):
        stem = "-".join(path.name.split("-")[:2])
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            rows = {row[0]: ",".join(row[1:]) for row in csv.reader(io.StringIO(part(path, "RECORD")))}
            own = f"{stem}.dist-info/RECORD"
            assert rows == {name: entry(archive.read(name)) for name in archive.namelist() if name != own} | {own: ","}
            assert all(name.startswith(f"{stem}.dist-info/") for name in archive.namelist() if ".dist-info/" in name)


def test_the_sbom_names_source_and_patches(collected: Tiny) -> None:
    for path in folder(collected).glob("*.whl"):
        text = part(path, "sboms/fusebox.cdx.json")
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
        assert str(collected.root) not in text and "timestamp" not in text
    main = json.loads(part(wheel_of(collected, "tinywheel"), "sboms/fusebox.cdx.json"))["metadata"]["component"]
    assert main["version"] == f"1.0+{LOCAL}"
    (source,), (patch,) = main["pedigree"]["ancestors"], main["pedigree"]["patches"]
    assert source["hashes"][0]["content"] == sha256_of(collected.shelf / "tinywheel-1.0-py3-none-any.whl")
    assert "+value = 2" in patch["diff"]["text"]["content"]
    assert patch["resolves"][0]["id"] == "patches/tinywheel/0001-say-two.patch"


def test_the_sboms_of_all_sources_are_valid() -> None:
    """Submodules, several patches, commits: whatever the checkout pins."""
    catalogue = Catalogue()
    for name in ("cu12.1-torch2.1", "cu13.0-torch2.11", "ms-amp"):
        planned = plan(catalogue, name)
        for pin in collecting.own(planned):
            text = sbom.text(planned, pin, Wheel(pin, ROOT, "0" * 64, {}), collecting.version_of(planned, pin))
            assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None, pin.label
            bundled = {part["version"] for part in json.loads(text).get("components", [])}
            assert bundled == {part.commit for part in pin.release.submodules}


def test_the_same_wheels_give_the_same_bytes(shop: Tiny) -> None:
    first = hashes(shop)
    time.sleep(2.1)  # zip archives store times in steps of two seconds
    shutil.rmtree(shop.root / "build")
    shop.succeed("wheels", "tiny", TZ="Asia/Tokyo")
    assert hashes(shop) == first


def test_a_build_number_gives_a_replaced_wheel_a_name_of_its_own(shop: Tiny) -> None:
    shop.succeed("wheels", "tiny", "--build", "2")
    path = wheel_of(shop, "tinywheel")
    assert path.name == f"tinywheel-1.0+{LOCAL}-2-py3-none-any.whl" and "Build: 2\n" in part(path, "WHEEL")
    assert parse_wheel_filename(path.name)[2] == (2, "")
    wrong = shop.run("wheels", "tiny", "--build", "0")
    assert wrong.returncode == 2 and "0 is not a number from 1 on" in wrong.stderr


def test_wheels_compiled_on_another_machine_are_collected(shop: Tiny, tmp_path: Path) -> None:
    """Only on request, and then without a compiler; the SBOM names theirs."""
    shop.succeed("cache", "export", tmp_path / "exported")
    records = {path: json.loads(path.read_text()) for path in tmp_path.glob("exported/*/wheel.json")}
    (path,) = [path for path, record in records.items() if record["inputs"]["package"] == "tinypkg 1.0"]
    record = records[path]
    record["inputs"] |= {"compiler": "another c++", "base": "another machine"}
    record["built_with"]["compiler"] = "another c++"
    write_json(path, record)
    path.parent.rename(path.parent.with_name(digest_of(record["inputs"])))
    for wheel in shop.cache.glob("wheels/*/tinypkg-*.whl"):
        shutil.rmtree(wheel.parent)
    brought = ("wheels", "tiny", "--wheelcache", tmp_path / "exported")
    for verb in ("wheels", "image"):
        shop.refuse(verb, "tiny", "--compiled-elsewhere", naming=("add --wheelcache DIR",))
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("uv", "patch", "git"):
        if place := shutil.which(name):
            (tools / name).symlink_to(place)
    shop.refuse(*brought, naming=("tinypkg 1.0 is compiled and there is no c++",), PATH=str(tools))
    assert "another machine" in shop.succeed(*brought, "--compiled-elsewhere", PATH=str(tools))
    assert not [*shop.cache.glob("wheels/*/tinypkg-*.whl")]
    bill = json.loads(part(wheel_of(shop, "tinypkg"), "sboms/fusebox.cdx.json"))
    facts = {fact["name"]: fact["value"] for fact in bill["metadata"]["component"]["properties"]}
    assert facts["fusebox:compiler"] == "another c++"


def test_a_killed_run_leaves_the_former_wheels(shop: Tiny) -> None:
    before = hashes(shop)
    with shop.start("wheels", "tiny") as process:
        while not list(folder(shop).parent.glob(".wheels.*")) and process.poll() is None:
            time.sleep(0.001)
        process.kill()
    assert hashes(shop) == before
    shop.succeed("wheels", "tiny")  # which finds no leftovers at its end
    assert hashes(shop) == before


def test_a_library_that_nobody_brings_is_refused(shop: Tiny) -> None:
    """Without the wheel that holds the library, the lock is refused before anything is collected."""
    shop.edit(shop.root / "recipes" / "lock" / "tiny.txt", "nvidia", "# nvidia")
    shop.refuse("wheels", "tiny", naming=("tiny.txt has no nvidia-tiny", "torch 1.0 needs nvidia-tiny==13.0.5"))


def test_a_target_without_wheels_of_its_own_is_refused(tiny: Tiny) -> None:
    shutil.rmtree(tiny.root / "patches" / "tinypkg")
    tiny.plant("tinypkg")  # a wheel now
    tiny.renew_inputs()
    tiny.refuse("wheels", "tiny", naming=("tiny builds and patches no package",))


@pytest.mark.parametrize(
    ("target", "package", "version", "sm"),
    [
        ("cu13.0-torch2.11", "flash-attn", "2.8.3+cu130torch2.11", None),
        ("cu13.0-torch2.11", "apex", "25.9+52.g6424da3b.cu130torch2.11", None),
        ("cu13.0-torch2.11-fa4", "flash-attn-4", "4.0.0b36+cu130torch2.11.fa4", None),
        ("cu12.1-torch2.1", "flash-attn", "2.5.8+cu121torch2.1", ["8.0", "9.0"]),
        ("cu12.1-torch2.1", "flash-attn", "2.5.8+cu121torch2.1.sm90", ["9.0"]),
        ("ms-amp", "flash-attn", "2.3.3+cu121torch2.1.ms.amp", None),
        ("cpu", "deepspeed", "0.19.8+cputorch2.13", None),
    ],
)
def test_versions(target: str, package: str, version: str, sm: list[str] | None) -> None:
    planned = plan(Catalogue(), target, sm)
    (pin,) = [pin for pin in planned.pins if pin.name == package]
    assert collecting.version_of(planned, pin) == version == str(Version(version))


@pytest.mark.parametrize(
    ("target", "right", "wrong"),
    [
        ("cu13.0-torch2.11", ["2.11.0", "2.11.0+cu130"], ["2.11.1", "2.11.0+cu126", "2.11.0+cpu", "2.12.0"]),
        ("cu12.1-torch2.1", ["2.1.2", "2.1.2+cu121"], ["2.1.2+cu118", "2.1.1", "2.2.0"]),
        ("cu11.4-torch2.0", ["2.0.1", "2.0.1+cu117"], ["2.0.1+cu118", "2.0.0"]),
        ("cu11.4-torch1.12", ["1.12.1+cu113"], ["1.12.1", "1.12.1+cu116"]),
        ("cpu", ["2.13.0+cpu"], ["2.13.0", "2.13.0+cu130"]),
    ],
)
def test_which_torch_is_required(target: str, right: list[str], wrong: list[str]) -> None:
    asked = Requirement(str(collecting.torch_requirement(plan(Catalogue(), target))))
    assert all(asked.specifier.contains(version) for version in right)
    assert not any(asked.specifier.contains(version) for version in wrong)


def index(tiny: Tiny) -> Path:
    return tiny.root / "build" / "index"


def page(tiny: Tiny, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((index(tiny) / "simple" / name / "index.json").read_text())
    return read


def test_the_index_describes_each_file(collected: Tiny) -> None:
    listed = json.loads((index(collected) / "simple" / "index.json").read_text())
    assert listed["projects"] == [{"name": name} for name in SHOPPED]
    for name in SHOPPED:
        described = page(collected, name)
        assert described["meta"] == {"api-version": "1.4", "tracks": []} and described["alternate-locations"] == []
        assert described["project-status"] == {"status": "active"}
        (file,) = described["files"]
        path = (index(collected) / "simple" / name / file["url"].replace("%2B", "+")).resolve()
        beside = path.with_name(f"{path.name}.metadata")
        assert file["hashes"] == {"sha256": sha256_of(path)} and file["size"] == path.stat().st_size
        assert file["core-metadata"] == {"sha256": sha256_of(beside)} == file["dist-info-metadata"]
        assert beside.read_text() == part(path, "METADATA")
        assert file["yanked"] is False
        html = (index(collected) / "simple" / name / "index.html").read_text()
        assert f'href="{file["url"]}#sha256={file["hashes"]["sha256"]}"' in html
        assert f'data-core-metadata="sha256={sha256_of(beside)}"' in html and "data-yanked" not in html
        human = (index(collected) / "packages" / f"{name}.html").read_text()
        assert described["versions"][0] in human and "built" in human and str(collected.root) not in human


def test_a_proved_wheel_says_where_and_links_the_evidence(shop: Tiny) -> None:
    run_of(shop, "proved")
    assert "proved: 1 proved on x86-64" in shop.succeed("index")
    human = (index(shop) / "packages" / "tinywheel.html").read_text()
    for name in ("tiny--x86-64.json", "tiny--x86-64.log"):
        assert f'href="../evidence/{name}"' in human and (index(shop) / "evidence" / name).is_file()
    path = shop.root / "smoke_tests" / "evidence" / "tiny--x86-64.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image": f"here/tiny@sha256:{'0' * 64}"}))
    assert "proved: 1 proved on x86-64 (image)" in shop.succeed("index")


def test_a_refuted_wheel_is_yanked_with_the_reason_and_stays_so(shop: Tiny) -> None:
    run_of(shop, "refuted")
    shop.succeed("index")
    (file,) = page(shop, "tinywheel")["files"]
    assert file["yanked"] == "refuted on x86-64: two is two (tinywheel)"
    assert f'data-yanked="{file["yanked"]}"' in (index(shop) / "simple" / "tinywheel" / "index.html").read_text()
    assert "yanked: refuted" in (index(shop) / "packages" / "tinywheel.html").read_text()
    assert page(shop, "tinypkg")["files"][0]["yanked"] is False
    shop.edit(shop.targets, 'tinywheel = "1.0"\n', "")  # the target no longer has it
    shop.edit(shop.recipe("tinypkg"), '"tinywheel"', '"tinydep"')
    shop.succeed("index")
    assert page(shop, "tinywheel")["files"][0]["yanked"] == file["yanked"]
    assert page(shop, "tinywheel")["project-status"] == {"status": "archived"}


def test_what_is_in_the_index_stays_and_never_changes(shop: Tiny) -> None:
    old = page(shop, "tinywheel")["files"]
    shop.succeed("wheels", "tiny", "--build", "2")
    shop.succeed("index")
    both = page(shop, "tinywheel")["files"]
    assert len(both) == 2 and all(file in both for file in old)
    rows = json.loads((folder(shop) / "wheels.json").read_text())
    path = wheel_of(shop, "tinywheel")
    other = path.read_bytes() + b"\0"
    path.unlink()  # the index has a link to it
    path.write_bytes(other)
    next(row for row in rows["wheels"] if row["file"] == path.name)["sha256"] = sha256_of(path)
    write_json(folder(shop) / "wheels.json", rows)
    before = {file: sha256_of(file) for file in index(shop).rglob("*") if file.is_file()}
    shop.refuse("index", naming=(path.name, "--build"))
    assert {file: sha256_of(file) for file in index(shop).rglob("*") if file.is_file()} == before


def test_wheels_from_elsewhere_join_the_index(shop: Tiny, tmp_path: Path) -> None:
    folder(shop).rename(tmp_path / "brought")
    shutil.rmtree(index(shop))
    shop.refuse("index", naming=("wheels(TARGET)",))
    shop.succeed(
        "index", "--from", tmp_path / "brought", "--into", tmp_path / "site", "--files-url", "https://example.org/f/"
    )
    described = json.loads((tmp_path / "site" / "simple" / "tinywheel" / "index.json").read_text())
    assert described["files"][0]["url"] == f"https://example.org/f/tinywheel-1.0%2B{LOCAL}-py3-none-any.whl"


def test_which_wheels_there_are_for_a_torch(shop: Tiny) -> None:
    words = ("wheels", "--for", "torch==1.0", "--python", PYTHON, "--cuda", "none")
    output = shop.succeed(*words)
    assert "tinywheel-1.0+cputorch1.0.tiny-py3-none-any.whl: built: no claim has run with it" in output
    for path in (folder(shop), index(shop)):
        shutil.rmtree(path)
    output = shop.succeed(*words)
    assert f"tinypkg 1.0+{LOCAL}: to be built, about 1 min on this machine" in output
    assert f"tinywheel 1.0+{LOCAL}: to be patched and collected" in output and "wheels(tiny)" in output


def test_for_a_torch_that_no_target_has_the_nearest_is_named(checkout: Checkout) -> None:
    done = checkout.run("wheels", "--for", "torch==2.11.0", "--python", "3.13", "--cuda", "13.0")
    assert done.returncode == 3
    assert "nearest: cu13.0-torch2.11, which has Python 3.12; building it takes about" in done.stdout
    assert "nox -s new-target -- NAME --like cu13.0-torch2.11" in done.stdout
    for words in (("--for", "torch=2"), ("--for", "numpy==2"), ("--python", "3.12")):
        checkout.refuse("wheels", *words, naming=("--for",))
    for fact, value in (("python", "3.x"), ("cuda", "banana")):
        checkout.refuse("wheels", "--for", "torch==2.11.0", f"--{fact}", value, naming=(fact, value, "write it as"))
    checkout.refuse("wheels", "cpu", "--json", "missing.json", naming=("--missing",))


def test_a_torch_is_wanted_with_or_without_its_build() -> None:
    cpu = Catalogue().target("cpu")
    for torch, fits in (("torch==2.13.0", True), ("torch==2.13.0+cpu", True), ("torch==2.13.0+cu130", False)):
        assert (not fitting.Wanted.read(torch, None, "none").lacks(cpu)) == fits, torch


def test_the_patch_release_of_python_or_cuda_decides_nothing() -> None:
    target = Catalogue().target("cu13.0-torch2.11")
    assert fitting.Wanted.read("torch==2.11.0", "3.12.1", "13.0.2").lacks(target) == []
    assert fitting.Wanted.read("torch==2.11.0", "3.11.1", "13.2.0").lacks(target) == ["Python 3.12", "CUDA 13.0"]


def test_which_runner_builds_what_an_index_lacks(tmp_path: Path) -> None:
    """By the measured core-seconds, the size of the files, and the CUDA toolkit that is needed."""
    rows = {row.target: row for row in fitting.missing(Catalogue(), tmp_path / "nothing")}
    assert rows["cpu"].runner == fitting.HOSTED and rows["cpu"].reason == "" and rows["cpu"].wheels == 2
    assert rows["cu13.2-torch2.15"].runner == "gpu-sm90" and rows["cu13.2-torch2.15"].minutes > 360
    assert "of the 6 hours that a job has" in rows["cu13.2-torch2.15"].reason
    assert "14 GiB of disk" in rows["cu13.0-torch2.11"].reason and "no CUDA 13.0" in rows["cu13.0-torch2.11"].reason
    assert rows["ngc-23.10"].runner is None and "no runner builds them: ubuntu-24.04 has" in str(rows["ngc-23.10"])
    assert "cu13.0-torch2.11-dist" not in rows  # it builds nothing


@pytest.mark.parametrize("fault", ["truncated", "spoiled", "missing", "list", "key"])
def test_a_damaged_wheel_or_list_is_refused(shop: Tiny, fault: str) -> None:
    path, listed = wheel_of(shop, "tinywheel"), folder(shop) / "wheels.json"
    shutil.rmtree(index(shop))
    if fault == "truncated":
        os.truncate(path, 100)
    elif fault == "spoiled":
        spoil(path)
    elif fault == "missing":
        path.unlink()
    else:
        listed.write_text("[]" if fault == "list" else listed.read_text().replace('"sha256"', '"sha"'))
    shop.refuse("index", naming=("tinywheel" if fault in ("truncated", "spoiled", "missing") else "wheels.json",))
    assert not index(shop).exists()


# --- the wheel of the claims


@pytest.fixture
def published(checkout: Checkout) -> Checkout:
    """A checkout whose smoke_tests/ is committed, at a time that is the same in each run."""
    shutil.copy(ROOT / "LICENSE", checkout.root)
    git = ["git", "-C", str(checkout.root), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    variables = {**checkout.variables, "GIT_COMMITTER_DATE": "2026-11-24T01:05:00+02:00"}
    for words in (["init", "--quiet"], ["add", "smoke_tests", "LICENSE"], ["commit", "--quiet", "-m", "claims"]):
        subprocess.run([*git, *words], env=variables, check=True)
    return checkout


def test_the_claims_are_a_wheel_that_repeats_byte_for_byte(published: Checkout, tmp_path: Path) -> None:
    """Built without a network, from what is committed; it runs where only its folder is."""
    (published.root / "smoke_tests" / "untracked.log").touch()
    published.refuse("claims", naming=("smoke_tests differs from its commit", "commit its changes"))
    (published.root / "smoke_tests" / "untracked.log").unlink()
    folder = published.root / "build" / "claims" / "wheels"
    published.succeed("claims")
    (made,) = folder.glob("*.whl")
    assert made.name == "fusebox_claims-2026.11.23.1385-py3-none-any.whl"  # 23:05 UTC
    first = sha256_of(made)
    published.succeed("claims")
    assert sha256_of(made) == first
    with zipfile.ZipFile(made) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "unpacked")
    assert {"smoke_tests/__main__.py", "smoke_tests/pytest.ini", "smoke_tests/torch_symbols.json"} <= names
    assert not [name for name in names if "/evidence/" in name] and any(name.endswith("LICENSE") for name in names)
    assert metadata(made).get_all("Requires-Dist") == ["numpy", "pytest>=8"]
    done = subprocess.run(
        [sys.executable, "-m", "smoke_tests", "--help"], cwd=tmp_path / "unpacked", capture_output=True, text=True
    )
    assert done.returncode == 0 and "Exit codes: 0" in done.stdout
    shown = published.succeed("index")
    assert f"{made.name}: built: it holds the claims" in shown
    index = published.root / "build" / "index"
    assert not (index / "targets").exists()
    described = json.loads((index / "simple" / "fusebox-claims" / "index.json").read_text())
    assert described["project-status"] == {"status": "active"} and described["files"][0]["hashes"]["sha256"] == first
    assert "torch" in (index / "packages" / "fusebox-claims.html").read_text()
