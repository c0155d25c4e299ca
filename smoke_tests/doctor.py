"""Say what is wrong with the environment that runs this: `python -m smoke_tests.doctor [--json FILE]`.

It looks at files and metadata, and imports no package. Each finding is a pass, a warning or a failure; a failure names
what mends it.

Exit codes: 0 without a failure, 1 with one, 2 if the environment cannot be looked at.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from smoke_tests import elf, hardware
from smoke_tests.distributions import MODULES, canonical, cuda_of_torch, release

PASS, WARNING, FAILURE = "pass", "warning", "failure"
COLOURS = {PASS: "32", WARNING: "33", FAILURE: "31"}
ROOM = Path(__file__).resolve().parent
SHARED = re.compile(r"\.so(\.\d+)*$")
OF_CUDA = re.compile(r"lib(cudnn|cublas|cublasLt|nccl|cudart|cusparse|nvJitLink|nvrtc)\.so\.(\d+)$")
# Transformer Engine's two calls, in the order of its releases from 2.12 on.
SYSTEM_FIRST = re.compile(r"_library_from_system\(lib_name\).*_library_from_python\(lib_name\)", re.DOTALL)
# A mangled name in one of torch's namespaces: a function, a method, a type's information or its table of methods.
OF_TORCH = re.compile(rb"_Z(?:T[A-Z]|GV)?N[rVK]*[RO]?(?:2at|3c10|5torch|6caffe2)")
OF_RELEASE = re.compile(r"torch[-_]?(\d)[._]?(\d+)")  # in the name of an extension, as in libaddon_torch28-cuda.so
OLD_STRING, NEW_STRING = "std::string", "__cxx11"  # in the mangled name of a function that takes a string, by C++ ABI
# The oldest driver for each CUDA (NVIDIA's compatibility page: minor versions share the driver).
DRIVERS = {11: 450, 12: 525, 13: 580}
TOOLKIT = "/usr/local/cuda"
SHOWN = 4  # files or symbols that a finding names


class Check(NamedTuple):
    """One finding: what was looked at, its state, what was seen, and what mends it."""

    about: str
    state: str
    finding: str
    remedy: str = ""


class Distribution(NamedTuple):
    """An installed distribution: its normalized name, version, folder, its files as its RECORD lists them, and more."""

    name: str
    version: str
    root: Path
    files: Tuple[Tuple[str, Optional[int], str], ...]  # path below the root, bytes and hash where they are recorded
    requires: Tuple[str, ...]
    url: str
    abis: Tuple[str, ...]  # of the wheel's tags: "cp312", "abi3", "none"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; its exit code."""
    first, _, rest = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m smoke_tests.doctor",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings to this file")
    options = parser.parse_args(arguments)
    checks = list(of_environment())
    for check in checks:
        state = "{:8}".format(check.state)
        state = "\x1b[{}m{}\x1b[0m".format(COLOURS[check.state], state) if sys.stdout.isatty() else state
        print("{}{}: {}".format(state, check.about, check.finding))
        if check.remedy and check.state != PASS:
            print("        -> " + check.remedy)
    if options.json:
        try:
            options.json.write_text(json.dumps([check._asdict() for check in checks], indent=1) + "\n")
        except OSError as error:
            print("doctor: {} cannot be written: {}.".format(options.json, error.strerror), file=sys.stderr)
            return 2
    return 1 if any(check.state == FAILURE for check in checks) else 0


def of_environment() -> Iterator[Check]:
    """Everything that is looked at."""
    every = list(distributions())
    installed = {each.name: each for each in reversed(every)}  # the first one on the path is the one that is imported
    yield python(installed)
    yield from twice(every)
    yield from files(installed.values())
    yield from requirements(installed)
    yield of_numpy(installed)
    yield setuptools(installed)
    yield of_triton(installed)
    yield from of_launchers()
    libraries = shared_libraries(installed.values())
    yield from copies(libraries)
    yield from of_the_system(installed)
    yield from extensions(installed, libraries)
    yield float8(installed)


def distributions() -> Iterator[Distribution]:
    """Every distribution on the path, in its order."""
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]
        if not name:
            continue
        rows = tuple((str(file), file.size, file.hash.value if file.hash else "") for file in each.files or [])
        origin = each.read_text("direct_url.json") or "{}"
        try:
            url = str(json.loads(origin).get("url", ""))
        except ValueError:
            url = ""
        yield Distribution(
            canonical(name),
            str(each.version),
            Path(str(each.locate_file(""))),
            rows,
            tuple(each.requires or []),
            url,
            tuple(re.findall(r"^Tag: *[^-\s]+-([^-\s]+)-", each.read_text("WHEEL") or "", re.MULTILINE)),
        )


def python(installed: Dict[str, Distribution]) -> Check:
    """Which Python, and what comes from outside its environment."""
    where = "Python {} in {}".format(sys.version.split()[0], sys.prefix)
    user = Path(site.getusersitepackages())
    ours = [name for name, each in installed.items() if each.root == user and name in {*MODULES, "numpy"}]
    if ours:
        remedy = "set PYTHONNOUSERSITE=1, or uninstall them there"
        return Check("python", WARNING, "{}; {} come from {}".format(where, some(ours), user), remedy)
    if os.environ.get("PYTHONPATH"):
        return Check("python", PASS, where + "; PYTHONPATH adds " + os.environ["PYTHONPATH"])
    return Check("python", PASS, where)


def twice(every: List[Distribution]) -> Iterator[Check]:
    """Distributions with metadata of several versions, and files that two distributions brought."""
    places: Dict[str, Dict[str, Path]] = {}  # name -> version -> where it is
    owners: Dict[Tuple[Path, str], Tuple[str, str]] = {}
    clashes: Dict[Tuple[str, str], List[str]] = {}
    for each in every:
        places.setdefault(each.name, {}).setdefault(each.version, each.root)
        for path, _, code in each.files:
            if path.endswith((".py", ".so")) and "/" in path and not path.startswith(("tests/", "..")):
                owner, its_code = owners.setdefault((each.root, path), (each.name, code))
                if owner != each.name and code != its_code:
                    clashes.setdefault((owner, each.name), []).append(path)
    for name, roots in places.items():
        if len(roots) > 1:
            where = ", ".join("{} in {}".format(version, root) for version, root in roots.items())
            state = WARNING if len(set(roots.values())) == len(roots) else FAILURE
            finding = "{} is installed more than once ({}); an import finds the first".format(name, where)
            remedy = "python -m pip uninstall {0}, until it is gone, and install {0} again".format(name)
            yield Check("installed twice", state, finding, remedy)
    for pair, paths in clashes.items():
        finding = "{} and {} both brought {} files and differ in them ({}): the one that came last won".format(
            *pair, len(paths), some(paths)
        )
        yield Check("files of two packages", WARNING, finding, "uninstall both, and install the one that you need")


def files(installed: Iterable[Distribution]) -> Iterator[Check]:
    """Metadata against files: what a RECORD lists has to be there, in the recorded size."""
    broken, count = 0, 0
    for each in installed:
        missing, other = [], []
        for path, size, _ in each.files:
            place = each.root / path
            if path.endswith((".pyc", "RECORD", "direct_url.json", "INSTALLER")) or path.startswith(".."):
                continue
            count += 1
            try:
                now = place.stat().st_size
            except OSError:
                missing.append(path)
                continue
            if size is not None and now != size:
                other.append(path)
        if missing or other:
            broken += 1
            parts = ["{} are missing ({})".format(len(missing), some(missing))] if missing else []
            parts += ["{} have another size ({})".format(len(other), some(other))] if other else []
            finding = "{} {}: of its files {}".format(each.name, each.version, " and ".join(parts))
            remedy = "python -m pip install --force-reinstall --no-deps {}=={}".format(each.name, each.version)
            yield Check("files", FAILURE if each.name in MODULES else WARNING, finding, remedy)
    if not broken:
        yield Check("files", PASS, "{} files are there, in the recorded sizes".format(count))


def requirements(installed: Dict[str, Distribution]) -> Iterator[Check]:
    """Requirements that are not met; those on torch are wheels of another torch."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        yield Check("requirements", WARNING, "not looked at, because packaging is missing", "pip install packaging")
        return
    unmet = 0
    for each in installed.values():
        for text in each.requires:
            try:
                asked = Requirement(text)
            except InvalidRequirement:
                continue
            if asked.marker and not asked.marker.evaluate({"extra": ""}):
                continue
            name = canonical(asked.name)
            there = installed.get(name)
            if there and (not asked.specifier or asked.specifier.contains(there.version, prereleases=True)):
                continue
            unmet += 1
            have = "{} is installed".format(there.version) if there else "it is not installed"
            of_torch = name == "torch" and each.name in MODULES
            about = "wheel of another torch" if of_torch else "requirements"
            finding = "{} {} requires {}{}, and {}".format(each.name, each.version, name, short(asked.specifier), have)
            serious = each.name in MODULES or name in MODULES
            remedy = "python -m pip install {!r}".format(name + short(asked.specifier))
            if of_torch:
                remedy = "install {} built for torch {}".format(each.name, there.version if there else "")
            yield Check(about, FAILURE if serious else WARNING, finding, remedy.rstrip())
    if not unmet:
        yield Check("requirements", PASS, "all are met")


def short(specifier: object) -> str:
    """A version range, without what it excludes where that is long."""
    text = str(specifier)
    return ",".join(part for part in text.split(",") if "!=" not in part) if text.count("!=") > 3 else text


def of_numpy(installed: Dict[str, Distribution]) -> Check:
    """NumPy 2 under a torch that was compiled against NumPy 1."""
    torch, numpy = installed.get("torch"), installed.get("numpy")
    if numpy is None:
        return Check("numpy", WARNING, "it is not installed, and torch cannot exchange arrays", "pip install numpy")
    if torch and release(numpy.version) >= (2,) and release(torch.version) < (2, 3):
        finding = "numpy {} under torch {}, which was compiled against NumPy 1".format(numpy.version, torch.version)
        return Check("numpy", FAILURE, finding, "python -m pip install 'numpy<2'")
    return Check("numpy", PASS, numpy.version)


def setuptools(installed: Dict[str, Distribution]) -> Check:
    """A setuptools without pkg_resources beside packages that import it."""
    if importlib.util.find_spec("pkg_resources") is not None:
        return Check("setuptools", PASS, "pkg_resources is there")
    pattern = re.compile(rb"^(?:import|from) pkg_resources\b", re.MULTILINE)
    users = []
    for name in MODULES:
        each = installed.get(name)
        paths = [each.root / path for path, _, _ in each.files if path.endswith(".py")] if each else []
        if any(pattern.search(path.read_bytes()) for path in paths if path.is_file()):
            users.append(name)
    version = installed["setuptools"].version if "setuptools" in installed else "none"
    if users:
        finding = "setuptools {} has no pkg_resources, which {} import".format(version, some(users))
        return Check("setuptools", FAILURE, finding, "python -m pip install 'setuptools<81'")
    return Check("setuptools", PASS, "{}; no package here imports pkg_resources".format(version))


def of_triton(installed: Dict[str, Distribution]) -> Check:
    """Triton against the one that torch pins."""
    torch = installed.get("torch")
    triton = next((installed[name] for name in ("triton", "pytorch-triton") if name in installed), None)
    asked = [text for text in (torch.requires if torch else ()) if re.match(r"(pytorch-)?triton\b", text)]
    pinned = re.search(r"==\s*([\w.+]+)", asked[0]) if asked else None
    if triton is None:
        finding = "it is not installed, so torch.compile and Triton kernels do not run on a GPU"
        return Check("triton", WARNING if cuda_of_torch() != "none" else PASS, finding, "install torch again")
    if torch and pinned and release(pinned.group(1)) != release(triton.version):
        finding = "triton {} under torch {}, which requires {}".format(triton.version, torch.version, pinned.group(1))
        return Check("triton", FAILURE, finding, "python -m pip install triton==" + pinned.group(1))
    return Check("triton", PASS, triton.version + ("" if pinned else "; torch requires no version of it"))


def of_launchers() -> Iterator[Check]:
    """What Triton compiles the launchers of its kernels with (triton/runtime/build.py), where torch is for CUDA."""
    if cuda_of_torch() == "none":
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    lacking = [] if compiler else ["no C compiler is on the PATH"]
    lacking += [] if header.is_file() else ["{} is missing".format(header)]
    if lacking:
        finding = " and ".join(lacking) + ", so torch.compile and Triton kernels do not run on a GPU"
        remedy = "apt-get install gcc python{}.{}-dev, or the like".format(*sys.version_info)
        yield Check("compiler", WARNING, finding, remedy)
    else:
        yield Check("compiler", PASS, "{} and {}".format(compiler, header))


# --- shared libraries


def shared_libraries(installed: Iterable[Distribution]) -> Dict[str, List[Path]]:
    """File name -> the files of that name that a package brought, or that lie where LD_LIBRARY_PATH or conda leads."""
    places: Dict[str, List[Path]] = {}

    def add(path: Path) -> None:
        place = path.resolve()
        if place.is_file() and place not in places.setdefault(path.name, []):
            places[path.name].append(place)

    for each in installed:
        for path, _, _ in each.files:
            if SHARED.search(path):
                add(each.root / path)
    for folder in filter(os.path.isdir, [*library_path(), os.path.join(sys.prefix, "lib")]):
        for name in filter(SHARED.search, os.listdir(folder)):
            add(Path(folder, name))
    return places


def library_path() -> List[str]:
    """The folders of LD_LIBRARY_PATH."""
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def copies(libraries: Dict[str, List[Path]]) -> Iterator[Check]:
    """CUDA libraries of which a process could load two copies, or another one than torch's."""
    folders_first = [os.path.realpath(folder) for folder in library_path()]
    versions: Dict[str, Set[str]] = {}
    for name, paths in sorted(libraries.items()):
        match = OF_CUDA.match(name)
        if match:
            versions.setdefault(match.group(1), set()).add(match.group(2))
            folders = sorted({str(path.parent) for path in paths})
            if len(folders) > 1:
                first = next((folder for folder in folders if folder in folders_first), "")
                finding = "{} is in {}".format(name, " and ".join(folders))
                finding += "; LD_LIBRARY_PATH puts {} first".format(first) if first else ""
                remedy = "unset LD_LIBRARY_PATH" if first else "uninstall the copy that torch does not bring"
                yield Check("two copies", WARNING, finding, remedy)
    for stem, numbers in versions.items():
        if len(numbers) > 1 and stem in ("cudart", "cublas", "cudnn", "nccl"):
            finding = "lib{} is installed in versions {}".format(stem, ", ".join(sorted(numbers, key=int)))
            remedy = "uninstall the packages of the CUDA that torch is not built for"
            yield Check("two copies", WARNING, finding, remedy)
    yield Check("CUDA libraries", PASS, "{} were looked at".format(sum(map(len, versions.values()))))


def of_the_system(installed: Dict[str, Distribution]) -> Iterator[Check]:
    """A cuDNN of the system that Transformer Engine loads beside the environment's own (TransformerEngine 1853)."""
    every = [(each, path) for each in installed.values() for path, _, _ in each.files]
    brought = [(each.root / path).parent.resolve() for each, path in every if "/libcudnn.so." in path]
    for each, path in every:
        if path == "transformer_engine/common/__init__.py" and brought:
            text = (each.root / path).read_text(encoding="utf-8", errors="replace")
            taken = cudnn_of_the_system() if SYSTEM_FIRST.search(text) else None
            if taken and taken.resolve().parent not in brought:
                finding = "{} {} loads {} beside the cuDNN in {}".format(each.name, each.version, taken, brought[0])
                yield Check("two copies", WARNING, finding, "export CUDNN_HOME={}".format(brought[0].parent))


def cudnn_of_the_system() -> Optional[Path]:
    """The cuDNN that Transformer Engine finds first: by a variable, in the CUDA toolkit, or in the loader's cache."""
    variables = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
    for folder in filter(None, [*map(os.environ.get, variables), TOOLKIT]):
        for path in sorted(Path(folder).rglob("libcudnn.so*"), key=lambda path: path.name, reverse=True):
            if "stub" not in str(path):
                return path
    program = shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    listed = subprocess.run([program, "-p"], stdout=subprocess.PIPE, check=False).stdout.decode() if program else ""
    match = re.search(r"^\s*libcudnn\.so \(.*=> (.+)$", listed, re.MULTILINE)
    return Path(match.group(1)) if match else None


def extensions(installed: Dict[str, Distribution], libraries: Dict[str, List[Path]]) -> Iterator[Check]:
    """Compiled files: what they load has to be there, for torch's CUDA, and torch must have the symbols they want."""
    torch = installed.get("torch")
    if torch is None:
        yield Check("torch", FAILURE, "it is not installed", "install torch, or run this with the Python that has it")
        return
    offered: Set[bytes] = set()
    for path, _, _ in torch.files:
        if re.search(r"(^|/)lib(c10\w*|torch\w*)\.so$", path):
            try:
                offered |= elf.read(torch.root / path).offered
            except (OSError, ValueError) as error:
                yield Check("torch", FAILURE, "{} cannot be read: {}".format(path, error), "install torch again")
    looked = bad = 0
    for each in installed.values():
        name, library = compiled(each, torch)
        if library is None or each.name == "torch":
            continue
        looked += 1
        label = "{} {} ({})".format(each.name, each.version, name)
        faults = [
            *_other_python(each, label),
            *(list(_other_cuda(each, label, library)) or _missing(label, library, libraries)),
            *_unknown(each, label, library, offered, torch),
        ]
        bad += bool(faults)
        yield from faults
    if not bad:
        finding = "those of {} packages find their symbols in torch {}".format(looked, torch.version)
        yield Check("extensions", PASS, finding)


def loadable(each: Distribution, torch: Distribution) -> List[str]:
    """The extensions of a package; of those for several torch releases, as their names say, only this torch's."""
    paths = [path for path, _, _ in each.files if path.endswith(".so")]
    named = {path: match.groups() for path in paths for match in [OF_RELEASE.search(Path(path).name)] if match}
    if len(set(named.values())) < 2:
        return paths
    ours = tuple(map(str, release(torch.version)[:2]))
    return [path for path in paths if named.get(path, ours) == ours]


def compiled(each: Distribution, torch: Distribution) -> Tuple[str, Optional[elf.Library]]:
    """What the extensions of a package that use torch load and want, together, and their names; None without any."""
    paths: List[str] = []
    needed: Set[str] = set()
    wanted: Set[bytes] = set()
    offered: Set[bytes] = set()
    for path in loadable(each, torch):
        try:
            library = elf.read(each.root / path)
        except (OSError, ValueError):
            continue  # `files` says what is missing
        if any(name.startswith(("libtorch", "libc10")) for name in library.needed):
            paths.append(path)
            needed.update(library.needed)
            wanted |= library.wanted
            offered |= library.offered
    more = " and {} more".format(len(paths) - 1) if len(paths) > 1 else ""
    return paths[0] + more if paths else "", elf.Library(
        tuple(sorted(needed)), wanted - offered, offered
    ) if paths else None


def _other_python(each: Distribution, label: str) -> Iterator[Check]:
    """Extensions of another Python, as the tags of the wheel say: files for any Python may carry another one's name."""
    ours = "cp{}{}".format(*sys.version_info[:2])
    if each.abis and all(re.match(r"cp\d+$", abi) and abi != ours for abi in each.abis):
        finding = "{} is compiled for {}, and this is {}".format(label, some(each.abis), ours)
        yield Check("wheel of another Python", FAILURE, finding, "install {} built for {}".format(each.name, ours))


def _other_cuda(each: Distribution, label: str, library: elf.Library) -> Iterator[Check]:
    """An extension of another CUDA than torch's."""
    cuda = cuda_of_torch()
    matches = [re.match(r"libcudart\.so\.(\d+)", name) for name in library.needed]
    other = sorted({match.group(1) for match in matches if match} - {cuda.partition(".")[0]})
    if other:
        built = "no CUDA" if cuda == "none" else "CUDA " + cuda
        finding = "{} is compiled for CUDA {}, and torch for {}".format(label, other[0], built)
        yield Check("wheel of another CUDA", FAILURE, finding, "install {} built for {}".format(each.name, built))


def _missing(label: str, library: elf.Library, libraries: Dict[str, List[Path]]) -> Iterator[Check]:
    """CUDA libraries that an extension loads, and that neither a package nor the system has."""
    for name in library.needed:
        if OF_CUDA.match(name) and name not in libraries:
            try:
                ctypes.CDLL(name)
            except OSError:
                finding = "{} loads {}, which is nowhere here".format(label, name)
                yield Check("missing library", FAILURE, finding, "install the package that holds " + name)


def _unknown(
    each: Distribution, label: str, library: elf.Library, offered: Set[bytes], torch: Distribution
) -> Iterator[Check]:
    """Symbols of torch that an extension wants and this torch lacks."""
    lacking = sorted(symbol for symbol in library.wanted - offered if OF_TORCH.match(symbol))
    if not lacking:
        return
    texts = [demangled(symbol).partition("(") for symbol in lacking]
    new = any(NEW_STRING in arguments for _, _, arguments in texts)
    old = any(OLD_STRING in arguments for _, _, arguments in texts) and not new
    torch_is_new = any(NEW_STRING.encode() in symbol for symbol in offered if OF_TORCH.match(symbol))
    lacks = "torch {} lacks: {}".format(torch.version, some([name for name, _, _ in texts]))
    traced = traces(lacking)
    lacks += "; {}".format(traced) if traced else ""
    if (new and not torch_is_new) or (old and torch_is_new):
        kinds = ("new", "old") if new else ("old", "new")
        finding = "{} uses the {} C++ ABI and torch the {} one, so that {}".format(label, *kinds, lacks)
        flag = "TRUE" if torch_is_new else "FALSE"
        remedy = "install {} built with cxx11abi{}, or compile it here".format(each.name, flag)
        yield Check("C++ ABI", FAILURE, finding, remedy)
        return
    finding = "{} wants {} symbols that {}".format(label, len(lacking), lacks)
    named = re.search(r"torch[-_.]?(\d+\.\d+)", each.url or each.version)
    finding += "; its file name says torch {}".format(named.group(1)) if named else ""
    remedy = "install {} built for torch {}, or compile it here".format(each.name, torch.version)
    yield Check("wheel of another torch", FAILURE, finding, remedy)


def traces(symbols: Iterable[bytes]) -> str:
    """Which releases of torch have all of these symbols, of those that torch_symbols.json knows; "" for none."""
    wanted = {symbol.decode() for symbol in symbols}
    table: Dict[str, List[str]] = json.loads((ROOM / "torch_symbols.json").read_text(encoding="utf-8"))
    holders = [set(releases.split()) for releases, names in table.items() if wanted.intersection(names)]
    common = sorted(set.intersection(*holders), key=release) if holders else []
    every = sorted({each for releases in table for each in releases.split()}, key=release)
    return "of torch {}, these have them: {}".format(", ".join(every), ", ".join(common)) if common else ""


def demangled(symbol: bytes) -> str:
    """A C++ symbol as source code has it; unchanged where the C++ library cannot be asked."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        demangle = library["__cxa_demangle"]
    except (OSError, AttributeError):
        return symbol.decode()
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(ctypes.c_char_p(symbol), None, None, ctypes.byref(status))
    if status.value != 0 or not text:
        return symbol.decode()
    return ctypes.string_at(text).decode()  # a few hundred bytes that are not freed


# --- FP8


def float8(installed: Dict[str, Distribution]) -> Check:
    """Whether FP8 products can run here, and if not, why."""
    torch, cuda = installed.get("torch"), cuda_of_torch()
    # hardware.probe() would import torch where there is no nvidia-smi.
    rows = hardware.nvidia_smi("name", "compute_cap", "driver_version") or []
    gpu, capability, driver = rows[0] if rows else ("", "0.0", "")
    reasons = []
    if torch and release(torch.version) < (2, 1):
        reasons.append("torch {} has no float8 dtypes (2.1 is the first with them)".format(torch.version))
    if torch and cuda == "none":
        reasons.append("torch is built without CUDA")
    if torch is None:
        reasons.append("torch is not installed")
    if not rows:
        reasons.append("nvidia-smi lists no GPU")
    elif release(capability) < (8, 9):
        reasons.append("{} has compute capability {}, and FP8 begins with 8.9".format(gpu, capability))
    needed = DRIVERS.get(int(cuda.partition(".")[0]), 0) if cuda != "none" else 0
    if driver and release(driver) < (needed,):
        reasons.append("driver {} is too old for CUDA {} ({} is needed)".format(driver, cuda, needed))
    if reasons:
        return Check("FP8", WARNING, "not possible: " + "; ".join(reasons))
    users = [name for name in ("transformer-engine", "torchao") if name in installed]
    by = "with " + " and ".join(users) if users else "by torch._scaled_mm alone"
    scales = ", MXFP8 too" if release(capability) >= (10, 0) else ""
    return Check("FP8", PASS, "possible on {} (compute capability {}) {}{}".format(gpu, capability, by, scales))


def some(names: Sequence[str]) -> str:
    """The first few of them."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (" and {} more".format(more) if more > 0 else "")


if __name__ == "__main__":
    sys.exit(main())
