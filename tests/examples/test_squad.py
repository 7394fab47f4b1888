"""SQuAD's windows, answers and metrics."""

import re

import numpy as np
import pytest

from examples.finetune import squad
from examples.finetune.squad import Answer, Question
from examples.finetune.tokens import Encoding, Tokenizer, byte_tokenizer

CONTEXT = "Zoë lives in Kyōto , near the river Kamo ."


def of_words():
    """Words are tokens; as GPT-2 has them, blanks belong to the next word."""

    def encode(text):
        spans = [word.span() for word in re.finditer(r"\s*\S+", text)]
        return Encoding([end - begin for begin, end in spans], spans)

    return Tokenizer(lambda texts: [encode(text) for text in texts], 100, 0)


def question(text):
    return Question("q", "Where is she ?", CONTEXT, (Answer(text, CONTEXT.index(text)),))


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
            assert CONTEXT[begin:end].strip() == text
        else:
            assert window.target == (window.first - 1, window.first - 1)
    assert held >= 1
    covered = {span for window in made for span in window.spans}
    assert covered == set(tokenizer.encode_all([CONTEXT])[0].spans)


def test_a_long_question_is_cut():
    asked = Question("q", "why " * 30, CONTEXT, ())
    for window in squad.windows([asked], byte_tokenizer(), 32, 8):
        assert len(window.tokens) <= 32
        assert window.first == 17


def test_the_best_span_over_all_windows_is_the_answer():
    asked = question("river Kamo")
    made = squad.windows([asked], of_words(), 9, 2)
    rng = np.random.default_rng(0)
    starts, ends = (rng.normal(size=(len(made), 9)) for _ in range(2))
    chosen = [i for i, window in enumerate(made) if window.target[0] >= window.first][-1]
    starts[chosen, made[chosen].target[0]] = ends[chosen, made[chosen].target[1]] = 9.0
    assert squad.best_answers([asked], made, starts, ends) == {"q": "river Kamo"}
    empty = Question("e", "Where ?", "", ())
    made, zeros = squad.windows([empty], of_words(), 9, 2), np.zeros((1, 9))
    assert squad.best_answers([empty], made, zeros, zeros) == {"e": ""}


def test_answers_end_after_they_begin_and_are_not_too_long():
    asked = question("river Kamo")
    made = squad.windows([asked], of_words(), 9, 2)
    starts, ends = np.zeros((2, len(made), 9))
    starts[0, made[0].first + 3] = ends[0, made[0].first] = 9.0
    assert len(squad.best_answers([asked], made, starts, ends)["q"].split()) <= 4
    one = squad.best_answers([asked], made, starts, ends, longest=1)["q"]
    assert len(one.split()) == 1


@pytest.mark.parametrize(
    ("given", "golds", "exact_match", "f1"),
    [
        ("The Rhine!", ["rhine"], 100, 1.0),
        ("in the old town", ["old town hall"], 0, 2 * (2 / 3) * (2 / 3) / (4 / 3)),
        ("a b b", ["b b b"], 0, 0.8),  # "a" is an article: 2 words of 2, 2 of 3
        ("", ["Bonn"], 0, 0.0),
        ("River Kamo", ["near the river", "the river Kamo"], 100, 1.0),
        ("river", ["near the river", "the river Kamo"], 0, 2 / 3),
    ],
)
def test_scores_take_the_best_of_several_gold_answers(given, golds, exact_match, f1):
    """Of two questions the mean; the other one is answered with its gold answer."""
    answers = tuple(Answer(gold, None) for gold in golds)
    asked = [Question("1", "", "", answers), Question("2", "", "", (Answer("Zoë", 0),))]
    scores = squad.score(asked, {"1": given, "2": "Zoë"})
    assert scores["exact_match"] == (exact_match + 100) / 2
    assert scores["f1"] == pytest.approx(100 * (f1 + 1) / 2)
