import dataclasses
import pathlib

import pytest


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    source = pathlib.Path(dataclasses.__file__).read_text()
    (folder / "text.py").write_text(source)
    return folder
