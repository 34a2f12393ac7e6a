"""The recursion, with scripted policies and the real REPL; then the trained tiny model."""
import asyncio
import json
import random
import re
import sys
from dataclasses import replace
from queue import Queue
from threading import Thread

import pytest

import ask
import prompts
import rlm
import tasks
import util
from config import RLMConfig, load_config
from conftest import ROOT, command
from prompts import opening, parse
from repl import Limits
from rlm import grow
from tasks import Question, evidence as evidence_kind
from tasks.common import block
from tokenizer import ENDOFTEXT, Tokenizer
from training.trees import collect
from tree import Completion, Message, Node, Refused, Unscored, render


def a_question(query="the question", context="the context"):
    return Question("t", "question", query, context)


def evidence(i):
    return Question(f"t{i}", "evidence", str(i), {"p": f"gold {i}. rest"},
                    {"p": [f"gold {i}."]})


class Script:
    """A policy that says by path and turn what to say: {path: text or [texts]}; "*" for
    others.

    With a tokenizer it samples as a model does: at most max_tokens, then it is cut."""

    def __init__(self, says, tokenizer=None, cut=None):
        self.says, self.tokenizer, self.cut = says, tokenizer, cut or {}
        self.keys = []

    async def __call__(self, node, max_tokens, key):
        self.keys.append(key)
        await asyncio.sleep(0)  # siblings get to ask before this one is answered
        texts = self.says.get(node.path) or self.says["*"]
        if callable(texts):
            texts = texts(node)
        text = texts if isinstance(texts, str) else texts[node.written]
        if self.tokenizer is None:
            return Completion(text)
        ids = [*self.tokenizer.encode(text), self.tokenizer.end_of_turn]
        ids = ids[:min(max_tokens, self.cut.get(key[-1], max_tokens))]
        stop = "stop" if ids[-1] == self.tokenizer.end_of_turn else "length"
        text = self.tokenizer.decode(ids[:-1] if stop == "stop" else ids)
        logprobs = tuple(-0.1 * (i + 1) for i in range(len(ids)))
        return Completion(text, tuple(ids), logprobs, stop)


def grown(says, question=None, tokenizer=None, **config):
    policy = says if callable(says) else Script(says, tokenizer)
    return asyncio.run(
        grow(question or a_question(), policy, tokenizer, RLMConfig(**config)))


@pytest.fixture(scope="module")
def tiny():
    code = "FINAL(rlm_query_batched('x', ps))\n"
    return Tokenizer.train([prompts.FULL, evidence_kind.STRATEGY, code * 9], 700)


def seen(node):
    """What the model was shown after its messages."""
    return [t.text for t in node.messages if t.role == "user"][1:]


# --- the recursion ------------------------------------------------------------------------


def test_a_script_drives_two_levels_of_children_and_values_flow_up_as_values():
    root = grown({
        (): block("parts = rlm_query_batched('split', [context[:4], context[4:]])\n"
                  "FINAL({'parts': parts, 'kind': type(parts[0]).__name__})"),
        (0,): block("FINAL([*[rlm_query('up', c) for c in context[:3]], rlm_query('up')])"),
        (1,): [block("a = rlm_query('a', context[0])"),
               block("FINAL([a, rlm_query('b', context[1])])")],
        "*": block("FINAL(context.upper() if context != 'f' else None)"),
    }, a_question(context="abcdefgh"), max_depth=2)
    assert [n.path for n in root.walk()] == [
        (), (0,), (0, 0), (0, 1), (0, 2), (0, 3), (1,), (1, 0), (1, 1)]
    assert {(n.kind, n.end, len(n.errors)) for n in root.walk()} == {("rlm", "final", 0)}
    grand = [["A", "B", "C", "ABCD"], ["E", None]]  # without one: its parent's
    assert root.answer == {"parts": grand, "kind": "list"}
    assert [child.answer for child in root.children] == grand
    assert [child.asked_in for child in root.children[1].children] == [0, 1]
    assert root.messages[1].text.startswith("the question\n")
    assert root.children[0].messages[1].text.startswith("split\n")


@pytest.mark.parametrize("max_depth", [1, 2])
def test_at_the_depth_limit_rlm_query_is_a_plain_completion_over_the_context(max_depth):
    root = grown({"*": lambda node: f"read {node.messages[1].text}" if node.kind == "llm"
                  else block("FINAL(rlm_query('what?', [context, 'ß']))")},
                 max_depth=max_depth)
    *above, leaf = root.walk()
    assert [n.kind for n in above] == ["rlm"] * (max_depth + 1) and leaf.kind == "llm"
    context = "the context"
    for _ in range(max_depth + 1):
        context = [context, "ß"]
    prompt = f"what?\n\n{json.dumps(context, ensure_ascii=False)}"
    assert leaf.messages[1].text == prompt
    assert root.answer == leaf.answer == f"read {prompt}"


# --- tokens -------------------------------------------------------------------------------


def test_a_conversation_grows_at_its_end_and_mask_1_is_exactly_what_was_sampled(tiny):
    """The second of four turns is cut, the third ends as a text: mask 0 closes both."""
    says = [block("print(1)"), "thinking for ever and ever and ever", "text",
            block("FINAL(context)")]
    policy, rows, completions = Script({(): says}, tiny, cut={1: 5}), [], []

    async def watch(node, max_tokens, key):
        rows.append((node.ids, node.mask))
        done = await policy(node, max_tokens, key)
        if node.written == 2:
            done = replace(done, ids=(*done.ids[:-1], tiny.special[ENDOFTEXT]))
        completions.append(done)
        return done

    root = grown(watch, tokenizer=tiny)
    rows.append((root.ids, root.mask))
    assert len(completions[1].ids) == 5 and root.answer == "the context"
    for (ids, mask), (more_ids, more_mask) in zip(rows, rows[1:]):
        assert more_ids[:len(ids)] == ids and more_mask[:len(mask)] == mask
        assert len(more_ids) > len(ids)
    runs, at = [], 0
    for i in range(1, len(root.mask) + 1):
        if i == len(root.mask) or root.mask[i] != root.mask[at]:
            runs.append((root.mask[at], tuple(root.ids[at:i])))
            at = i
    assert [ids for bit, ids in runs if bit] == [c.ids for c in completions]
    users = [t.text for t in root.messages if t.role == "user"]
    assert [list(ids) for bit, ids in runs if not bit] == [
        tiny.open(root.messages[0].text, users[0], root.example),
        tiny.observe(users[1], closed=True), tiny.observe(users[2], closed=False),
        tiny.observe(users[3], closed=False)]
    assert [p for p, bit in zip(root.logprobs, root.mask) if bit] == [
        p for c in completions for p in c.logprobs]
    assert root.sampled + root.counted == sum(root.mask)


# --- parsing and executing ----------------------------------------------------------------


@pytest.mark.parametrize("text, code", [
    ("", None), ("```python\nx\n```", None), ("```repl\nFINAL(1)```", None),
    # As models write it: behind words, with other line ends, with longer fences.
    ("Code: ```repl\nx\n```", "x\n"), ("```repl\r\nx = 1\r\n```", "x = 1\r\n"),
    ("````repl\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
    ("````repl\nx\n```", None), ("```repl  \nx = ' ```'\n```", "x = ' ```'\n"),
    # An open block holds all fences that are shorter.
    ("````repl\nx\n```repl\ny\n```\n````", "x\n```repl\ny\n```\n"),
    # A thought that opens a message is no code, also where it does not end.
    ("<think>\n```repl\na\n```\n</think>\n```repl\nb\n```", "b\n"),
    ("\n<think>\n```repl\na\n```\n", None),
    ("```repl\nx = '<think>'\n```", "x = '<think>'\n"),
    ("<think>a</think>\n```repl\n'</think>'\n```", "'</think>'\n")], ids=repr)
def test_a_message_ends_with_its_first_complete_block(text, code):
    behind = "" if code is None else "\nand\n```repl\nFINAL(2)\n```"
    assert parse(text + behind) == (text, code)


def test_what_a_server_writes_behind_a_block_is_cut():
    root = grown({(): [block("x = 1") + "\nIt prints 7.\n" + block("FINAL(7)"),
                       block("FINAL(x)")]})
    assert root.answer == 1 and root.messages[2].text == block("x = 1")


@pytest.mark.parametrize("kind", ["rlm", "llm"])
def test_sampling_ends_where_the_first_block_is_complete(tiny, kind):
    """A sampler that says one token after the other of a text with two blocks. A plain
    completion is no code, so it goes on."""
    text = "Code:\n" + block("x = '`'\n```repl") + "\n" + block("FINAL(1)")

    class Sampler:
        async def generate(self, ids, max_tokens, is_over, **options):
            new = []
            for token in (*tiny.encode(text), tiny.end_of_turn):
                new.append(token)
                if is_over([*ids, *new]):
                    return Completion("", tuple(new), (0.0,) * len(new), "block")
            return Completion("", tuple(new), (0.0,) * len(new))

    node = Node(kind=kind)
    node.add(Message("user", "q", tuple(tiny.open("", block("in the prompt")))))
    done = asyncio.run(rlm.local_policy(Sampler(), tiny)(node, 99, ()))
    first = "Code:\n```repl\nx = '`'\n```"
    assert done.text == (first if kind == "rlm" else text)
    assert (done.ids[-1] == tiny.end_of_turn) == (kind == "llm")


@pytest.mark.parametrize("text", ["The answer is FINAL(4).", "```repl\nFINAL(1)\n", ""])
def test_a_message_without_a_complete_block_runs_nothing_and_counts_as_an_error(text):
    root = grown({(): [text, block("FINAL(2)")]})
    assert (root.answer, root.errors) == (2, [0])
    assert rlm.NO_BLOCK["full"] in seen(root)[0]


@pytest.mark.parametrize("last, end", [
    ("x = 1", "turns"), ("while True: pass", "timeout"),
    ("import os; os._exit(3)", "crash"), ("x = 1" + " " * 9000, "window")])
def test_a_node_that_ends_otherwise_answers_with_what_it_has_put_into_answer(last, end):
    """And its parent goes on."""
    says = [block("answer['content'] = {'best': [1]}"), block(last), block("x = 2")]
    root = grown({(): block("FINAL([rlm_query('q', 1), 7])"), "*": says},
                 limits=Limits(seconds=0.3), max_turns=3, window=1800, turn_tokens=100)
    assert root.answer == [{"best": [1]}, 7] and root.children[0].end == end
    if end == "crash":  # what the server said stays with the node
        assert "exit code 3" in root.children[0].reason and "exit code 3" in render(root)


def test_a_context_that_its_repl_cannot_hold_ends_a_child_and_a_root_is_refused():
    says = {(): block("FINAL(rlm_query('q', ['ab'] * 2_000_000))"), "*": block("FINAL(1)")}
    small = RLMConfig(limits=Limits(memory_mb=150))
    asked = [evidence(0), replace(evidence(0), context={"p": "a" * (50 << 20)})]
    tree, lost = asyncio.run(collect(
        asked, Script(says), None, small, reward=lambda *given: 1.0))
    child, = tree.root.children
    assert child.end == "memory" and "memory_mb 150" in child.reason
    assert tree.root.answer.startswith("Error") and "memory" in tree.root.answer
    assert lost.failed.startswith("refused") and "memory" in lost.failed


# --- budgets ------------------------------------------------------------------------------


def test_the_node_budget_is_the_trees_and_a_batch_gets_exactly_its_results_in_order():
    root = grown({(): block("a = rlm_query_batched('q', list('abcde'))\n"
                            "b = llm_query('late')\nFINAL([a, b])"),
                  "*": block("FINAL(context * 2)")}, max_nodes=4)
    values, late = root.answer
    assert len(values) == 5 and values[:3] == ["aa", "bb", "cc"]
    for error in (*values[3:], late):
        assert error == "Error: the tree's budget of 4 nodes is used up"


@pytest.mark.parametrize("most, tokens", [(9, 300), (9, 10 ** 6), (60, 300)])
def test_only_what_is_used_refuses_a_message_in_whatever_order_they_are_sampled(
        tiny, most, tokens):
    """Forty children may write 60 tokens each, write `most`, and then a last one does."""
    answers = set()
    for schedule in map(random.Random, range(5)):
        reserved, spent = 0, 0

        async def policy(node, max_tokens, key):
            nonlocal reserved, spent
            reserved += max_tokens
            assert reserved + spent <= tokens
            await asyncio.sleep(schedule.random() / 1000)
            text = "word " * random.Random(repr(key)).randint(most // 3, most)
            if not node.path:
                text = block("FINAL(llm_query_batched(['x'] * 40) + [llm_query('x')])")
            ids = tuple(tiny.message(text)[:max_tokens])
            reserved, spent = reserved - max_tokens, spent + len(ids)
            return Completion(text, ids, (0.0,) * len(ids))

        config = RLMConfig(turn_tokens=60, tree_tokens=tokens, max_turns=1, max_nodes=50)
        root = asyncio.run(grow(a_question(), policy, tiny, config))
        errors = [text for text in root.answer if text.startswith("Error")]
        assert len(root.answer) == 41 and all("budget of tokens" in text for text in errors)
        assert not errors and spent < tokens or len(errors) > 20 and spent == tokens
        refused = [node for node in root.children if node.end == "budget"]
        assert len(refused) == len(errors) and not any(node.sampled for node in refused)
        answers.add(tuple(root.answer))
    assert len(answers) == 1 or most == 60


def test_the_trees_seconds_in_code_end_nodes_with_budget(monkeypatch):
    """Each block counts as two."""
    execute, x = rlm.REPL.execute, block("x = 1")

    async def timed(*args, **more):
        return replace(await execute(*args, **more), seconds=2.0)

    monkeypatch.setattr(rlm.REPL, "execute", timed)
    says = {(): [x, block("FINAL(rlm_query('x'))")], "*": [x, x, block("FINAL('in')")]}
    assert grown(says, tree_seconds=7.0).answer == "in"
    root = grown(says, tree_seconds=6.0)
    assert root.answer.startswith("Error") and "time is used up" in root.answer
    assert (root.end, root.children[0].end) == ("final", "budget")


def test_a_prompt_that_does_not_fit_is_an_error_in_its_place(tiny):
    root = grown({(): block("FINAL(llm_query_batched(['a', 'b ' * 5000, 'c']) + "
                            "[rlm_query('d ' * 5000, 'x')])"), "*": "fine"},
                 tokenizer=tiny, window=2000)
    assert root.answer[0] == root.answer[2] == "fine"
    for error in (root.answer[1], root.answer[3]):
        assert error.startswith("Error") and "window holds 2000" in error
    assert root.end == "final" and [n.path for n in root.children] == [(0,), (1,)]

    root = grown({}, a_question("why " * 3000), tokenizer=tiny, window=2000)
    assert (root.end, root.answer, root.messages) == ("window", None, [])


@pytest.mark.parametrize("with_tokens", [True, False])
def test_an_observation_that_does_not_fit_is_cut_so_that_a_message_fits(tiny, with_tokens):
    """An error is shown, however much was printed."""
    tokenizer = tiny if with_tokens else None
    says = {(): [block("print('word ' * 1500); 1 / 0"), block("FINAL(1)")]}
    most = 1
    for window in (1600, 1900, 2200):
        root = grown(says, tokenizer=tokenizer, window=window, turn_tokens=100)
        [shown] = seen(root)
        kept, missing = re.search(r"^(.*)\n... \[(\d+) characters cut: the window is "
                                  r"full\].*ZeroDiv", shown, re.DOTALL).groups()
        assert root.answer == 1 and len(kept) + int(missing) == 7500 and root.errors == [0]
        assert kept == ("word " * 1500)[:len(kept)] and len(kept) >= most > 0
        most = len(kept)
        texts = [*root.example, *(message.text for message in root.messages)]
        used = len(root.ids) if with_tokens else sum(len(text) // 4 for text in texts)
        assert used < window - 100  # a message of 100 tokens still fits


async def picky(node, max_tokens, key):
    """Refuses what has BAD in it."""
    if "BAD" in node.messages[-1].text:
        raise Refused("too long for the server")
    code = "FINAL([[*map(llm_query, ['good', 'BAD', 'good'])], rlm_query('BAD')])"
    return Completion(block(code) if not node.path else "fine")


def test_a_refused_call_is_an_error_string_and_the_budget_gets_its_tokens_back():
    root = grown(picky, tree_tokens=100, turn_tokens=100)
    (one, two, three), four = root.answer
    assert one == three == "fine" and two == four
    assert two == ("Error: the call ended without an answer (the model's server refuses "
                   "the request)")
    assert [n.end for n in root.children] == ["text", "refused", "text", "refused"]
    asked = [evidence(0), a_question("BAD")]
    _, lost = asyncio.run(collect(asked, picky, None, RLMConfig()))
    assert lost.failed == "refused: too long for the server"


def test_a_refusal_in_a_later_turn_ends_the_root_and_is_scored():
    async def policy(node, max_tokens, key):
        if node.written:
            raise Refused("too long by now")
        return Completion(block("answer['content'] = ['gold 0.']"))

    (tree,) = asyncio.run(collect([evidence(0)], policy, None, RLMConfig()))
    assert (tree.reward, tree.failed, tree.root.end) == (1.0, "", "refused")


@pytest.mark.parametrize("gold, query, scores", [
    (None, 'Quote all on "one".', [None, None]),
    ({"a": ["one"]}, evidence_kind.in_words('Quote all on "one".'), [1.0, 0.0])])
def test_a_users_own_question_has_the_prompts_of_a_task_and_no_scores(gold, query, scores):
    """A generated one is put into words, and its children are scored on their parts."""
    own = Question("q", "evidence", 'Quote all on "one".', {"a": "one", "b": "two"}, gold)
    root = grown({(): block("FINAL(rlm_query_batched(question, list(context.values())))"),
                 "*": block("FINAL(context)")}, own)
    assert root.answer == ["one", "two"] and root.messages[1].text.startswith(f"{query}\n")
    assert evidence_kind.STRATEGY in root.messages[0].text
    assert [child.score for child in root.children] == scores


# --- many trees ---------------------------------------------------------------------------

def test_a_lost_tree_is_marked_and_the_others_go_on():
    """It is grown twice; the last of them is lost but once."""
    cancelled, asleep, again = [], [], []

    async def policy(node, max_tokens, key):
        if key[-3] == 3 and not node.path:
            again.append(key)
            if len(again) == 1:
                raise OSError("once")
        if not node.path:
            ask = f"rlm_query_batched('gold {key[-3]}.', ['a', 'b', 'c'])"
            return Completion(block(f"FINAL({ask})"))
        if key[-3] == 1:
            if node.path == (2,):
                while len(asleep) < 2 + len(cancelled):  # the other two may start later
                    await asyncio.sleep(0.01)
                raise OSError("the sampler is gone")
            try:
                asleep.append(node.path)
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(node.path)
                raise
        return Completion(block("FINAL('gold %d.')" % key[-3]))

    async def go():
        done = await collect([evidence(i) for i in range(4)], policy, None, RLMConfig())
        assert len(asyncio.all_tasks()) == 1  # this one: nothing is left behind
        return done

    done = asyncio.run(go())
    assert [(r.reward, r.failed, r.group) for r in done] == [
        (1.0, "", "0"), (0.0, "OSError('the sampler is gone')", "1"), (1.0, "", "2"),
        (1.0, "", "3")]
    assert [r.question.id for r in done] == ["t0", "t1", "t2", "t3"]
    assert again == [(3, (), 0)] * 2  # with the same key
    assert sorted(cancelled) == [(0,), (0,), (1,), (1,)]  # both times


def test_a_bug_in_a_policy_ends_all():
    async def policy(node, max_tokens, key):
        raise KeyError("no memory")

    with pytest.raises(KeyError, match="no memory"):
        asyncio.run(collect([evidence(0), evidence(1)], policy, None, RLMConfig()))
    assert asyncio.run(collect([], policy, None, RLMConfig())) == []


def test_a_score_that_could_not_be_had_fails_a_tree_and_a_bug_in_it_ends_all():
    def scored(error):
        async def score(question, answer, root):
            if question.id == "t1":
                raise error
            return 0.5

        policy = Script({"*": block("FINAL(1)")})
        return asyncio.run(collect([evidence(0), evidence(1)], policy, None, RLMConfig(),
                                   reward=score))

    assert [(r.reward, r.failed, r.root.answer) for r in scored(Unscored("gone"))] == [
        (0.5, "", 1), (0.0, "Unscored('gone')", 1)]
    with pytest.raises(KeyError):
        scored(KeyError("a bug"))


def test_every_completion_has_a_key_of_its_own():
    policy = Script({(): [block("x = rlm_query_batched('q', [1, 2])"), block("FINAL(x)")],
                     (0,): block("FINAL(llm_query_batched(['a', 'b']))"),
                     "*": [block("x = 1"), block("FINAL(1)")]})
    questions = [evidence(0)] * 3  # one question: only the key tells its trees apart
    done = asyncio.run(collect(questions, policy, None, RLMConfig(), key=(7, "step")))
    expected = [(7, "step", number, node.path, turn) for number, r in enumerate(done)
                for node in r.root.walk() for turn in range(node.written)]
    assert sorted(policy.keys) == sorted(expected)
    assert len(set(policy.keys)) == len(policy.keys) == 3 * (2 + 1 + 2 + 2)


# --- configuration and prompts ------------------------------------------------------------


def test_a_configuration_survives_its_file_and_the_window_is_what_the_model_has(tmp_path):
    assert load_config(str(tmp_path), 512) == RLMConfig(window=512)
    config = RLMConfig(3, 4, 5, 600, 7, 8000, 9.5, "brief", "requests",
                       Limits(seconds=1.5, output_chars=77))
    config.save(str(tmp_path / "rlm.json"))
    assert load_config(str(tmp_path)) == config
    assert load_config(str(tmp_path), 512).window == 512


def test_a_file_changes_some_fields_and_a_wrong_one_is_named(tmp_path):
    RLMConfig(max_turns=3, limits=Limits(seconds=1.5)).save(tmp_path / "rlm.json")
    more = tmp_path / "more.json"
    more.write_text('{"tree_seconds": 7, "limits": {"output_chars": 9}}')
    changed = load_config(str(tmp_path), rlm_file=str(more))
    assert changed == RLMConfig(max_turns=3, tree_seconds=7,
                                limits=Limits(seconds=1.5, output_chars=9))
    for text in ('{"turns": 2}', '{"max_turns": "2"}', '{"limits": {"second": 1}}',
                 '{"max_turns": true}', '{"max_turns": -1}', '{"tree_seconds": NaN}',
                 '{"style": "breif"}', "[1]"):
        more.write_text(text)
        with pytest.raises(ValueError, match="more.json: "):
            load_config(str(tmp_path), rlm_file=str(more))


@pytest.mark.parametrize("path", [(), (0,)])
def test_the_full_prompt_is_filled_in_and_names_what_the_node_may_use(path):
    config = RLMConfig(max_depth=1, window=2000, max_nodes=38)
    system, _, user = opening(Node(path), "the {question}", {"a": "bb", "c": "d"},
                              evidence_kind, config)
    assert not re.search(r"[{}]", system)
    tools = [tool.__name__ for tool in evidence_kind.TOOLS]
    for name in ("context", "question", "FINAL", *tools):
        assert re.search(rf"\b{name}\b", system), name
    assert evidence_kind.READING in system and "the {question}" in user
    for text in ("rlm_query_batched", "a child with a REPL", "37", evidence_kind.STRATEGY):
        assert (text in system) == (path == ())
    assert parse(system)[1] == "print(context)\n"


def test_an_observation_repeats_a_questions_start_and_names_the_last_message():
    query = "".join(map(str, range(300)))
    said = [prompts.observation("1", Node(messages=[Message("assistant", "")] * n), query,
                                RLMConfig(max_turns=4)) for n in (1, 2, 3)]
    assert [prompts.LAST in text for text in said] == [False, False, True]
    assert all(query[:prompts.REPEATED] + " …" in text for text in said)


@pytest.mark.parametrize("name", tasks.NAMES)
def test_an_example_is_what_a_perfect_policy_would_say_and_see(name):
    """A tree that grows from the example's own messages has no error, and its turns are
    those that prompts show."""
    example = getattr(tasks.load(name), "EXAMPLE", prompts.EXAMPLE)
    asks, reads = (prompts.messages_of(example, asks) for asks in (True, False))

    def child(node):
        return [reads[1], reads[3]][node.written]

    root = grown({(): asks[1], "*": child},
                 Question("t", "question", example.query, example.context))
    assert root.end == "final" and root.answer and not root.errors
    assert [message.text for message in root.messages[1:]] == asks
    assert reads in [[message.text for message in node.messages[1:]]
                     for node in root.children]
    assert {str(node.answer) for node in root.children} == {str(example.answer)}


# --- a trained model, and the command line ------------------------------------------------


def test_the_same_seed_gives_the_same_answer_in_and_out_of_an_event_loop(monkeypatch):
    """As in a notebook, where a loop runs, and in a web server, which has threads."""
    asked = tasks.make(tasks.load("requests"), random.Random(3), heldout=True)
    trained = ask.RLM(ROOT / "assets" / "tiny")

    async def notebook():
        return await asyncio.gather(
            *(trained.acompletion(asked.query, asked.context) for _ in range(2)))

    outside = trained.completion(asked.query, asked.context)
    assert outside == asked.answer == trained.trace.answer
    assert asyncio.run(notebook()) == [outside] * 2
    answers = Queue()
    for _ in range(3):
        Thread(daemon=True, target=lambda: answers.put(
            trained.completion(asked.query, asked.context))).start()
    assert [answers.get(timeout=60) for _ in range(3)] == [outside] * 3

    async def grown(question, *_):
        return Node(answer=question.context)

    monkeypatch.setattr(ask, "grow", grown)
    assert trained.completion("Which?", {7: "a"}) == {"7": "a"}  # as the REPL has it


def test_the_demo_shows_its_turns_then_answer_gold_and_score(monkeypatch, capsys):
    assert command(ask, monkeypatch, "--demo") is None
    out, err = capsys.readouterr()
    answer, gold, score = out.splitlines()
    assert (gold, score) == (f"gold: {answer}", "score: 1.00")
    assert len(set(re.findall(r"^--- (rlm \d+) wrote$", err, re.MULTILINE))) == (
        answer.count(":")) and "--- root reads " in err


@pytest.mark.parametrize("argv, question, files", [
    (["q?", "--seed", "3", "a", "b"], "q?", ["a", "b"]),
    (["--seed", "3", "--", "-5?", "--c"], "-5?", ["--c"])])
def test_flags_stand_before_between_and_behind_words(argv, question, files, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ask.py", *argv])
    flags = util.read_flags("", ask.AskConfig, {"": ask.Asked, " ": ask.Answering})
    assert (flags.question, flags.files, flags.seed) == (question, files, 3)
