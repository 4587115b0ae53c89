#!/usr/bin/env bash
# A clone of what is committed, set up from nothing: demo and wheel with the compiler, then both without one.
set -euo pipefail
top=$(git rev-parse --show-toplevel)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

answer() { # FOLDER WHAT: the demo answers there, and says how fast
  echo "-- make demo $2"
  make -C "$1" --no-print-directory demo | tee "$scratch/demo.txt"
  grep -q 'tokens/s' "$scratch/demo.txt" || { echo "the demo printed no tokens/s"; exit 1; }
}

git clone --quiet "$top" "$scratch/with"
answer "$scratch/with" "with a compiler"
grep -q 'native library: loaded from' "$scratch/demo.txt" || { echo "the native library was not built"; exit 1; }
make -C "$scratch/with" --no-print-directory wheel

git clone --quiet "$top" "$scratch/without"
export CC=/bin/false CXX=/bin/false
answer "$scratch/without" "without a compiler"
grep -q 'native library: not built' "$scratch/demo.txt" || { echo "a native library came from nowhere"; exit 1; }
make -C "$scratch/without" --no-print-directory wheel
ls "$scratch"/without/dist/*-none-any.whl >/dev/null
echo "demo and wheel work in a clean clone, with and without a compiler"
