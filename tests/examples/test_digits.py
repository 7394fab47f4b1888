"""The Linen example, for a few epochs."""

import re

import pytest

from examples import digits


def test_learns_with_a_smaller_state(capsys):
    accuracy = digits.main(epochs=3)
    printed = capsys.readouterr().out
    assert accuracy > 0.95
    assert f"test accuracy {accuracy:.1%}" in printed
    size, adamw_size = (int(x.replace(",", "")) for x in re.findall(r"([\d,]+) bytes", printed))
    assert size < 0.6 * adamw_size
    assert "2 factored leaves" in printed


@pytest.mark.parametrize("wrong", [{"learning_rate": float("nan")}, {"batch_size": 1348}])
def test_bad_input_ends_with_one_line(wrong):
    with pytest.raises(SystemExit, match=r"^error: .*1347.*$"):
        digits.main(**wrong)
