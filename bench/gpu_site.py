"""lightckpt beside a torch that is not ours: a folder of packages of its own, and what leads there.

    python bench/gpu_site.py FOLDER    makes the wheels for a machine with a GPU and no network

A virtual environment made from another one does not see what that one has, and so not its torch.
So lightckpt, and what it needs that is missing there, go to a folder that PYTHONPATH names; nothing
of torch's is changed or hidden. Python 3.11 and newer leave the folder that a program starts in out
of its path where PYTHONSAFEPATH is set, children included: or the checkout's own lightckpt/, which
has no compiled module, would be found first.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from arguments import ROOT
from record import COMMIT_FILE, commit

# What lightckpt needs that machines with torch mostly do not have; 2 MB with it.
CARRIED = ("cffi", "lz4", "pycparser")
# What has to be found in the end, by the module that it is, and the packages that bring it.
NEEDED = {
    "torch": (),
    "lightckpt": (),
    "_cffi_backend": ("cffi", "pycparser"),
    "lz4": ("lz4",),
    "numpy": ("numpy",),
    "rich": ("rich", "markdown-it-py", "mdurl", "pygments"),
    "psutil": ("psutil",),
    "pytest": ("pytest", "iniconfig", "packaging", "pluggy", "pygments"),
    "pytest_timeout": ("pytest-timeout",),
}
LIMIT_SECONDS = 300.0
BUILD_SECONDS = 1800.0  # of the core, on whatever machine
LOOK = (
    "import sys; from importlib.util import find_spec; "
    "print(*[name for name in sys.argv[1:] if find_spec(name) is None])"
)


class SiteError(Exception):
    """Something is missing that cannot be had here; the message says what."""


def environment(site: Path) -> dict[str, str]:
    """Return the environment of programs that take lightckpt from *site*, and of their children."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT / "bench"))),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        # Plugins of others may not fit the pytest that is there, or its settings.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Whether there is a GPU is asked of NVML: the answer starts CUDA in nobody.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def install(site: Path, wheels: Path) -> None:
    """Make *site*: of *wheels*, where that folder is there, else from the registry.

    Raises:
        SiteError: something is missing afterwards, or pip failed.
    """
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    flags = ["--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
    if wheels.is_dir():
        found = sorted(map(str, wheels.glob("*.whl")))
        if not found:
            raise SiteError(f"there is no wheel in {wheels}: make gpu-wheels")
        pip("install", "--no-index", *flags, *found)
    else:
        names = [name for module in missing(site) for name in NEEDED[module]]
        pip("install", *flags, str(ROOT), *dict.fromkeys(names), limit_s=BUILD_SECONDS)
    if lacking := missing(site):
        words = f"{sys.executable} has no {', '.join(lacking)}"
        raise SiteError(f"{words}: make PYTHON=... names a Python with torch and pytest")


def missing(site: Path) -> list[str]:
    """Return the modules of NEEDED that this Python does not find with *site*."""
    command = [sys.executable, "-c", LOOK, *NEEDED]
    env = environment(site)
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if ran.returncode != 0:
        raise SiteError(f"{sys.executable} fails: {ran.stderr.strip()[-300:]}")
    return ran.stdout.split()


def pip(command: str, *arguments: str, limit_s: float = LIMIT_SECONDS) -> None:
    """Run pip, quietly; raise SiteError with its words if it fails, or is not through in time."""
    call = [sys.executable, "-m", "pip", "--disable-pip-version-check", command, "-q", *arguments]
    try:
        ran = subprocess.run(call, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise SiteError(f"pip {command}: not through after {limit_s:.0f} s") from error
    if ran.returncode != 0:
        raise SiteError(f"pip {command} failed: {ran.stderr.strip()[-1000:]}")


def make_wheels(folder: Path) -> None:
    """Build the wheels of lightckpt and CARRIED, for this Python, into *folder*."""
    of = commit()  # before the folder goes that may say it
    shutil.rmtree(folder, ignore_errors=True)
    releases = ["-c", str(ROOT / "constraints.txt")]
    built = ("wheel", "--no-deps", *releases, "-w", str(folder), str(ROOT), *CARRIED)
    pip(*built, limit_s=BUILD_SECONDS)
    (folder / COMMIT_FILE.name).write_text(f"{of}\n", encoding="ascii")


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        make_wheels(folder)
    except SiteError as error:
        print(f"gpu-wheels: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in folder.iterdir())
    names = sorted(path.name for path in folder.glob("*.whl"))
    print(f"{folder}: {size / 1e6:.1f} MB: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
