/* ref_elem.c: norms, rotary embedding, activations and reductions in plain C. See kernels.h. */
#include <math.h>

#include "kernels/ref/ref.h"

static void rmsnorm(float *y, const float *x, const float *w, int n, float eps) {
  float sum = 0.0f;
  for (int i = 0; i < n; i++)
    sum += x[i] * x[i];
  float r = 1.0f / sqrtf(sum / (float)n + eps);
  for (int i = 0; i < n; i++)
    y[i] = x[i] * r * (w != NULL ? w[i] : 1.0f);
}

static void layernorm(float *y, const float *x, const float *w, const float *b, int n, float eps) {
  float mean = 0.0f, var = 0.0f;
  for (int i = 0; i < n; i++)
    mean += x[i];
  mean /= (float)n;
  for (int i = 0; i < n; i++)
    var += (x[i] - mean) * (x[i] - mean);
  float r = 1.0f / sqrtf(var / (float)n + eps);
  for (int i = 0; i < n; i++)
    y[i] = (x[i] - mean) * r * (w != NULL ? w[i] : 1.0f) + (b != NULL ? b[i] : 0.0f);
}

static void rope(float *x, const float *cos_sin, int n_rot, int interleaved) {
  int half = n_rot / 2;
  for (int i = 0; i < half; i++) {
    float c = cos_sin[i], s = cos_sin[half + i];
    float *a = interleaved ? x + 2 * i : x + i, *b = interleaved ? a + 1 : a + half;
    float u = *a, v = *b;
    *a = u * c - v * s;
    *b = u * s + v * c;
  }
}

static float activate(float x, mr_act act) {
  switch (act) {
  case MR_ACT_SILU:
    return x / (1.0f + expf(-x));
  case MR_ACT_GELU:
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  case MR_ACT_GELU_TANH:
    return 0.5f * x * (1.0f + tanhf(0.79788456f * x * (1.0f + 0.044715f * x * x)));
  case MR_ACT_RELU:
    return x > 0.0f ? x : 0.0f * x;
  case MR_ACT_RELU2:
    return x > 0.0f ? x * x : 0.0f * x;
  case MR_ACT_QUICK_GELU:
    return x / (1.0f + expf(-1.702f * x));
  }
  return x;
}

static void gate(float *y, const float *g, const float *up, int n, mr_act act) {
  for (int i = 0; i < n; i++) {
    float a = activate(g[i], act);
    y[i] = up != NULL ? a * up[i] : a;
  }
}

static void axpy(float *y, const float *x, float s, int n) {
  for (int i = 0; i < n; i++)
    y[i] += x[i] * s;
}

static void scale(float *x, float s, int n) {
  for (int i = 0; i < n; i++)
    x[i] *= s;
}

static void softcap(float *x, float cap, int n) {
  for (int i = 0; i < n; i++)
    x[i] = cap * tanhf(x[i] / cap);
}

static int argmax(const float *x, int n, int *bad) {
  int best = 0;
  *bad = 0;
  for (int i = 0; i < n; i++) {
    if (isnan(x[i]) || x[i] == INFINITY)
      *bad = 1;
    if (x[i] > x[best])
      best = i;
  }
  return best;
}

static double logsumexp(const float *x, int n) {
  double sum = 0.0;
  float max = -INFINITY;
  for (int i = 0; i < n; i++)
    max = x[i] > max ? x[i] : max;
  for (int i = 0; i < n; i++)
    sum += (double)expf(x[i] - max);
  return (double)max + log(sum);
}

void mr_k_fill_ref_elem(mr_kernels *k) {
  k->rmsnorm = rmsnorm;
  k->layernorm = layernorm;
  k->rope = rope;
  k->gate = gate;
  k->axpy = axpy;
  k->scale = scale;
  k->softcap = softcap;
  k->argmax = argmax;
  k->logsumexp = logsumexp;
}
