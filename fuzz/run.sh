#!/bin/sh
# Runs the targets one after the other, each for SECONDS, and prints a summary line for each.
# Usage: fuzz/run.sh SECONDS [TARGET...]     (SEED: libFuzzer's random seed, default 1)
set -eu

seconds=$1
shift
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- $(cd fuzz_targets && ls | sed 's/\.rs$//')

longest() {
    case $1 in
    formula | regex) echo 512 ;;
    event_stream | request | settings) echo 2048 ;;
    grammar | json_schema | output_parser) echo 4096 ;;
    chat_template | config | generation_config | safetensors | spec) echo 8192 ;;
    gguf) echo 65536 ;;
    *) echo 20000 ;;
    esac
}

cargo +nightly fuzz build --fuzz-dir . >&2
printf '%-18s %7s %10s %6s  %s\n' target seconds executions edges found
for target; do
    mkdir -p "artifacts/$target" "corpus/$target"
    log=artifacts/$target.log
    found=nothing
    cargo +nightly fuzz run --fuzz-dir . "$target" -- -seed="${SEED:-1}" -max_total_time="$seconds" -timeout=5 \
        -rss_limit_mb=2048 -malloc_limit_mb=256 -max_len="$(longest "$target")" -print_final_stats=1 \
        >"$log" 2>&1 || found=$(grep -m1 -oE '(SUMMARY|ERROR): .*' "$log" || echo "see $log")
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    edges=$(grep -oE 'cov: [0-9]+' "$log" | tail -1 | cut -d' ' -f2)
    printf '%-18s %7s %10s %6s  %s\n' "$target" "$seconds" "${executions:-?}" "${edges:-?}" "$found"
done
