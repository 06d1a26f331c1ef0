#!/usr/bin/env bash
# Verify, tune and measure on the GPU of this machine within ten minutes: benchmarks/gpu.sh [--dry-run]
# Needs torch >= 2.11 and triton >= 3.6. Peers (liger-kernel, transformers, ...) are measured where they are installed.
# --dry-run: the same program without a GPU, under Triton's interpreter, on tiny shapes.
set -euo pipefail
cd "$(dirname "$0")/.."
PY=${PYTHON:-python3}
OUT=${OUT:-outputs/gpu}
mkdir -p "$OUT"
START=$SECONDS
left() { echo $((${LIMIT:-590} - SECONDS + START)); }

if [ "${1:-}" = "--dry-run" ]; then
  exec "$PY" -m benchmarks.gpu --dry-run --json "$OUT/kernels.json"
fi
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit,memory.total --format=csv | tee "$OUT/card.csv" || true
STATUS=0
"$PY" -m benchmarks.gpu --budget 400 --json "$OUT/kernels.json" "$@" 2>&1 | tee "$OUT/kernels.txt" || STATUS=1
export TORCHMOE_CACHE_DIR=${TORCHMOE_CACHE_DIR:-$PWD/outputs/tuning}
for NAME in queue experts; do
  LEFT=$(left)
  if [ "$LEFT" -lt 20 ]; then
    echo "$NAME: not measured (the ten minutes are over)" | tee "$OUT/$NAME.txt"
  else
    timeout "$LEFT" "$PY" -m "benchmarks.$NAME" --quick --json "$OUT/$NAME.json" 2>&1 | tee "$OUT/$NAME.txt" || STATUS=1
  fi
done
exit $STATUS
