"""The documentation builds without a warning, and the code on its pages runs as printed."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowtide
from once import on_one_recorder
from pages import BLOCK, run

pytestmark = on_one_recorder

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# On these pages each code block builds on the last; `tests/test_guides.py` runs the other guides.
PAGES = ("index.md", "questions.md", "coming-from.md", "guides/seeing.md", "guides/llm.md")


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    code = "\n".join(BLOCK.findall((DOCS / page).read_text(encoding="utf-8")))
    for library in ("monai", "transformers"):
        if f"from {library}" in code:
            pytest.importorskip(library)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path / "page.py"  # a file, so that reports can name its lines
    path.write_text(code, encoding="utf-8")
    try:
        run(code, str(path))
    finally:
        torch.set_num_threads(threads)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "site" / "guides" / "seeing" / "index.html").exists()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_links_of_pages_outside_the_site_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        assert (ROOT / name).exists(), link
        if anchor:
            text = (ROOT / name).read_text(encoding="utf-8")
            heads = [re.sub(r"[^\w\s-]", "", head) for head in re.findall(r"^#+ (.*)$", text, re.M)]
            assert anchor in [re.sub(r"\s+", "-", head.strip().lower()) for head in heads], link


def test_the_reference_has_every_public_name() -> None:
    entries = re.findall(
        r"^::: (\S+)$",
        "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("reference/*.md")),
        re.MULTILINE,
    )
    shown = [pkgutil.resolve_name(f"{path.rpartition('.')[0]}:{path.rpartition('.')[2]}")
             for path in entries]  # fmt: skip
    modules = [lowtide, lowtide.policies]
    for name in ("transformers", "lightning", "monai"):
        if importlib.util.find_spec(name):
            modules.append(importlib.import_module(f"lowtide.{name}"))
    for module in modules:
        for name in set(module.__all__) - {"engine", "policies", "__version__"}:
            assert any(getattr(module, name) is entry for entry in shown), name


def test_what_the_pages_name_by_its_module_is_in_the_reference() -> None:
    entries = "\n".join(p.read_text(encoding="utf-8") for p in DOCS.glob("reference/*.md"))
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`(lowtide(?:\.[a-z_]+)+\.\w+)[`(]", text):
            last = name.rpartition(".")[2]
            assert re.search(rf"^::: lowtide\S*\.{last}$", entries, re.MULTILINE), (path, name)


def test_every_block_of_python_is_run_by_some_test() -> None:
    guides = (ROOT / "tests" / "test_guides.py").read_text(encoding="utf-8")
    for path in DOCS.rglob("*.md"):
        if BLOCK.search(path.read_text(encoding="utf-8")):
            name = path.relative_to(DOCS).as_posix()
            assert name in PAGES or f'"{path.stem}' in guides, name
