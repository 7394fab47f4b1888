"""Flags words and long sentences in prose: `python -m tools.prose`, part of `make lint`.

Words in README.md, CHANGELOG.md, docs/*.md and the docstrings of adapprox_jax; long sentences in
all but CHANGELOG.md. Code, tables, headings, addresses and generated blocks do not count.
"""

import ast
import itertools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = re.compile(r"\b(elsewhere|in\s+place\s+of|of\s+its\s+own|with\s+which\s+it)\b", re.I)
MOST_WORDS = 30
NO_PROSE = (
    re.compile(r"^<!-- (?!end of)(.+?) -->$.*?^<!-- end of \1 -->$", re.M | re.S),  # generated
    re.compile(r"^ *(```+).*?^ *\1 *$", re.M | re.S),
    re.compile(r"^( {4}|\||#|:::|!!!|===).*$", re.M),
    re.compile(r"(?<=\])\([^)]*\)"),
)
CODE = re.compile(r"`[^`]*`|\$[^$]+\$")
EXAMPLE = re.compile(r"^ *(?:>>>|\.\.\.) .*$", re.M)
ITEM = re.compile(r"\n\s*\n|^\s*(?:[-*>]|\d+\.|\w+:)\s", re.M)  # a paragraph or an item begins
SENTENCE = re.compile(r"\S.*?(?:[.!?][\")*_]*(?=\s)|\Z)", re.S)


def prose(markdown):
    """The prose of a page, its lines where they were; code in a line is one word."""
    for pattern in NO_PROSE:
        markdown = pattern.sub(lambda match: "\n" * match[0].count("\n"), markdown)
    return CODE.sub(lambda match: "code" + "\n" * match[0].count("\n"), markdown)


def docstrings(source):
    """The docstrings of a module, their lines where they were."""
    lines = [""] * (source.count("\n") + 2)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            string = node.body[0].value
            lines[string.lineno - 1 : string.end_lineno] = string.value.split("\n")
    return CODE.sub("code", EXAMPLE.sub("", "\n".join(lines)))


def findings(path):
    """Lines that say where something is in a file, and what."""
    text = (docstrings if path.suffix == ".py" else prose)(path.read_text())
    found = [(match.start(), f"'{' '.join(match[0].split())}'") for match in WORDS.finditer(text)]
    starts = [0, *(match.end() for match in ITEM.finditer(text)), len(text)]
    for start, end in itertools.pairwise(starts) if path.suffix == ".md" else ():
        for sentence in SENTENCE.finditer(text[start:end].rstrip()):
            count = len(re.findall(r"\S*\w\S*", sentence[0]))
            if count > MOST_WORDS and path.name != "CHANGELOG.md":
                found.append((start + sentence.start(), f"a sentence of {count} words"))
    name = path.relative_to(ROOT)
    return [f"{name}:{text.count(chr(10), 0, at) + 1}: {what}" for at, what in sorted(found)]


if __name__ == "__main__":
    files = ("README.md", "CHANGELOG.md", "docs/*.md", "adapprox_jax/**/*.py")
    found = [line for name in files for path in sorted(ROOT.glob(name)) for line in findings(path)]
    print("\n".join(found) or "prose: nothing found")
    sys.exit(bool(found))
