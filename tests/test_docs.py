"""The pages say what is there: links, files, flags and sizes; and the files of
docs/extending.md work as they stand, from a directory outside of the repository."""
import json
import re
from dataclasses import fields

import pytest
from torch.distributed.run import get_args_parser

import ask
import eval as evaluation
import train
import util
from conftest import FLAT, ROOT, SHORT, SMALL_MODEL, command
from tree import read_trees
from training import setup

README = ROOT / "README.md"
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
    rooms = "sandbox|engine|tasks|training|baselines|experiments|tests|docs"
    inside = re.findall(rf"(?<![\w/.~])((?:{rooms})/[\w./-]*\w)", text)
    modules = [f"{room}/{name}.py" for room, name in
               re.findall(r"-m (baselines|experiments)\.([a-z]\w*)", text)]
    on_top = re.findall(r"(?<![\w/.~])(\w+\.py)\b", text)
    of_the_reader = {*EXAMPLES, "my_task.py", "file.py"}
    for name in {*inside, *modules, *on_top} - of_the_reader:
        assert (ROOT / name).exists(), name


@pages
def test_flags_in_commands_exist(page):
    known = {name: {"--" + field.name.replace("_", "-") for field in fields(config)}
             for name, config in (("train", train.Config), ("eval", evaluation.EvalConfig),
                                  ("ask", ask.AskConfig))}
    for line in code(TEXTS[page]):
        for name, flags in known.items():
            _, found, arguments = line.partition(f"{name}.py ")
            if found:
                used = set(re.findall(r"(?<!\S)--[a-z][\w-]*", arguments))
                assert used <= flags | {"--help"}, line


def test_torchrun_takes_no_flag_for_the_beginning_of_one_of_its_own():
    theirs = [text for a in get_args_parser()._actions for text in a.option_strings]
    for field in fields(train.Config):
        flag = "--" + field.name.replace("_", "-")
        assert not [text for text in theirs if text.startswith(flag)]


# --- the examples -------------------------------------------------------------------------

def commands(program, word):
    """The arguments of the page's commands with this program and this word in them."""
    found = [arguments.split() for name, arguments in COMMANDS if name == program]
    return [arguments for arguments in found if word in arguments]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A directory with the files of the page, far from the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name, source in EXAMPLES.items():
        (folder / name).write_text(source)
    return folder


@pytest.fixture(scope="module")
def trained(elsewhere):
    """The example task, trained for two steps from nothing."""
    [arguments] = commands("train", "rooms.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        patch.setattr(setup, "TINY_MODEL", SMALL_MODEL)
        patch.setattr(setup, "TOKENIZER_TREES", 32)
        assert FLAT in command(train, patch, *arguments, *SHORT)
    return elsewhere / "runs" / "rooms"


def test_the_oracle_answers_the_example(elsewhere, monkeypatch, capsys):
    arguments = next(a for a in commands("eval", "rooms.py") if "oracle" in a)
    monkeypatch.chdir(elsewhere)
    assert command(evaluation, monkeypatch, *arguments, "--save", "trees.jsonl") is None
    child = read_trees("trees.jsonl")[0].root.children[0]
    assert child.code_seconds > 0
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
    [reward], [objective] = commands("train", "price.py"), commands("train", "levels.py")
    monkeypatch.chdir(elsewhere)
    (elsewhere / "kept.py").write_text("rows = []\nlog = rows.append")
    start = ["--tracker", "kept.py", "--model", short_run / "warmup", "--warmup-steps", 0]
    assert FLAT in command(train, monkeypatch, *reward, *objective, *SHORT, *start)
    rows = (elsewhere / "runs" / "levels" / "metrics.jsonl").read_text().splitlines()
    assert util.load_file("kept.py").rows == [*map(json.loads, rows)]
    row = next(row for row in map(json.loads, rows) if row["phase"] == "grpo")
    assert row["score"] - row["reward"] == pytest.approx(row["tokens"] / 10_000)
