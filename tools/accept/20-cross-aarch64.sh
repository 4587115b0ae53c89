#!/usr/bin/env bash
# The C++ library for 64-bit ARM: built by the cross-compiler, run by the emulator.
# On Debian: apt-get install g++-aarch64-linux-gnu qemu-user
set -euo pipefail
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$tool" >/dev/null || { echo "$tool is not installed (Debian: g++-aarch64-linux-gnu qemu-user)"; exit 77; }
done
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cmake=$(dirname "${PYTHON:-python3}")/cmake
[ -x "$cmake" ] || cmake=cmake
"$cmake" -S . -B "$build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >"$build/configure.txt"
"$cmake" --build "$build" --target plait_native plait_machine plait_kernel_driver >"$build/build.txt"
# cortex-a53 has no dot product, bf16 or int8 matrix products; the emulator's `max` has them all.
plain=$(qemu-aarch64 -cpu cortex-a53 -L /usr/aarch64-linux-gnu "$build/plait_machine")
full=$(qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu "$build/plait_machine")
echo "cortex-a53: $plain"
echo "max: $full"
grep -q '"features": \["asimd"\]' <<<"$plain"
grep -q '"features": \["asimd", "asimdhp", "asimddp", "sve", "i8mm", "bf16"\]' <<<"$full"
# Every kernel on random shapes against sums in double precision, and plans with several threads.
qemu-aarch64 -cpu cortex-a53 -L /usr/aarch64-linux-gnu "$build/plait_kernel_driver" 10
qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu "$build/plait_kernel_driver" 10
echo "the library runs on 64-bit ARM, tells its CPUs apart, and its kernels agree with plain sums"
