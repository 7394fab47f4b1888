"""Writes what the records of `loss_study` say into the pages: `python -m benchmarks.report`.

A page has blocks between `<!-- NAME -->` and `<!-- end of NAME -->`; each is replaced by what a
function of `study_tables` makes of the records, so that no figure of theirs is typed by hand.
Entries whose runs are not all there are left out of tables and named on the terminal. The pictures
lie beside the records.
"""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import study_pictures, study_tables
from benchmarks.loss_entries import GROUPS, SETTINGS
from benchmarks.loss_study import STUDY, entries
from benchmarks.study_results import Results, summarize
from examples.gpt2 import records

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ("docs/results.md", "docs/orthogonal.md", "docs/runs.md", "README.md")
PICTURES = ROOT / "results" / "loss"

BLOCKS: dict[str, Callable[[Results], str]] = {
    "comparison": study_tables.comparison_table,
    "directions": study_tables.directions_table,
    "moments": study_tables.direction_pairs_table,
    "measured": study_tables.measured_table,
    "controls": study_tables.controls_table,
    "effects": study_tables.control_effects,
    "choices": study_tables.choices_table,
    "rivals": study_tables.rivals_table,
    "claims": study_tables.claims_table,
    "pairs": study_tables.pairs_table,
    "rates": study_tables.rates,
    "steps": study_tables.steps_to_adamw,
    "longer": study_tables.longer_table,
    "averages": study_tables.averages_table,
    "noise": study_tables.noise_table,
}
DRAWINGS: dict[str, Callable[[Results, pathlib.Path], None]] = {
    "loss_against_bytes.png": study_pictures.draw_bytes,
    "curves.png": study_pictures.draw_curves,
    "curves_by_time.png": study_pictures.draw_times,
    "sensitivity.png": study_pictures.draw_sensitivity,
}


def blocks_of(rows: list[dict[str, Any]], results: Results) -> dict[str, str]:
    """The text of each block."""
    return {name: block(results) for name, block in BLOCKS.items()} | {
        "runs": study_tables.runs_table(rows, results),
        "effort": study_tables.effort(rows, results),
    }


def filled(page: str, blocks: Mapping[str, str]) -> tuple[str, set[str]]:
    """A page with its blocks as they should be, and which it has."""
    there = set()
    for name, text in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        whole = f"{begin}{text}\n{end}"
        page, count = re.subn(pattern, lambda _, whole=whole: whole, page, flags=re.DOTALL)
        there |= {name} if count else set()
    return page, there


def main() -> None:
    """Fills the pages, draws the pictures, and names what is not there yet."""
    rows = records.read(STUDY)
    results = summarize(rows)
    blocks = blocks_of(rows, results)
    nowhere = set(blocks)
    for name in PAGES:
        path = ROOT / name
        page, blocks_there = filled(path.read_text(), blocks)
        path.write_text(page)
        print(f"{name}: {', '.join(blocks_there)}")
        nowhere -= blocks_there
    if nowhere:
        print(f"on no page: {', '.join(sorted(nowhere))}")
    for file, drawing in DRAWINGS.items():
        drawing(results, PICTURES / file)
    missing = [
        f"{label} ({setting})"
        for setting, label, _ in entries(tuple(GROUPS), tuple(SETTINGS))
        if (setting, label) not in results
    ]
    if missing:
        print(f"not all runs are there of: {'; '.join(missing)}")


if __name__ == "__main__":
    main()
