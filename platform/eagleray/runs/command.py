"""Hold a run for one command of a user: nothing is written into its folder before, and a second command is refused."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator

from eagleray.base.errors import Busy, Outage, UserError
from eagleray.runs import layout, layout_of_sweep
from eagleray.runs.run_store import RunStore, run_store


def new_command() -> str:
    """Return an id for a command, which differs from that of any other one on any machine."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def holds_run(run: RunStore) -> bool:
    """Return whether a run has begun there. Raises UserError and Outage."""
    return all(run.get(name) is not None for name in (layout.RECIPE, layout.ENVIRONMENT))


@contextlib.contextmanager
def hold(out: str, command: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """A context in which no other command works on the run in `out`, nor does a process of an earlier one.

    `say` gets a line before a wait. Raises Busy when another command is at work, and UserError when the run cannot be
    written or holds a sweep; nothing was written then."""
    run = run_store(out)
    with contextlib.ExitStack() as stack:
        try:
            if run.get(layout_of_sweep.ROWS) is not None and not holds_run(run):
                raise UserError(f"out={out}: holds a sweep; give another out=")
            stack.callback(run.claim(layout.COMMAND, command, say).close)
            run.wait_until_free(layout.OWNER, say)
        except Busy:
            raise
        except (OSError, UserError, Outage) as e:
            why = (e.strerror if isinstance(e, OSError) else "") or str(e)
            raise UserError(why if why.startswith("out=") else f"out={out}: cannot be written: {why}") from None
        yield
