#!/usr/bin/env bash
# Every GPU test and benchmark on a machine with one GPU, in under eight minutes; nothing is fetched.
#
#   benchmarks/gpu.sh          JSON lines to ${OUT:-benchmarks/results}/gpu.jsonl, what was printed on the way to gpu.log
#   benchmarks/gpu.sh --cpu    the same commands with tiny sizes on a CPU, to see that they work
#
# Needs torch, torchvision, timm, numpy, pillow, pyarrow, pydantic and PyYAML; wheels in ./.whl are used where there are any.
set -u
cd "$(dirname "$0")/.." || exit 1

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
END=460 # seconds after which nothing is started any more
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT"
lines=$OUT/gpu.jsonl log=$OUT/gpu.log
: >"$lines"
: >"$log"

if compgen -G ".whl/*.whl" >/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" .whl/*.whl 2>>"$log"
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi

if [ "${1:-}" = --cpu ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
    small="backbone.options={img_size: 32, patch_size: 8, embed_dim: 48, depth: 2, num_heads: 2}"
    steps=(--steps 2 --warmup 1 --batch 8 "$small" data.workers=2)
    dino=("views=[{size: 32, count: 2}, {size: 16, count: 8}]" method.prototypes=64 method.hidden=32)
    mocov3=("views=[{size: 32, count: 2}]" method.hidden=64)
    shards=(--images 64 --distinct 4 --width 64 --height 48)
    loader=(--images 2 --rounds 1) photometric=(--images 2 --rounds 1)
    tests=(tests/devices/test_gpu.py)
else
    steps=(--steps 40 --warmup 15 data.workers=12)
    dino=() mocov3=()
    shards=(--images 4096 --distinct 128)
    loader=(--images 64) photometric=(--images 256)
    # Files with such tests only: others may import packages that are not here.
    mapfile -t tests < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    tests+=(-m gpu)
fi

# name, seconds it may take, command: its last line becomes the result. Status 124: it took longer.
measure() {
    local name=$1 limit=$2 begin=$SECONDS last="" status=skipped
    shift 2
    if ((SECONDS < END)); then
        ((limit < END - SECONDS)) || limit=$((END - SECONDS))
        printf '\n== %s: %s\n' "$name" "$*" >>"$log"
        timeout --kill-after=5 "$limit" "$@" >"$work/printed" 2>>"$log"
        status=$?
        cat "$work/printed" >>"$log"
        last=$(tail -n 1 "$work/printed")
        ((status == 0)) && status=ok
    fi
    [[ $last == "{"*"}" ]] || last="\"$(tr -cd '[:alnum:] .,=' <<<"$last")\""
    printf '{"name": "%s", "status": "%s", "seconds": %d, "result": %s}\n' \
        "$name" "$status" $((SECONDS - begin)) "$last" | tee -a "$lines" | cut -c 1-100 >&2
}

step() { # name, seconds, recipe, more
    local name=$1 limit=$2 recipe=benchmarks/recipes/$3.yaml
    shift 3
    measure "$name" "$limit" "$PYTHON" benchmarks/step.py "$recipe" "${steps[@]}" --json "$@"
}

"$PYTHON" benchmarks/synthetic.py "$work/shards" "${shards[@]}" 2>>"$log"
real=data.train=$work/shards

measure tests 100 "$PYTHON" -m pytest -q -p no:cacheprovider "${tests[@]}"
step mocov3-synthetic 50 mocov3_vits16 --synthetic "${mocov3[@]}"
step mocov3-real 60 mocov3_vits16 "$real" "${mocov3[@]}"
step dino-synthetic 50 dino_vits16 --synthetic "${dino[@]}"
step dino-real 70 dino_vits16 "$real" "${dino[@]}"
measure photometric 40 "$PYTHON" benchmarks/photometric.py --json "${photometric[@]}"
measure loader 60 "$PYTHON" benchmarks/loader.py --json --data "$work/shards" "${loader[@]}"

"$PYTHON" benchmarks/table.py "$lines"
