#include "src/gpu_few.h"

#include <math.h>
#include <string.h>

#include "kernels/dtype.h"
#include "src/matrix.h"

#define GROUP MR_GPU_GROUP
#define STEPS 15         /* between the 16 values of 4 bits */
#define OFF_STEP 0.01f   /* of a step: what a file's own arithmetic may leave */
#define MOST_FILE_BITS 5 /* of a weight, scales counted, that may lie on 16 steps */

size_t mr_gpu_few_bytes(mr_gpu_hold hold, size_t k) {
  return hold == MR_GPU_INT4 ? k / 2 : k;
}

size_t mr_gpu_few_scale_bytes(mr_gpu_hold hold, size_t k) {
  return k / GROUP * sizeof(uint16_t) * (hold == MR_GPU_INT4 ? 2 : 1);
}

/* ------------------------------------------------------------------ one group */

static void ends_of(const float *x, int n, float *least, float *most) {
  *least = *most = x[0];
  for (int i = 1; i < n; i++) {
    *least = x[i] < *least ? x[i] : *least;
    *most = x[i] > *most ? x[i] : *most;
  }
}

static bool on_steps(const float *x, int n, float least, float step) {
  for (int i = 0; i < n; i++) {
    float t = (x[i] - least) / step; /* NaN past float32: no */
    if (!(fabsf(t - rintf(t)) <= OFF_STEP))
      return false;
  }
  return true;
}

/* The most even steps, at most STEPS, from least to most that all values lie on; 0: none. */
static int even_steps(const float *x, int n, float least, float most) {
  for (int steps = STEPS; steps > 0; steps--)
    if (on_steps(x, n, least, (most - least) / (float)steps))
      return steps;
  return 0;
}

static float held(uint16_t h, float unit) {
  return mr_f16_to_f32(h) * unit;
}

static int clamped(float x, int from, int to) {
  return !(x > (float)from) ? from : x > (float)to ? to : (int)rintf(x);
}

/* n of GROUP values; the rest are as zeros. */
static void group_int4(const float *x, int n, float unit, uint8_t *w, uint16_t *scale) {
  float least, most;
  ends_of(x, n, &least, &most);
  int steps = most > least ? even_steps(x, n, least, most) : 0;
  double range = (double)most - least; /* it may be past float32 */
  scale[0] = mr_f32_to_f16((float)(range / (steps ? steps : STEPS) / unit));
  scale[1] = mr_f32_to_f16(least / unit);
  float step = held(scale[0], unit), from = held(scale[1], unit);
  memset(w, 0, GROUP / 2);
  for (int i = 0; i < n; i++) {
    int code = step > 0 ? clamped((x[i] - from) / step, 0, STEPS) : 0;
    w[i / 2] = (uint8_t)(w[i / 2] | code << (i % 2 * 4));
  }
}

static void group_int8(const float *x, int n, float unit, uint8_t *w, uint16_t *scale) {
  float least, most;
  ends_of(x, n, &least, &most);
  most = fmaxf(-least, most);
  *scale = mr_f32_to_f16(most / 127 / unit);
  float step = held(*scale, unit);
  memset(w, 0, GROUP);
  for (int i = 0; i < n; i++)
    w[i] = (uint8_t)(int8_t)(step > 0 ? clamped(x[i] / step, -127, 127) : 0);
}

/* ------------------------------------------------------------------ a row */

/* A power of two: the row's largest value is 2^14 to 2^15 of it, so that scales lie where float16
 * has all its bits. */
static float unit_of(const float *row, int n) {
  float least, most;
  int exponent;
  ends_of(row, n, &least, &most);
  most = fmaxf(-least, most);
  if (!(most > 0 && most <= 3.4e38f))
    return 1;
  frexpf(most, &exponent);
  return ldexpf(1, exponent - 15 < -120 ? -120 : exponent - 15);
}

/* What is past n pads the row to k: its activations are zeros, so it may be any finite number. */
void mr_gpu_few_row(mr_gpu_hold hold, const float *row, int n, int k, uint8_t *w, uint16_t *scales,
                    float *unit) {
  size_t bytes = mr_gpu_few_bytes(hold, GROUP), each = hold == MR_GPU_INT4 ? 2 : 1;
  *unit = unit_of(row, n);
  for (int i = 0; i < k; i += GROUP, w += bytes, scales += each) {
    int here = n - i < GROUP ? n - i : GROUP;
    if (here <= 0) {
      memset(w, 0, bytes);
      memset(scales, 0, each * sizeof *scales);
    } else if (hold == MR_GPU_INT4) {
      group_int4(row + i, here, *unit, w, scales);
    } else {
      group_int8(row + i, here, *unit, w, scales);
    }
  }
}

/* ------------------------------------------------------------------ what a file has */

double mr_gpu_file_bits(const mr_matrix *w) {
  const mr_dtype_info *type = mr_dtype_get(w->dtype);
  if (w->quant && w->quant->kind != MR_QUANT_SCALED)
    return w->quant->bits;
  return 8.0 * type->block_bytes / type->block;
}

bool mr_gpu_fits_int4(const mr_matrix *w, float *room) {
  if (mr_gpu_file_bits(w) > MOST_FILE_BITS)
    return false;
  for (int i = 0; i < 3; i++) {
    mr_matrix_row(w, (int64_t)(w->n - 1) * i / 2, room);
    for (int g = 0; g < w->k; g += GROUP) {
      int n = w->k - g < GROUP ? w->k - g : GROUP;
      float least, most;
      ends_of(room + g, n, &least, &most);
      if (most > least && !even_steps(room + g, n, least, most))
        return false;
    }
  }
  return true;
}
