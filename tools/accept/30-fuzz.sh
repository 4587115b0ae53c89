#!/usr/bin/env bash
# 200,000 mutations of small files of every kind that a model directory has: read, or refused in one line, within bounds
# of time and memory (tests/fuzzing.py). One thread each, as many processes as CPUs. The tokenizers library prints its
# panics, which plait catches, with paths of where it was built: they do not belong in the report.
set -euo pipefail
RUST_BACKTRACE=0 OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 PYTHONPATH=src:. "${PYTHON:-python3}" -m tests.fuzzing "${CASES:-200000}" \
  2> >(grep -Ev "panicked at|no entry found for key|RUST_BACKTRACE|^$" >&2)
