#include "jobs/peak.h"

#include <immintrin.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"

#define OPS_S 0.06                       /* length of each measurement */
#define BYTES_S 0.08
#define COPY_BYTES ((size_t)48 << 20)    /* of each thread's two arrays together */
#define THREADS_MAX 256
#define CHUNK 4096                       /* rounds between two looks at the clock */

typedef double (*chunk_fn)(uint64_t *sink); /* CHUNK rounds; returns operations */

/* Twelve independent accumulators hide the latency of the multiply-add. */
#define ACCUMULATORS 12

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static double chunk_vnni(uint64_t *sink) {
  __m512i acc[ACCUMULATORS], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(1);
  for (int i = 0; i < ACCUMULATORS; i++)
    acc[i] = _mm512_set1_epi32(i);
  for (int n = 0; n < CHUNK; n++) {
    for (int i = 0; i < ACCUMULATORS; i++)
      acc[i] = _mm512_dpbusd_epi32(acc[i], a, b);
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
  for (int i = 1; i < ACCUMULATORS; i++)
    acc[0] = _mm512_add_epi32(acc[0], acc[i]);
  *sink += (uint64_t)(uint32_t)_mm512_reduce_add_epi32(acc[0]);
  return (double)CHUNK * ACCUMULATORS * 128;
}

__attribute__((target("avx2"))) static double chunk_avx2(uint64_t *sink) {
  __m256i acc[ACCUMULATORS], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(1), one = _mm256_set1_epi16(1);
  for (int i = 0; i < ACCUMULATORS; i++)
    acc[i] = _mm256_set1_epi32(i);
  for (int n = 0; n < CHUNK; n++) {
    for (int i = 0; i < ACCUMULATORS; i++) {
      acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), one));
      __asm__ volatile("" : "+x"(a), "+x"(b));
    }
  }
  for (int i = 1; i < ACCUMULATORS; i++)
    acc[0] = _mm256_add_epi32(acc[0], acc[i]);
  *sink += (uint64_t)(uint32_t)_mm256_extract_epi32(acc[0], 0);
  return (double)CHUNK * ACCUMULATORS * 64;
}

static double chunk_sse(uint64_t *sink) {
  __m128i acc[ACCUMULATORS], a = _mm_set1_epi8(3), b = _mm_set1_epi8(1), one = _mm_set1_epi16(1);
  for (int i = 0; i < ACCUMULATORS; i++)
    acc[i] = _mm_set1_epi32(i);
  for (int n = 0; n < CHUNK; n++) {
    for (int i = 0; i < ACCUMULATORS; i++) {
      acc[i] = _mm_add_epi32(acc[i], _mm_madd_epi16(_mm_maddubs_epi16(a, b), one));
      __asm__ volatile("" : "+x"(a), "+x"(b));
    }
  }
  for (int i = 1; i < ACCUMULATORS; i++)
    acc[0] = _mm_add_epi32(acc[0], acc[i]);
  *sink += (uint64_t)(uint32_t)_mm_cvtsi128_si32(acc[0]);
  return (double)CHUNK * ACCUMULATORS * 32;
}

static chunk_fn best_chunk(const char **name) {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) {
    *name = "AVX-512 VNNI";
    return chunk_vnni;
  }
  if (__builtin_cpu_supports("avx2")) {
    *name = "AVX2";
    return chunk_avx2;
  }
  *name = "SSE";
  return chunk_sse;
}

typedef struct worker {
  pthread_t id;
  chunk_fn chunk;
  char *copy; /* COPY_BYTES, or NULL */
  double ops_rate, bytes_rate;
  uint64_t sink;
} worker;

static void *work(void *arg) {
  worker *w = arg;
  double t = mr_sys_seconds(), ops = 0, now;
  do {
    ops += w->chunk(&w->sink);
    now = mr_sys_seconds();
  } while (now - t < OPS_S);
  w->ops_rate = ops / (now - t);
  if (!w->copy)
    return NULL;
  size_t half = COPY_BYTES / 2;
  double bytes = 0;
  for (t = mr_sys_seconds(); (now = mr_sys_seconds()) - t < BYTES_S; bytes += (double)COPY_BYTES)
    memcpy(w->copy, w->copy + half, half);
  w->bytes_rate = bytes / (now - t);
  w->sink += (uint64_t)(unsigned char)w->copy[half - 1];
  return NULL;
}

mr_peaks mr_peak_measure(int threads) {
  static _Atomic uint64_t keep; /* what the loops computed, so that they are computed */
  mr_peaks p = {0};
  const char *name;
  chunk_fn chunk = best_chunk(&name);
  int n = threads < 1 ? 1 : threads > THREADS_MAX ? THREADS_MAX : threads;
  worker *w = mr_mem_alloc((size_t)n, sizeof *w);
  bool *started = mr_mem_alloc((size_t)n, sizeof *started);
  for (int i = 0; w && started && i < n; i++) {
    w[i].chunk = chunk;
    w[i].copy = mr_mem_pages(COPY_BYTES);
    started[i] = pthread_create(&w[i].id, NULL, work, &w[i]) == 0;
  }
  for (int i = 0; w && started && i < n; i++) {
    if (started[i])
      pthread_join(w[i].id, NULL);
    p.ops += w[i].ops_rate;
    p.bytes += w[i].bytes_rate;
    atomic_fetch_add(&keep, w[i].sink);
    mr_mem_free(w[i].copy);
  }
  mr_mem_free(w);
  mr_mem_free(started);
  snprintf(p.basis, sizeof p.basis, "int8 from registers with %s, and memory copy, measured on %d thread%s at the end",
           name, n, n == 1 ? "" : "s");
  return p;
}
