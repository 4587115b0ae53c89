#!/usr/bin/env bash
# kill -9 at 20 random moments of a training of 60 steps, some of them while a checkpoint is written: resumed, it ends with
# the bit-identical weights and optimiser, and a log without gaps or doubles (tests/training/kills.py).
set -euo pipefail
OMP_NUM_THREADS=1 PYTHONPATH=src:. "${PYTHON:-python3}" -m tests.training.kills "${KILLS:-20}"
