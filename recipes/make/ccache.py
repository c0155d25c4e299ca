"""Compile through ccache, where FUSEBOX_CCACHE names it: per object, what was compiled before is not compiled again.

No part of a wheel's key, because an object is the one that the compiler itself wrote for the same inputs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from recipes.errors import Refusal

SCRIPT = "cached.sh"
COMPILERS = ("c++", "cc", "g++", "gcc", "x86_64-linux-gnu-g++", "x86_64-linux-gnu-gcc")


def program(variables: Mapping[str, str] = os.environ) -> Path | None:
    """The ccache to compile through; None where none is asked for, refused where it cannot be run."""
    named = variables.get("FUSEBOX_CCACHE")
    if not named:
        return None
    path = shutil.which(named, path=variables.get("PATH"))
    if path is None:
        raise Refusal(f"FUSEBOX_CCACHE is {named!r}, which is not a program: install ccache, or unset the variable.")
    return Path(path).absolute()


def settings(ccache: Path, root: Path, folder: Path, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a build that compiles through ccache; links to the script are made in a new folder.

    `root` is the checkout. The build gets a HOME of its own, and therefore the place of the objects by name.
    """
    folder.mkdir()
    script = root / "docker" / SCRIPT
    for name in (*(name for name in COMPILERS if shutil.which(name, path=variables.get("PATH"))), "nvcc"):
        (folder / name).symlink_to(script)
    asked = subprocess.run([str(ccache), "--get-config", "cache_dir"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise Refusal(
            f"{ccache} does not say where it keeps objects: install ccache 4.7 or newer, or set FUSEBOX_CCACHE."
        )
    own = {name: value for name, value in variables.items() if name.startswith("CCACHE_")}
    return {
        "CCACHE_DIR": asked.stdout.strip(),
        "CCACHE_COMPILERCHECK": "content",  # a pinned toolkit is unpacked anew each time
        **own,
        "FUSEBOX_CCACHE": str(ccache),
        "PYTORCH_NVCC": str(folder / "nvcc"),  # torch.utils.cpp_extension
        "CMAKE_CUDA_COMPILER_LAUNCHER": str(script),
    }
