"""Small data in the official forms of GLUE's tasks and of SQuAD."""

import json

import numpy as np

GOOD = ["warm", "bright", "funny", "clever", "rich"]
BAD = ["dull", "weak", "stale", "clumsy", "bleak"]
NOUNS = ["film", "plot", "cast", "score", "scene", "script"]
FORMS = ["the {n} is {w}", 'a "{w} {n}', "{n} , so {w} — it 's {w}", "très {w} {n} !"]
NAMES = ["Ada", "Zoë", "Ugo", "Mia", "Eve", "Leo", "Ida", "Max"]
TOWNS = ["Bonn", "Lyon", "Kyōto", "Oslo", "Rome", "Bern", "Cork", "Graz"]


def write(file, lines):
    file.write_bytes("".join(line + "\n" for line in lines).encode())  # "\r" stays as it is


def sentence(rng, good):
    """Praise or blame, with the quotes and characters that reviews have."""
    word, noun = rng.choice(GOOD if good else BAD), rng.choice(NOUNS)
    form = rng.choice(
        ["the {n} is {w}", 'a "{w} {n}', "{n} , so {w} — it 's {w}", "très {w} {n} !"]
    )
    return form.format(n=noun, w=word)


def write_sst2(folder, train=256, validation=64):
    rng = np.random.default_rng(0)
    for file, count in (("train.tsv", train), ("dev.tsv", validation)):
        labels = rng.integers(0, 2, count)
        write(folder / file, ["sentence\tlabel", *(f"{sentence(rng, x)}\t{x}" for x in labels)])
    rows = [f"{i}\t{sentence(rng, i % 2)}" for i in range(5)]
    write(folder / "test.tsv", ["index\tsentence", *rows])


def write_cola(folder, train=96, validation=24):
    """Without a header, but for the test; quotes and unicode, and a field that is empty."""
    rng = np.random.default_rng(0)
    for file, count in (("train.tsv", train), ("dev.tsv", validation)):
        rows = [(x, sentence(rng, x)) for x in rng.integers(0, 2, count)]
        write(folder / file, [f"gj04\t{x}\t{'' if x else '*'}\t{text}" for x, text in rows])
    write(
        folder / "test.tsv",
        ["index\tsentence", *(f"{i}\t{sentence(rng, i % 2)}" for i in range(5))],
    )


def write_mrpc(folder, train=96, validation=24):
    """Of Windows: a byte order mark, and lines that end in two characters."""
    rng = np.random.default_rng(0)
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    for file, count in (("train.tsv", train), ("dev.tsv", validation), ("test.tsv", 5)):
        rows = []
        for i, same in enumerate(rng.integers(0, 2, count)):
            first, second = sentence(rng, True), sentence(rng, bool(same))
            start = f"{i}" if file == "test.tsv" else f"{same}"
            rows.append(f"{start}\t{i}\t{i + 1}\t{first}\t{second}\r")
        names = header.replace("Quality", "index") if file == "test.tsv" else header
        write(folder / file, [f"{names}\r", *rows])


def write_mnli(folder, train=96, validation=24):
    """Three labels, and "-" where annotators did not agree."""
    rng = np.random.default_rng(0)
    labels = ["contradiction", "entailment", "neutral", "-"]
    for file, count in (("train.tsv", train), ("dev_matched.tsv", validation)):
        rows = []
        for i, at in enumerate(rng.integers(0, 4, count)):
            texts = f"{sentence(rng, at == 1)}\t{sentence(rng, at != 0)}"
            rows.append(f"{i}\t{i}\t{texts}\t{labels[at]}")
        write(folder / file, ["index\tpromptID\tsentence1\tsentence2\tgold_label", *rows])
    rows = [f"{i}\t{i}\t{sentence(rng, True)}\t{sentence(rng, False)}" for i in range(5)]
    write(folder / "test_matched.tsv", ["index\tpromptID\tsentence1\tsentence2", *rows])


def write_squad(folder, train=64, validation=16):
    rng = np.random.default_rng(0)
    for file, count in (("train-v1.1.json", train), ("dev-v1.1.json", validation)):
        paragraphs = []
        for i in range(count):
            names, towns = rng.permutation(NAMES)[:3], rng.permutation(TOWNS)[:3]
            context = " ".join(f"{n} is in {t}." for n, t in zip(names, towns, strict=True))
            questions = []
            for n, t in zip(names, towns, strict=True):
                answers = [{"text": t, "answer_start": context.index(f" {t}.") + 1}]
                if file.startswith("dev"):
                    answers.append(
                        {"text": f"in {t}", "answer_start": answers[0]["answer_start"] - 3}
                    )
                questions.append(
                    {"id": f"{i}-{n}", "question": f"Where is {n}?", "answers": answers}
                )
            paragraphs.append({"context": context, "qas": questions})
        content = {"version": "1.1", "data": [{"title": "places", "paragraphs": paragraphs}]}
        (folder / file).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
