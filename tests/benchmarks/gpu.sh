#!/bin/sh
# Everything that needs a GPU, within ten minutes on one card: the tests marked gpu, then bench_gpu (its arguments are this script's).
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python}
$python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu.sh: no CUDA device is visible; run it on a machine with one")' || exit 2
timeout 240 $python -m pytest -q -m gpu tests/gpu tests/unit/workers/attention
tests=$?
timeout 350 $python -m tests.benchmarks.bench_gpu "$@" && exit $tests
