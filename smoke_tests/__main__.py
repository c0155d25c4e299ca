"""Prove the environment that runs this, whoever built it: `python -m smoke_tests [--package NAME] [--json FILE]`.

It needs torch, numpy and pytest, and neither a manifest nor Fusebox. It runs the claims that fit the installed
versions and prints each with its outcome: proved, refuted, or unproven with the reason. What compares an environment
with its pins is unproven here ("unpinned").

Exit codes: 0 if a claim is proved and none is refuted, 1 if one is refuted, 2 if the command or the environment cannot
be used, 3 if no claim is proved, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple

from smoke_tests import distributions, hardware, printed

ROOM = Path(__file__).resolve().parent
PROVED, REFUTED, UNUSABLE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130
OLDEST_PYTEST = (8, 0)
GPU_SECONDS, CPU_SECONDS = 50, 600  # by default, after which no claim begins
GRACE = 8  # seconds that a claim still running then may take
WORKERS, MIB_PER_WORKER = 14, 5000  # on a GPU: how many processes at most, and the memory that one may need
COLOURS = {"proved": "32", "refuted": "31", "unproven": "33"}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; its exit code."""
    options = parser().parse_args(arguments)
    if options.json is not None:
        refuse_unwritable(options)
    refuse_unusable()
    try:
        manifest = distributions.description()
    except ValueError as error:
        stop(str(error))
    chosen = [distributions.canonical(name) for name in options.package]
    for name in chosen:
        if name not in manifest["packages"]:
            known = ", ".join(manifest["packages"])
            stop(f"{name} is not installed here, or no claim is about it: choose among {known}.")
    if "torch" not in manifest["packages"]:
        stop("torch is not installed in this environment ({}): run this with its Python.".format(sys.prefix))
    with tempfile.TemporaryDirectory(prefix="fusebox-claims-") as folder:
        run = Run(Path(folder), manifest, chosen, options)
        if options.list:
            return run.list()
        if run.on_gpu:
            refuse_without_kernels(manifest["packages"]["torch"]["version"], run.machine.gpus[0])
        try:
            run.go()
        except KeyboardInterrupt:
            run.running.clear()
            run.end()
            return INTERRUPTED
        return run.finish()


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    first, _, rest = str(__doc__).partition("\n\n")
    made = argparse.ArgumentParser(
        prog="python -m smoke_tests", description=first, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--package", action="append", default=[], metavar="NAME", help="only claims about this package")
    made.add_argument("--list", action="store_true", help="list the claims that fit what is installed, and run none")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the evidence to this file")
    made.add_argument("--long", action="store_true", help="also run claims that take long; without a time limit")
    made.add_argument(
        "--seconds",
        type=positive,
        metavar="N",
        help="begin no claim after this time\n(default: {} with a GPU, {} without)".format(GPU_SECONDS, CPU_SECONDS),
    )
    return made


def positive(text: str) -> float:
    """A number of seconds above 0."""
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return seconds


def refuse_unwritable(options: argparse.Namespace) -> None:
    """Refuse a file for the evidence that cannot be written, before the claims run."""
    if options.list:
        stop("--list runs no claim, so that there is no evidence for --json: leave one of them out.")
    if options.json.is_dir() or not options.json.absolute().parent.is_dir():
        stop(f"--json {options.json} is not a file in a folder that exists: name one.")


def stop(sentence: str) -> NoReturn:
    """End, because the command or the environment cannot be used."""
    print("smoke_tests: " + sentence, file=sys.stderr)
    raise SystemExit(UNUSABLE)


def refuse_unusable() -> None:
    """Refuse an environment without what the claims themselves need."""
    for name in ("pytest", "numpy"):
        if importlib.util.find_spec(name) is None:
            stop(f"{name} is not installed here: install it with `{sys.executable} -m pip install {name}`.")
    version = importlib.metadata.version("pytest")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PYTEST:
        stop("pytest {} is too old: install pytest {}.{} or newer.".format(version, *OLDEST_PYTEST))


def refuse_without_kernels(version: str, gpu: hardware.Gpu) -> None:
    """Refuse a torch that was compiled for other GPUs: all claims that compute on the GPU would fail, for one reason.

    A cubin runs on GPUs of its own major version and the same or a later minor one, PTX on all later GPUs as well, and
    code for an architecture such as sm_90a on that one alone (CUDA C++ Programming Guide, "Compute Capability").
    """
    code = "import torch; print(*torch.cuda.get_arch_list())"
    asked = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    compiled = asked.stdout.decode().split()
    if compiled and not any(runs_on(architecture, gpu.sm) for architecture in compiled):  # a broken torch names none
        other = "an older" if gpu.sm < min(map(capability, compiled)) else "a newer"
        stop(
            "torch {} has no kernels for this GPU ({}, sm_{}{}), only for {}: install a torch for {} CUDA.".format(
                version, gpu.name, *gpu.sm, ", ".join(compiled), other
            )
        )


def runs_on(architecture: str, sm: Tuple[int, int]) -> bool:
    """Whether code for an architecture, such as "sm_86" or "compute_90" (PTX), runs on a GPU of this capability."""
    built = capability(architecture)
    if architecture.endswith("a"):
        return built == sm
    return built <= sm and (architecture.startswith("compute_") or built[0] == sm[0])


def capability(architecture: str) -> Tuple[int, int]:
    """ "sm_90a" -> (9, 0)."""
    digits = architecture.partition("_")[2].rstrip("af")
    return int(digits[:-1]), int(digits[-1])


class Run:
    """One run of the claims in several processes, which share them in a folder (smoke_tests/foreign.py)."""

    def __init__(self, folder: Path, manifest: Dict[str, Any], chosen: List[str], options: argparse.Namespace) -> None:
        self.folder, self.manifest, self.chosen, self.options = folder, manifest, chosen, options
        self.machine = hardware.probe()
        self.on_gpu = manifest["cuda"] != "none" and bool(self.machine.gpus)
        default = GPU_SECONDS if self.on_gpu else CPU_SECONDS
        self.limit: float = options.seconds or (float("inf") if options.long else default)
        self.started = datetime.datetime.now(datetime.timezone.utc)
        self.clock = time.monotonic()
        self.processes: List["subprocess.Popen[bytes]"] = []
        self.logs: Dict[int, Path] = {}
        self.read: Dict[Path, int] = {}
        self.records: Dict[str, Dict[str, Any]] = {}
        self.late = False  # whether the time was over before the processes had ended
        self.running: Dict[int, str] = {}  # process -> the claim that it runs
        self.ended: Dict[str, Dict[str, Any]] = {}
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    def list(self) -> int:
        """Print the claims that fit, and run none."""
        self.start("--collect-only")
        self.processes[0].wait()
        if not self.collected():
            self.stop_with_log()
        counts = collections.Counter(record["package"] for record in self.records.values())
        print(self.heading())
        for record in self.records.values():
            print("{package:25} {claim} [{id}]".format(**record))
        print("{} claims: {}".format(len(self.records), ", ".join("{} {}".format(*pair) for pair in counts.items())))
        return PROVED

    def heading(self) -> str:
        """What is installed here, in one line per thing."""
        named = ["{} {}".format(name, entry["version"]) for name, entry in self.manifest["packages"].items()]
        cuda = self.manifest["cuda"]
        built = "no CUDA" if cuda == "none" else "CUDA " + cuda
        machine = self.machine.name(cuda=True) if self.machine.gpus else "{}, no GPU".format(self.machine.arch)
        return "{}\nPython {}, torch for {}, on {}".format(", ".join(named), sys.version.split()[0], built, machine)

    # --- processes ---

    def workers(self) -> int:
        """How many processes run the claims; on a GPU its memory and the host's cores limit them."""
        cores = len(os.sched_getaffinity(0))
        if not self.on_gpu:
            return min(2, cores)
        return max(1, min(WORKERS, cores - 2, self.machine.gpus[0].memory_mib // MIB_PER_WORKER))

    def start(self, *more: str) -> None:
        """Start one process."""
        command = [sys.executable, "-m", "pytest", str(ROOM), "-p", "smoke_tests.foreign", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=", "-o", "python_files=test_*.py loaded_once.py"]
        command += ["--strict-markers", "-q", "--tb=short", *more]
        command += ["--manifest", str(self.folder / "manifest.json"), "--shared", str(self.folder)]
        command += [word for name in self.chosen for word in ("--about", name)]
        command += ["--long"] if self.options.long else []
        path = os.pathsep.join(filter(None, (str(ROOM.parent), os.environ.get("PYTHONPATH", ""))))
        variables = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        variables.pop("PYTEST_ADDOPTS", None)
        variables.setdefault("OMP_NUM_THREADS", "1")
        # A killed compilation leaves a lock, on which the user's later programs would wait forever.
        variables["TORCH_EXTENSIONS_DIR"] = str(self.folder / "extensions")
        log = self.folder / "{}.log".format(len(self.logs))
        with open(str(log), "wb") as file:
            process = subprocess.Popen(
                command, cwd=str(self.folder), env=variables, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        self.logs[process.pid] = log

    def go(self) -> None:
        """Run all claims, and print each as it ends."""
        print(self.heading(), flush=True)
        for _ in range(self.workers()):
            self.start()
        alive = True
        while alive:
            time.sleep(0.1)
            alive = any(process.poll() is None for process in self.processes)
            self.look()
            passed = time.monotonic() - self.clock
            if passed > self.limit:
                (self.folder / "stop").touch()
            if passed > self.limit + GRACE:
                self.late = True
                break
            if not alive and self.records and self.died():
                self.start()  # for the claims that the dead process has left
                alive = True
        self.end()
        if not self.collected():
            self.stop_with_log()

    def look(self) -> None:
        """Read and print what the processes have noted since the last look."""
        if not self.collected():
            return
        for process in self.processes:
            path = self.folder / "{}.jsonl".format(process.pid)
            if not path.exists():
                continue
            with open(str(path), "rb") as file:
                file.seek(self.read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self.read[path] = self.read.get(path, 0) + len(line)
                    self.note(process.pid, json.loads(line.decode("utf-8")))

    def note(self, process: int, line: Dict[str, Any]) -> None:
        """A claim began or ended in a process."""
        if "began" in line:
            self.running[process] = line["began"]
            return
        self.running.pop(process, None)
        self.tell(line["ended"])

    def died(self) -> bool:
        """Refute the claims whose process died; whether there was one."""
        dead = dict(self.running)
        for process, claim in dead.items():
            del self.running[process]
            code = next(each.returncode for each in self.processes if each.pid == process)
            how = signal.Signals(-code).name if code and code < 0 else "exit code {}".format(code)
            reason = "the process that ran it died ({})".format(how)
            self.tell({**self.records[claim], "outcome": "refuted", "reason": reason})
        return bool(dead)

    def end(self) -> None:
        """End all processes with their children; what they still ran is unproven."""
        late = [process for process in self.processes if process.poll() is None]
        for number in (signal.SIGTERM, signal.SIGKILL):  # a build tool ends its own children only when it is asked
            for process in late:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            time.sleep(1 if late and number == signal.SIGTERM else 0)
        for process in self.processes:
            process.wait()
        self.look()
        for claim in list(self.running.values()):
            reason = "it did not end within {:.0f} s: --seconds gives it more".format(self.limit + GRACE)
            self.tell({**self.records[claim], "outcome": "unproven", "reason": reason})
        self.running.clear()

    def stop_with_log(self) -> NoReturn:
        """Say what kept pytest from collecting the claims."""
        if self.late:
            stop(f"pytest had not collected the claims after {self.limit + GRACE:.0f} s: give --seconds more.")
        log = next(iter(self.logs.values())).read_text(encoding="utf-8", errors="replace").strip()
        stop("the claims cannot be collected here; pytest printed:\n" + "\n".join(log.splitlines()[-15:]))

    # --- outcomes ---

    def collected(self) -> bool:
        """Whether the claims are known."""
        path = self.folder / "claims.json"
        if not self.records and path.exists():
            self.records = {record["id"]: record for record in json.loads(path.read_text(encoding="utf-8"))}
        return bool(self.records)

    def tell(self, record: Dict[str, Any]) -> None:
        """Keep a claim's outcome, and print it with the progress."""
        self.ended[record["id"]] = record
        text = printed.line(record)
        outcome = text[: printed.OUTCOME]
        if sys.stdout.isatty():
            outcome = "\x1b[{}m{}\x1b[0m".format(COLOURS[record["outcome"]], outcome)
        print("[{:4}/{}] {}{}".format(len(self.ended), len(self.records), outcome, text[printed.OUTCOME :]), flush=True)

    def claims(self) -> Iterator[Dict[str, Any]]:
        """Every claim with its outcome, in the order of collection."""
        for name, record in self.records.items():
            late = "not begun within {:.0f} s: --seconds gives it more".format(self.limit)
            yield self.ended.get(name, {**record, "reason": late})

    def finish(self) -> int:
        """Print the table, write the evidence, and return the exit code."""
        records = list(self.claims())
        print("\n" + table(records))
        if self.options.json:
            self.write(records)
        outcomes = {record["outcome"] for record in records}
        return REFUTED if "refuted" in outcomes else PROVED if "proved" in outcomes else NOTHING

    def write(self, records: List[Dict[str, Any]]) -> None:
        """Write the evidence, marked as of a foreign environment."""
        from smoke_tests import conftest

        evidence = {
            "foreign": True,
            "target": self.manifest["target"],
            "stack": self.manifest["stack"],
            "hardware": self.machine.describe(cuda=self.on_gpu),
            "python": sys.version.split()[0],
            "cuda": self.manifest["cuda"],
            "packages": {name: entry["version"] for name, entry in self.manifest["packages"].items()},
            "files": conftest.files_of_the_room(),
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self.clock, 1),
            "claims": records,
        }
        try:
            conftest.write_whole(self.options.json.resolve(), json.dumps(evidence, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            stop("the evidence cannot be written to {}: {}.".format(self.options.json, error.strerror))
        print("evidence: {}".format(self.options.json))


def table(records: List[Dict[str, Any]]) -> str:
    """Per package, how many claims have each outcome; then every refuted claim, and why others are unproven."""
    counts: Dict[str, "collections.Counter[str]"] = {}
    for record in records:
        counts.setdefault(record["package"], collections.Counter())[record["outcome"]] += 1
    lines = ["{:28}{:>8}{:>9}{:>10}".format("package", *COLOURS)]
    for package, of in counts.items():
        lines.append("{:28}{:>8}{:>9}{:>10}".format(package, *(of[outcome] for outcome in COLOURS)))
    for record in records:
        if record["outcome"] == "refuted":
            lines.append("refuted: {package}: {claim}\n    {id}: {reason}".format(**record))
    why: "collections.Counter[Tuple[str, str]]" = collections.Counter(
        (record["package"], record["reason"]) for record in records if record["outcome"] == "unproven"
    )
    lines += ["unproven: {}: {} of them: {}".format(package, count, reason) for (package, reason), count in why.items()]
    total: "collections.Counter[str]" = collections.Counter(record["outcome"] for record in records)
    return "\n".join([*lines, ", ".join("{} {}".format(total[outcome], outcome) for outcome in COLOURS)])


if __name__ == "__main__":
    sys.exit(main())
