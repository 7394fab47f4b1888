"""What is read of a state on the host, where several processes have parts of it."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import adapprox_jax
mesh = jax.make_mesh((4, 2), ("layers", "rows"), axis_types=(AxisType.Auto,) * 2)
value = np.random.default_rng(0).normal(size=(4, 32, 48)).astype(np.float32)
divided = NamedSharding(mesh, P("layers", "rows"))
params = {"w": jax.make_array_from_callback(value.shape, divided, lambda at: value[at])}
tx = adapprox_jax.adapprox(1e-2, initial_rank=4, max_rank=8, min_dim_size_to_factor=1)
with jax.set_mesh(mesh):
    init = jax.jit(tx.init, out_shardings=adapprox_jax.state_shardings(tx, params))
    _, state = jax.jit(tx.update)(params, init(params), params)
    info = adapprox_jax.rank_report(state, params)["['w']"]
    narrow = adapprox_jax.resize(state, 2, truncate=True)
    left = adapprox_jax.rank_report(narrow, params)["['w']"]
print("ranks", info.rank.tolist(), left.rank.tolist(), np.round(left.error, 3).tolist())
"""


@pytest.mark.slow
def test_reports_and_buffers_of_two_processes():
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = str(listener.getsockname()[1])

    def started(program, index, devices):
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": devices, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", program, port, index]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )

    alone = PROGRAM.replace("jax.distributed.initialize", "(lambda *_: None)")
    programs = [started(PROGRAM, "0", "4"), started(PROGRAM, "1", "4"), started(alone, "0", "8")]
    first, second, expected = (
        program.communicate(timeout=300)[0].partition("ranks [")[2].splitlines()[0]
        for program in programs
    )
    assert first == second == expected
    assert expected.startswith("8, 8, 8, 8] [2, 2, 2, 2] [0.5")
