#!/usr/bin/env bash
# 200,000 mutations of small files of every kind that a model directory has: read, or refused in one line, within bounds
# of time and memory (tests/fuzzing.py). One thread each, as many processes as CPUs.
set -euo pipefail
RUST_BACKTRACE=0 OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 PYTHONPATH=src:. "${PYTHON:-python3}" -m tests.fuzzing "${CASES:-200000}"
