"""Tests of the package as a whole: what it imports, in which direction, and how it installs."""

from __future__ import annotations

import ast
import doctest
import functools
import graphlib
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

import lowtide
from once import on_one_recorder

pytestmark = on_one_recorder

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lowtide"
# One integration per file; each imports its library, so none is imported unless asked for.
INTEGRATIONS = {"lowtide.lightning", "lowtide.monai", "lowtide.transformers"}


def modules() -> dict[str, Path]:
    """Every module of the package and its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def test_the_integrations_are_there() -> None:
    assert set(MODULES) > INTEGRATIONS


def fresh(program: str, *flags: str) -> str:
    """Run a program in a new interpreter that treats warnings as errors; returns its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# --- importing --------------------------------------------------------------------------------


def test_import_loads_torch_and_nothing_else_heavy() -> None:
    printed = fresh(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import lowtide\n"
        "print('\\n'.join(set(sys.modules) - before))\n"
    ).split()
    assert "lowtide" in printed
    top = {name.partition(".")[0] for name in printed}
    assert top - set(sys.stdlib_module_names) <= {"lowtide", "torch"}
    heavy = {"torch._dynamo", "torch._inductor", "torch.onnx", "torch.testing"}
    assert not heavy & set(printed)
    assert not INTEGRATIONS & set(printed)


def test_integrations_are_imported_when_they_are_asked_for() -> None:
    printed = fresh(
        "import sys, lowtide\n"
        "print(lowtide.tracing.__name__, lowtide.transformers.MemoryBudget.__name__)\n"
        "print('lightning' in sys.modules)\n"
    )
    assert printed.split() == ["lowtide.tracing", "MemoryBudget", "False"]
    with pytest.raises(AttributeError, match="module 'lowtide' has no attribute 'nothing'"):
        lowtide.nothing  # noqa: B018


def test_what_is_imported_on_first_use_is_listed_too() -> None:
    """A prompt completes `lowtide.mo`, although nothing has imported MONAI."""
    listed = {name for name in dir(lowtide) if not name.startswith("__")}
    on_demand = {"lightning", "monai", "tracing", "transformers"}
    assert listed == {*lowtide.__all__, *on_demand} - {"__version__"}


def test_every_public_name_exists_and_explains_itself() -> None:
    assert len(lowtide.__all__) == len(set(lowtide.__all__))
    for name in lowtide.__all__:
        assert (getattr(lowtide, name).__doc__ or "").strip(), name


def test_hints_can_be_evaluated() -> None:
    """As command lines and checkers that are made of signatures do."""
    for name in lowtide.__all__:
        if inspect.isfunction(getattr(lowtide, name)):
            assert get_type_hints(getattr(lowtide, name))


@pytest.mark.parametrize("name", sorted(set(MODULES) - INTEGRATIONS))
def test_docstring_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_every_module_says_what_it_is_for() -> None:
    """The problem, what always holds, what it imports, and what was rejected."""
    for name, path in MODULES.items():
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        for part in (r"Problem:", r"Invariant\b.*?:", r"[Ii]mports?\b", r"Rejected:"):
            assert re.search(part, said, re.DOTALL), (name, part)


# --- the direction of imports -----------------------------------------------------------------


def imported(name: str, *, types: bool = False) -> set[str]:
    """Modules of the package that a module imports at run time; with `types`, also for typing."""
    path = MODULES[name]
    tree = ast.parse(path.read_text())
    for node in () if types else ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*up, *filter(None, [node.module])]) if node.level else node.module
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inside & set(MODULES)) or {str(base)}
    return {other for other in found if other in MODULES and other != name}


@functools.cache
def imports() -> dict[str, set[str]]:
    """What each module of the package imports of it."""
    return {name: imported(name) for name in MODULES}


def test_the_check_sees_imports() -> None:
    assert "lowtide.errors" in imports()["lowtide.measure"]
    assert "lowtide.measure" in imports()["lowtide"]


def test_imports_run_one_way() -> None:
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a circle of imports: {' -> '.join((*way, name))}"
        if name not in done:
            for other in sorted(imports()[name]):
                # A package's __init__ collects its own modules; they must not import it.
                visit(other, (*way, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


GENERIC = {"lowtide", "modules", "page"}  # as words, or asked for in a function


def test_docstrings_name_what_is_imported() -> None:
    checked = 0
    for name, path in MODULES.items():
        text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        said = re.search(r"(?:^|[.:)] )Imports:? (.*?)[.;](?: |$)", text)
        if said is None or path.name == "__init__.py":  # a package says what its modules may
            continue
        words = set(re.findall(r"[a-z_]+", said[1])) - GENERIC
        parts = {part for other in imported(name, types=True) for part in other.split(".")}
        outside = name.rpartition(".")[2]  # an integration names its library
        known = {part for other in MODULES for part in other.split(".")} - {outside}
        stale = words & known - parts
        assert not stale, (name, stale)
        checked += bool(words & known)
    assert checked > 60


def top(name: str) -> str:
    """The package that a module is in, or the module itself if it is in none."""
    return name.split(".")[1] if "." in name else "lowtide"


def top_imports() -> dict[str, set[str]]:
    """What each package, and each top-level module, imports from the others."""
    found: dict[str, set[str]] = {top(name): set() for name in MODULES}
    for name, others in imports().items():
        found[top(name)] |= {top(other) for other in others} - {top(name)}
    return found


def test_packages_import_one_way() -> None:
    graphlib.TopologicalSorter(top_imports()).prepare()  # or a CycleError that names them


def map_of_the_code() -> tuple[dict[str, int], dict[str, set[str]]]:
    """The line number of each package or module in the map, and the files listed below it."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    lines, files = {}, {}
    names: list[str] = []
    shown = page.partition("## Reading the code")[2].split("```")[1]
    for number, line in enumerate(shown.splitlines()):
        if line.startswith(" " * 16):
            files.setdefault(names[-1], set()).update(line.split())
        elif line and not line.startswith(" "):
            names = re.split(r" {2,}", line)[0].replace("/", "").split()
            lines.update(dict.fromkeys(names, number))
    return lines, files


def test_the_map_of_the_code_has_every_module() -> None:
    lines, files = map_of_the_code()
    assert set(lines) == set(top_imports()) - {"lowtide", "__main__"}
    for package, listed in files.items():
        inside = {name.split(".")[2] for name in MODULES if name.startswith(f"lowtide.{package}.")}
        assert listed <= inside, package
        if package in FLOORS:
            assert listed == inside, package


def test_the_map_of_the_code_has_what_is_imported_below() -> None:
    lines, _ = map_of_the_code()
    for name in lines:
        for other in top_imports()[name] & set(lines):
            assert lines[name] <= lines[other], (name, other)


def under(prefix: str) -> set[str]:
    return {name for name in MODULES if name == prefix or name.startswith(prefix + ".")}


# What each package between the tape and the public interface may import.
FLOORS = {
    "models": "_compat errors",
    "kernels": "_compat errors tape",
    "memory": "_compat kernels tape",
    # What a backward will take is predicted from the forward, not from a plan.
    "backward": "_compat kernels memory planner tape",
    # Observing a step is independent of what is decided in it.
    "observing": "_compat backward kernels memory planner tape",
    # Following a plan does not include searching for one.
    "running": "_compat engine errors kernels limits measure memory observing planner replay tape",
    # A dry run is recorded and observed like a real step, and knows no budget.
    "dryrun": "_compat batches engine errors kernels memory models observing planner replay "
    "running step tape",
    # Planning a budget's steps is independent of recording them.
    "learning": "_compat engine errors limits memory models observing planner refusal report "
    "running",
    # Figures for pictures are made above planning.
    "analysis": "alike batches dryrun errors frontier levels limits page planner plans policies "
    "saved tape texttable",
    # Comparing real steps is above everything that runs them.
    "verifying": "_compat budget checkpoint dryrun engine errors export limits measure models "
    "plans replay step tape texttable",
    "export": "_compat analysis budget dryrun errors explain frontier measure planner plans saved "
    "step",
}


@pytest.mark.parametrize(
    ("floor", "may_import"),
    [
        ("errors", ""),
        ("_compat", ""),
        # A plan is a value: it never sees the tape and holds no tensor.
        ("planner", "errors"),
        # The tape records; it knows neither plans nor budgets.
        ("tape", "_compat errors policies"),
        *FLOORS.items(),
    ],
)
def test_lower_floors_import_nothing_from_above(floor: str, may_import: str) -> None:
    for name in under(f"lowtide.{floor}"):
        assert {top(other) for other in imports()[name]} <= {floor, *may_import.split()}, name


def test_the_planner_does_not_import_torch() -> None:
    for name in under("lowtide.planner"):
        assert not re.search(r"^\s*(import|from) torch\b", MODULES[name].read_text(), re.M), name


def test_nothing_imports_an_integration() -> None:
    for name, others in imports().items():
        assert not others & INTEGRATIONS or name in INTEGRATIONS, name


# --- private names of torch -------------------------------------------------------------------


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names under `torch` with a leading underscore that a file imports or reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z]\w*", name):
                yield name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                if re.search(r"\._(?!_)", name := f"{node.module}.{alias.name}"):
                    yield name
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if re.match(r"torch\b.*\._(?!_)", a.name))


# Of its tensors, storages, operators and modules.
PRIVATE = {"_cdata", "_version", "_base", "_schema", "_parameters", "_buffers", "_modules",
           "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_saved_tensors",
           "_compiled_call_impl"}  # fmt: skip
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}


def private_attributes(tree: ast.AST) -> set[str]:
    """Which of `PRIVATE` a file reads, by its name or as text, except as attributes of `self`; and
    whatever private name it hands to `getattr` and the like as text, but a named tuple's."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            found |= {node.attr} & PRIVATE
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & PRIVATE
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            texts = (a.value for a in node.args if isinstance(a, ast.Constant))
            found |= {t for t in texts if isinstance(t, str) and re.match(r"_(?!_|fields$)", t)}
    return found


def test_private_names_of_torch_stand_in_one_place() -> None:
    assert list(private_names(ast.parse(MODULES["lowtide._compat.dispatch"].read_text())))
    program = "a._base\nb['_schema']\ngetattr(c, '_named', None)\nself._buffers"
    assert private_attributes(ast.parse(program)) == {"_base", "_schema", "_named"}
    for name, path in MODULES.items():
        if name not in under("lowtide._compat"):
            tree = ast.parse(path.read_text())
            assert not list(private_names(tree)), name
            assert not private_attributes(tree), name


# --- installing -------------------------------------------------------------------------------


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def requirements() -> Iterator[str]:
    """The names of everything that development installs."""
    data = project()
    table, groups = data["project"], data["dependency-groups"]
    assert isinstance(table, dict)
    assert isinstance(groups, dict)
    lists = [table["dependencies"], *table["optional-dependencies"].values(), *groups.values()]
    for entry in (entry for entries in lists for entry in entries):
        if isinstance(entry, str):
            yield re.split(r"[<>=\[; ]", entry)[0].lower()


def test_the_package_depends_on_torch_alone() -> None:
    table = project()["project"]
    assert isinstance(table, dict)
    assert table["dependencies"] == ["torch>=2.10"]
    assert table["requires-python"] == ">=3.11"


def test_everything_that_development_installs_is_pinned() -> None:
    missing = set(requirements()) - set(pins())
    assert not missing
    # A local version would be found on one index only.
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins()["torch"])


def extras() -> dict[str, set[str]]:
    """The names of the packages that each extra installs."""
    table = project()["project"]
    assert isinstance(table, dict)
    return {
        extra: {re.split(r"[<>=]", entry)[0] for entry in entries}
        for extra, entries in table["optional-dependencies"].items()
    }


PACKAGES = {"sklearn": "scikit-learn", "ignite": "pytorch-ignite"}  # of modules with other names
# A package that another one of them brings along; and one that no extra can, see the example.
BROUGHT = {"numpy", "vision_architectures"}


def libraries(tree: ast.AST) -> set[str]:
    """The packages besides torch, lowtide and Python's own that a program imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    found -= {*sys.stdlib_module_names, "torch", "lowtide", *BROUGHT}
    return {PACKAGES.get(name, name) for name in found}


def test_an_extra_installs_what_the_examples_import() -> None:
    needed = set()
    for path in (ROOT / "examples").glob("*.py"):
        needed |= libraries(ast.parse(path.read_text(encoding="utf-8")))
    assert "scikit-learn" in needed
    assert needed <= extras()["examples"]
    assert extras()["examples"] >= extras()["peft"] | extras()["demo"]
    assert (
        libraries(ast.parse((ROOT / "examples" / "segment_brain.py").read_text()))
        <= (extras()["demo"])
    )


GUIDES = sorted(path.stem for path in (ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("guide", GUIDES)
def test_the_extras_that_a_guide_names_install_what_it_imports(guide: str) -> None:
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text(encoding="utf-8")
    named = {extra for found in re.findall(r"\.\[([a-z,]+)\]", text) for extra in found.split(",")}
    installed = set().union(*(extras()[extra] for extra in named))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    needed = set().union(*(libraries(ast.parse(block)) for block in blocks))
    assert needed <= installed


def test_every_extra_is_in_the_readme() -> None:
    rows = (ROOT / "README.md").read_text(encoding="utf-8").partition("| extra |")[2]
    assert set(extras()) == set(re.findall(r"`([a-z]+)`", rows.partition("\n\n")[0])) & set(
        extras()
    )


def test_types_and_licence_travel_with_the_package() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^exec make test\b", script.read_text(), re.M)


def test_an_old_python_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert f"lowtide needs Python 3.11 or later; '{old}' is Python 3.9.1." in done.stderr
    assert not (tmp_path / "venv").exists()
