"""Commands under a read-only root file system, as a container with `readOnlyRootFilesystem` sees it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# In a mount namespace of its own: all files, read-only; empty folders where the container has volumes; and, should one
# of them hide this repository or its Python, those again, read-only.
SCRIPT = r"""
set -euo pipefail
hold=$1; shift
mount --make-rprivate /
mkdir "$hold/root" "$hold/volumes"
mount --rbind / "$hold/root"
mount -o remount,bind,ro "$hold/root"
mount -t proc proc "$hold/root/proc"
while [ "$1" != keep ]; do
    mkdir -p "$hold/volumes/$1"; mount --bind "$hold/volumes/$1" "$hold/root/$1"; shift
done
shift
while [ "$1" != run ]; do
    if [ ! -e "$hold/root/$1" ]; then
        mkdir -p "$hold/root/$1"; mount --bind "$1" "$hold/root/$1"; mount -o remount,bind,ro "$hold/root/$1"
    fi
    shift
done
shift
exec /usr/sbin/chroot "$hold/root" "$@"
"""
SPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]  # what is left of it ends with it


def possible() -> bool:
    return subprocess.run([*SPACES, "mount", "--make-rprivate", "/"], capture_output=True).returncode == 0


def command(hold: Path, volumes: list[str], *words: str, keep: tuple[Path, ...] = ()) -> list[str]:
    """Return the command that runs `words` where nothing but the paths `volumes` can be written; their files are in
    `hold`/volumes. What is in `keep` can be read."""
    kept = [str(p) for p in (ROOT, Path(sys.prefix), Path(sys.base_prefix), *keep)]
    return [*SPACES, "bash", "-c", SCRIPT, "confine", str(hold), *volumes, "keep", *kept, "run", *words]
