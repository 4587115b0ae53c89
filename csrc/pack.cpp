// Packs matrices into panels of 16 rows and reads rows of packed matrices (layouts: csrc/plait_native.h).
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/layouts.h"

#define PLAIT_ISA_NAMESPACE packing  // the conversions of vec.h, compiled for any CPU
#include "kernels/vec.h"

namespace plait {
namespace {

constexpr int kLanes = 16;
constexpr uint32_t kLow = 0x0f0f0f0fu;

bool known(int32_t layout) { return layout >= 0 && layout < PLAIT_LAYOUT_COUNT; }

// Bytes of one panel; -1 where the columns do not divide into the layout's blocks.
int64_t panel_bytes(int32_t layout, int64_t cols) {
  if (!known(layout) || cols <= 0 || cols > INT32_MAX) return -1;
  const LayoutUnit unit = kLayoutUnits[layout];
  if (is_quantised(layout) && (cols % unit.cols != 0 || cols > kMaxQuantisedCols)) return -1;
  return (cols + unit.cols - 1) / unit.cols * unit.bytes;
}

uint32_t word(const uint8_t *p, int64_t index = 0) {
  uint32_t value;
  memcpy(&value, p + 4 * index, 4);
  return value;
}

// Lane `lane` of word group `group`: 16 lanes of 4 bytes each.
void put_word(uint8_t *out, int64_t group, int lane, uint32_t value) {
  memcpy(out + (group * kLanes + lane) * 4, &value, 4);
}

void put_half(uint8_t *out, int lane, const uint8_t *source) { memcpy(out + lane * 2, source, 2); }

// One unit of one row, from the file's form `p` into lane `lane` of the panel's unit `out`.
void pack_simple(int32_t layout, const uint8_t *p, int lane, uint8_t *out) {
  put_half(out, lane, p);
  p += 2;
  out += 32;
  if (layout == PLAIT_LAYOUT_Q4_1 || layout == PLAIT_LAYOUT_Q5_1) {
    put_half(out, lane, p);
    p += 2;
    out += 32;
  }
  if (layout == PLAIT_LAYOUT_Q5_0 || layout == PLAIT_LAYOUT_Q5_1) {
    // Bit n of the file's word belongs to column n: 4 neighbours are spread over the 4 bytes.
    const uint32_t bits = word(p);
    uint32_t spread = 0;
    for (int j = 0; j < 8; j++) {
      const uint32_t four = bits >> 4 * j & 15;
      spread |= ((four | four << 7 | four << 14 | four << 21) & 0x01010101u) << j;
    }
    put_word(out, 0, lane, spread);
    p += 4;
    out += 64;
  }
  const int words = layout == PLAIT_LAYOUT_Q8_0 ? 8 : 4;  // the file has the halves of 16 columns in the same order
  for (int j = 0; j < words; j++) put_word(out, j, lane, word(p, j));
}

// Scale and minimum of block b of a Q4_K or Q5_K super-block: 6 bits each, packed into 12 bytes.
void scale_min(const uint8_t *packed, int b, uint8_t *scale, uint8_t *min) {
  if (b < 4) {
    *scale = packed[b] & 63;
    *min = packed[b + 4] & 63;
  } else {
    *scale = (packed[b + 4] & 15) | (packed[b - 4] >> 6 << 4);
    *min = (packed[b + 4] >> 4) | (packed[b] >> 6 << 4);
  }
}

void pack_k(int32_t layout, const uint8_t *p, int lane, uint8_t *out) {
  const bool five = layout == PLAIT_LAYOUT_Q5_K;
  put_half(out, lane, p);
  put_half(out + 32, lane, p + 2);
  for (int b = 0; b < 8; b++) scale_min(p + 4, b, out + 64 + b * kLanes + lane, out + 64 + 128 + b * kLanes + lane);
  const uint8_t *high = p + 16, *quants = five ? p + 48 : p + 16;
  out += 64 + 256;
  for (int b = 0; b < 8; b++) {
    if (five) {  // bit b of byte l is the fifth bit of column l of block b
      uint32_t bits = 0;
      for (int j = 0; j < 8; j++) bits |= (word(high, j) >> b & 0x01010101u) << j;
      put_word(out, 0, lane, bits);
      out += 64;
    }
    // 64 columns share 32 bytes: the first 32 are the low halves.
    const uint8_t *pair = quants + b / 2 * 32;
    const int shift = b % 2 * 4;
    for (int j = 0; j < 4; j++)
      put_word(out, j, lane, (word(pair, j) >> shift & kLow) | (word(pair, 4 + j) >> shift & kLow) << 4);
    out += 256;
  }
}

void pack_q6_k(const uint8_t *p, int lane, uint8_t *out) {
  const uint8_t *quants = p, *high = p + 128, *scales = p + 192;
  put_half(out, lane, p + 208);
  for (int b = 0; b < 16; b++) out[32 + b * kLanes + lane] = scales[b];
  out += 32 + 256;
  for (int b = 0; b < 8; b++) {
    // 128 columns are 64 bytes of low bits (blocks 0, 1 low halves, 2, 3 high halves) and 32 bytes of 4 x 2 high bits.
    const int k = b % 4, shift = k / 2 * 4;
    const uint8_t *low = quants + b / 4 * 64 + k % 2 * 32, *top = high + b / 4 * 32;
    uint32_t first = 0, second = 0;
    for (int j = 0; j < 4; j++) {
      first |= (word(top, j) >> 2 * k & 0x03030303u) << 2 * j;
      second |= (word(top, 4 + j) >> 2 * k & 0x03030303u) << 2 * j;
    }
    put_word(out, 0, lane, first);
    put_word(out, 1, lane, second);
    for (int j = 0; j < 4; j++)
      put_word(out + 128, j, lane, (word(low, j) >> shift & kLow) | (word(low, 4 + j) >> shift & kLow) << 4);
    out += 128 + 256;
  }
}

void pack_quantised(int32_t layout, const uint8_t *const *row, int lanes, int64_t cols, uint8_t *out) {
  const LayoutUnit unit = kLayoutUnits[layout];
  for (int64_t u = 0; u < cols / unit.cols; u++, out += unit.bytes)
    for (int lane = 0; lane < lanes; lane++) {
      const uint8_t *p = row[lane] + u * unit.source_bytes;
      if (layout == PLAIT_LAYOUT_Q6_K)
        pack_q6_k(p, lane, out);
      else if (layout == PLAIT_LAYOUT_Q4_K || layout == PLAIT_LAYOUT_Q5_K)
        pack_k(layout, p, lane, out);
      else
        pack_simple(layout, p, lane, out);
    }
}

uint16_t half_word(const uint8_t *p, int64_t index) {
  uint16_t value;
  memcpy(&value, p + 2 * index, 2);
  return value;
}

// Rows of floats in their own layout: numbers change places, not bits.
void pack_same(int32_t layout, const uint8_t *const *row, int lanes, int64_t cols, uint8_t *out) {
  if (layout == PLAIT_LAYOUT_F16) {
    for (int64_t c = 0; c < cols; c++)
      for (int lane = 0; lane < lanes; lane++) put_half(out + c * 32, lane, row[lane] + 2 * c);
    return;
  }
  const int64_t words = layout == PLAIT_LAYOUT_F32 ? cols : cols / 2;
  for (int64_t j = 0; j < words; j++)
    for (int lane = 0; lane < lanes; lane++) put_word(out, j, lane, word(row[lane], j));
  if (layout == PLAIT_LAYOUT_BF16 && cols % 2 != 0)
    for (int lane = 0; lane < kLanes; lane++) put_word(out, words, lane, lane < lanes ? half_word(row[lane], cols - 1) : 0);
}

// Rows of floats (row stride `cols`) into a float layout.
void pack_floats(int32_t layout, const float *rows, int lanes, int64_t cols, uint8_t *out) {
  if (layout == PLAIT_LAYOUT_BF16 && cols % 2 != 0) memset(out + cols / 2 * 64, 0, 64);
  for (int64_t c = 0; c < cols; c++)
    for (int lane = 0; lane < lanes; lane++) {
      const float value = rows[lane * cols + c];
      if (layout == PLAIT_LAYOUT_F32) {
        memcpy(out + (c * kLanes + lane) * 4, &value, 4);
      } else if (layout == PLAIT_LAYOUT_F16) {
        const uint16_t bits = packing::to_half(value);
        memcpy(out + (c * kLanes + lane) * 2, &bits, 2);
      } else {
        const uint16_t bits = packing::to_bf16(value);
        memcpy(out + c / 2 * 64 + lane * 4 + c % 2 * 2, &bits, 2);
      }
    }
}

void read_floats(int32_t format, const uint8_t *row, int64_t cols, float *out) {
  if (format == PLAIT_LAYOUT_F32) memcpy(out, row, (size_t)cols * 4);
  if (format == PLAIT_LAYOUT_BF16)
    for (int64_t c = 0; c < cols; c++) out[c] = packing::from_bf16(half_word(row, c));
  if (format == PLAIT_LAYOUT_F16)
    for (int64_t c = 0; c < cols; c++) out[c] = packing::from_half(half_word(row, c));
}

// The best kernels that run here; unpacking is exact in all of them, so a PLAIT_ISA that does not exist is no matter.
const Kernels &any_kernels() {
  const Kernels *kernels = find_kernels(nullptr);
  return kernels == nullptr ? *all_kernels()[0] : *kernels;
}

struct Packing {
  const Kernels &kernels;
  int32_t format, layout;
  const uint8_t *source;
  int64_t row_bytes;
  const int64_t *row_index;
  int64_t rows, cols;
  int64_t format_bytes, layout_bytes;  // of a panel
  uint8_t *out;

  void panel(int64_t index, uint8_t *own_panel, float *floats) const {
    const uint8_t *row[kLanes];
    const int lanes = (int)(rows - index * kLanes < kLanes ? rows - index * kLanes : kLanes);
    for (int lane = 0; lane < lanes; lane++) {
      const int64_t r = index * kLanes + lane;
      row[lane] = source + (row_index != nullptr ? row_index[r] : r) * row_bytes;
    }
    uint8_t *to = out + index * layout_bytes;
    if (lanes < kLanes) memset(to, 0, (size_t)layout_bytes);  // rows beyond the last are zeros
    if (format == layout && is_quantised(layout)) {
      pack_quantised(layout, row, lanes, cols, to);
    } else if (format == layout) {
      pack_same(layout, row, lanes, cols, to);
    } else {
      if (is_quantised(format)) {
        pack_quantised(format, row, lanes, cols, own_panel);
        const PlaitMatrix matrix = {format, 0, lanes, cols, format_bytes, own_panel};
        for (int lane = 0; lane < lanes; lane++) kernels.unpack_row(matrix, lane, floats + lane * cols);
      } else {
        for (int lane = 0; lane < lanes; lane++) read_floats(format, row[lane], cols, floats + lane * cols);
      }
      pack_floats(layout, floats, lanes, cols, to);
    }
  }
};

}  // namespace
}  // namespace plait

using namespace plait;

int64_t plait_packed_bytes(int32_t layout, int64_t rows, int64_t cols) {
  if (layout == PLAIT_LAYOUT_VECTOR) return rows == 1 && cols > 0 ? cols * 4 : -1;
  const int64_t bytes = panel_bytes(layout, cols);
  if (bytes < 0 || rows <= 0 || rows > INT32_MAX) return -1;
  return (rows + kLanes - 1) / kLanes * bytes;
}

int64_t plait_quantised_row_bytes(int64_t cols) {
  if (cols <= 0 || cols % 32 != 0) return -1;
  return (cols + cols / 32 * 4 + cols / 16 * 4 + 63) / 64 * 64;
}

int32_t plait_pack(int32_t format, int32_t layout, const void *source, int64_t source_row_bytes,
                   const int64_t *row_index, int64_t rows, int64_t cols, void *out, int32_t threads) try {
  if (!known(format) || !known(layout)) return fail("cannot pack format %d into layout %d", format, layout);
  if (is_quantised(layout) && format != layout)
    return fail("cannot pack format %d into layout %d: nothing is quantised here", format, layout);
  if (plait_packed_bytes(layout, rows, cols) < 0 || panel_bytes(format, cols) < 0)
    return fail("a matrix of %lld x %lld does not exist in format %d, layout %d", (long long)rows, (long long)cols,
                format, layout);
  if (source == nullptr || out == nullptr) return fail("no memory to pack from or into");
  if (row_index != nullptr)
    for (int64_t r = 0; r < rows; r++)
      if (row_index[r] < 0) return fail("row index %lld is negative", (long long)row_index[r]);

  const Packing job = {any_kernels(), format, layout, static_cast<const uint8_t *>(source), source_row_bytes,
                       row_index, rows, cols, panel_bytes(format, cols), panel_bytes(layout, cols),
                       static_cast<uint8_t *>(out)};
  const bool expands = format != layout;
  const int64_t own_bytes = expands && is_quantised(format) ? job.format_bytes : 0;
  const int64_t float_bytes = expands ? kLanes * cols * 4 : 0;
  const int64_t panels = (rows + kLanes - 1) / kLanes;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  // A few panels at a time: at least 64 KB, so that threads seldom meet.
  const int64_t step = 1 + (64 << 10) / job.layout_bytes;
  auto work = [&] {
    uint8_t *scratch = nullptr;
    if (expands) {
      scratch = static_cast<uint8_t *>(malloc((size_t)(own_bytes + float_bytes)));
      if (scratch == nullptr) {
        failed = true;
        return;
      }
    }
    for (int64_t first; (first = next.fetch_add(step)) < panels;)
      for (int64_t p = first; p < panels && p < first + step; p++)
        job.panel(p, scratch + float_bytes, reinterpret_cast<float *>(scratch));
    free(scratch);
  };
  std::vector<std::thread> helpers;
  const int64_t most = (panels + step - 1) / step;
  try {
    for (int64_t i = 1; i < threads && i < most; i++) helpers.emplace_back(work);
  } catch (const std::exception &) {  // the system gives no more threads: those that there are do the work
  }
  work();
  for (std::thread &helper : helpers) helper.join();
  return failed ? fail("no memory for packing") : 0;
} catch (...) {
  return fail_with_exception();
}

int32_t plait_unpack_rows(const PlaitMatrix *matrix, const int32_t *ids, int64_t count, float *out,
                          int64_t out_stride) {
  const bool vector = matrix->layout == PLAIT_LAYOUT_VECTOR;
  if (!vector && !known(matrix->layout)) return fail("unknown layout %d", matrix->layout);
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= matrix->rows)
      return fail("row %d of a matrix of %lld rows", ids[i], (long long)matrix->rows);
  const Kernels &kernels = any_kernels();
  for (int64_t i = 0; i < count; i++) {
    if (vector)
      memcpy(out + i * out_stride, matrix->data, (size_t)matrix->cols * 4);
    else
      kernels.unpack_row(*matrix, ids[i], out + i * out_stride);
  }
  return 0;
}
