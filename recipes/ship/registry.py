"""Registry operations for publishing and verifying, through crane; the trial upload uses HTTP."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import IO
from urllib.parse import urljoin

import docker
import docker.auth
import httpx2

from recipes.errors import Refusal
from recipes.process import ends_with_us
from recipes.ship.image import last_words

# HOST[:PORT][/PATH]; a first part without a dot or a port is a path, which is lowercase.
REGISTRY = r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:)|[a-z0-9-]+)(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"


def digest_in(oci: Path) -> str:
    """The digest of the one image manifest of an OCI layout."""
    (manifest,) = json.loads((oci / "index.json").read_text())["manifests"]
    return str(manifest["digest"])


def try_upload(name: str) -> None:
    """Begin an upload to a repository and take it back; a registry that is not there or takes none is refused."""
    host, _, path = name.partition("/")
    if not re.search(r"[.:]|^localhost$", host):
        host, path = "index.docker.io", name
    place = f"http{'' if is_local(name) else 's'}://{host}/v2/{path}/blobs/uploads/"
    token = run_crane("auth", "token", "--push", "--header", name)  # a registry without accounts gives no token
    kind, _, header = token.stdout.strip().partition(": ") if token.returncode == 0 else ("", "", "")
    headers = {kind: header} if header else {}
    with httpx2.Client(timeout=60, follow_redirects=True, auth=_account(host) if not header else None) as client:
        try:
            begun = client.post(place, headers=headers)
            begun.raise_for_status()
            client.delete(urljoin(place, begun.headers["Location"]), headers=headers)
        except (httpx2.HTTPError, KeyError) as error:
            raise Refusal(
                f"{name} accepts no upload ({last_words(error)}), so nothing was built: check the registry, log in "
                "with `docker login` and check your rights there."
            ) from None


def _account(host: str) -> tuple[str, str] | None:
    """The name and password that `docker login` keeps for a registry, if it does."""
    account = docker.auth.load_config().resolve_authconfig(host) or {}
    name, password = (account.get(key) or account.get(key.title()) for key in ("username", "password"))
    return (str(name), str(password)) if name and password else None


def digest_of_tag(image: str) -> str:
    """The digest that a tag names in its registry; "" if there is none."""
    done = run_crane("digest", image)
    return done.stdout.strip() if done.returncode == 0 else ""


def refuse_moving(name: str, tag: str, digest: str) -> None:
    """Refuse to give a commit's tag to another image than it has: a commit names one image."""
    has = digest_of_tag(f"{name}:{tag}")
    if has and has != digest:
        raise Refusal(
            f"{name}:{tag} is {has}, and this build of the same commit is {digest}, so nothing was pushed: find out "
            "what differs, and publish from another commit."
        )


def push(oci: Path, name: str, digest: str) -> None:
    """Push an OCI layout by its digest, without a tag."""
    _crane(f"{name}@{digest} cannot be pushed, and no tag was set", "push", str(oci), f"{name}@{digest}")


def set_tags(name: str, digest: str, names: Iterable[str]) -> None:
    """Give a pushed digest its tags, in this order."""
    for tag in names:
        _crane(f"{name}:{tag} cannot be set", "tag", f"{name}@{digest}", tag)


def created(image: str) -> str:
    """When the commit of the image that a tag names was made, according to its label; "" if there is none."""
    return _labels(image).get("org.opencontainers.image.created", "")


def label(image: str, name: str) -> str:
    """A label that an image must have."""
    value = _labels(image).get(name)
    if value is None:
        raise Refusal(f"{image} cannot be read or has no label {name}: check its name, and that Fusebox published it.")
    return value


def _labels(image: str) -> dict[str, str]:
    """The labels of an image; none if its registry gives none."""
    done = run_crane("config", image)
    return dict(json.loads(done.stdout)["config"].get("Labels") or {}) if done.returncode == 0 else {}


def is_local(name: str) -> bool:
    return bool(re.match(r"(127\.0\.0\.1|localhost)[:/]", name))


def refuse_without_crane(needs: str) -> None:
    """Refuse to go on where crane is not installed; `needs` begins the sentence, as in "Publishing needs"."""
    if shutil.which("crane") is None:
        raise Refusal(f"{needs} crane (go-containerregistry), which is not installed: install it.")


def run_crane(*words: str) -> subprocess.CompletedProcess[str]:
    """Run crane; a registry on this machine may lack TLS."""
    return subprocess.run(crane_command(*words), capture_output=True, text=True, check=False, preexec_fn=ends_with_us)


def read_blob(blob: str, into: IO[bytes]) -> None:
    """Write a blob of a registry, NAME@DIGEST, into a file."""
    command = crane_command("blob", blob)
    done = subprocess.run(command, stdout=into, stderr=subprocess.PIPE, check=False, preexec_fn=ends_with_us)
    if done.returncode != 0:
        raise Refusal(f"{blob} cannot be read ({last_words(done.stderr.decode())}): check the registry and try again.")


def crane_command(*words: str) -> list[str]:
    """The command that runs crane."""
    return ["crane", *(["--insecure"] if any(map(is_local, words)) else []), *words]


def _crane(fault: str, *words: str) -> None:
    done = run_crane(*words)
    if done.returncode != 0:
        message = last_words((done.stderr.strip().splitlines() or ["no message"])[-1])
        raise Refusal(f"{fault} ({message}): check the registry and your rights there, then publish again.")
