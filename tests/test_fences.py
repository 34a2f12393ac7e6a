"""Who may import whom, and what every file looks like."""
import ast
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import FLAT

ROOT = Path(__file__).resolve().parent.parent
# A part may import those in groups before its own, and those beside it where that is said.
ORDER = [{"util", "sandbox"}, {"tree", "engine"},
         {"repl", "tokenizer", "tasks", "model", "grpo", "training"}, {"sampler"}, {"rlm"},
         {"baselines"}, {"eval"}, {"train"}, {"experiments"}]
BESIDE = {"sandbox": {"util"}}
FOLDERS = {"sandbox", "engine", "tasks", "training", "baselines", "experiments"}
TOP = set().union(*ORDER) - FOLDERS
OUTSIDE = {"torch", "tiktoken", "safetensors", "numpy", "tqdm"}
OUTSIDE |= {"regex", "triton"}  # tiktoken brings the one, torch for CUDA the other
HOUSE = sorted(path for folder in ("", *FOLDERS) for path in (ROOT / folder).glob("*.py"))
FILES = HOUSE + sorted((ROOT / "tests").glob("*.py"))
LOADERS = {"import_module", "__import__", "load", "load_file", "load_function", "run_path",
           "run_module"}


def imports(path, inside_functions=True):
    """The modules that a file imports, as "engine.pages" or "json": by statements, and by
    a text that a call to one of LOADERS gets."""
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
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for text in ast.walk(node) if name in LOADERS else ():
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    named = re.sub(r"\.py(:.*)?$", "", text.value).replace("/", ".")
                    found |= {named} if rooms({named}) else set()
        stack += ast.iter_child_nodes(node)
    return found


def rooms(names):
    """The parts of the house among imported modules: ten files and six folders."""
    return {name.split(".")[0] for name in names} & {*TOP, *FOLDERS}


def test_the_reader_of_imports(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("try:\n    import torch.nn as x\nexcept ImportError:\n    pass\n"
                    "from engine import pages\nclass A:\n    from tree import Node\n"
                    "def f():\n    import model\n    import_module('experiments.chart')\n"
                    "    return load_function('baselines/objectives.py:rao', 'f').tree\n")
    outside = {"torch.nn", "engine.pages", "tree"}
    assert imports(file, inside_functions=False) == outside
    assert imports(file) == outside | {"model", "experiments.chart", "baselines.objectives"}


def test_the_top_level_has_nine_scripts_and_util():
    assert {path.stem for path in ROOT.glob("*.py")} == TOP


def test_imports_point_one_way_also_inside_functions_and_by_path():
    before = set()
    for group in ORDER:
        for name in group:
            for path in HOUSE:
                if name == path.relative_to(ROOT).parts[0].removesuffix(".py"):
                    allowed = before | {name} | BESIDE.get(name, set())
                    if path.stem == "rlm":
                        allowed -= {"training", "grpo"}
                    assert rooms(imports(path)) <= allowed, path.name
        before |= group


def test_no_two_files_need_each_other():
    needs = {}
    for path in HOUSE:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        needs[name] = {other for other in imports(path) if other != name}
    TopologicalSorter(needs).prepare()  # CycleError names a circle


def test_baselines_are_loaded_where_they_are_asked_for_and_experiments_by_nobody():
    for path in HOUSE:
        if path.parent.name not in ("baselines", "experiments"):
            assert "experiments" not in rooms(imports(path)), path.name
            assert "baselines" not in rooms(imports(path, inside_functions=False))


def test_baselines_and_experiments_can_be_deleted_whole(tmp_path):
    names = shutil.ignore_patterns(
        "baselines", "experiments", ".*", "runs", "__pycache__", "docs", "tests")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=names)

    def command(*words):
        return subprocess.run([sys.executable, *words], cwd=tmp_path / "copy",
                              capture_output=True, text=True)

    trained = command("train.py", *"--model assets/tiny --warmup-steps 0 --steps 1 "
                      "--questions 2 --group 2 --heldout 1 --out run".split())
    assert trained.returncode == 0 or FLAT in trained.stderr
    assert (tmp_path / "copy" / "run" / "report.html").exists()
    answered = command("eval.py", *"--policy oracle --n 2 --html page.html".split())
    assert answered.returncode == 0 and " 1.000 " in answered.stdout


def test_the_program_needs_only_the_packages_that_it_names():
    for path in HOUSE:
        if path.parent.name not in ("baselines", "experiments"):
            others = {name.split(".")[0] for name in imports(path)} - {*TOP, *FOLDERS}
            assert others <= OUTSIDE | sys.stdlib_module_names, path.name


def test_importing_the_text_side_loads_the_standard_library_alone():
    code = ("import sys, tree, tasks, repl, rlm\n"
            f"sys.exit(bool({OUTSIDE} & {{*sys.modules}}))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


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
