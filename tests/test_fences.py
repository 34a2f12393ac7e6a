"""Who may import whom, and what is loaded."""
import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter

from conftest import FLAT, ROOT, SHORT, command

import eval as evaluation
import train

# A part may import those in groups before its own, and those beside it where that is said.
# minimal.py stands alone.
ORDER = [{"minimal"}, {"util", "sandbox"}, {"tree", "engine", "config"},
         {"repl", "tokenizer", "tasks", "model", "grpo"}, {"sampler", "prompts"}, {"rlm"},
         {"training", "baselines"}, {"ask"}, {"eval"}, {"train"}, {"experiments"}]
BESIDE = {"sandbox": {"util"}}
FOLDERS = {"sandbox", "engine", "tasks", "training", "baselines", "experiments"}
TOP = set().union(*ORDER) - FOLDERS
OUTSIDE = {"torch", "tiktoken", "safetensors", "numpy", "tqdm"}
OUTSIDE |= {"regex", "triton"}  # tiktoken brings the one, torch for CUDA the other
HOUSE = sorted(path for folder in ("", *FOLDERS) for path in (ROOT / folder).glob("*.py"))
LOADERS = {"import_module", "__import__", "load", "load_file", "load_function", "run_path",
           "run_module"}


def imports(path):
    """The modules that a file imports, as "engine.pages" or "json": by statements, and by
    a text that a call to one of LOADERS gets."""
    found, stack = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or "."
            submodules = {f"{base}.{alias.name}" for alias in node.names}
            found |= submodules if base in FOLDERS else {base}
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for text in ast.walk(node) if name in LOADERS else ():
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    named = re.sub(r"\.py(:.*)?$", "", text.value).replace("/", ".")
                    found |= {named} if rooms({named}) else set()
        stack += ast.iter_child_nodes(node)
    return found


def rooms(names):
    """The parts of the house among imported modules: files and folders."""
    return {name.split(".")[0] for name in names} & {*TOP, *FOLDERS}


def test_the_top_level_has_these_scripts_and_util():
    assert {path.stem for path in ROOT.glob("*.py")} == TOP


def test_imports_point_one_way_also_inside_functions_and_by_path():
    before = set()
    for group in ORDER:
        before -= {"minimal"}
        for name in group:
            for path in HOUSE:
                if name == path.relative_to(ROOT).parts[0].removesuffix(".py"):
                    allowed = before | {name} | BESIDE.get(name, set())
                    if path.stem == "rlm":
                        allowed -= {"grpo"}
                    assert rooms(imports(path)) <= allowed, path.name
        before |= group


def test_no_two_files_need_each_other():
    needs = {}
    for path in HOUSE:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        needs[name] = {other for other in imports(path) if other != name}
    TopologicalSorter(needs).prepare()  # CycleError names a circle


def test_no_default_run_needs_baselines_or_experiments(short_run, tmp_path, monkeypatch):
    """Both can be deleted whole."""
    for name in {*sys.modules, "baselines", "experiments"}:
        if rooms({name}) & {"baselines", "experiments"}:
            monkeypatch.setitem(sys.modules, name, None)  # to import it fails
    assert FLAT in command(train, monkeypatch, *SHORT, "--model", short_run / "warmup",
                           "--warmup-steps", 0, "--heldout", 1, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "report.html").exists()
    page = tmp_path / "page.html"
    assert command(evaluation, monkeypatch, "--policy", "oracle", "--n", 2, "--html",
                   page) is None and page.exists()


def test_the_program_needs_only_the_packages_that_it_names():
    for path in HOUSE:
        if path.parent.name not in ("baselines", "experiments"):
            others = {name.split(".")[0] for name in imports(path)} - {*TOP, *FOLDERS}
            assert others <= OUTSIDE | sys.stdlib_module_names, path.name


def test_importing_the_text_side_loads_the_standard_library_alone():
    code = ("import sys, tree, tasks, repl, prompts, rlm\n"
            f"sys.exit(bool({OUTSIDE} & {{*sys.modules}}))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
