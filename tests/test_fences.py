"""Who may import whom, and what every file looks like."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = ("tree", "rlm", "repl", "tokenizer", "model", "sampler", "grpo", "train", "eval")
FOLDERS = ("tasks", "runtime", "lab")
OUTSIDE = {"torch", "tiktoken", "safetensors", "numpy", "tqdm"}
OUTSIDE |= {"regex", "triton"}  # tiktoken brings the one, torch for CUDA the other
FILES = sorted(path for folder in ("", *FOLDERS, "tests")
               for path in (ROOT / folder).glob("*.py"))


def imports(path, inside_functions=True):
    """The modules that a file imports, as "runtime.files" or "json"."""
    found, stack = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if function and not inside_functions:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or "."
            submodules = {f"{base}.{alias.name}" for alias in node.names}
            found |= submodules if base in FOLDERS else {base}
        stack += ast.iter_child_nodes(node)
    return found


def rooms(names):
    """The parts of the house among imported modules: nine files and three folders."""
    return {name.split(".")[0] for name in names} & {*TOP, *FOLDERS}


def test_the_reader_of_imports(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("try:\n    import torch.nn as x\nexcept ImportError:\n    pass\n"
                    "from runtime import files\nclass A:\n    from tree import Node\n"
                    "def f():\n    import model\n")
    assert imports(file) == {"torch.nn", "runtime.files", "tree", "model"}
    assert imports(file, inside_functions=False) == {"torch.nn", "runtime.files", "tree"}


def test_the_top_level_has_nine_files():
    assert {path.stem for path in ROOT.glob("*.py")} == set(TOP)


@pytest.mark.parametrize("name, allowed", [
    ("tree", {"runtime"}), ("repl", {"runtime"}),
    ("rlm", {"tree", "tasks", "repl", "runtime"}),
    ("tokenizer", {"tree", "runtime"}), ("model", {"runtime"}),
    ("sampler", {"tree", "model", "runtime"}), ("grpo", {"tree", "runtime"}),
    ("eval", {*TOP, "tasks", "runtime"} - {"train", "grpo"}),
    ("train", {*TOP, "tasks", "runtime"})])
def test_the_top_level_knows_only_what_lies_below_it(name, allowed):
    assert rooms(imports(ROOT / f"{name}.py", inside_functions=False)) <= allowed


@pytest.mark.parametrize("folder, allowed", [
    ("tasks", {"tasks", "runtime", "tree"}), ("runtime", {"runtime", "tree"})])
def test_folders_know_nothing_of_the_top_level_but_tree(folder, allowed):
    for path in (ROOT / folder).glob("*.py"):
        assert rooms(imports(path)) <= allowed, path.name


def test_nothing_but_four_programs_imports_the_lab_and_they_where_they_use_it():
    for path in FILES:
        if path.parent.name not in ("lab", "tests"):
            anywhere = path.name not in ("eval.py", "rlm.py", "repl.py", "train.py")
            assert "lab" not in rooms(imports(path, anywhere)), path.name


@pytest.mark.parametrize("name", ["tree", "repl", "rlm"])
def test_the_text_side_needs_the_standard_library_alone(name):
    for path in [ROOT / f"{name}.py", *(ROOT / "tasks").glob("*.py")]:
        others = {n.split(".")[0] for n in imports(path, False)} - {*TOP, *FOLDERS}
        assert others <= sys.stdlib_module_names, path.name


def test_the_program_needs_only_the_packages_that_it_names():
    for path in FILES:
        if path.parent.name in ("", "tasks", "runtime") or path.parent == ROOT:
            others = {name.split(".")[0] for name in imports(path)} - {*TOP, *FOLDERS}
            assert others <= OUTSIDE | sys.stdlib_module_names, path.name


@pytest.mark.parametrize("name", ["tree", "tasks", "repl", "rlm"])
def test_importing_the_text_side_loads_no_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_importing_the_programs_loads_nothing_of_the_lab():
    code = ("import sys, train, eval\n"
            "sys.exit(any(name.startswith('lab') for name in sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_asking_a_model_loads_neither_fsdp_nor_the_compiler():
    """They take as long to load as torch itself, and a question needs neither."""
    code = ("import sys, rlm, torch\n"
            "rlm.RLM('assets/tiny').completion('Sort the notes from \"A\".', {})\n"
            "slow = {'torch._dynamo', 'torch.distributed.tensor'} & {*sys.modules}\n"
            "sys.exit(bool(slow) and not torch.cuda.is_available())")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_module_shadows_the_standard_library():
    assert not {*TOP, *FOLDERS} & sys.stdlib_module_names


def test_no_line_is_longer_than_92_columns():
    long = [f"{path.relative_to(ROOT)}:{number}" for path in FILES
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > 92]
    assert not long


def shared_lines(source):
    """The lines on which a statement begins beside another one, or beside its header."""
    begins = [node.lineno for node in ast.walk(ast.parse(source))
              if isinstance(node, ast.stmt)]
    return sorted({line for line in begins if begins.count(line) > 1})


def test_no_two_statements_share_a_line():
    assert shared_lines("a = 1; b = 2\nif a: b\nc = 3\nelse_ = 4") == [1, 2]
    shared = {path.name: lines for path in FILES
              if (lines := shared_lines(path.read_text(encoding="utf-8")))}
    assert not shared
