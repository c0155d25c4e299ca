"""What upstream has: the newest release of each pin, what is known of it in a target, and what its patches say."""

from __future__ import annotations

import json
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from recipes.make.fetch import WORKERS
from recipes.tests.conftest import OFFLINE, PATCH, SOURCE, Index, Tiny, answer, sdist, wheel
from recipes.tests.upstream import Upstream

LIMIT = """
[[limit]]
package = "tinywheel"
versions = ">=2"
needs = {{ python = "{python}" }}
reason = "nobody"
thread = "https://example.org/1"
"""


def asked(tiny: Tiny, package: str, *, patched: bool = True) -> dict[str, Any]:
    """The row of a package of `tiny`, as JSON."""
    if not patched:
        shutil.rmtree(tiny.root / "patches" / "tinypkg")
    rows = json.loads(tiny.succeed("outdated", "tiny", "--json", "-"))["pins"]
    (row,) = [row for row in rows if row["package"] == package]
    assert row["target"] == "tiny"
    return dict(row)


def limit(tiny: Tiny, python: str) -> None:
    """Learn that tinywheel 2 needs that Python."""
    path = tiny.root / "recipes" / "limits.toml"
    path.write_text(path.read_text() + LIMIT.format(python=python))


def test_a_table_and_the_same_as_json(tiny: Tiny, index: Index, tmp_path: Path) -> None:
    sdist(tiny.shelf / "tinypkg-1.1.tar.gz", SOURCE)
    output = tiny.succeed("outdated", "tiny", "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["pins"]
    assert [(row["package"], row["newest"], row["verdict"]) for row in rows] == [
        ("tinypkg", "1.1", "unknown"),
        ("tinywheel", None, "current"),
    ]
    assert "upstream of 2 packages" in output and "out.json" in output
    (line,) = [line for line in output.splitlines() if "tinypkg" in line]
    assert line.split() == ["tiny", "tinypkg", "1.0", "1.1", "unknown", "1.1", "1", "ends"]
    assert not list(tiny.cache.glob("*"))  # nothing is kept


def test_json_alone_is_all_of_the_output(tiny: Tiny, index: Index) -> None:
    done = tiny.run("outdated", "tiny", "--json", "-")
    assert json.loads(done.stdout)["pins"] and "upstream of 2 packages" in done.stderr


def test_a_release_that_the_limits_refuse_is_passed_over(tiny: Tiny, index: Index) -> None:
    for version in ("1.5", "2.0"):
        wheel(tiny.shelf, "tinywheel", version=version)
    limit(tiny, "<3")
    row = asked(tiny, "tinywheel")
    assert (row["newest"], row["verdict"], row["fitting"]) == ("2.0", "refused", "1.5")
    assert "tinywheel 2.0 needs python <3" in row["reasons"][0] and "https://example.org/1" in row["reasons"][0]


def test_a_release_that_the_limits_allow_says_by_which(tiny: Tiny, index: Index) -> None:
    wheel(tiny.shelf, "tinywheel", version="2.0")
    limit(tiny, ">=3")
    row = asked(tiny, "tinywheel")
    assert (row["verdict"], row["fitting"]) == ("allowed", "2.0") and "https://example.org/1" in row["reasons"][0]


def test_a_release_without_a_file_for_the_target_is_refused(tiny: Tiny, index: Index) -> None:
    made = wheel(tiny.shelf, "tinywheel", version="2.0")
    made.rename(made.with_name("tinywheel-2.0-cp36-cp36m-manylinux_2_17_x86_64.whl"))
    row = asked(tiny, "tinywheel")
    assert (row["newest"], row["verdict"], row["fitting"]) == ("2.0", "refused", None)
    assert "has no wheel for Python" in row["reasons"][0]


def test_a_release_for_another_python_is_refused(tiny: Tiny, index: Index) -> None:
    made = wheel(tiny.shelf, "tinywheel", version="2.0")
    link = f'<a href="/files/{made.name}" data-requires-python="&lt;3.8">{made.name}</a>'
    index.faults["tinywheel"] = lambda handler, _: answer(handler, link.encode())
    assert "tinywheel 2.0 needs Python <3.8" in asked(tiny, "tinywheel")["reasons"][0]


def test_a_prerelease_another_build_and_a_withdrawn_file_do_not_count(tiny: Tiny, index: Index) -> None:
    for version in ("1.1rc1", "1.2+cu130"):
        wheel(tiny.shelf, "tinywheel", version=version)
    names = [path.name for path in tiny.shelf.glob("tinywheel-*")]
    links = [f'<a href="/files/{name}">{name}</a>' for name in names]
    withdrawn = "tinywheel-3.0-py3-none-any.whl"
    links.append(f'<a href="/files/{withdrawn}" data-yanked="broken">{withdrawn}</a>')
    index.faults["tinywheel"] = lambda handler, _: answer(handler, "\n".join(links).encode())
    assert asked(tiny, "tinywheel")["verdict"] == "current"


def test_what_each_patch_says_of_the_release(tiny: Tiny, index: Index) -> None:
    sdist(tiny.shelf / "tinypkg-1.1.tar.gz", SOURCE)
    path = tiny.root / "patches" / "tinypkg" / "0001-say-two.patch"
    for text, word, why in (
        (PATCH, "ends", "it is for ==1.0"),
        (PATCH.replace("==1.0", ">=1.0,<2"), "stays", "it is for <2,>=1.0"),
        (PATCH.replace("==1.0", ">=1.0,<2\nX-Lines: 1.0 2"), "ends", "X-Lines does not have 1.1"),
        (PATCH.replace("Origin:", "Applied-Upstream: 1.1\nOrigin:"), "retires", "upstream since 1.1"),
    ):
        path.write_text(text)
        (standing,) = asked(tiny, "tinypkg")["patches"]
        assert standing == {"name": "patches/tinypkg/0001-say-two.patch", "word": word, "why": why}
    assert "0001-say-two.patch retires: upstream since 1.1" in tiny.succeed("outdated", "tiny")


def test_a_git_source_is_compared_with_the_tags_that_are_named_like_its_own(tiny: Tiny, tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream", tiny)
    for tag in ("v1.1", "v1.2rc1", "nightly", "2.0", "v1.1-docs"):
        upstream.git("tinypkg", "tag", tag)
    row = asked(tiny, "tinypkg")
    assert (row["pinned"], row["newest"], row["verdict"]) == ("1.0", "1.1", "unknown")


def test_a_pin_without_a_tag_is_compared_with_every_version(tiny: Tiny, tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream", tiny)
    tiny.edit(tiny.recipe("tinypkg"), 'tag = "v1.0"\n', "")
    for tag in ("v1.1", "2.0"):
        upstream.git("tinypkg", "tag", tag)
    assert asked(tiny, "tinypkg")["newest"] == "2.0"


def test_one_that_does_not_answer_is_said_beside_the_others(tiny: Tiny, index: Index) -> None:
    identity = f'repository = "https://nowhere.invalid/acme/tinypkg"\ncommit = "{"0" * 40}"'
    tiny.plant("tinypkg", identity=identity)
    row = asked(tiny, "tinypkg", patched=False)
    assert (row["verdict"], row["newest"]) == ("unanswered", None)
    assert "https://nowhere.invalid/acme/tinypkg: git ls-remote failed" in row["reasons"][0]
    assert asked(tiny, "tinywheel")["verdict"] == "current"


def test_offline_it_is_refused_in_one_sentence(tiny: Tiny, index: Index) -> None:
    tiny.refuse("outdated", "tiny", before=OFFLINE, naming=("None of 2 packages and repositories", "check the network"))


def test_an_index_without_the_package_is_named(tiny: Tiny, index: Index) -> None:
    for name in ("tinypkg", "tinywheel"):
        index.faults[name] = lambda handler, _: handler.send_error(404)
    tiny.refuse("outdated", "tiny", naming=("tinypkg has no file on pip's configured index",))


def test_an_unknown_target_is_refused(tiny: Tiny) -> None:
    tiny.refuse("outdated", "tinny", naming=("no target 'tinny'", "did you mean 'tiny'"))


def test_few_are_asked_at_a_time(tiny: Tiny, index: Index) -> None:
    under_way, most, lock = 0, 0, threading.Lock()

    def slow(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.1)
        with lock:
            under_way -= 1
        answer(handler, body)

    names = [f"many{number}" for number in range(3 * WORKERS)]
    for name in names:
        tiny.plant(name)
        index.faults[name] = slow
    pins = "".join(f'{name} = "1.0"\n' for name in names)
    tiny.targets.write_text(tiny.targets.read_text() + pins)
    tiny.succeed("outdated", "tiny")
    assert 1 < most <= WORKERS
