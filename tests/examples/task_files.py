"""Small data of GLUE's tasks and of SQuAD, with the splits and columns of Hugging Face's hub."""

import json

import numpy as np

GOOD = ["warm", "bright", "funny", "clever", "rich"]
BAD = ["dull", "weak", "stale", "clumsy", "bleak"]
NOUNS = ["film", "plot", "cast", "score", "scene", "script"]
FORMS = ["the {n} is {w}", 'a "{w} {n}', "{n} , so {w} — it 's {w}", "très {w} {n} !"]
NAMES = ["Ada", "Zoë", "Ugo", "Mia", "Eve", "Leo", "Ida", "Max"]
TOWNS = ["Bonn", "Lyon", "Kyōto", "Oslo", "Rome", "Bern", "Cork", "Graz"]


def write(folder, **splits):
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def sentence(rng, good):
    """Praise or blame, with the quotes and characters that reviews have."""
    word, noun = rng.choice(GOOD if good else BAD), rng.choice(NOUNS)
    return rng.choice(FORMS).format(n=noun, w=word)


def write_glue(folder, columns=("sentence",), labels=2, suffix="", train=256, validation=64):
    """The first sentence is praise if the label is not 0; of the test labels are hidden."""
    rng = np.random.default_rng(0)

    def rows(count, hidden=False):
        for i in range(count):
            label = int(rng.integers(0, labels))
            texts = {column: sentence(rng, label > 0) for column in columns}
            yield {**texts, "label": -1 if hidden else label, "idx": i}

    splits = {"train": rows(train), f"validation{suffix}": rows(validation)}
    write(folder, **splits, **{f"test{suffix}": rows(5, hidden=True)})


def write_squad(folder, train=64, validation=16):
    rng = np.random.default_rng(0)

    def rows(count):
        for i in range(count):
            names, towns = rng.permutation(NAMES)[:3], rng.permutation(TOWNS)[:3]
            context = " ".join(f"{n} is in {t}." for n, t in zip(names, towns, strict=True))
            for n, t in zip(names, towns, strict=True):
                start = context.index(f" {t}.") + 1
                answers = {"text": [t, f"in {t}"], "answer_start": [start, start - 3]}
                yield {
                    "id": f"{i}-{n}",
                    "question": f"Where is {n}?",
                    "context": context,
                    "answers": answers,
                }

    write(folder, train=rows(train), validation=rows(validation))
