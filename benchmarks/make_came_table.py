"""Writes `tests/data/came_pytorch.json`, what the authors' CAME does in 50 steps.

    pip install torch came-pytorch
    python -m benchmarks.make_came_table

The table holds settings and the parameters, in float64, after some of the steps. Starts and
gradients are not in it: `start` and `gradients` make them again.
"""

import importlib.metadata
import json
import pathlib
from collections.abc import Callable

import numpy as np

TABLE = pathlib.Path(__file__).parents[1] / "tests" / "data" / "came_pytorch.json"
SHAPES = {"matrix": (6, 10), "stack": (3, 4, 5), "vector": (7,), "single": (1,)}
STEPS = (1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50)
# Names as of `examples.opponents.came.came`.
SETTINGS = {
    "learning_rate": 0.003,
    "b1": 0.9,
    "b2": 0.999,
    "b3": 0.9999,
    "eps": 1e-30,
    "eps_instability": 1e-16,
    "clipping_threshold": 1.0,
    "weight_decay": 0.1,
}


def start() -> dict[str, np.ndarray]:
    """The first parameters, float32."""
    return _draw(0, lambda random, shape: 0.02 * random.standard_normal(shape))


def gradients(step: int) -> dict[str, np.ndarray]:
    """The gradients of a step, float32: sizes of steps, rows and columns lie decades apart.

    Args:
      step: From 1.

    Returns:
      A dict from the leaf's name to its gradient. In the first steps all leaves are clipped, later
      those of a large gradient after small ones.
    """

    def make(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
        # The same rows and columns are large at all steps.
        sizes = np.random.RandomState(len(shape)).uniform(-1, 1, shape[-1])
        rows = np.random.RandomState(9).uniform(-1, 1, shape[-2]) if len(shape) > 1 else [0]
        size = 10.0 ** (random.uniform(-4, 0) + np.add.outer(rows, sizes))
        return size.reshape(size.shape[-len(shape) :]) * random.standard_normal(shape)

    return _draw(step, make)


def _draw(seed: int, make: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
    # RandomState's stream is frozen: it does not change between versions of NumPy.
    random = np.random.RandomState(seed)
    return {name: np.float32(make(random, shape)) for name, shape in SHAPES.items()}


def main() -> None:
    """Runs the authors' optimizer and writes the table."""
    import came_pytorch
    import torch

    params = {name: torch.nn.Parameter(torch.tensor(x).double()) for name, x in start().items()}
    optimizer = came_pytorch.CAME(
        params.values(),
        lr=SETTINGS["learning_rate"],
        eps=(SETTINGS["eps"], SETTINGS["eps_instability"]),
        clip_threshold=SETTINGS["clipping_threshold"],
        betas=(SETTINGS["b1"], SETTINGS["b2"], SETTINGS["b3"]),
        weight_decay=SETTINGS["weight_decay"],
    )
    table = {}
    for step in range(1, max(STEPS) + 1):
        for name, grad in gradients(step).items():
            params[name].grad = torch.tensor(grad).double()
        optimizer.step()
        if step in STEPS:
            table[step] = {name: p.detach().flatten().tolist() for name, p in params.items()}
    version = importlib.metadata.version("came-pytorch")
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    result = {"came-pytorch": version, "settings": SETTINGS, "params_after": table}
    TABLE.write_text(json.dumps(result) + "\n")
    print(f"written: {TABLE}")


if __name__ == "__main__":
    main()
