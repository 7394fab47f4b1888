"""Breaks the code on purpose, and tells which breaks no test finds: `make mutants`.

Named mutations change results in ways that tests once missed. Drawn ones change an operator, a
comparison or a number somewhere in `step/` and `linalg/`. Each is run in a copy of the repository,
until a test fails. What is known of each is kept in a log, so that a run can go on.
"""

import ast
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import tyro
from tqdm import tqdm

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path("adapprox_jax")
_COPIED = ("adapprox_jax", "benchmarks", "examples", "tests", "pyproject.toml")
# Of drawn ones, by the folder that they are in: those that find most come first.
_TESTS = {
    "step": "tests/step/test_reference.py tests/step tests/linalg/test_tiles.py tests/optimizers",
    "linalg": "tests/linalg tests/step/test_reference.py tests/step tests/optimizers",
}


class Mutant(NamedTuple):
    """One change of one file."""

    path: str
    old: str
    new: str
    tests: str  # files or folders that are to find it


NAMED = {
    "quotient without the root of the correction": Mutant(
        "step/matrix.py",
        "root / jnp.sqrt(scalars.correction)",
        "root / scalars.correction",
        "tests/step",
    ),
    "unit of errors times the scale without its square": Mutant(
        "step/matrix.py", "unit * plan.approximation.of_scale(scale)", "unit * scale", "tests/step"
    ),
    "ranks chosen before columns are turned": Mutant(
        "step/phases.py",
        "each(rank_of, found.plans, factors,",
        "each(rank_of, found.plans, found.factors,",
        "tests/step",
    ),
    "an exchange that divides what comes before": Mutant(
        "sharding/matrix_exchange.py",
        "range(first, len(axes))",
        "range(1, len(axes))",
        "tests/sharding",
    ),
    "first axes of the mesh first": Mutant(
        "sharding/matrix_exchange.py",
        "in reversed(mesh.axis_names)",
        "in mesh.axis_names",
        "tests/sharding",
    ),
    "corrected second moment of Adam": Mutant(
        "state/from_adam.py",
        "adam.nu if bias_correction else nu",
        "nu",
        "tests/state",
    ),
    "two meshes in one tree": Mutant(
        "sharding/state_shardings.py", " or len(concrete) > 1", "", "tests/sharding"
    ),
    "drift and what is cut as a root of squares": Mutant(
        "state/resize.py",
        "on_host(leaf.drift).astype(np.float64) + left_out",
        "np.hypot(on_host(leaf.drift).astype(np.float64), left_out)",
        "tests/state",
    ),
    "growth to the last of the sizes": Mutant(
        "state/resize.py", "larger[0]", "larger[-1]", "tests/state"
    ),
    "matrices of exactly 16 to 1": Mutant(
        "params/hidden_matrices.py", "long > _MOST", "long >= _MOST", "tests/params"
    ),
    "a side of exactly 8": Mutant(
        "params/hidden_matrices.py", "short < _SHORT", "short <= _SHORT", "tests/params"
    ),
    "a last axis of exactly one block": Mutant(
        "transforms/guided_ema.py",
        "shape[block_axis(shape)] < BLOCK",
        "shape[block_axis(shape)] <= BLOCK",
        "tests/transforms",
    ),
    "the same bits for q and u": Mutant(
        "step/matrix.py",
        "of_q, of_u = plan.scalars.rounding",
        "of_q, of_u = (plan.scalars.rounding[0],) * 2",
        "tests/step",
    ),
    "orthogonalizations that do not wait": Mutant(
        "transforms/orthogonalize.py",
        "members[0] = begin_after(platform, last[:, 0], members[0])",
        "pass",
        "tests/transforms tests/optimizers",
    ),
}
_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def drawn(count: int, seed: int) -> dict[str, Mutant]:
    """Mutations of single nodes of the syntax trees, of all that there are."""
    found = {}
    for folder, tests in _TESTS.items():
        for path in sorted((ROOT / PACKAGE / folder).glob("*.py")):
            source = path.read_text()
            lines = source.splitlines(keepends=True)
            places = sum(1 for _ in _nodes(ast.parse(source)))
            for place in range(places):
                tree = ast.parse(source)
                node, what = list(_nodes(tree))[place]
                start = ast.get_source_segment(source, node) or ""
                _mutate(node)
                new = ast.unparse(node)
                before = (
                    "".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
                )
                name = f"{folder}/{path.name}:{node.lineno}:{node.col_offset} {what}"
                changed = before + f"({new})" + source[len(before) + len(start) :]
                found[name] = Mutant(f"{folder}/{path.name}", source, changed, tests)
    names = random.Random(seed).sample(sorted(found), min(count, len(found)))
    return {name: found[name] for name in names}


def _nodes(tree: ast.AST):
    """What can be changed: operators, comparisons and numbers of expressions in functions."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in (x for statement in function.body for x in ast.walk(statement)):
            if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
                yield node, f"{type(node.op).__name__} in {function.name}"
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
                yield node, f"{type(node.ops[0]).__name__} in {function.name}"
            elif isinstance(node, ast.BoolOp):
                yield node, f"{type(node.op).__name__} in {function.name}"
            elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
                yield node, f"{node.value} in {function.name}"


def _mutate(node) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = _SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.Constant):
        node.value += 1
    else:
        node.op = _SWAPS[type(node.op)]()


def survives(mutant: Mutant, seconds: int, cache: str) -> bool:
    """Whether all of a mutant's tests pass. A run that takes too long counts as a failure.

    What is compiled for one mutant serves all others, from the folder `cache`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for part in _COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        path = folder / PACKAGE / mutant.path
        path.write_text(path.read_text().replace(mutant.old, mutant.new, 1))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow"]
        command += ["--quick-compilation", *mutant.tests.split()]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
        options: dict[str, Any] = {"env": environment, "capture_output": True, "timeout": seconds}
        try:
            done = subprocess.run(command, cwd=folder, **options)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def main(
    count: int = 0,
    seed: int = 0,
    only: str = "",
    jobs: int = 2,
    seconds: int = 1800,
    log: pathlib.Path = ROOT / "mutants.jsonl",
) -> None:
    """Runs mutants, prints those that no test finds, and exits with 1 if there are any.

    Args:
      count: How many are drawn. With 0 the named ones are run.
      seed: Of the draw.
      only: A part of the names of those to run.
      jobs: How many are run at once.
      seconds: That the tests of one may take.
      log: What is known already; those are not run again.
    """
    mutants = drawn(count, seed) if count else NAMED
    known = {}
    if log.exists():
        known = dict(json.loads(line) for line in log.read_text().splitlines())
    chosen = [name for name in mutants if only in name]
    for name in chosen:
        path, old = mutants[name].path, mutants[name].old
        if old not in (ROOT / PACKAGE / path).read_text():
            raise SystemExit(f"{path} no longer has {old!r}: mend the list of mutants.")
    left = [name for name in chosen if name not in known]
    cached = tempfile.TemporaryDirectory()
    with cached as cache, ThreadPoolExecutor(jobs) as pool, log.open("a") as file:
        runs = {pool.submit(survives, mutants[name], seconds, cache): name for name in left}
        for run in tqdm(as_completed(runs), total=len(left), unit="mutant"):
            known[runs[run]] = run.result()
            print(json.dumps([runs[run], run.result()]), file=file, flush=True)
    survivors = [name for name in chosen if known[name]]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found")
    print("\n".join(survivors))
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    tyro.cli(main)
