/* avx512_amx.h: matrix tiles (AMX) by name, for the files that use them.
 *
 * Instructions are written without intrinsics: these files must not need a CPU that has them. Tile
 * shapes: Intel SDM volume 1, chapter 18, palette 1.
 */
#ifndef MR_KERNELS_AVX512_AVX512_AMX_H
#define MR_KERNELS_AVX512_AVX512_AMX_H

#include <stddef.h>
#include <stdint.h>

#define AMX_ROWS 16

#define TILE_ZERO(c) __asm__ volatile("tilezero %%tmm" #c ::)
#define TILE_LOAD(t, p, stride)                                                                    \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((size_t)(stride)) : "memory")
#define TILE_STORE(t, p, stride)                                                                   \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((size_t)(stride)) : "memory")
/* c += a b: int8 times uint8, bfloat16 times bfloat16 */
#define TILE_DOT_I8(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_DOT_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::)

typedef struct tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_config;

/* All tiles 64 bytes wide; those of `full` (a bit for each) have 16 rows, the others `rows`. */
static inline void tile_configure(int rows, unsigned full) {
  tile_config t = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    t.row_bytes[i] = 64;
    t.rows[i] = (uint8_t)(full >> i & 1 ? AMX_ROWS : rows);
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(t));
}

/* 1 if CPU and operating system let this process use tiles of int8 and of bfloat16; it asks, so
 * call it once. */
int mr_amx_usable(void);

#endif
