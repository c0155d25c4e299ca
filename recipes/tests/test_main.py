"""The command line: every verb says what it does, exit codes pass through, clean removes what it says."""

from __future__ import annotations

import re

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


def test_clean_removes_the_build_and_on_request_the_cache(tiny: Tiny) -> None:
    tiny.succeed("build", "tiny")
    tiny.succeed("clean")
    assert not (tiny.root / "build").exists()
    assert list(tiny.cache.glob("wheels/*"))
    tiny.succeed("clean", "--cache")
    assert not tiny.cache.exists()
