"""Installs each framework into an environment of its own and runs its file of this folder.

    python3.12 -m examples.frameworks
    python3.12 -m examples.frameworks tunix levanter

Needs Python alone. Some GB are downloaded into .venv-frameworks. The results are in
results/frameworks, and `python -m benchmarks.report` makes the table in docs/frameworks.md of them.
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-frameworks"
REQUIREMENTS = {
    "equinox": ["equinox==0.13.8", "jax", "flax"],
    "tunix": ["google-tunix==0.1.7"],
    "kauldron": ["kauldron==1.4.4"],
    "levanter": ["--prerelease=allow", "marin-levanter==0.2.227.dev40316220070"],
    # MaxText's package names what it needs for GPUs and TPUs alone.
    "maxtext": [
        *("maxtext==0.2.5", "jax", "flax", "orbax-checkpoint", "omegaconf", "pydantic", "absl-py"),
        *("aqtp", "qwix", "grain", "pathwaysutils", "ml-goodput-measurement", "tensorboardx"),
        *("psutil", "jaxtyping", "etils", "numpy>=2.1", "jinja2", "tokamax", "huggingface_hub"),
        *("transformers", "drjax", "pillow", "tiktoken", "sentencepiece", "sympy"),
        "ml_collections",
    ],
    "easydel": ["easydel==0.3.0", "pillow"],
}
# Frameworks bring their own JAX. Levanter asks for an older Optax than ours, and works with this.
OURS = ["--no-deps", "-e", ".", "optax==0.2.8"]
NEWEST = "2026-11-26"  # of what they need, so that the same is installed every time


def main(names: list[str]) -> None:
    """Runs the named frameworks, or all; exits with 1 where one fails, after all others."""
    unknown = sorted(set(names) - REQUIREMENTS.keys())
    if unknown:
        raise SystemExit(f"frameworks {', '.join(unknown)}; allowed: {', '.join(REQUIREMENTS)}.")
    uv = ENVIRONMENTS / "uv/bin/uv"  # pip looks for versions that agree for ten minutes and more
    if not uv.exists():
        _run(sys.executable, "-m", "venv", ENVIRONMENTS / "uv")
        _run(ENVIRONMENTS / "uv/bin/pip", "install", "-q", "uv")
    failed = []
    for name in names or REQUIREMENTS:
        python, file = ENVIRONMENTS / name / "bin/python", f"results/frameworks/{name}.json"
        try:
            _run(uv, "venv", "-q", "--allow-existing", "-p", sys.executable, ENVIRONMENTS / name)
            install = (uv, "pip", "install", "-q", "-p", python, "--exclude-newer", NEWEST)
            _run(*install, *REQUIREMENTS[name])
            _run(*install, *OURS)
            _run(python, "-m", f"examples.frameworks.{name}", file)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name}: {error}")
    if failed:
        raise SystemExit("\n".join(failed))


def _run(*command: object) -> None:
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
