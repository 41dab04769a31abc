#!/usr/bin/env bash
# Starts Ray on a machine of aws.yaml or gcp.yaml: `node.sh head` or `node.sh worker`, inside the image.
# Secrets are read from ~/.eagleray.env, Ray's token from ~/.ray/auth_token; the cluster launcher puts both there.
set -euo pipefail

# The settings as Docker and Kubernetes read them: what follows the first = is the value, whatever is in it. Nothing is
# executed or expanded.
number=0
while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    line=${line%$'\r'}
    [[ "$line" =~ ^[[:space:]]*(#|$) ]] && continue
    [[ "$line" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || {
        echo "node.sh: line $number of ~/.eagleray.env: expected NAME=value" >&2
        exit 2
    }
    export "${line%%=*}=${line#*=}"
done <"$HOME/.eagleray.env"
ulimit -n 65536 2>/dev/null || true
address=$(hostname -I | cut -d ' ' -f 1)

# When a process began, in ticks since the machine did; nothing if it has ended. Numbers of processes are used again.
began() {
    sed '/) Z /d; s/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20
}

# What goes on after the launcher's ssh session has ended. What an earlier start left, with its settings, is ended first.
behind() {
    local file pid time turn
    file=$HOME/$(basename "$1")
    if read -r pid time 2>/dev/null <"$file.pid" && [ -n "$time" ]; then
        for turn in {1..60}; do
            [ "$(began "$pid")" = "$time" ] || break
            [ "$turn" -ge 50 ] && kill -KILL -- "-$pid" || kill -- "-$pid" || true
            sleep 0.2
        done
    fi
    setsid nohup "$@" >>"$file.log" 2>&1 </dev/null &
    echo "$! $(began $!)" >"$file.pid"
}

# Ray, and all that runs on it, is not given what MLflow's server alone needs.
server=(MLFLOW_ADMIN_USERNAME MLFLOW_ADMIN_PASSWORD MLFLOW_AUTH_DATABASE_URI MLFLOW_BACKEND_STORE_URI
    MLFLOW_FLASK_SERVER_SECRET_KEY)
start_ray() {
    env "${server[@]/#/-u}" ray start "$@"
}

case "${1:-}" in
head)
    export MLFLOW_HOST="$address" MLFLOW_TRACKING_URI="${MLFLOW_TRACKING_URI:-http://$address:5000}"
    # No CPUs: the driver runs here, and no worker does. The dashboard and the jobs port answer this machine only.
    start_ray --head --num-cpus=0 --num-gpus=0 --port=6379 --object-manager-port=8076 --metrics-export-port=8080 \
        --dashboard-host=127.0.0.1 --dashboard-port=8265 --autoscaling-config="$HOME/ray_bootstrap_config.yaml"
    [ "$MLFLOW_TRACKING_URI" != "http://$address:5000" ] || behind serve.sh
    ;;
worker)
    start_ray --address="$RAY_HEAD_IP:6379" --object-manager-port=8076 --metrics-export-port=8080
    behind spot.sh "$RAY_HEAD_IP:6379"
    ;;
*)
    echo "node.sh: got '${1:-}', expected head or worker" >&2
    exit 2
    ;;
esac
