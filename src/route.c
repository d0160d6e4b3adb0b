#include "src/route.h"

#include <math.h>

static int best_of(const float *x, int n) {
  int at = 0;
  for (int i = 1; i < n; i++)
    if (x[i] > x[at])
      at = i;
  return at;
}

static void score(const mr_config *c, const float *logits, float *p) {
  int n = c->n_experts;
  if (c->arch.scoring == MR_SCORE_SIGMOID) {
    for (int i = 0; i < n; i++)
      p[i] = 1 / (1 + expf(-logits[i]));
    return;
  }
  float max = logits[best_of(logits, n)], sum = 0;
  for (int i = 0; i < n; i++)
    sum += p[i] = expf(logits[i] - max);
  for (int i = 0; i < n; i++)
    p[i] /= sum;
}

/* A group is as good as its best expert, or its best two together. */
static float group_score(const mr_config *c, const float *s, int n) {
  int first = best_of(s, n);
  float second = -INFINITY;
  if (c->group_best)
    return s[first];
  for (int i = 0; i < n; i++)
    if (i != first && s[i] > second)
      second = s[i];
  return n > 1 ? s[first] + second : s[first];
}

/* Experts outside the best groups cannot be chosen. */
static void limit(const mr_config *c, float *s) {
  int groups = c->n_group, n = groups > 0 ? c->n_experts / groups : 0;
  if (groups < 2 || c->topk_group < 1 || c->topk_group >= groups)
    return;
  for (int drop = groups - c->topk_group; drop > 0; drop--) {
    int worst = -1;
    float least = INFINITY;
    for (int g = 0; g < groups; g++) {
      float x = group_score(c, s + g * n, n);
      if (x > -INFINITY && (worst < 0 || x <= least)) {
        worst = g;
        least = x;
      }
    }
    for (int i = 0; worst >= 0 && i < n; i++)
      s[worst * n + i] = -INFINITY;
  }
}

/* Softmax of the best over those within twice the jitter of it. `out`: already taken. */
static float sparse_weight(const mr_config *c, const float *s, int best, int out) {
  float sum = 0;
  for (int i = 0; i < c->n_experts; i++) {
    float size = fmaxf(fabsf(s[i]), s[best]);
    if (i != out && !((s[best] - s[i]) / size > 2 * c->route_jitter))
      sum += expf(s[i] - s[best]);
  }
  return 1 / sum;
}

static void sparsemixer(const mr_config *c, const float *s, float *room, int32_t *chosen,
                        float *weights) {
  int n = c->n_experts, out = -1;
  for (int i = 0; i < n; i++)
    room[i] = s[i];
  for (int k = 0; k < c->n_experts_used; k++) {
    chosen[k] = best_of(room, n);
    weights[k] = sparse_weight(c, s, chosen[k], out);
    out = chosen[k];
    room[out] = -INFINITY;
  }
}

void mr_route(const mr_config *c, const float *logits, const float *bias, float *room,
              int32_t *chosen, float *weights) {
  int n = c->n_experts;
  float *p = room, *choice = room + n, sum = 0;
  if (c->arch.scoring == MR_SCORE_SPARSEMIXER) {
    sparsemixer(c, logits, room, chosen, weights);
    return;
  }
  score(c, logits, p);
  for (int i = 0; i < n; i++)
    choice[i] = (c->arch.choose_raw ? logits[i] : p[i]) + (bias ? bias[i] : 0);
  limit(c, choice);
  for (int k = 0; k < c->n_experts_used; k++) {
    chosen[k] = best_of(choice, n);
    weights[k] = p[chosen[k]];
    sum += weights[k];
    choice[chosen[k]] = -INFINITY;
  }
  for (int k = 0; k < c->n_experts_used; k++)
    weights[k] *= (c->arch.renorm ? 1 / (sum + 1e-20f) : 1) * c->route_scale;
}
