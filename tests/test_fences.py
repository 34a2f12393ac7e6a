"""Who may import whom, and what every file looks like."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(ROOT.glob("*.py"))
NAMES = {path.stem for path in FILES}


def module_imports(source):
    """The top-level names that importing this source imports: all but those inside functions."""
    found, stack = set(), [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or ".").split(".")[0])
        stack += ast.iter_child_nodes(node)
    return found


def imports(name):
    return module_imports((ROOT / f"{name}.py").read_text(encoding="utf-8"))


def test_the_reader_of_imports_sees_nested_ones_and_skips_those_in_functions():
    source = ("try:\n    import torch.nn as x\nexcept ImportError:\n    pass\n"
              "if 1:\n    from rlm.x import y\nclass A:\n    import json\n"
              "def f():\n    import model\nasync def g():\n    import sampler\n")
    assert module_imports(source) == {"torch", "rlm", "json"}


@pytest.mark.parametrize("name, allowed", [
    ("tree", set()), ("flags", set()), ("haystacks", set()), ("tasks", {"haystacks"}),
    ("sandbox", set()), ("repl", {"sandbox"}),
    ("rlm", {"tree", "tasks", "repl"})])
def test_the_text_side_imports_the_standard_library_and_its_own_files_only(name, allowed):
    assert imports(name) <= allowed | sys.stdlib_module_names


@pytest.mark.parametrize("name, allowed", [
    ("methods", {"rlm", "tasks", "tree"}), ("api", {"tree"}), ("report", {"tree"})])
def test_the_parts_of_the_evaluation_know_the_text_side_only(name, allowed):
    assert imports(name) <= allowed | sys.stdlib_module_names


@pytest.mark.parametrize("name, forbidden", [
    ("sampler", {"tokenizer", "rlm"}), ("grpo", NAMES - {"tree", "flags"}),
    ("parallel", NAMES), ("checkpoint", NAMES - {"parallel"})])
def test_the_tensor_side_knows_nothing_of_the_text_side(name, forbidden):
    assert not imports(name) & forbidden


@pytest.mark.parametrize("name", ["tree", "tasks", "repl", "rlm"])
def test_importing_the_text_side_loads_no_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_module_shadows_the_standard_library():
    assert not NAMES & sys.stdlib_module_names


def test_no_line_is_longer_than_100_columns():
    long = [f"{path.relative_to(ROOT)}:{number}"
            for path in [*FILES, *sorted((ROOT / "tests").glob("*.py"))]
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > 100]
    assert not long
