"""Arguments of a training that takes a second or two."""

SMALL_MODEL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "tokenizer": "bytes"}
SHORT_RUN = {"batch-size": 4, "steps": 6, "warmup": 2}
INTERVALS = {"eval-every": 3, "eval-batches": 2, "checkpoint-every": 3}
FACTORED = {"min-dim-size-to-factor": 16, "max-rank": 4}


def arguments(work, name, *extra):
    places = ["--data", work / "text.py", "--cache", work / "cache", "--out", work / name]
    small = {**SMALL_MODEL, **SHORT_RUN, **INTERVALS, **FACTORED}
    options = [part for name, value in small.items() for part in (f"--{name}", value)]
    return list(map(str, [*options, *places, *extra]))
