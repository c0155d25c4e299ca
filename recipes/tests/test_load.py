"""The data, and all that can be wrong with it: each fault is one sentence that names the file, the key, the cure."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.errors import Refusal
from recipes.files import ROOT
from recipes.tests.conftest import Checkout, Tiny

TARGETS, RECIPE = "recipes/targets.toml", "recipes/packages/deepspeed.toml"
LIMITS = "recipes/limits.toml"

# (the file, a text in it, the text's replacement, what the sentence must name)
TEXTS = {
    "syntax-error": (TARGETS, 'python = "3.11"', 'python = "3.11', ("targets.toml", "line 6")),
    "syntax-error-in-recipe": (RECIPE, 'module = "deepspeed"', "module = deepspeed", ("deepspeed.toml", "line 1")),
    "no-value": (RECIPE, 'compiler = "c++"', "compiler =", ("deepspeed.toml", "line 7")),
    "duplicate-key": (TARGETS, "publish = true", "publish = true\npublish = true", ("targets.toml", "line")),
    "duplicate-table": (RECIPE, "[build.env]", "[build]\n[build.env]", ("deepspeed.toml", "build")),
    "unknown-key": (TARGETS, "glibc = ", "gilbc = ", ("targets.toml", "cpu.", "glibc")),
    "unknown-key-nearest": (TARGETS, "publish = true", "publish = true\npublsh = true", ("cpu.publsh", "'publish'")),
    "unknown-key-in-recipe": (RECIPE, "mib = {", "mob = {", ("deepspeed.toml", "release[0].")),
    "unknown-key-in-build": (
        RECIPE, "core_seconds = 170", "core_seconds = 170\ncore_second = 2", ("build.core_second", "'core_seconds'"),
    ),
    "longest-file-of-more-than-all": (
        RECIPE, "core_seconds = 80, longest_seconds = 28", "core_seconds = 55",
        ("deepspeed.toml", "0.19.8: longest_seconds is more than core_seconds"),
    ),
    "unknown-key-in-list": (
        RECIPE, "installed = 9", "installed = 9, instaled = 3", ("release[0].mib.instaled", "'installed'"),
    ),
    "unknown-key-in-base": (TARGETS, "[cpu.base]", "[cpu.base]\nruntme = 1", ("cpu.base.runtme", "'runtime'")),
    "missing-key": (TARGETS, "publish = true", "", ("targets.toml", "cpu.publish")),
    "missing-key-in-recipe": (RECIPE, 'version = "0.19.8"', "", ("deepspeed.toml", "release[0].version")),
    "published-without-runner": (TARGETS, 'runner = "ubuntu-24.04"', "", ("targets.toml", "cpu", '"runner"')),
    "string-for-boolean": (TARGETS, "publish = true", 'publish = "yes"', ("cpu.publish", "a string")),
    "integer-for-string": (TARGETS, 'python = "3.11"', "python = 3", ("cpu.python", "an integer")),
    "float-for-string": (TARGETS, 'python = "3.11"', "python = 3.11", ("cpu.python", "a float")),
    "date-for-string": (TARGETS, 'python = "3.11"', "python = 2026-11-21", ("cpu.python", "a date")),
    "string-for-array": (TARGETS, "sm = []", 'sm = "9.0"', ("cpu.sm", "a string")),
    "wrong-item": (TARGETS, 'proves_on = ["x86-64"]', "proves_on = [64]", ("cpu.proves_on[0]", "an integer")),
    "table-for-array": (
        "recipes/packages/ms-amp.toml", "[[release]]", "[release]", ("ms-amp.toml", "release", "a table"),
    ),
    "value-for-table": (TARGETS, "[cpu]", "gpu = 1\n[cpu]", ("targets.toml", "gpu", "an integer")),
    "huge-integer": (RECIPE, "mib_per_job = 2200", f"mib_per_job = {'9' * 5000}", ("deepspeed.toml",)),
    "large-integer": (RECIPE, "mib_per_job = 2200", f"mib_per_job = {'9' * 30}", ("build.mib_per_job",)),
    "zero-memory": (RECIPE, "mib_per_job = 2200", "mib_per_job = 0", ("deepspeed.toml", "build.mib_per_job")),
    "negative": (RECIPE, "mib_per_job = 2200", "mib_per_job = -1", ("deepspeed.toml", "build.mib_per_job")),
    "negative-size": (RECIPE, "download = 2", "download = -2", ("deepspeed.toml", "release[0].mib.download")),
    "nan": (RECIPE, "core_seconds = 170", "core_seconds = nan", ("deepspeed.toml", "build.core_seconds")),
    "infinity": (RECIPE, "core_seconds = 170", "core_seconds = inf", ("deepspeed.toml", "build.core_seconds")),
    "impossible-date": (TARGETS, "publish = true", "publish = 2026-02-30", ("targets.toml",)),
    "deeply-nested": (TARGETS, "sm = []", f"sm = {'[' * 5000}{']' * 5000}", ("targets.toml", "nested")),
    "short-hash": (RECIPE, "sha256 = \"9e49", "sha256 = \"", ("deepspeed.toml", "release[0].sha256")),
    "both-identities": (
        RECIPE, 'kind = "source"',
        'kind = "source"\nrepository = "https://github.com/a/b"\ncommit = "' + "0" * 40 + '"',
        ("deepspeed.toml", "release[0]", "repository"),
    ),
    "unknown-kind": (RECIPE, 'kind = "source"', 'kind = "sdist"', ("release[0].kind", "source")),
    "bad-range": (RECIPE, 'python = ">=3.8"', 'python = "=>3.8"', ("deepspeed.toml", "release[0].python", "=>3.8")),
    "bad-requirement": (RECIPE, '"einops"', '"einops >> 1"', ("deepspeed.toml", "release[0].requires[0]")),
    "bad-python": (TARGETS, 'python = "3.11"', 'python = "3.11.7"', ("cpu.python", "3.11.7")),
    "name-in-target": (TARGETS, 'python = "3.11"', 'name = "x"\npython = "3.11"', ("targets.toml", "cpu.name")),
    "name-in-recipe": (RECIPE, 'module = "deepspeed"', 'name = "x"\nmodule = "deepspeed"', ("deepspeed.toml", "name")),
    "unknown-placeholder": (RECIPE, '"AVX256"', '"{smm}"', ("deepspeed.toml", "DS_SIMD_WIDTH", "'sm'")),
    "newline-in-variable": (
        RECIPE, '"AVX256"', '"AVX256\\nLD_PRELOAD=x"', ("deepspeed.toml", "build.env.DS_SIMD_WIDTH"),
    ),
    "newline-in-key": (TARGETS, "publish = true", 'publish = true\n"a\\nb[red]\\u001b" = 1', ("cpu.a b[red]",)),
    "python-too-new": (
        RECIPE, 'python = ">=3.8"', 'python = ">=3.12"',
        ("[cpu.packages] deepspeed", "needs Python >=3.12", "has 3.11"),
    ),
    "torch-too-new": (RECIPE, 'torch = ">=2.0.0"', 'torch = ">=3"', ("deepspeed 0.19.8", "needs torch >=3", "2.13.0")),
    "cuda-needed": (RECIPE, 'cuda = "none"', 'cuda = ">=12.1"', ("deepspeed 0.19.8", "needs CUDA >=12.1", "none")),
    "unknown-package": (
        TARGETS, "deepspeed = ", "deepsped = ", ("targets.toml [cpu.packages] deepsped", "'deepspeed'"),
    ),
    "unknown-version": (TARGETS, '"0.19.8"', '"0.19.7"', ("[cpu.packages] deepspeed", "0.19.7", "'0.19.8'")),
    "circular-needs": (
        "recipes/packages/transformers.toml", 'compiler = "none"', 'compiler = "none"\nneeds = ["transformers"]',
        ("[build] needs", "transformers -> transformers"),
    ),
    "needs-what-is-not-there": (RECIPE, 'needs = ["torch"]', 'needs = ["apex"]', ("deepspeed.toml: [build]", "'apex'")),
    "contradicting-packages": (
        RECIPE, '"torch>=2.0.0"', '"torch<2"', ("deepspeed 0.19.8", "torch<2", "torch 2.13.0+cpu"),
    ),
    "two-releases-fit": (RECIPE, "[[release]]", None, ("deepspeed", "2 releases")),
    "module-of-two-lines": (RECIPE, 'module = "deepspeed"', 'module = "a\\nb"', ("deepspeed.toml", "module is")),
    "module-that-is-a-path": (
        RECIPE, 'module = "deepspeed"', 'module = "/etc/passwd"',
        ("deepspeed.toml", "module is"),
    ),
    "module-that-is-a-template": (RECIPE, 'module = "deepspeed"', 'module = "{sm}"', ("deepspeed.toml", "module is")),
    "summary-of-two-lines": (
        RECIPE, 'summary = "DeepSpeed', 'summary = "a\\nDeepSpeed', ("deepspeed.toml", "summary", "one line"),
    ),
    "need-that-is-a-path": (
        RECIPE, 'needs = ["torch"]', 'needs = ["/etc/passwd"]',
        ("deepspeed.toml", "build.needs[0]"),
    ),
    "emptied-requires": (
        RECIPE, 'requires = ["setuptools", "wheel", "ninja", "py-cpuinfo"]', "requires = []",
        ("deepspeed.toml", "build.requires is an array"),
    ),
    "no-requires": (
        RECIPE, 'requires = ["setuptools", "wheel", "ninja", "py-cpuinfo"]', "",
        ("deepspeed.toml", "build.requires is missing"),
    ),
    "open-brace-in-variable": (RECIPE, '"AVX256"', '"{sm"', ("deepspeed.toml", "build.env.DS_SIMD_WIDTH", "brace")),
    "empty-braces-in-variable": (RECIPE, '"AVX256"', '"{}"', ("deepspeed.toml", "build.env.DS_SIMD_WIDTH", "brace")),
    "variable-with-a-bad-name": (
        RECIPE, 'DS_SIMD_WIDTH = ', '"DS WIDTH" = ',
        ("deepspeed.toml", "the name of build.env.DS WIDTH does not match"),
    ),
    "hardware-that-is-a-path": (
        TARGETS, 'proves_on = ["x86-64"]', 'proves_on = ["/etc/passwd"]',
        ("cpu.proves_on[0]",),
    ),
    "package-that-is-a-path": (TARGETS, 'torchao = "0.18.0"', '"../torchao" = "0.18.0"', ("cpu.packages.../torchao",)),
    "runner-that-is-a-template": (TARGETS, 'runner = "ubuntu-24.04"', 'runner = "{runner}"', ("cpu.runner",)),
    "address-that-is-a-template": (
        "recipes/packages/torch.toml", "https://download.pytorch.org/whl/cpu", "https://{host}/whl/cpu",
        ("torch.toml", "index is"),
    ),
    "every-fault-of-a-table": (
        TARGETS, 'python = "3.11"\ncuda = "none"', 'python = "3"\ncuda = 1', ("cpu.python", "cpu.cuda", "; also, "),
    ),
    "a-typo-is-told-once": (TARGETS, "publish = true", "publsh = true", ("cpu.publsh is not a known key",)),
    "target-without-quotes": (
        TARGETS, '["cu13.0-torch2.11"]', "[cu13.0-torch2.11]",
        ('[cu13.0-torch2.11] is read as tables inside one another', '["cu13.0-torch2.11"], with the quotes'),
    ),
    "limit-of-a-misspelt-package": (
        LIMITS, 'package = "torchao"', 'package = "torcha0"', ("limits.toml", "limit[", "torcha0", "'torchao'"),
    ),
    "limit-on-a-misspelt-package": (
        LIMITS, 'needs = { torch = "<2.2" }', 'needs = { tourch = "<2.2" }',
        ("limits.toml", "limit[", "(ms-amp <=0.4.0) names tourch", "'torch'"),
    ),
    "limit-with-an-underscore": (
        LIMITS, 'package = "flash-attn"', 'package = "flash_attn"',
        ("limits.toml: limit[", "names flash_attn", "'flash-attn'"),
    ),
    "limit-on-a-capital": (
        LIMITS, "needs = { cuda =", "needs = { CUDA =", ("limits.toml: limit[", "names CUDA", "'cuda'"),
    ),
    "limit-with-a-misspelt-key": (LIMITS, "reason = ", "raeson = ", ("limit[0].raeson", "'reason'")),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
def test_wrong_data_is_refused_with_file_and_key(checkout: Checkout, case: str) -> None:
    """A wrong text of a TOML file ends the plan: exit code 2 and one sentence."""
    file, old, new, naming = TEXTS[case]
    path = checkout.root / file
    if new is None:
        path.write_text(path.read_text() + path.read_text().partition(old)[1] + path.read_text().partition(old)[2])
    else:
        checkout.edit(path, old, new)
    checkout.refuse("plan", "cpu", naming=naming)


def test_all_faults_of_a_catalogue_are_told_at_once(checkout: Checkout) -> None:
    """In three files, and two in one of them."""
    checkout.edit(checkout.targets, "publish = true", 'publish = "yes"')
    checkout.edit(checkout.recipe("deepspeed"), 'module = "deepspeed"', 'module = "a b"')
    checkout.edit(checkout.recipe("torchao"), 'summary = "', 'sumary = "')
    checkout.edit(checkout.root / LIMITS, "versions = ", "version = ")
    naming = ("cpu.publish", "deepspeed.toml: module", "torchao.toml: sumary", "limits.toml: limit[0].version")
    checkout.refuse("plan", "cpu", naming=naming)


def test_all_wrong_pins_of_a_target_are_told_at_once(checkout: Checkout) -> None:
    checkout.edit(checkout.targets, 'transformers = "4.40.2"', 'transformers = "4.40.9"')
    checkout.edit(checkout.targets, 'deepspeed = "0.19.8"', 'deepsped = "0.19.8"')
    checkout.refuse("plan", "cpu", naming=("transformers: no release 4.40.9", "deepsped: no recipe"))


BYTES: dict[str, tuple[Callable[[str], bytes], str]] = {
    "utf-16": (lambda text: text.encode("utf-16"), "UTF-8"),
    "utf-16-without-mark": (lambda text: text.encode("utf-16-be"), ""),
    "latin-1": (lambda text: ("# \xe9\n" + text).encode("latin-1"), "UTF-8"),
    "byte-order-mark": (lambda text: text.encode("utf-8-sig"), ""),
    "nul": (lambda text: text.encode() + b"\0", "line"),
    "bare-return": (lambda text: text.replace("\n", "\r").encode(), "line"),
}


@pytest.mark.parametrize("file", [TARGETS, RECIPE])
@pytest.mark.parametrize("case", BYTES)
def test_wrong_encoding_is_refused(checkout: Checkout, file: str, case: str) -> None:
    """Bytes that are not TOML in UTF-8 are refused, whichever file holds them."""
    spoil, name = BYTES[case]
    path = checkout.root / file
    path.write_bytes(spoil(path.read_text()))
    checkout.refuse("plan", "cpu", naming=(path.name, name))


@pytest.mark.parametrize("file", [TARGETS, RECIPE])
def test_an_empty_file_is_refused(checkout: Checkout, file: str) -> None:
    """An empty file declares no target, or lacks its keys."""
    (checkout.root / file).write_text("")
    checkout.refuse("plan", "cpu", naming=(Path(file).name,))


def test_a_missing_file_is_refused(checkout: Checkout) -> None:
    """A checkout without its matrix is not one."""
    checkout.targets.unlink()
    checkout.refuse("plan", "cpu", naming=("targets.toml",))


def test_a_folder_where_a_file_should_be_is_refused(checkout: Checkout) -> None:
    """What cannot be read is named."""
    checkout.targets.unlink()
    checkout.targets.mkdir()
    checkout.refuse("plan", "cpu", naming=("targets.toml",))


def test_a_recipe_is_named_as_its_distribution(checkout: Checkout) -> None:
    """Flash_Attn.toml would never be found: the normalised name is asked for."""
    checkout.recipe("deepspeed").rename(checkout.recipe("Deep_Speed"))
    checkout.refuse("plan", "cpu", naming=("Deep_Speed.toml", "deep-speed.toml"))


def test_an_unknown_target_is_refused_with_the_nearest(checkout: Checkout) -> None:
    """The nearest known target is suggested, and a name that is markup, or several lines, is quoted as it is."""
    checkout.refuse("plan", "cpy", naming=("'cpy'", "'cpu'"))
    checkout.refuse("plan", "[red]\n", naming=("[red]",))


def test_needs_in_a_circle_are_named(tiny: Tiny) -> None:
    """Two packages that each need the other built first."""
    tiny.plant("tinywheel", {"x": ""})
    tiny.edit(tiny.recipe("tinypkg"), "[build]", '[build]\nneeds = ["tinywheel"]')
    tiny.edit(tiny.recipe("tinywheel"), "[build]", '[build]\nneeds = ["tinypkg"]')
    tiny.refuse("plan", "tiny", naming=("circle", "tinypkg -> tinywheel"))


@pytest.mark.parametrize(
    ("option", "naming"),
    [
        (("--python", "3.12"), ("torch 2.13.0+cpu", "needs Python ==3.11.*", "has 3.12")),
        (("--python", "three"), ("command line", "python", "three")),
        (("--python", "3.11.x"), ("command line", "python", "3.11.x")),
        (("--sm", "9.0"), ("cpu", "--sm")),
    ],
)
def test_a_what_if_that_cannot_be_is_refused(
    checkout: Checkout, option: tuple[str, str], naming: tuple[str, ...]
) -> None:
    """Other Pythons and GPUs are checked as the data is."""
    checkout.refuse("plan", "cpu", *option, naming=naming)


def test_another_patch_release_of_python_plans_the_same(checkout: Checkout) -> None:
    assert checkout.succeed("plan", "cpu", "--python", "3.11.7").startswith("cpu: Python 3.11, ")


def test_a_what_if_with_a_wrong_architecture_is_refused(tiny: Tiny) -> None:
    """--sm takes compute capabilities: 9.0, not sm_90."""
    tiny.edit(tiny.targets, 'cuda = "none"\nglibc = "2.28"\nsm', 'cuda = "13.0"\nglibc = "2.28"\nsm')
    tiny.succeed("plan", "tiny", "--sm", "9.0,10.0")
    tiny.refuse("plan", "tiny", "--sm", "sm_90", naming=("command line", "sm", "sm_90", "9.0"))


# 200 generated files, all in this process: a subprocess for each, as in the cases above, would take minutes.
VALUES = [
    "nan", "inf", "-1", "0", "1e400", "99999999999999999999", "true", '""', '"\\u0000"', "[]", "{}",
    "[[[]]]", "1979-05-27",
    "{ a = 1 }", '"{sm"', "'''\n'''", "0x", '"🦙"',
]  # fmt: skip


@st.composite
def _spoiled(draw: st.DrawFn, text: str) -> str:
    """A real file with one to three faults: a line dropped, doubled, moved, renamed, cut, given another value."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[at].partition(" = ")
        match draw(st.sampled_from(["drop", "double", "move", "rename", "cut", "value", "value", "text"])):
            case "drop":
                lines[at] = ""
            case "double":
                lines.insert(at, lines[at])
            case "move":
                lines.insert(draw(st.integers(0, len(lines))), lines[at])
            case "rename":
                lines[at] = draw(st.text("abc._-\"' \n", max_size=8)) + equals + lines[at].partition(" = ")[2]
            case "cut":
                lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
            case "value":
                lines[at] = f"{key} = {draw(st.sampled_from(VALUES))}"
            case "text":
                lines[at] = draw(st.text(max_size=20))
    return "\n".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy for all generated files."""
    return Checkout(tmp_path_factory.mktemp("generated")).root


FILES = [TARGETS, *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("recipes/packages/*.toml"))]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(data=st.data(), file=st.sampled_from(FILES))
def test_200_generated_files_are_planned_or_refused(folder: Path, data: st.DataObject, file: str) -> None:
    """No TOML, however spoiled, ends in anything but a plan or a refusal that names a file and a next step."""
    path = folder / file
    sound = path.read_bytes()
    try:
        path.write_bytes(data.draw(_spoiled(sound.decode())).encode("utf-8", "surrogatepass"))
        chosen = plan(Catalogue(folder), "cpu")
        assert re.fullmatch(r"[0-9a-f]{64}", chosen.stack)
    except Refusal as refusal:
        assert str(refusal).endswith((".", "?"))
        assert re.search(r"\.toml|recipes/packages|target", str(refusal)), refusal
    finally:
        path.write_bytes(sound)


def test_generated_bytes_end_in_exit_code_2(checkout: Checkout) -> None:
    """The same through the command, for a few random files."""
    draw = random.Random(2)
    for _ in range(5):
        checkout.targets.write_bytes(draw.randbytes(200))
        checkout.refuse("plan", "cpu", naming=("targets.toml",))
