"""What the documents show runs as it stands there."""

import doctest
import importlib
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import adapprox_jax

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pkgutil.walk_packages(adapprox_jax.__path__, "adapprox_jax.")
MODULES = [module.name for module in PACKAGE]


def test_training_loop_of_the_readme_runs_as_pasted(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    out = capsys.readouterr().out
    printed = re.findall(r"(\w+): loss ([\d.]+), state ([\d,]+) bytes", out)
    assert [name for name, *_ in printed] == ["adapprox", "adamw"]
    losses, sizes = ([float(row[i].replace(",", "")) for row in printed] for i in (1, 2))
    assert all(0.001 < loss < 0.1 for loss in losses)  # half of what it begins with, and no zero
    assert sizes[0] < 0.7 * sizes[1]


def test_the_loop_on_many_devices_runs_as_pasted():
    page = (ROOT / "docs" / "distributed.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loss, spec = re.fullmatch(r"loss ([\d.]+) (.*)\n", done.stdout).groups()
    assert 0 < float(loss) < 1.5  # 3.2 at first
    assert "fsdp" in spec


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_function_has_an_example():
    functions = [getattr(adapprox_jax, name) for name in adapprox_jax.__all__]
    for function in functions:
        if callable(function) and not isinstance(function, type):
            assert ">>>" in function.__doc__, function.__name__


def test_relative_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
