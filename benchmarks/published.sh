#!/usr/bin/env bash
# A piece of the runs whose numbers others have published: ten minutes on the GPU there is. The same command goes on.
#
#   benchmarks/published.sh [RECIPE ...]        CIFAR10=data/cifar-10 and IMAGENETTE=data/imagenette have train and test
#   benchmarks/published.sh --cpu               one epoch of the first recipe on one shard, to see that it works
#
# OUT, runs/published by default, keeps the runs: on a machine that is lent, carry it there and back.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ "${1:-}" = --cpu ]; then
    export CUDA_VISIBLE_DEVICES=""
    exec "$PYTHON" benchmarks/published.py published_simclr_resnet18_cifar10_ep200 --epochs 1 --minutes 60 \
        --out "${OUT:-runs/published-cpu}" "data.train=${CIFAR10:-data/proof/cifar10}/train-{000000..000000}.tar" \
        "data.test=${CIFAR10:-data/proof/cifar10}/test-{000000..000000}.tar"
fi
exec "$PYTHON" benchmarks/published.py --minutes "${MINUTES:-10}" --out "${OUT:-runs/published}" "$@"
