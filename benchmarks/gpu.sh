#!/usr/bin/env bash
# Every GPU test and benchmark on a machine with a GPU; nothing is fetched. A call ends within eight minutes, and the next one
# goes on with the parts that have no line yet in gpu.jsonl. What nobody has measured yet comes first.
#
#   benchmarks/gpu.sh          JSON lines to ${OUT:-benchmarks/results}/gpu.jsonl, what was printed on the way to gpu.log
#   benchmarks/gpu.sh methods  only these parts, also where they have lines
#   LIMIT=240 benchmarks/gpu.sh    ends within so many seconds, and begins no part that might take longer
#   OUT=FOLDER benchmarks/gpu.sh   all parts again, in calls of eight minutes
#   benchmarks/gpu.sh --cpu    the same commands with tiny sizes on a CPU, to see that they work; OUT keeps their lines
#
# The parts are steps of EsViT, SelfPatch and DRLoc, and pieces of a step beside the plain way (each under a minute), then a
# whole `pretrain` of every method, steps of ViT-S/16, B/16 and L/16 with synthetic and real input, in each precision and with
# compilation, and the GPU tests. A part that fails has a line that says so, and the others go on. The table is last.
# Wheels of missing packages are used from ./.whl, if there is such a folder.
set -u
cd "$(dirname "$0")/.." || exit 1

PYTHON=${PYTHON:-python3}
NEEDS="torch torchvision timm numpy PIL cv2 pyarrow pydantic yaml platformdirs braceexpand isal pytest"
END=${LIMIT:-465} # seconds
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cpu=no
[ "${1:-}" != --cpu ] || { cpu=yes && shift && OUT=${OUT:-$work/results}; }
OUT=${OUT:-benchmarks/results}
mkdir -p "$OUT"
lines=$OUT/gpu.jsonl log=$OUT/gpu.log
touch "$lines"
parts=" $* " unknown=" $* "

if compgen -G ".whl/*.whl" >/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" .whl/*.whl 2>>"$log"
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi
missing=$(
    "$PYTHON" - $NEEDS <<'END'
import importlib.util
import sys

def absent(name):
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return True

print(*filter(absent, sys.argv[1:]))
END
) || exit 2
echo "needs $NEEDS${missing:+; missing: $missing}" >&2
[ -z "$missing" ] || exit 2

if [ $cpu = yes ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
    small="backbone.options={img_size: 32, patch_size: 8, embed_dim: 48, depth: 2, num_heads: 3}"
    steps=(--steps 2 --warmup 1 --batch 8 data.workers=2)
    dino=("$small" "views=[{size: 32, count: 2}, {size: 16, count: 8}]" method.prototypes=64 method.hidden=32)
    two=("$small" "views=[{size: 32, count: 2}]" method.hidden=64)
    swin="backbone.options={embed_dim: 24, depths: [1, 1, 2, 1], num_heads: [1, 2, 4, 8]"
    esvit=("$swin}" "views=[{size: 64, count: 2}, {size: 32, count: 8}]" method.prototypes=64 method.hidden=32)
    drloc=("$swin, img_size: 64}" "views=[{size: 64}]")
    kernels=(--share 0.004 --rounds 1) crops=(--images 2 --rounds 1)
    shards=(--images 64 --distinct 4 --width 64 --height 48)
    loader=(--images 2 --rounds 1) photometric=(--images 2 --rounds 1)
    tests=(tests/devices/test_gpu.py)
    methods=(--methods mocov3 dino) some=(--methods mocov3) jobs=(--jobs 2)
    base=("vitb16 optim.batch=4 data.lanes=4") large=() low=(bf16 fp32) compiled=() half=bf16 ranks=0
    usual="compile=false" best="eager compile=false"
    END=36000 # a slow CPU is no fault, and limits are those of a GPU
else
    steps=(--steps 25 --warmup 10 data.workers=14 data.lanes=64)
    dino=() two=() esvit=() drloc=() kernels=() crops=()
    shards=(--images 4096 --distinct 128)
    loader=(--images 64) photometric=(--images 256)
    # Files with such tests only: others may import packages that are not here.
    mapfile -t tests < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    tests+=(-m gpu)
    methods=() some=(--methods mocov3 dino esvit) jobs=(--jobs 14)
    base=("vitb16 compile=false backbone.name=vit_base_patch16_224 optim.batch=256")
    large=("vitl16 compile=false backbone.name=vit_large_patch16_224 optim.batch=64")
    low=(fp16 fp32) compiled=("vits16-compiled compile=true") half=fp16
    usual="compile=false" best="compiled compile=true"
    ranks=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
fi

# name, seconds it may take, command. Every JSON object that it prints becomes a line; the last line does where there is none.
# Status 124: it took longer.
measure() {
    local name=$1 limit=$2 begin=$SECONDS status line
    shift 2
    unknown=${unknown/ $name / }
    if [ "$parts" != "  " ]; then
        [[ $parts == *" $name "* ]] || return
    elif grep -q "^{\"name\": \"$name\"," "$lines"; then
        return
    fi
    [ $cpu = no ] || limit=$((END - SECONDS))
    if ((SECONDS + limit > END)); then
        echo "$name: not begun, as it may take $limit seconds; call again" >&2
        return
    fi
    if [[ $* == *"$work/shards"* && ! -d $work/shards ]]; then
        "$PYTHON" benchmarks/synthetic.py "$work/shards" "${shards[@]}" 2>>"$log"
    fi
    printf '\n== %s: %s\n' "$name" "$*" >>"$log"
    timeout --kill-after=5 "$limit" "$@" >"$work/printed" 2>>"$log"
    status=$?
    cat "$work/printed" >>"$log"
    ((status == 0)) && status=ok
    grep '^{.*}$' "$work/printed" >"$work/objects" || printf '"%s"\n' "$(tail -n 1 "$work/printed" | tr -cd '[:alnum:] .,=')" >"$work/objects"
    while read -r line; do
        printf '{"name": "%s", "status": "%s", "seconds": %d, "result": %s}\n' "$name" "$status" $((SECONDS - begin)) "$line" |
            tee -a "$lines" | cut -c 1-100 >&2
    done <"$work/objects"
}

step() { # name, seconds, recipe, keys of the recipe; then `--` and cases, each a name and keys
    local name=$1 limit=$2 recipe=benchmarks/recipes/$3.yaml keys=() cases=()
    shift 3
    while (($#)) && [ "$1" != -- ]; do keys+=("$1") && shift; done
    shift || true
    while (($#)); do cases+=(--case "$1") && shift; done
    measure "$name" "$limit" "$PYTHON" benchmarks/step.py "$recipe" "${steps[@]}" --json "${keys[@]}" "${cases[@]}"
}

real=data.train=$work/shards
precisions=()
for name in "${low[@]}"; do precisions+=("vits16-$name compile=false precision=$name"); done

step esvit 55 esvit_swint --synthetic "${esvit[@]}" -- "swint $usual"
step esvit-compiled 58 esvit_swint --synthetic "${esvit[@]}" -- "swint-$best"
step selfpatch 50 selfpatch_vits16 --synthetic "${dino[@]}" -- "vits16 $usual"
step selfpatch-compiled 58 selfpatch_vits16 --synthetic "${dino[@]}" -- "vits16-$best"
step drloc 45 drloc_swint --synthetic "${drloc[@]}" -- "swint $usual"
step drloc-compiled 58 drloc_swint --synthetic "${drloc[@]}" -- "swint-$best"
measure crops 55 "$PYTHON" benchmarks/crops.py --json "${crops[@]}"
measure prototypes 55 "$PYTHON" benchmarks/kernels.py prototypes --json "${kernels[@]}"
measure windows 55 "$PYTHON" benchmarks/kernels.py windows --json "${kernels[@]}"
measure methods 130 "$PYTHON" benchmarks/methods.py --json "${jobs[@]}" compile=false "${methods[@]}"
measure methods-half 70 "$PYTHON" benchmarks/methods.py --json "${jobs[@]}" compile=false "precision=$half" "${some[@]}"
((ranks < 2)) || measure methods-2-gpus 100 "$PYTHON" benchmarks/methods.py --json compile=false --ranks 2
step mocov3 150 mocov3_vits16 --synthetic "${two[@]}" -- "vits16 $usual" "${compiled[@]}" "${precisions[@]}" "${base[@]}"
step mocov3-real 60 mocov3_vits16 "$real" "${two[@]}" -- "vits16-$best"
step dino 130 dino_vits16 --synthetic "${dino[@]}" -- "vits16 $usual" "${compiled[@]}" "${base[@]}" "${large[@]}"
step dino-real 120 dino_vits16 "$real" "${dino[@]}" -- "vits16-$best"
step simclr 70 simclr_vits16 --synthetic "${two[@]}" -- "vits16 $usual" "${compiled[@]}"
step simclr-real 60 simclr_vits16 "$real" "${two[@]}" -- "vits16-$best"
measure tests 80 "$PYTHON" -m pytest -q -p no:cacheprovider "${tests[@]}"
measure photometric 60 "$PYTHON" benchmarks/photometric.py --json "${photometric[@]}"
measure loader 60 "$PYTHON" benchmarks/loader.py --json --data "$work/shards" "${loader[@]}"

"$PYTHON" benchmarks/table.py "$lines"
[ -z "${unknown// /}" ] || { echo "error: no part is called${unknown% }" >&2 && exit 2; }
