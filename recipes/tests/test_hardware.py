"""smoke_tests/hardware.py: what it finds on machines that are faked here."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from recipes.tests.rooms import HERE, fake_nvidia_smi

ROOM = Path(__file__).resolve().parents[2] / "smoke_tests"


def hardware() -> ModuleType:
    """smoke_tests/hardware.py, fresh, so that it probes again."""
    spec = importlib.util.spec_from_file_location("hardware", ROOM / "hardware.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
    ],
)
def test_a_gpu_is_named_by_its_model(full: str, short: str) -> None:
    assert hardware().short_name(full) == short


def test_gpus_are_listed_as_the_driver_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path / "bin", *["NVIDIA H200, 9.0, 143771, 570.124.06"] * 2)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    machine = hardware().probe()
    assert machine.driver == "570.124.06"
    assert [tuple(gpu) for gpu in machine.gpus] == [("NVIDIA H200", (9, 0), 143771)] * 2
    assert (machine.name(cuda=True), machine.name(cuda=False)) == ("H200", HERE)
    assert machine.unmet(cuda=True, sm=(9, 0), gpus=2, isa="") is None
    assert machine.unmet(cuda=True, sm=(10, 0), gpus=1, isa="").startswith("needs compute capability 10.0")
    assert machine.unmet(cuda=True, sm=(0, 0), gpus=4, isa="") == "needs 4 GPUs, this machine has 2"


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [("1", ["H200"]), ("1,0", ["H200", "A100"]), ("GPU-11", ["H200"]), ("0,-1,1", ["A100"]), ("", []), ("-1", [])],
)
def test_gpus_that_cuda_must_not_use_are_not_looked_at(
    chosen: str, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path / "bin", "A100, 8.0, 81920, 580.1", "H200, 9.0, 143771, 580.1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.name for gpu in hardware().probe().gpus] == seen


@pytest.mark.parametrize(("needed", "unmet"), [("570", False), ("570.124", False), ("580", True), ("", False)])
def test_a_driver_that_is_too_old_is_named(needed: str, unmet: bool) -> None:
    machine = hardware().Machine(HERE, "CPU", (), (), "570.124.06")
    expected = f"needs NVIDIA driver {needed} or newer, this machine has 570.124.06" if unmet else None
    assert machine.outdated(needed) == expected


def test_a_machine_without_a_gpu_says_so() -> None:
    module = hardware()
    machine = module.Machine(HERE, "CPU", ("avx2",), (), "")
    assert machine.name(cuda=True) == HERE
    assert machine.unmet(cuda=True, sm=(0, 0), gpus=0, isa="") == "needs a CUDA GPU, this machine has none"
    assert machine.unmet(cuda=False, sm=(0, 0), gpus=0, isa="avx2") is None
    assert machine.unmet(cuda=False, sm=(0, 0), gpus=0, isa="sve") == "needs a CPU with sve, this one (CPU) has none"
