"""Classifies errors of stores, credentials, metadata services and MLflow by whether waiting may help.

A refusal counts as temporary if the same request was allowed before: perhaps a role or a key is being replaced."""

import enum
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from eagleray.base.errors import UserError

Right = Literal["list", "read", "write", "delete"]
RIGHTS: tuple[Right, ...] = ("list", "read", "write", "delete")
CHANGED = "has changed since it was indexed"


class MissingFile(UserError):
    """The error for a missing file in an existing bucket."""


class Kind(enum.Enum):
    """The ways to treat an error of a service."""

    WAIT = "the same request may succeed later"
    RENEW = "it may succeed later with a new client, which reads its credentials and the clock again"
    DENIED = "lasting, except where the same was allowed before: a role or a key is being replaced; new client"
    LASTING = "somebody has to change something"


class Rule(NamedTuple):
    """Errors that are treated in the same way: error codes, HTTP statuses and names of botocore's classes."""

    kind: Kind
    errors: frozenset[str | int]
    source: str  # page that documents these errors


def _rule(kind: Kind, errors: str, source: str) -> Rule:
    return Rule(kind, frozenset(int(e) if e.isdigit() else e for e in errors.split()), source)


S3 = "docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html"
COMMON = "docs.aws.amazon.com, Common Errors of each service; STS and SSO answer with them too"
GOOGLE = "cloud.google.com/storage/docs/json_api/v1/status-codes"
AZURE = "learn.microsoft.com/rest/api/storageservices/blob-service-error-codes"
BOTOCORE, RETRY = "botocore/exceptions.py", "botocore/data/_retry.json"

# The first rule that has the error's code decides or, if none has, the first rule that has its status.
TABLE = (
    _rule(Kind.WAIT, "SlowDown RequestTimeout InternalError ServiceUnavailable OperationAborted 503Slowdown", S3),
    _rule(Kind.WAIT, "Throttling ThrottlingException RequestLimitExceeded RequestTimeoutException", COMMON),
    _rule(Kind.WAIT, "ThrottledException TooManyRequestsException PriorRequestNotComplete", COMMON),
    _rule(Kind.WAIT, "BandwidthLimitExceeded EC2ThrottledException IDPCommunicationError", RETRY),
    _rule(Kind.WAIT, "rateLimitExceeded userRateLimitExceeded backendError", GOOGLE),
    _rule(Kind.WAIT, "ServerBusy OperationTimedOut", AZURE),
    _rule(Kind.WAIT, "CredentialRetrievalError MetadataRetrievalError TokenRetrievalError", BOTOCORE),
    _rule(Kind.RENEW, "ExpiredToken InvalidToken TokenRefreshRequired RequestTimeTooSkewed", S3),
    _rule(Kind.RENEW, "ExpiredTokenException RequestExpired RequestInTheFuture TokenExpired", COMMON),
    _rule(Kind.DENIED, "AccessDenied InvalidAccessKeyId SignatureDoesNotMatch AllAccessDisabled AccountProblem", S3),
    _rule(Kind.DENIED, "AccessDeniedException InvalidClientTokenId UnrecognizedClientException NotAuthorized", COMMON),
    _rule(Kind.DENIED, "UnauthorizedSSOTokenError SSOTokenLoadError LoginRefreshRequired SSLError", BOTOCORE),
    _rule(Kind.LASTING, "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException", S3),
    _rule(Kind.WAIT, "408 425 429 500 502 503 504 507 509", "RFC 9110 and 6585; MLflow's REST API uses these statuses"),
    _rule(Kind.RENEW, "401", "RFC 9110: no valid credentials; OpenStack Swift for a token that has expired"),
    _rule(Kind.DENIED, "403", "RFC 9110"),
)


def kind_of(*names: str | int) -> Kind:
    """Return how to treat an error with these names, the most specific first, such as its code and its HTTP status."""
    for name in names:
        for rule in TABLE:
            if name in rule.errors:
                return rule.kind
    # An unexpected success or redirection comes from a proxy, such as one that asks for a login.
    passing = any(isinstance(n, int) and (n >= 500 or 200 <= n < 400) for n in names)
    return Kind.WAIT if passing else Kind.LASTING


def passes(kind: Kind, *, allowed_before: bool) -> bool:
    """Return whether waiting may help. `allowed_before` says whether the same request succeeded earlier."""
    return kind in (Kind.WAIT, Kind.RENEW) or (kind is Kind.DENIED and allowed_before)


def names_of(error: BaseException) -> Iterable[str]:
    """Return the names of an error's class and of its base classes, the nearest first."""
    return [c.__name__ for c in type(error).__mro__]


class Allowed:
    """Remembers the rights that a process has had, by folder. As in most policies, a right in a folder of a bucket
    holds in all folders below it."""

    def __init__(self) -> None:
        self._known: set[tuple[Right, str]] = set()

    def add(self, right: Right, url: str) -> None:
        """Remember that a request for a file or a listing was allowed."""
        self._known.add((right, _folder(right, url)))

    def add_folder(self, folder: str, rights: Sequence[Right] = RIGHTS) -> None:
        """Remember that an earlier process had these rights in a folder."""
        self._known |= {(right, folder.rstrip("/")) for right in rights}

    def has(self, right: Right, url: str) -> bool:
        """Return whether the process had this right in the URL's folder, or in a folder between it and the bucket."""
        folder = _folder(right, url)
        if (right, folder) in self._known:
            return True
        while (folder := folder.rpartition("/")[0]).count("/") > 2:
            if (right, folder) in self._known:
                return True
        return False


def _folder(right: Right, url: str) -> str:
    return url.rstrip("/") if right == "list" else url.rpartition("/")[0]
