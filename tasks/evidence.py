"""evidence: the sentences that answer a question, in many papers.

Gold is {paper id: [sentences]}. An answer is a list of strings; a dict scores 0. The score
is the micro F1 over characters that was used for alphaXiv/multi-paper-synthetic. An echo of
the context scores 2p/(1+p), where p is the share of gold characters. Generated papers have
sentences about made-up terms, and the question asks for those about one of them.
"""
import json
import re
from dataclasses import replace

from tasks.common import (ADJECTIVES, ALONE, LETTERS, NOUNS, Example, block, field,
                          how_many, make_sentence, make_term, pick, search, strings_in,
                          word_of)

READING = """\
The answer is a list of strings: the sentences that answer the question, copied exactly, \
and nothing else; [] if there are none. They are scored by the characters that they share \
with the gold sentences."""
STRATEGY = f"""\
The context is a dict of papers, from their ids to their texts. Search the papers for the \
words of the question and for synonyms, to find the few that matter. Reading all of them \
yourself would not fit into your window. Give each of the few to a child, which searches \
it and reads the passages. Join the children's lists.
{READING}"""
EXAMPLE = Example(
    query="Find all sentences about rain in the letters of the context. Answer with a list "
          "of these sentences, copied exactly.",
    context=LETTERS,
    code=f"""\
parts = [text for text in context.values() if "rain" in text]
FINAL(rlm_query_batched(question + "{ALONE}", parts))""",
    part=LETTERS["Rome 2"],
    answer=["It has rained for nine days."])

FIELDS = ("question", "papers", "evidence")
TOKENS = 4_970  # 34 papers
PAPER_TOKENS = (66 * 7 + 122.6) / 4  # on average


def list_papers(ctx):
    """[(id, title)] of a dict of papers."""
    return [(i, t.split("\n", 1)[0].removeprefix("### PAPER: ")) for i, t in ctx.items()]


def get_paper_abstract(ctx, id):
    """The abstract of one paper of a dict of papers."""
    return ctx[id].partition("<abstract>")[2].partition("</abstract>")[0]


def extract_section(snippet, start, end):
    """The part from the first start to the next end, both included; "" if not there."""
    at = snippet.find(start)
    stop = snippet.find(end, at + len(start)) if at >= 0 else -1
    return snippet[at:stop + len(end)] if stop >= 0 else ""


TOOLS = (list_papers, get_paper_abstract, search, extract_section)


def make(rng, tokens=None, heldout=False):
    """One to five papers have one or two sentences about the term."""
    papers = how_many(rng, 4, 120, tokens, PAPER_TOKENS)
    term = make_term(rng, heldout)
    drawn = [make_term(rng, heldout) for _ in range(2 * papers)]
    others = [t for t in drawn if t != term]
    chosen = set(rng.sample(range(papers), min(papers, rng.randint(1, 5))))

    context, gold = {}, {}
    for number in range(papers):
        own = rng.sample(others, 2)
        size = rng.randint(4, 10)
        body = [make_sentence(rng, rng.choice(own)) for _ in range(size)]
        if number in chosen:
            for at in rng.sample(range(size), rng.randint(1, 2)):
                body[at] = make_sentence(rng, term)
                gold.setdefault(f"p{number}", []).append(body[at])
        title = f"{rng.choice(ADJECTIVES).title()} {rng.choice(NOUNS)}s of {own[0]}"
        abstract = make_sentence(rng, own[1])
        context[f"p{number}"] = paper_text(title, abstract, " ".join(body))
    return f'Quote all on "{term}".', context, gold


def in_words(query):
    term = re.fullmatch('Quote all on "(.*)".', query)
    if not term:  # a question from a file
        return query
    return (f'Find all sentences about "{term[1]}" in the papers of the context. Answer '
            "with a list of these sentences, copied exactly.")


def paper_text(title: str, abstract: str, text: str) -> str:
    return f"### PAPER: {title}\n<abstract>{abstract}</abstract>\n{text}"


def read(row):
    """`question`, `papers` = [{paperId, title, abstract, text}], `evidence` = [{paperId,
    selections: [{text}]}]: alphaXiv/multi-paper-synthetic.

    A selection may have other blanks than its paper. The gold is the paper's text."""
    context, gold = {}, {}
    for name in ("papers", "evidence"):
        if isinstance(row.get(name), str):  # as on the hub
            row = row | {name: json.loads(row[name])}
    for paper in field(row, "papers", list):
        title, abstract, text = (field(paper, k) for k in ("title", "abstract", "text"))
        context[field(paper, "paperId")] = paper_text(title, abstract, text)

    for entry in field(row, "evidence", list):
        name = field(entry, "paperId")
        if name not in context:
            raise ValueError(f"field 'paperId': there is no paper {name!r}")
        for selection in field(entry, "selections", list):
            words = field(selection, "text").split()
            found = re.findall(r"\s+".join(map(re.escape, words)), context[name])
            if not any(found):
                raise ValueError(f"field 'text': paper {name!r} lacks a selection")
            gold.setdefault(name, []).extend(dict.fromkeys(found))
    if not gold:
        raise ValueError("field 'evidence' is empty: nothing could score")
    return field(row, "question"), context, gold


MAX_SPANS = 2_000  # an answer with more strings scores 0: to mark them could take minutes
SHORTEST = 12  # characters of a string that counts; a shorter one has to be gold itself


def score(question, answer):
    """Micro F1 over characters: in all papers every occurrence of a returned string is
    marked. Short strings do not count: the alphabet's letters would mark everything."""
    gold_spans = {span for spans in question.answer.values() for span in spans}
    spans = {span for span in strings_in(answer)
             if len(span) >= SHORTEST or span in gold_spans}
    if len(spans) > MAX_SPANS:
        return 0.0
    both = returned = gold = 0
    for paper, text in question.context.items():
        marked, wanted = mark(text, spans), mark(text, question.answer.get(paper, ()))
        both += (int.from_bytes(marked) & int.from_bytes(wanted)).bit_count()
        returned += marked.count(1)
        gold += wanted.count(1)
    return 2 * both / (returned + gold) if both else 0.0


def right_answer(question):
    return [span for spans in question.answer.values() for span in spans]


def part_score(question, part, answer):
    """For a child that was given one paper: its F1 there. If nothing is to be found in the
    paper, an empty answer scores 1."""
    for name, text in question.context.items():
        if text == part and name in question.answer:
            gold = {name: question.answer[name]}
            return score(replace(question, context={name: text}, answer=gold), answer)
        if text == part:
            return float(answer is not None and not strings_in(answer))


def mark(text: str, spans) -> bytearray:
    """One byte per character of `text`: 1 where any span occurs."""
    marked = bytearray(len(text))
    for span in spans:
        at = text.find(span)
        while at >= 0:
            marked[at:at + len(span)] = b"\x01" * len(span)
            at = text.find(span, at + 1)
    return marked


LOOK_FIRST = 0.25  # share of scripts that print something first, and then act
QUOTE = """'Quote "WORD".'"""
HITS = 'ps = [p for p in context.values() if "WORD" in p]\n'

# Good and bad scripts with their shares. "filter" with "exact" is right, as is "search".
ROOT_SCRIPTS = {  # children get the papers with the word, or all, or one; or it searches
    "filter": (0.25, HITS + f"FINAL(rlm_query_batched({QUOTE}, ps))"),
    "all": (0.15, f"FINAL(rlm_query_batched({QUOTE}, list(context.values())))"),
    "one": (0.15, HITS + f"FINAL(rlm_query({QUOTE}, ps[0]))"),
    "search": (0.15, HITS + 'FINAL([search(p, "WORD", 0) for p in ps])'),
    "alone": (0.15, HITS + "FINAL(ps)"),
    "forget": (0.15, HITS + "print(len(ps))"),
}
CHILD_SCRIPTS = {  # the sentences with the word, the paper, its first sentence
    "exact": (0.3, 'FINAL(search(context, "WORD", 0))'),
    "whole": (0.35, "FINAL(context)"),
    "first": (0.35, 'FINAL(context.split("\\n")[-1].split(". ")[0])'),
}


def demonstrate(question, node, rng):
    name = pick(CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS, rng)
    look = rng.random() < LOOK_FIRST
    if look and not node.written:
        return block("print(context[:40])" if node.depth else "print(len(context))")
    return strategy_code(question, node, name)


def strategy_code(question, node, name: str) -> str:
    _, code = (CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS)[name]
    return block(code.replace("WORD", word_of(question)))


def oracle(question, node):
    return strategy_code(question, node, "exact" if node.depth else "filter")
