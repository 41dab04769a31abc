"""What Ray's compiled part knows of the token of a cluster."""

import sys


def read_again() -> None:
    """Make Ray read the mode and the token of this moment's environment; it keeps the first ones of the process, and a
    cluster that is started with others refuses it ("Failed to start GCS")."""
    if "ray" in sys.modules:
        from ray._private.authentication_test_utils import reset_auth_token_state

        reset_auth_token_state()
