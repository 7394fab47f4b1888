"""Eight CPU devices for the tests of sharding, and little time spent on compilation.

Most of the suite's time is compilation, and many tests compile what another has compiled: the
same functions made anew. A folder of programs, which JAX reads and fills, spares them that. It is
new in every run, and the workers of xdist and the programs that tests start share it.

With `--quick-compilation`, as in `make test`, XLA also leaves out most optimizations: nearly all
programs run a few steps only. And only the program of CPUs is traced, but where a test has the mark
`all_platforms`. `make test-all` and `make test-newest` trace and compile as users do.
"""

import gc
import os
import subprocess
import sys
import tempfile

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
gc.set_threshold(50_000, 20, 20)  # tracing makes many objects, and few of them are garbage

# Their models add vectors to matrices, which the strictest of JAX's flags refuses.
ADD_BIASES = ("tests.examples.", "tests.benchmarks.", "tests.test_documents")
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def pytest_addoption(parser):
    parser.addoption("--quick-compilation", action="store_true", help="XLA optimizes little")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # a worker has the environment that is set here
        return
    folder = tempfile.TemporaryDirectory(prefix="adapprox-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    for name, value in {
        "jax_compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", folder.name),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
    if config.option.quick_compilation:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
        if are_known(flags):
            os.environ["XLA_FLAGS"] = flags


def are_known(flags):
    """XLA ends the whole process when it meets a flag that this version of it does not have."""
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


@pytest.fixture(autouse=True, scope="module")
def strict_ranks(request):
    """The library promotes no ranks, wherever it is used."""
    allowed = request.module.__name__.startswith(ADD_BIASES)
    with jax.numpy_rank_promotion("allow" if allowed else "raise"):
        yield


@pytest.fixture(autouse=True)
def traced_platforms(request, monkeypatch):
    """With `--quick-compilation` CPUs alone."""
    if request.node.get_closest_marker("all_platforms"):
        forget_traces()
    elif request.config.option.quick_compilation:
        monkeypatch.setattr(jax.lax, "platform_dependent", of_cpus)


def of_cpus(*operands, cpu, tpu, default):
    return cpu(*operands)


def forget_traces():
    """Of the library's own functions: those of other platforms may be in them."""
    modules = [module for name, module in sys.modules.items() if name.startswith("adapprox_jax")]
    for function in (value for module in modules for value in vars(module).values()):
        if hasattr(function, "clear_cache"):
            function.clear_cache()


@pytest.fixture
def in_phases(monkeypatch):
    """Takes the way of GPUs or TPUs from here on: nothing that was traced before counts."""
    taken, not_switched = [], jax.lax.platform_dependent

    def switch(kind="gpu"):
        def of_accelerators(*operands, cpu, tpu, default):
            taken.append(1)
            return (tpu if kind == "tpu" else default)(*operands)

        forget_traces()
        monkeypatch.setattr(jax.lax, "platform_dependent", of_accelerators)

    yield switch
    assert taken or jax.lax.platform_dependent is not_switched
    forget_traces()
