"""Builds the sdist and the wheel into `dist/` and tries both: `make release-check`.

Each check prints one line. The first that fails ends the program, after what its command printed.
The checks install the wheel and the sdist in an environment of their own, which is thrown away.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
DIST = ROOT / "dist"
NOT_IN_SDIST = (".ci/", ".github/")


def main():
    with tempfile.TemporaryDirectory(prefix="adapprox-release-") as folder:
        for check in CHECKS:
            print(check.__name__.replace("_", " "), end=": ", flush=True)
            print(check(pathlib.Path(folder)), flush=True)


def run(*command, cwd=ROOT):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    require(not done.returncode, f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def require(condition, message):
    if not condition:
        sys.exit(f"failed\n{message}")


def require_alike(what, found, expected):
    require(expected <= found, f"not in the {what}: {sorted(expected - found)}")
    require(found <= expected, f"in the {what}, but not committed: {sorted(found - expected)}")


def tool(name, *arguments):
    return run(pathlib.Path(sys.executable).with_name(name), *arguments)


def version():
    (found,) = re.findall(
        r'^__version__ = "(.*)"$', (ROOT / "adapprox_jax/__init__.py").read_text(), re.MULTILINE
    )
    return found


def built(pattern):
    (path,) = DIST.glob(pattern)
    return path


def files_of_repository():
    return set(run("git", "ls-files").splitlines())


def versions_agree(folder):
    changelog = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    for place, found in {"CHANGELOG.md": changelog, "CITATION.cff": citation}.items():
        require(found == version(), f"{place} begins with {found}, the package is {version()}")
    return version()


def citation_is_valid(folder):
    return tool("cffconvert", "--validate", "--infile", ROOT / "CITATION.cff").splitlines()[-1]


def sdist_and_wheel_are_built(folder):
    shutil.rmtree(DIST, ignore_errors=True)
    tool("pyproject-build")  # the wheel is built from the sdist
    return ", ".join(sorted(path.name for path in DIST.iterdir()))


def twine_accepts_them(folder):
    tool("twine", "check", "--strict", *DIST.iterdir())
    return "no warning"


def wheel_holds_the_package_alone(folder):
    with zipfile.ZipFile(built("*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {name for name in files_of_repository() if name.startswith("adapprox_jax/")}
    require_alike("wheel", names, package)
    require("adapprox_jax/py.typed" in names, "no py.typed in the wheel")
    return f"{len(package)} files, with py.typed"


def sdist_holds_the_repository(folder):
    with tarfile.open(built("*.tar.gz")) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
        sdist.extractall(folder, filter="data")
    expected = {x for x in files_of_repository() if not x.startswith(NOT_IN_SDIST)} | {"PKG-INFO"}
    require_alike("sdist", names, expected)
    return f"{len(names)} files"


def wheel_runs_the_loop_of_the_readme(folder):
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    run(python, "-m", "pip", "install", "-q", built("*.whl"), cwd=folder)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return run(python, "-c", code, cwd=folder).strip().replace("\n", "; ")


def sdist_passes_its_tests(folder):
    python = folder / "venv/bin/python"
    unpacked = folder / f"adapprox_jax-{version()}"
    run(python, "-m", "pip", "install", "-q", f"{unpacked}[test-library]", cwd=folder)
    tests = ("-m", "pytest", "-q", "-n", "2", "-m", "not slow", "--quick-compilation")
    return run(python, *tests, "tests/linalg", cwd=unpacked).splitlines()[-1].strip("= ")


CHECKS = (
    versions_agree,
    citation_is_valid,
    sdist_and_wheel_are_built,
    twine_accepts_them,
    wheel_holds_the_package_alone,
    sdist_holds_the_repository,
    wheel_runs_the_loop_of_the_readme,
    sdist_passes_its_tests,
)

if __name__ == "__main__":
    main()
