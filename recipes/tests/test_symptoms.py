"""Error texts are explained: each row of symptoms.toml by its example, several causes in order, and none wrongly."""

from __future__ import annotations

import re

import pytest

from recipes.catalogue import symptoms
from recipes.catalogue.load import Catalogue
from recipes.catalogue.schema import Symptom
from recipes.files import ROOT
from recipes.tests.conftest import Checkout

ROWS = symptoms.read(ROOT)
OWN = [row for row in ROWS if row.pattern != row.example]


def test_there_are_many() -> None:
    assert len(OWN) >= 60


@pytest.mark.parametrize("row", OWN, ids=lambda row: f"{row.pattern}-{row.thread.rpartition('/')[2]}")
def test_the_example_of_a_row_leads_to_it(row: Symptom) -> None:
    """In a longer text too; only rows with the same pattern come before."""
    causes = symptoms.diagnoses(ROWS, f"compiling\n{row.example}\nmake: *** [all] Error 1\n")
    alike = [other.thread for other in ROWS if other.pattern == row.pattern]
    assert [cause.thread for cause in causes] == alike
    assert not any(re.search(r"\{(\d|package)\}", cause.cause + cause.fix) for cause in causes)


SHARED = {
    "from torch._six import string_classes\nModuleNotFoundError: No module named 'torch._six'": ("apex", "1724"),
    "ModuleNotFoundError: No module named 'amp_C'": ("apex", "1764"),
    "RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (8, 9, 2)": ("torch", "80637"),
    "RuntimeError: Numpy is not available": ("torch", "132179"),
    "ImportError: cannot import name 'packaging' from 'pkg_resources' (x)": ("torch", "4385"),
    "error: cannot convert ‘const at::DeprecatedTypeProperties’ to ‘c10::ScalarType’": ("apex", "1897"),
    "cannot import name 'log' from 'torch.distributed.elastic.agent.server.api' (x)": (
        "deepspeed",
        "5337",
    ),
    '#error "You\'re trying to build PyTorch with a too old version of GCC. We need GCC 9 or later."': (
        "torch",
        "120126",
    ),
    "ImportError: cannot import name 'BUFSIZE' from 'numpy' (x)": ("deepspeed", "5671"),
    "TypeError: Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'": (
        "transformers",
        "34714",
    ),
    "AttributeError: module 'torch.compiler' has no attribute 'is_compiling'": ("deepspeed", "6656"),
    "ImportError: x: you need flash_attn package version to be greater or equal than 2.1.0.": ("transformers", "3464"),
    'mathcalls.h(79): error: exception specification is incompatible with that of previous function "cospi"': (
        "cuda",
        "378",
    ),
}


@pytest.mark.parametrize("text", SHARED)
def test_a_limit_explains_the_error_that_follows_where_it_is_broken(text: str) -> None:
    package, thread = SHARED[text]
    cause = symptoms.diagnoses(ROWS, text)[0]
    assert cause.cause.startswith(f"{package} ") and " needs " in cause.cause
    assert cause.thread.endswith(thread) and "nox -s plan" in cause.fix


def test_each_limit_with_a_symptom_is_tried() -> None:
    limits = [limit for limit in Catalogue(ROOT).limits if limit.symptom]
    assert {limit.thread.rpartition("/")[2] for limit in limits} == {thread for _, thread in SHARED.values()}


def test_causes_are_ranked_and_versions_rule_some_out() -> None:
    text = "CUDA driver version is insufficient for CUDA runtime version\nfatal error: Python.h: No such file\n"
    causes = [cause.thread.rpartition("/")[2] for cause in symptoms.diagnoses(ROWS, text)]
    assert causes == ["1117", "702", "400"]
    old = "#error C++17 or later compatible compiler is required to use PyTorch."
    assert symptoms.diagnoses(ROWS, old, {"torch": ["2.1.2"]})
    assert not symptoms.diagnoses(ROWS, old, {"torch": ["1.12.1"]})


HARMLESS = """
warning: 'at::DeprecatedTypeProperties& at::Tensor::type() const' is deprecated
[3/40] c++ -MMD -MF flash_api.o.d -lcuda -lcurand -std=c++20
Precompiled wheel not found. Building from source...
Successfully built flash-attn
12 passed, 3 skipped in 4.1s
"""


def test_a_text_without_an_error_has_no_cause() -> None:
    assert not symptoms.diagnoses(ROWS, HARMLESS)


MISMATCH = "The detected CUDA version (12.4) mismatches the version that was used to compile{}PyTorch (11.8). Please"
FORMS = {
    "gcc": (
        "\x1b[01m\x1b[Kmain.c:5:10:\x1b[m\x1b[K \x1b[01;31m\x1b[Kfatal error: \x1b[m\x1b[KPython.h: No such file",
        "main.c:5:10: fatal error: Python.h: No such file",
    ),
    "link": (
        "\x1b]8;;https://a.b\x1b\\ModuleNotFoundError\x1b]8;;\x1b\\: No module named 'wheel'",
        "ModuleNotFoundError: No module named 'wheel'",
    ),
    "uv": (
        "\x1b[31mModuleNotFoundError\x1b[0m: \x1b[1mNo module named \x1b[0m'wheel'",
        "ModuleNotFoundError: No module named 'wheel'",
    ),
    "nvcc": (
        "nvcc fatal   : Unsupported gpu architecture \x1b[1m'compute_89'\x1b[0m",
        "nvcc fatal : Unsupported gpu architecture 'compute_89'",
    ),
    "curly": ("libc.so.6: version ‘GLIBC_2.32’ not found", "libc.so.6: version 'GLIBC_2.32' not found"),
    "windows": (MISMATCH.format("\r\n") + "\r\n", MISMATCH.format(" ")),
    "docker": ("#12 4.98 " + MISMATCH.format("\n#12 4.98 "), MISMATCH.format(" ")),
    "docker's summary": ("4.984     " + MISMATCH.format("\n4.984     "), MISMATCH.format(" ")),
    "torchrun": ("[rank0]: " + MISMATCH.format("\n[rank0]: "), MISMATCH.format(" ")),
    "actions": (
        "2026-01-02T03:04:05.0000001Z " + MISMATCH.format("\n2026-01-02T03:04:05.0000002Z "),
        MISMATCH.format(" "),
    ),
    "quote": (">   " + MISMATCH.format("\n>   "), MISMATCH.format(" ")),
    "rich": (
        "│ RuntimeError: no kernel image is available for     │\n│ execution on the device                │",
        "RuntimeError: no kernel image is available for execution on the device",
    ),
    "narrow": (
        "torch.OutOfMemoryError: CUDA out of\nmemory. Tried to",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to",
    ),
    "json": ('{"log":"No module named \'wheel\'\\n"}', '{"log":"No module named \'wheel\'\\n"}'),
    "cut off": ("cpython-310.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",) * 2,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_text_is_explained_however_it_was_logged(form: str) -> None:
    text, line = FORMS[form]
    assert [cause.line for cause in symptoms.diagnoses(ROWS, f"[1/3] c++\n{text}\nmake: Error 1\n")] == [line]


def test_a_coloured_error_looks_like_one() -> None:
    assert [*symptoms.troubles(["\x1b[31mKeyError\x1b[0m: 'lr'"])] == ["KeyError: 'lr'"]


WRONG = {
    "pattern": ("pattern = 'undefined symbol: ncclCommResume'", "pattern = '('", "is not a regular expression"),
    "thread": ('thread = "https://github.com/pytorch/pytorch/issues/186591"', 'thread = "a"', "symptom[0].thread is"),
    "key": ('fix = "python -m pip uninstall nvidia-nccl-cu12"', 'cure = "x"', "symptom[0].fix is missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_refused(checkout: Checkout, case: str) -> None:
    old, new, named = WRONG[case]
    checkout.edit(checkout.root / "recipes" / "symptoms.toml", old, new)
    log = checkout.root / "log.txt"
    log.write_text("x")
    checkout.refuse("doctor", "--error", log, naming=("recipes/symptoms.toml", named))
