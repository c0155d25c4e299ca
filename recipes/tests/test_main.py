"""The command line: every verb says what it does, exit codes pass through, clean removes what it says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from recipes.tests.conftest import Checkout, Tiny


def test_every_verb_says_what_it_does(checkout: Checkout) -> None:
    said = checkout.succeed("--help")
    verbs = "plan fetch patch build smoke promote mutants shell lock render clean cache"
    for verb in verbs.split():
        assert re.search(rf"^    {verb} +[A-Z]", said, re.MULTILINE), verb


def test_the_menu_offers_every_verb(checkout: Checkout) -> None:
    sessions = re.findall(r"^def (\w+)\(session", (checkout.root / "noxfile.py").read_text(), re.MULTILINE)
    verbs = re.findall(r'verb\("(\w+)"', (checkout.root / "recipes" / "__main__.py").read_text())
    assert set(verbs) - {"audit"} <= set(sessions)  # a step of `docker build` alone


def test_the_exit_code_of_a_command_in_the_shell_is_ours(tiny: Tiny) -> None:
    assert tiny.run("shell", "tiny", "--", "sh", "-c", "exit 7").returncode == 7
    assert "no command" in tiny.refuse("shell", "tiny", "--", "no-such-command")
    assert "cannot be run (Permission denied)" in tiny.refuse("shell", "tiny", "--", str(tiny.root))
    assert "a -- b" in tiny.succeed("shell", "tiny", "--", "echo", "a", "--", "b")


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
        (("plan", "cu12.1-torch2.1", "--sm", ","), "--sm: names none"),
        (("image", "cpu", "--wheelcache", "nowhere"), "--wheelcache: nowhere is no folder"),
    ],
)
def test_a_value_that_says_nothing_is_named(checkout: Checkout, arguments: tuple[str, ...], why: str) -> None:
    done = checkout.run(*arguments)
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_has_enough_ends_it_quietly(checkout: Checkout) -> None:
    command = f'set -o pipefail; "{sys.executable}" -m recipes patches | head -n 1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=checkout.root, env=checkout.variables, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] in ("0", "141")  # 0 where all was written before `head` ended
