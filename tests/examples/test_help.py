"""`--help` says what options are where they are not given."""

import contextlib
import io
import re

import pytest

from examples.gpt2 import config, optimizers, train
from examples.gpt2.hints import by_case


@pytest.fixture(scope="module")
def shown():
    """The words that stand as the default of each option."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("COLUMNS", "90")  # one column of options
        with pytest.raises(SystemExit):
            train.main(["--help"])
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out.getvalue()).split())
    options = re.split(r" --(?=[\w.-]+ [\[{A-Z])", text)[1:]  # its name, its type, its words
    words = {option.split()[0]: re.search(r"\(default: ([^)]*)\)", option) for option in options}
    return {name: found.group(1) for name, found in words.items() if found}


@pytest.mark.parametrize("model", list(config.PRESETS))
def test_defaults_of_the_presets_are_shown(shown, model):
    resolved = config.resolve(config.Config(model=model))
    for name, value in vars(resolved).items():
        if getattr(config.Config(), name) is None and name not in ("data", "out", "mesh"):
            words = shown[name.replace("_", "-")]
            expected = f"{value / resolved.learning_rate:.3g} of" if "min_" in name else str(value)
            assert expected in words
            assert model in words


def test_defaults_of_the_library_are_shown(shown):
    hyper, none = optimizers.Hyperparameters(), optimizers.AdapproxOptions()
    for name in ("adapprox", "adapprox-paper"):
        for keyword, value in optimizers.keywords(name, hyper, none).items():
            if hasattr(none, keyword):
                assert str(value) in shown[f"adapprox.{keyword.replace('_', '-')}"]


def test_no_default_is_none_without_being_that(shown):
    assert {name for name, words in shown.items() if words == "None"} == {
        "adapprox.mu-dtype",
        "adapprox.factor-dtype",
    }


def test_cases_with_one_value_stand_together():
    assert by_case({"a": 1, "b": 2, "c": 2}) == "1 for a, 2 for b and c"
    assert by_case({"a": 1, "b": 1}) == "1"
