/* top.cu: what choosing a token needs of a row of logits, so that the row itself stays here: its
 * largest values in order, the sums of weights, a value drawn by its weight, the place of a given
 * one (src/sampler_best.h). A block a row.
 *
 * The best are found by the digits of a threshold (radix select): keys of 32 bits, 8 at a time, a
 * histogram each. Counts do not depend on the order of threads; what is gathered is sorted by
 * (value, id), which is a total order. Weights are summed in blocks of 256 columns, each by one
 * warp, and the blocks in order: no bit depends on anything but the row.
 */
#include "kernels/gpu/gpu.h"

#define BEST MR_GPU_BEST
#define BLOCK MR_GPU_MASS
#define TOP_THREADS (MR_GPU_TOP_WARPS * MR_WARP)

struct top_shared {
  int32_t bins[256];
  float max[MR_GPU_TOP_WARPS];
  uint32_t threshold; /* key of the last of the best */
  int32_t need;       /* of the values with that key */
  int32_t equal;      /* how many there are */
  int32_t found, bad, below, rank;
  float x[BEST];
  int32_t id[BEST];
};

/* Larger values have larger keys; the two zeros are one. */
MR_FN uint32_t key_of(float x) {
  uint32_t u = mr_bits(x + 0.0f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

MR_FN bool is_better(float x, int i, float y, int j) {
  return x > y || (x == y && i < j);
}

MR_FN void find_max(const mr_gpu_top &a, const float *x, top_shared *s) {
  float max = MR_MINUS_INF;
  int bad = 0;
  for (int i = MR_THREAD; i < a.cols; i += TOP_THREADS) {
    max = mr_max(x[i], max);
    bad |= !(x[i] <= 3.4028234e38f); /* NaN or infinity */
  }
  max = mr_warp_max(max);
  if (MR_LANE == 0)
    s->max[MR_THREAD / MR_WARP] = max;
  if (bad)
    s->bad = 1; /* whoever writes it writes the same */
}

/* [blocks] sums of e^(x - max), then as many of e^((x - max) * inverse). */
MR_FN void sum_masses(const mr_gpu_top &a, const float *x, float max, float inverse, float *mass) {
  int blocks = (a.cols + BLOCK - 1) / BLOCK;
  for (int b = MR_THREAD / MR_WARP; b < blocks; b += MR_GPU_TOP_WARPS) {
    float plain = 0, tempered = 0;
    int end = mr_imin((b + 1) * BLOCK, a.cols);
    for (int i = b * BLOCK + MR_LANE; i < end; i += MR_WARP) {
      plain += mr_exp(x[i] - max);
      tempered += mr_exp((x[i] - max) * inverse);
    }
    plain = mr_warp_sum(plain);
    tempered = mr_warp_sum(tempered);
    if (MR_LANE == 0) {
      mass[b] = plain;
      mass[blocks + b] = tempered;
    }
  }
}

/* One digit more of the threshold; `known` marks the digits that are there. */
MR_FN void next_digit(const mr_gpu_top &a, const float *x, top_shared *s, int shift,
                      uint32_t known) {
  for (int i = MR_THREAD; i < 256; i += TOP_THREADS)
    s->bins[i] = 0;
  MR_BARRIER();
  uint32_t prefix = s->threshold;
  for (int i = MR_THREAD; i < a.cols; i += TOP_THREADS) {
    uint32_t key = key_of(x[i]);
    if ((key & known) == prefix)
      mr_count(&s->bins[key >> shift & 255u]);
  }
  MR_BARRIER();
  if (MR_THREAD == 0) {
    int digit = 255;
    while (digit > 0 && s->bins[digit] < s->need)
      s->need -= s->bins[digit--];
    s->equal = s->bins[digit];
    s->threshold = prefix | (uint32_t)digit << shift;
  }
  MR_BARRIER();
}

/* Of equal values at the threshold only those with an id below it are taken. */
MR_FN int last_id(const mr_gpu_top &a, const float *x, top_shared *s) {
  int low = 0, high = a.cols; /* high: enough of them are below */
  while (s->equal > s->need && high - low > 1) {
    int middle = low + (high - low) / 2;
    if (MR_THREAD == 0)
      s->below = 0;
    MR_BARRIER();
    for (int i = MR_THREAD; i < middle; i += TOP_THREADS)
      if (key_of(x[i]) == s->threshold)
        mr_count(&s->below);
    MR_BARRIER();
    if (s->below >= s->need)
      high = middle;
    else
      low = middle;
    MR_BARRIER();
  }
  return high;
}

MR_FN void gather(const mr_gpu_top &a, const float *x, top_shared *s, int end, int probe) {
  float mine = probe >= 0 ? x[probe] : 0;
  for (int i = MR_THREAD; i < a.cols; i += TOP_THREADS) {
    uint32_t key = key_of(x[i]);
    if (key > s->threshold || (key == s->threshold && i < end)) {
      int at = mr_count(&s->found);
      s->x[at] = x[i];
      s->id[at] = i;
    }
    if (probe >= 0 && is_better(x[i], i, mine, probe))
      mr_count(&s->rank);
  }
}

MR_FN void put_in_order(const top_shared *s, int n, mr_gpu_best *out) {
  for (int i = MR_THREAD; i < n; i += TOP_THREADS) {
    int at = 0;
    for (int j = 0; j < n; j++)
      at += is_better(s->x[j], s->id[j], s->x[i], s->id[i]);
    out->x[at] = s->x[i];
    out->id[at] = s->id[i];
  }
}

/* One thread: the value at share u of all weights, in order of id. */
MR_FN int draw(const mr_gpu_top &a, const float *x, float max, const mr_gpu_ask &ask,
               const float *mass, double total) {
  int blocks = (a.cols + BLOCK - 1) / BLOCK, b = 0, last = 0;
  double left = ask.u * total, inside = 0, sum = 0;
  for (int i = 0; i < blocks; i++) {
    if (mass[i] <= 0)
      continue;
    b = i;
    if (left < (double)mass[i])
      break;
    left -= (double)mass[i];
  }
  int end = mr_imin((b + 1) * BLOCK, a.cols);
  for (int i = b * BLOCK; i < end; i++)
    inside += (double)mr_exp((x[i] - max) * ask.inverse);
  left *= inside / (double)mass[b];
  for (int i = b * BLOCK; i < end && sum <= left; i++) {
    float w = mr_exp((x[i] - max) * ask.inverse);
    last = w > 0 ? i : last;
    sum += (double)w;
  }
  return last;
}

/* One thread. */
MR_FN void put_sums(const mr_gpu_top &a, const float *x, const top_shared *s, float max,
                    const mr_gpu_ask &ask, const float *mass, mr_gpu_best *out) {
  int blocks = (a.cols + BLOCK - 1) / BLOCK;
  double sums[2] = {0, 0};
  for (int i = 0; i < 2 * blocks; i++)
    sums[i / blocks] += (double)mass[i];
  out->max = max;
  out->sum = sums[0];
  out->total = sums[1];
  out->drawn = ask.u >= 0 ? draw(a, x, max, ask, mass + blocks, sums[1]) : -1;
  out->drawn_x = ask.u >= 0 ? x[out->drawn] : 0;
  out->probe_x = ask.probe >= 0 ? x[ask.probe] : 0;
  out->rank = s->rank + 1;
}

MR_GPU_KERNEL(top, mr_gpu_top, MR_GPU_TOP_WARPS) {
  top_shared *s = (top_shared *)mr_shared();
  float *mass = (float *)(s + 1);
  const float *x = a.x + (size_t)MR_BLOCK(0) * a.ld;
  mr_gpu_ask ask = a.ask[MR_BLOCK(0)];
  mr_gpu_best *out = a.out + MR_BLOCK(0);
  int n = mr_imin(BEST, a.cols);
  if (MR_THREAD == 0) {
    s->threshold = 0;
    s->need = n;
    s->found = s->bad = s->rank = 0;
  }
  MR_BARRIER();
  find_max(a, x, s);
  MR_BARRIER();
  float max = MR_MINUS_INF;
  for (int i = 0; i < MR_GPU_TOP_WARPS; i++)
    max = mr_max(max, s->max[i]);
  bool bad = s->bad || max == MR_MINUS_INF;
  if (MR_THREAD == 0) {
    out->bad = bad;
    out->n = n;
  }
  if (bad)
    return; /* the whole block */
  sum_masses(a, x, max, ask.inverse, mass);
  for (int shift = 24; shift >= 0; shift -= 8)
    next_digit(a, x, s, shift, shift == 24 ? 0 : 0xffffffffu << (shift + 8));
  gather(a, x, s, last_id(a, x, s), ask.probe);
  MR_BARRIER();
  put_in_order(s, n, out);
  if (MR_THREAD == 0)
    put_sums(a, x, s, max, ask, mass, out);
}

#undef BEST
#undef BLOCK
#undef TOP_THREADS
