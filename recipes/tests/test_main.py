"""The command line: every verb says what it does, exit codes pass through, clean removes what it says."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys

import pytest

from recipes.__main__ import parsed
from recipes.process import GRACE
from recipes.tests.conftest import Checkout, Tiny, one_sentence
from recipes.verbs import MODULES
from recipes.verbs.arguments import Verbs

VERBS = [verb for verbs in MODULES.values() for verb in verbs]


def test_every_verb_says_what_it_does(checkout: Checkout) -> None:
    output = checkout.succeed("--help")
    assert len(VERBS) > 20
    for verb in VERBS:
        assert re.search(rf"^    {verb}\s+[A-Z]", output, re.MULTILINE), verb


@pytest.mark.parametrize("module", MODULES)
def test_each_module_adds_the_verbs_that_it_is_asked_for(module: str) -> None:
    parsers = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"recipes.verbs.{module}").register(Verbs(parsers))
    assert tuple(parsers.choices) == MODULES[module]


def test_the_menu_offers_every_verb(checkout: Checkout) -> None:
    sessions = re.findall(r"^def (\w+)\(session", (checkout.root / "noxfile.py").read_text(), re.MULTILINE)
    named = {verb.replace("-", "_") for verb in VERBS}  # a session is a function
    assert named - {"audit"} <= set(sessions)  # a step of `docker build` alone


def menu(checkout: Checkout, *options: str) -> subprocess.CompletedProcess[str]:
    """`nox -l` in the checkout."""
    command = [sys.executable, "-m", "nox", "--list", *options]
    return subprocess.run(
        command, cwd=checkout.root, env=checkout.variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("file", ["pyproject.toml", "recipes/targets.toml"])
@pytest.mark.parametrize(
    "spoiled", [b"x = [", b"[a]\n[a]", b"\xe9", None], ids=["syntax", "twice", "latin-1", "missing"]
)
def test_a_menu_that_cannot_be_read_is_refused(checkout: Checkout, file: str, spoiled: bytes | None) -> None:
    path = checkout.root / file
    path.unlink() if spoiled is None else path.write_bytes(spoiled)
    one_sentence(menu(checkout), (file,), code=1)


def test_the_menu_leaves_wrong_targets_to_the_verbs(checkout: Checkout) -> None:
    """A value that is no table, and an image without a runner: nox lists what there is."""
    checkout.edit(checkout.targets, 'runner = "ubuntu-24.04"\n', "")
    checkout.targets.write_text(f"foo = 1\n{checkout.targets.read_text()}")
    listed = json.loads(menu(checkout, "--json", "--session", "publish").stdout)
    assert [session["tags"] for session in listed if session["call_spec"] == {"target": "cpu"}] == [[""]]
    checkout.refuse("plan", "cpu", naming=("targets.toml", "foo"))


def test_nox_leaves_a_stopped_verb_the_time_to_end_what_it_started(checkout: Checkout) -> None:
    (seconds,) = re.findall(r"interrupt_timeout=(\d+)", (checkout.root / "noxfile.py").read_text())
    assert int(seconds) > GRACE


def test_the_exit_code_of_a_command_in_the_shell_is_ours(tiny: Tiny) -> None:
    assert tiny.run("shell", "tiny", "--", "sh", "-c", "exit 7").returncode == 7
    assert "no command" in tiny.refuse("shell", "tiny", "--", "no-such-command")
    assert "cannot be run (Permission denied)" in tiny.refuse("shell", "tiny", "--", str(tiny.root))
    assert "a -- b" in tiny.succeed("shell", "tiny", "--", "echo", "a", "--", "b")
    assert "--sm" in tiny.refuse("shell", "tiny", "--sm", "9.0", "echo", "a")  # as nox passes it: after the target
    assert "b --sm=8.0" in tiny.succeed("shell", "tiny", f"--mirror={tiny.root}", "echo", "b", "--sm=8.0")


def test_clean_removes_the_build_and_on_request_the_cache(tiny: Tiny) -> None:
    tiny.succeed("build", "tiny")
    tiny.succeed("clean")
    assert not (tiny.root / "build").exists()
    assert list(tiny.cache.glob("wheels/*"))
    theirs = tiny.cache / "photos"
    theirs.mkdir()
    tiny.succeed("clean", "--cache")
    assert {path.name for path in tiny.cache.iterdir()} == {"CACHEDIR.TAG", "lock", theirs.name}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("fetch", "cpu", "--into", ""), "--into: is empty"),
        (("smoke", "cpu", "--mirror", ""), "--mirror: is empty"),
        (("plan", "cu12.1-torch2.1", "--sm", ","), "--sm: names no GPU architecture"),
        (("plan", "cu12.1-torch2.1", "--sm", ""), "--sm: names no GPU architecture: write it as 8.0,9.0, or omit it"),
        (("image", "cpu", "--wheelcache", "nowhere"), "--wheelcache: nowhere is not a folder"),
    ],
)
def test_a_value_that_says_nothing_is_named(checkout: Checkout, arguments: tuple[str, ...], why: str) -> None:
    done = checkout.run(*arguments)
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr


def test_the_steps_of_an_image_pass_its_unset_architectures_on() -> None:
    """As docker/TARGET.Dockerfile does: `--sm "$SM"`."""
    places = ("--out=a", "--wheels=b", "--built-in=c", "--into=d")
    assert parsed(["patch", "cpu", "--sm", ""]).sm == parsed(["audit", "cpu", "--sm", "", *places]).sm == []


def test_a_reader_that_has_enough_ends_it_quietly(checkout: Checkout) -> None:
    command = f'set -o pipefail; "{sys.executable}" -m recipes patches | head -n 1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=checkout.root, env=checkout.variables, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] in ("0", "141")  # 0 if everything was written before `head` ended
