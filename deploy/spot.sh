#!/usr/bin/env bash
# Waits for the cloud's notice that this spot machine goes away, and tells Ray: `spot.sh RAY_ADDRESS`.
# Training then saves a checkpoint before the machine is gone. AWS gives two minutes, GCP half a minute.
set -euo pipefail

address=${1:?expected the address of Ray\'s head, such as 10.0.0.5:6379}
aws=${METADATA:-http://169.254.169.254}
gcp=${METADATA:-http://metadata.google.internal}

ask() { curl --silent --fail --max-time 2 --noproxy '*' "$@"; }

# The seconds that are left, once there is a notice.
notice() {
    local token
    if token=$(ask -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$aws/latest/api/token"); then
        # The header comes from a pipe, so that the token is in no process list.
        printf 'X-aws-ec2-metadata-token: %s' "$token" |
            ask -H @- "$aws/latest/meta-data/spot/instance-action" >/dev/null && echo 110
    elif [ "$(ask -H 'Metadata-Flavor: Google' "$gcp/computeMetadata/v1/instance/preempted")" = TRUE ]; then
        echo 25
    fi
}

until left=$(notice) && [ -n "$left" ]; do sleep 5; done
echo "$(date -Is) this machine goes away in $left s"
export RAY_ADDRESS="$address"
exec ray drain-node --address "$address" --reason DRAIN_NODE_REASON_PREEMPTION \
    --reason-message "the cloud takes this spot machine back" --deadline-remaining-seconds "$left"
