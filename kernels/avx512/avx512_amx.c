/* avx512_amx.c: the int8 GEMM's micro-kernel on AMX tiles, for CPUs that have them. Arithmetic and
 * layouts: avx512_i8.h.
 *
 * One group of 64 along K is one tile product: rows [16][64] int8 times weights [16 steps][16
 * columns][4] uint8 gives exact int32 sums [16][16]. They pass through memory (L1) to the vector
 * unit, which scales and adds them, while the products of the next two groups run.
 *
 * Loops: blocks of panels that stay in L2; in them tiles of 16 rows, which stay in L1; in them the
 * half panels of the block, the first tile asking for weights ahead. With few row tiles weights
 * come from memory most of the time: then half panels, and in them the tiles, each of which asks
 * for its part of the next half panel, so that memory works while products run.
 */
#include <cpuid.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/avx512/avx512.h"
#include "kernels/avx512/avx512_amx.h"
#include "kernels/avx512/avx512_i8.h"

#undef TILE_ROWS
#define TILE_ROWS AMX_ROWS
#define BLOCK_BYTES (512 * 1024)
#define PREFETCH_AHEAD (6 * GROUP_BYTES)
#define FEW_TILES 8
#define ARCH_REQ_XCOMP_PERM 0x1023 /* asm/prctl.h of Linux 5.16 and later */
#define XFEATURE_XTILEDATA 18

/* Tiles: 0 and 1 sums, 4 and 6 rows, 5 and 7 weights. */
typedef struct row_group { /* of one group: what the 16 rows of a tile need beside their bytes */
  int32_t start[TILE_ROWS];
  float scale[TILE_ROWS];
} row_group;

typedef struct row_tile {
  const int8_t *x;
  int i0, rows, skip; /* rows before i0 + skip are computed, not stored: another tile stored them */
  const uint8_t *ahead; /* weights to come: `lines` cache lines are fetched in each group */
  int lines;
  _Alignas(64) row_group groups[I8_AMX_GROUPS];
} row_tile;

int mr_amx_usable(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
    return 0;
  if ((d >> 22 & 1) == 0 || (d >> 24 & 1) == 0 || (d >> 25 & 1) == 0)
    return 0; /* AMX-BF16, AMX-TILE, AMX-INT8 */
  if (!mr_avx512_bf16_usable())
    return 0;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* Transposes 16 x 16 values of 32 bits: pairs, then fours in 128-bit lanes, then the lanes. */
INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
    r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
  }
  UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int j = 0; j < 4; j++) {
    t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0x88);
    t[i + 4 + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0xdd);
  }
  UNROLL for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
  }
}

/* words of 16 groups at most, [rows] of them `stride` bytes apart, to to[group][row] */
static void gather(int32_t *to, const int8_t *words, size_t stride, int rows, int groups) {
  __m512i r[16];
  __mmask16 in = groups >= 16 ? 0xffff : (__mmask16)((1u << groups) - 1);
  UNROLL for (int i = 0; i < 16; i++) r[i] =
      _mm512_maskz_loadu_epi32(i < rows ? in : 0, words + (size_t)(i < rows ? i : 0) * stride);
  transpose(r);
  UNROLL for (int q = 0; q < 16; q++) if (q < groups)
      _mm512_store_si512(to + q * (int)(sizeof(row_group) / 4), r[q]);
}

static void gather_rows(row_tile *t, const gemm_call *g) {
  const int8_t *scales = t->x + (size_t)g->groups * GROUP, *starts = scales + g->groups * 4;
  for (int q = 0; q < g->groups; q += 16) {
    gather(t->groups[q].start, starts + q * 4, g->row_bytes, t->rows, g->groups - q);
    gather((int32_t *)(void *)t->groups[q].scale, scales + q * 4, g->row_bytes, t->rows,
           g->groups - q);
  }
}

/* Scales the sums of one group and adds them to y. */
INLINE void scale_add(__m512 *y, const int32_t *sums, int rows, const float *sw,
                      const row_group *r) {
  __m512 w = _mm512_load_ps(sw), back = _mm512_mul_ps(w, _mm512_set1_ps(-MAGIC));
  UNROLL for (int i = 0; i < rows; i++) {
    __m512i s = _mm512_load_si512(sums + 16 * i);
    s = _mm512_add_epi32(s, _mm512_set1_epi32(r->start[i]));
    __m512 t = _mm512_fmadd_ps(_mm512_castsi512_ps(s), w, back);
    y[i] = _mm512_fmadd_ps(t, _mm512_set1_ps(r->scale[i]), y[i]);
  }
}

INLINE void prefetch(const uint8_t *p, int lines) {
  for (int i = 0; i < lines; i++)
    _mm_prefetch((const char *)p + i * 64, _MM_HINT_T0);
}

/* Loads rows and weights of group q into tiles a and b. */
#define LOAD(q, a, b)                                                                              \
  do {                                                                                             \
    prefetch(r->ahead + (size_t)(q)*lines * 64, lines);                                            \
    TILE_LOAD(a, x + (size_t)(q)*GROUP, row_bytes);                                                \
    TILE_LOAD(b, w + (size_t)(q)*GROUP_BYTES, 64);                                                 \
  } while (0)

#define START(c, a, b)                                                                             \
  do {                                                                                             \
    TILE_ZERO(c);                                                                                  \
    TILE_DOT_I8(c, a, b);                                                                          \
  } while (0)

/* Stores the sums of group q, starts those of q + 2, and scales those of q - 1, stored before. The
 * loads come first: behind a store of unfinished sums, a load whose address has the same low 12
 * bits would wait for it. Past the last group, products of old tiles are started and never used. */
#define STEP(q, c, a, b)                                                                           \
  do {                                                                                             \
    if ((q) + 2 < groups)                                                                          \
      LOAD((q) + 2, a, b);                                                                         \
    if ((q) < groups)                                                                              \
      TILE_STORE(c, sums[(q)&1], 64);                                                              \
    START(c, a, b);                                                                                \
    scale_add(y, sums[((q)-1) & 1], rows, i8_weight_scales(w + (size_t)((q)-1) * GROUP_BYTES),     \
              &r->groups[(q)-1]);                                                                  \
  } while (0)

INLINE void half_tile(const gemm_call *g, const row_tile *r, int rows, int h) {
  _Alignas(64) int32_t sums[2][TILE_ROWS * 16];
  const int groups = g->groups, lines = r->lines;
  const size_t row_bytes = g->row_bytes;
  const int8_t *x = r->x;
  const uint8_t *w = i8_half(g, h);
  __m512 y[TILE_ROWS];
  UNROLL for (int i = 0; i < rows; i++) y[i] = _mm512_setzero_ps();
  LOAD(0, 4, 5);
  START(0, 4, 5);
  if (groups > 1)
    LOAD(1, 6, 7);
  START(1, 6, 7);
  if (groups > 2)
    LOAD(2, 4, 5);
  TILE_STORE(0, sums[0], 64);
  START(0, 4, 5);
  for (int q = 1; q <= groups; q += 2) {
    STEP(q, 1, 6, 7);
    if (q < groups)
      STEP(q + 1, 0, 4, 5);
  }
  UNROLL for (int i = 0; i < rows; i++) if (i >= r->skip) gemm_finish(g, r->i0 + i, h, y[i]);
}

static void any_half(const gemm_call *g, const row_tile *r, int h) {
#define CASE(R)                                                                                    \
  case R:                                                                                          \
    half_tile(g, r, R, h);                                                                         \
    break
  switch (r->rows) {
    CASE(1);
    CASE(2);
    CASE(3);
    CASE(4);
    CASE(5);
    CASE(6);
    CASE(7);
    CASE(8);
    CASE(9);
    CASE(10);
    CASE(11);
    CASE(12);
    CASE(13);
    CASE(14);
    CASE(15);
  default:
    half_tile(g, r, 16, h);
    break;
  }
#undef CASE
}

/* The row tile that begins at row i, or before it where too few rows are left. */
static void set_tile(row_tile *t, const gemm_call *g, int i, int rows) {
  t->rows = rows;
  t->i0 = i + rows > g->m ? g->m - rows : i;
  t->skip = i - t->i0;
  t->x = g->x + (size_t)t->i0 * g->row_bytes;
  gather_rows(t, g);
}

static void many_tiles(const gemm_call *g, int rows, int h0, int h1) {
  int block = BLOCK_BYTES / (g->groups * GROUP_BYTES) + 1;
  row_tile t; /* not zeroed: it is large */
  for (; h0 < h1; h0 += block)
    for (int i = 0; i < g->m; i += rows) {
      set_tile(&t, g, i, rows);
      t.lines = i == 0 ? GROUP_BYTES / 64 : 0;
      for (int h = h0; h < h1 && h < h0 + block; h++) {
        t.ahead = i8_half(g, h) + PREFETCH_AHEAD;
        any_half(g, &t, h);
      }
    }
}

static void few_tiles(const gemm_call *g, int tiles, int rows, int h0, int h1) {
  row_tile t[FEW_TILES]; /* not zeroed */
  int lines = g->groups * (GROUP_BYTES / 64), part = (lines + tiles - 1) / tiles;
  prefetch(i8_half(g, h0), lines);
  for (int i = 0; i < tiles; i++)
    set_tile(&t[i], g, i * rows, rows);
  for (int h = h0; h < h1; h++)
    for (int i = 0; i < tiles; i++) {
      t[i].lines = h + 1 < h1 ? (part + g->groups - 1) / g->groups : 0;
      t[i].ahead = i8_half(g, h + 1) + (size_t)i * part * 64;
      any_half(g, &t[i], h);
    }
}

/* All row tiles have the same number of rows, so that the tiles are set up once: the last may begin
 * before the end of the one before it. */
void mr_i8_amx_gemm(const gemm_call *g) {
  int tiles = (g->m + TILE_ROWS - 1) / TILE_ROWS, rows = (g->m + tiles - 1) / tiles;
  int h1 = 2 * g->p1 < (g->n + HALF - 1) / HALF ? 2 * g->p1 : (g->n + HALF - 1) / HALF;
  tile_configure(rows, 1u << 5 | 1u << 7);
  if (tiles <= FEW_TILES)
    few_tiles(g, tiles, rows, 2 * g->p0, h1);
  else
    many_tiles(g, rows, 2 * g->p0, h1);
  TILE_RELEASE();
}
