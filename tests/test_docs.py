"""The pages say what is there: links, files, flags and sizes; and the files of
docs/extending.md work as they stand, from a directory outside of the repository."""
import ast
import asyncio
import inspect
import json
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from packaging.requirements import Requirement  # comes with pytest

import eval as evaluation
import rlm
import train
from conftest import FLAT, SHORT, command
from tree import Node, Rollout, Turn

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CI = ROOT / ".ci" / "run"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
EXTENDING = TEXTS[ROOT / "docs" / "extending.md"]

# The files of the page, and the commands that it gives for them.
EXAMPLES = dict(re.findall(r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)^```$", EXTENDING,
                           re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^python ~/rlm/(\w+)\.py (.*)$", EXTENDING, re.MULTILINE)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# --- what the pages say -------------------------------------------------------------------

def anchors(page):
    """The names by which GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", TEXTS[page], re.MULTILINE)
    plain = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def code(text):
    """What stands in backticks, in fences or indented; commands of several lines joined."""
    text = text.replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    rest = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    .*$", rest, re.MULTILINE)
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    return [*fenced.splitlines(), *indented, *inline]


@pages
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pages
def test_every_file_that_is_named_exists(page):
    text = TEXTS[page]
    inside = re.findall(r"(?<![\w/.~])((?:lab|tasks|runtime|tests|docs)/[\w./-]*\w)", text)
    modules = [f"lab/{name}.py" for name in re.findall(r"-m lab\.([a-z]\w*)", text)]
    on_top = re.findall(r"(?<![\w/.~])(\w+\.py)\b", text)
    of_the_reader = {*EXAMPLES, "my_task.py", "file.py"}
    for name in {*inside, *modules, *on_top} - of_the_reader:
        assert (ROOT / name).exists(), name


def test_every_page_is_linked_from_the_readme():
    for page in PAGES[1:]:
        assert f"(docs/{page.name}" in TEXTS[README]


@pages
def test_flags_in_commands_exist(page, monkeypatch, capsys):
    command(rlm, monkeypatch, "--help")
    of_rlm = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    command(evaluation, monkeypatch, "--help")
    known = {
        "rlm": of_rlm,
        "train": {"--" + field.name.replace("_", "-") for field in fields(train.Config)},
        "eval": set(re.findall(r"--[\w-]+", capsys.readouterr().out)),
    }
    for line in code(TEXTS[page]):
        for name, flags in known.items():
            _, found, arguments = line.partition(f"{name}.py ")
            if found:
                used = set(re.findall(r"(?<!\S)--[a-z][\w-]*", arguments))
                assert used <= flags | {"--help"}, line


def test_what_the_readme_tells_to_look_for_is_there():
    entries = re.findall(r"^\d\. \[(\w+\.py)\](.*?)(?=^\d\.|^\n)", TEXTS[README],
                         re.DOTALL | re.MULTILINE)
    assert [file for file, _ in entries] == ["tree.py", "rlm.py", "grpo.py", "train.py"]
    for file, text in entries:
        for name in re.findall(r"`(\w+)`", text):
            assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), (file, name)


@pages
def test_a_ceiling_in_tokens_says_by_whose_tokenizer(page):
    for paragraph in TEXTS[page].split("\n\n"):
        assert "ways_to_sort" not in paragraph or "tokenizer" in paragraph


@pages
def test_lines_are_short(page):
    long = [n for n, line in enumerate(TEXTS[page].splitlines(), 1) if len(line) > 120]
    assert not long


def test_the_readme_is_short_and_has_the_command_that_runs_the_tests():
    assert len(TEXTS[README].splitlines()) <= 220
    assert len(TEXTS[README].split()) <= 2000
    command = "pip install -r requirements.txt -c constraints.txt && pytest"
    assert f"\n{command}\n" in TEXTS[README]
    # The same one runs after each change, only with less output.
    assert f"\n{command.replace('install', 'install -q')}\n" in CI.read_text()


def test_the_exact_set_is_within_the_ranges():
    ranges, exact = ([Requirement(line) for line in (ROOT / name).read_text().splitlines()]
                     for name in ("requirements.txt", "constraints.txt"))
    assert [each.name for each in exact] == [each.name for each in ranges]
    for pin, wide in zip(exact, ranges):
        [version] = pin.specifier
        assert version.operator == "==" and wide.specifier.contains(version.version)
        assert not wide.specifier.contains("999")  # nobody has tried that
        assert "==" not in str(wide)  # it would replace what a hosted notebook has


def test_what_is_installed_is_all_that_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = project["tool"]["setuptools"]
    assert installed["py-modules"] == sorted(path.stem for path in ROOT.glob("*.py"))
    assert installed["packages"] == sorted(
        path.parent.name for path in ROOT.glob("*/__init__.py"))


# --- the notebook -------------------------------------------------------------------------

def test_the_notebook_runs_from_top_to_bottom(monkeypatch, capsys):
    """In an event loop, as in Jupyter: a cell may await."""
    book = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    names = {}

    async def run():
        for cell in cells:
            code = compile("".join(cell["source"]), cell["id"], "exec",
                           ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            made = eval(code, names)
            if inspect.isawaitable(made):
                await made

    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setattr(sys, "path", [*sys.path])
    asyncio.run(run())
    shown = capsys.readouterr().out
    good, others = map(float, re.findall(r"trees: ([-+][\d.]+)", shown))
    assert good > 0 > others  # one step, and good trees are more likely
    assert names["Picture"]()._repr_svg_().startswith("<svg")
    assert re.search(r"inherit +step 1: 0.3\d +step 50: 0.9\d", shown)


# --- the examples -------------------------------------------------------------------------

def commands(program, word):
    """The arguments of the page's commands with this program and this word in them."""
    found = [arguments.split() for name, arguments in COMMANDS if name == program]
    return [arguments for arguments in found if word in arguments]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A directory with the files of the page, far from the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    assert ROOT not in folder.parents
    for name, source in EXAMPLES.items():
        (folder / name).write_text(source)
    return folder


@pytest.fixture(scope="module")
def trained(elsewhere):
    """The example task, trained for two steps from nothing."""
    [arguments] = commands("train", "rooms.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        assert FLAT in command(train, patch, *arguments, *SHORT)
    return elsewhere / "runs" / "rooms"


def test_the_page_has_three_files_of_at_most_40_lines():
    assert list(EXAMPLES) == ["rooms.py", "brief.py", "levels.py"]
    for source in EXAMPLES.values():
        assert len(source.splitlines()) <= 40
    assert len(EXAMPLES["levels.py"].splitlines()) <= 15
    assert {word for _, line in COMMANDS for word in line.split()} >= set(EXAMPLES)


@pytest.mark.parametrize("name", ["rooms.py", "brief.py"])
def test_the_oracle_answers_the_examples(name, elsewhere, monkeypatch, capsys):
    arguments = next(a for a in commands("eval", name) if "oracle" in a)
    monkeypatch.chdir(elsewhere)
    assert command(evaluation, monkeypatch, *arguments) is None
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[3:5] == ["4", "1.000"]


def test_the_example_task_trains_and_is_evaluated(trained, monkeypatch, capsys):
    assert (trained / "final" / "model.safetensors").exists()
    [arguments] = [a for a in commands("eval", "rooms.py") if "oracle" not in a]
    monkeypatch.chdir(trained.parent.parent)
    assert command(evaluation, monkeypatch, *arguments, "--n", 2) is None
    assert "rooms" in capsys.readouterr().out


def test_the_example_reward_and_objective_train(elsewhere, short_run, monkeypatch):
    """Both in one run, which starts from a warm-up that other tests use as well."""
    [reward], [objective] = commands("train", "brief.py"), commands("train", "levels.py")
    monkeypatch.chdir(elsewhere)
    start = ["--model", short_run / "warmup", "--warmup-steps", 0]
    assert FLAT in command(train, monkeypatch, *reward, *objective, *SHORT, *start)
    assert (elsewhere / "runs" / "levels" / "result.json").exists()


# --- mistakes in a file -------------------------------------------------------------------

MAKE = "def make(rng, tokens=None, heldout=False):\n    return 'q', 'c', 'a'\n"
SCORE = "def score(task, answer):\n    return 1.0\n"
ORACLE = "def oracle(task, node):\n    return '```repl\\nFINAL(1)\\n```'\n"
ANSWER = "def score(task, answer):{}\n"
CREDIT = "def credit(rollouts, config):{}\n"
HERE = "  # here"  # the line that the message names
BOOM = "    return {}['boom']  # here\n"

MISTAKES = {  # file -> (how it is used, its text, what the message says)
    "no_make": ("--tasks", SCORE, "no function make"),
    "no_score": ("--tasks", MAKE, "no function score"),
    "syntax": ("--tasks", "x = (  # here\n", "SyntaxError"),
    "importing": ("--tasks", "import nowhere_to_be_found  # here\n", "ModuleNotFoundError"),
    "make_wrong": (
        "--tasks",
        SCORE + ORACLE + "def make(rng, **more):  # here\n    return 'q', 3, 'a'\n",
        "make returned"),
    "make_raises": (
        "--tasks", SCORE + ORACLE + "def make(rng, **more):\n" + BOOM, "KeyError"),
    "score_wrong": (
        "--tasks", MAKE + ORACLE + ANSWER.format(HERE) + "    return 'good'\n",
        "score returned 'good'"),
    "score_large": (
        "--tasks", MAKE + ORACLE + ANSWER.format(HERE) + "    return 2\n",
        "score returned 2"),
    "score_raises": ("--tasks", MAKE + ORACLE + ANSWER.format("") + BOOM, "KeyError"),
    "oracle_wrong": (
        "--tasks", MAKE + SCORE + "def oracle(task, node):  # here\n    return 3\n",
        "oracle returned 3"),
    "oracle_raises": (
        "--tasks", MAKE + SCORE + "def oracle(task, node):\n" + BOOM, "KeyError"),
    "reward_missing": ("--reward", MAKE, "no function score"),
    "reward_wrong": (
        "--reward", ANSWER.format(HERE) + "    return None\n", "score returned None"),
    "reward_raises": ("--reward", "async " + ANSWER.format("") + BOOM, "KeyError"),
    "objective_missing": ("--objective", SCORE, "no function credit"),
    "objective_wrong": (
        "--objective", CREDIT.format(HERE) + "    return [1.0]\n", "credit returned [1.0]"),
    "objective_values": (
        "--objective",
        CREDIT.format(HERE) + "    return {r.root: 1.0 for r in rollouts}\n",
        "credit returned 1.0"),
    "objective_raises": ("--objective", CREDIT.format("") + BOOM, "KeyError"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_file_and_line(name, tmp_path, trained, monkeypatch, capsys):
    flag, source, says = MISTAKES[name]
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    monkeypatch.chdir(tmp_path)
    if flag == "--objective":
        root = Node()
        root.add(Turn("assistant", "", (1,), (0.0,)))
        trees = [Rollout(None, "g", root, 1.0)]
        # A step needs a model that samples; these trees stand in for what it would sample.
        monkeypatch.setattr(train.Trainer, "train",
                            lambda self: self.objective(trees, self.config))
        message = command(train, monkeypatch, flag, file, "--model", trained / "init",
                      "--heldout", 1, "--warmup-steps", 0)
    else:
        arguments = ["--policy", "oracle", flag, file, "--n", 1]
        message = command(evaluation, monkeypatch, *arguments)

    assert isinstance(message, str) and "\n" not in message  # one line, and exit status 1
    assert str(file) in message and says in message
    marked = [n for n, line in enumerate(source.splitlines(), 1) if "# here" in line]
    for line in marked:
        assert f"{file} line {line}" in message
    assert "Traceback" not in capsys.readouterr().err


def test_training_tells_a_mistake_in_a_task_as_well(tmp_path, monkeypatch):
    (tmp_path / "unscored.py").write_text(MAKE)
    monkeypatch.chdir(tmp_path)
    message = command(train, monkeypatch, "--task", "unscored.py")
    assert "unscored.py: there is no function score" in message and "\n" not in message
