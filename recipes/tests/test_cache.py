"""The cache: complete or not there, whoever is killed, whatever is full, damaged or done twice at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes.errors import Refusal
from recipes.files import ROOT, digest_of
from recipes.make.cache import default_cache, find_file
from recipes.process import held
from recipes.tests.conftest import SOURCE, Index, Tiny, one_sentence, throttled

# --- nothing is done twice


def test_a_second_build_compiles_nothing(tiny: Tiny) -> None:
    """Nor does one in another checkout with the same cache; only the environment is made anew there."""
    tiny.succeed("build", "tiny")
    log = next(tiny.cache.glob("wheels/*/build.log"))
    before, built = tiny.contents(), log.stat().st_mtime_ns
    assert "install " not in tiny.succeed("build", "tiny")
    assert tiny.contents() == before
    shutil.rmtree(tiny.root / "build")
    output = tiny.succeed("build", "tiny")
    assert "install " in output and not any(f"{step} " in output for step in ("fetch", "patch", "prepare", "build  "))
    assert tiny.contents() == before and log.stat().st_mtime_ns == built


def test_two_builds_at_once_share_the_work(tiny: Tiny, undisturbed: Tiny) -> None:
    """The second waits, says for which process, and finds everything done."""
    slow(tiny)
    first = tiny.start("build", "tiny")
    while not (tiny.cache / "wheels").exists() and not any(tiny.cache.glob("partial/build/*")):
        time.sleep(0.02)
    second = tiny.start("build", "tiny")
    output, also_said = (process.communicate(timeout=60) for process in (first, second))
    assert (first.returncode, second.returncode) == (0, 0), (output, also_said)
    assert f"waiting for process {first.pid}" in also_said[0]
    assert [step for step in also_said[0].splitlines() if step.startswith(("fetch", "patch", "build", "install"))] == []
    tiny.check_whole()
    assert content(tiny) == content(undisturbed)


def slow(tiny: Tiny, seconds: float = 0.4) -> None:
    """Let the build take that long."""
    tiny.edit(tiny.recipe("tinypkg"), 'TINY_SECONDS = "0"', f'TINY_SECONDS = "{seconds}"')


def content(tiny: Tiny) -> dict[str, str]:
    """What was built, apart from the stack key, which a recipe that takes its time changes."""
    packages = tiny.result()["packages"]
    return {name: package["sha256"] for name, package in packages.items()} | {"installed": tiny.result()["installed"]}


# --- killed, stopped


def lines_of(tiny: Tiny, kill_after: str | None, delay: float) -> tuple[int, list[tuple[str, float]]]:
    """Build, and SIGKILL it `delay` seconds after the line that begins so; the exit code and when each line came."""
    process = tiny.start("build", "tiny")
    assert process.stdout and process.stderr
    came = [("start", time.monotonic())]
    killed = False
    with process:
        while True:
            if kill_after is not None and not killed and came[-1][0].startswith(kill_after):
                time.sleep(delay)
                process.kill()
                killed = True
            if not (line := process.stdout.readline()):
                break
            came.append((line, time.monotonic()))
        process.wait()
    return process.returncode, [*came, ("end", time.monotonic())]


PHASES = ("start", "fetch   tinypkg", "prepare", "build", "install")  # each begins with the line before it


def after(phase: str) -> str:
    """The line that ends a phase."""
    return PHASES[PHASES.index(phase) + 1]


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_a_killed_build_goes_on_to_the_same_result(tiny: Tiny, index: Index, tmp_path: Path, phase: str) -> None:
    """SIGKILL at five moments of a phase: the next run ends as if nothing had been; nothing is left."""
    index.faults["tinypkg-1.0.tar.gz"] = throttled(0.3)
    slow(tiny, 0.2)
    code, came = lines_of(tiny, None, 0)
    sound = tiny.result()
    assert code == 0
    begin, end = (next(when for line, when in came if line.startswith(name)) for name in (phase, after(phase)))
    moments = [(end - begin) * part / 5 for part in range(5)]

    def kill(number: int) -> None:
        delay = moments[number]
        copy, code = tiny.copy(tmp_path / f"killed{number}"), 0
        while code == 0:
            shutil.rmtree(copy.cache, ignore_errors=True)
            shutil.rmtree(copy.root / "build", ignore_errors=True)
            code, _ = lines_of(copy, phase, delay)
            delay /= 2  # in case the run ended before the kill
        assert code == -signal.SIGKILL
        copy.check_whole()
        copy.succeed("build", "tiny")
        assert copy.result() == sound, moments[number]
        assert {path.name for path in copy.cache.iterdir()} == {path.name for path in tiny.cache.iterdir()}

    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(kill, range(len(moments))))) == 5


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_build_ends_cleanly(tiny: Tiny, undisturbed: Tiny, sent: signal.Signals) -> None:
    """Ctrl-C while it compiles: one line, exit code 130, nothing left running or lying about; then it goes on."""
    slow(tiny, 20)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup`, the build would ignore it
    process = tiny.start("build", "tiny")
    signal.signal(signal.SIGHUP, hangup)
    while not any(tiny.cache.glob("partial/build/*/building")):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(sent)
    stdout, stderr = process.communicate(timeout=5)
    one_sentence(
        subprocess.CompletedProcess([], process.returncode, stdout, stderr), ("stopped", "run again"), code=130
    )
    assert not any(tiny.cache.glob("partial/*")) and not any(tiny.root.glob("build/*/env*"))
    assert (
        str(tiny.cache) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    )
    tiny.edit(tiny.recipe("tinypkg"), 'TINY_SECONDS = "20"', 'TINY_SECONDS = "0"')
    tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()


def test_what_a_killed_build_left_running_is_not_waited_for(tiny: Tiny, undisturbed: Tiny) -> None:
    """A compiler would write where the next run does: it ends with the killed one, long before it would be done."""
    slow(tiny, 60)
    process = tiny.start("build", "tiny")
    while not any(tiny.cache.glob("partial/build/*/building")):
        time.sleep(0.05)
    process.kill()
    process.communicate()
    tiny.edit(tiny.recipe("tinypkg"), 'TINY_SECONDS = "60"', 'TINY_SECONDS = "0"')
    assert "waiting" not in tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()


def left_by_a_killed_run(folder: Path) -> tuple[subprocess.Popen[str], str, str]:
    """A process that has a folder's lock from a run that is gone; the numbers of it and of that run."""
    script = (
        "import os, subprocess, sys\nfrom pathlib import Path\nfrom recipes.process import held\n"
        "with held(Path(sys.argv[1]), print):\n"
        "    child = subprocess.Popen(['sleep', '60'], close_fds=False, stdin=0, stdout=subprocess.DEVNULL)\n"
        "    print(os.getpid(), child.pid, flush=True)\n    os._exit(0)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout
    killed, orphan = run.stdout.readline().split()
    return run, killed, orphan


@pytest.mark.parametrize("place", ["cache", "checkout/build/tiny"])
def test_a_run_beside_an_orphan_is_refused(tiny: Tiny, place: str) -> None:
    """It may write there; a run that waits for a dead process would wait for nobody."""
    folder = tiny.root.parent / place
    tiny.succeed("fetch", "tiny")
    run, killed, orphan = left_by_a_killed_run(folder)
    with run:
        run.wait()
        try:
            naming = (str(folder), f"processes that the killed process {killed} started", f"end {orphan} (sleep)")
            started = time.monotonic()
            tiny.refuse("build", "tiny", naming=naming)
            assert time.monotonic() - started < 30
        finally:
            os.kill(int(orphan), signal.SIGKILL)
    tiny.succeed("build", "tiny")


def test_two_builds_with_two_caches_share_a_checkout(tiny: Tiny, undisturbed: Tiny, tmp_path: Path) -> None:
    """Each makes its wheels, and they make the environment one after the other."""
    for number in range(3):
        shutil.rmtree(tiny.root / "build", ignore_errors=True)
        caches = [tmp_path / f"cache{number}-{letter}" for letter in "ab"]
        builds = [tiny.start("build", "tiny", FUSEBOX_CACHE=str(cache)) for cache in caches]
        outputs = [process.communicate(timeout=120) for process in builds]
        assert [process.returncode for process in builds] == [0, 0], outputs
        assert not any("Traceback" in text for output in outputs for text in output)
        assert tiny.result() == undisturbed.result()


def test_a_checkout_is_not_cleaned_under_a_run(tiny: Tiny) -> None:
    """The run that removes the folder waits; whoever waited for the removed lock takes the new one."""
    with held(tiny.root / "build" / "tiny", print):
        cleaning = tiny.start("clean")
        assert cleaning.stdout
        assert f"waiting for process {os.getpid()}" in cleaning.stdout.readline()
        assert (tiny.root / "build" / "tiny").exists()
    assert cleaning.wait(30) == 0
    assert not (tiny.root / "build").exists()


# --- full, unwritable


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path, str], None]]:
    """Mount a file system of that size, or mount it again with other options."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "x", tmp_path], check=False).returncode != 0:
        pytest.skip("a small file system is mounted as root")
    subprocess.run(["umount", tmp_path], check=True)
    mounted = list[Path]()

    def mount(place: Path, options: str) -> None:
        place.mkdir(exist_ok=True)
        again = ",remount" if place in mounted else ""
        subprocess.run(["mount", "-t", "tmpfs", "-o", options + again, "fusebox-test", place], check=True)
        mounted.extend([] if again else [place])

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True)


LARGE = SOURCE | {"data": bytes(3 * 2**20)}
FULL: dict[str, tuple[str, Mapping[str, str | bytes]]] = {
    "download": ("600k", SOURCE),
    "unpack": ("3m", LARGE),
    "install": ("8m", SOURCE),
    "build": ("60m", SOURCE | {"backend.py": "open('big', 'wb').write(bytes(2**26))\n" + SOURCE["backend.py"]}),
}


@pytest.mark.parametrize("step", FULL)
def test_a_full_disk_is_named(tiny: Tiny, small_disk: Callable[[Path, str], None], step: str) -> None:
    """Whatever is being written when it fills up; with more room the same cache goes on."""
    size, source = FULL[step]
    tiny.plant("tinypkg", source, requires=("tinydep",))
    small_disk(tiny.cache, f"size={size}")
    tiny.refuse("build", "tiny", naming=(str(tiny.cache), "full", "FUSEBOX_CACHE"))
    small_disk(tiny.cache, "size=500m")
    tiny.succeed("build", "tiny")


def test_a_full_disk_below_build_is_named(
    tiny: Tiny, small_disk: Callable[[Path, str], None], undisturbed: Tiny
) -> None:
    """The environment's own disk, not the cache's."""
    place = tiny.root / "build"
    small_disk(place, "size=4m")
    tiny.refuse("build", "tiny", naming=(f"The disk of {place}", "full", "move the checkout to a larger disk"))
    small_disk(place, "size=100m")
    tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()


def test_an_unwritable_cache_is_refused(tiny: Tiny, small_disk: Callable[[Path, str], None]) -> None:
    """A read-only file system; and a file where the folder should be, or above it."""
    small_disk(tiny.cache, "ro")
    tiny.refuse("build", "tiny", naming=(str(tiny.cache), "cannot be written", "FUSEBOX_CACHE"))
    for place in (tiny.targets, tiny.targets / "below"):
        tiny.refuse("fetch", "tiny", naming=(str(place), "FUSEBOX_CACHE"), FUSEBOX_CACHE=str(place))


def test_an_unwritable_checkout_is_refused(tiny: Tiny, small_disk: Callable[[Path, str], None]) -> None:
    """build/ is read-only."""
    small_disk(tiny.root / "build", "ro")
    tiny.refuse("build", "tiny", naming=(str(tiny.root / "build"), "cannot be written"))


# --- damaged


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: next(folder.glob("*.whl")).write_bytes(b"PK"),
        lambda folder: next(folder.glob("*.whl")).unlink(),
        lambda folder: (folder / "wheel.json").write_text("{"),
        lambda folder: (folder / "wheel.json").write_text("{}"),
        lambda folder: (folder / "wheel.json").unlink(),
    ],
    ids=["other-bytes", "no-wheel", "half-record", "empty-record", "no-record"],
)  # fmt: skip
def test_a_damaged_wheel_in_the_cache_is_built_again(
    tiny: Tiny, undisturbed: Tiny, damage: Callable[[Path], None]
) -> None:
    """With the same bytes as before."""
    copy_cache(undisturbed, tiny)
    damage(next(tiny.cache.glob("wheels/*")))
    assert "build   tinypkg 1.0" in tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()


def copy_cache(source: Tiny, into: Tiny) -> None:
    """Start with what another checkout has in its cache."""
    shutil.copytree(source.cache, into.cache, symlinks=True)


def test_a_damaged_tree_in_the_cache_is_not_compiled(tiny: Tiny, undisturbed: Tiny) -> None:
    """It is unpacked anew, for an image too, and so is one without its record."""
    copy_cache(undisturbed, tiny)
    shutil.rmtree(tiny.cache / "wheels")
    tree = next(tiny.cache.glob("trees/*"))
    module = tree / "tinypkg-1.0" / "tinypkg.py"
    sound = module.read_text()
    damages: list[Callable[[], object]] = [
        lambda: module.write_text("value = 3\n"),
        lambda: shutil.rmtree(module.parent),
        lambda: (tree / "tree.json").write_text("{"),
        lambda: (tree / "tree.json").unlink(),
    ]
    for number, damage in enumerate(damages):
        damage()
        out = tiny.root / f"out{number}"
        tiny.succeed("patch", "tiny", "--into", str(out))
        assert module.read_text() == next(out.rglob("tinypkg.py")).read_text() == sound
    tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()


def test_a_folder_that_holds_other_things_is_not_taken_for_a_cache(tiny: Tiny) -> None:
    theirs = tiny.root / "theirs"
    (theirs / "partial").mkdir(parents=True)
    (theirs / "partial" / "thesis.tex").write_text("mine\n")
    named = (str(theirs), "holds other things (partial)", "choose an empty")
    tiny.refuse("fetch", "tiny", "--into", str(theirs), naming=named)
    tiny.refuse("build", "tiny", naming=named, FUSEBOX_CACHE=str(theirs))
    assert [path.name for path in theirs.rglob("*")] == ["partial", "thesis.tex"]
    (tiny.root / "locked").mkdir()
    (tiny.root / "locked" / "lock").write_text("my combination: 31-7-12\n")
    tiny.refuse("build", "tiny", naming=("holds other things (lock)",), FUSEBOX_CACHE=str(tiny.root / "locked"))
    assert (tiny.root / "locked" / "lock").read_text() == "my combination: 31-7-12\n"
    tiny.succeed("fetch", "tiny")
    (tiny.cache / "CACHEDIR.TAG").unlink()  # as in a cache made before the mark existed
    tiny.succeed("fetch", "tiny")


@pytest.mark.parametrize("left", [("lock",), ("lock", ".CACHEDIR.TAG.25471.partial"), (".CACHEDIR.TAG.25471.partial",)])
def test_a_run_killed_before_it_marked_its_cache_leaves_a_usable_folder(tiny: Tiny, left: tuple[str, ...]) -> None:
    tiny.cache.mkdir()
    for name in left:
        (tiny.cache / name).write_text("25471\n")
    tiny.succeed("fetch", "tiny")
    assert (tiny.cache / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f59")
    assert not list(tiny.cache.glob(".CACHEDIR*"))


def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError

    for name in ("FUSEBOX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(Refusal, match="set HOME, or FUSEBOX_CACHE"):
        default_cache()


@pytest.mark.parametrize("name", ["with space", "with'quote", "with#hash", "with:colon", "with,comma"])
def test_a_cache_in_which_compilers_fail_is_refused_at_once(tiny: Tiny, name: str) -> None:
    tiny.refuse("build", "tiny", naming=(name, "compilers fail", "FUSEBOX_CACHE"), FUSEBOX_CACHE=str(tiny.root / name))
    assert not (tiny.root / name).exists()


@pytest.mark.parametrize("length", [201, 300])
def test_a_cache_with_a_long_path_is_refused_at_once(tiny: Tiny, length: int) -> None:
    named = (f"has a name of {length} characters", "FUSEBOX_CACHE")
    tiny.refuse("build", "tiny", naming=named, FUSEBOX_CACHE="/" + "x" * (length - 1))


# --- export and import


@pytest.fixture(scope="module")
def first_export(undisturbed: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `cache export` wrote; tests change copies of it."""
    folder = tmp_path_factory.mktemp("export") / "exported"
    assert "1 wheels exported" in undisturbed.succeed("cache", "export", folder)
    return folder


@pytest.fixture
def exported(first_export: Path, tmp_path: Path) -> Path:
    """A copy of what `cache export` wrote."""
    return shutil.copytree(first_export, tmp_path / "exported")


def record_of(folder: Path) -> Path:
    """The one wheel's record."""
    return next(folder.glob("*/wheel.json"))


def test_an_exported_wheel_is_not_built_again(tiny: Tiny, exported: Path, undisturbed: Tiny) -> None:
    """After the import, a cache that never compiled has the same environment."""
    tiny.succeed("cache", "import", exported)
    assert "build   " not in tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()
    before = {path: path.stat().st_mtime_ns for path in exported.rglob("*")}
    tiny.succeed("cache", "export", exported)
    assert {path: path.stat().st_mtime_ns for path in exported.rglob("*")} == before


def change_byte(folder: Path) -> None:
    """One bit of the wheel."""
    path = next(folder.glob("*/*.whl"))
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


def rewrite(folder: Path, **changes: object) -> None:
    """Other values in the record."""
    record = record_of(folder)
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


def replace_wheel(folder: Path, data: bytes) -> None:
    """Other bytes, and the hash that belongs to them."""
    next(folder.glob("*/*.whl")).write_bytes(data)
    rewrite(folder, sha256=hashlib.sha256(data).hexdigest())


def rekey(folder: Path) -> None:
    """Other inputs, and the key that belongs to them, but the sha256 of no wheel."""
    record = json.loads(record_of(folder).read_text())
    record["inputs"]["script"] = "0" * 64
    record["sha256"] = "0" * 64
    record_of(folder).write_text(json.dumps(record))
    record_of(folder).parent.rename(folder / digest_of(record["inputs"]))


EXPORTS = {
    "changed-byte": (change_byte, ("tinypkg 1.0", "has sha256")),
    "renamed-key": (
        lambda folder: record_of(folder).parent.rename(folder / ("0" * 64)),
        ("tinypkg 1.0", "not named after"),
    ),
    "changed-inputs": (lambda folder: rewrite(folder, inputs={"package": "x"}), ("x", "not named after")),
    "other-hash": (rekey, ("tinypkg 1.0", "has sha256")),
    "half-record": (lambda folder: record_of(folder).write_text('{"file"'), ("wheel.json", "export it again")),
    "empty-record": (lambda folder: record_of(folder).write_text("{}"), ("wheel.json", "export it again")),
    "list-for-record": (lambda folder: record_of(folder).write_text("[1]"), ("wheel.json", "export it again")),
    "binary-record": (lambda folder: record_of(folder).write_bytes(b"\xff\xfe"), ("wheel.json", "export it again")),
    "number-for-file": (lambda folder: rewrite(folder, file=1), ("wheel.json", "export it again")),
    "no-wheel": (lambda folder: next(folder.glob("*/*.whl")).unlink(), ("tinypkg 1.0", "is missing")),
    "file-outside": (lambda folder: rewrite(folder, file="../x.whl"), ("wheel.json", "export it again")),
    "not-a-wheel": (
        lambda folder: replace_wheel(folder, b"x"),
        ("tinypkg-1.0-py3", "export it again"),
    ),
    "nothing": (lambda folder: shutil.rmtree(record_of(folder).parent), ("holds no exported wheels",)),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPORTS)
def test_a_changed_export_is_not_imported(tiny: Tiny, exported: Path, case: str) -> None:
    """And nothing of it, though a sound wheel lies beside."""
    spoil, naming = EXPORTS[case]
    shutil.copytree(record_of(exported).parent, exported.parent / "sound")
    spoil(exported)
    if case != "nothing":
        record = json.loads((exported.parent / "sound" / "wheel.json").read_text())
        record["inputs"]["script"] = "1" * 64
        (exported.parent / "sound" / "wheel.json").write_text(json.dumps(record))
        (exported.parent / "sound").rename(exported / digest_of(record["inputs"]))
    tiny.refuse("cache", "import", exported, naming=naming)
    assert not any(tiny.cache.glob("wheels/*"))


def test_a_folder_among_a_mirrors_files_is_none_of_them(tmp_path: Path) -> None:
    content = b"a wheel"
    sha256 = hashlib.sha256(content).hexdigest()
    (tmp_path / "files" / sha256 / "folder").mkdir(parents=True)
    assert find_file(tmp_path, sha256) is None
    (tmp_path / "files" / sha256 / "a.whl").write_bytes(content)
    assert find_file(tmp_path, sha256) == tmp_path / "files" / sha256 / "a.whl"
