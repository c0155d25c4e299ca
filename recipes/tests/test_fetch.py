"""Every fault of a download, git source or archive: refused in one sentence, nothing kept, sound once it is gone."""

from __future__ import annotations

import io
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import cast

import pytest

from recipes.files import sha256_of
from recipes.tests.conftest import OFFLINE, Fault, Index, Tiny, answer, one_sentence, spoil

SDIST, LOCKED, WHEEL = "tinypkg-1.0.tar.gz", "tinydep-1.0-py3-none-any.whl", "tinywheel-1.0-py3-none-any.whl"


def status(code: int) -> Fault:
    """An error instead of the file."""
    return lambda handler, _: handler.send_error(code)


def cut_off(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    """Half of what was promised."""
    answer(handler, body[: len(body) // 2], len(body))
    handler.close_connection = True


def index_of(handler: BaseHTTPRequestHandler) -> Index:
    """The index that a request came to."""
    return cast(Index, handler.server)


def cut_off_once(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    """Half the first time, all of it the second time."""
    name = handler.path.rpartition("/")[2]
    (cut_off if index_of(handler).asked.count(name) == 1 else answer)(handler, body)


def stalled(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    """The beginning, and then nothing more."""
    answer(handler, body[:10], len(body))
    index_of(handler).ended.wait(30)


def silent(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    """Not one byte."""
    index_of(handler).ended.wait(30)


def changed(change: Callable[[bytes], bytes]) -> Fault:
    """Other bytes than the pinned ones, and the server believes in them."""
    return lambda handler, body: answer(handler, change(body))


FILE_FAULTS = {
    "flipped-bit": (changed(lambda body: body[:99] + bytes([body[99] ^ 1]) + body[100:]), ("has sha256", "is pinned")),
    "truncated": (changed(lambda body: body[:-1]), ("has sha256", "is pinned")),
    "longer": (changed(lambda body: body + b"\0"), ("has sha256",)),
    "empty": (changed(lambda _: b""), ("has sha256",)),
    "a-page-instead": (changed(lambda _: b"<html>log in</html>"), ("has sha256",)),
    "cut-off": (cut_off, ("broke off",)),
    "missing": (status(404), ("404",)),
    "failing": (status(500), ("500",)),
    "stalled": (stalled, ("within the time limit",)),
    "silent": (silent, ("within the time limit",)),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_bad_download_is_refused(tiny: Tiny, index: Index, undisturbed: Tiny, fault: str) -> None:
    """Whatever happens to a file on its way, it is not kept; once the server is sound, the fetch is as ever."""
    index.faults[SDIST], naming = FILE_FAULTS[fault]
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", *naming), PIP_TIMEOUT="1")
    index.faults.clear()
    tiny.succeed("fetch", "tiny")
    assert tiny.files == undisturbed.files


INDEX_FAULTS = {
    "unknown-package": (status(404), "404"),
    "failing": (status(503), "503"),
    "silent": (silent, "within the time limit"),
    "stalled": (stalled, "within the time limit"),
    "cut-off": (cut_off, "broke off"),
    "empty": (changed(lambda _: b""), "is not on"),
    "not-a-page": (changed(lambda _: b"\xff\xfe\0{"), "cannot be read"),
    "nonsense": (changed(lambda _: b'<a href="http://[">x</a><a href="tinydep-1.0-py3-none-any.whl#sha256=1">'), ""),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_bad_index_is_refused(tiny: Tiny, index: Index, fault: str) -> None:
    """The same for the page on which a dependency is looked up: it is named, and what the server said."""
    index.faults["tinydep"], name = INDEX_FAULTS[fault]
    tiny.refuse("fetch", "tiny", naming=("tinydep 1.0", name), PIP_TIMEOUT="1")


def test_an_index_without_the_package_is_refused(tiny: Tiny, index: Index) -> None:
    """Neither another version nor another file of the package is taken."""
    (tiny.shelf / WHEEL).rename(tiny.shelf / WHEEL.replace("1.0", "1.1"))
    tiny.refuse("fetch", "tiny", naming=("tinywheel 1.0", WHEEL, "pip config list"))
    (tiny.shelf / WHEEL.replace("1.0", "1.1")).rename(tiny.shelf / WHEEL.replace("py3-none", "cp27-none"))
    tiny.refuse("fetch", "tiny", naming=("tinywheel 1.0", WHEEL))


def test_a_download_that_breaks_off_is_tried_again(tiny: Tiny, index: Index, undisturbed: Tiny) -> None:
    """As often as pip's configuration says; and the log says so."""
    index.faults[SDIST] = cut_off_once
    output = tiny.succeed("fetch", "tiny", PIP_RETRIES="1")
    assert "tinypkg 1.0  the download broke off before its end; trying again" in output
    assert tiny.files == undisturbed.files


@pytest.mark.parametrize("fault", ["flipped-bit", "missing"])
def test_a_bad_download_of_a_dependency_is_refused(tiny: Tiny, index: Index, undisturbed: Tiny, fault: str) -> None:
    """The lock's hashes hold as the recipes' do."""
    index.faults[LOCKED], naming = FILE_FAULTS[fault]
    tiny.refuse("fetch", "tiny", naming=("tinydep 1.0", *naming))
    index.faults.clear()
    tiny.succeed("fetch", "tiny")
    assert tiny.files == undisturbed.files


def test_the_first_failure_ends_the_run(tiny: Tiny, index: Index) -> None:
    """A corrupted file is reported at once, though another download would still wait for half a minute."""
    index.faults |= {SDIST: silent, LOCKED: FILE_FAULTS["flipped-bit"][0]}
    started = time.monotonic()
    sentence = one_sentence(tiny.run("fetch", "tiny", PIP_TIMEOUT="30"), ("tinydep 1.0",))
    assert "has sha256" in sentence and time.monotonic() - started < 10


def test_ctrl_c_ends_a_stalled_download_at_once(tiny: Tiny, index: Index, undisturbed: Tiny) -> None:
    """With exit code 130 and one line; the next run fetches what is missing."""
    index.faults[SDIST] = silent
    process = tiny.start("fetch", "tiny", PIP_TIMEOUT="30")
    while SDIST not in index.asked:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=5)
    one_sentence(subprocess.CompletedProcess([], process.returncode, stdout, stderr), ("stopped",), code=130)
    index.faults.clear()
    tiny.succeed("fetch", "tiny")
    assert tiny.files == undisturbed.files


def test_a_server_that_does_not_exist_is_refused(tiny: Tiny) -> None:
    """Nobody listens on the port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/simple"
    tiny.variables.pop("PIP_FIND_LINKS")
    naming = ("127.0.0.1 cannot be reached", "--mirror DIR")
    tiny.refuse("fetch", "tiny", naming=naming, PIP_INDEX_URL=url, PIP_NO_INDEX="0", PIP_RETRIES="0")


PIP_SETTINGS = {
    "PIP_TIMEOUT": ("soon", ("timeout", "'soon'")),
    "PIP_RETRIES": ("many", ("retries", "'many'")),
    "PIP_CERT": ("/nowhere/ca.crt", ("/nowhere/ca.crt",)),
    "PIP_INDEX_URL": ("nowhere", ("pip config list",)),
    "PIP_EXTRA_INDEX_URL": ("http://[", ("pip config list",)),
}


@pytest.mark.parametrize("name", PIP_SETTINGS)
def test_a_wrong_setting_of_pip_is_refused(tiny: Tiny, index: Index, name: str) -> None:
    """pip's configuration is used as pip would, and what is wrong in it is named."""
    value, naming = PIP_SETTINGS[name]
    tiny.refuse("fetch", "tiny", naming=naming, **{name: value})


@pytest.mark.parametrize(
    "text", ["[global\nindex-url = x\n", "[download]\ntimeout = soon\n", "\0", "[download]\nretries=-\n"]
)
def test_a_broken_configuration_file_of_pip_is_refused(tiny: Tiny, tmp_path: Path, text: str) -> None:
    """pip's own sentence stands in ours."""
    (tmp_path / "pip.conf").write_text(text)
    tiny.refuse("fetch", "tiny", naming=("pip's ",), PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))


def test_pips_configuration_file_is_used(tiny: Tiny, index: Index, tmp_path: Path) -> None:
    """The section [download] holds over [global], a variable over both; a find-links that is gone is passed over."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nno-index = true\n[download]\nno-index = false\n"
        f"index-url = {index.url}\nfind-links = {tmp_path}/gone\n"
    )
    tiny.variables.pop("PIP_INDEX_URL")
    tiny.variables["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
    tiny.succeed("fetch", "tiny")
    shutil.rmtree(tiny.cache)
    tiny.refuse("fetch", "tiny", naming=("is not on pip's configured index",), PIP_NO_INDEX="yes")


def test_pip_without_an_index_asks_nobody(tiny: Tiny, index: Index) -> None:
    """`no-index` holds also for extra indexes, and no other index is asked in its place."""
    tiny.refuse(
        "fetch", "tiny", naming=("is not on pip's configured index", "--mirror DIR"), PIP_NO_INDEX="1",
        PIP_EXTRA_INDEX_URL=index.url, PIP_INDEX_URL=index.url, https_proxy=index.url, http_proxy=index.url,
    )  # fmt: skip
    assert index.asked == []


# --- the cache and the mirror


def test_a_damaged_file_in_the_cache_is_fetched_again(tiny: Tiny, index: Index, undisturbed: Tiny) -> None:
    """And only that one."""
    tiny.succeed("fetch", "tiny")
    spoil(tiny.cache / "files" / tiny.pinned / SDIST)
    index.asked.clear()
    tiny.succeed("fetch", "tiny")
    assert index.asked == ["tinypkg", SDIST]
    assert tiny.files == undisturbed.files


@pytest.fixture
def mirror(tmp_path: Path, undisturbed: Tiny) -> Path:
    """A mirror folder that `fetch --into` filled."""
    undisturbed.succeed("fetch", "tiny", "--into", tmp_path / "mirror")
    return tmp_path / "mirror"


def test_a_mirror_serves_every_fetch_with_the_network_off(
    tiny: Tiny, index: Index, mirror: Path, undisturbed: Tiny
) -> None:
    """The whole build; without the mirror the same machine reaches nothing."""
    tiny.refuse("build", "tiny", naming=("cannot be reached",), before=OFFLINE)
    tiny.succeed("build", "tiny", "--mirror", mirror, before=OFFLINE)
    assert tiny.result() == undisturbed.result()
    assert index.asked == []


def test_a_damaged_file_in_a_mirror_is_refused(tiny: Tiny, mirror: Path, undisturbed: Tiny) -> None:
    """It is named and left as it is; the network is not asked instead."""
    damaged = mirror / "files" / tiny.pinned / SDIST
    spoil(damaged)
    before = sha256_of(damaged)
    tiny.refuse("fetch", "tiny", "--mirror", mirror, naming=(str(damaged), "replace it"))
    assert sha256_of(damaged) == before
    damaged.unlink()
    tiny.succeed("fetch", "tiny", "--mirror", mirror)
    assert tiny.files == undisturbed.files


def test_a_mirror_that_is_not_there_is_refused(tiny: Tiny) -> None:
    """A mistyped folder is not silently passed over."""
    tiny.refuse("fetch", "tiny", "--mirror", tiny.root / "miror", naming=("miror", "does not exist"))


def test_a_cache_that_is_its_own_mirror_does_not_wait_for_itself(tiny: Tiny) -> None:
    """`--into` the cache itself has nothing to copy."""
    tiny.succeed("fetch", "tiny", "--into", tiny.cache)


@pytest.mark.parametrize(
    ("line", "naming"),
    [
        ("tinydep==1.0", ("tiny.txt:2", "tinydep==1.0", "nox -s lock -- tiny")),
        ("tinydep==1.0 --hash=sha256:123", ("tiny.txt:2", "nox -s lock -- tiny")),
        ("tinydep==1.0 --hash=md5:" + "0" * 64, ("tiny.txt:2", "nox -s lock -- tiny")),
        ("\0\x1b[31m", ("tiny.txt:2", "nox -s lock -- tiny")),
        (b"tinydep\xff==1.0", ("tiny.txt:2", "nox -s lock -- tiny")),
        ("tinydep==nonsense --hash=sha256:" + "0" * 64, ("tiny.txt:2", "nox -s lock -- tiny")),
        (None, ("tiny", "nox -s lock -- tiny")),
    ],
)
def test_a_damaged_lock_is_refused(tiny: Tiny, line: str | bytes | None, naming: tuple[str, ...]) -> None:
    """By its line, or for not being there."""
    path = tiny.root / "recipes" / "lock" / "tiny.txt"
    if line is None:
        path.unlink()
    else:
        path.write_bytes(b"# inputs: none\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    tiny.refuse("fetch", "tiny", naming=naming)


# --- archives


def member(name: str, kind: bytes = tarfile.REGTYPE, to: str = "", data: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    """One entry of an archive."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, to, len(data) if kind == tarfile.REGTYPE else 0
    return info, data


TOP = "tinypkg-1.0"
SYMBOLIC, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
ARCHIVES = {
    "dot-dot": ([member(f"{TOP}/../../evil")], "leads outside"),
    "absolute": ([member("/OUTSIDE/evil")], "absolute path"),
    "symlink-out": ([member(f"{TOP}/link", SYMBOLIC, "../../evil")], "outside the archive"),
    "symlink-absolute": ([member(f"{TOP}/link", SYMBOLIC, "/etc/passwd")], "outside the archive"),
    "hardlink-out": ([member(f"{TOP}/link", HARD, "../evil")], "outside the archive"),
    "hardlink-absolute": ([member(f"{TOP}/link", HARD, "/etc/passwd")], "outside the archive"),
    "through-a-link": ([member(f"{TOP}/to", SYMBOLIC, "."), member(f"{TOP}/to/evil")], "written through a link"),
    "over-a-link": ([member(f"{TOP}/to", SYMBOLIC, "a"), member(f"{TOP}/to")], "written through a link"),
    "link-through-a-link": (
        [member(f"{TOP}/a/b/up", SYMBOLIC, "../.."), member(f"{TOP}/out", SYMBOLIC, "a/b/up/../..")], "another link",
    ),
    "device": ([member(f"{TOP}/null", tarfile.CHRTYPE)], "device"),
    "pipe": ([member(f"{TOP}/pipe", tarfile.FIFOTYPE)], "pipe"),
    "two-top-folders": ([member(f"{TOP}/a"), member("other/a")], "2 top-level entries"),
    "no-folder": ([member("setup.py")], "1 top-level entries"),
    "empty": ([], "0 top-level entries"),
    "below-a-file": ([member(f"{TOP}/a"), member(f"{TOP}/a/b")], "cannot be unpacked"),
    "name-too-long": ([member(f"{TOP}/{'a' * 300}")], "cannot be unpacked"),
}  # fmt: skip


def pin(tiny: Tiny, data: bytes) -> None:
    """Make these bytes the sdist that the recipe pins."""
    path, before = tiny.shelf / SDIST, tiny.pinned
    path.write_bytes(data)
    tiny.edit(tiny.recipe("tinypkg"), before, tiny.pinned)


@pytest.mark.parametrize("case", ARCHIVES)
def test_an_archive_that_reaches_outside_is_refused(tiny: Tiny, tmp_path: Path, case: str) -> None:
    """Though its hash is the pinned one; nothing of it is unpacked, and nothing outside is written or linked."""
    members, naming = ARCHIVES[case]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for info, data in members:
            info.name = info.name.replace("/OUTSIDE", str(tmp_path))
            tar.addfile(info, io.BytesIO(data))
    pin(tiny, archive.getvalue())
    outside = set(tmp_path.iterdir())
    tiny.refuse("patch", "tiny", naming=(SDIST, naming))
    assert not any(tiny.cache.glob("trees/*"))
    assert set(tmp_path.iterdir()) - outside <= {tiny.cache}


def broken_archives(sound: bytes) -> dict[str, bytes]:
    """Bytes that are no sdist, or no longer."""
    return {
        "text": b"not an archive\n",
        "empty": b"",
        "half": sound[: len(sound) // 2],
        "damaged-inside": sound[:60] + bytes(100) + sound[160:],
        "zip": b"PK\x03\x04" + bytes(100),
        "damaged-xz": b"\xfd7zXZ\0" + bytes(100),
    }


@pytest.mark.parametrize("case", broken_archives(b""))
def test_what_is_not_an_archive_is_refused(tiny: Tiny, case: str) -> None:
    """Whichever way it is broken."""
    pin(tiny, broken_archives((tiny.shelf / SDIST).read_bytes())[case])
    tiny.refuse("patch", "tiny", naming=(SDIST, "cannot be unpacked", "check the recipe's file"))


def test_a_plan_counts_what_the_cache_lacks(tiny: Tiny) -> None:
    before = tiny.succeed("plan", "tiny")
    assert re.search(r"of it \d\S* [KM]iB to download", before), before
    tiny.succeed("fetch", "tiny")
    assert "of it 0 B to download" in tiny.succeed("plan", "tiny")
