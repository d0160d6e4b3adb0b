#include "src/grid.h"

#include <math.h>

#include "io/mem.h"
#include "kernels/dtype.h"
#include "kernels/encode_fit.h"

mr_code mr_grid_open(mr_grid *g, int rows, int k, const mr_grid_spec *spec, mr_err *err) {
  size_t n;
  *g = (mr_grid){.spec = *spec, .rows = rows, .k = k};
  g->spec.group = spec->group > 0 ? spec->group : k;
  g->groups = k / g->spec.group;
  if (k % g->spec.group)
    return mr_err_set(err, MR_E_INTERNAL, "%d columns are no whole groups of %d", k, spec->group);
  if (mr_mem_mul((size_t)rows, (size_t)g->groups, &n)) {
    g->scale = mr_mem_alloc(n, sizeof *g->scale);
    g->base = mr_mem_alloc(n, sizeof *g->base);
  }
  return g->scale && g->base ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory for scales");
}

void mr_grid_close(mr_grid *g) {
  mr_mem_free(g->scale);
  mr_mem_free(g->base);
  *g = (mr_grid){0};
}

static float stored(const mr_grid *g, float v) {
  return g->spec.half ? mr_f16_to_f32(mr_k_scale_f16(v)) : v;
}

static void centred(mr_grid *g, int at, const float *x, const float *weight, int n) {
  int half = (g->spec.levels + 1) / 2;
  float s, most = 0;
  for (int i = 0; i < n; i++)
    most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  if (g->spec.plain)
    s = most / (float)(half - 1);
  else
    s = mr_k_fit_scale(x, weight, n, -half, half - 1);
  s = stored(g, s);
  g->scale[at] = s;
  g->base[at] = -s * (float)half;
}

static void ranged(mr_grid *g, int at, const float *x, const float *weight, int n) {
  float min, s = stored(g, mr_k_fit_scale_min(x, weight, n, g->spec.levels, 1, &min));
  if (s == 0 && g->spec.kind == MR_GRID_WHOLE) { /* equal values: one step from 0 */
    s = stored(g, fabsf(min));
    g->scale[at] = s;
    g->base[at] = min > 0 ? -s : 0;
    return;
  }
  g->scale[at] = s;
  g->base[at] = g->spec.kind == MR_GRID_RANGED
                    ? stored(g, -min)
                    : -s * (float)mr_k_clamp_round(min / s, 0, g->spec.levels);
}

void mr_grid_fit(mr_grid *g, int row, const float *w, const float *importance, float *room) {
  int n = g->spec.group;
  for (int i = 0; i < g->groups; i++) {
    const float *x = w + (size_t)i * (size_t)n;
    mr_k_fit_weights(room, x, importance ? importance + (size_t)i * (size_t)n : NULL, n,
                     mr_k_mean_square(x, n));
    if (g->spec.kind == MR_GRID_CENTRED)
      centred(g, row * g->groups + i, x, room, n);
    else
      ranged(g, row * g->groups + i, x, room, n);
  }
}

int mr_grid_code(const mr_grid *g, int row, int col, float v) {
  int at = mr_grid_at(g, row, col);
  float s = g->scale[at];
  return s != 0 ? mr_k_clamp_round((v - g->base[at]) / s, 0, g->spec.levels)
         : g->spec.kind == MR_GRID_CENTRED ? (g->spec.levels + 1) / 2
                                           : 0;
}

float mr_grid_value(const mr_grid *g, int row, int col, int q) {
  int at = mr_grid_at(g, row, col);
  return g->scale[at] * (float)q + g->base[at];
}
