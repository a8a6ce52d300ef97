"""Compiling the extension and finding it again.

Problem: a compiled core must match one version of Python, torch and these sources, and must never
get in the way of a user without a compiler. Invariant: a finished build is a file in a directory
named by a digest of all that went into it; it is moved there in one step, so that ranks and
processes may build at the same time. Imports the standard library; torch's own `cpp_extension` for
its paths, in the process that builds. Rejected: `cpp_extension.load`, which needs ninja and waits
on a lock file that a killed build leaves behind; wheels for each torch version, as long as the
sources still change.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

MODULE, CPU_MODULE = "_lowtide_core", "_lowtide_cpu"
_HERE = Path(__file__).parent
CPU_HEADERS = (_HERE / "cpu" / "nodes.h", _HERE / "cpu" / "pages.h")
# No fused multiply-add: the planner's seconds must have the bits that Python computes.
_EXACT = "-ffp-contract=off"
# As torch itself is built: without it, its headers check at each call what torch has to keep to.
_AS_TORCH = "-DNDEBUG"
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", _EXACT, _AS_TORCH, "-w")


class BuildError(RuntimeError):
    """The extension cannot be built here; the text says why."""


def sources() -> list[Path]:
    return sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")])


def cache_directory() -> Path:
    """Where builds are kept: ``$LOWTIDE_CACHE``, else the user's cache directory.

    Raises:
        BuildError: there is none.
    """
    named = os.environ.get("LOWTIDE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "lowtide"
    except RuntimeError as error:  # a user of a container whom its system does not know
        raise BuildError(
            "there is no home directory to keep what is compiled in: name a directory in "
            "LOWTIDE_CACHE"
        ) from error


def target() -> Path:
    """The file that a build for this Python, this torch and these sources produces.

    Raises:
        BuildError: there is no place for it.
    """
    return _place(MODULE, sources())


def is_there(path: Path) -> bool:
    """Whether a build is finished; not where the directory is one that nobody may look into."""
    return os.path.exists(path)


def _place(module: str, paths: list[Path]) -> Path:
    digest = hashlib.sha256()
    parts = (
        torch.__version__,
        torch.__config__.show(),
        sys.version,
        platform.machine(),
        str(platform.libc_ver()),
        str(_FLAGS),
        str(_compiler()),
    )
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in paths:
        digest.update(path.read_bytes() + b"\0")
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return cache_directory() / digest.hexdigest()[:20] / f"{module}{suffix}"


def _check_owner(path: Path) -> None:
    """Refuse a build that another user could have put there."""
    for place in (path, path.parent):
        found = place.stat()
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
            raise BuildError(
                f"{place} can be written by others than you: it is not loaded. Remove it, or name "
                "another directory in LOWTIDE_CACHE."
            )


def _compiler() -> list[str] | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        try:
            parts = shlex.split(name) if name else []
        except ValueError as error:
            raise BuildError(f"CXX={name!r} cannot be read as a command: {error}") from error
        if parts and shutil.which(parts[0]):
            return parts
    return None


def possible() -> str | None:
    """None if a build can be tried here, else the reason why not."""
    if os.name != "posix":
        return f"lowtide compiles nothing on {platform.system()} yet"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "what lowtide compiles needs Python's global lock, which this build has not"
    try:
        if _compiler() is None:
            return "no C++ compiler was found (c++, g++, clang++ or $CXX)"
    except BuildError as error:
        return str(error)
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's C headers are not installed"
    return None


def command(source: Path, output: Path) -> list[str]:
    from torch.utils import cpp_extension

    includes = [
        flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)
    ]  # fmt: skip
    libraries = cpp_extension.library_paths()
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        *(_compiler() or ["c++"]),
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *includes,
        f"-I{sysconfig.get_paths()['include']}",
        str(source),
        "-o",
        str(output),
        *(f"-L{path}" for path in libraries),
        *(f"-Wl,-rpath,{path}" for path in libraries),
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
    ]


def build() -> Path:
    """Compile the extension if that has not been done; returns its path.

    Takes half a minute to a minute. Raises:
        BuildError: with the compiler's message.
    """
    return _built(_HERE / "core.cpp", target())


def cpu_allocator() -> Path:
    """Compile the allocator of `lowtide.use_cpu_allocator` if that has not been done; returns its
    path.

    Takes some seconds. Raises:
        BuildError: with the compiler's message, or if this is not Linux.
    """
    if sys.platform != "linux":
        raise BuildError("the allocator for the CPU needs Linux")
    return library(_HERE / "cpu" / "allocator.cpp", CPU_MODULE, *CPU_HEADERS)


def library(source: Path, module: str, *headers: Path) -> Path:
    """Another extension of one file, and the headers that it includes, compiled and cached like the
    core. Raises as `build` does."""
    return _built(source, _place(module, [source, *headers]))


def load(path: Path, module: str) -> ModuleType:
    """Import what `build` or `library` has built.

    Raises:
        BuildError: others can write the file.
        ImportError: it was built for something else than what runs.
    """
    _check_owner(path)
    loader = importlib.machinery.ExtensionFileLoader(module, str(path))
    spec = importlib.util.spec_from_loader(module, loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


def _built(source: Path, output: Path) -> Path:
    if is_there(output):
        return output
    reason = possible()
    if reason is not None:
        raise BuildError(reason)
    try:
        output.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
            made = Path(scratch) / output.name
            with _one_at_a_time(output.parent):
                if output.exists():
                    return output
                done = subprocess.run(
                    command(source, made),
                    capture_output=True,
                    text=True,
                    errors="backslashreplace",
                    check=False,
                )
            if done.returncode:
                raise BuildError(f"the C++ compiler failed: {_first_error(done.stderr)}")
            made.replace(output)
    except OSError as error:
        raise BuildError(f"the build directory cannot be written: {error}") from error
    return output


def _first_error(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")


class _one_at_a_time:
    """A lock that ends with its process. Others wait, and then find the finished file."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"

    def __enter__(self) -> None:
        import fcntl

        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *exc: object) -> None:
        self._file.close()
