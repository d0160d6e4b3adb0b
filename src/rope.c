#include "src/rope.h"

#include <math.h>

#include "io/mem.h"

/* YaRN: the pair whose wavelength makes `turns` full turns over the original context. */
static double yarn_dim(const mr_config *c, double base, double turns) {
  return c->rope_dims * log(c->rope_original_context / (turns * 2 * M_PI)) / (2 * log(base));
}

/* Share of the unscaled frequency in pair i: 1 for fast pairs, 0 for slow ones, a ramp between. */
static double yarn_share(const mr_config *c, double base, int i) {
  double low = yarn_dim(c, base, c->yarn_beta_fast), high = yarn_dim(c, base, c->yarn_beta_slow);
  if (!c->yarn_exact) {
    low = floor(low);
    high = ceil(high);
  }
  low = fmax(low, 0);
  high = fmin(high, c->rope_dims - 1);
  double at = (i - low) / fmax(0.001, high - low);
  return (1 - fmin(1, fmax(0, at))) * c->yarn_ext;
}

static double scaled(const mr_config *c, double base, double freq, int i) {
  switch (c->rope_scaling) {
  case MR_SCALING_LINEAR:
    return freq / c->rope_factor;
  case MR_SCALING_YARN: {
    double share = c->rope_original_context > 0 ? yarn_share(c, base, i) : 0;
    return freq / c->rope_factor * (1 - share) + freq * share;
  }
  default:
    return freq;
  }
}

static double magnitude(const mr_config *c) {
  double m = c->yarn_attn > 0 ? c->yarn_attn : 1;
  if (c->rope_scaling == MR_SCALING_LONGROPE)
    return m;
  if (c->rope_scaling != MR_SCALING_YARN)
    return 1;
  return c->yarn_ext != 0 && c->rope_factor > 1 ? m * (1 + 0.1 * log(c->rope_factor)) : m;
}

mr_code mr_rope_open(mr_rope_table *t, const mr_config *c, const float *factors, bool local,
                     mr_err *err) {
  *t = (mr_rope_table){0};
  t->n_pos = c->context;
  if (c->arch.rope == MR_ROPE_NONE)
    return MR_OK;
  if (c->rope_dims < 2 || c->rope_dims % 2 || c->rope_dims > c->head_dim || c->context < 1)
    return mr_err_set(
        err, MR_E_DATA,
        "rotary positions over %d of %d values a head and %d positions are impossible",
        c->rope_dims, c->head_dim, c->context);
  bool own_base = local && ((c->rope_base_local > 0 && c->rope_base_local != c->rope_base) ||
                            c->rope_local_plain);
  double base = own_base && c->rope_base_local > 0 ? c->rope_base_local : c->rope_base;
  t->n_rot = c->rope_dims;
  t->magnitude = own_base ? 1 : magnitude(c);
  t->rows = mr_mem_alloc((size_t)t->n_pos * (size_t)t->n_rot, sizeof *t->rows);
  t->filled = mr_mem_alloc((size_t)t->n_pos, 1);
  t->freq = mr_mem_alloc((size_t)t->n_rot / 2, sizeof *t->freq);
  if (!t->rows || !t->filled || !t->freq) {
    mr_rope_close(t);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the rotary positions of %d tokens",
                      c->context);
  }
  for (int i = 0; i < t->n_rot / 2; i++) {
    double freq = pow(base, -2.0 * i / t->n_rot);
    if (factors && !own_base)
      freq /= factors[i];
    t->freq[i] = own_base ? freq : scaled(c, base, freq, i);
    if (c->arch.rope_backward)
      t->freq[i] = -t->freq[i];
  }
  return MR_OK;
}

void mr_rope_close(mr_rope_table *t) {
  mr_mem_free(t->rows);
  mr_mem_free(t->filled);
  mr_mem_free(t->freq);
  *t = (mr_rope_table){0};
}

mr_code mr_rope_open_all(mr_rope_table t[3], const mr_config *c, const float *factors,
                         mr_err *err) {
  mr_code rc = mr_rope_open(&t[0], c, factors, false, err);
  if (!rc)
    rc = mr_rope_open(&t[1], c, factors, true, err);
  if (!rc && c->rope_scaling == MR_SCALING_LONGROPE)
    rc = mr_rope_open(&t[2], c, c->rope_long, false, err);
  return rc;
}

void mr_rope_close_all(mr_rope_table t[3]) {
  for (int i = 0; i < 3; i++)
    mr_rope_close(&t[i]);
}

void mr_rope_fill(mr_rope_table *t, int pos) {
  if (!t->n_rot || t->filled[pos])
    return;
  float *row = t->rows + (size_t)pos * (size_t)t->n_rot;
  for (int i = 0; i < t->n_rot / 2; i++) {
    row[i] = (float)(cos(pos * t->freq[i]) * t->magnitude);
    row[t->n_rot / 2 + i] = (float)(sin(pos * t->freq[i]) * t->magnitude);
  }
  t->filled[pos] = 1;
}
