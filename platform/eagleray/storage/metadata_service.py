"""Asks a cloud machine's metadata service why it gave no credentials.

botocore does not tell a service that failed from a service without credentials. Only without credentials may the store
be read anonymously."""

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

IPV4, IPV6 = "http://169.254.169.254/", "http://[fd00:ec2::254]/"
SECONDS = 1.0  # timeout of a request in seconds, as in botocore
ROLE = "latest/meta-data/iam/security-credentials/"  # docs.aws.amazon.com/AWSEC2/latest/UserGuide, instance metadata


def failure(setting: Callable[[str], Any]) -> str:
    """Return in one line how the service failed, or an empty text if there is no service, or none with a role.

    `setting` returns a setting of botocore by its name."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return ""
    ipv6 = str(setting("ec2_metadata_service_endpoint_mode") or "").lower() == "ipv6"
    address = (setting("ec2_metadata_service_endpoint") or (IPV6 if ipv6 else IPV4)).rstrip("/") + "/"
    try:
        status, token = _ask(address + "latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        if not _overloaded(status):
            headers = {"X-aws-ec2-metadata-token": token} if status == 200 else {}
            status, role = _ask(address + ROLE, "GET", headers)
            if status == 200 and role.strip():  # the machine has a role, but botocore did not get its credentials
                return f"the metadata service at {address} did not give the credentials of its role"
    except TimeoutError:  # a server accepted the connection, but does not answer
        return f"the metadata service at {address} does not answer"
    except OSError:  # there is no server
        return ""
    return f"the metadata service at {address} answered {status}" if _overloaded(status) else ""


def _overloaded(status: int) -> bool:
    return status == 429 or status >= 500


def _ask(url: str, method: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """Return the status and the text of an answer, without using a proxy."""
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=SECONDS) as answer:
            return answer.status, answer.read(2**16).decode(errors="replace")
    except urllib.error.HTTPError as e:
        return e.code, ""
