"""Which accelerator a benchmark that needs one would run on."""

import subprocess
import sys

_ASK = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"


def require_accelerator(cpu: bool) -> str:
    """The kind of device that JAX uses here, asked for in another process.

    JAX takes most of a GPU's memory and keeps it, which the processes that measure need.

    Args:
      cpu: Whether a CPU will do.

    Raises:
      SystemExit: There is no accelerator, and a CPU will not do.
    """
    answer = subprocess.run(
        [sys.executable, "-c", _ASK], check=True, stdout=subprocess.PIPE, text=True
    )
    platform, kind = answer.stdout.strip().split(maxsplit=1)
    if platform == "cpu" and not cpu:
        raise SystemExit("JAX sees no accelerator here; --cpu takes the CPU.")
    return kind
