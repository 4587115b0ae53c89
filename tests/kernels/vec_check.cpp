// Checks of csrc/kernels/vec.h and of those functions of rows.inl that the C interface does not show, for the
// instruction set that this file is compiled for. Prints what is wrong; exit status 1 if anything is.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "../../csrc/kernels/kernels.h"

#define PLAIT_ISA_NAMESPACE checked
#include "../../csrc/kernels/vec.h"
#include "../../csrc/kernels/rows.inl"

using namespace plait;
using namespace plait::checked;

static int wrong = 0;
static uint32_t stride = 1;  // the first argument: looks at one number of so many, for slow machines
#define CHECK(condition, ...)                                       \
  do {                                                              \
    if (!(condition) && wrong++ < 20) {                             \
      printf("line %d: ", __LINE__);                                \
      printf(__VA_ARGS__);                                          \
      printf("\n");                                                 \
    }                                                               \
  } while (0)

static float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// The value of a half by its definition.
static double half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  double value = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) value = fraction ? NAN : INFINITY;
  return h & 0x8000 ? -value : value;
}

// x rounded to 11 bits (8 for bfloat16), nearest even, with the smallest exponent and the limit of the format.
static double rounded(double x, int bits, int smallest, double limit) {
  if (x == 0 || !isfinite(x)) return x;
  const int exponent = ilogb(x) < smallest ? smallest : ilogb(x);
  const double y = ldexp(nearbyint(ldexp(x, bits - 1 - exponent)), exponent - bits + 1);
  return fabs(y) > limit ? copysign(INFINITY, x) : y;
}

static bool same(double a, double b) { return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b)); }

static void check_halves() {
  for (int64_t h = 0; h < 65536; h++) {
    const float value = from_half((uint16_t)h);
    CHECK(same(value, half_value((uint16_t)h)), "from_half(%04x) = %g", (unsigned)h, value);
    uint16_t many[W];
    for (int i = 0; i < W; i++) many[i] = (uint16_t)(h + 4099 * i);
    const vf values = load_half(many);
    for (int i = 0; i < W; i++) CHECK(same(values[i], half_value(many[i])), "load_half(%04x) = %g", many[i], values[i]);
    if (!isnan(value)) CHECK(to_half(value) == h, "to_half(%a) = %04x", value, to_half(value));
    else CHECK(isnan(half_value(to_half(value))), "to_half(NaN)");
  }
  // Between the halves: every 251st float (times the stride), and everything around the midpoints.
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 251 * stride) {
    const float x = from_bits((uint32_t)bits);
    CHECK(same(half_value(to_half(x)), isnan(x) ? NAN : rounded(x, 11, -14, 65504)), "to_half(%a)", x);
    CHECK(same(from_bf16(to_bf16(x)), isnan(x) ? NAN : rounded(x, 8, -126, 3.3895313892515355e38)), "to_bf16(%a)", x);
  }
  for (int h = 0; h < 0x7c00; h++)
    for (int step = -1; step <= 1; step++) {
      const double middle = (half_value((uint16_t)h) + (h == 0x7bff ? 65536 : half_value((uint16_t)(h + 1)))) / 2;
      const float x = step == 0 ? (float)middle : nextafterf((float)middle, step * INFINITY);
      CHECK(same(half_value(to_half(x)), rounded(x, 11, -14, 65504)), "to_half(%a) near a midpoint", x);
    }
}

static void check_exp() {
  double worst = 0;
  const auto check = [&](float x) {
    const double truth = ::exp((double)x), got = checked::exp(splat(x))[0];
    if (truth > 3.4028235e38) {
      CHECK(got == INFINITY || got >= 3.4028e38, "exp(%a) = %g", x, got);
    } else {
      const double unit = truth < 1.1754944e-38 ? 1.401298464e-45 : ldexp(1, ilogb(truth) - 23);
      const double error = fabs(got - truth) / unit;
      worst = error > worst ? error : worst;
      CHECK(error < 2, "exp(%a) is off by %.2f units", x, error);
    }
  };
  for (uint32_t bits = 0; bits < 0x42e00000u; bits += 61 * stride) {  // up to 112
    check(from_bits(bits));
    check(-from_bits(bits));
  }
  check(-1e30f);
  CHECK(checked::exp(splat(INFINITY))[0] == INFINITY && checked::exp(splat(-INFINITY))[0] == 0, "exp of an infinity");
  CHECK(isnan(checked::exp(splat(NAN))[0]) && isnan(checked::exp(splat(-NAN))[0]), "exp of a NaN");
  printf("exp is off by up to %.2f units in the last place\n", worst);
}

static void check_small_functions() {
  float x[W + 1], y[W + 1];
  for (int i = 0; i <= W; i++) x[i] = (float)(i * i - 7);
  for (int n = 0; n < W; n++) {
    const vf part = load_part(x, n);
    for (int i = 0; i < W; i++) CHECK(part[i] == (i < n ? x[i] : 0), "load_part");
    for (int i = 0; i <= W; i++) y[i] = 99;
    store_part(y, load(x + 1), n);
    for (int i = 0; i <= W; i++) CHECK(y[i] == (i < n ? x[i + 1] : 99), "store_part");
  }
  float total = 0, highest = x[0];
  for (int i = 0; i < W; i++) {
    total += x[i];
    highest = x[i] > highest ? x[i] : highest;
    CHECK(checked::abs(load(x))[i] == fabsf(x[i]), "abs");
    CHECK(rows::swap_neighbours(load(x))[i] == x[i ^ 1], "swap_neighbours");
  }
  CHECK(sum(load(x)) == total && max_of(load(x)) == highest, "sum, max_of");
  uint16_t pairs[2 * W];
  for (int i = 0; i < 2 * W; i++) pairs[i] = to_bf16((float)(i - 5));
  for (int i = 0; i < W; i++) {
    CHECK(first_bf16(load_pairs(pairs))[i] == (float)(2 * i - 5), "first_bf16");
    CHECK(second_bf16(load_pairs(pairs))[i] == (float)(2 * i - 4), "second_bf16");
  }
}

static void check_arg_max() {
  srand(1);
  for (int round = 0; round < 20000 / (int)stride + 200; round++) {
    const int n = 1 + rand() % (round % 2 ? 40 : 400), kinds = 1 + rand() % 300;
    std::vector<float> x(n);  // exactly n numbers: a sanitizer would see a read beyond
    for (float &v : x) v = (float)(rand() % kinds) - 150;
    if (round % 7 == 0) x[rand() % n] = INFINITY;
    if (round % 5 == 0) x[rand() % n] = -INFINITY;
    if (round % 11 == 0) x.assign(n, -INFINITY);
    int first_nan = -1, first = 0;
    if (round % 3 == 0) x[rand() % n] = NAN;
    for (int i = n - 1; i >= 0; i--) {
      if (isnan(x[i])) first_nan = i;
      if (x[i] >= x[first]) first = i;
    }
    float best = 0;
    const int64_t at = arg_max(x.data(), n, &best);
    if (first_nan >= 0) CHECK(at == first_nan && isnan(best), "arg_max of %d numbers with a NaN", n);
    else CHECK(at == first && best == x[first], "arg_max of %d numbers: %d, not %d", n, (int)at, first);
  }
}

int main(int argc, char **argv) {
  if (argc > 1) stride = (uint32_t)atoi(argv[1]);
  check_halves();
  check_exp();
  check_small_functions();
  check_arg_max();
  printf("vectors of %d: %d wrong\n", W, wrong);
  return wrong != 0;
}
