#!/usr/bin/env python3
"""Prove an image on a Linux machine that has neither Docker nor a network: this script and `carry`'s folder suffice.

    python3 prove_carried.py FOLDER --out OUT [--work DIR] [--runtime NAME] [--zstd PROGRAM] -- [pytest's arguments]

Needs root, Python 3.11 and what the image's layers are compressed with (gzip or zstd). It
1. checks every part by its hash, and every blob of the OCI layout that they hold by its digest, up to the image's own;
2. unpacks the layers into a root file system, each checked by the digest that the image's configuration gives;
3. adds the driver's libraries and devices, as NVIDIA's container toolkit does for "compute,utility", and /etc/hosts;
4. runs the image's entry point with `smoke`, as the image's user, with a read-only root and a new /tmp, in the first
   of these that works: enroot, apptainer, bubblewrap, runc, crun, unshare with chroot;
5. leaves outcomes.json, smoke.log, manifest.json and image.json in OUT: `nox -s promote -- --from OUT` reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import hashlib
import io
import json
import os
import platform
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

# What the toolkit (libnvidia-container) mounts, where it exists, for the capabilities "compute" and "utility".
LIBRARIES = (
    *("libcuda.so", "libcudadebugger.so", "libnvidia-opencl.so", "libnvidia-gpucomp.so", "libnvidia-nvvm.so"),
    *("libnvidia-ptxjitcompiler.so", "libnvidia-allocator.so", "libnvidia-compiler.so", "libnvidia-pkcs11.so"),
    *("libnvidia-pkcs11-openssl3.so", "libnvidia-ml.so", "libnvidia-cfg.so", "libnvidia-nscq.so"),
)
PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
LIBRARY_PLACE, PROGRAM_PLACE = "usr/lib/x86_64-linux-gnu", "usr/bin"
BLOCK, PIPE = 1 << 20, 1 << 16
# The trial that a runtime must pass: the user, a read-only root, a writable /tmp, OUT, its own name, and the GPUs.
TRIAL = """
import ctypes, os, socket
assert (os.getuid(), os.getgid()) == (%d, %d), (os.getuid(), os.getgid())
for folder in ("/", "/opt/fusebox", "/usr"):
    assert os.statvfs(folder).f_flag & os.ST_RDONLY, folder + " can be written"
for folder in ("/tmp", "/mnt", "/dev/shm"):
    path = os.path.join(folder, "trial")
    open(path, "w").close()
    os.remove(path)
socket.gethostbyname(socket.gethostname())
assert os.path.exists("/opt/fusebox/bin/python") and os.listdir("/proc/self/fd") and os.path.exists("/dev/urandom")
if %r:
    code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    assert code == 0, "cuInit returns %%d" %% code
"""


class Failure(Exception):
    """What is wrong, and what to do next, in one sentence."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder that `carry` wrote, with its parts in it")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the outcomes")
    parser.add_argument("--work", type=Path, default=Path("/tmp/fusebox-image"), help="where the image is unpacked")
    parser.add_argument("--runtime", choices=list(RUNTIMES), help="use this one alone")
    parser.add_argument("--zstd", default="zstd", help="the program zstd, or a command that runs it")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end], argparse.Namespace(arguments=words[end + 1 :]))
    try:
        return prove(options)
    except (Failure, OSError) as error:
        print(f"fusebox: {error}", file=sys.stderr)
        return 2


def prove(options: argparse.Namespace) -> int:
    carried = json.loads((options.folder / "image.json").read_text())
    work = options.work.resolve()
    root = work / "root"
    image = unpacked_image(options, carried, root)
    options.out.mkdir(parents=True, exist_ok=True)
    options.out.chmod(0o1777)
    driver = Driver.of_machine()
    with timed("driver's files added"):
        driver.prepare(root)
    write_hosts(root)
    tools = unpacked_tools(options.folder, work)
    container = Container(root, image.config["config"], driver, options.out.resolve(), tools)
    used, refused = choose(container, [options.runtime] if options.runtime else list(RUNTIMES))
    for name, why in refused.items():
        print(f"{name} does not run it: {why}", flush=True)
    if used is None:
        raise Failure("No runtime on this machine runs the image; the reasons stand above.")
    about = {
        "image": "{}@{}".format(carried["name"], carried["digest"]),
        **image.described(),
        "runtime": {"name": used, "version": container.version(used), "kernel": platform.release()},
        "refused": refused,
        "driver": driver.listed(),
    }
    line = "image {image} in {name} {version}, as {user}".format(**about, **about["runtime"])
    shutil.copyfile(str(root / "opt/fusebox/fusebox/manifest.json"), str(options.out / "manifest.json"))
    (options.out / "image.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
    with timed("smoke ran"), (options.out / "smoke.log").open("w") as log:
        print(line, file=log, flush=True)
        command = [*container.entry, "smoke", "--evidence", "/mnt/outcomes.json", *options.arguments]
        code = RUNTIMES[used](container, command, log.fileno())
    print(line)
    print(f"smoke ended with code {code}; outcomes in {options.out}")
    return code


def unpacked_image(options: argparse.Namespace, carried: dict[str, Any], root: Path) -> Image:
    """The carried image, checked by its digest, with its layers in `root`; an earlier run can have unpacked it."""
    layout, done = root.with_name("oci"), root.with_name("unpacked")
    with timed("parts checked, blobs written"):
        join(options.folder, carried["parts"], layout)
    image = Image(layout, carried["digest"])
    if not done.exists():
        shutil.rmtree(root, ignore_errors=True)
        with timed("layers unpacked"):
            image.unpack(root, options.zstd)
        done.write_text(carried["digest"])
    return image


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begun:.1f} s", flush=True)


# --- the image: parts, blobs, layers


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def join(folder: Path, parts: Sequence[dict[str, Any]], layout: Path) -> None:
    """Check the parts, which are one tar archive of an OCI layout, and unpack it."""
    faults: list[str] = []

    def check(part: dict[str, Any]) -> None:
        path = folder / part["name"]
        if not path.exists() or sha256_of(path) != part["sha256"]:
            faults.append(part["name"])

    threads = [threading.Thread(target=check, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise Failure("{}: missing or damaged: bring {} again.".format(folder, ", ".join(sorted(faults))))
    if (layout / "index.json").exists():
        return
    layout.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(["tar", "-x", "-f", "-", "-C", str(layout)], stdin=subprocess.PIPE) as tar:
        assert tar.stdin
        for part in parts:
            with (folder / part["name"]).open("rb") as file:
                shutil.copyfileobj(file, tar.stdin, BLOCK)
    if tar.returncode != 0:
        raise Failure(f"tar could not unpack the joined parts into {layout}: see its message above.")


def unpacked_tools(folder: Path, work: Path) -> Path:
    """The programs that came along in tools.tar.gz: NAME, and lib/ with the libraries that they need."""
    tools = work / "tools"
    tools.mkdir(exist_ok=True)
    if (folder / "tools.tar.gz").exists():
        subprocess.run(["tar", "-xzf", str(folder / "tools.tar.gz"), "-C", str(tools)], check=True)
    return tools


class Image:
    """An image in an OCI layout. Its manifest has the digest that is asked for; everything else is checked by that."""

    def __init__(self, layout: Path, digest: str) -> None:
        self.layout = layout
        self.manifest = json.loads(self._checked(digest).read_text())
        self.config = json.loads(self._checked(self.manifest["config"]["digest"]).read_text())

    def blob(self, digest: str) -> Path:
        return self.layout / "blobs" / digest.replace(":", "/")

    def _checked(self, digest: str) -> Path:
        if "sha256:" + sha256_of(self.blob(digest)) != digest:
            raise Failure(f"{self.blob(digest)} does not have the bytes of its name: bring the parts again.")
        return self.blob(digest)

    def described(self) -> dict[str, Any]:
        """The image as image.json describes it: its parts, its labels and the user that it runs as."""
        return {
            "config": self.manifest["config"]["digest"],
            "layers": [layer["digest"] for layer in self.manifest["layers"]],
            "labels": self.config["config"].get("Labels") or {},
            "user": self.config["config"].get("User") or "0:0",
        }

    def unpack(self, root: Path, zstd: str) -> None:
        """Unpack the layers in order, each on those below it; after a fault, nothing of them is left."""
        root.mkdir(parents=True)
        layers = zip(self.manifest["layers"], self.config["rootfs"]["diff_ids"], strict=False)
        try:
            for layer, diff_id in layers:
                is_zstd = layer["mediaType"].endswith("zstd")
                program = [*shlex.split(zstd), "-d", "-q", "-c"] if is_zstd else ["gzip", "-d", "-c"]
                extract(self.blob(layer["digest"]), program, diff_id, root)
        except (Failure, OSError):
            shutil.rmtree(root, ignore_errors=True)
            raise


def extract(blob: Path, program: Sequence[str], diff_id: str, root: Path) -> None:
    """Unpack one layer and check the bytes of its archive while they pass."""
    tar = ["tar", "-x", "-f", "-", "-C", str(root), "--same-owner", "--preserve-permissions", "--numeric-owner"]
    tar += ["--exclude=.wh.*"]
    try:
        with (
            blob.open("rb") as packed,
            subprocess.Popen(program, stdin=packed, stdout=subprocess.PIPE) as unpacking,
            subprocess.Popen(tar, stdin=subprocess.PIPE) as extracting,
        ):
            assert unpacking.stdout
            assert extracting.stdin
            passing = Passing(unpacking.stdout, extracting.stdin)
            remove_whited_out(root, passing)
            while passing.read(BLOCK):
                pass
        failed = unpacking.returncode or extracting.returncode
    except (tarfile.TarError, BrokenPipeError):
        failed = 1
    if failed:
        raise Failure(f"{blob} cannot be unpacked: see the message above.")
    if "sha256:" + passing.digest.hexdigest() != diff_id:
        raise Failure(f"{blob} unpacks to other bytes than the image names: bring the parts again.")


class Passing(io.RawIOBase):
    """The archive of a layer on its way to tar, hashed: a block goes on when the next is read, not before."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self.source, self.sink = source, sink
        self.digest, self.block = hashlib.sha256(), b""

    def read(self, size: int = -1) -> bytes:
        self.sink.write(self.block)
        self.block = self.source.read(size)
        self.digest.update(self.block)
        return self.block


def remove_whited_out(root: Path, layer: Passing) -> None:
    """Remove what a layer removes of those below it (OCI's whiteouts), each before tar gets to its block."""
    own: set[Path] = set()
    with tarfile.open(fileobj=layer, mode="r|", bufsize=PIPE) as archive:
        for member in archive:
            path = root / member.name.lstrip("/")
            hidden = path.parent / path.name.removeprefix(".wh.")
            if ".." in hidden.parts or hidden.parent != path.parent:
                raise Failure(f"{member.name} in a layer does not name a place in the image: bring the parts again.")
            if path.name == ".wh..wh..opq":
                for beside in list(path.parent.iterdir()) if path.parent.is_dir() else []:
                    remove_lower(beside, own)
            elif hidden != path:
                remove_lower(hidden, own)
            else:
                own |= {path, *path.parents}


def remove_lower(path: Path, own: set[Path]) -> None:
    """Remove what lower layers have at a path; `own` is what the layer itself brings."""
    is_folder = path.is_dir() and not path.is_symlink()
    if is_folder and path in own:
        for below in list(path.iterdir()):
            remove_lower(below, own)
    elif is_folder:
        shutil.rmtree(str(path))
    elif path not in own and (path.is_symlink() or path.exists()):
        path.unlink()


# --- the driver


class Driver:
    """The files and devices of NVIDIA's driver on this machine; nothing where there is none."""

    def __init__(self, libraries: list[Path], programs: list[Path], devices: list[Path]) -> None:
        self.libraries, self.programs, self.devices = libraries, programs, devices

    @classmethod
    def of_machine(cls) -> Driver:
        libraries: dict[str, Path] = {}
        for folder in cls._folders():
            for path in sorted(folder.glob("lib*.so.*")) if folder.is_dir() else ():
                name = path.name.partition(".so.")[0] + ".so"
                # The real file, under the name that has the driver's version; a link of that version is made later.
                if name in LIBRARIES and path.resolve().name not in libraries:
                    libraries[path.resolve().name] = path.resolve()
        places = f"{os.environ.get('PATH', '')}:/usr/local/nvidia/bin"
        programs = [Path(place).resolve() for name in PROGRAMS if (place := shutil.which(name, path=places))]
        devices = [path for path in sorted(Path("/dev").glob("nvidia*")) if stat.S_ISCHR(path.stat().st_mode)]
        devices += sorted(Path("/dev/nvidia-caps").glob("*"))
        return cls(list(libraries.values()), programs, devices)

    @staticmethod
    def _folders() -> list[Path]:
        """Where the driver's libraries can lie: the loader's cache first, as the toolkit looks them up."""
        listed = subprocess.run(["ldconfig", "-p"], stdout=subprocess.PIPE, check=False).stdout.decode()
        places = [line.rpartition("=> ")[2] for line in listed.splitlines() if "x86-64" in line and "=> " in line]
        folders = [Path(place).parent for place in places if Path(place).name.partition(".so")[0] + ".so" in LIBRARIES]
        folders += [Path(place) for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
        folders += [Path("/usr/local/nvidia/lib64"), Path("/usr/lib64"), Path("/" + LIBRARY_PLACE)]
        return list(dict.fromkeys(folders))

    def mounts(self) -> list[tuple[Path, str]]:
        """Each file, and where it is mounted in the root."""
        mounted = [(path, LIBRARY_PLACE + "/" + path.name) for path in self.libraries]
        return mounted + [(path, PROGRAM_PLACE + "/" + path.name) for path in self.programs]

    def prepare(self, root: Path) -> None:
        """Make the places of the mounts in the root, the links that name the libraries, and the loader's cache.

        NVIDIA's toolkit runs ldconfig on the container's root in a hook, once the libraries are mounted. So does this,
        in mounts of its own, which end with it.
        """
        for _, place in self.mounts():
            if not (root / place).exists():
                (root / place).touch(0o644)
        if not self.libraries:
            return
        binds = " && ".join(f"mount --bind '{path}' '{root / place}'" for path, place in self.mounts())
        script = f"{binds} && ldconfig -r '{root}'"
        done = subprocess.run(["unshare", "--mount", "--propagation", "private", "sh", "-c", script], check=False)
        if done.returncode != 0:
            raise Failure("ldconfig could not be run on the image's root with the driver's libraries: see above.")
        for name in ("libcuda.so", "libnvidia-ml.so"):  # the toolkit makes libcuda.so too
            link = root / LIBRARY_PLACE / name
            if (link.parent / (name + ".1")).exists() and not link.exists():
                link.symlink_to(name + ".1")

    def listed(self) -> list[str]:
        return sorted([path.name for path in (*self.libraries, *self.programs)] + [str(path) for path in self.devices])


# --- the container

HOSTNAME = "fusebox"  # of a container that has a name of its own


def write_hosts(root: Path) -> None:
    """Write the root's /etc/hosts, which Docker, enroot and Apptainer bring along and an image does not have.

    torchrun looks up its own host. Where no server answers for that name, it waits for minutes.
    """
    place = root / "etc" / "hosts"
    place.unlink(missing_ok=True)  # a link could lead out of the root
    place.write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\t{socket.gethostname()} {HOSTNAME}\n")


class Container:
    """What every runtime has to make of the image: its process, its mounts, its devices and its user."""

    def __init__(self, root: Path, config: dict[str, Any], driver: Driver, out: Path, tools: Path) -> None:
        self.root, self.config, self.driver, self.out, self.tools = root, config, driver, out, tools
        user, _, group = (config.get("User") or "0:0").partition(":")
        self.uid, self.gid = int(user), int(group or 0)
        self.entry: list[str] = list(config.get("Entrypoint") or [])
        self.env: dict[str, str] = dict(entry.split("=", 1) for entry in config["Env"])
        self.cwd: str = config.get("WorkingDir") or "/"

    def tool(self, name: str) -> str | None:
        """A program of this machine, else the one that came with the image."""
        brought = self.tools / name
        if place := shutil.which(name):
            return place
        if brought.exists():
            missing = [path for path in (self.tools / "lib").glob("*.so*") if not _is_library(path.name)]
            for path in missing:  # to where runc, which restarts itself without environment variables, finds them
                shutil.copyfile(str(path), "/usr/lib/x86_64-linux-gnu/" + path.name)
            if missing:
                subprocess.run(["ldconfig"], check=False)
            brought.chmod(0o755)
            return str(brought)
        return None

    def version(self, runtime: str) -> str:
        program = {"bubblewrap": "bwrap", "unshare": "unshare"}.get(runtime, runtime)
        place = self.tool(program)
        done = subprocess.run([str(place), "version" if runtime == "enroot" else "--version"], stdout=subprocess.PIPE)
        words = done.stdout.decode().split()
        return next((word for word in words if word[:1].isdigit()), "unknown")

    def needed(self, name: str) -> str:
        place = self.tool(name)
        if place is None:
            raise Failure("it is not installed")
        return place

    def as_user(self) -> list[str]:
        """Options of setpriv."""
        return [f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]

    def in_environment(self, command: Sequence[str]) -> list[str]:
        """The command with the image's variables alone, as the image's user without any right of root."""
        variables = ["{}={}".format(*pair) for pair in self.env.items()]
        user = [*self.as_user(), "--no-new-privs"]
        drop = ["--bounding-set=-all", "--inh-caps=-all"]
        return ["/usr/bin/setpriv", *user, *drop, "/usr/bin/env", "-i", "-C", self.cwd, *variables, *command]


def _is_library(name: str) -> bool:
    return ctypes.util.find_library(name[3:].partition(".so")[0]) is not None or any(
        Path(folder, name).exists() for folder in ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu")
    )


def enroot(container: Container, command: Sequence[str], output: int | None) -> int:
    program = container.needed("enroot")
    place = container.root.parent / "enroot"
    place.mkdir(exist_ok=True)
    if not (place / "image").exists():
        (place / "image").symlink_to(container.root)
    mounts = ["--mount={}:/{}".format(*pair) for pair in container.driver.mounts()]
    mounts += [f"--mount={device}" for device in container.driver.devices]
    mounts += [f"--mount={container.out}:/mnt:rw,bind", "--mount=tmpfs:/tmp:tmpfs:exec,mode=1777"]
    run = ["setpriv", *container.as_user(), program, "start", *mounts, "image", *command]
    variables = {**os.environ, "ENROOT_DATA_PATH": str(place), "ENROOT_ROOTFS_WRITABLE": "no"}
    return _run(run, output, variables)


def apptainer(container: Container, command: Sequence[str], output: int | None) -> int:
    program = container.needed("apptainer")
    binds = ["--bind={}:/{}:ro".format(*pair) for pair in container.driver.mounts()]
    binds += [f"--bind={device}" for device in container.driver.devices] + [f"--bind={container.out}:/mnt"]
    scratch = container.root.parent / "apptainer"
    scratch.mkdir(exist_ok=True)
    scratch.chmod(0o1777)
    run = ["setpriv", *container.as_user(), program, "exec"]
    variables = ["--env={}={}".format(*pair) for pair in container.env.items()]
    run += ["--containall", "--cleanenv", f"--workdir={scratch}", f"--pwd={container.cwd}", *variables, *binds]
    return _run([*run, str(container.root), *command], output)


def bubblewrap(container: Container, command: Sequence[str], output: int | None) -> int:
    run = [container.needed("bwrap"), "--ro-bind", str(container.root), "/", "--proc", "/proc", "--dev", "/dev"]
    for place in ("/tmp", "/dev/shm"):
        run += ["--tmpfs", place, "--chmod", "1777", place]
    run += ["--bind", str(container.out), "/mnt"]
    for path, place in container.driver.mounts():
        run += ["--ro-bind", str(path), "/" + place]
    for device in container.driver.devices:
        run += ["--dev-bind", str(device), str(device)]
    run += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--cap-drop", "ALL"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):  # needed to change the user, which drops them
        run += ["--cap-add", capability]
    return _run([*run, *container.in_environment(command)], output)


def runc(container: Container, command: Sequence[str], output: int | None) -> int:
    return _oci(container, container.needed("runc"), command, output)


def crun(container: Container, command: Sequence[str], output: int | None) -> int:
    return _oci(container, container.needed("crun"), command, output)


def _oci(container: Container, program: str, command: Sequence[str], output: int | None) -> int:
    """Run by a runtime of the Open Container Initiative: config.json says everything."""
    bundle, name = container.root.parent / "bundle", f"fusebox-{os.getpid()}"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").write_text(json.dumps(_specification(container, command), indent=1))
    subprocess.run([program, "delete", "--force", name], stderr=subprocess.DEVNULL, check=False)
    try:
        return _run([program, "run", "--bundle", str(bundle), name], output)
    finally:
        subprocess.run([program, "delete", "--force", name], stderr=subprocess.DEVNULL, check=False)


def _specification(container: Container, command: Sequence[str]) -> dict[str, Any]:
    plain = ["nosuid", "nodev", "noexec"]
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": plain},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
        {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "ro", *plain]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]},
        {"destination": "/mnt", "type": "none", "source": str(container.out), "options": ["bind", "rw"]},
    ]
    mounts += [
        {"destination": "/" + place, "type": "none", "source": str(path), "options": ["bind", "ro", "nosuid", "nodev"]}
        for path, place in container.driver.mounts()
    ]
    devices = [_device(path) for path in container.driver.devices]
    rules: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    rules += [{"allow": True, "type": "c", "major": d["major"], "minor": d["minor"], "access": "rwm"} for d in devices]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": container.uid, "gid": container.gid},
            "args": list(command),
            "env": ["{}={}".format(*pair) for pair in container.env.items()],
            "cwd": container.cwd,
            "noNewPrivileges": True,
        },
        "root": {"path": str(container.root), "readonly": True},
        "hostname": HOSTNAME,
        "mounts": mounts,
        "linux": {
            "devices": devices,
            "resources": {"devices": rules},
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
        },
    }


def _device(path: Path) -> dict[str, Any]:
    status = path.stat()
    numbers = {"major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
    return {"path": str(path), "type": "c", "fileMode": stat.S_IMODE(status.st_mode), "uid": 0, "gid": 0, **numbers}


def unshare(container: Container, command: Sequence[str], output: int | None) -> int:
    """Namespaces by util-linux, and chroot: each mount is made by hand."""
    root, devices = container.root, [Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom")]
    steps = [
        f"mount --bind '{root}' '{root}'",
        f"mount -o remount,bind,ro '{root}'",
        f"mount -t proc proc '{root}/proc'",
        f"mount -t tmpfs -o mode=755 tmpfs '{root}/dev'",
        f"mount -t tmpfs -o mode=1777 tmpfs '{root}/tmp'",
        f"mount --bind '{container.out}' '{root}/mnt'",
        f"ln -s /proc/self/fd '{root}/dev/fd'",
        f"mkdir '{root}/dev/shm'",
        f"mount -t tmpfs -o mode=1777 tmpfs '{root}/dev/shm'",
    ]
    for device in (*devices, *container.driver.devices):
        place = f"{root}{device}"
        steps.append(f"mkdir -p '{Path(place).parent}' && touch '{place}' && mount --bind '{device}' '{place}'")
    for path, place in container.driver.mounts():
        steps.append(f"mount --bind '{path}' '{root}/{place}' && mount -o remount,bind,ro '{root}/{place}'")
    script = " && ".join([*steps, f"exec chroot '{root}' \"$@\""])
    spaces = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
    run = [container.needed("unshare"), *spaces, "sh", "-c", script, "sh", *container.in_environment(command)]
    return _run(run, output)


RUNTIMES: dict[str, Callable[[Container, Sequence[str], int | None], int]] = {
    "enroot": enroot,
    "apptainer": apptainer,
    "bubblewrap": bubblewrap,
    "runc": runc,
    "crun": crun,
    "unshare": unshare,
}


def _run(command: Sequence[str], output: int | None, variables: dict[str, str] | None = None) -> int:
    """Run a command: what it prints goes to `output`, and its code is returned; without `output`, it has to work."""
    to: Any = subprocess.PIPE if output is None else output
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=to, stderr=subprocess.STDOUT, env=variables)
    if output is None and done.returncode != 0:
        printed = " ".join(done.stdout.decode(errors="replace").split())
        raise Failure(f"code {done.returncode}, {printed[-300:] or 'and it printed nothing'}")
    return done.returncode


def choose(container: Container, names: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The first runtime that passes the trial, and why those before it do not."""
    trial = TRIAL % (container.uid, container.gid, bool(container.driver.devices))
    refused = {}
    for name in names:
        try:
            RUNTIMES[name](container, [*container.entry, "python", "-c", trial], None)
        except (Failure, OSError) as error:
            refused[name] = str(error)
        else:
            return name, refused
    return None, refused


if __name__ == "__main__":
    sys.exit(main())
