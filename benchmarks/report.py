"""Writes the tables of the pages from the records: `python -m benchmarks.report`.

A page has blocks between `<!-- NAME -->` and `<!-- end of NAME -->`. The text of each block is made
from the records in `results/`. With `--check` nothing is written, and a page that differs from its
records is named.
"""

import contextlib
import io
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import get_args

import tyro

from adapprox_jax import memory
from benchmarks import (
    compile_times,
    device_program,
    loss_tables,
    memory_table,
    records,
    scale,
    singular_values,
    srsi,
    training_memory,
    update_speed,
)
from examples.gpt2.optimizers import Weights

ROOT = records.RESULTS.parent
PICTURES = records.RESULTS / "loss"

BEST_ADAMW = "AdamW b2 0.999, clipped, other parameters x8"  # of the study
_X2 = "other parameters x2"
_MUON_X2 = f"Muon b1 0.8, {_X2}"
TEXTS = ("code", "prose")
# What is shown first, by the name there: the contender, and where the picture has the name, in
# points beside the dot.
SHOWN = {
    "AdamW": ("AdamW with Nesterov, b2 0.999, clipped", (-4, -14)),
    "Adafactor, 4 bits": ("Adafactor 4 bits with Nesterov", (16, -15)),
    "Muon": (f"{_MUON_X2}, q k v separate", (10, 8)),
    "NorMuon": ("NorMuon", (0, -15)),
    "adapprox": ("adapprox", (0, 8)),
    "adapprox, 4 bits": ("adapprox 4 bits", (14, 8)),
    "adapprox_muon": ("adapprox_muon, b1 by rate", (-50, 8)),
    "adapprox_muon, 8 bits": ("adapprox_muon 8 bits, b1 by rate", (40, -15)),
    "adapprox_muon, 4 bits": ("adapprox_muon 4 bits, b1 by rate", (30, 8)),
}
DIRECTIONS = (
    *(f"adapprox_muon{bits}, b1 by rate" for bits in ("", " 8 bits", " 4 bits")),
    "adapprox_muon 4 bits",
    "adapprox_muon 4 bits, b1 0.9, other parameters x2",
    "NorMuon",
    f"{_MUON_X2}, q k v separate",
)
# The first rates of the grid by factors of 2 that single changes of settings were scanned on.
_FIRST_RATES = {"adapprox": 2.4e-3, "adapprox_muon": 1.2e-2}
WEIGHTS = ("AdamW with Nesterov, b2 0.999, clipped", "adapprox_muon 4 bits, b1 by rate")
# How long the memory is to be, at three lengths of runs.
MEMORIES = (
    *("adapprox_muon, b1 by rate", "adapprox_muon 4 bits, b1 by rate"),
    *(
        f"{name}, b1 {b1:g}, other parameters x2"
        for name in ("adapprox_muon", "adapprox_muon 4 bits", "NorMuon", "Muon, q k v separate")
        for b1 in (0.8, 0.9, 0.95)
    ),
)
LENGTHS = (
    *("small, code", "small, code, 1600 steps", "small, code, 6400 steps"),
    "small, prose, 1600 steps",
)
LONGER = (
    *("AdamW with Nesterov, b2 0.999, clipped", "adapprox"),
    *(
        "Muon, q k v separate, b1 0.95, other parameters x2",
        "NorMuon, b1 0.95, other parameters x2",
    ),
    *("adapprox_muon, b1 by rate", "adapprox_muon 4 bits, b1 by rate"),
)
LARGER = (
    *("adapprox_muon", "adapprox_muon b1 0.95", "adapprox", "Muon"),
    *("AdamW b2 0.95, clipped", "AdamW b2 0.999, clipped"),
)
# Runs of the defaults of today, whose last one is compared with.
SMALL = ("small, code", "small, prose")
MOMENTUM = (
    *("adapprox", "adapprox without Nesterov"),
    *("AdamW with Nesterov, b2 0.999, clipped", "AdamW b2 0.999, clipped"),
)
OF_1600_STEPS = ("small, code, 1600 steps", "small, prose, 1600 steps")
DECAYS = ("adapprox_muon, b1 by rate, only hidden matrices decay", "adapprox_muon, b1 by rate")
_AS_MUON = "adapprox_muon b1 0.95, one rate"
LAYOUTS = (
    *("adapprox_muon, b1 by rate", "adapprox_muon 4 bits, b1 by rate"),
    "Muon, q k v separate, b1 0.8, other parameters x2",
    *(_AS_MUON, f"{_AS_MUON}, qkv whole", f"{_AS_MUON}, by heads"),
    *(f"{_AS_MUON}, others without Nesterov", "Muon defaults", "Muon defaults, q k v separate"),
)
BITS = (_AS_MUON, f"{_AS_MUON}, 5 bits", f"{_AS_MUON}, 4 bits")
# The rate of each over that of AdamW.
RULES = {"adapprox": 1.4142, "adapprox_muon 4 bits, b1 by rate": 5.0}
BASE_OF_RATES = "AdamW with Nesterov, b2 0.999, clipped"
ON_THE_WAY = (10, 20, 40, 100, 400)  # steps


def blocks() -> dict[str, str]:
    """The text of every block."""
    results = loss_tables.summarize(loss_tables.read(loss_tables.STUDY))
    names = sorted({name for _, name in results})
    on_both = [name for name in names if all((text, name) in results for text in TEXTS)]
    states = _read("memory/memory_table.json")
    of_defaults = loss_tables.read(PICTURES / "defaults.jsonl")
    defaults = loss_tables.summarize(of_defaults)
    found = {
        "at a glance": _at_a_glance(defaults, states["ours"]),
        "shown": _shown(defaults, states["ours"]),
        "changes": _changes(),
        "compared": loss_tables.comparison(results, on_both, BEST_ADAMW, TEXTS),
        "calculator": _calculator("llama3-8b"),
        "calculator, in short": _calculator("llama3-8b", without=(", 8 bits", "--help", "Of dev")),
        "paper's memory": memory_table.paper_table(states["records"]),
        "memory": memory_table.our_table(states["ours"]),
        **{f"device program, {name}": _programs(name) for name in ("h100", "v5e", "v6e")},
        "compile times": compile_times.table(_read("speed/compile_times_cpu.json")["seconds"]),
        "srsi": srsi.table(_read("speed/srsi_cpu.json")["records"]),
        "singular values": singular_values.table(_read("loss/singular_values.json")["steps"]),
        "fine-tuning": _fine_tuning(),
        "split programs": _split_programs(),
        "frameworks": _frameworks(),
        "directions": loss_tables.comparison(defaults, DIRECTIONS, DIRECTIONS[-1], TEXTS),
        "momentum": loss_tables.comparison(defaults, MOMENTUM, MOMENTUM[-1], SMALL),
        "bits": loss_tables.comparison(defaults, BITS, BITS[0], SMALL),
        "layouts": loss_tables.comparison(defaults, LAYOUTS, LAYOUTS[-1], SMALL),
        "lengths": loss_tables.comparison(defaults, MEMORIES, MEMORIES[-2], LENGTHS),
        "longer": loss_tables.comparison(defaults, LONGER, LONGER[0], LENGTHS[2:3]),
        "larger": loss_tables.comparison(results, LARGER, "Muon", ("larger", "longer")),
        "decays": loss_tables.comparison(defaults, DECAYS, DECAYS[-1], OF_1600_STEPS),
        "first minutes": _first_minutes(defaults, of_defaults),
        "rates": _rates(defaults, of_defaults),
    }
    kinds = get_args(Weights)[1:]
    found["weights"] = _variants("weights.jsonl", dict.fromkeys(WEIGHTS, kinds))
    found["micro-batches"] = _variants("micro_batches.jsonl", dict.fromkeys(WEIGHTS, ("split",)))
    for name, devices in {"160M": ("h100", "v5e", "cpu"), "8B": ("h100", "v5p")}.items():
        of_devices = {
            device: _read(f"memory/training_{name}_{device}.json")["records"] for device in devices
        }
        found[f"training memory {name}"] = training_memory.table(of_devices)
    for name in (
        *("update_117M_device", "training_step_117M_device"),
        *("update_speed_117M_cpu", "update_speed_muon_117M_cpu"),
    ):
        found[name] = update_speed.table(_read(f"speed/{name}.json")["records"])
    for name in ("8B_v5e", "8B_h100"):
        found[f"scale {name}"] = scale.table(_read(f"scale/{name}.json")["records"])
    return found


def _programs(device: str) -> str:
    """The table of the programs for a device."""
    record = _read(f"speed/device_program_117M_{device}.json")
    return device_program.table(record["records"], device)


def _split_programs() -> str:
    """Times of updates of split weights, over those of float32 weights."""
    ratios: dict[str, dict[str, str]] = {}
    for device in ("h100", "v5e"):
        whole = _read(f"speed/device_program_117M_{device}.json")["records"]
        for name, row in _read(f"speed/split_weights_117M_{device}.json")["records"].items():
            contender, *words = name.split(", ")
            if "split" in words:
                words.remove("split")
                base = whole[", ".join([contender, *words])]
                ratios.setdefault(contender, {})[device] = f"{row['ms'] / base['ms']:.2f}"
    rows = [[name, of.get("h100", ""), of.get("v5e", "")] for name, of in ratios.items()]
    return records.table(["", "H100", "TPU v5e"], rows)


def _frameworks() -> str:
    """Losses, bytes and resumption inside of frameworks, AdamW's first."""
    rows = []
    for file in sorted((records.RESULTS / "frameworks").glob("*.json")):
        record = records.read(file)
        of = record["rows"]
        sizes = " / ".join(f"{row['state bytes per parameter']:.2f}" for row in of)
        shares = [row["share of it on one of eight devices"] for row in of]
        exact = [row["optimizer"] for row in of if row["resumes bit for bit"]]
        rows.append(
            [
                f"{record['package']} {record['version']}",
                *(f"{row['last loss']:.2f}" for row in of),
                sizes,
                " / ".join(f"{share:.1%}" for share in shares),
                "yes" if len(exact) == len(of) else ", ".join(exact) or "no",
            ]
        )
    titles = [
        "",
        *(row["optimizer"] for row in of),
        "bytes of state per parameter",
        "share on one device",
        "resumes",
    ]
    return records.table(titles, rows)


def _first_minutes(results: loss_tables.Results, rows: Sequence[dict]) -> str:
    """Mean losses on the way, of contenders at their best rates."""
    cells = []
    for (setting, name), best in sorted(results.items()):
        if name not in MOMENTUM or setting in (*TEXTS, *LENGTHS[1:]):
            continue
        curves = [
            dict(map(tuple, row["curve"]))
            for row in rows
            if (row["setting"], row["contender"]) == (setting, name)
            and row["settings"]["learning_rate"] == best.rate
        ]
        means = [statistics.mean(curve[step] for curve in curves) for step in ON_THE_WAY]
        cells.append([setting, name, f"{best.rate:.2g}", *(f"{mean:.2f}" for mean in means)])
    return records.table(["", "", "peak rate", *(f"step {step}" for step in ON_THE_WAY)], cells)


def _rates(results: loss_tables.Results, rows: Sequence[dict]) -> str:
    """By how much a rule for the rate misses a contender's best loss, with the first seed."""
    cells = []
    for name, factor in RULES.items():
        for setting in (*TEXTS, *SMALL):
            losses = {
                row["settings"]["learning_rate"]: loss_tables.loss_of(row)
                for row in rows
                if (row["setting"], row["contender"]) == (setting, name)
                and row["settings"]["seed"] == 0
            }
            base = results[setting, BASE_OF_RATES].rate
            found = []
            for wrong in (0.5, 1.0, 2.0):
                wanted = wrong * factor * base
                near = min(losses, key=lambda rate: abs(math.log(rate / wanted)))
                is_it = math.isclose(near, wanted, rel_tol=0.03)
                found.append(f"{losses[near] - min(losses.values()):+.3f}" if is_it else "")
            best = min(losses, key=lambda rate: losses[rate])
            cells.append([name, setting, f"{best / base:.1f}", f"{factor:.1f}", *found])
    titles = ["", "", "best rate over AdamW's", "rule", "half of it", "the rule", "twice"]
    return records.table(titles, cells)


def _variants(file: str, kinds: dict[str, Sequence[str]]) -> str:
    """A table for each contender of what follows its name, compared with it alone."""
    rows = loss_tables.read(PICTURES / file)
    found = loss_tables.summarize(rows)
    settings = sorted({row["setting"] for row in rows}, key=len)
    tables = [
        loss_tables.comparison(
            found, (base, *(f"{base}, {kind}" for kind in of_base)), base, settings, False
        )
        for base, of_base in kinds.items()
    ]
    return "\n\n".join(tables)


def _read(name: str) -> dict:
    return records.read(records.RESULTS / name)


def _is_coarse(row: dict) -> bool:
    """Whether a run is one of the first three seeds, at a rate of the grid by factors of 2."""
    rate = row["settings"]["learning_rate"]
    ratio = rate / _FIRST_RATES.get(row["contender"], rate)
    return row["settings"]["seed"] < 3 and any(abs(ratio - 2.0**k) < 1e-6 for k in range(-4, 5))


def _changes() -> str:
    """What single changes of settings cost on code: a table for each of two optimizers."""
    coarse = loss_tables.summarize(filter(_is_coarse, loss_tables.read(loss_tables.STUDY)))
    names = sorted(name for text, name in coarse if text == TEXTS[0] and ", " not in name)
    of_each = {base: [x for x in names if f"{x} ".startswith(f"{base} ")] for base in _FIRST_RATES}
    tables = [
        loss_tables.comparison(coarse, of_base, base, TEXTS[:1], False)
        for base, of_base in of_each.items()
    ]
    return "\n\n".join(tables)


def _shown(results: loss_tables.Results, states: dict[str, dict]) -> str:
    """What is shown first, with sizes of a larger model's states."""
    contenders = {name: contender for name, (contender, _) in SHOWN.items()}
    sizes = {
        contender: f"{states[key]['bytes_a_parameter']:.2f}"
        for name, contender in contenders.items()
        if (key := loss_tables.contender_of(name)) in states
    }
    labels = {contender: name for name, contender in contenders.items()}
    names = list(labels)
    return loss_tables.comparison(results, names, names[0], TEXTS, False, labels, sizes)


def _calculator(model: str, without: tuple[str, ...] = ()) -> str:
    """What the calculator of memory prints of a model, but for lines with some words."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        memory.main([model])
    lines = out.getvalue().splitlines()
    kept = [line for line in lines if not any(words in line for words in without)]
    return "\n".join(["```", *kept, "```"]).replace("\n\n```", "\n```")


def _at_a_glance(results: loss_tables.Results, states: dict[str, dict]) -> str:
    """Bytes, losses and times of steps of optimizers whose step on a TPU is known."""
    record = _read("speed/training_step_117M_device.json")
    on_gpu, gpu = record["records"]["117M"], record["device"].removeprefix("NVIDIA ")
    on_tpu = _read("speed/device_program_117M_v5e.json")["records"]
    rows = []
    for name, (studied, _) in SHOWN.items():
        contender = loss_tables.contender_of(name)
        if f"{contender}, stacked" not in on_tpu or contender not in states:
            continue
        cells = [name, f"{states[contender]['bytes_a_parameter']:.2f}"]
        cells += [f"{results[text, studied].mean:.2f}" for text in TEXTS]
        one = on_gpu.get(contender)
        ratios = update_speed.ratios(one, on_gpu["adamw"]) if one else []
        cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        cells.append(
            f"{on_tpu[contender + ', stacked']['ms'] / on_tpu['adamw, stacked']['ms']:.1f}"
        )
        rows.append(cells)
    titles = ["", "state, bytes per parameter", *(f"loss, {text}" for text in TEXTS)]
    steps = [f"training step on an {gpu}", "update on a TPU v5e, by its program"]
    return records.table([*titles, *steps], rows)


def _fine_tuning() -> str:
    """Accuracies of SST-2, and the differences from AdamW, paired by seed."""
    summary = _read("finetune/sst2.json")["summary"]
    scores = {name: [one["accuracy"] for one in of["scores"]] for name, of in summary.items()}
    rows = []
    for name, own in scores.items():
        less = [one - other for one, other in zip(own, scores["adamw"], strict=True)]
        cells = [loss_tables.with_error(own, ".2f")]
        cells.append("" if name == "adamw" else loss_tables.with_error(less, "+.2f"))
        rows.append([name, *cells, f"{summary[name]['best_rate']:g}"])
    return records.table(["", "accuracy, %", "minus adamw (paired)", "peak rate"], rows)


def pages() -> Iterator[pathlib.Path]:
    """The pages that may have blocks."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def fill(page: str, texts: dict[str, str]) -> tuple[str, list[str]]:
    """A page with its blocks as they should be, and the names of those that changed.

    Raises:
      SystemExit: If a block has no record or no end.
    """
    changed = []

    def filled(block: re.Match[str]) -> str:
        name = block[1]
        if name not in texts:
            raise SystemExit(f"block {name!r}; allowed: {', '.join(texts)}.")
        whole = f"<!-- {name} -->\n{texts[name]}\n<!-- end of {name} -->"
        if whole != block[0]:
            changed.append(name)
        return whole

    pattern = r"<!-- (?!end of )([^\n]+) -->\n.*?<!-- end of \1 -->"
    page = re.sub(pattern, filled, page, flags=re.DOTALL)
    if 2 * len(re.findall(pattern, page, re.DOTALL)) != page.count("<!-- "):
        raise SystemExit("a block does not end: <!-- NAME --> needs <!-- end of NAME -->")
    return page, changed


def main(check: bool = False) -> None:
    """Fills the blocks of all pages, and draws loss against bytes.

    Args:
      check: Only name the blocks that differ from the records, and exit with 1 if there are any.
    """
    texts = blocks()
    differ = []
    for path in pages():
        page, changed = fill(path.read_text(), texts)
        differ += [f"{path.relative_to(ROOT)}: {name}" for name in changed]
        if not check:
            path.write_text(page)
    print("\n".join(differ))
    if check:
        sys.exit(1 if differ else 0)
    _draw()


def _draw() -> None:
    """Draws loss against bytes, and memory."""
    of_h100 = records.RESULTS / "memory" / "training_160M_h100"
    training_memory.draw(_read(f"{of_h100}.json")["records"], of_h100.with_suffix(".png"))
    defaults = loss_tables.summarize(loss_tables.read(PICTURES / "defaults.jsonl"))
    loss_tables.draw_points(defaults, SHOWN, TEXTS, PICTURES / "loss_against_bytes.png")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
