"""The policy behind a server: what it asks, what it counts, and what goes wrong."""
import asyncio
import json

import pytest

pytest.importorskip("openai")

import eval as evaluation
import ask
from baselines.api import API
from conftest import command
from config import RLMConfig
from repl import REPLError
from training.trees import collect
from stub_server import KEY, Stub
from tasks import Question
from tasks.common import block
from tree import Lost, Message, Node, Refused, Sampling

QUESTION = Question("t", "question", "What is it?", "the context")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def node(text="hello"):
    n = Node(example=["u", "a"])
    n.add(Message("system", "be brief"))
    n.add(Message("user", text))
    return n


def complete(server, text, **more):
    return asyncio.run(API(server.url, "m", **more)(node(text), 5, ()))


def test_a_request_and_its_reply():
    with Stub(says="hi there") as server:
        done = complete(server, "a \ud800 question", sampling=Sampling(0.5, 0.9))
    assert (done.text, done.ids, done.logprobs) == ("hi there", (), ())
    assert done.usage == {"prompt": 7, "sampled": 2}
    [sent] = server.log
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("m", 0.5, 5)
    assert sent["top_p"] == 0.9
    assert [(turn["role"], turn["content"]) for turn in sent["messages"]] == [
        ("system", "be brief"), ("user", "u"), ("assistant", "a"), ("user", "a ? question")]


@pytest.mark.parametrize("status, error, attempts", [
    ("413", Refused, 1), ("404", RuntimeError, 1), ("503", RuntimeError, 3)])
def test_what_lasts_is_refused_or_the_machines_failure(status, error, attempts):
    with Stub(says="hi", always=status) as server:
        with pytest.raises(error, match=status):
            complete(server, "q", max_retries=2)
    assert len(server.log) == attempts


def test_a_server_may_want_the_other_name_of_max_tokens():
    with Stub(says="hi", limit="max_completion_tokens") as server:
        policy = API(server.url, "m")
        for _ in range(2):
            assert asyncio.run(policy(node(), 5, ())).text == "hi"
    sent = [(row.get("max_tokens"), row.get("max_completion_tokens")) for row in server.log]
    assert sent == [(5, None), (None, 5), (None, 5)]


@pytest.mark.parametrize("method", ["rlm1", "direct", "compaction"])
def test_a_refused_root_counts_as_failed_and_is_asked_once(method):
    with Stub(says="hi", always="400") as server:
        policy = API(server.url, "m")
        record, _ = asyncio.run(
            evaluation.answer(method, QUESTION, policy, None, RLMConfig(), ()))
    assert len(server.log) == 1 and record["end"] == "refused"
    assert record["failed"].startswith("refused: ") and "no luck" in record["failed"]


def test_a_server_that_is_not_there_loses_the_tree(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")  # local servers want none
    with Stub(says="hi") as server:
        pass
    api = API(server.url, "m", max_retries=0)
    with pytest.raises(REPLError, match=f"(?s){server.url}.*Connection"):
        asyncio.run(collect([QUESTION], api, None, RLMConfig()))


def reply(content, prompt=1, sampled=1):
    return json.dumps({"choices": [{"message": {"content": content}}], "usage": {
        "prompt_tokens": prompt, "completion_tokens": sampled}})


@pytest.mark.parametrize("raw", [
    "{", "<html>", "null", "[]", "{}", '{"choices": []}', '{"choices": null}',
    '{"error": {"message": "busy"}}', '{"choices": [{"message": {"content": "hi"}}]}',
    '{"choices": [{"message": {"content": "hi"}}], "usage": {}}', reply("hi", None),
    *(reply("hi", sampled=n) for n in ("x", None, -5))])
def test_a_reply_that_cannot_be_used_loses_the_request(raw):
    with Stub(says="hi", raw=raw) as server, pytest.raises(Lost):
        complete(server, "q", max_retries=0)


def test_the_command_line_shows_the_turns_and_then_the_answer(
        tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("What is in the file")
    with Stub(says=block("print('\x1b[2Jseen')\nFINAL(context[:4])")) as server:
        args = "--api-model", "m", "A question?", tmp_path / "a.txt"
        assert command(ask, monkeypatch, "--api", server.url, *args) is None
    out, err = capsys.readouterr()
    assert out == "What\n" and "\x1b" not in err
    assert "tokens, which end with\nA question?" in err and "FINAL(context[:4])" in err
    with Stub(says="1", always="413") as server:
        message = command(ask, monkeypatch, "--api", server.url, *args)
    assert message.startswith("ask.py: Error code: 413")
