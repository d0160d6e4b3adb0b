/* elem.h: norms, rotary embedding, activations and reductions on vectors, after a vec*.h; see
 * kernels.h.
 *
 * Reductions run over VL lanes, element i in lane i % VL, then over the lanes: an order that
 * depends on n alone.
 */
#ifndef MR_KERNELS_SIMD_ELEM_H
#define MR_KERNELS_SIMD_ELEM_H

#include <math.h>

#include "kernels/kernels.h"
#include "kernels/simd/math.h"

V_INLINE int v_count(int n, int i) {
  return n - i < VL ? n - i : VL;
}

/* Whole vectors need no mask, which costs more than the test for it. */
V_INLINE vf v_in(const float *p, int count) {
  return count == VL ? vload(p) : vload_n(p, count);
}

V_INLINE void v_out(float *p, vf v, int count) {
  if (count == VL)
    vstore(p, v);
  else
    vstore_n(p, v, count);
}

static float sum_of(const float *x, int n) {
  vf sum = vzero();
  for (int i = 0; i < n; i += VL)
    sum = vadd(sum, vload_n(x + i, v_count(n, i)));
  return vreduce_add(sum);
}

static float sum_of_squares(const float *x, float mean, int n) {
  vf sum = vzero(), m = vset1(mean);
  int i = 0;
  for (; i + VL <= n; i += VL) {
    vf d = vsub(vload(x + i), m);
    sum = vfma(d, d, sum);
  }
  if (i < n) { /* lanes past the end must count as the mean */
    vf d = vsub(vload_n(x + i, n - i), m);
    float last[VL] = {0};
    vstore_n(last, d, n - i);
    d = vload(last);
    sum = vfma(d, d, sum);
  }
  return vreduce_add(sum);
}

static void simd_rmsnorm(float *y, const float *x, const float *w, int n, float eps) {
  vf r = vset1(1.0f / sqrtf(sum_of_squares(x, 0.0f, n) / (float)n + eps));
  for (int i = 0; i < n; i += VL) {
    int c = v_count(n, i);
    vf v = vmul(v_in(x + i, c), r);
    if (w != NULL)
      v = vmul(v, v_in(w + i, c));
    v_out(y + i, v, c);
  }
}

static void simd_layernorm(float *y, const float *x, const float *w, const float *b, int n,
                           float eps) {
  float mean = sum_of(x, n) / (float)n;
  vf m = vset1(mean), r = vset1(1.0f / sqrtf(sum_of_squares(x, mean, n) / (float)n + eps));
  for (int i = 0; i < n; i += VL) {
    int c = v_count(n, i);
    vf v = vmul(vsub(v_in(x + i, c), m), r);
    if (w != NULL)
      v = vmul(v, v_in(w + i, c));
    if (b != NULL)
      v = vadd(v, v_in(b + i, c));
    v_out(y + i, v, c);
  }
}

static void simd_rope(float *x, const float *cos_sin, int n_rot, int interleaved) {
  int half = n_rot / 2;
  for (int i = 0; i < half; i += VL) {
    int c = v_count(half, i), lo = 2 * c < VL ? 2 * c : VL;
    vf cs = v_in(cos_sin + i, c), sn = v_in(cos_sin + half + i, c), a, b, u, v;
    if (interleaved)
      vunzip(vload_n(x + 2 * i, lo), vload_n(x + 2 * i + lo, 2 * c - lo), &a, &b);
    else
      a = v_in(x + i, c), b = v_in(x + half + i, c);
    u = vfnma(b, sn, vmul(a, cs));
    v = vfma(b, cs, vmul(a, sn));
    if (interleaved) {
      vzip(u, v, &a, &b);
      vstore_n(x + 2 * i, a, lo);
      vstore_n(x + 2 * i + lo, b, 2 * c - lo);
    } else {
      v_out(x + i, u, c);
      v_out(x + half + i, v, c);
    }
  }
}

V_INLINE vf vact(vf x, mr_act act) {
  vf zero = vzero();
  switch (act) {
  case MR_ACT_SILU:
    return vmul(x, vsigmoid(x));
  case MR_ACT_GELU:
    return vmul(x, vphi(x));
  case MR_ACT_GELU_TANH: { /* 0.5 (1 + tanh u) = sigmoid(2u), without the cancellation */
    vf u = vmul(x, vfma(vmul(x, x), vset1(0.0713548162f), vset1(1.59576912f)));
    return vmul(x, vsigmoid(u));
  }
  case MR_ACT_RELU:
    return vselect_lt(x, zero, zero, x);
  case MR_ACT_RELU2:
    return vselect_lt(x, zero, zero, vmul(x, x));
  case MR_ACT_QUICK_GELU:
    return vmul(x, vsigmoid(vmul(x, vset1(1.702f))));
  }
  return x;
}

V_INLINE void gate_of(float *y, const float *g, const float *up, int n, mr_act act) {
  for (int i = 0; i < n; i += VL) {
    int c = v_count(n, i);
    vf v = vact(v_in(g + i, c), act);
    if (up != NULL)
      v = vmul(v, v_in(up + i, c));
    v_out(y + i, v, c);
  }
}

static void simd_gate(float *y, const float *g, const float *up, int n, mr_act act) {
  switch (act) { /* one loop for each, so that none tests inside */
  case MR_ACT_SILU:
    gate_of(y, g, up, n, MR_ACT_SILU);
    break;
  case MR_ACT_GELU:
    gate_of(y, g, up, n, MR_ACT_GELU);
    break;
  case MR_ACT_GELU_TANH:
    gate_of(y, g, up, n, MR_ACT_GELU_TANH);
    break;
  case MR_ACT_RELU:
    gate_of(y, g, up, n, MR_ACT_RELU);
    break;
  case MR_ACT_RELU2:
    gate_of(y, g, up, n, MR_ACT_RELU2);
    break;
  case MR_ACT_QUICK_GELU:
    gate_of(y, g, up, n, MR_ACT_QUICK_GELU);
    break;
  }
}

static void simd_axpy(float *y, const float *x, float s, int n) {
  for (int i = 0; i < n; i += VL) {
    int c = v_count(n, i);
    v_out(y + i, vadd(v_in(y + i, c), vmul(v_in(x + i, c), vset1(s))), c);
  }
}

static void simd_scale(float *x, float s, int n) {
  for (int i = 0; i < n; i += VL) {
    int c = v_count(n, i);
    v_out(x + i, vmul(v_in(x + i, c), vset1(s)), c);
  }
}

static void simd_softcap(float *x, float cap, int n) {
  vf c = vset1(cap);
  for (int i = 0; i < n; i += VL) {
    int m = v_count(n, i);
    v_out(x + i, vmul(c, vtanh(vdiv(v_in(x + i, m), c))), m);
  }
}

/* Largest value; *bad: a value is NaN or +infinity (the maximum means nothing then). */
static float max_of(const float *x, int n, int *bad) {
  vf max = vset1(-INFINITY);
  uint32_t found = 0;
  int i = 0;
  for (; i + VL <= n; i += VL) {
    vf v = vload(x + i);
    found |= vbad(v);
    max = vmax(max, v);
  }
  float m = vreduce_max(max);
  *bad = found != 0;
  for (; i < n; i++) {
    if (isnan(x[i]) || x[i] == INFINITY)
      *bad = 1;
    if (x[i] > m)
      m = x[i];
  }
  return m;
}

/* By blocks: only the one with the largest value is looked through again, from the cache. */
static int simd_argmax(const float *x, int n, int *bad) {
  enum { BLOCK = 4096 };
  float max = -INFINITY;
  int i = 0, odd;
  *bad = 0;
  for (int at = 0; at < n; at += BLOCK) {
    float most = max_of(x + at, n - at < BLOCK ? n - at : BLOCK, &odd);
    *bad |= odd;
    if (most > max)
      max = most, i = at;
  }
  if (*bad)
    return 0;
  for (vf m = vset1(max); i + VL <= n; i += VL) {
    uint32_t hit = veq(vload(x + i), m);
    if (hit != 0)
      return i + __builtin_ctz(hit);
  }
  while (i < n - 1 && x[i] != max)
    i++;
  return i;
}

static double simd_logsumexp(const float *x, int n) {
  int bad, i = 0;
  float max = max_of(x, n, &bad);
  vf m = vset1(max);
  vd sum[2] = {vzero_f64(), vzero_f64()};
  for (; i + VL <= n; i += VL)
    vaccumulate_f64(sum, vexp(vsub(vload(x + i), m)));
  if (i < n) {
    float last[VL] = {0};
    vstore_n(last, vexp(vsub(vload_n(x + i, n - i), m)), n - i);
    vaccumulate_f64(sum, vload(last));
  }
  return (double)max + log(vreduce_f64(sum));
}

static void simd_fill_elem(mr_kernels *k) {
  k->rmsnorm = simd_rmsnorm;
  k->layernorm = simd_layernorm;
  k->rope = simd_rope;
  k->gate = simd_gate;
  k->axpy = simd_axpy;
  k->scale = simd_scale;
  k->softcap = simd_softcap;
  k->argmax = simd_argmax;
  k->logsumexp = simd_logsumexp;
}

#endif
