// Runs every kernel table that this CPU has on random shapes, tails included, against naive sums in double precision;
// and plans with several threads and callers. No Python: for sanitizers and for emulators of other CPUs.
//
//   kernel_driver [rounds] [kernels|plans]     prints a line per instruction set; exit status 1 at the first difference
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "../plait_native.h"

namespace {

uint64_t state = 0x9e3779b97f4a7c15u;
uint64_t random_bits() {  // xorshift64*
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545f4914f6cdd1du;
}
int64_t between(int64_t low, int64_t high) { return low + int64_t(random_bits() >> 33) % (high - low + 1); }
float gaussian() {
  float sum = 0;
  for (int i = 0; i < 4; i++) sum += float(random_bits() >> 40) / (1 << 24) - 0.5f;
  return sum * 1.7f;
}

// Memory of exactly this many numbers on a 64-byte boundary: a sanitizer sees what is read or written beyond.
template <class T>
class Array {
 public:
  explicit Array(int64_t count) : count_(count) {
    if (posix_memalign(reinterpret_cast<void **>(&data_), 64, std::max<int64_t>(1, count) * sizeof(T)) != 0) abort();
    memset(static_cast<void *>(data_), 0, count * sizeof(T));
  }
  ~Array() { free(data_); }
  Array(const Array &) = delete;
  Array &operator=(const Array &) = delete;
  T *data() const { return data_; }
  T &operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return count_; }

 private:
  T *data_ = nullptr;
  int64_t count_;
};

void fill(const Array<float> &array) {
  for (int64_t i = 0; i < array.size(); i++) array[i] = gaussian();
}

[[noreturn]] void stop(const std::string &what) {
  printf("FAILED: %s (%s)\n", what.c_str(), plait_last_error());
  exit(1);
}
void expect(bool holds, const std::string &what) {
  if (!holds) stop(what);
}
void near(double got, double expected, double allowed, const std::string &what) {
  if (!(fabs(got - expected) <= allowed))
    stop(what + ": " + std::to_string(got) + ", expected " + std::to_string(expected) + " +- " +
         std::to_string(allowed));
}

float half_value(const uint8_t *bytes) {
  const unsigned bits = bytes[0] | bytes[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, int(exponent) - 25);
  return float(bits & 0x8000 ? -magnitude : magnitude);
}
void random_half(uint8_t *bytes) {  // normal numbers around 0.01
  bytes[0] = uint8_t(random_bits());
  bytes[1] = uint8_t((random_bits() & 0x80) | (between(6, 9) << 2) | (random_bits() & 3));
}

// --- storage formats of GGUF files, value by value ----------------------------------------------------------------

struct Format {
  const char *name;
  int layout, columns, bytes;
  int scales[2];  // where the half-precision scales stand, -1 = none
};
const Format kFormats[] = {
    {"F32", PLAIT_LAYOUT_F32, 1, 4, {-1, -1}},      {"BF16", PLAIT_LAYOUT_BF16, 1, 2, {-1, -1}},
    {"F16", PLAIT_LAYOUT_F16, 1, 2, {0, -1}},       {"Q4_0", PLAIT_LAYOUT_Q4_0, 32, 18, {0, -1}},
    {"Q4_1", PLAIT_LAYOUT_Q4_1, 32, 20, {0, 2}},    {"Q5_0", PLAIT_LAYOUT_Q5_0, 32, 22, {0, -1}},
    {"Q5_1", PLAIT_LAYOUT_Q5_1, 32, 24, {0, 2}},    {"Q8_0", PLAIT_LAYOUT_Q8_0, 32, 34, {0, -1}},
    {"Q4_K", PLAIT_LAYOUT_Q4_K, 256, 144, {0, 2}},  {"Q5_K", PLAIT_LAYOUT_Q5_K, 256, 176, {0, 2}},
    {"Q6_K", PLAIT_LAYOUT_Q6_K, 256, 210, {208, -1}},
};

void random_block(const Format &format, uint8_t *block) {
  if (format.layout == PLAIT_LAYOUT_F32 || format.layout == PLAIT_LAYOUT_BF16) {
    const float x = gaussian();
    memcpy(block, reinterpret_cast<const uint8_t *>(&x) + 4 - format.bytes, format.bytes);
    return;
  }
  for (int i = 0; i < format.bytes; i++) block[i] = uint8_t(random_bits());
  for (const int at : format.scales)
    if (at >= 0) random_half(block + at);
}

// Scale and minimum (six bits each) of sub-block j of a Q4_K or Q5_K block.
void k_scales(const uint8_t *packed, int j, int *scale, int *minimum) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *minimum = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    *minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
  }
}

double value_of(const Format &format, const uint8_t *b, int c) {
  const int half = c % 32 / 16, in_half = c % 16;  // 32-column formats keep columns 0..15 low, 16..31 high
  const auto nibble = [&](const uint8_t *q) { return half ? q[in_half] >> 4 : q[in_half] & 15; };
  const auto fifth = [&](const uint8_t *q) { return (q[c / 8] >> c % 8 & 1) << 4; };
  int scale = 0, minimum = 0;
  switch (format.layout) {
    case PLAIT_LAYOUT_F32: case PLAIT_LAYOUT_BF16: {
      float x = 0;
      memcpy(reinterpret_cast<uint8_t *>(&x) + 4 - format.bytes, b, format.bytes);
      return x;
    }
    case PLAIT_LAYOUT_F16: return half_value(b);
    case PLAIT_LAYOUT_Q4_0: return half_value(b) * (nibble(b + 2) - 8);
    case PLAIT_LAYOUT_Q4_1: return double(half_value(b)) * nibble(b + 4) + half_value(b + 2);
    case PLAIT_LAYOUT_Q5_0: return half_value(b) * ((nibble(b + 6) | fifth(b + 2)) - 16);
    case PLAIT_LAYOUT_Q5_1: return double(half_value(b)) * (nibble(b + 8) | fifth(b + 4)) + half_value(b + 2);
    case PLAIT_LAYOUT_Q8_0: return half_value(b) * int8_t(b[2 + c]);
    case PLAIT_LAYOUT_Q4_K: case PLAIT_LAYOUT_Q5_K: {
      const bool five = format.layout == PLAIT_LAYOUT_Q5_K;
      const int j = c / 32;
      k_scales(b + 4, j, &scale, &minimum);
      const uint8_t byte = b[(five ? 48 : 16) + c / 64 * 32 + c % 32];
      int q = j % 2 ? byte >> 4 : byte & 15;
      if (five) q |= (b[16 + c % 32] >> j & 1) << 4;
      return double(half_value(b)) * scale * q - double(half_value(b + 2)) * minimum;
    }
    default: {  // Q6_K
      const int part = c / 128, quarter = c % 128 / 32, l = c % 32;
      const uint8_t low = b[part * 64 + l + (quarter & 1) * 32], high = b[128 + part * 32 + l];
      const int q = (quarter < 2 ? low & 15 : low >> 4) | (high >> 2 * quarter & 3) << 4;
      return double(half_value(b + 208)) * int8_t(b[192 + part * 8 + quarter * 2 + l / 16]) * (q - 32);
    }
  }
}

bool quantised(int layout) { return layout >= PLAIT_LAYOUT_Q4_0; }

// A random matrix: packed, and value by value.
struct Matrix {
  Matrix(const Format &format, int64_t rows, int64_t cols)
      : data(plait_packed_bytes(format.layout, rows, cols)), values(rows * cols) {
    const int64_t row_bytes = cols / format.columns * format.bytes;
    Array<uint8_t> source(rows * row_bytes);
    for (int64_t b = 0; b < rows * cols / format.columns; b++) {
      random_block(format, source.data() + b * format.bytes);
      for (int c = 0; c < format.columns; c++)
        values[b * format.columns + c] = value_of(format, source.data() + b * format.bytes, c);
    }
    expect(plait_pack(format.layout, format.layout, source.data(), row_bytes, nullptr, rows, cols, data.data(), 2) == 0,
           std::string("packing ") + format.name);
    packed = {format.layout, 0, rows, cols, data.size() / ((rows + 15) / 16), data.data()};
  }
  Array<uint8_t> data;
  Array<double> values;
  PlaitMatrix packed;
};

double bf16_value(double value) {  // to nearest even
  float x = float(value);
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &bits, 4);
  return x;
}

// --- single kernels -----------------------------------------------------------------------------------------------

void check_matmul(const char *isa, const Format &format) {
  const int64_t rows = between(1, 70), unit = std::max(format.columns, 1);
  const int64_t cols = unit == 1 ? between(1, 90) : unit * between(1, unit == 32 ? 7 : 2), tokens = between(1, 19);
  const std::string what = std::string(isa) + " " + format.name + " " + std::to_string(rows) + "x" +
                           std::to_string(cols) + ", " + std::to_string(tokens) + " tokens";
  Matrix matrix(format, rows, cols);
  Array<float> x(tokens * cols), bias(rows), add(tokens * rows), out(tokens * rows), unpacked(cols);
  fill(x), fill(bias), fill(add);
  const int32_t last = int32_t(rows - 1);
  expect(plait_unpack_rows(&matrix.packed, &last, 1, unpacked.data(), cols) == 0, what);
  for (int64_t c = 0; c < cols; c++) {
    const double value = matrix.values[last * cols + c];
    near(unpacked[c], value, 1e-5 * fabs(value) + 1e-7, what + ", unpacked");
  }
  const int64_t record_bytes = quantised(format.layout) ? plait_quantised_row_bytes(cols) : 0;
  Array<uint8_t> records(tokens * record_bytes);
  const void *input = x.data();
  std::vector<double> seen(x.data(), x.data() + x.size());
  // Where the CPU multiplies pairs of bfloat16, bf16 weights meet activations rounded to bf16.
  if (format.layout == PLAIT_LAYOUT_BF16 && strcmp(isa, "avx512_bf16") == 0)
    for (double &value : seen) value = bf16_value(value);
  if (record_bytes > 0) {
    expect(plait_quantise(isa, x.data(), cols, tokens, cols, records.data()) == 0, what);
    input = records.data();
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t c = 0; c < cols; c++) {
        float scale;
        memcpy(&scale, records.data() + t * record_bytes + cols + c / 32 * 4, 4);
        double &value = seen[t * cols + c];
        const double restored = double(scale) * int8_t(records[t * record_bytes + c]);
        near(restored, value, 0.501 * double(scale) + 1e-30, what + ", quantised");
        value = restored;
      }
  }
  const bool with_bias = between(0, 1), with_add = between(0, 1);
  expect(plait_matmul(isa, &matrix.packed, input, record_bytes > 0 ? record_bytes : cols * 4, tokens, out.data(), rows,
                      with_bias ? bias.data() : nullptr, with_add ? add.data() : nullptr, rows) == 0, what);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t r = 0; r < rows; r++) {
      double sum = 0, size = 0;
      for (int64_t c = 0; c < cols; c++) {
        const double term = seen[t * cols + c] * matrix.values[r * cols + c];
        sum += term;
        size += fabs(term);
      }
      if (with_bias) sum += bias[r], size += fabs(bias[r]);
      if (with_add) sum += add[t * rows + r], size += fabs(add[t * rows + r]);
      near(out[t * rows + r], sum, 1e-5 * size + 1e-20, what);
    }
}

double activation(int kind, double x) {
  switch (kind) {
    case PLAIT_ACT_SILU: return x / (1 + exp(-x));
    case PLAIT_ACT_GELU: return 0.5 * x * (1 + erf(x / sqrt(2.0)));
    case PLAIT_ACT_GELU_TANH: return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case PLAIT_ACT_RELU: return x > 0 ? x : 0;
    case PLAIT_ACT_RELU_SQUARED: return x > 0 ? x * x : 0;
    default: return 1 / (1 + exp(-x));
  }
}

void check_rows(const char *isa) {
  const int64_t n = between(1, 70), rows = 2;
  const std::string what = std::string(isa) + " rows of " + std::to_string(n);
  Array<float> x(rows * n), y(rows * n), out(rows * n), w(n);
  fill(x), fill(y), fill(w);
  const PlaitMatrix vector = {PLAIT_LAYOUT_VECTOR, 0, 1, n, 4 * n, w.data()};
  const PlaitMatrix *weights[6] = {};
  const float *in[3] = {x.data(), y.data(), nullptr};
  float *to[3] = {out.data(), nullptr, nullptr};
  const auto run = [&](int kind, int i0, int i1, float f0) {
    PlaitOp op = {};
    op.kind = kind;
    op.i[0] = i0;
    op.i[1] = i1;
    op.i[6] = int32_t(n);
    op.f[0] = f0;
    expect(plait_row_op(isa, &op, in, to, weights, nullptr, rows) == 0, what + ", operation " + std::to_string(kind));
  };
  for (int act = PLAIT_ACT_SILU; act <= PLAIT_ACT_SIGMOID; act++) {
    run(PLAIT_OP_GATE, act, 0, 0);
    for (int64_t i = 0; i < rows * n; i++) {
      const double value = activation(act, x[i]) * y[i];
      near(out[i], value, 1e-5 * fabs(value) + 1e-5, what + ", gate " + std::to_string(act));
    }
  }
  const float limit = 0.8f;
  {
    PlaitOp op = {};
    op.kind = PLAIT_OP_GATE, op.i[0] = PLAIT_ACT_CLAMPED_SWIGLU, op.i[6] = int32_t(n), op.f[0] = 1.7f, op.f[1] = limit;
    expect(plait_row_op(isa, &op, in, to, weights, nullptr, rows) == 0, what + ", clamped gate");
    for (int64_t i = 0; i < rows * n; i++) {
      const double g = std::min(x[i], limit), u = std::min(std::max(y[i], -limit), limit);
      near(out[i], g / (1 + exp(-1.7 * g)) * (u + 1), 1e-5, what + ", clamped gate");
    }
  }
  {
    float numbers[4] = {0.4f, -0.6f, 0.5f, -0.1f};
    PlaitMatrix one[4];
    for (int k = 0; k < 4; k++) {
      one[k] = {PLAIT_LAYOUT_VECTOR, 0, 1, 1, 4, numbers + k};
      weights[k] = &one[k];
    }
    run(PLAIT_OP_ACTIVATE, PLAIT_ACT_XIELU, 0, 0);
    for (int k = 0; k < 4; k++) weights[k] = nullptr;
    const double p = log1p(exp(0.4)), m = 0.5 + log1p(exp(-0.6));
    for (int64_t i = 0; i < rows * n; i++) {
      const double v = x[i], curve = v > 0 ? p * v * v : m * (expm1(std::min(v, -0.1)) - v);
      near(out[i], curve + 0.5 * v, 1e-5 * fabs(curve) + 1e-5, what + ", xIELU");
    }
  }
  run(PLAIT_OP_ADD, 0, 0, 0);
  for (int64_t i = 0; i < rows * n; i++) near(out[i], double(x[i]) + y[i], 1e-6, what + ", add");
  run(PLAIT_OP_SOFT_CAP, 0, 0, 2.0f);
  for (int64_t i = 0; i < rows * n; i++) near(out[i], 2 * tanh(x[i] / 2.0), 1e-5, what + ", soft cap");
  weights[0] = &vector;
  run(PLAIT_OP_RMS_NORM, 1, int(n), 1e-5f);
  for (int64_t r = 0; r < rows; r++) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += double(x[r * n + i]) * x[r * n + i];
    for (int64_t i = 0; i < n; i++) {
      const double value = x[r * n + i] / sqrt(squares / double(n) + 1e-5) * w[i];
      near(out[r * n + i], value, 1e-5 * fabs(value) + 1e-6, what + ", norm");
    }
  }
}

// The choice of experts against sorting, with logits that tie often.
void check_route(const char *isa) {
  const int groups = int(between(0, 4)), size = int(between(1, 20)), experts = std::max(groups, 1) * size;
  const int eligible = groups > 0 ? int(between(1, groups)) : 1, chosen = int(between(1, std::min(8, eligible * size)));
  const std::string what = std::string(isa) + " " + std::to_string(chosen) + " of " + std::to_string(experts) +
                           " experts, " + std::to_string(eligible) + " of " + std::to_string(groups) + " groups";
  const int64_t rows = 3;
  Array<float> logits(rows * experts), weights(rows * chosen);
  Array<int32_t> ids(rows * chosen);
  for (int64_t i = 0; i < logits.size(); i++) logits[i] = float(between(-8, 8)) / 4;
  PlaitOp op = {};
  op.kind = PLAIT_OP_ROUTE;
  op.i[0] = experts, op.i[1] = chosen, op.i[2] = PLAIT_SCORES_SIGMOID, op.i[4] = groups, op.i[5] = eligible;
  op.f[0] = 2;
  const float *in[3] = {logits.data(), nullptr, nullptr};
  float *to[3] = {reinterpret_cast<float *>(ids.data()), weights.data(), nullptr};
  expect(plait_row_op(isa, &op, in, to, nullptr, nullptr, rows) == 0, what);
  const auto order = [](const std::vector<double> &scores) {  // indices, best first
    std::vector<int> all(scores.size());
    for (size_t i = 0; i < all.size(); i++) all[i] = int(i);
    std::stable_sort(all.begin(), all.end(), [&](int a, int b) { return scores[a] > scores[b]; });
    return all;
  };
  for (int64_t r = 0; r < rows; r++) {
    std::vector<double> scores(logits.data() + r * experts, logits.data() + (r + 1) * experts), best(std::max(groups, 1));
    for (int g = 0; g < groups; g++)
      best[g] = *std::max_element(scores.begin() + g * size, scores.begin() + (g + 1) * size);
    const std::vector<int> ranked = order(best);
    for (int i = eligible; i < groups; i++)
      std::fill(scores.begin() + ranked[i] * size, scores.begin() + (ranked[i] + 1) * size, -INFINITY);
    const std::vector<int> expected = order(scores);
    for (int j = 0; j < chosen; j++) {
      expect(ids[r * chosen + j] == expected[j], what + ": another expert");
      near(weights[r * chosen + j], 2 / (1 + exp(-scores[expected[j]])), 1e-5, what);
    }
  }
}

// The two best, each with its share among those that are close to it.
void check_sparse_mixer(const char *isa) {
  const int experts = int(between(2, 40));
  const std::string what = std::string(isa) + " sparse mixer of " + std::to_string(experts);
  Array<float> logits(experts), weights(2);
  Array<int32_t> ids(2);
  for (int64_t i = 0; i < experts; i++) logits[i] = float(between(-8, 8)) / 4;
  PlaitOp op = {};
  op.kind = PLAIT_OP_ROUTE;
  op.i[0] = experts, op.i[1] = 2, op.i[2] = PLAIT_SCORES_SPARSE_MIXER;
  op.f[0] = 1, op.f[1] = 0.17f;
  const float *in[3] = {logits.data(), nullptr, nullptr};
  float *to[3] = {reinterpret_cast<float *>(ids.data()), weights.data(), nullptr};
  expect(plait_row_op(isa, &op, in, to, nullptr, nullptr, 1) == 0, what);
  int taken = -1;
  for (int j = 0; j < 2; j++) {
    int at = -1;
    for (int e = 0; e < experts; e++)
      if (e != taken && (at < 0 || logits[e] > logits[at])) at = e;
    double sum = 0;
    for (int e = 0; e < experts; e++) {
      const double gap = logits[at] - logits[e], size = std::max<double>(fabs(logits[e]), logits[at]);
      if (e != taken && (size == 0 || gap / size <= 0.34)) sum += exp(-gap);
    }
    expect(ids[j] == at, what + ": another expert");
    near(weights[j], 1 / sum, 1e-5, what);
    taken = at;
  }
}

void check_attention(const char *isa) {
  const int kv_heads = int(between(1, 3)), group = int(between(1, 4)), heads = kv_heads * group;
  const int key_width = int(2 * between(1, 40)), value_width = int(2 * between(1, 40)), type = int(between(0, 2));
  const int block_tokens = int(8 * between(1, 3)), window = between(0, 1) ? int(between(1, 40)) : 0;
  const int64_t first = between(0, 1) ? between(0, 30) : between(480, 560), tokens = between(1, 5);
  const int64_t context = first + tokens, blocks = (context + block_tokens - 1) / block_tokens;
  const std::string what =
      std::string(isa) + " attention over " + std::to_string(context) + " keys of type " + std::to_string(type);
  const int64_t stride = int64_t{kv_heads} * block_tokens * (key_width + value_width) * (type == PLAIT_KV_F32 ? 4 : 2);
  Array<uint8_t> memory((blocks + 1) * stride);
  memset(memory.data(), 0xff, memory.size());  // NaN where nothing was written
  const PlaitCache cache = {memory.data(), stride, 0, block_tokens, kv_heads, key_width, value_width, type, 0, 0};
  Array<int32_t> table(blocks);
  for (int64_t b = 0; b < blocks; b++) table[b] = int32_t(blocks - b);
  Array<float> k(context * kv_heads * key_width), v(context * kv_heads * value_width), q(tokens * heads * key_width);
  Array<float> sinks(heads), out(tokens * heads * value_width);
  fill(k), fill(v), fill(q), fill(sinks);
  for (const Array<float> *numbers : {&k, &v})
    for (int64_t i = 0; i < numbers->size(); i++) (*numbers)[i] = roundf((*numbers)[i] * 64) / 64;  // exact in any type
  expect(plait_write_kv(isa, &cache, table.data(), 0, context, k.data(), v.data()) == 0, what);
  const float scale = 0.3f, cap = between(0, 1) ? 3.0f : 0.0f;
  const bool with_sinks = between(0, 1);
  expect(plait_attend(isa, &cache, table.data(), first, tokens, heads, scale, cap, window,
                      with_sinks ? sinks.data() : nullptr, q.data(), out.data()) == 0, what);
  std::vector<double> scores(context), sums(value_width);
  for (int64_t t = 0; t < tokens; t++)
    for (int h = 0; h < heads; h++) {
      const int64_t kv = h / group, query = first + t, from = window ? std::max<int64_t>(0, query - window + 1) : 0;
      double highest = with_sinks ? sinks[h] : -INFINITY, total = 0;
      for (int64_t key = from; key <= query; key++) {
        double s = 0;
        for (int i = 0; i < key_width; i++)
          s += double(q[(t * heads + h) * key_width + i]) * k[(key * kv_heads + kv) * key_width + i];
        s *= scale;
        scores[key] = cap > 0 ? cap * tanh(s / cap) : s;
        highest = std::max(highest, scores[key]);
      }
      if (with_sinks) total = exp(sinks[h] - highest);
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t key = from; key <= query; key++) {
        const double p = exp(scores[key] - highest);
        total += p;
        for (int i = 0; i < value_width; i++) sums[i] += p * v[(key * kv_heads + kv) * value_width + i];
      }
      for (int i = 0; i < value_width; i++)
        near(out[(t * heads + h) * value_width + i], sums[i] / total, 3e-5, what);
    }
}

// --- plans --------------------------------------------------------------------------------------------------------

// A layer with random weights: norm, q, k, v, rotation, attention, gated products, experts, latent attention, logits.
struct Toy {
  static constexpr int kExperts = 6, kChosen = 3, kInner = 32;
  static constexpr int kDim = 64, kHeads = 4, kKvHeads = 2, kWidth = 32, kHidden = 160, kVocab = 107, kBlock = 8;
  static constexpr int kTokens = 64, kBlocks = 33, kLatent = 64, kNope = 16, kValue = 32;

  explicit Toy(uint64_t seed)
      : pool(kBlocks * kBlock * kKvHeads * kWidth * 2),
        latents(kBlocks * kBlock * (kLatent + kWidth)),
        frequencies(kWidth / 2),
        norm(kDim) {
    state = seed;
    for (int i = 0; i < kWidth / 2; i++) frequencies[i] = float(pow(100.0, -i / 16.0));
    fill(norm);
    const int shapes[][3] = {  // format, rows, columns
        {7, kVocab, kDim}, {3, kHeads * kWidth, kDim}, {3, kKvHeads * kWidth, kDim}, {3, kKvHeads * kWidth, kDim},
        {7, kDim, kHeads * kWidth}, {4, kHidden, kDim}, {4, kHidden, kDim}, {5, kDim, kHidden}, {0, kVocab, kDim},
        {0, kExperts, kDim}, {4, 2 * kExperts * kInner, kDim}, {3, kExperts * kDim, kInner}};
    for (const auto &shape : shapes) {
      weights.push_back(new Matrix(kFormats[shape[0]], shape[1], shape[2]));
      matrices.push_back(weights.back()->packed);
    }
    matrices.push_back({PLAIT_LAYOUT_VECTOR, 0, 1, kDim, 4 * kDim, norm.data()});
    // Of latent attention: queries, latents, rotary keys, keys and values of a latent, queries for latents, output.
    const int more[][3] = {{0, kHeads * (kNope + kWidth), kDim}, {1, kLatent, kDim}, {2, kWidth, kDim},
                           {7, kHeads * (kNope + kValue), kLatent}, {1, kHeads * kLatent, kNope},
                           {0, kDim, kHeads * kValue}};
    for (const auto &shape : more) {
      weights.push_back(new Matrix(kFormats[shape[0]], shape[1], shape[2]));
      matrices.push_back(weights.back()->packed);
    }
    const int q8 = PLAIT_KIND_Q8, f = PLAIT_KIND_F32;
    const int x = buffer(kDim, f), angles = buffer(kWidth, f), n1 = buffer(kDim, f), a1 = buffer(kDim, q8);
    const int q = buffer(kHeads * kWidth, f), k = buffer(kKvHeads * kWidth, f), v = buffer(kKvHeads * kWidth, f);
    const int attended = buffer(kHeads * kWidth, q8), g = buffer(kHidden, q8);
    const int rows = buffer(kDim, f, PLAIT_ROWS_LOGITS), y = buffer(kDim, f);
    const int choice = buffer(kExperts, f), ids = buffer(kChosen, PLAIT_KIND_I32), shares = buffer(kChosen, f);
    const int inner = slots(kInner, q8), results = slots(kDim, f);
    op(PLAIT_OP_EMBED, {}, {x}, {0}, {}, {1.0f});
    op(PLAIT_OP_POSITIONS, {}, {angles}, {}, {0, kWidth / 2}, {1.0f});
    op(PLAIT_OP_RMS_NORM, {x}, {n1}, {12}, {1, kDim}, {1e-5f});
    op(PLAIT_OP_QUANTISE, {n1}, {a1}, {}, {}, {});
    op(PLAIT_OP_LINEAR, {a1}, {q, k, v}, {1, -1, 2, -1, 3, -1}, {3}, {});
    op(PLAIT_OP_ROTATE, {q, angles}, {q}, {}, {kHeads, kWidth, kWidth, 0}, {});
    op(PLAIT_OP_ROTATE, {k, angles}, {k}, {}, {kKvHeads, kWidth, kWidth, 1}, {});
    op(PLAIT_OP_WRITE_KV, {k, v}, {}, {}, {0}, {});
    op(PLAIT_OP_ATTEND, {q}, {attended}, {}, {0, kHeads, 20}, {0.2f, 0.0f});
    op(PLAIT_OP_LINEAR, {attended, x}, {x}, {4}, {1}, {});
    op(PLAIT_OP_RMS_NORM, {x}, {n1}, {12}, {1, kDim}, {1e-5f});
    op(PLAIT_OP_QUANTISE, {n1}, {a1}, {}, {}, {});
    op(PLAIT_OP_GATED, {a1}, {g}, {5, -1, 6, -1}, {PLAIT_ACT_SILU}, {});
    op(PLAIT_OP_LINEAR, {g, x}, {x}, {7}, {1}, {});
    op(PLAIT_OP_RMS_NORM, {x}, {n1}, {12}, {1, kDim}, {1e-5f});
    op(PLAIT_OP_QUANTISE, {n1}, {a1}, {}, {}, {});
    op(PLAIT_OP_LINEAR, {n1}, {choice}, {9, -1}, {1}, {});
    op(PLAIT_OP_ROUTE, {choice}, {ids, shares}, {-1}, {kExperts, kChosen, PLAIT_SCORES_SOFTMAX, 1}, {1.0f});
    op(PLAIT_OP_EXPERTS, {a1, ids, shares}, {y, inner, results}, {10, -1, 11, -1}, {PLAIT_ACT_SILU, kExperts, 1}, {});
    op(PLAIT_OP_ADD, {x, y}, {x}, {}, {}, {});
    const int lq = buffer(kHeads * (kNope + kWidth), f), latent = buffer(kLatent, f), turning = buffer(kWidth, f);
    const int mixed = buffer(kHeads * kValue, f);
    op(PLAIT_OP_RMS_NORM, {x}, {n1}, {12}, {1, kDim}, {1e-5f});
    op(PLAIT_OP_LINEAR, {n1}, {lq, latent, turning}, {13, -1, 14, -1, 15, -1}, {3}, {});
    op(PLAIT_OP_ROTATE, {lq, angles}, {lq}, {}, {kHeads, kNope + kWidth, kWidth, 1, kNope}, {});
    op(PLAIT_OP_ROTATE, {turning, angles}, {turning}, {}, {1, kWidth, kWidth, 1}, {});
    op(PLAIT_OP_WRITE_KV, {latent, turning}, {}, {}, {1}, {});
    op(PLAIT_OP_ATTEND_LATENT, {lq}, {mixed}, {16, 17}, {1, kHeads, kNope, kValue}, {0.2f, 1.0f});
    op(PLAIT_OP_LINEAR, {mixed, x}, {x}, {18}, {1}, {});
    op(PLAIT_OP_HIDDEN, {x}, {}, {}, {}, {});
    op(PLAIT_OP_SELECT_ROWS, {x}, {rows}, {}, {}, {});
    op(PLAIT_OP_LOGITS, {rows}, {}, {8}, {}, {4.0f});
    const int64_t block_bytes = int64_t{kBlock} * kKvHeads * kWidth * 2 * 4;
    caches[0] = {reinterpret_cast<uint8_t *>(pool.data()), block_bytes, 0, kBlock, kKvHeads, kWidth, kWidth,
                 PLAIT_KV_F32, 0, 0};
    caches[1] = {reinterpret_cast<uint8_t *>(latents.data()), 2 * kBlock * (kLatent + kWidth), 0, kBlock, 1,
                 kLatent + kWidth, 0, PLAIT_KV_BF16, kLatent, 0};
    PlaitPlanSpec spec = {};
    spec.ops = ops.data();
    spec.buffers = buffers.data();
    spec.matrices = matrices.data();
    spec.caches = caches;
    spec.tables = frequencies.data();
    spec.num_ops = int32_t(ops.size());
    spec.num_buffers = int32_t(buffers.size());
    spec.num_matrices = int32_t(matrices.size());
    spec.num_caches = 2;
    spec.num_table_floats = kWidth / 2;
    spec.max_tokens = kTokens;
    spec.max_rows = 4;
    spec.vocab_size = kVocab;
    spec.sampled_ids = 99;
    spec.arena_bytes = arena_bytes;
    spec.copy_slots = 1;
    spec.pool = caches[0].base;
    spec.slot_stride = kBlocks * block_bytes;
    spec.block_bytes = block_bytes;
    plan = plait_plan_create(&spec);
    expect(plan != nullptr, "making a plan");
    adapt();
  }
  // An adapter of the products that read a1 (all but k), and of those that read g; ranks of one and two panels.
  void adapt() {
    const auto matrix = [&](int format, int rows, int cols) {
      weights.push_back(new Matrix(kFormats[format], rows, cols));
      return weights.back()->packed;
    };
    PlaitAdapterSite sites[3] = {};
    sites[0].op = 4;
    sites[0].a = matrix(0, 8, kDim);
    sites[0].b[0] = matrix(0, kHeads * kWidth, 5);
    sites[0].b[2] = matrix(1, kKvHeads * kWidth, 3);
    sites[0].first[2] = 5;
    sites[1].op = 12;
    sites[1].a = matrix(1, 19, kDim);
    sites[1].b[0] = matrix(2, kHidden, 19);
    sites[1].b[1] = matrix(0, kHidden, 19);
    sites[2].op = 13;
    sites[2].a = matrix(2, 2, kHidden);
    sites[2].b[0] = matrix(0, kDim, 2);
    expect(plait_plan_set_adapter(plan, 2, sites, 3) == 0, "giving an adapter");
    sites[2].b[0].rows--;
    expect(plait_plan_set_adapter(plan, 1, sites, 3) == -1, "refusing an adapter of another shape");
  }
  ~Toy() {
    plait_plan_destroy(plan);
    for (Matrix *matrix : weights) delete matrix;
  }

  int buffer(int width, int kind, int rows = PLAIT_ROWS_TOKENS) {
    const int64_t row_bytes = kind == PLAIT_KIND_Q8 ? plait_quantised_row_bytes(width) : 4 * int64_t{width};
    buffers.push_back({arena_bytes, row_bytes, rows, kind, width, 0});
    arena_bytes += (kTokens * row_bytes + 63) / 64 * 64;
    return int(buffers.size()) - 1;
  }
  // A slot for every expert of a token.
  int slots(int width, int kind) {
    const int number = buffer(width, kind);
    PlaitBuffer &made = buffers[number];
    made.width *= kChosen;
    made.row_bytes *= kChosen;
    arena_bytes += (kChosen - 1) * (made.row_bytes / kChosen) * kTokens;
    return number;
  }
  void op(int kind, std::vector<int> in, std::vector<int> out, std::vector<int> w, std::vector<int> i,
          std::vector<float> f) {
    PlaitOp made = {};
    made.kind = kind;
    const auto put = [](const auto &from, auto &to, auto none) {
      for (size_t at = 0; at < sizeof to / sizeof to[0]; at++) to[at] = at < from.size() ? from[at] : none;
    };
    put(in, made.in, -1), put(out, made.out, -1), put(w, made.w, -1), put(i, made.i, 0), put(f, made.f, 0.0f);
    ops.push_back(made);
  }

  std::string run() {
    const int32_t adapters[2] = {2, 0};
    return steps(nullptr) + steps(adapters);
  }

  // A prefill of two sequences, four steps of decoding, three greedy ones in one call; all that came out, as bytes.
  std::string steps(const int32_t *adapters) {
    std::string all;
    int32_t context[2] = {0, 0};
    for (int s = 0; s < 5; s++) {
      const int32_t lengths[2] = {s ? 1 : 37, s ? 1 : 21}, start[3] = {0, lengths[0], lengths[0] + lengths[1]};
      std::vector<int32_t> ids, positions, table;
      for (int q = 0; q < 2; q++) {
        for (int t = 0; t < lengths[q]; t++) {
          positions.push_back(context[q] + t);
          ids.push_back((context[q] + t) * 31 % kVocab);
        }
        context[q] += lengths[q];
        for (int b = 0; b < 8; b++) table.push_back(1 + q * 16 + b);
      }
      const int32_t rows[2] = {start[1] - 1, start[2] - 1};
      std::vector<float> logits(2 * kVocab), values(2), hidden(ids.size() * kDim);
      std::vector<int32_t> best(2);
      const PlaitStep step = {start[2], 2, 2, 1, 8, 0, ids.data(), positions.data(), start, context, table.data(),
                              nullptr, rows, logits.data(), best.data(), values.data(), hidden.data(), adapters};
      expect(plait_plan_run(plan, &step, 0) == int32_t(ops.size()), "running a plan");
      const auto keep = [&](const auto &numbers) {
        all.append(reinterpret_cast<const char *>(numbers.data()), numbers.size() * sizeof numbers[0]);
      };
      keep(logits), keep(values), keep(hidden), keep(best);
    }
    const int32_t next[2] = {++context[0], ++context[1]}, start[3] = {0, 1, 2}, first[2] = {5, 9};
    std::vector<int32_t> table;
    for (int q = 0; q < 2; q++)
      for (int b = 0; b < 8; b++) table.push_back(1 + q * 16 + b);
    const PlaitStep step = {2, 2, 2, 1, 8, 0, first, nullptr, start, next, table.data(),
                            nullptr, start, nullptr, nullptr, nullptr, nullptr, adapters};
    Array<int32_t> ids(6);
    Array<float> found(6);
    expect(plait_plan_run_steps(plan, &step, 3, 1e9, nullptr, 0, nullptr, ids.data(), found.data()) == 3,
           "three steps in a row");
    all.append(reinterpret_cast<const char *>(ids.data()), 6 * sizeof(int32_t));
    all.append(reinterpret_cast<const char *>(found.data()), 6 * sizeof(float));
    return all;
  }

  Array<float> pool;
  Array<uint16_t> latents;
  Array<float> frequencies, norm;
  std::vector<Matrix *> weights;
  std::vector<PlaitMatrix> matrices;
  std::vector<PlaitBuffer> buffers;
  std::vector<PlaitOp> ops;
  PlaitCache caches[2] = {};
  int64_t arena_bytes = 0;
  PlaitPlan *plan = nullptr;
};

// A plan of one latent attention, in either form, against naive sums; two sequences in one step.
void check_latent(const char *isa) {
  const int heads = int(between(1, 3)), latent = int(16 * between(1, 4)), nope = int(16 * between(1, 3));
  const int value = int(16 * between(1, 3)), rotary = int(2 * between(1, 9)), row = latent + rotary, key = nope + rotary;
  const int form = int(between(1, 2)), type = int(between(0, 2)), block = int(8 * between(1, 3));
  const int32_t context[2] = {int32_t(between(1, 40)), int32_t(between(490, 540))};
  const int32_t counts[2] = {int32_t(std::min<int64_t>(context[0], between(1, 9))), int32_t(between(1, 50))};
  const int32_t start[3] = {0, counts[0], counts[0] + counts[1]}, tokens = start[2];
  const int32_t blocks = (context[1] + block - 1) / block;
  const std::string what = std::string(isa) + " latent attention, form " + std::to_string(form) + ", " +
                           std::to_string(heads) + " heads of " + std::to_string(latent) + ", " + std::to_string(nope) +
                           ", " + std::to_string(rotary) + ", " + std::to_string(value) + ", keys of type " +
                           std::to_string(type);
  Matrix weight(kFormats[0], heads * (nope + value), latent);
  Array<float> turned(heads * latent * nope);
  for (int h = 0; h < heads; h++)
    for (int c = 0; c < latent; c++)
      for (int n = 0; n < nope; n++)
        turned[(h * latent + c) * nope + n] = float(weight.values[(h * (nope + value) + n) * latent + c]);
  Array<uint8_t> second(plait_packed_bytes(PLAIT_LAYOUT_F32, heads * latent, nope));
  expect(plait_pack(PLAIT_LAYOUT_F32, PLAIT_LAYOUT_F32, turned.data(), nope * 4, nullptr, heads * latent, nope,
                    second.data(), 1) == 0, what);
  const PlaitMatrix matrices[2] = {
      weight.packed,
      {PLAIT_LAYOUT_F32, 0, heads * latent, nope, second.size() / (heads * latent / 16), second.data()}};
  const int64_t stride = int64_t{block} * row * (type == PLAIT_KV_F32 ? 4 : 2);
  Array<uint8_t> memory((2 * blocks + 1) * stride);
  memset(memory.data(), 0xff, memory.size());
  const PlaitCache cache = {memory.data(), stride, 0, block, 1, row, 0, type, latent, 0};
  Array<int32_t> table(2 * blocks);
  for (int32_t b = 0; b < 2 * blocks; b++) table[b] = 2 * blocks - b;
  Array<float> rows(2 * 540 * row), q(tokens * heads * key), out(tokens * heads * value);
  fill(rows), fill(q);
  for (int64_t i = 0; i < rows.size(); i++) rows[i] = roundf(rows[i] * 64) / 64;  // exact in any type
  const int32_t widths[4] = {heads * key, latent, rotary, heads * value};
  PlaitBuffer buffers[4];
  int64_t arena = 0;
  for (int b = 0; b < 4; b++) {
    buffers[b] = {arena, 4 * int64_t{widths[b]}, PLAIT_ROWS_TOKENS, PLAIT_KIND_F32, widths[b], 0};
    arena += (tokens * buffers[b].row_bytes + 63) / 64 * 64;
  }
  const float scale = 0.1f;
  const PlaitOp ops[2] = {
      {PLAIT_OP_WRITE_KV, {1, 2, -1}, {-1, -1, -1}, {-1, -1, -1, -1, -1, -1}, {0}, {0}},
      {PLAIT_OP_ATTEND_LATENT, {0, -1, -1}, {3, -1, -1}, {0, 1, -1, -1, -1, -1}, {0, heads, nope, value, form},
       {scale, 1.0f}}};
  PlaitPlanSpec spec = {};
  spec.ops = ops, spec.buffers = buffers, spec.matrices = matrices, spec.caches = &cache;
  spec.num_ops = 2, spec.num_buffers = 4, spec.num_matrices = 2, spec.num_caches = 1;
  spec.max_tokens = tokens, spec.vocab_size = spec.sampled_ids = 1, spec.arena_bytes = arena;
  PlaitPlan *plan = plait_plan_create(&spec);
  expect(plan != nullptr, what);
  for (int s = 0; s < 2; s++) {
    const float *own = rows.data() + s * 540 * row;
    const int32_t first = context[s] - counts[s];
    expect(plait_write_kv(isa, &cache, table.data() + s * blocks, 0, first, own, nullptr) == 0, what);
    for (int32_t t = 0; t < counts[s]; t++) {
      memcpy(static_cast<float *>(plait_plan_buffer(plan, 1)) + (start[s] + t) * latent, own + (first + t) * row,
             latent * 4);
      memcpy(static_cast<float *>(plait_plan_buffer(plan, 2)) + (start[s] + t) * rotary,
             own + (first + t) * row + latent, rotary * 4);
    }
  }
  memcpy(plait_plan_buffer(plan, 0), q.data(), q.size() * 4);
  std::vector<int32_t> ids(tokens);
  const PlaitStep step = {tokens, 2, 0, 1, blocks, 0, ids.data(), nullptr, start, context, table.data(),
                          nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  expect(plait_plan_run(plan, &step, 0) == 2, what);
  memcpy(out.data(), plait_plan_buffer(plan, 3), out.size() * 4);
  plait_plan_destroy(plan);
  for (int s = 0; s < 2; s++)
    for (int h = 0; h < heads; h++) {
      // Keys and values of all rows, then every token over them.
      std::vector<double> made(int64_t{context[s]} * (nope + value)), scores(context[s]), sums(value);
      const float *own = rows.data() + s * 540 * row;
      for (int32_t c = 0; c < context[s]; c++)
        for (int n = 0; n < nope + value; n++)
          for (int i = 0; i < latent; i++)
            made[c * (nope + value) + n] += weight.values[(h * (nope + value) + n) * latent + i] * own[c * row + i];
      for (int32_t t = 0; t < counts[s]; t++) {
        const float *query = q.data() + ((start[s] + t) * heads + h) * key;
        const int32_t seen = context[s] - counts[s] + t + 1;
        double highest = -INFINITY, total = 0;
        for (int32_t c = 0; c < seen; c++) {
          double sum = 0;
          for (int n = 0; n < nope; n++) sum += query[n] * made[c * (nope + value) + n];
          for (int i = 0; i < rotary; i++) sum += double(query[nope + i]) * own[c * row + latent + i];
          highest = std::max(highest, scores[c] = sum * scale);
        }
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int32_t c = 0; c < seen; c++) {
          const double p = exp(scores[c] - highest);
          total += p;
          for (int i = 0; i < value; i++) sums[i] += p * made[c * (nope + value) + nope + i];
        }
        for (int i = 0; i < value; i++)
          near(out[((start[s] + t) * heads + h) * value + i], sums[i] / total, 1e-4 * sqrt(double(latent)), what);
      }
    }
}

// Every item of a stage is done once, however many threads share the items and take them from one another.
void check_items(int rounds) {
  for (const int threads : {2, 3, 8}) {
    expect(plait_set_threads(threads) == 0, "setting threads");
    for (int round = 0; round < 20 * rounds; round++) {
      const int64_t items = round % 20 == 0 ? between(65'535, 200'000) : between(0, 300);
      Array<int32_t> visits(items);
      expect(plait_visit(items, visits.data()) == 0, "visiting");
      for (int64_t i = 0; i < items; i++)
        expect(visits[i] == 1, std::to_string(visits[i]) + " visits of item " + std::to_string(i));
    }
  }
}

void check_plans(const char *isa, int rounds) {
  setenv("PLAIT_ISA", isa, 1);
  std::string expected;
  for (const int threads : {1, 2, 3}) {
    expect(plait_set_threads(threads) == 0, "setting threads");
    Toy toy(1);
    const std::string all = toy.run();
    if (expected.empty()) expected = all;
    expect(all == expected, std::string(isa) + " plan: other bits with " + std::to_string(threads) + " threads");
  }
  for (int round = 0; round < rounds; round++) check_latent(isa);
  Toy first(1), second(1);
  const auto call = [&](Toy *toy) {
    for (int r = 0; r < rounds; r++) expect(toy->run() == expected, std::string(isa) + " plan: two callers");
  };
  std::thread other(call, &second);
  call(&first);
  other.join();
}

}  // namespace

// A step of every optimiser over some pieces of a length that no vector divides.
void check_optimisers(const char *isa) {
  for (int32_t rule = 0; rule < PLAIT_RULE_COUNT; rule++) {
    constexpr int kPieces = 3;
    const int64_t sizes[kPieces] = {between(1, 70), between(1, 3000), between(16000, 40000)};
    std::vector<std::vector<double>> before[kPieces];
    PlaitUpdate updates[kPieces] = {};
    std::vector<Array<float> *> arrays;
    for (int k = 0; k < kPieces; k++) {
      float *data[5];
      for (float *&numbers : data) {
        arrays.push_back(new Array<float>(sizes[k]));
        fill(*arrays.back());
        numbers = arrays.back()->data();
      }
      for (int64_t i = 0; i < sizes[k]; i++) data[3][i] = fabsf(data[3][i]) + 0.1f;  // v, or the curvature
      for (float *numbers : data) before[k].emplace_back(numbers, numbers + sizes[k]);
      updates[k] = {data[0], data[1], {data[2], data[3], data[4]}, sizes[k], 0.75f, 0.125f, 1.5f, 0.25f,
                    0.5f,    0.5f,    0.75f, 0.25f, 0.5f, rule, 0};
    }
    expect(plait_optimise(isa, updates, kPieces) == 0, "optimise");
    for (int k = 0; k < kPieces; k++) {
      const auto &old = before[k];
      double length = 1;
      if (rule == PLAIT_RULE_MARS) {
        double squares = 0;
        for (int64_t i = 0; i < sizes[k]; i++) squares += pow(1.5 * old[1][i] - 0.5 * old[4][i], 2);
        length = std::max(1.0, sqrt(squares));
        near(updates[k].measured, sqrt(squares), 1e-4 * sqrt(squares), "length of the corrected gradient");
      }
      for (int64_t i = 0; i < sizes[k]; i++) {
        const double g = old[1][i], m = old[2][i], v = old[3][i];
        double p = 0.75 * old[0][i];
        if (rule == PLAIT_RULE_LION) {
          const double direction = 0.5 * m + 0.5 * g;
          if (fabs(direction) < 1e-6) continue;  // rounding may decide its sign
          p -= direction > 0 ? 0.125 : -0.125;
        } else if (rule == PLAIT_RULE_SOPHIA) {
          p -= 0.125 * std::min(1.0, std::max(-1.0, (0.5 * m + 0.5 * g) / (0.5 * v + 0.25)));
        } else {
          const double c = rule == PLAIT_RULE_MARS ? (1.5 * g - 0.5 * old[4][i]) / length : g;
          p -= 0.125 * (0.5 * m + 0.5 * c) / (1.5 * sqrt(0.75 * v + 0.25 * c * c) + 0.25);
        }
        near(updates[k].parameter[i], p, 1e-5, "a step of rule " + std::to_string(rule));
        if (rule == PLAIT_RULE_MARS) expect(updates[k].state[2][i] == updates[k].gradient[i], "the gradient is kept");
      }
    }
    for (Array<float> *array : arrays) delete array;
  }
}

int main(int argc, char **argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 5;
  const std::string part = argc > 2 ? argv[2] : "";
  if (part != "kernels") check_items(rounds);
  const char *isa = nullptr;
  for (int32_t i = 0; (isa = plait_isa_name(i)) != nullptr; i++) {
    for (int round = 0; round < rounds && part != "plans"; round++) {
      for (const Format &format : kFormats) check_matmul(isa, format);
      check_rows(isa);
      check_route(isa);
      check_sparse_mixer(isa);
      check_attention(isa);
      check_optimisers(isa);
    }
    if (part != "kernels") check_plans(isa, rounds);
    printf("%s: %d rounds agree\n", isa, rounds);
    fflush(stdout);
  }
  return 0;
}
