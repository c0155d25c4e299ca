"""The rules of smoke_tests/: read without importing it, and tried on planted rooms; none of this needs torch."""

import ast
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recipes.tests.rooms import HERE, PlantedRoom, fake_nvidia_smi

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT / "smoke_tests"
FILES = sorted(ROOM.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]

by_name = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOM).as_posix())
by_test_file = pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.name)


# --- what the source says ---


@cache
def tree_of(path: Path) -> ast.Module:
    """A file of the room as syntax, parsed once for all tests that read it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_in(path: Path) -> list[ast.FunctionDef]:
    """The test functions of a file."""
    return [
        node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    ]


def claim_of(test: ast.FunctionDef) -> ast.Call:
    """The one @proves(...) of a test."""
    calls = [call for call in test.decorator_list if isinstance(call, ast.Call)]
    (claim,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "proves"]
    return claim


def arguments_of(test: ast.FunctionDef) -> tuple[str, dict[str, Any]]:
    """Sentence and keyword arguments of a test's claim; ValueError if one of them is no literal."""
    claim = claim_of(test)
    (sentence,) = (ast.literal_eval(value) for value in claim.args)
    return sentence, {str(pair.arg): ast.literal_eval(pair.value) for pair in claim.keywords}


def imports_of(path: Path, top_level_only: bool) -> set[str]:
    """First parts of the modules that a file imports."""
    tree = tree_of(path)
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@by_name
def test_every_file_is_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


@by_test_file
def test_every_claim_is_literal(path: Path) -> None:
    tests = functions_in(path)
    assert tests, "no test"
    for test in tests:
        sentence, named = arguments_of(test)
        seeds = named.get("seed", ())
        assert isinstance(sentence, str)
        assert all(re.fullmatch(r"[A-E]\d\d", seed) for seed in ([seeds] if isinstance(seeds, str) else seeds))


def test_every_sentence_is_made_once() -> None:
    sentences = [arguments_of(test)[0] for path in TEST_FILES for test in functions_in(path)]
    assert len(set(sentences)) == len(sentences)


@by_test_file
def test_tests_are_functions_of_the_module(path: Path) -> None:
    # The claims of a file that cannot be imported are read from its top level.
    tree = tree_of(path)
    assert {test.name for test in functions_in(path)} == {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }


@by_test_file
def test_every_claim_is_about_a_package_with_a_recipe(path: Path) -> None:
    recipes = {file.stem: tomllib.loads(file.read_text()) for file in (ROOT / "recipes" / "packages").glob("*.toml")}
    known = set(recipes) | {recipe.get("module", name) for name, recipe in recipes.items()}
    for test in functions_in(path):
        if "package" not in [argument.arg for argument in test.args.args]:
            module = path.stem.removeprefix("test_")
            package = arguments_of(test)[1].get("package")
            # A claim that runs once per implementation is about each implementation's package.
            marks = {ast.unparse(mark.func) for mark in test.decorator_list if isinstance(mark, ast.Call)}
            assert package in recipes if package else "every" in marks or {module, module.replace("_", "-")} & known


@by_name
def test_the_room_does_not_need_the_tool(path: Path) -> None:
    assert not imports_of(path, top_level_only=False) & {"recipes", "pydantic", "rich"}


@by_name
def test_only_test_files_import_packages_under_test(path: Path) -> None:
    if path not in TEST_FILES and path.name not in (
        "engine.py",
        "train.py",
        "guarded_loop.py",
    ):  # these are standalone programs
        allowed = {*sys.stdlib_module_names, "pytest", "numpy", "torch", "smoke_tests", "training"}
        assert imports_of(path, top_level_only=True) <= allowed


@by_test_file
def test_no_test_imports_another(path: Path) -> None:
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
    imported = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    assert not [name for name in imported if any(part.startswith("test_") for part in name.split("."))]


# --- what the rules do, tried on planted rooms ---


GOOD = '@proves("it adds up")\ndef test_sum():\n    assert 1 + 1 == 2\n'


def test_a_test_without_a_claim_is_refused(room: PlantedRoom) -> None:
    room.plant(GOOD + "def test_nothing():\n    pass\n")
    result = room.run()
    assert result.returncode == 4
    assert re.search(r"ERROR: .*test_nothing makes no claim", result.stderr)
    assert not room.evidence.exists()


def test_a_claim_made_twice_is_refused(room: PlantedRoom) -> None:
    room.plant(GOOD + '@proves("it adds up")\ndef test_again():\n    pass\n')
    result = room.run()
    assert result.returncode == 4
    assert re.search(r"ERROR: .*test_sum and .*test_again make the same claim", result.stderr)


def test_rows_of_one_test_make_one_claim(room: PlantedRoom) -> None:
    room.plant('@pytest.mark.parametrize("x", [1, 2])\n@proves("x is positive")\ndef test_x(x):\n    assert x > 0\n')
    assert room.run().returncode == 0
    assert list(room.claims()) == ["test_alpha.py::test_x[1]", "test_alpha.py::test_x[2]"]


SKIPS = {
    "skip": '@proves("a")\ndef test_a():\n    pytest.skip("no part")\n',
    "importorskip": '@proves("a")\ndef test_a():\n    pytest.importorskip("no_such_module", reason="no part")\n',
    "mark": '@pytest.mark.skip(reason="no part")\n@proves("a")\ndef test_a():\n    pass\n',
    "module": 'pytest.skip("no part", allow_module_level=True)\n@proves("a")\ndef test_a():\n    pass\n',
    "needs": '@needs(isa="no part")\n@proves("a")\ndef test_a():\n    pass\n',
}


@pytest.mark.parametrize("text", SKIPS.values(), ids=SKIPS)
def test_a_skip_on_declared_hardware_is_a_failure(room: PlantedRoom, text: str) -> None:
    room.plant(text)
    assert room.run().returncode == 1
    outcome, reason = room.claims()["test_alpha.py::test_a"]
    assert outcome == "refuted"
    assert reason.startswith(f"skipped on declared hardware ({HERE}, target planted)")
    assert "no part" in reason


ELSEWHERE = {
    "too few GPUs": '@needs(gpus=2)\n@proves("a")\ndef test_a():\n    pass\n',
    "not permitted": "from smoke_tests.claims import Elsewhere\n"
    '@proves("a")\ndef test_a():\n    raise Elsewhere("needs 2 hosts")\n',
}


@pytest.mark.parametrize("text", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_one_machine_lacks_is_unproven_on_declared_hardware_too(
    room: PlantedRoom, text: str, tmp_path: Path
) -> None:
    fake_nvidia_smi(tmp_path / "bin", "NVIDIA H200, 9.0, 143771, 580.159")
    room.describe("alpha", cuda="13.0", proves_on=("H200",))
    room.plant(text)
    assert room.run(PATH=f"{tmp_path}/bin:{os.environ['PATH']}").returncode == 0
    outcome, reason = room.claims()["test_alpha.py::test_a"]
    assert outcome == "unproven" and reason.startswith("needs 2 ")


@pytest.mark.parametrize("text", SKIPS.values(), ids=SKIPS)
def test_a_skip_elsewhere_is_unproven(room: PlantedRoom, text: str) -> None:
    room.describe("alpha", proves_on=("H100",))
    room.plant(text)
    assert room.run().returncode == 0
    outcome, reason = room.claims()["test_alpha.py::test_a"]
    assert outcome == "unproven"
    assert "no part" in reason


def test_an_expected_failure_is_refuted(room: PlantedRoom) -> None:
    room.plant('@pytest.mark.xfail(reason="known")\n@proves("a")\ndef test_a():\n    assert False\n')
    assert room.run().returncode == 1
    assert room.claims() == {"test_alpha.py::test_a": ("refuted", "known to fail: known")}


def test_a_failure_of_a_fixture_is_refuted(room: PlantedRoom) -> None:
    broken = "@pytest.fixture\ndef broken():\n    yield\n    raise OSError('no room')\n"
    room.plant(broken + '@proves("a")\ndef test_a(broken):\n    pass\n')
    assert room.run().returncode == 1
    assert room.claims() == {"test_alpha.py::test_a": ("refuted", "OSError: no room")}


def test_a_package_that_the_manifest_lacks_is_deselected(room: PlantedRoom) -> None:
    room.plant(GOOD)
    room.plant(GOOD.replace("adds", "sums"), "test_beta.py")
    assert room.run().returncode == 0
    assert list(room.claims()) == ["test_alpha.py::test_sum"]


def test_packages_are_named_by_module_by_hyphen_and_by_decorator(room: PlantedRoom) -> None:
    room.describe("flash-attn", "torchao")
    room.plant(GOOD, "test_flash_attn.py")
    room.plant('@proves("a", package="torchao")\ndef test_a():\n    pass\n', "test_training.py")
    room.plant('@proves("b")\ndef test_b(package):\n    assert package\n', "test_environment.py")
    packages = json.loads(room.manifest.read_text())
    for entry in packages["packages"].values():
        entry["record_sha256"] = "0" * 64
    room.manifest.write_text(json.dumps(packages))
    assert room.run().returncode == 0
    assert [(claim["id"], claim["package"]) for claim in room.outcomes()["claims"]] == [
        ("test_environment.py::test_b[flash-attn]", "flash-attn"),
        ("test_flash_attn.py::test_sum", "flash-attn"),
        ("test_environment.py::test_b[torchao]", "torchao"),
        ("test_training.py::test_a", "torchao"),
    ]


def test_a_target_without_patches_makes_no_claim_about_any(room: PlantedRoom) -> None:
    room.plant(GOOD + '@proves("patched")\ndef test_p(package, patch):\n    pass\n')
    assert room.run().returncode == 0
    assert list(room.claims()) == ["test_alpha.py::test_sum"]


def test_a_claim_of_later_versions_is_deselected(room: PlantedRoom) -> None:
    room.plant('@proves("a", since="1.10")\ndef test_a():\n    pass\n' + GOOD.replace('up"', 'up", since="1.2"'))
    assert room.run().returncode == 0
    assert list(room.claims()) == ["test_alpha.py::test_sum"]


def test_a_claim_of_earlier_versions_is_deselected(room: PlantedRoom) -> None:
    room.plant('@proves("a", until="1.2")\ndef test_a():\n    pass\n' + GOOD.replace('up"', 'up", until="1.10"'))
    assert room.run().returncode == 0
    assert list(room.claims()) == ["test_alpha.py::test_sum"]


def test_a_claim_about_implementations_that_the_target_lacks_is_deselected(room: PlantedRoom) -> None:
    room.plant(GOOD + '@pytest.mark.parametrize("column", [])\n@proves("a")\ndef test_a(column):\n    pass\n')
    assert room.run().returncode == 0
    assert list(room.claims()) == ["test_alpha.py::test_sum"]


def test_cuda_claims_are_not_for_a_target_without_cuda(room: PlantedRoom) -> None:
    room.plant(GOOD + '@needs(sm=(8, 9))\n@proves("fp8")\ndef test_fp8():\n    pass\n')
    assert room.run().returncode == 0
    assert list(room.claims()) == ["test_alpha.py::test_sum"]


def test_cuda_claims_are_unproven_on_another_machine(room: PlantedRoom, tmp_path: Path) -> None:
    room.describe("alpha", cuda="13.0", proves_on=("H200",))
    room.plant('@needs(sm=(8, 9))\n@proves("fp8")\ndef test_fp8():\n    pass\n')
    fake_nvidia_smi(tmp_path / "bin", "NVIDIA A100-SXM4-80GB, 8.0, 81920, 550.54.15")
    assert room.run(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}").returncode == 0
    reason = "needs compute capability 8.9, this machine has 8.0 (NVIDIA A100-SXM4-80GB)"
    assert room.claims() == {"test_alpha.py::test_fp8": ("unproven", reason)}
    assert room.outcomes()["hardware"]["name"] == "A100"


def test_nothing_to_prove_is_an_error(room: PlantedRoom) -> None:
    room.plant(GOOD, "test_beta.py")
    result = room.run()
    assert result.returncode == 4
    assert "no claim is about target planted" in result.stderr
    assert not room.evidence.exists()


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_package_that_cannot_be_imported_refutes_its_own_claims(room: PlantedRoom, error: str) -> None:
    room.describe("alpha", "beta")
    room.plant(GOOD)
    fails = f'raise {error}("undefined symbol: _Z3foo")\n'
    rows = '@pytest.mark.parametrize("x", [1])\n@proves("c", seed="A09")\ndef test_c(x):\n    pass\n'
    room.plant(fails + '@proves("b")\ndef test_b():\n    pass\n' + rows, "test_beta.py")
    assert room.run().returncode == 1
    reason = f"{error}: undefined symbol: _Z3foo"
    assert room.claims() == {
        "test_alpha.py::test_sum": ("proved", ""),
        "test_beta.py::test_b": ("refuted", reason),
        "test_beta.py::test_c": ("refuted", reason),
    }
    assert room.outcomes()["claims"][2]["seed"] == ["A09"]


def test_outcomes_say_what_was_proved_where(room: PlantedRoom) -> None:
    measure = "measured['error'], measured['files'], measured['kernel'] = 0.5, 3, 'flash'\n    "
    measure += "measured['worst'] = float('inf')\n    "
    room.plant(f'@proves("it holds", seed=("A09", "A10"))\ndef test_a(measured):\n    {measure}assert True\n')
    result = room.run()
    assert result.returncode == 0
    outcomes = room.outcomes()
    assert list(outcomes) == ["target", "stack", "hardware", "python", "files", "started", "seconds", "ran", "claims"]
    assert (outcomes["target"], outcomes["stack"]) == ("planted", "5" * 64)
    assert list(outcomes["hardware"]) == ["name", "arch", "cpu", "isa", "gpus", "driver"]
    assert outcomes["hardware"]["name"] == HERE
    assert outcomes["python"] == platform.python_version()
    assert outcomes["started"].endswith("+00:00")
    (claim,) = outcomes["claims"]
    assert 0 < claim.pop("seconds") < outcomes["seconds"]
    assert claim == {
        "id": "test_alpha.py::test_a",
        "claim": "it holds",
        "seed": ["A09", "A10"],
        "package": "alpha",
        "outcome": "proved",
        "reason": "",
        "measured": {"error": 0.5, "files": 3, "kernel": "flash", "worst": "inf"},
    }
    (line,) = [line for line in result.stdout.splitlines() if "it holds" in line]
    assert re.fullmatch(r"proved +alpha +it holds; error 0.5, files 3, kernel flash, worst inf \(\d+\.\d s\)", line)


def test_several_processes_write_the_same_evidence_as_one(room: PlantedRoom) -> None:
    rows = '@pytest.mark.parametrize("x", range(9))\n@proves("c")\ndef test_c(x, measured):\n    measured["x"] = x\n'
    skips = '@proves("s")\ndef test_s():\n    pytest.skip("no")\n@proves("f")\ndef test_f():\n    assert 0, "off"\n'
    room.plant(GOOD + rows + skips)
    printed, outcomes = {}, {}
    for processes in ("-n0", "-n2"):
        result = room.run(processes)
        assert result.returncode == 1
        printed[processes] = {re.sub(r" \(.* s\)", "", line) for line in result.stdout.splitlines() if "alpha" in line}
        outcomes[processes] = [{**claim, "seconds": 0} for claim in room.outcomes()["claims"]]
    assert outcomes["-n0"] == outcomes["-n2"]
    assert len(outcomes["-n2"]) == 12
    assert {line for line in printed["-n0"] if line.startswith("proved")} <= printed["-n2"]


def test_claims_of_one_group_run_in_one_process_and_the_others_anywhere(room: PlantedRoom) -> None:
    """A claim of no group waits until a second process has run one, so that no process can take them all."""
    ours = '@proves("{0}")\n@pytest.mark.parametrize("row", range(4))\ndef test_{0}(row, measured):\n'
    ours += '    measured["process"] = os.environ["PYTEST_XDIST_WORKER"]\n'
    waits = '    pathlib.Path("apart", measured["process"]).touch()\n    until = time.monotonic() + 60\n'
    waits += '    while len(os.listdir("apart")) < 2 and time.monotonic() < until:\n        time.sleep(0.05)\n'
    room.plant(
        "import os, pathlib, time\nimport pytest\n"
        + '@pytest.mark.xdist_group("a group")\n'
        + ours.format("together")
        + ours.format("apart")
        + waits
    )
    (room.folder.parent / "apart").mkdir()
    assert room.run("-n2").returncode == 0
    processes: dict[str, set[str]] = {}
    for claim in room.outcomes()["claims"]:
        processes.setdefault(claim["claim"], set()).add(claim["measured"]["process"])
    assert len(processes["together"]) == 1
    assert len(processes["apart"]) == 2


def test_the_pytest_of_python_3_8_runs_them_too(room: PlantedRoom, tmp_path: Path) -> None:
    """What a lock for Python 3.8 pins, older than every other, lacks some options."""
    pinned = re.findall(r"^(pytest(?:-xdist)?==\S+)", (ROOT / "recipes" / "lock" / "ngc-23.04.txt").read_text(), re.M)
    older = tmp_path / "older"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", older, *pinned], check=True)
    room.plant(GOOD)
    result = room.run("-n2", PYTHONPATH=str(older))
    assert result.returncode == 0, result.stderr
    assert room.claims() == {"test_alpha.py::test_sum": ("proved", "")}
    asked = "import pytest, xdist; print(f'pytest=={pytest.__version__} pytest-xdist=={xdist.__version__}')"
    env = {**os.environ, "PYTHONPATH": str(older)}
    listed = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True)
    assert listed.stdout.split() == pinned


def test_a_claim_whose_process_dies_is_refuted_and_the_others_run(room: PlantedRoom) -> None:
    dies = 'import os\n@proves("b")\ndef test_b():\n    os._exit(3)\n'
    room.plant(GOOD + dies + '@proves("c")\ndef test_c():\n    pass\n')
    assert room.run("-n2").returncode == 1
    assert room.claims() == {
        "test_alpha.py::test_sum": ("proved", ""),
        "test_alpha.py::test_b": ("refuted", "the process that ran it died"),
        "test_alpha.py::test_c": ("proved", ""),
    }


@pytest.mark.parametrize(("cuda", "cores", "processes"), [("none", 8, "2"), ("13.0", 2, "1"), ("13.0", 8, "6")])
def test_claims_run_in_several_processes(room: PlantedRoom, cuda: str, cores: int, processes: str) -> None:
    room.describe(cuda=cuda)
    (room.folder.parent / "sitecustomize.py").write_text(
        f"import os\nos.sched_getaffinity = lambda _: range({cores})\n"
    )
    body = 'import os\n    measured["n"] = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")\n'
    room.plant(f'@proves("n")\ndef test_n(measured):\n    {body}')
    assert room.run("-nauto", PYTHONPATH=str(room.folder.parent)).returncode == 0
    assert room.outcomes()["claims"][0]["measured"] == {"n": processes}


def test_a_failure_is_shown_and_recorded(room: PlantedRoom) -> None:
    room.plant('@proves("a")\ndef test_a(measured):\n    measured["x"] = 7\n    assert measured["x"] < 7, "too far"\n')
    result = room.run()
    assert result.returncode == 1
    assert "FAILED" in result.stdout
    assert "assert measured" in result.stdout
    assert room.claims() == {"test_alpha.py::test_a": ("refuted", "AssertionError: too far")}
    assert room.outcomes()["claims"][0]["measured"] == {"x": 7}


def test_a_claim_that_was_not_reached_is_unproven(room: PlantedRoom) -> None:
    room.plant('@proves("a")\ndef test_a():\n    assert False\n' + GOOD)
    assert room.run("-x").returncode == 1
    assert room.claims()["test_alpha.py::test_sum"] == ("unproven", "not run")


def test_a_killed_run_leaves_no_outcomes_not_even_older_ones(room: PlantedRoom) -> None:
    room.plant(GOOD)
    assert room.run().returncode == 0
    room.plant('import pathlib, time\n@proves("a")\ndef test_a():\n    pathlib.Path("up").touch(); time.sleep(60)\n')
    with subprocess.Popen(room.command(), cwd=room.folder.parent, stdout=subprocess.DEVNULL) as process:
        while not (room.folder.parent / "up").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert list(room.evidence.parent.iterdir()) == []


def test_outcomes_that_cannot_be_written_are_refused_before_anything_runs(room: PlantedRoom) -> None:
    room.plant(GOOD)
    room.evidence.parent.write_text("a file where a folder should be")
    result = room.run()
    assert result.returncode == 4
    assert "cannot write evidence to" in result.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"target": "planted"}', "\x00"])
def test_an_unusable_manifest_is_refused_in_one_sentence(room: PlantedRoom, text: str) -> None:
    room.plant(GOOD)
    room.manifest.write_text(text)
    result = room.run()
    assert result.returncode == 4
    assert "Traceback" not in result.stderr + result.stdout
    assert re.search(r"ERROR: the manifest .* cannot be used", result.stderr)


def test_a_missing_manifest_is_refused_in_one_sentence(room: PlantedRoom) -> None:
    room.plant(GOOD)
    room.manifest.unlink()
    result = room.run()
    assert result.returncode == 4
    assert "Traceback" not in result.stderr + result.stdout
    assert re.search(r"ERROR: the manifest .* cannot be used", result.stderr)


def test_a_warning_that_our_own_file_causes_refutes_its_claim(room: PlantedRoom) -> None:
    warns = "import warnings\n\ndef warn():\n    warnings.warn('{0}')\n"
    (room.folder / "operators").mkdir()
    (room.folder / "operators" / "beside.py").write_text(warns.format("a module"))
    (room.folder.parent / "alpha.py").write_text(warns.format("a package"))
    calls = "import alpha\nfrom smoke_tests.operators import beside\n" + warns.format("ours")
    claims = {"ours": "warn", "module": "beside.warn", "package": "alpha.warn"}
    room.plant(
        calls + "".join(f"@proves('{name}')\ndef test_{name}():\n    {call}()\n" for name, call in claims.items())
    )
    assert room.run().returncode == 1
    assert room.claims() == {
        "test_alpha.py::test_ours": ("refuted", "UserWarning: ours"),
        "test_alpha.py::test_module": ("refuted", "UserWarning: a module"),
        "test_alpha.py::test_package": ("proved", ""),
    }


def test_a_warning_about_what_our_own_file_imports_refutes_its_claim(room: PlantedRoom) -> None:
    (room.folder.parent / "deprecated_elsewhere.py").write_text(
        "import warnings\nwarnings.warn('deprecated', DeprecationWarning, stacklevel=2)\n"
    )
    room.plant('@proves("a")\ndef test_a():\n    import deprecated_elsewhere\n')
    assert room.run(PYTHONPATH=str(room.folder.parent)).returncode == 1
    assert room.claims() == {"test_alpha.py::test_a": ("refuted", "DeprecationWarning: deprecated")}


def test_numbers_depend_on_the_seed_and_not_on_the_order(room: PlantedRoom) -> None:
    draw = '@proves("{0}")\ndef test_{0}(measured):\n    import random\n    measured["x"] = random.random()\n'

    def drawn(*names: str, seed: str) -> dict[str, float]:
        room.plant("".join(draw.format(name) for name in names))
        assert room.run(FUSEBOX_SEED=seed).returncode == 0
        return {claim["claim"]: claim["measured"]["x"] for claim in room.outcomes()["claims"]}

    first = drawn("a", "b", seed="1")
    assert drawn("b", "a", seed="1") == first
    assert drawn("a", "b", seed="2") != first
