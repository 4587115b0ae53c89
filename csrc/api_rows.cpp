// Row operations: one row for plans, arrays of rows for tests.
#include "rows.h"

#include <string.h>

namespace plait {

bool is_row_op(int32_t kind) {
  switch (kind) {
    case PLAIT_OP_EMBED:
    case PLAIT_OP_POSITIONS:
    case PLAIT_OP_RMS_NORM:
    case PLAIT_OP_LAYER_NORM:
    case PLAIT_OP_ROTATE:
    case PLAIT_OP_GATE:
    case PLAIT_OP_ACTIVATE:
    case PLAIT_OP_ADD:
    case PLAIT_OP_SCALE:
    case PLAIT_OP_SOFT_CAP:
    case PLAIT_OP_CLIP:
    case PLAIT_OP_QUANTISE:
    case PLAIT_OP_COPY:
    case PLAIT_OP_ROUTE: return true;
    default: return false;
  }
}

bool route_holds(const PlaitOp &op) {
  const int64_t experts = op.i[0], top_k = op.i[1], groups = op.i[4], top_groups = op.i[5];
  const auto no = [&](const char *what) {
    fail("the choice of %d of %d experts, %d of %d groups: %s", op.i[1], op.i[0], op.i[5], op.i[4], what);
    return false;
  };
  if (experts < 1 || experts > kMaxExperts) return no("experts are out of range");
  if (top_k < 1 || top_k > experts) return no("there are not as many");
  if (op.i[2] < PLAIT_SCORES_SOFTMAX || op.i[2] > PLAIT_SCORES_SPARSE_MIXER) return no("unknown scores");
  if (op.i[2] == PLAIT_SCORES_SPARSE_MIXER && (top_k != 2 || groups != 0 || op.i[3] != 0))
    return no("a sparse mixer takes two, without groups or renormalising");
  if (groups == 0) return true;
  if (groups < 0 || experts % groups != 0) return no("groups do not divide the experts");
  if (top_groups < 1 || top_groups > groups) return no("there are not as many groups");
  if (experts / groups < 2 && (op.i[6] & PLAIT_ROUTE_TWO_BEST) != 0) return no("a group has no two best");
  return true;
}

void run_row_op(const Kernels &kernels, const PlaitOp &op, int64_t width, const float *const in[3], float *const out[3],
                const PlaitMatrix *const w[6], const float *table, int64_t number) {
  const auto vector = [&](int i) { return w[i] ? static_cast<const float *>(w[i]->data) : nullptr; };
  const float *x = in[0];
  float *y = out[0];
  switch (op.kind) {
    case PLAIT_OP_EMBED:
      kernels.unpack_row(*w[0], number, y);
      if (op.f[0] != 1.0f) kernels.scale(y, op.f[0], w[0]->cols, y);
      break;
    case PLAIT_OP_POSITIONS: kernels.positions(number, table + op.i[0], op.i[1], op.f[0], y); break;
    case PLAIT_OP_RMS_NORM:
      for (int64_t h = 0, n = op.i[1]; h < op.i[0]; h++)
        kernels.rms_norm(x + h * n, vector(0), n, op.f[0], op.i[2] != 0, y + h * n);
      break;
    case PLAIT_OP_LAYER_NORM:
      for (int64_t h = 0, n = op.i[1]; h < op.i[0]; h++) {
        const int64_t own = op.i[3] != 0 ? h * n : 0;  // of a head that has weights of its own
        const float *weight = vector(0), *bias = vector(1);
        kernels.layer_norm(x + h * n, weight ? weight + own : nullptr, bias ? bias + own : nullptr, n, op.f[0], y + h * n);
      }
      break;
    case PLAIT_OP_ROTATE:
      if (op.i[4] > 0 && x != y) {
        memcpy(y, x, width * sizeof(float));
        x = y;
      }
      kernels.rotate(x + op.i[4], in[1], op.i[0], op.i[1], op.i[2], op.i[3] != 0, y + op.i[4]);
      break;
    case PLAIT_OP_GATE:
      if (op.i[1] != 0) {
        float factor;
        kernels.activate(op.i[0], x, 1, &factor);
        kernels.scale(in[1], factor, width, y);
      } else if (op.i[0] == PLAIT_ACT_CLAMPED_SWIGLU) {
        kernels.clamped_swiglu(x, in[1], width, op.f[0], op.f[1], y);
      } else {
        kernels.gate(op.i[0], x, in[1], width, y);
      }
      break;
    case PLAIT_OP_ACTIVATE:
      if (op.i[0] == PLAIT_ACT_XIELU)
        kernels.xielu(x, width, *vector(0), *vector(1), *vector(2), *vector(3), y);
      else
        kernels.activate(op.i[0], x, width, y);
      break;
    case PLAIT_OP_ADD: kernels.add(x, in[1], width, y); break;
    case PLAIT_OP_SCALE: kernels.scale(x, op.f[0], width, y); break;
    case PLAIT_OP_SOFT_CAP: kernels.soft_cap(x, op.f[0], width, y); break;
    case PLAIT_OP_CLIP: kernels.clip(x, op.f[0], width, y); break;
    case PLAIT_OP_QUANTISE: kernels.quantise(x, width, 0, width / 32, reinterpret_cast<uint8_t *>(y)); break;
    case PLAIT_OP_COPY:
      if (x != y) memcpy(y, x, width * sizeof(float));
      break;
    case PLAIT_OP_ROUTE: {
      RouteArgs route{};
      route.logits = x;
      route.bias = vector(0);
      route.experts = op.i[0];
      route.top_k = op.i[1];
      route.scores = op.i[2];
      route.renormalise = op.i[3] != 0;
      route.scale = op.f[0];
      route.jitter = op.f[1];
      route.least_sum = op.f[2];
      route.groups = op.i[4];
      route.top_groups = op.i[5];
      route.two_best = (op.i[6] & PLAIT_ROUTE_TWO_BEST) != 0;
      route.masked_zero = (op.i[6] & PLAIT_ROUTE_MASKED_ZERO) != 0;
      kernels.route(route, reinterpret_cast<int32_t *>(y), out[1]);
      break;
    }
    default: break;
  }
}

}  // namespace plait

int32_t plait_row_op(const char *isa, const PlaitOp *op, const float *const *in, float *const *out,
                     const PlaitMatrix *const *weights, const float *table, int64_t rows) {
  using namespace plait;
  const Kernels *kernels = find_kernels(isa);
  if (kernels == nullptr) return fail("this CPU or this build lacks the kernels '%s'", isa ? isa : "PLAIT_ISA");
  if (!is_row_op(op->kind)) return fail("operation %d is not one of single rows", op->kind);

  // Numbers in a row of in0, in1 and out0.
  int64_t first = op->i[6], second = first, width = first;
  switch (op->kind) {
    case PLAIT_OP_EMBED: first = 1, second = 0, width = weights[0]->cols; break;
    case PLAIT_OP_POSITIONS: first = 1, second = 0, width = 2 * op->i[1]; break;
    case PLAIT_OP_RMS_NORM:
    case PLAIT_OP_LAYER_NORM: first = width = static_cast<int64_t>(op->i[0]) * op->i[1]; break;
    case PLAIT_OP_ROTATE:
      if (op->i[4] < 0 || int64_t{op->i[4]} + op->i[2] > op->i[1])
        return fail("%d numbers from %d on of a width of %d cannot rotate", op->i[2], op->i[4], op->i[1]);
      first = width = static_cast<int64_t>(op->i[0]) * op->i[1], second = op->i[2];
      break;
    case PLAIT_OP_QUANTISE:
      if (width % 32 != 0) return fail("%lld numbers do not divide into blocks of 32", static_cast<long long>(width));
      width = plait_quantised_row_bytes(width) / 4;
      break;
    case PLAIT_OP_GATE: first = op->i[1] != 0 ? 1 : width; break;
    case PLAIT_OP_ROUTE:
      if (!route_holds(*op)) return -1;
      if (op->i[2] == PLAIT_SCORES_SPARSE_MIXER && weights && weights[0]) return fail("a sparse mixer has no bias");
      first = op->i[0], width = op->i[1];
      break;
    default: break;
  }
  if (width <= 0) return fail("operation %d on rows of %lld numbers", op->kind, static_cast<long long>(width));
  if (op->kind == PLAIT_OP_EMBED) {
    const int32_t *ids = reinterpret_cast<const int32_t *>(in[0]);
    const int64_t offset = op->i[0] != 0 ? op->i[1] : 0;
    for (int64_t r = 0; r < rows; r++)
      if (ids[r] + offset < 0 || ids[r] + offset >= weights[0]->rows)
        return fail("id %d is no row of the matrix", ids[r]);
  }
  const PlaitMatrix *const none[6] = {};
  const bool two = op->kind == PLAIT_OP_ROTATE || op->kind == PLAIT_OP_GATE || op->kind == PLAIT_OP_ADD;
  const bool numbered = op->kind == PLAIT_OP_EMBED || op->kind == PLAIT_OP_POSITIONS;
  for (int64_t r = 0; r < rows; r++) {
    const float *const from[3] = {in[0] + r * first, two ? in[1] + r * second : nullptr, nullptr};
    float *const to[3] = {out[0] + r * width, op->kind == PLAIT_OP_ROUTE ? out[1] + r * width : nullptr, nullptr};
    const bool moved = op->kind == PLAIT_OP_EMBED && op->i[0] != 0;
    const int64_t number = numbered ? reinterpret_cast<const int32_t *>(in[0])[r] + (moved ? op->i[1] : 0) : 0;
    run_row_op(*kernels, *op, op->kind == PLAIT_OP_QUANTISE ? first : width, from, to, weights ? weights : none, table,
               number);
  }
  return 0;
}
