"""The optimizers inside of frameworks: a tiny training in each, on eight devices of a CPU."""

import os
import pathlib

# Before JAX is imported. A training that goes on after a stop need not be compiled again.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
_ROOT = pathlib.Path(__file__).resolve().parents[2]
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_ROOT / ".venv-frameworks/compiled")
