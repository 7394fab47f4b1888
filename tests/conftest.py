"""Four CPU devices for the tests of sharding, and compiled programs kept for the whole run.

Most of the suite's time is compilation, and many tests compile what another has compiled: the
same functions made anew. A folder of programs, which JAX reads and fills, spares them that. It is
new in every run, and the workers of xdist and the programs that tests start share it.
"""

import os
import tempfile

import jax

jax.config.update("jax_num_cpu_devices", 4)


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # a worker has the environment that is set here
        return
    folder = tempfile.TemporaryDirectory(prefix="adapprox-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    for name, value in {
        "jax_compilation_cache_dir": folder.name,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
