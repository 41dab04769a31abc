#!/usr/bin/env bash
# The users of the store of compose.yaml, and what they may do: jobs and MLflow's server have a key and a bucket each. They
# read, write, list and delete what is in it; no key of theirs can delete a bucket, or reach that of the other.
#   store.sh accounts    makes the buckets and the file of users, before the store starts
#   store.sh rights      gives them their rights, with the store's root key, once it answers
set -euo pipefail

[[ "${1:-}" =~ ^(accounts|rights)$ ]] || {
    echo "store.sh: got '${1:-}', expected accounts or rights" >&2
    exit 2
}
: "${ROOT_ACCESS_KEY_ID:?expected the name of the root key of the store}"
: "${JOBS_ACCESS_KEY_ID:?expected the name of the key of jobs}"
: "${MLFLOW_ACCESS_KEY_ID:?expected the name of the key of the server of MLflow}"
distinct=$(printf '%s\n' "$ROOT_ACCESS_KEY_ID" "$JOBS_ACCESS_KEY_ID" "$MLFLOW_ACCESS_KEY_ID" | sort -u | wc -l)
[ "$distinct" -eq 3 ] || { # the store takes a user of the name of its root key for root
    echo "store.sh: expected three names for the keys of the store: its root key, that of jobs, and that of MLflow" >&2
    exit 2
}

if [ "$1" = accounts ]; then
    : "${JOBS_SECRET_ACCESS_KEY:?expected the secret of the key of jobs}"
    : "${MLFLOW_SECRET_ACCESS_KEY:?expected the secret of the key of the server of MLflow}"
    umask 077
    python - "${DATA:-/data}" "${ACCOUNTS:-/accounts}" <<'END'
import json, os, sys
from pathlib import Path
data, accounts = map(Path, sys.argv[1:])
for bucket in "eagleray", "mlflow":
    (data / bucket).mkdir(parents=True, exist_ok=True)
users = [(os.environ[f"{kind}_ACCESS_KEY_ID"], os.environ[f"{kind}_SECRET_ACCESS_KEY"]) for kind in ("JOBS", "MLFLOW")]
rest = {"role": "user", "userID": 0, "groupID": 0, "projectID": 0}
content = {"accessAccounts": {key: {"access": key, "secret": secret, **rest} for key, secret in users}}
(accounts / ".users").write_text(json.dumps(content))
(accounts / ".users").replace(accounts / "users.json")
END
else
    export AWS_ACCESS_KEY_ID=$ROOT_ACCESS_KEY_ID
    export AWS_SECRET_ACCESS_KEY=${ROOT_SECRET_ACCESS_KEY:?expected the secret of the root key of the store}
    python - <<'END'
import json, os
import boto3
OBJECTS = "GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload", "ListMultipartUploadParts"
BUCKET = "ListBucket", "ListBucketMultipartUploads"
client = boto3.client("s3")
for bucket, kind in ("eagleray", "JOBS"), ("mlflow", "MLFLOW"):
    name = f"arn:aws:s3:::{bucket}"
    allowed = [
        {"Effect": "Allow", "Principal": {"AWS": [os.environ[f"{kind}_ACCESS_KEY_ID"]]},
         "Action": [f"s3:{action}" for action in actions], "Resource": [resource]}
        for actions, resource in ((OBJECTS, f"{name}/*"), (BUCKET, name))
    ]
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": allowed}))
END
fi
