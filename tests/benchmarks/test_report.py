"""Pages are filled from records."""

import pytest

from benchmarks import report

TEXTS = {"speed": "| 1 |", "loss of a": "| 2 |"}
PAGE = "a 3.14\n<!-- speed -->\n| 0 |\n<!-- end of speed -->\nb\n"


def test_the_pages_say_what_the_records_say(capsys):
    with pytest.raises(SystemExit) as end:
        report.main(check=True)
    assert end.value.code == 0, f"run python -m benchmarks.report: {capsys.readouterr().out}"


def test_only_blocks_are_replaced_and_a_second_time_nothing():
    once, changed = report.fill(PAGE, TEXTS)
    assert once == "a 3.14\n<!-- speed -->\n| 1 |\n<!-- end of speed -->\nb\n"
    assert changed == ["speed"]
    assert report.fill(once, TEXTS) == (once, [])


def test_a_figure_that_was_typed_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "blocks", lambda: TEXTS)
    with pytest.raises(SystemExit) as end:
        report.main(check=True)
    assert end.value.code == 1
    assert capsys.readouterr().out == "README.md: speed\n"
    assert (tmp_path / "README.md").read_text() == PAGE


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (PAGE.replace("speed", "pace"), "block 'pace'; allowed: speed, loss of a"),
        (PAGE.replace("<!-- end of speed -->", ""), "a block does not end"),
    ],
)
def test_blocks_without_records_or_ends_are_named(page, words):
    with pytest.raises(SystemExit, match=words):
        report.fill(page, TEXTS)
