"""A lock that is free in a process that was just forked."""

import os
import threading


class ForkLock:
    """A lock for what each process makes anew. The thread that holds it may not exist in a forked process, such as a
    loader's, which would wait for it for good."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
