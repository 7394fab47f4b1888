"""What the documents show runs as it stands there, and what they link to is there."""

import doctest
import importlib
import pathlib
import pkgutil
import re
import textwrap

import jax
import pytest

import adapprox_jax

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pkgutil.walk_packages(adapprox_jax.__path__, "adapprox_jax.")
MODULES = [module.name for module in PACKAGE]

PATHS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PATHS}
FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def code_of(page):
    """The blocks in Python of a page as one program, with the line numbers that the page has.

    What is not meant to run is marked `py` there, which has the same colors.
    """
    code, end = "", 0
    for block in FENCED.finditer(page):
        if block[1] == "python":
            code += "\n" * page.count("\n", end, block.start(2)) + textwrap.dedent(block[2])
            end = block.end(2)
    return code


CODES = {name: code for name, page in PAGES.items() if (code := code_of(page))}


SHOWN = {
    "README.md": r"loss 0\.0\d+, 0\.\d+ bytes of state per parameter\n",
    # Older ones leave the state on a CPU's device.
    "docs/distributed.md": r"loss [01]\.\d+ .*fsdp.*\n"
    + (r"\{'pinned_host'\}\n" if jax.__version_info__ >= (0, 10) else r".*\n"),
}


@pytest.mark.parametrize("name", CODES)
def test_code_of_pages_runs_as_pasted(name, capsys):
    for module in re.findall(r"^(?:import|from) (\w+)", CODES[name], re.MULTILINE):
        pytest.importorskip(module)  # the library's own tests run without Flax and its like
    exec(compile(CODES[name], name, "exec"), {"__name__": "__main__"})
    assert re.fullmatch(SHOWN.get(name, "(?s).*"), capsys.readouterr().out)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_lead_somewhere(name):
    """`make docs` checks what is behind a #, and that the site leads to every page."""
    prose = FENCED.sub("", PAGES[name])
    for link in re.findall(r'(?:\]\(|(?:src|href)=")([^)\s"#]+)', prose):
        if not re.match(r"[a-z]+:", link):
            assert ((ROOT / name).parent / link).exists(), f"{name}: {link}"


def test_the_api_has_each_public_name_once():
    names = re.findall(r"^::: adapprox_jax\.(\S+)$", PAGES["docs/api.md"], re.MULTILINE)
    assert sorted(names) == sorted(adapprox_jax.__all__)
