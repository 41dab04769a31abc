#!/usr/bin/env bash
# MLflow's server behind basic authentication and a list of allowed hosts. Every setting comes from the environment, so
# that no password is in a process list; a missing one ends it with a line that names it.
set -euo pipefail

: "${MLFLOW_BACKEND_STORE_URI:?expected postgresql+psycopg://USER:PASSWORD@HOST/DB or sqlite:////FILE}"
: "${MLFLOW_ARTIFACTS_DESTINATION:?expected s3://BUCKET/PREFIX or a folder}"
: "${MLFLOW_AUTH_DATABASE_URI:?expected the database of users, postgresql+psycopg:// or sqlite:////FILE}"
: "${MLFLOW_TRACKING_USERNAME:?expected the name of the user that runs log as}"
: "${MLFLOW_TRACKING_PASSWORD:?expected the password of that user, at least 12 characters}"
: "${MLFLOW_ADMIN_USERNAME:?expected the name of the administrator, which is not that of the user above}"
: "${MLFLOW_ADMIN_PASSWORD:?expected the password of the administrator, at least 12 characters}"
: "${MLFLOW_FLASK_SERVER_SECRET_KEY:?expected a long random string}"
# Whoever trains may write runs. An administrator may also delete those of others, and make users.
if [[ $MLFLOW_ADMIN_USERNAME == "$MLFLOW_TRACKING_USERNAME" ]]; then
    echo "serve.sh: MLFLOW_ADMIN_USERNAME: expected another name than that of MLFLOW_TRACKING_USERNAME" >&2
    exit 2
fi
host=${MLFLOW_HOST:-127.0.0.1} port=${MLFLOW_PORT:-5000}

umask 077
MLFLOW_AUTH_CONFIG_PATH=$(mktemp)
# In this file a % begins a placeholder, and %% is one %.
cat >"$MLFLOW_AUTH_CONFIG_PATH" <<END
[mlflow]
default_permission = NO_PERMISSIONS
database_uri = ${MLFLOW_AUTH_DATABASE_URI//%/%%}
END
export MLFLOW_AUTH_CONFIG_PATH MLFLOW_BACKEND_STORE_URI MLFLOW_ARTIFACTS_DESTINATION MLFLOW_FLASK_SERVER_SECRET_KEY
export MLFLOW_AUTH_ADMIN_USERNAME="$MLFLOW_ADMIN_USERNAME" MLFLOW_AUTH_ADMIN_PASSWORD="$MLFLOW_ADMIN_PASSWORD"
# The server itself creates an administrator that is missing, and changes no password.
python -W ignore - <<'END'
import os
from mlflow.server.auth.sqlalchemy_store import SqlAlchemyStore
store = SqlAlchemyStore()
store.init_db(os.environ["MLFLOW_AUTH_DATABASE_URI"])
for kind in "MLFLOW_AUTH_ADMIN", "MLFLOW_TRACKING":
    name, secret = (os.environ[f"{kind}_{part}"] for part in ("USERNAME", "PASSWORD"))
    if not store.has_user(name):
        if kind == "MLFLOW_TRACKING":
            store.create_user(name, secret)
    elif not store.authenticate_user(name, secret):
        store.update_user(name, secret)
    if kind == "MLFLOW_TRACKING" and store.has_user(name) and store.get_user(name).is_admin:
        store.update_user(name, is_admin=False)  # of a server that made this user its administrator
END
exec mlflow server --app-name basic-auth --host "$host" --port "$port" --workers "${MLFLOW_WORKERS:-2}" \
    --allowed-hosts "${MLFLOW_ALLOWED_HOSTS:-localhost:$port,127.0.0.1:$port,$host:$port}"
