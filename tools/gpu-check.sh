#!/usr/bin/env bash
# The check, of about twelve minutes at most, of a machine with a GPU, for the first run on hardware and after each change of kernels.
#
#   tools/gpu-check.sh pack FILE.tar.xz    builds what the check needs, on a machine that can compile
#   tools/gpu-check.sh run [RESULTS]       in the unpacked folder, on the machine with the GPU
#
# Nothing is installed on that machine: programs and NVRTC are carried (NVRTC_FOLDER names the one to pack). Each stage has
# its own time limit and writes RESULTS/STAGE.json when it ends, and its output to RESULTS/STAGE.log, so that a stage that
# hangs loses nothing of the others.
set -uo pipefail

# Builds the programs of the stages and packs them.
pack() {
    local file=$1 root folder
    root=$(cd "$(dirname "$0")/.." && pwd)
    folder=$(mktemp -d)
    : "${NVRTC_FOLDER:?names the folder with libnvrtc.so of the CUDA version to carry}"
    cd "$root" || exit
    cargo build --release --bin mainstem || exit
    cp target/release/mainstem "$folder/" || exit
    cargo test --no-run --message-format json -p mainstem-kernels --test probes >"$folder/built" || exit
    copy_built probes "$folder"
    cargo test --no-run --message-format json -p mainstem-conformance --test cuda >"$folder/built" || exit
    copy_built cuda "$folder" conformance
    cargo bench --no-run --message-format json -p mainstem-kernels --bench cuda >"$folder/built" || exit
    copy_built cuda "$folder" bench
    rm "$folder/built"
    mkdir "$folder/nvrtc"
    cp "$NVRTC_FOLDER"/libnvrtc.so.1* "$NVRTC_FOLDER"/libnvrtc-builtins.so.* "$folder/nvrtc/" || exit
    cp tools/gpu-check.sh "$folder/"
    tar -C "$folder" -cJf "$file" . && rm -r "$folder" && ls -l "$file"
}

# Copies the program of target $1 that cargo lists, stripped, to folder $2 under the name $3.
copy_built() {
    local built
    built=$(grep "\"name\":\"$1\"" "$2/built" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
    cp "$built" "$2/${3:-$1}" && strip "$2/${3:-$1}" || exit
}

# Runs a stage: its name, its limit in seconds, and the command.
stage() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout --kill-after 5 "$limit" "$@" >"$results/$name.log" 2>&1
    status=$?
    printf '{"stage": "%s", "status": %d, "seconds": %d, "limit": %d}\n' \
        "$name" "$status" $((SECONDS - start)) "$limit" | tee "$results/$name.json"
}

# Runs a stage if its tool is there.
stage_with() {
    if command -v "$1" >/dev/null; then
        shift
        stage "$@"
    else
        printf '{"stage": "%s", "skipped": "%s is not installed"}\n' "$2" "$1" | tee "$results/$2.json"
    fi
}

run() {
    results=${1:-results}
    mkdir -p "$results"
    # Not the emulator, but the driver of this machine.
    export MAINSTEM_GPU=1 NVRTC_FOLDER=$PWD/nvrtc
    stage_with nvidia-smi driver 10 nvidia-smi
    stage devices 20 ./mainstem devices --json --nvrtc "$NVRTC_FOLDER"
    stage probes 60 ./probes
    stage conformance 240 ./conformance
    # The order of warps and of blocks is the machine's own: results of the same rows in other company have equal bits.
    stage company 30 ./conformance invariance chunking moves paging output_selection
    MAINSTEM_DEVICE_NVRTC=$NVRTC_FOLDER stage demo 30 ./mainstem run --device cuda -p "Once upon a time"
    stage_with compute-sanitizer memory 80 compute-sanitizer --target-processes all --error-exitcode 1 ./conformance embed matmul attention_options
    stage_with compute-sanitizer races 80 compute-sanitizer --target-processes all --tool racecheck --error-exitcode 1 ./conformance norm sample_tokens
    stage timings 150 ./bench
    stage_with ncu profile 40 ncu --set basic --launch-count 5 ./bench q8_0
    # Fails if a stage did.
    ! grep -l '"status": [^0]' "$results"/*.json
}

case ${1:-} in
pack) pack "${2:?FILE.tar.xz}" ;;
run) run "${2:-}" ;;
*) sed -n '2,10s/^# \?//p' "$0" && exit 2 ;;
esac
