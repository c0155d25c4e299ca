"""Locks of what apt installs on a base image: recipes/lock/apt/IMAGE.txt, each package by the sha256 of its file.

A lock holds all that the wanted packages depend on, as if nothing were installed. So it serves other digests of its
image too, and docker/apt.sh refuses whatever apt would install and the lock lacks.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from recipes.catalogue.bases import bases, of_targets
from recipes.catalogue.load import Catalogue
from recipes.catalogue.schema import Image
from recipes.errors import Refusal
from recipes.files import read_text, write_text
from recipes.progress import Steps

_PACKAGES = "# packages: "
# Runs in the image: the line of each package, as if nothing were installed and with what is installed; packages that
# depend on an exact installed version are renewed together with it.
_LIST = r"""
apt-get update -qq >&2
bare=$(apt-get install --simulate --no-install-recommends -o Dir::State::status=/dev/null "$@")
own=$(apt-get install --simulate --no-install-recommends "$@")
chosen=$(printf '%s\n' "$bare" "$own" | sed -nE 's/^Inst (\S+) (\[\S+\] )?\((\S+) .*/\1=\3/p')
apt-cache show $chosen | awk '
    /^Package: / { name = $2 } /^Version: / { version = $2 }
    /^SHA256: / { print name "=" version " --hash=sha256:" $2 }'
"""
_LINE = re.compile(r"[a-z0-9][a-z0-9.+-]+=\S+ --hash=sha256:[0-9a-f]{64}")


def path_of(root: Path, image: Image) -> Path:
    """Where the lock of an image is, if it has one."""
    return root / "recipes" / "lock" / "apt" / f"{re.sub(r'[:/]', '-', image.image)}.txt"


def lock_of(root: Path, image: Image) -> Path | None:
    """The lock of what is installed on an image; None if there is none, or nothing is installed.

    Refused if it was written for other packages.
    """
    path = path_of(root, image)
    if not image.apt or not path.exists():
        return None
    header = next((line for line in read_text(path).splitlines() if line.startswith(_PACKAGES)), "")
    if missing := sorted(set(image.apt) - set(header.removeprefix(_PACKAGES).split())):
        raise Refusal(f"{path} is not of the package {missing[0]}: write it again with `nox -s lock -- apt`.")
    return path


def wanted(catalogue: Catalogue) -> dict[str, set[str]]:
    """What all targets together install on each image."""
    packages = defaultdict(set)
    for image in _images(catalogue):
        packages[image.image].update(image.apt)
    return {name: names for name, names in packages.items() if names}


def write(catalogue: Catalogue, standins: Mapping[str, str], network: str | None, steps: Steps) -> list[str]:
    """Write the lock of each base image that can be asked, and return why others could not, a line each.

    `standins` are images of the same distribution, by the name of the image that they stand for.
    """
    digests = {image.image: image for image in _images(catalogue)}
    if strangers := sorted(set(standins) - set(digests)):
        raise Refusal(f"--standin {strangers[0]} is not a base: choose one of {', '.join(digests)}.")
    missing = []
    for name, packages in wanted(catalogue).items():
        try:
            lines = _asked(standins.get(name, digests[name].reference), sorted(packages), network)
        except Refusal as refusal:
            missing.append(f"what apt installs on {name} is not locked anew: {refusal}")
            continue
        about = f"# Written by `nox -s lock -- apt`: all that apt may install on {name} for these packages.\n"
        path = path_of(catalogue.root, digests[name])
        write_text(path, f"{about}{_PACKAGES}{' '.join(sorted(packages))}\n" + "".join(f"{line}\n" for line in lines))
        steps.say("lock", f"{name}: {len(lines)} packages", str(path))
    return missing


def _images(catalogue: Catalogue) -> list[Image]:
    return [bases(catalogue.root).sources, *of_targets(catalogue)]


def _asked(image: str, packages: list[str], network: str | None) -> list[str]:
    """The lines of a lock, from the package index that an image is configured for."""
    command = ["docker", "run", "--rm", "--user=0", *([f"--network={network}"] if network else []), image]
    command += ["sh", "-ec", _LIST, "sh", *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refusal(
            "The command docker, which queries the image, is not on the PATH: install Docker's client."
        ) from None
    lines = sorted(set(done.stdout.splitlines()))
    if done.returncode != 0 or not lines or not all(map(_LINE.fullmatch, lines)):
        reason = " ".join(done.stderr.partition("\nRun 'docker run --help'")[0].split())[-200:].rstrip(".")
        raise Refusal(f"{image} cannot be queried ({reason}): check that it can be pulled, its apt and the network.")
    return lines
