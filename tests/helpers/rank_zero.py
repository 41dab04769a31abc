"""What rank 0 of a run in a bucket has: its claim, and what uploads its working folder."""

from eagleray.runs import layout
from eagleray.runs.bucket_files import Mirror
from eagleray.runs.lease import Lease
from eagleray.runs.run_store import run_store


def rank_zero(out: str, command: str, after: int = 0, *, thread: bool = True) -> Mirror:
    """Claim a run, and return what uploads its working folder; with a thread for the signs of life, if wanted."""
    claim = Lease(out, layout.OWNER, command)
    claim.claim(after)
    mirror = run_store(out).mirror(claim)
    assert isinstance(mirror, Mirror)
    if thread:
        claim.start()
        mirror.start()
    return mirror


def end(mirror: Mirror) -> None:
    """End the threads of a rank as if it was killed: it says nothing more."""
    for thread in (mirror, mirror.claim):
        thread.ended.set()
        if thread.is_alive():
            thread.join()


def close(mirror: Mirror) -> None:
    """End it as a rank does that ends."""
    mirror.close()
    mirror.claim.close()
