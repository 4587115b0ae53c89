// The C interface of plait's native library: the one header that Python's loader mirrors.
//
// Plain C types only, no exceptions across the border. Change PLAIT_ABI_VERSION whenever a signature, a struct or the
// meaning of an argument changes: the loader refuses any other number.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define PLAIT_API __declspec(dllexport)
#else
#define PLAIT_API __attribute__((visibility("default")))
#endif

#define PLAIT_ABI_VERSION 7

#ifdef __cplusplus
extern "C" {
#endif

// What the machine has and how much of it this process may use. Sizes are per cache instance; 0 = unknown.
typedef struct PlaitTopology {
  int32_t logical_cpus;    // online in the machine
  int32_t affinity_cpus;   // that this process may run on
  int32_t usable_cpus;     // threads worth starting: affinity, lowered to whole CPUs of the quota, at least 1
  int32_t physical_cores;  // distinct cores among the affinity CPUs
  int32_t numa_nodes;      // nodes that hold an affinity CPU
  int32_t reserved;
  double cpu_quota;  // CPUs' worth of time that the control group grants; 0 = no limit
  int64_t l1d_bytes;
  int64_t l2_bytes;
  int64_t l3_bytes;
} PlaitTopology;

PLAIT_API int32_t plait_abi_version(void);

// Bit b is set when the CPU has feature b and the operating system saves the registers it needs.
PLAIT_API uint64_t plait_cpu_features(void);

// Name of feature bit b, spelled as Linux spells it in /proc/cpuinfo; NULL past the last one.
PLAIT_API const char *plait_cpu_feature_name(int32_t bit);

// `root` is put before every path read under /proc and /sys: "" for this machine, a directory in tests.
// Returns 0, or -1 where the system offers no such files (the caller then asks the standard library).
PLAIT_API int32_t plait_topology(const char *root, PlaitTopology *out);

// Bytes that can be taken without swapping: the smallest of the machine's available memory and of what
// is left in each control group above this process. -1 = unknown.
PLAIT_API int64_t plait_available_memory_bytes(const char *root);

// ---------------------------------------------------------------------------------------------------------------
// Packed matrices
//
// A matrix [rows, cols] of weights is kept in panels of 16 rows, one panel after another; rows are padded with zeros.
// Inside a panel, columns go in blocks of 32 (K-quants: super-blocks of 256). Everything a kernel reads of a panel
// lies in one linear stream. "Lane r" below is row r of the panel. f16 = IEEE half, in 16 lanes = 32 bytes.
//
//   F32   per column: f32[16 lanes]                     BF16  per 2 columns: bf16[16 lanes][2] (odd cols: zero pad)
//   F16   per column: f16[16 lanes]
//   nibbles(32 columns) = 256 bytes, 4 groups j of 64 bytes, lane r = 4 bytes of row r; byte c holds column 4j + c in
//         its low and column 16 + 4j + c in its high half
//   bits5(32 columns) = 64 bytes: lane r = 4 bytes; bit j of byte c is the fifth bit of column 4j + c (j = 0..3), bit
//         4 + j that of column 16 + 4j + c
//   bits6(32 columns) = 128 bytes, two groups of 64: in group 0 bits 2j, 2j+1 of byte c of lane r are bits 4 and 5 of
//         column 4j + c, in group 1 those of column 16 + 4j + c
//   bytes(32 columns) = 512 bytes, 8 groups j of 64 bytes, lane r = 4 bytes of row r: columns 4j .. 4j + 3, signed
//   Q4_0  per block: d f16, nibbles                      value = d * (q - 8)
//   Q4_1  per block: d f16, m f16, nibbles               value = d * q + m
//   Q5_0  per block: d f16, bits5, nibbles               value = d * (q - 16)
//   Q5_1  per block: d f16, m f16, bits5, nibbles        value = d * q + m
//   Q8_0  per block: d f16, bytes                        value = d * q
//   Q4_K  per super-block: d f16, dmin f16, sc u8[8 blocks][16 lanes], mn u8[8][16], then 8 x nibbles
//                                                        value = d * sc * q - dmin * mn
//   Q5_K  as Q4_K with 8 x (bits5, nibbles)
//   Q6_K  per super-block: d f16, sc i8[16 halves of 16 columns][16 lanes], then 8 x (bits6, nibbles)
//                                                        value = d * sc * (q - 32)
//   VECTOR  f32[cols], rows = 1 (norm weights and biases)
//
// The numbers are the file's own: unpacking gives what GGUF's reference dequantisation gives.

enum {
  PLAIT_LAYOUT_F32 = 0,
  PLAIT_LAYOUT_BF16 = 1,
  PLAIT_LAYOUT_F16 = 2,
  PLAIT_LAYOUT_Q4_0 = 3,
  PLAIT_LAYOUT_Q4_1 = 4,
  PLAIT_LAYOUT_Q5_0 = 5,
  PLAIT_LAYOUT_Q5_1 = 6,
  PLAIT_LAYOUT_Q8_0 = 7,
  PLAIT_LAYOUT_Q4_K = 8,
  PLAIT_LAYOUT_Q5_K = 9,
  PLAIT_LAYOUT_Q6_K = 10,
  PLAIT_LAYOUT_COUNT = 11,
  PLAIT_LAYOUT_VECTOR = 64
};

typedef struct PlaitMatrix {
  int32_t layout;
  int32_t reserved;
  int64_t rows;
  int64_t cols;
  int64_t panel_bytes;  // bytes of one panel of 16 rows
  const void *data;     // 64-byte aligned
} PlaitMatrix;

// Bytes of a packed matrix; -1 where the layout is unknown or the columns do not divide into its blocks.
PLAIT_API int64_t plait_packed_bytes(int32_t layout, int64_t rows, int64_t cols);

// Packs `rows` rows into `out`. `format` names the source's storage by the same numbers (blocks as in a GGUF file, or
// plain row-major floats); row r is read at source + (row_index ? row_index[r] : r) * source_row_bytes. A quantised
// source goes to its own layout or to a float layout (expanded, rounded to nearest even); floats go to float layouts.
// Uses up to `threads` threads. Returns 0, or -1 for a pair that does not exist or bad arguments.
PLAIT_API int32_t plait_pack(int32_t format, int32_t layout, const void *source, int64_t source_row_bytes,
                             const int64_t *row_index, int64_t rows, int64_t cols, void *out, int32_t threads);

// Rows ids[0 .. count - 1] of a packed matrix as floats: out[i * out_stride + c]. Returns -1 for an id out of range.
PLAIT_API int32_t plait_unpack_rows(const PlaitMatrix *matrix, const int32_t *ids, int64_t count, float *out,
                                    int64_t out_stride);

// ---------------------------------------------------------------------------------------------------------------
// Quantised activations: what a quantised matrix is multiplied with
//
// One row of `cols` (a multiple of 32) floats becomes one record of plait_quantised_row_bytes(cols) bytes:
//   int8 q[cols], f32 scale[cols / 32], f32 sum[cols / 16], padded to 64 bytes
// with, per block of 32, scale = max|x| / 127, q = rint(x * (127 / max|x|)) (both 0 where max|x| < 2^-119),
// and per half block of 16 sum = scale * (sum of q). A block with a NaN or an infinity has scale NaN: it must not get
// lost.
PLAIT_API int64_t plait_quantised_row_bytes(int64_t cols);

// ---------------------------------------------------------------------------------------------------------------
// Instruction sets
//
// Name of the kernels in use ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"):
// the best that this CPU runs, or PLAIT_ISA. NULL with PLAIT_ISA set to what this CPU cannot run or what is unknown.
PLAIT_API const char *plait_isa(void);
// Name of the i-th set that this build has and this CPU can run, worst first; NULL past the last.
PLAIT_API const char *plait_isa_name(int32_t index);

// ---------------------------------------------------------------------------------------------------------------
// Single kernels, for tests and measurements. `isa`: a name from plait_isa_name, NULL = the one in use. One thread.
// All return 0, or -1 for what does not exist.

// out[t * out_stride + r] = x_t . w_r (+ bias[r]) (+ add[t * add_stride + r]). x: quantised records for quantised
// layouts, else floats; x_stride in bytes, the other strides in floats. bias, add: NULL for none.
PLAIT_API int32_t plait_matmul(const char *isa, const PlaitMatrix *matrix, const void *x, int64_t x_stride,
                               int64_t tokens, float *out, int64_t out_stride, const float *bias, const float *add,
                               int64_t add_stride);
PLAIT_API int32_t plait_quantise(const char *isa, const float *x, int64_t x_stride, int64_t rows, int64_t cols,
                                 void *out);
// One row operation on `rows` rows that lie without gaps; kind, i and f of `op` count (see plan), and op->i[6] = numbers
// in a row for the operations that do not say it themselves. weights: those of op->w (6), in[0] of EMBED: int32 ids,
// of POSITIONS: int32 positions, out[0] of QUANTISE: records. out[0] may be in[0] or in[1] (not of QUANTISE, and not
// the angles of ROTATE), else it lies apart from both.
struct PlaitOp;
PLAIT_API int32_t plait_row_op(const char *isa, const struct PlaitOp *op, const float *const *in, float *const *out,
                               const PlaitMatrix *const *weights, const float *table, int64_t rows);

// ---------------------------------------------------------------------------------------------------------------
// Steps and plans

// One step, as plait.ops.step.Sequences lays it out. Arrays are contiguous.
typedef struct PlaitStep {
  int32_t num_tokens;           // N
  int32_t num_sequences;        // S
  int32_t num_rows;             // R
  int32_t num_groups;           // G
  int32_t table_width;          // B
  int32_t num_copies;           // C
  const int32_t *token_ids;     // [N]
  const int32_t *positions;     // [N], NULL: where the tokens stand in their sequences
  const int32_t *query_start;   // [S + 1]
  const int32_t *context_len;   // [S]
  const int32_t *block_table;   // [G, S, B]; a block that a sequence writes in this step is read by no other one
  const int32_t *copies;        // [C, 2] source and destination blocks, done in order before anything else
  const int32_t *logit_rows;    // [R] flat token rows
  float *logits;                // [R, V], NULL where nobody wants them
  int32_t *best_ids;            // [R] arg-max over the first `sampled_ids` columns, lowest id on ties
  float *best_values;           // [R] its logit; NaN where any of those logits is NaN
  float *hidden;                // [N, D] after the final norm, or NULL
  const int32_t *adapter_ids;   // [S] of plait_plan_set_adapter, 0: none; NULL: no sequence has one
} PlaitStep;

// What a value of the plan is kept in. Rows of a buffer lie row_bytes apart; several buffers may share memory.
enum { PLAIT_ROWS_TOKENS = 0, PLAIT_ROWS_LOGITS = 1 };
enum { PLAIT_KIND_F32 = 0, PLAIT_KIND_I32 = 1, PLAIT_KIND_Q8 = 2 };
typedef struct PlaitBuffer {
  int64_t offset;     // bytes into the plan's arena, a multiple of 64
  int64_t row_bytes;
  int32_t rows;       // PLAIT_ROWS_...
  int32_t kind;       // PLAIT_KIND_...
  int32_t width;      // numbers per row (all trailing axes together)
  int32_t reserved;
} PlaitBuffer;

// Operations of a plan. in, out: buffer numbers, w: matrix numbers, -1 = none.
enum {
  PLAIT_OP_EMBED = 0,        // out0 = rows of w0 for the step's token ids, times f0; i0 = 1: rows position + i1
  PLAIT_OP_POSITIONS = 1,    // out0 [2, n] = cos, sin of position * table[i0 + k], k < i1 = n, times f0
  PLAIT_OP_LINEAR = 2,       // group of i0 <= 3 products of in0: out_k = in0 w_2k^T (+ vector w_2k+1) (+ in1, k = 0)
  PLAIT_OP_GATED = 3,        // out0 = act(in0 w0^T + w1) * (in0 w2^T + w3); i0 = activation (f0, f1: its numbers); out0
                             // may be Q8
  PLAIT_OP_ACTIVATED = 4,    // out0 = act(in0 w0^T + w1); i0 = activation; out0 may be Q8
  PLAIT_OP_RMS_NORM = 5,     // i0 heads of width i1 (heads 1: the whole row); w0 or -1; f0 = eps; i2: 1 + w
  PLAIT_OP_LAYER_NORM = 6,   // w0, w1 or -1; f0 = eps; i0 heads of width i1; i3 = 1: a row of weights for each head
  PLAIT_OP_ROTATE = 7,       // in0 with angles in1; i0 heads of width i1, of which i2 rotate, from number i4 on; i3: 0
                             // halves, 1 adjacent
  PLAIT_OP_WRITE_KV = 8,     // in0 keys, in1 values into cache i0 (number of a PlaitCache); of a latent cache: in0 the
                             // first latent_width numbers of the key, in1 the others (-1 where there are none)
  PLAIT_OP_ATTEND = 9,       // out0 = attention of in0 over cache i0; i1 heads, i2 window; f0 scale, f1 soft cap;
                             // w0: sinks (vector [heads]) or -1; out0 may be Q8
  PLAIT_OP_GATE = 10,        // out0 = act(in0) * in1; i0 = activation (f0, f1: its numbers); i1 = 1: in0 is one number
                             // per row
  PLAIT_OP_ACTIVATE = 11,    // out0 = act(in0); i0 = activation; of XIELU w0 .. w3: alpha_p, alpha_n, beta, eps (one
                             // number each)
  PLAIT_OP_ADD = 12,         // out0 = in0 + in1
  PLAIT_OP_SCALE = 13,       // out0 = in0 * f0
  PLAIT_OP_SOFT_CAP = 14,    // out0 = f0 * tanh(in0 / f0)
  PLAIT_OP_CLIP = 15,        // out0 = in0 limited to [-f0, f0]
  PLAIT_OP_QUANTISE = 16,    // out0 (Q8) = in0
  PLAIT_OP_COPY = 17,        // out0 = in0
  PLAIT_OP_SELECT_ROWS = 18, // out0 [R] = in0 [N] at the step's logit rows
  PLAIT_OP_LOGITS = 19,      // in0 [R] times w0^T (+ vector w1), soft-capped by f0 if f0 > 0, into the step's logits and
                             // best ids
  PLAIT_OP_HIDDEN = 20,      // in0 [N] into the step's hidden, where wanted
  PLAIT_OP_HOST = 21,        // the caller computes this one: plait_plan_run returns before it
  PLAIT_OP_ROUTE = 22,       // out0 (I32) = the i1 of i0 experts that the logits in0 choose, best first, out1 = their
                             // weights; w0: selection bias or -1; i2 scores, i3 = 1: renormalised, then times f0;
                             // i4 groups (0: none), the i5 best of them eligible, i6 flags PLAIT_ROUTE_...;
                             // f1: jitter of SPARSE_MIXER, f2: the least that weights are divided by (0: none)
  PLAIT_OP_EXPERTS = 23,     // out0 = sum over j of in2[j] * expert in1[j] of in0, for i1 experts, i0 = activation;
                             // i2 = 1: gated; w0 = stack of gate and up (i2 = 0: up alone), w1 = its biases or -1,
                             // w2 = stack of down, w3 = its biases or -1; out1, out2: memory for its work (below);
                             // f0, f1: the activation's numbers
  PLAIT_OP_ATTEND_LATENT = 24  // out0 [i1 heads * i3] = latent attention of in0 [heads * (i2 + rotary)] over cache i0,
                             // f0 scale; w0, w1, i4 form PLAIT_LATENT_..., f1: below
};
// Scores of ROUTE: the softmax or the sigmoid of all logits, or the logits, with the softmax over the chosen. A NaN
// among them makes every weight NaN. SPARSE_MIXER: the two largest logits, each with its share in the softmax of those
// that are close to it, the second without the first; a logit s is far from the largest, m, where
// (m - s) / max(|s|, m) > 2 f1. It has no bias and no groups, and is not renormalised.
enum {
  PLAIT_SCORES_SOFTMAX = 0, PLAIT_SCORES_SIGMOID = 1, PLAIT_SCORES_TOPK_SOFTMAX = 2, PLAIT_SCORES_SPARSE_MIXER = 3
};
// A group scores the sum of its two best selection scores, not its best; experts that are not eligible have scores of 0,
// and are not kept from being chosen.
enum { PLAIT_ROUTE_TWO_BEST = 1, PLAIT_ROUTE_MASKED_ZERO = 2 };
// Experts of EXPERTS lie in a matrix one after another, the gate's rows before up's, each padded with zeros to whole
// panels: with F hidden numbers, 2 * i1 * (F rounded up to 16) rows, and i1 * (D rounded up to 16) of down; biases are
// vectors without padding. A row of out1 and out2 has a slot for each of the k experts of a token, all of the same size
// (row_bytes / k): out1 of F numbers, of kind Q8 where down is quantised (k * F wide, whole records), out2 of D floats
// (k * D wide); a slot of out2 must also have room for a row of in0, in multiples of 64 bytes.
// ATTEND_LATENT: a row of the cache is [c ; k] with r = latent_width numbers c and key_width - r rotary ones k, the same
// for all heads. w0 [heads * (i2 + i3), r]: of each head i2 rows W_uk and i3 rows W_uv; w1 [heads * r, i2], a float
// layout: of each head W_uk^T, the second layout of those rows. r, i2 and i3 are multiples of 16. Two equal forms:
//   expanded  keys [W_uk c ; k] and values W_uv c of every head, then attention
//   absorbed  queries [W_uk^T q ; q'] of every head, where q' are the last numbers of its query; attention to the rows
//             themselves, whose first r numbers are the values; then W_uv of the result
// AUTO: for each sequence the one that costs fewer multiply-adds, those of attention counted f1 times: with T tokens in
// the step and C in its context, expanded where
//   C r (i2 + i3) + f1 T C (i2 + rotary + i3)  <  T r (i2 + i3) + f1 T C (2 r + rotary)
enum { PLAIT_LATENT_AUTO = 0, PLAIT_LATENT_EXPANDED = 1, PLAIT_LATENT_ABSORBED = 2 };
enum {
  PLAIT_ACT_SILU = 0, PLAIT_ACT_GELU = 1, PLAIT_ACT_GELU_TANH = 2, PLAIT_ACT_RELU = 3, PLAIT_ACT_RELU_SQUARED = 4,
  PLAIT_ACT_SIGMOID = 5,
  // g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up limited to [-limit, limit]; alpha, limit: f0, f1. For gates.
  PLAIT_ACT_CLAMPED_SWIGLU = 6,
  // p x^2 + beta x where x > 0, else n (e^min(x, eps) - 1 - x) + beta x, with p = softplus(alpha_p) and
  // n = beta + softplus(alpha_n). For ACTIVATE.
  PLAIT_ACT_XIELU = 7
};
typedef struct PlaitOp {
  int32_t kind;
  int32_t in[3];
  int32_t out[3];
  int32_t w[6];
  int32_t i[7];
  float f[4];
} PlaitOp;  // 24 words

// Where one layer's keys and values lie: block b at base + b * block_stride. Inside a block, numbers of kv_type:
//   keys   [kv head][key_width / 2][block_tokens][2]   (f32: [kv head][key_width][block_tokens])
//   values [kv head][block_tokens / 2][value_width][2] (f32: [kv head][block_tokens][value_width])
// block_tokens is a multiple of 8, widths are even. value_width 0: the value is the first `latent_width` numbers of the
// key (latent attention, one kv head).
enum { PLAIT_KV_F32 = 0, PLAIT_KV_BF16 = 1, PLAIT_KV_F16 = 2 };
typedef struct PlaitCache {
  uint8_t *base;
  int64_t block_stride;
  int32_t group;         // which block table
  int32_t block_tokens;
  int32_t num_kv_heads;
  int32_t key_width;
  int32_t value_width;
  int32_t kv_type;
  int32_t latent_width;
  int32_t reserved;
} PlaitCache;

// Keys and values of `tokens` tokens of one sequence into the blocks of `table`, first at position `first`; and
// attention of those tokens as queries (q [tokens, heads * key_width], out [tokens, heads * value_width]) over the
// `context` = first + tokens keys. For tests and measurements: one thread, the cache's whole layout as given.
PLAIT_API int32_t plait_write_kv(const char *isa, const PlaitCache *cache, const int32_t *table, int64_t first,
                                 int64_t tokens, const float *k, const float *v);
PLAIT_API int32_t plait_attend(const char *isa, const PlaitCache *cache, const int32_t *table, int64_t first,
                               int64_t tokens, int32_t heads, float scale, float soft_cap, int32_t window,
                               const float *sinks, const float *q, float *out);

typedef struct PlaitPlanSpec {
  const PlaitOp *ops;
  const PlaitBuffer *buffers;
  const PlaitMatrix *matrices;   // copied; their data must outlive the plan
  const PlaitCache *caches;
  const float *tables;           // all rotary frequencies
  int32_t num_ops, num_buffers, num_matrices, num_caches, num_table_floats;
  int32_t max_tokens, max_rows;
  int32_t vocab_size;            // columns of the logits
  int32_t sampled_ids;           // columns that may be sampled
  int32_t copy_slots;            // slots of the pool, for copies: slot s at pool + s * slot_stride
  int64_t arena_bytes;
  uint8_t *pool;
  int64_t slot_stride, block_bytes;  // bytes of one block in one slot
} PlaitPlanSpec;

typedef struct PlaitPlan PlaitPlan;

// NULL where the specification does not hold together; plait_last_error() says why.
PLAIT_API PlaitPlan *plait_plan_create(const PlaitPlanSpec *spec);
PLAIT_API void plait_plan_destroy(PlaitPlan *plan);
// Runs from operation `from` (0 = the copies too) to the end or to the next PLAIT_OP_HOST. Returns the number of
// operations when done, the index of the host operation that is due, or -1 (plait_last_error). Calls of one process run
// one at a time; a step, from 0 to the end, belongs to one caller. A fork waits for the calls of other threads to return,
// so that the child can use its copy of the plan.
PLAIT_API int32_t plait_plan_run(PlaitPlan *plan, const PlaitStep *step, int32_t from);
// Up to `steps` >= 1 greedy steps of sequences that all decode: the ids that one step finds best are the tokens of the
// next, and every context grows by one. `step` is the first of them: num_tokens = num_sequences = num_rows = R >= 1, row
// r of sequence r, no positions, logits or hidden states. Its block table must have the blocks of all steps, its copies
// are made once, its best_ids and best_values are not used. No step is begun after
//   - `seconds` have passed since the call began,
//   - *interrupt (NULL: none) is not 0, which another thread may set at any time, or
//   - a step that found an id of stop_ids (ascending), or a best value that is not finite.
// ids, values: [steps, R], row s is what step s found. Returns the number of steps done, at least 1, or -1
// (plait_last_error), then nothing in ids and values counts. Refuses a plan with a PLAIT_OP_HOST.
PLAIT_API int32_t plait_plan_run_steps(PlaitPlan *plan, const PlaitStep *step, int32_t steps, double seconds,
                                       const int32_t *stop_ids, int32_t num_stop_ids, const int32_t *interrupt,
                                       int32_t *ids, float *values);
// What one adapter adds to the products of operation `op` (LINEAR, GATED or ACTIVATED): (in0 a^T) b[k]^T to product k,
// where b[k] meets the numbers of in0 a^T from first[k] on. All matrices are of floats; b[k].data NULL: nothing.
// Quantised records of in0 count as the numbers that they stand for.
typedef struct PlaitAdapterSite {
  int32_t op;
  int32_t first[3];
  PlaitMatrix a;     // [ranks of all products together, columns of in0]
  PlaitMatrix b[3];  // [rows of the product's matrix, rank]
} PlaitAdapterSite;
// Gives the plan adapter `adapter` >= 1, in place of what it had of this number; num_sites 0: takes it away. Steps name
// adapters by these numbers. The sites are copied; their matrices' data must outlive their use. Returns 0, or -1
// (plait_last_error), then nothing has changed. A row's results depend on its own adapter only, and are those of a
// plan without adapters where it has none.
PLAIT_API int32_t plait_plan_set_adapter(PlaitPlan *plan, int32_t adapter, const PlaitAdapterSite *sites,
                                         int32_t num_sites);
// Address of a buffer's first row, for host operations.
PLAIT_API void *plait_plan_buffer(PlaitPlan *plan, int32_t buffer);
// Bytes that the plan itself holds (arena and scratch).
PLAIT_API int64_t plait_plan_bytes(const PlaitPlan *plan);
// Seconds spent in each operation since the last call, summed over steps ([num_ops]; the time is that of the stage, put
// on its first operation); enable with on = 1 (costs a clock reading per stage).
PLAIT_API void plait_plan_profile(PlaitPlan *plan, int32_t on, double *seconds);

// The process's worker threads. threads: 0 = one for each core that may be used. Takes effect before the next parallel
// work.
PLAIT_API int32_t plait_set_threads(int32_t threads);
PLAIT_API int32_t plait_threads(void);
// Adds 1 to visits[i] for every i < items, each an item of one stage; items take different times. For tests.
PLAIT_API int32_t plait_visit(int64_t items, int32_t *visits);
// What went wrong in this thread's last call that failed.
PLAIT_API const char *plait_last_error(void);

// ---------------------------------------------------------------------------------------------------------------
// Sampling

// One row's way from logits to a token. Order: temperature, min-p, top-k, typical-p, top-p, XTC, draw.
typedef struct PlaitSampling {
  double temperature;  // 0 (and below 3e-39) = greedy; negative: this row is not asked for, its id stays as it is
  double min_p, typical_p, top_p;
  double xtc_probability, xtc_threshold;
  double u, coin;      // uniform numbers of this draw
  uint64_t seed;       // or, where `seeded`, what they are drawn from: Philox4x32-10 with the key seed and the
  uint32_t position;   // counter (position, choice, 0, 0)
  uint32_t choice;
  int32_t top_k;       // 0 or below = off
  int32_t seeded;
} PlaitSampling;

// ids[r] of rows logits[r * stride .. + vocab): -1 where a logit is NaN or the highest is infinite. Uses the threads.
PLAIT_API int32_t plait_sample(const float *logits, int64_t stride, int64_t rows, int64_t vocab,
                               const PlaitSampling *params, int32_t *ids);

// ---------------------------------------------------------------------------------------------------------------
// Optimisers

// How a piece moves. m, v, h, l are its state[0], [1], ...; g its gradient, p its numbers.
enum {
  PLAIT_RULE_ADAMW,   // m = beta1 m + rest1 g, v = beta2 v + rest2 g^2, p = decay p - rate m / (root sqrt(v) + eps)
  PLAIT_RULE_LION,    // p = decay p - rate sign(beta1 m + rest1 g), m = beta2 m + rest2 g
  PLAIT_RULE_MARS,    // c = g + extra (g - l), made as short as 1 where it is longer; as ADAMW with c; l = g
  PLAIT_RULE_SOPHIA,  // m = beta1 m + rest1 g, p = decay p - rate clip(m / (extra h + eps), -1, 1)
  PLAIT_RULE_COUNT
};

// One piece: numbers of a parameter that lie side by side and share what stands here.
typedef struct PlaitUpdate {
  float *parameter;
  const float *gradient;
  float *state[3];  // as many as the rule uses
  int64_t count;
  float decay, rate, root, eps, beta1, rest1, beta2, rest2, extra;
  int32_t rule;
  double measured;  // written. MARS: the length of c before it was clipped; SOPHIA: how many numbers were not clipped
} PlaitUpdate;

// One step of every piece; they must not overlap. isa: an instruction set, NULL for the best. Uses the threads, and no
// number depends on how many.
PLAIT_API int32_t plait_optimise(const char *isa, PlaitUpdate *updates, int64_t count);

// ---------------------------------------------------------------------------------------------------------------
// Physical limits, measured (plait bench limits)

// Bytes per second of reading `bytes` once per round with `threads` threads, median of `rounds`.
PLAIT_API double plait_measure_read(int64_t bytes, int32_t threads, int32_t rounds);
// Multiply-adds per second of the best kernel for a packed layout on a product that stays in cache.
PLAIT_API double plait_measure_matmul(int32_t layout, int32_t threads, double seconds);

#ifdef __cplusplus
}
#endif
