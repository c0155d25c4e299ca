"""Who signs, and who is trusted: cosign with a key, or with the identity of GitHub's workflow ("keyless")."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import Refusal
from recipes.process import ends_with_us
from recipes.ship.image import last_words

ISSUER = "https://token.actions.githubusercontent.com"


@dataclass(frozen=True)
class Signer:
    """Who signs, or who is trusted: a key (private to sign, public to verify), or the identity of a workflow."""

    key: Path | None = None
    identity: str | None = None

    @property
    def named(self) -> bool:
        """Whether it names anyone."""
        return bool(self.key or self.identity)

    @property
    def to_verify(self) -> list[str]:
        """A signature with a key is in no public log; that of a workflow has to be."""
        if self.key:
            return [f"--key={self.key}", "--insecure-ignore-tlog=true"]
        return [f"--certificate-identity-regexp={self.identity}", f"--certificate-oidc-issuer={ISSUER}"]


@contextlib.contextmanager
def trusting(signer: Signer) -> Iterator[Signer]:
    """Who is to be trusted where that signer signed: its public key, or its identity."""
    if signer.key is None:
        yield signer
        return
    with tempfile.TemporaryDirectory() as scratch:
        done = run("public-key", f"--key={signer.key}")
        if done.returncode != 0:
            raise Refusal(f"{signer.key} is not a key of cosign ({last_words(done.stderr)}): check the file.")
        public = Path(scratch, "cosign.pub")
        public.write_text(done.stdout)
        yield Signer(public)


def workflow(file: str) -> Signer | None:
    """GitHub's workflow in that file, on main, if this runs in one that may sign with its identity."""
    if "ACTIONS_ID_TOKEN_REQUEST_URL" not in os.environ:
        return None
    repository = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    return Signer(identity=f"^{re.escape(f'{repository}/.github/workflows/{file}@refs/heads/main')}$")


def signer_of(key: Path | None, file: str) -> Signer | None:
    """Who signs what is made: the key, or else GitHub's workflow in that file if it runs this; None if nobody does."""
    return Signer(key) if key else workflow(file)


@contextlib.contextmanager
def signing(signer: Signer) -> Iterator[list[str]]:
    """The options of a command that signs. With a key, no service is asked or told anything."""
    refuse_without()
    if signer.key is None:
        yield ["--yes"]
        return
    with tempfile.TemporaryDirectory() as scratch:
        services = Path(scratch, "services.json")
        must("cosign cannot write its configuration", "signing-config", "create", f"--out={services}")
        yield [f"--key={signer.key}", f"--signing-config={services}", "--yes"]


def refuse_without() -> None:
    """Refuse to go on where cosign is not installed."""
    if shutil.which("cosign") is None:
        raise Refusal("Signatures need cosign (sigstore), which is not installed: install it.")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run cosign to its end, whatever that is; a key without a password needs none."""
    variables = {"COSIGN_PASSWORD": "", **os.environ}
    return subprocess.run(
        ["cosign", *words], env=variables, capture_output=True, text=True, check=False, preexec_fn=ends_with_us
    )


def must(fault: str, *words: str) -> None:
    """Run cosign; `fault` is what a failure means."""
    done = run(*words)
    if done.returncode != 0:
        raise Refusal(f"{fault} ({last_words(done.stderr)}): check the key and your rights in the registry.")
