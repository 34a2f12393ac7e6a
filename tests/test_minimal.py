"""minimal.py: it runs, and what could break in it without a sign. Its credits and its loss
are those of grpo.py. Its decoder is simpler than model.py's, so both losses are given that
of minimal.py."""
import random
from itertools import groupby
from unittest.mock import Mock

import pytest
import torch

import minimal
from conftest import command
from engine.packing import collate
from grpo import (LENGTH_CONSTANT, GRPOConfig, credit, make_sequences,
                  policy_loss)
from tree import Message, Node, Tree


@pytest.fixture
def model(float64):
    random.seed(0)
    torch.manual_seed(0)
    return minimal.new_model()


def writes(node, text):
    node.add(text, [*minimal.encode(text), minimal.END], 1)


def oracle(nodes):
    """Roots ask about each note from the place, and children read."""
    for node in nodes:
        text = minimal.ROOT_SCRIPTS[0].replace("PLACE", node.query.split()[-1])
        if node.depth:
            text = minimal.READ
        if len(node.messages) > 1:
            text = minimal.ANSWER.replace("KIND", minimal.kind_of(node.messages[-1][0]))
        writes(node, text)


def scripted(groups):
    """Trees of scripts, so that rewards and shapes differ within a group."""
    questions = [q for _ in range(groups) for q in [minimal.make()] * minimal.GROUP]
    return minimal.collect(questions, minimal.demonstrate)


def as_trees(model, roots, rewards):
    """The same trees for grpo.py, with the log-probabilities of the same model."""
    def convert(node, path):
        children = [convert(child, (*path, i)) for i, child in enumerate(node.children)]
        made, ids, start = Node(path, children=children), torch.tensor([node.ids]), 0
        with torch.no_grad():
            logprobs = chosen(model, node.ids).tolist()
        for written, tokens in groupby(node.mask):
            end = start + len([*tokens])
            told = tuple(logprobs[start - 1:end - 1]) if written else None
            made.add(Message("assistant" if written else "user", "",
                             tuple(ids[0, start:end].tolist()), told))
            start = end
        return made

    return [Tree({}, str(i // minimal.GROUP), convert(root, ()), reward)
            for i, (root, reward) in enumerate(zip(roots, rewards.tolist()))]


def chosen(model, ids):
    """The log-probability of each token but the first of one row, without batches."""
    logits = minimal.logits(model, torch.tensor([ids[:-1]]), {})[0]
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]


# --- the program --------------------------------------------------------------------------

@pytest.mark.parametrize("flags", [(), ("--roots-only",)])
def test_it_runs_from_nothing_to_its_last_line(flags, model, monkeypatch, capsys):
    monkeypatch.setattr(minimal, "WARMUP_STEPS", 2)
    monkeypatch.setattr(minimal, "STEPS", 2)
    monkeypatch.setattr(minimal, "TURN_TOKENS", 8)
    monkeypatch.setattr(minimal, "new_model", lambda: model)
    for name in ("collect", "sample", "policy_loss"):
        monkeypatch.setattr(minimal, name, Mock(wraps=getattr(minimal, name)))
    assert command(minimal, monkeypatch, *flags, "--seed", 1) is None
    assert {c.args[3] for c in minimal.policy_loss.call_args_list} == {bool(flags)}
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "held out: 0.00 before, 0.00 after"
    assert any(line.startswith("» ") for line in lines)

    *warmup, before, one, two, after = (c.args[0] for c in minimal.collect.call_args_list)
    trained = sum([*warmup, one, two], [])
    assert before == after and pairs(trained).isdisjoint(minimal.HELDOUT)
    assert all(pairs([question]) & minimal.HELDOUT for question in after)
    different = [*one, *two][::minimal.GROUP]
    assert one + two == [each for each in different for _ in range(minimal.GROUP)]
    assert len({repr(each) for each in different}) == 2 * minimal.QUESTIONS
    nodes = [node for call in minimal.sample.call_args_list for node in call.args[1]]
    assert all(node.ids[-1] == minimal.END or all(node.mask[-8:]) for node in nodes)
    assert all(weight.grad is None for weight in model.values())  # none is kept


def pairs(questions):
    """The two words of a note that tell and do not tell its kind, of all notes."""
    return {(word, other) for _, context, _ in questions for note in context.values()
            for word in note.split() for other in note.split()
            if word in minimal.KIND and other in minimal.OTHERS}


def test_keys_and_values_in_the_cache_change_no_logits(model):
    ids = torch.randint(len(minimal.TOKENS), (3, 20))
    cache = {}
    parts = [minimal.logits(model, ids[:, :8], cache)]
    parts += [minimal.logits(model, ids[:, i:i + 1], cache) for i in range(8, 20)]
    torch.testing.assert_close(torch.cat(parts, 1), minimal.logits(model, ids, {}),
                               rtol=0, atol=1e-10)


# --- the recursion ------------------------------------------------------------------------

def test_answers_of_children_reach_their_parent_in_order():
    questions = [minimal.make(heldout=True) for _ in range(20)]
    roots, rewards = minimal.collect(questions, oracle)
    assert rewards.tolist() == [1.0] * 20
    for root, (_, context, gold) in zip(roots, questions):
        assert [child.context for child in root.children] == [context[n] for n in gold]
        assert all(child.messages[0][0] == "Kind?" for child in root.children)


HOSTILE = [
    "while True: pass", "names = [n for n in context] * 10**9", "x = 'a' * 10**10",
    "raise BaseException", "raise SystemExit", "def f(): f()\nf()", "import os",
    "context.clear()", "().__class__", "lambda: 0", "(" * 9_000, "[" * 9_000,
    'names = [n for n in "Kind?" for n in "Kind?" for n in "Kind?"]', "\x00", "\udc80",
    "context[1] = context", "try:\n    names\nexcept:\n    names", "print(print(1))",
    "FINAL(await rlm_query_batched(context, context))",
    'await rlm_query_batched("Kind?", [])', 'rlm_query_batched("Kind?", list(context))',
    'kinds = await rlm_query_batched("Kind?", list(context))\n' * 2
    + "FINAL(dict(zip(context, kinds)))",
    "await context", "exit()", "kinds = [await rlm_query_batched(n, n) for n in context]"]


@pytest.mark.parametrize("code", HOSTILE, ids=lambda code: repr(code[:30]))
@pytest.mark.filterwarnings("ignore")
def test_hostile_code_ends_its_node_and_no_more(code):
    """It is a root's, or that of one child; the other children answer."""
    question, context, gold = minimal.make()
    names = [*gold]
    kept = dict(context)

    def write(nodes):
        for node in nodes:
            first = node.depth == 1 and node.context == context[names[0]]
            if first or node.query == "hostile":
                node.add(code, [minimal.END], 1)
            else:
                oracle([node])

    roots, rewards = minimal.collect(
        [(question, context, gold), ("hostile", context, gold)], write)
    assert rewards[0] == (len(gold) - 1) / len(gold) and rewards[1] == 0
    assert not isinstance(roots[1].answer, dict)
    assert context == kept


@pytest.mark.filterwarnings("ignore")
def test_whatever_the_vocabulary_can_say_comes_to_an_end():
    """Half of it is a script with some tokens replaced, which gets further."""
    rng = random.Random(0)

    def write(nodes):
        for node in nodes:
            ids = minimal.encode(rng.choice([*minimal.ROOT_SCRIPTS, minimal.READ]))
            for _ in range(rng.choice([1, 3, 60])):
                ids[rng.randrange(len(ids))] = rng.randrange(len(minimal.TOKENS))
            node.add(minimal.decode(ids), ids, 1)

    roots, _ = minimal.collect([minimal.make() for _ in range(300)], write)
    assert any(root.children for root in roots)
    for root in roots:
        assert len(root.children) <= minimal.CHILDREN[0]
        assert not any(child.children for child in root.children)


# --- the loss -----------------------------------------------------------------------------

@pytest.mark.parametrize("who", ["all", "roots"])
def test_loss_and_gradient_are_those_of_grpo(who, model):
    assert minimal.LENGTH_CONSTANT == LENGTH_CONSTANT
    roots, rewards = scripted(2)
    config = GRPOConfig(trained=who)
    trees = as_trees(model, roots, rewards)
    rows = make_sequences(trees, credit(trees, config), config)
    logprobs = [p for row in rows
                for p, m in zip(chosen(model, row.ids), row.mask[1:]) if m]
    loss, _ = policy_loss(torch.stack(logprobs), torch.zeros(len(logprobs)),
                          collate(rows, "cpu"), config)
    theirs = torch.autograd.grad(loss, [*model.values()])

    ours = torch.autograd.grad(
        minimal.policy_loss(model, roots, rewards, who == "roots"), [*model.values()])
    largest = max(gradient.abs().max() for gradient in theirs)
    assert largest > 0
    for one, other in zip(ours, theirs):
        assert (one - other).abs().max() < 1e-10 * largest


def test_children_are_trained_and_only_on_what_they_wrote(model):
    """The gradient of the logits: 0 where the next token was read."""
    roots, rewards = scripted(2)
    seen = []
    original = minimal.logits

    def watched(model, ids, cache):
        result = original(model, ids, cache)
        result.retain_grad()
        seen.append((ids, result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal, "logits", watched)
        minimal.policy_loss(model, roots, rewards, False).backward()
    every = [node for root in roots for node in (root, *root.children)]
    nodes = {tuple(node.ids[:-1]): node for node in every}
    children = 0
    for ids, result in seen:
        for row, gradient in zip(ids.tolist(), result.grad):
            node = nodes[tuple(row)]
            touched = gradient.abs().sum(-1) > 0
            assert not touched[torch.tensor(node.mask[1:]) == 0].any()
            children += node.depth == 1 and bool(touched.any())
    assert children > 10
