import dataclasses
import functools
import pathlib

import pytest

from examples.gpt2 import metrics, train
from tests.examples.small import OPTIONS, arguments


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    source = pathlib.Path(dataclasses.__file__).read_text()
    (folder / "text.py").write_text(source)
    return folder


@pytest.fixture(scope="session")
def run_of(work):
    """Trains once with the options of a name, without an interruption, and tells the folder."""

    @functools.cache
    def run_of(name):
        assert train.main(arguments(work, name, *OPTIONS[name])) == 0
        return work / name

    return run_of


@pytest.fixture
def at_step(monkeypatch):
    """Does something, once, when the losses of a step are recorded."""
    real = metrics.Metrics.record

    def at_step(chosen, action):
        actions = [action]

        def record(rows, step, *others):
            real(rows, step, *others)
            if step == chosen and actions:
                actions.pop()()

        monkeypatch.setattr(metrics.Metrics, "record", record)

    return at_step
