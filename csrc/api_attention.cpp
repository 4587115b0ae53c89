// Attention and the writing of keys and values alone, for tests and measurements.
#include "attend_stage.h"

namespace {

// As for how many threads a step is cut here: a few tiles are split into chunks of keys, many are not.
constexpr int kCutThreads = 8;

int check(const plait::Kernels *kernels, const PlaitCache *cache, const int32_t *table, int64_t first, int64_t tokens) {
  if (kernels == nullptr) return plait::fail("no such instruction set here");
  if (cache == nullptr || table == nullptr || first < 0 || tokens < 0 || first + tokens > INT32_MAX)
    return plait::fail("no cache, no table, or no such range of tokens");
  const bool latent = cache->value_width == 0;
  if (cache->block_tokens <= 0 || cache->block_tokens % 8 || cache->num_kv_heads <= 0 || cache->key_width <= 0 ||
      cache->key_width % 2 || cache->value_width < 0 || cache->value_width % 2 || cache->kv_type < PLAIT_KV_F32 ||
      cache->kv_type > PLAIT_KV_F16)
    return plait::fail("blocks are of 8, 16, 24, ... tokens, widths are even");
  if (latent && (cache->num_kv_heads != 1 || cache->latent_width <= 0 || cache->latent_width > cache->key_width ||
                 cache->latent_width % 2))
    return plait::fail("a latent cache has one head, whose value is the beginning of its key");
  return 0;
}

}  // namespace

int32_t plait_write_kv(const char *isa, const PlaitCache *cache, const int32_t *table, int64_t first, int64_t tokens,
                       const float *k, const float *v) {
  const plait::Kernels *kernels = plait::find_kernels(isa);
  if (check(kernels, cache, table, first, tokens) != 0) return -1;
  const int64_t heads = cache->num_kv_heads;
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t position = first + t;
    kernels->write_kv(*cache, 0, cache->num_kv_heads, table[position / cache->block_tokens], position % cache->block_tokens,
                      k + t * heads * cache->key_width, cache->value_width ? v + t * heads * cache->value_width : nullptr);
  }
  return 0;
}

int32_t plait_attend(const char *isa, const PlaitCache *cache, const int32_t *table, int64_t first, int64_t tokens,
                     int32_t heads, float scale, float soft_cap, int32_t window, const float *sinks, const float *q,
                     float *out) try {
  const plait::Kernels *kernels = plait::find_kernels(isa);
  if (check(kernels, cache, table, first, tokens) != 0) return -1;
  if (heads <= 0 || heads % cache->num_kv_heads || window < 0 || soft_cap < 0)
    return plait::fail("heads are a multiple of the key/value heads, window and soft cap are not negative");
  // A step of one sequence, cut as for several threads and run by this one.
  const int32_t query_start[2] = {0, int32_t(tokens)}, context = int32_t(first + tokens);
  PlaitStep step = {};
  step.num_tokens = int32_t(tokens);
  step.num_sequences = step.num_groups = 1;
  step.table_width = (context + cache->block_tokens - 1) / cache->block_tokens;
  step.query_start = query_start;
  step.context_len = &context;
  step.block_table = table;
  plait::AttendLayer layer = {};
  layer.cache = *cache;
  layer.cache.group = 0;
  layer.heads = heads;
  layer.window = window;
  layer.scale = scale;
  layer.soft_cap = soft_cap;
  layer.sinks = sinks;
  layer.q = q;
  layer.q_stride = int64_t(heads) * cache->key_width;
  layer.out = out;
  layer.out_stride = heads * plait::value_width(*cache);
  plait::AttendWork work;
  plait::cut_attention(step, layer, kCutThreads, &work);
  std::vector<float> scratch(plait::attend_item_scratch(layer));
  for (int64_t i = 0; i < int64_t(work.items.size()); i++)
    plait::run_attend_item(*kernels, layer, step, work, i, nullptr, scratch.data());
  return 0;
} catch (...) {
  return plait::fail_with_exception();
}
