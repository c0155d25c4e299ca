"""Probe this machine once, without torch or any other package under test."""

from __future__ import annotations

import csv
import functools
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

# The vector and matrix features on which compiled kernels depend, in the spelling of /proc/cpuinfo.
ISA = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")
# Peak operations per second of dense bfloat16 products in NVIDIA's data sheets; MFU is the share of it that is reached.
PEAK = {"A100": 312e12, "A800": 312e12, "H100": 989e12, "H800": 989e12, "H200": 989e12}


class Gpu(NamedTuple):
    """One GPU: its full name, its compute capability ((0, 0) if unknown) and its memory in MiB."""

    name: str
    sm: Tuple[int, int]
    memory_mib: int


class Machine(NamedTuple):
    """One machine: architecture ("x86-64"), CPU model, CPU features, GPUs and their driver ("" if none)."""

    arch: str
    cpu: str
    isa: Tuple[str, ...]
    gpus: Tuple[Gpu, ...]
    driver: str

    def name(self, cuda: bool) -> str:
        """The name by which a target declares it: the short GPU name for one that uses CUDA, else the architecture."""
        return short_name(self.gpus[0].name) if cuda and self.gpus else self.arch

    def unmet(self, cuda: bool, sm: Tuple[int, int], gpus: int, isa: str) -> Optional[str]:
        """Why this machine cannot run a test with these needs, or None if it can."""
        if cuda and not self.gpus:
            return "needs a CUDA GPU, this machine has none"
        if len(self.gpus) < gpus:
            return f"needs {gpus} GPUs, this machine has {len(self.gpus)}"
        if cuda and self.gpus[0].sm < sm:
            have = "{}.{} ({})".format(*self.gpus[0].sm, self.gpus[0].name)
            return "needs compute capability {}.{}, this machine has {}".format(*sm, have)
        if isa and isa not in self.isa:
            return f"needs a CPU with {isa}, this one ({self.cpu}) has none"
        return None

    def outdated(self, driver: Optional[str]) -> Optional[str]:
        """Why the driver is too old for a target that needs this version or a newer one; None if it is not."""
        if driver and self.driver and [int(n) for n in self.driver.split(".")] < [int(n) for n in driver.split(".")]:
            return f"needs NVIDIA driver {driver} or newer, this machine has {self.driver}"
        return None

    def describe(self, cuda: bool) -> Dict[str, Any]:
        """The machine as plain data for the outcome file."""
        gpus = [{"name": gpu.name, "sm": "{}.{}".format(*gpu.sm), "memory_mib": gpu.memory_mib} for gpu in self.gpus]
        fields = {"arch": self.arch, "cpu": self.cpu, "isa": list(self.isa), "gpus": gpus, "driver": self.driver}
        return {"name": self.name(cuda), **fields}


def short_name(gpu: str) -> str:
    """The model in a full name: "NVIDIA A100-SXM4-80GB" -> "A100"; without such a word, the name without its maker."""
    model = re.search(r"\b[A-Z]{1,3}\d+[A-Z]{0,2}\b", gpu)
    return model.group() if model else gpu.replace("NVIDIA ", "")


@functools.lru_cache(maxsize=None)
def probe() -> Machine:
    """Look at this machine, once per process."""
    cpu, isa = _cpu()
    gpus, driver = _gpus()
    return Machine(platform.machine().replace("_", "-"), cpu, isa, gpus, driver)


def _cpu() -> Tuple[str, Tuple[str, ...]]:
    """CPU model and features of interest, from /proc/cpuinfo; without that file, the architecture and no features."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine(), ()
    fields: Dict[str, str] = dict(re.findall(r"^(.+?)[ \t]*:[ \t]*(.*)$", text, flags=re.MULTILINE))
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name", platform.machine()), tuple(name for name in ISA if name in flags)


def _gpus() -> Tuple[Tuple[Gpu, ...], str]:
    """GPUs and driver as the driver's own tool lists them; torch is only asked if that tool is missing.

    The driver comes first so that a torch that cannot see its GPU does not turn a GPU machine into a CPU machine.
    """
    rows = nvidia_smi("name", "compute_cap", "memory.total", "driver_version")
    if rows is None:
        return _torch_gpus(), ""
    gpus = [Gpu(name, _capability(capability), int(float(memory))) for name, capability, memory, _ in rows]
    return tuple(gpus), rows[0][3] if rows else ""


def nvidia_smi(*fields: str) -> Optional[List[List[str]]]:
    """The fields, as text, that the driver's tool reports for each GPU that CUDA may use; None if there are none."""
    query = ["nvidia-smi", "--query-gpu=" + ",".join(("index", "uuid", *fields)), "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows: List[List[str]] = list(csv.reader(answer.stdout.decode().splitlines(), skipinitialspace=True))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and "MIG" in chosen:  # parts of a GPU, which CUDA alone lists
        return None
    return [row[2:] for row in (rows if chosen is None else _chosen(rows, chosen.split(",")))]


def _chosen(rows: List[List[str]], names: List[str]) -> Iterator[List[str]]:
    """The GPUs with these indices or UUID prefixes, in this order; like CUDA, it stops at the first unknown one."""
    for name in (name.strip() for name in names):
        matching = [row for row in rows if name and (row[0] == name or row[1].startswith(name))]
        if not matching:
            return
        yield matching[0]


def _capability(text: str) -> Tuple[int, int]:
    """ "9.0" -> (9, 0)."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _torch_gpus() -> Tuple[Gpu, ...]:
    """GPUs as torch sees them; none without torch."""
    try:
        import torch
    except Exception:  # a broken torch refutes torch's claims but must not hide the machine
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(gpu.name, (gpu.major, gpu.minor), gpu.total_memory >> 20) for gpu in properties)
