// Products of one matrix on their own, for tests and measurements.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "kernels/kernels.h"

using namespace plait;

int32_t plait_matmul(const char *isa, const PlaitMatrix *matrix, const void *x, int64_t x_stride, int64_t tokens,
                     float *out, int64_t out_stride, const float *bias, const float *add, int64_t add_stride) {
  const Kernels *kernels = find_kernels(isa);
  if (kernels == nullptr) return fail("instruction set %s is not available", isa == nullptr ? "(PLAIT_ISA)" : isa);
  if (matrix->layout < 0 || matrix->layout >= PLAIT_LAYOUT_COUNT || matrix->rows <= 0 ||
      plait_packed_bytes(matrix->layout, matrix->rows, matrix->cols) < 0)
    return fail("no matrix: layout %d, %lld x %lld", matrix->layout, (long long)matrix->rows, (long long)matrix->cols);
  const MatmulArgs args = {matrix, static_cast<const uint8_t *>(x), x_stride, out, out_stride, bias, add, add_stride};
  kernels->matmul[matrix->layout](args, 0, (matrix->rows + kPanelRows - 1) / kPanelRows, 0, tokens);
  return 0;
}

int32_t plait_quantise(const char *isa, const float *x, int64_t x_stride, int64_t rows, int64_t cols, void *out) {
  const Kernels *kernels = find_kernels(isa);
  if (kernels == nullptr) return fail("instruction set %s is not available", isa == nullptr ? "(PLAIT_ISA)" : isa);
  const int64_t bytes = plait_quantised_row_bytes(cols);
  if (bytes < 0) return fail("%lld columns are no multiple of 32", (long long)cols);
  for (int64_t r = 0; r < rows; r++)
    kernels->quantise(x + r * x_stride, cols, 0, cols / 32, static_cast<uint8_t *>(out) + r * bytes);
  return 0;
}

double plait_measure_matmul(int32_t layout, int32_t threads, double seconds) try {
  const Kernels *kernels = find_kernels(nullptr);
  // 64 KB to 256 KB of weights and as many tokens as keep the unpacking cheap: everything stays in the second level.
  constexpr int64_t rows = 128, cols = 512, tokens = 48;
  const int64_t bytes = plait_packed_bytes(layout, rows, cols);
  if (kernels == nullptr || layout < 0 || layout >= PLAIT_LAYOUT_COUNT || bytes < 0) return 0;
  std::atomic<int> waiting{threads};
  std::vector<double> rates(threads > 0 ? (size_t)threads : 1);  // multiply-adds per second of each thread
  auto work = [&](size_t index) {
    const int64_t x_bytes = is_quantised(layout) ? plait_quantised_row_bytes(cols) : cols * 4;
    void *weights = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    void *records = aligned_alloc(64, (size_t)(tokens * x_bytes));
    std::vector<float> x, out;
    try {
      x.resize(cols);
      out.resize(rows * tokens);
    } catch (const std::exception &) {
    }
    if (weights == nullptr || records == nullptr || x.empty() || out.empty()) {  // no memory: the others go on
      free(weights);
      free(records);
      waiting--;
      return;
    }
    // Any bits do for weights as long as no scale is a NaN or a subnormal number: 0x2a.. is a half near 0.05.
    memset(weights, 0x2a, (size_t)bytes);
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t c = 0; c < cols; c++) x[c] = sinf((float)(t * cols + c));
      uint8_t *row = static_cast<uint8_t *>(records) + t * x_bytes;
      if (is_quantised(layout))
        kernels->quantise(x.data(), cols, 0, cols / 32, row);
      else
        memcpy(row, x.data(), (size_t)x_bytes);
    }
    const PlaitMatrix matrix = {layout, 0, rows, cols, bytes / (rows / kPanelRows), weights};
    const MatmulArgs args = {&matrix, static_cast<const uint8_t *>(records), x_bytes, out.data(), rows, nullptr, nullptr,
                             0};
    kernels->matmul[layout](args, 0, rows / kPanelRows, 0, tokens);
    waiting--;
    while (waiting > 0) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    double elapsed = 0;
    for (int64_t rounds = 1; rounds == 1 || elapsed < seconds; rounds++) {
      kernels->matmul[layout](args, 0, rows / kPanelRows, 0, tokens);
      elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      rates[index] = elapsed > 0 ? (double)(rounds * rows * cols * tokens) / elapsed : 0;
    }
    free(weights);
    free(records);
  };
  std::vector<std::thread> helpers;
  try {
    for (int32_t i = 1; i < threads; i++) helpers.emplace_back(work, (size_t)i);
  } catch (const std::exception &) {  // fewer threads than asked for
    waiting -= threads - 1 - (int)helpers.size();
  }
  work(0);
  for (std::thread &helper : helpers) helper.join();
  double total = 0;
  for (double rate : rates) total += rate;
  return total;
} catch (...) {
  fail_with_exception();
  return 0;
}
