"""A program in a copied process, which is made to look as if Python had just begun to run it."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch

import eagleray
from eagleray.engine import export

MAIN = multiprocessing.current_process()  # as this is imported, before the copies
PYTHON = sys.base_prefix, sys.prefix, str(Path(eagleray.__file__).parents[1])
# What commands import, as far as that starts no thread that a copy would miss.
IMPORTED = (
    "eagleray.cli.main",
    "eagleray.api.pretrain",
    "eagleray.runs.pretrain",
    "alembic.autogenerate",
    "boto3",
    "duckdb",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.tracking",
    "onnx",
    "pyarrow.parquet",
    "webdataset",
)


def run(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    group: int | None,
    files: Sequence[Connection],
    check: Callable[..., Any],
    begun: Connection,
) -> NoReturn:
    """Run a command line of Python, and end the process as Python ends. `files` become its input, output and errors;
    `check` starts the process that an export is checked in."""
    if group is not None:
        os.setpgid(0, group)
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    _forget_the_copied_process()
    export.run_check = check
    begun.send_bytes(b".")
    begun.close()
    code, interrupted = 0, False
    try:
        _execute(words)
    except SystemExit as e:
        code = _status(e.code)
    except BaseException as e:
        code, interrupted = 1, isinstance(e, KeyboardInterrupt)
        sys.excepthook(type(e), e, e.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # as in Python
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _forget_the_copied_process() -> None:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    time.tzset()
    tempfile.tempdir = None
    np.random.seed()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from eagleray.base import console  # here, as GPU tests run where rich is missing

    console.out.__init__(highlight=False, soft_wrap=True)  # its width and colours come from the environment
    process: Any = multiprocessing.process
    process._current_process, process._parent_process, MAIN.name = MAIN, None, "MainProcess"
    vars(forkserver._forkserver)["ensure_running"] = int  # it runs, and copies processes for this one too


def _execute(words: Sequence[str]) -> None:
    python, what, *rest = words
    assert python == sys.executable, "only the tests' Python is there"
    sys.orig_argv = list(words)
    others = [path for path in dict.fromkeys(sys.path) if path.startswith(PYTHON)]  # without those of the tests
    named = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if what == "-m":
        sys.argv, sys.path = rest, [os.getcwd(), *named, *others]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv, sys.path = ["-c", *rest[1:]], ["", *named, *others]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        assert not what.startswith("-"), "options of Python are read as it starts"
        sys.argv, sys.path = [what, *rest], [str(Path(what).absolute().parent), *named, *others]
        main.__file__ = what
        exec(compile(Path(what).read_bytes(), what, "exec"), main.__dict__)


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
