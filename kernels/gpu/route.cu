/* route.cu: which experts a token goes to, and the rows of each expert. `route` makes of the
 * router's scores what src/route.c makes of them, the same operations in the same order: only
 * exponentials may differ in the last bit. A warp has a token; sums go over experts in order, in
 * every lane. `sort` makes of all choices a list of rows by expert, in order of slots, and cuts
 * each expert's rows into the items of the products (gemm.cu), so that no count has to go to the
 * host. */
#include "kernels/gpu/gpu.h"

struct route_room { /* of a warp, in shared memory */
  float *p, *choice, *group;
};

/* The first of the largest of x[0 .. n); 0 where none is above -infinity. The same in all lanes. */
MR_FN int best_of(const float *x, int n) {
  float best = MR_MINUS_INF, at = 16777216; /* 2^24: below it floats hold all integers */
  for (int i = MR_LANE; i < n; i += MR_WARP)
    if (x[i] > best) {
      best = x[i];
      at = (float)i;
    }
  MR_UNROLL
  for (int m = MR_WARP / 2; m; m /= 2) {
    float y = mr_warp_xor(best, m), j = mr_warp_xor(at, m);
    if (y > best || (y == best && j < at)) {
      best = y;
      at = j;
    }
  }
  return best > MR_MINUS_INF ? (int)at : 0;
}

MR_FN float sum_of(const float *x, int n) {
  float sum = 0;
  for (int i = 0; i < n; i++)
    sum += x[i];
  return sum;
}

/* p = scores of the experts. */
MR_FN void score(const mr_gpu_route &a, const float *logits, float *p) {
  bool sigmoid = a.scoring == MR_GPU_SCORE_SIGMOID;
  float max = sigmoid ? 0 : logits[best_of(logits, a.n)];
  for (int i = MR_LANE; i < a.n; i += MR_WARP)
    p[i] = sigmoid ? mr_sigmoid(logits[i]) : mr_exp(logits[i] - max);
  MR_WARP_SYNC();
  if (sigmoid)
    return;
  float sum = sum_of(p, a.n);
  MR_WARP_SYNC();
  for (int i = MR_LANE; i < a.n; i += MR_WARP)
    p[i] /= sum;
  MR_WARP_SYNC();
}

/* A group is as good as its best expert, or its best two together. One lane's. */
MR_FN float group_score(const mr_gpu_route &a, const float *s, int n) {
  int first = 0;
  for (int i = 1; i < n; i++)
    if (s[i] > s[first])
      first = i;
  float second = MR_MINUS_INF;
  for (int i = 0; i < n; i++)
    if (i != first && s[i] > second)
      second = s[i];
  return a.group_best || n < 2 ? s[first] : s[first] + second;
}

/* Experts outside the best groups cannot be chosen. */
MR_FN void limit(const mr_gpu_route &a, route_room s) {
  int n = a.groups > 0 ? a.n / a.groups : 0;
  if (a.groups < 2 || a.best_groups < 1 || a.best_groups >= a.groups)
    return;
  for (int g = MR_LANE; g < a.groups; g += MR_WARP)
    s.group[g] = group_score(a, s.choice + g * n, n);
  MR_WARP_SYNC();
  for (int drop = a.groups - a.best_groups; drop > 0; drop--) {
    int worst = -1;
    float least = 0;
    for (int g = 0; g < a.groups; g++)
      if (s.group[g] > MR_MINUS_INF && (worst < 0 || s.group[g] <= least)) {
        worst = g;
        least = s.group[g];
      }
    MR_WARP_SYNC(); /* all have read */
    for (int i = MR_LANE; worst >= 0 && i < n; i += MR_WARP)
      s.choice[worst * n + i] = MR_MINUS_INF;
    if (worst >= 0 && MR_LANE == 0)
      s.group[worst] = MR_MINUS_INF;
    MR_WARP_SYNC();
  }
}

/* Softmax of the best over those within twice the jitter of it. `out`: already taken. */
MR_FN float sparse_weight(const mr_gpu_route &a, const float *s, float *room, int best, int out) {
  for (int i = MR_LANE; i < a.n; i += MR_WARP) {
    float size = mr_max(mr_abs(s[i]), s[best]);
    bool near = i != out && !((s[best] - s[i]) / size > 2 * a.jitter);
    room[i] = near ? mr_exp(s[i] - s[best]) : 0;
  }
  MR_WARP_SYNC();
  float weight = 1 / sum_of(room, a.n);
  MR_WARP_SYNC();
  return weight;
}

/* Lane k's choice and its weight. */
MR_FN void choose(const mr_gpu_route &a, const float *logits, route_room s, int *mine, float *w) {
  bool sparse = a.scoring == MR_GPU_SCORE_SPARSEMIXER;
  if (!sparse)
    score(a, logits, s.p);
  for (int i = MR_LANE; i < a.n; i += MR_WARP)
    s.choice[i] =
        (sparse || a.choose_raw ? logits[i] : s.p[i]) + (a.bias && !sparse ? a.bias[i] : 0);
  MR_WARP_SYNC();
  if (!sparse)
    limit(a, s);
  float sum = 0;
  int last = -1;
  for (int k = 0; k < a.used; k++) {
    int best = best_of(s.choice, a.n);
    float weight = sparse ? sparse_weight(a, logits, s.p, best, last) : s.p[best];
    last = best;
    sum += weight;
    *mine = k == MR_LANE ? best : *mine;
    *w = k == MR_LANE ? weight : *w;
    MR_WARP_SYNC(); /* all have read */
    if (MR_LANE == 0)
      s.choice[best] = MR_MINUS_INF;
    MR_WARP_SYNC();
  }
  if (!sparse)
    *w *= (a.renorm ? 1 / (sum + 1e-20f) : 1) * a.scale;
}

MR_GPU_KERNEL(route, mr_gpu_route, MR_GPU_WARPS) {
  int warp = MR_THREAD / MR_WARP, t = MR_BLOCK(0) * MR_GPU_WARPS + warp, mine = 0;
  if (t >= a.tokens)
    return; /* the whole warp */
  float *room = (float *)mr_shared() + warp * 3 * a.n, weight = 0;
  choose(a, a.scores + (size_t)t * a.ld, route_room{room, room + a.n, room + 2 * a.n}, &mine,
         &weight);
  if (MR_LANE < a.used) {
    a.chosen[t * a.used + MR_LANE] = mine;
    a.weight[t * a.each + MR_LANE] = weight;
  }
  if (MR_LANE == 0 && a.each > a.used) { /* the shared expert sees all tokens, after the others */
    a.weight[t * a.each + a.used] = (a.gate ? a.gate[t] : 1) * a.shared_scale;
    a.slot[t * a.each + a.used] = a.tokens * a.used + t;
    a.from[a.tokens * a.used + t] = t;
  }
}

/* ------------------------------------------------------------------ rows by expert */

struct sort_shared {
  int32_t first, item; /* row and item that the block's expert begins with */
  int32_t of_warp[MR_GPU_WARPS];
};

/* Rows of each expert. */
MR_FN void count_rows(const mr_gpu_sort &a, int32_t *rows) {
  for (int e = MR_THREAD; e < a.n; e += MR_THREADS)
    rows[e] = 0;
  MR_BARRIER();
  for (int i = MR_THREAD; i < a.tokens * a.used; i += MR_THREADS)
    mr_count(&rows[a.chosen[i]]);
  MR_BARRIER();
}

/* The expert's slots get rows one after the other. A warp meets its lanes together. */
MR_FN void place(const mr_gpu_sort &a, sort_shared *s, int expert) {
  int warp = MR_THREAD / MR_WARP, at = s->first;
  for (int i0 = 0; i0 < a.tokens * a.used; i0 += MR_THREADS) {
    int i = i0 + MR_THREAD;
    bool mine = i < a.tokens * a.used && a.chosen[i] == expert;
    uint64_t lanes = mr_warp_ballot(mine);
    if (MR_LANE == 0)
      s->of_warp[warp] = mr_bits_set(lanes);
    MR_BARRIER();
    int row = at + mr_bits_set(lanes & (((uint64_t)1 << MR_LANE) - 1));
    for (int w = 0; w < MR_GPU_WARPS; w++) {
      row += w < warp ? s->of_warp[w] : 0;
      at += s->of_warp[w];
    }
    MR_BARRIER();
    if (!mine)
      continue;
    int t = i / a.used, slot = t * a.each + i % a.used;
    a.slot[slot] = row;
    a.from[row] = t;
    if (a.factor) {
      a.factor[row] = a.weight[slot];
      a.weight[slot] = 1;
    }
  }
}

MR_GPU_KERNEL(sort, mr_gpu_sort, MR_GPU_WARPS) {
  sort_shared *s = (sort_shared *)mr_shared();
  int32_t *rows = (int32_t *)(s + 1);
  int expert = MR_BLOCK(0);
  count_rows(a, rows);
  if (MR_THREAD == 0) {
    s->first = s->item = 0;
    for (int e = 0; e < expert; e++) {
      s->first += rows[e];
      s->item += (rows[e] + a.tile - 1) / a.tile;
    }
  }
  MR_BARRIER();
  int items = (rows[expert] + a.tile - 1) / a.tile;
  for (int i = MR_THREAD; i < items; i += MR_THREADS)
    a.items[s->item + i] =
        mr_gpu_item{expert, s->first + i * a.tile, mr_imin(a.tile, rows[expert] - i * a.tile)};
  if (MR_THREAD == 0)
    a.first[expert] = s->first;
  if (expert == a.n - 1 && MR_THREAD == 0) {
    a.first[a.n] = a.tokens * a.used;
    a.first[a.n + 1] = a.tokens * a.each;
    *a.n_items = s->item + items;
  }
  place(a, s, expert);
}
