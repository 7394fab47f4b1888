"""The results of `loss_study` as tables and sentences in Markdown."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.loss_entries import (
    AS_MUON,
    AS_OURS,
    FASTER_ELSEWHERE,
    GROUPS,
    GROUPS_OF,
    NOISY,
    SETTINGS,
)
from benchmarks.loss_study import entries
from benchmarks.study_results import (
    ADAMW,
    ADAMW_WITH_ONE_RATE,
    FIRST,
    TEXTS,
    Results,
    Summary,
    best_adamw,
    columns_of,
    difference,
    losses_by_rate,
    lowest,
    rows_of_entries,
)


def comparison_table(results: Results) -> str:
    """Every optimizer of both groups: bytes, and on each text what it came to."""
    best = {text: best_adamw(results, text) for text in TEXTS}
    return _compared(results, [*GROUPS["ours"], *GROUPS["opponents"]], "best AdamW", best)


def directions_table(results: Results) -> str:
    """The same of those with orthogonal directions, in comparison with Muon."""
    entries = {**GROUPS["opponents"], **GROUPS["ours"]}
    labels = [x for x in entries if entries[x].optimizer in ("muon", "adapprox-muon")]
    return _compared(results, labels, "Muon", dict.fromkeys(TEXTS, "Muon"))


def measured_table(results: Results) -> str:
    """The few that a reader looks for first, without what the page of results has beside them."""
    best = {text: best_adamw(results, text) for text in TEXTS}
    return _compared(results, FIRST, "best AdamW", best, columns=2)


def _compared(
    results: Results,
    labels: Iterable[str],
    base: str,
    bases: Mapping[str, str | None],
    columns: int = 4,
) -> str:
    """A row for each label whose runs are there, the first columns of `_outcome` for each text."""
    titles = ["", "bytes per parameter"]
    for text in bases:
        of_text = [f"{text}: loss", f"minus {base} (paired)", "seeds", "peak rate"]
        titles += of_text[:columns]
    rows = []
    for label in labels:
        of_texts = {text: results[text, label] for text in bases if (text, label) in results}
        if of_texts:
            cells = [_bytes(next(iter(of_texts.values())))]
            for text, other in bases.items():
                known = text in of_texts
                of_text = _outcome(results, text, label, other) if known else [""] * 4
                cells += of_text[:columns]
            rows.append([_marked(label, *of_texts.values()), *cells])
    return _table(titles, rows)


def _marked(label: str, *of_texts: Summary) -> str:
    """A label, with a mark where the rate was looked for on the finer grid."""
    return f"{label} †" if all(one.finer for one in of_texts) else label


def _outcome(results: Results, text: str, label: str, base: str | None) -> list[str]:
    """Loss, paired difference from a base, seeds and peak rate."""
    one, less = results[text, label], "0" if label == base else ""
    if base not in (None, label) and (text, base) in results:
        mean, error, _ = difference(one, results[text, base])
        less = "" if math.isnan(mean) else _with_error(f"{mean:+.4f}", error)
    return [_with_error(_loss(one), one.error), less, str(len(one.losses)), f"{one.rate:.3g}"]


def controls_table(results: Results) -> str:
    """Loss by second moment and b2, each at its best rate; with bias correction behind it."""
    labels = [label for label in GROUPS["controls"] if "bias correction" not in label]
    moments = list(dict.fromkeys(label.rsplit(", b2 ", 1)[0] for label in labels))
    decays = list(dict.fromkeys(label.rsplit(", b2 ", 1)[1] for label in labels))

    def cell(label: str) -> str:
        one = results.get(("code", label))
        return "-" if one is None else f"{_loss(one)} ({one.rate:g})"

    def both(moment: str, decay: str) -> str:
        label = f"{moment}, b2 {decay}"
        corrected = f"{label}, bias correction"
        return (
            f"{cell(label)}; {cell(corrected)}" if corrected in GROUPS["controls"] else cell(label)
        )

    rows = [[moment, *(both(moment, decay) for decay in decays)] for moment in moments]
    return _table(["b2", *decays], rows)


def control_effects(results: Results) -> str:
    """What one change of the controls comes to, as a mean over all else that they vary."""
    losses = {
        _varied(label): results["code", label].mean
        for label in GROUPS["controls"]
        if ("code", label) in results
    }
    rows = []
    for i, base in enumerate(("rank 8", "b2 0.999", "no bias correction")):
        for level in dict.fromkeys(varied[i] for varied in losses):
            pairs = [(one, (*one[:i], base, *one[i + 1 :])) for one in losses if one[i] == level]
            known = [losses[one] - losses[other] for one, other in pairs if other in losses]
            if known and level != base:
                changes = [statistics.mean(known), min(known), max(known)]
                cells = [f"{change:+.4f}" for change in changes]
                rows.append([f"{level}, minus {base}", *cells, str(len(known))])
    return _table(["", "mean difference", "least", "most", "pairs"], rows)


def _varied(label: str) -> tuple[str, ...]:
    """Second moment, b2 and bias correction of a control."""
    moment, decay, *correction = label.split(", ")
    return moment, decay, *(correction or ["no bias correction"])


def choices_table(results: Results) -> str:
    """What each choice changes: the paired difference with the same optimizer, "unchanged"."""
    rows = []
    for label in GROUPS["choices"]:
        family, change = label.split(", ", 1)
        one, base = (results.get(("code", x)) for x in (label, f"{family}, unchanged"))
        if one is not None and base is not None:
            mean, error, seeds = difference(one, base)
            cell = "" if change == "unchanged" else _with_error(f"{mean:+.4f}", error)
            rows.append([label, _bytes(one), _loss(one), cell, str(seeds), f"{one.rate:.3g}"])
    titles = ["bytes per parameter", "loss", "difference", "seeds", "peak rate"]
    return _table(["change of one thing", *titles], rows)


def rivals_table(results: Results) -> str:
    """Opponents with no more bytes and a lower loss than one of ours, and by how much."""
    rows = []
    for text in TEXTS:
        for label in GROUPS["ours"]:
            one = results.get((text, label))
            for other in GROUPS["opponents"]:
                its = results.get((text, other))
                if one is None or its is None or its.bytes_a_parameter > one.bytes_a_parameter:
                    continue
                mean, error, _ = difference(its, one)
                if mean < 0:
                    clear = "yes" if mean < -(error or 0) else "no"
                    rows.append([text, other, label, _with_error(f"{mean:.4f}", error), clear])
    titles = ["opponent", "is below", "by (paired)", "more than its error"]
    return _table(["", *titles], rows, empty="None.")


def claims_table(results: Results) -> str:
    """Ours of few bytes, each beside the best of those that it should not end above."""
    rows = []
    for text in TEXTS:
        for mine, others in _CLAIMED:
            best = lowest(results, text, others)
            if (text, mine) in results and best is not None:
                one, other = results[text, mine], results[text, best]
                mean, error, seeds = difference(one, other)
                words = _with_error(f"{mean:+.4f}", error)
                rows.append([text, mine, _bytes(one), best, words, str(seeds)])
    titles = ["", "bytes per parameter", "minus the best of them", "difference (paired)", "seeds"]
    return _table(["", *titles], rows)


def pairs_table(results: Results) -> str:
    """Differences that a reader asks for, paired by seed, on each text."""
    return _differences(results, _PAIRS)


def direction_pairs_table(results: Results) -> str:
    """What the second moment of directions and its size are worth, and what few bits cost."""
    return _differences(results, _OF_DIRECTIONS)


def noise_table(results: Results) -> str:
    """What 4 bits change, and what their noise does alone."""
    return _differences(results, _OF_NOISE)


def _differences(results: Results, pairs: tuple[tuple[str, str], ...]) -> str:
    """Mean paired differences on each text."""
    rows = []
    for mine, other in pairs:
        cells = []
        for text in TEXTS:
            known = (text, mine) in results and (text, other) in results
            mean, error = math.nan, None
            if known:
                mean, error, _ = difference(results[text, mine], results[text, other])
            cells.append("" if math.isnan(mean) else _with_error(f"{mean:+.4f}", error))
        if any(cells):
            rows.append([f"{mine}, minus {other}", *cells])
    return _table(["", *TEXTS], rows)


# Ours of few bytes, each with the opponents that it should not end above.
_CLAIMED = (
    ("adapprox, 4 bits", ADAMW_WITH_ONE_RATE),
    (f"adapprox, 4 bits, {FASTER_ELSEWHERE}", ADAMW),
    (f"adapprox, 4 bits, b2 1 - t^-0.8, {FASTER_ELSEWHERE}", ADAMW),
    ("adapprox_muon, 4 bits", list(GROUPS["opponents"])),
)
_PAIRS = (
    ("adapprox", "AdamW, b2 0.95, clipped"),
    ("adapprox", "AdamW, b2 0.999, clipped"),
    ("adapprox", "Adafactor"),
    ("adapprox, 4 bits", "AdamW, b2 0.95, clipped"),
    ("adapprox, 4 bits", "AdamW, b2 0.999, clipped"),
    ("adapprox, 4 bits", "Adafactor, 4 bits"),
    *(
        (f"adapprox, 4 bits, {words}{FASTER_ELSEWHERE}", f"{other}, {FASTER_ELSEWHERE}")
        for words in ("", "b2 1 - t^-0.8, ")
        for other in ("AdamW, b2 0.999, clipped", "Adafactor, 4 bits")
    ),
    *(
        (f"adapprox, 4 bits, {words}{FASTER_ELSEWHERE}", "adapprox, 4 bits")
        for words in ("", "b2 1 - t^-0.8, ")
    ),
    ("Muon, clipped", "Muon"),
    (AS_OURS, "Muon"),
    ("adapprox_muon", "Muon"),
    ("adapprox_muon", AS_OURS),
    (AS_MUON, "Muon"),
    ("adapprox_muon", "NorMuon"),
    ("adapprox_muon", "AdaMuon"),
    ("adapprox_muon, 4 bits", "Muon"),
    ("adapprox_muon, 4 bits", AS_OURS),
    ("adapprox_muon, 4 bits", "NorMuon"),
    ("adapprox_muon, 4 bits", "AdaMuon"),
)
_OF_DIRECTIONS = (
    ("adapprox_muon, rank 8", "adapprox_muon"),
    ("NorMuon", "adapprox_muon"),
    ("AdaMuon", "adapprox_muon"),
    ("adapprox_muon, rank 8", "AdaMuon"),
    ("adapprox_muon, 4 bits", "adapprox_muon"),
)
_OF_AVERAGES = {
    "adapprox, no average": "adapprox",
    "adapprox_muon, no average": "adapprox_muon",
    "Adafactor, no average": "Adafactor",
    "AdamW, clipped, no average": "AdamW, b2 0.999, clipped",
}
_OF_NOISE = (
    ("adapprox, 4 bits", "adapprox"),
    ("Adafactor, 4 bits", "Adafactor"),
    (NOISY, "Adafactor"),
    (NOISY, "Adafactor, 4 bits"),
)


def rates(results: Results) -> str:
    """The best peak rates over that of the best AdamW with one rate for all, on each text."""
    lines = []
    for text in TEXTS:
        adamw = lowest(results, text, ADAMW_WITH_ONE_RATE)
        if adamw is not None:
            base = results[text, adamw].rate
            cells = [
                f"{label} {results[text, label].rate / base:.2g}"
                for label in ("adapprox", "adapprox_muon")
                if (text, label) in results
            ]
            lines.append(
                f"- {text}: {adamw}, is best at {base:.2g}; times that, {' and '.join(cells)}."
            )
    return "\n".join(lines)


def steps_to_adamw(results: Results) -> str:
    """After which validation optimizers are below the last loss of the best AdamW, on code."""
    of_code = {label: one for (text, label), one in results.items() if text == "code"}
    adamw = best_adamw(results, "code")
    rows = []
    for label in (*GROUPS["ours"], *GROUPS["opponents"]):
        curves = [curve for curve in of_code[label].curves if curve] if label in of_code else []
        if adamw not in (None, label) and curves:
            steps = [step for step, _ in curves[0]]
            means = [statistics.mean(values) for values in columns_of(curves)]
            goal = of_code[adamw].mean
            reached = [s for s, mean in zip(steps, means, strict=True) if mean <= goal]
            if reached:
                rows.append([label, f"{min(reached)} of {steps[-1]}"])
    return _table(["", f"steps to the loss of {adamw}"], rows)


def longer_table(results: Results) -> str:
    """The best with a larger model: at its short runs, where rates are tuned, and its long ones."""
    rows = []
    for label in GROUPS["larger"]:
        short, long = results.get(("larger", label)), results.get(("longer", label))
        if short is not None:
            cells = [label, _bytes(short), f"{short.rate:.3g}", _loss(short)]
            rows.append([*cells, "" if long is None else _loss(long)])
    titles = ["", "bytes per parameter", "best peak rate", "loss, short", "loss, long"]
    return _table(titles, rows)


def averages_table(results: Results) -> str:
    """Losses with and without the running average, each at its best rate."""
    rows = []
    for label, base in _OF_AVERAGES.items():
        one, other = (results.get(("code", x)) for x in (label, base))
        if one is not None and other is not None:
            mean, error, seeds = difference(one, other)
            rows.append([label, _loss(one), _with_error(f"{mean:+.4f}", error), str(seeds)])
    return _table(["", "loss", "minus that with an average", "seeds"], rows)


def runs_table(rows: list[dict[str, Any]], results: Results) -> str:
    """Of every entry the mean loss at each rate, over all seeds that ran there."""
    lines = []
    for (setting, label), of_entry in rows_of_entries(rows).items():
        one, cells = results.get((setting, label)), []
        for rate, losses in losses_by_rate(of_entry).items():
            mean = statistics.mean(losses)
            words = f"{mean:.4f}" if math.isfinite(mean) else "diverged"
            words = f"{rate:.3g}: {words} ({len(losses)})"
            cells.append(f"**{words}**" if one is not None and rate == one.rate else words)
        lines.append([label, setting, ", ".join(cells)])
    return _table(["", "where", "peak rate: loss (seeds)"], lines)


_CORES = 2  # with a run at a time on each
# The groups of which runs are counted together.
_PARTS = {
    "what is compared": ("ours", "opponents", "noise"),
    "choices": ("choices",),
    "controls": ("controls",),
    "no average": ("averages",),
    "short runs": ("larger",),
    "long runs": ("longer",),
}
_WHERE = {"larger": "with a larger model", "longer": "with a larger model"}


def effort(rows: list[dict[str, Any]], results: Results) -> str:
    """How many runs each part of the study has and how long they took, and what is still open."""
    of_entries = rows_of_entries(rows)
    counted: set[int] = set()
    lines = []

    def line(what: str, runs: list[dict[str, Any]]) -> list[str]:
        hours = sum(run["seconds"] or 0 for run in runs) / 3600
        return [what, str(len(runs)), f"{hours / _CORES:.1f}"]

    for setting, groups in GROUPS_OF.items():
        for what, of_part in _PARTS.items():
            labels = [label for group in groups if group in of_part for label in GROUPS[group]]
            asked = [row for label in labels for row in of_entries.get((setting, label), [])]
            runs = list({id(row): row for row in asked if id(row) not in counted}.values())
            counted |= set(map(id, runs))
            if runs:
                lines.append(line(f"{what}, {_WHERE.get(setting, f'on {setting}')}", runs))
    others = [row for row in rows if id(row) not in counted]
    if others:
        lines.append(line("given up, in the record alone", others))
    table = _table(["", "runs", "hours on two cores"], [*lines, line("all", rows)])
    wanted = [(where, label) for where, label, _ in entries(tuple(GROUPS), tuple(SETTINGS))]
    missing = sum(entry not in results for entry in wanted)
    left_out = f"\n\n{missing} of {len(wanted)} rows lack runs and are left out." if missing else ""
    return table + left_out


def _table(
    titles: list[str], rows: list[list[str]], empty: str = "Not all runs are there yet."
) -> str:
    if not rows:
        return empty
    return "\n".join(map(_row, [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bytes(one: Summary) -> str:
    return "" if math.isnan(one.bytes_a_parameter) else f"{one.bytes_a_parameter:.2f}"


def _loss(one: Summary) -> str:
    """The mean, or at how many of its seeds it diverged."""
    diverged = sum(not math.isfinite(loss) for loss in one.losses.values())
    return f"{diverged} of {len(one.losses)} diverged" if diverged else f"{one.mean:.4f}"


def _with_error(words: str, error: float | None) -> str:
    return words if error is None else f"{words} ± {error:.4f}"
