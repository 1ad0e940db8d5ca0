"""What the documents say is run: code, its printed output, the table, the links."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import regard
from regard import registry
from regard.backends import softmax_backends
from regard.can import CAPABILITIES
from regard.tasks import TASKS
from regard.testing import CHECKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def examples(page: Path) -> list[tuple[str, int, str | None]]:
    """The python blocks: code, its line, and what it prints, where a text block follows at once."""
    source, found = text(page), []
    blocks = list(BLOCK.finditer(source))
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        if block[1] == "python":
            printed = (
                after is not None
                and after[1] == "text"
                and not source[block.end() : after.start()].strip()
            )
            line = source.count("\n", 0, block.start()) + 1
            found.append((block[2], line, after[2] if printed and after is not None else None))
    return found


@pytest.fixture
def own_registry():
    """Recipes, backends and tasks that a document adds are gone after it."""
    registry.get_recipe("vanilla")  # load them first
    before, backends = dict(registry._recipes), softmax_backends.names()
    tasks = dict(TASKS)
    yield
    TASKS.clear()
    TASKS.update(tasks)
    for name in set(softmax_backends.names()) - set(backends):
        softmax_backends.unregister(name)
    registry._recipes.clear()
    registry._recipes.update(before)
    TASKS.clear()
    TASKS.update(tasks)


OPTIONAL = {"transformers", "datasets", "onnx", "onnxruntime", "altair", "matplotlib", "sklearn"}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda page: page.stem)
def test_code_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for code, line, shown in examples(page):
            imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
            for package in imported & OPTIONAL:
                pytest.importorskip(package)  # the blocks before this one have run
            out = io.StringIO()
            padded = "\n" * line + code  # so that errors name the line of the page
            with contextlib.redirect_stdout(out):
                exec(compile(padded, str(page), "exec"), namespace)
            if shown is not None:
                printed = [x.rstrip() for x in out.getvalue().splitlines()]
                assert printed == shown.splitlines(), f"{page.name}, line {line}"


@pytest.mark.slow  # starts four processes
def test_the_task_of_the_page_is_compared_by_the_command(tmp_path):
    """The files of docs/adding-a-task.md, with the entry point of its pyproject.toml, and its last
    command."""
    page = ROOT / "docs" / "adding-a-task.md"
    data, task = [code for code, _, _ in examples(page)][:2]
    project = next(block[2] for block in BLOCK.finditer(text(page)) if block[1] == "toml")
    consoles = "".join(block[2] for block in BLOCK.finditer(text(page)) if block[1] == "console")
    command = next(line for line in consoles.splitlines() if "compare" in line)
    (tmp_path / "houses.py").write_text(task, encoding="utf-8")
    groups = tomllib.loads(project)["project"]["entry-points"]
    info = tmp_path / "houses-1.0.dist-info"  # what an installation writes
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: houses\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n{name} = {place}\n"
        for group, names in groups.items()
        for name, place in names.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    source = str(Path(regard.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((source, str(tmp_path)))}
    subprocess.run([sys.executable, "-c", data], cwd=tmp_path, check=True)
    arguments = command.removeprefix("$ regard ").replace("--steps 200", "--steps 3").split()
    arguments += ["--seeds", "1"]  # each run is a process that imports torch
    done = subprocess.run(
        [sys.executable, "-m", "regard", *arguments],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("vanilla", "fnet", "linear", "constant", "rmse"))


def test_the_pages_with_code_were_found():
    assert sum(len(examples(page)) for page in PAGES) > 30


@pytest.mark.parametrize("name", regard.list_recipes())
def test_every_recipe_has_a_place_in_a_family_page(name):
    heading = re.compile(rf"^## {name}$", re.MULTILINE)
    assert any(heading.search(text(page)) for page in PAGES[1:]), (
        f"no page has a section '## {name}'"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_local_links_and_images_exist(page):
    local = [link for link in LINK.findall(BLOCK.sub("", text(page))) if "://" not in link]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing


def test_every_check_is_documented():
    checks = text(ROOT / "docs" / "capabilities.md").split("## Checks")[1]
    assert re.findall(r"^- \*\*(\w+)\*\*", checks, re.MULTILINE) == list(CHECKS)


def test_every_capability_is_documented():
    table = text(ROOT / "docs" / "capabilities.md").split("## Checks")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(CAPABILITIES)


def test_design_names_every_module_of_the_package():
    tree = text(ROOT / "docs" / "design.md").split("## Source tree")[1].split("```")[1]
    package = ROOT / "src" / "regard"
    named = set(re.findall(r"(\w+(?:/|\.py))", "\n".join(tree.splitlines()[2:])))
    assert {name for name in named if not (package / name).exists()} == set()
    folders = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert folders | modules == named


def test_readme_is_short():
    assert len(text(ROOT / "README.md").split()) <= 1000


@pytest.mark.parametrize("name", regard.__all__)
def test_public_names_have_docstrings(name):
    assert (getattr(regard, name).__doc__ or "").strip()
