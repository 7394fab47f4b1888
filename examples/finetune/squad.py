"""SQuAD v1.1 (Rajpurkar et al., 2016): windows over long contexts, answers, metrics."""

import collections
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from examples.finetune.tokens import Tokenizer
from examples.gpt2.command import InputError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Answer(NamedTuple):
    """What an annotator marked."""

    text: str
    start: int | None  # character of the context; None where the text does not stand at its place


class Question(NamedTuple):
    """A question, where its answer stands, and the answers that count."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


class Window(NamedTuple):
    """A part of a context behind its question, as a model sees it."""

    question: int  # place in the list of questions
    tokens: list[int]  # question, end of text, part of the context
    first: int  # the first token of the context
    spans: list[tuple[int, int]]  # the characters of each token of the context
    target: tuple[int, int]  # first and last token of the answer; the end of text if not within


def question(row: Mapping[str, Any]) -> Question:
    """A row of the dataset, as `datasets` has it.

    Raises:
      InputError: If it has another form.
    """
    try:
        context, given = row["context"], row["answers"]
        answers = [
            Answer(text, start if text and context.startswith(text, start) else None)
            for text, start in zip(given["text"], given["answer_start"], strict=True)
        ]
        return Question(row["id"], row["question"].strip(), context, tuple(answers))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"--data: {row.get('id')!r:.80} is no question of SQuAD v1.1") from None


def windows(
    questions: Sequence[Question], tokenizer: Tokenizer, length: int, stride: int
) -> list[Window]:
    """Cuts what is too long for a model into windows that overlap.

    Args:
      questions: Of which the first answer with a place is the one to learn.
      tokenizer: Its spans say which characters a token stands for.
      length: Tokens that a window may have. A question longer than half of it is cut.
      stride: Tokens of the context from the beginning of a window to that of the next.

    Returns:
      The windows of all questions in their order.
    """
    made = []
    asked_of = tokenizer.encode_all([question.question for question in questions])
    texts = list(dict.fromkeys(question.context for question in questions))  # of several questions
    contexts = dict(zip(texts, tokenizer.encode_all(texts), strict=True))
    for number, question in enumerate(questions):
        asked = asked_of[number].tokens[: length // 2]
        context = contexts[question.context]
        room = length - len(asked) - 1
        answer = _tokens_of(question, context.spans)
        begin = 0
        while True:
            end = min(begin + room, len(context.tokens))
            first = len(asked) + 1
            within = answer is not None and begin <= answer[0] and answer[1] < end
            target = (first - 1, first - 1)
            if answer is not None and within:
                target = (first + answer[0] - begin, first + answer[1] - begin)
            tokens = [*asked, tokenizer.end, *context.tokens[begin:end]]
            made.append(Window(number, tokens, first, context.spans[begin:end], target))
            if end == len(context.tokens):
                break
            begin += min(stride, room)
    return made


def _tokens_of(question: Question, spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first and the last token that share a character with the first answer with a place."""
    placed = [answer for answer in question.answers if answer.start is not None]
    if not placed:
        return None
    start, end = placed[0].start, placed[0].start + len(placed[0].text)
    sharing = [i for i, (a, b) in enumerate(spans) if a < end and b > start]
    return (sharing[0], sharing[-1]) if sharing else None


def best_answers(
    questions: Sequence[Question],
    made: Sequence[Window],
    start_logits: Iterable[np.ndarray],
    end_logits: Iterable[np.ndarray],
    longest: int = 30,
) -> dict[str, str]:
    """The text that a model marks for each question.

    Args:
      questions: All of them.
      made: Their windows.
      start_logits: Of each window, one number a token.
      end_logits: The same.
      longest: Tokens that an answer may have.

    Returns:
      By the question's id the part of its context from the token to the token, of one window, with
      the largest sum of the two logits. Empty for an empty context.
    """
    best: dict[int, tuple[float, str]] = {}
    for window, starts, ends in zip(made, start_logits, end_logits, strict=True):
        count = len(window.spans)
        if not count:
            continue
        within = slice(window.first, window.first + count)
        sums = np.asarray(starts[within], np.float64)[:, None] + np.asarray(ends[within])[None]
        allowed = np.triu(np.ones((count, count), bool)) & ~np.triu(
            np.ones((count, count), bool), longest
        )
        sums = np.where(allowed, sums, -np.inf)
        first, last = np.unravel_index(np.argmax(sums), sums.shape)
        context = questions[window.question].context
        text = context[window.spans[first][0] : window.spans[last][1]].strip()
        value = float(sums[first, last])
        if window.question not in best or value > best[window.question][0]:
            best[window.question] = value, text
    return {q.id: best[i][1] if i in best else "" for i, q in enumerate(questions)}


def score(questions: Sequence[Question], predicted: dict[str, str]) -> dict[str, float]:
    """Exact match and F1 in percent, each answer against the gold one that it suits best.

    Source: the official evaluation script of SQuAD v1.1, by whose rules answers are compared.
    """
    asked = [question for question in questions if question.answers]
    exact = f1 = 0.0
    for question in asked:
        given, golds = predicted[question.id], {answer.text for answer in question.answers}
        exact += max(normalized(given) == normalized(gold) for gold in golds)
        f1 += max(token_f1(given, gold) for gold in golds)
    return {"f1": 100 * f1 / len(asked), "exact_match": 100 * exact / len(asked)}


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(given: str, gold: str) -> float:
    """F1 of the words that two normalized answers share."""
    words, right = normalized(given).split(), normalized(gold).split()
    shared = sum((collections.Counter(words) & collections.Counter(right)).values())
    return 2 * shared / (len(words) + len(right)) if shared else 0.0
