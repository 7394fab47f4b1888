"""SQuAD's windows, answers and metrics."""

import numpy as np
import pytest
import tokenizers

from examples.finetune import squad
from examples.finetune.squad import Answer, Question
from examples.finetune.tokens import (
    END_OF_TEXT,
    Encoding,
    Tokenizer,
    byte_tokenizer,
    read_tokenizer,
)

CONTEXT = "Zoë lives in Kyōto , near the river Kamo ."


def of_words():
    """Words apart by blanks, each a token."""

    def encode(text):
        spans, at = [], 0
        for word in text.split():
            at = text.index(word, at)
            spans.append((at, at + len(word)))
            at += len(word)
        return Encoding([len(text[a:b]) for a, b in spans], spans)

    return Tokenizer(lambda texts: [encode(text) for text in texts], 100, 0)


def question(text, start=None, context=CONTEXT):
    start = context.index(text) if start is None else start
    return Question("q", "Where is she ?", context, (Answer(text, start),))


def test_an_answer_that_is_not_at_its_place_has_none():
    row = {"id": "q", "question": " Where? ", "context": "In Bonn."}
    read = squad.question(row | {"answers": {"text": ["Bonn", "Bonn"], "answer_start": [2, 3]}})
    assert read == ("q", "Where?", "In Bonn.", (Answer("Bonn", None), Answer("Bonn", 3)))


@pytest.mark.parametrize(("length", "stride"), [(32, 8), (12, 3), (9, 2)])
@pytest.mark.parametrize("text", ["Zoë", "Kyōto", "near the river", "Kamo ."])
def test_an_answer_is_found_in_each_window_that_holds_it(length, stride, text):
    """At the edges of the context and of windows, too."""
    asked, tokenizer = question(text), of_words()
    made = squad.windows([asked], tokenizer, length, stride)
    held = 0
    for window in made:
        assert len(window.tokens) <= length
        assert len(window.tokens) == window.first + len(window.spans)
        first, last = window.target
        if first >= window.first:
            held += 1
            begin, end = window.spans[first - window.first][0], window.spans[last - window.first][1]
            assert CONTEXT[begin:end] == text
        else:
            assert window.target == (window.first - 1, window.first - 1)
    assert held >= 1
    covered = {span for window in made for span in window.spans}
    assert covered == set(tokenizer.encode_all([CONTEXT])[0].spans)


def test_long_contexts_in_tokens_as_gpt_2_has_them(tmp_path):
    """Bytes of characters that are several tokens, and blanks that belong to the next word."""
    towns = ["Kyōto", "Łódź", "São Paulo", "Zürich"]
    context = " ".join(f"{i} is “{towns[i % 4]}”, n° {i}." for i in range(60))
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(
        [context[:200]], vocab_size=300, special_tokens=[END_OF_TEXT], show_progress=False
    )
    model.save_model(str(tmp_path))
    tokenizer = read_tokenizer(tmp_path)
    for number in (0, 1, 29, 30, 59):
        town = towns[number % 4]
        start = context.index(f"{number} is “") + len(f"{number} is “")
        asked = Question("q", "Which ?", context, (Answer(town, start),))
        made = squad.windows([asked], tokenizer, 64, 16)
        assert len(made) > 10
        held = [window for window in made if window.target[0] >= window.first]
        assert held
        for window in held:
            first, last = (place - window.first for place in window.target)
            begin, end = window.spans[first][0], window.spans[last][1]
            assert context[begin:end].strip(" “”") == town
        best = made.index(held[-1])
        starts, ends = np.zeros((2, len(made), 64))
        starts[best, made[best].target[0]] = ends[best, made[best].target[1]] = 9
        found = squad.best_answers([asked], made, starts, ends)["q"]
        assert found.strip(" “”") == town


def test_a_long_question_is_cut_and_bytes_have_spans():
    asked = Question("q", "why " * 30, CONTEXT, (Answer("Kyōto", CONTEXT.index("Kyōto")),))
    tokenizer = byte_tokenizer()
    for window in squad.windows([asked], tokenizer, 32, 8):
        assert len(window.tokens) <= 32
        assert window.first == 17
        first, last = window.target
        if first >= window.first:
            found = bytes(window.tokens[first : last + 1]).decode()
            assert found == "Kyōto"


def test_the_best_span_over_all_windows_is_the_answer():
    asked = question("river Kamo")
    made = squad.windows([asked], of_words(), 9, 2)
    rng = np.random.default_rng(0)
    starts, ends = (rng.normal(size=(len(made), 9)) for _ in range(2))
    chosen = [i for i, window in enumerate(made) if window.target[0] >= window.first][-1]
    starts[chosen, made[chosen].target[0]] = ends[chosen, made[chosen].target[1]] = 9.0
    assert squad.best_answers([asked], made, starts, ends) == {"q": "river Kamo"}
    # An end before its start, and an answer of too many tokens, are none.
    starts, ends = np.zeros((2, len(made), 9))
    starts[0, made[0].first + 3] = ends[0, made[0].first] = 9.0
    assert len(squad.best_answers([asked], made, starts, ends)["q"].split()) <= 4
    one = squad.best_answers([asked], made, starts, ends, longest=1)["q"]
    assert len(one.split()) == 1


def test_a_question_without_context_has_an_empty_answer():
    asked = Question("q", "Where ?", "", ())
    made = squad.windows([asked], of_words(), 8, 2)
    zeros = np.zeros((len(made), 8))
    assert squad.best_answers([asked], made, zeros, zeros) == {"q": ""}


@pytest.mark.parametrize(
    ("given", "gold", "f1"),
    [
        ("The Rhine!", "rhine", 1.0),
        ("in the old town", "old town hall", 2 * (2 / 3) * (2 / 3) / (4 / 3)),
        ("Bonn", "Köln", 0.0),
        ("a b b", "b b b", 0.8),  # "a" is an article: 2 words of 2, 2 of 3
        ("", "Bonn", 0.0),
    ],
)
def test_f1_of_words(given, gold, f1):
    assert squad.token_f1(given, gold) == pytest.approx(f1)


def test_scores_take_the_best_of_several_gold_answers():
    golds = (Answer("near the river", 20), Answer("the river Kamo", None))
    asked = [Question("1", "", CONTEXT, golds), Question("2", "", CONTEXT, (Answer("Zoë", 0),))]
    scores = squad.score(asked, {"1": "River Kamo", "2": "Kamo"})
    assert scores == {"exact_match": 50.0, "f1": 50.0}
    scores = squad.score(asked, {"1": "river", "2": "Zoë lives"})
    assert scores["exact_match"] == 0.0
    assert scores["f1"] == pytest.approx(100 * (2 / 3 + 2 / 3) / 2)
