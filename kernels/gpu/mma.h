/* mma.h: a part of gpu.h: one warp's product of 16x16x16 bfloat16 with float32 sums.
 *
 *     mr_frag_c c;  mr_zero(c);
 *     mr_load_a(a, p, ld);      A [16 rows, 16 k], ld elements between rows
 *     mr_load_b(b, p, ld);      B given as [16 columns, 16 k], like weights
 *     mr_load_bt(b, p, ld);     B given as [16 k, 16 columns]
 *     mr_mma(c, a, b);
 *     c.r[i], i < MR_C: the element at row mr_row(i), column mr_col(i) of the product
 *
 * Which element lies in which lane's register is the instruction's law; the emulator takes the
 * registers apart by that law, so what is tested is the loads and stores of the real path.
 */
#ifndef MR_KERNELS_GPU_MMA_H
#define MR_KERNELS_GPU_MMA_H

MR_FN uint32_t mr_pair(mr_gpu_bf16 low, mr_gpu_bf16 high) {
  return (uint32_t)low | (uint32_t)high << 16;
}

#if MR_MMA == MR_MMA_SYNC
/* Two instructions of 8 columns. Lane 4g+t holds in A rows g, g+8 and k 2t, 2t+1, +8; in B column g
 * and the same k; in C rows g, g+8 and columns 2t, 2t+1. */
#define MR_C 8
struct mr_frag_a {
  uint32_t r[4];
};
struct mr_frag_b {
  uint32_t r[4];
};
struct mr_frag_c {
  float r[MR_C];
};

MR_FN int mr_row(int i) {
  return MR_LANE / 4 + (i / 2 % 2) * 8;
}
MR_FN int mr_col(int i) {
  return MR_LANE % 4 * 2 + i % 2 + i / 4 * 8;
}
MR_FN void mr_load_a(mr_frag_a &a, const mr_gpu_bf16 *p, int ld) {
  int g = MR_LANE / 4, t = MR_LANE % 4;
  MR_UNROLL
  for (int i = 0; i < 4; i++)
    a.r[i] = *(const uint32_t *)(p + (g + i % 2 * 8) * ld + t * 2 + i / 2 * 8);
}
MR_FN void mr_load_b(mr_frag_b &b, const mr_gpu_bf16 *p, int ld) {
  int g = MR_LANE / 4, t = MR_LANE % 4;
  MR_UNROLL
  for (int i = 0; i < 4; i++)
    b.r[i] = *(const uint32_t *)(p + (g + i / 2 * 8) * ld + t * 2 + i % 2 * 8);
}
MR_FN void mr_load_bt(mr_frag_b &b, const mr_gpu_bf16 *p, int ld) {
  int g = MR_LANE / 4, t = MR_LANE % 4;
  MR_UNROLL
  for (int i = 0; i < 4; i++) {
    const mr_gpu_bf16 *at = p + (t * 2 + i % 2 * 8) * ld + g + i / 2 * 8;
    b.r[i] = mr_pair(at[0], at[ld]);
  }
}
#if defined(MR_EMU)
typedef struct mr_emu_product {
  float *c;
  const uint32_t *a, *b;
} mr_emu_product;
typedef float mr_emu_v8 __attribute__((vector_size(32)));
/* One m16n8k16: b 0 or 2: the first or the second. */
static inline void mr_emu_m16n8k16(void **slots, const float (*a)[16], int b) {
  float col[16][8], c[16][8];
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++) {
      uint32_t two = ((mr_emu_product *)slots[l])->b[b + i / 2];
      col[l % 4 * 2 + i % 2 + i / 2 * 8][l / 4] = mr_wide((mr_gpu_bf16)(two >> (16 * (i % 2))));
    }
  for (int m = 0; m < 16; m++) {
    mr_emu_v8 sum = {0};
    for (int k = 0; k < 16; k++) {
      mr_emu_v8 v;
      memcpy(&v, col[k], sizeof v);
      sum += a[m][k] * v;
    }
    memcpy(c[m], &sum, sizeof sum);
  }
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++)
      ((mr_emu_product *)slots[l])->c[2 * b + i] += c[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
}
static void mr_emu_mma(void **slots) {
  float a[16][16];
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 8; i++) {
      uint32_t two = ((mr_emu_product *)slots[l])->a[i / 2];
      a[l / 4 + i / 2 % 2 * 8][l % 4 * 2 + i % 2 + i / 4 * 8] =
          mr_wide((mr_gpu_bf16)(two >> (16 * (i % 2))));
    }
  mr_emu_m16n8k16(slots, a, 0);
  mr_emu_m16n8k16(slots, a, 2);
}
MR_FN void mr_mma(mr_frag_c &c, const mr_frag_a &a, const mr_frag_b &b) {
  mr_emu_product p = {c.r, a.r, b.r};
  mr_emu_warp(mr_emu_mma, &p, __LINE__);
}
#else
MR_FN void mr_mma8(float *c, const uint32_t *a, const uint32_t *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
MR_FN void mr_mma(mr_frag_c &c, const mr_frag_a &a, const mr_frag_b &b) {
  mr_mma8(c.r, a.r, b.r);
  mr_mma8(c.r + 4, a.r, b.r + 2);
}
#endif

#elif MR_MMA == MR_MMA_MFMA
/* Lane l holds in A row l%16 and k l/16*4 .. +3; in B column l%16 and the same k; in C column l%16
 * and rows l/16*4 .. +3. */
#define MR_C 4
struct mr_frag_a {
  short r[4];
};
struct mr_frag_b {
  short r[4];
};
struct mr_frag_c {
  float r[MR_C];
};

MR_FN int mr_row(int i) {
  return MR_LANE / 16 * 4 + i;
}
MR_FN int mr_col(int i) {
  (void)i;
  return MR_LANE % 16;
}
MR_FN void mr_load_a(mr_frag_a &a, const mr_gpu_bf16 *p, int ld) {
  MR_UNROLL
  for (int i = 0; i < 4; i++)
    a.r[i] = (short)p[MR_LANE % 16 * ld + MR_LANE / 16 * 4 + i];
}
MR_FN void mr_load_b(mr_frag_b &b, const mr_gpu_bf16 *p, int ld) {
  MR_UNROLL
  for (int i = 0; i < 4; i++)
    b.r[i] = (short)p[MR_LANE % 16 * ld + MR_LANE / 16 * 4 + i];
}
MR_FN void mr_load_bt(mr_frag_b &b, const mr_gpu_bf16 *p, int ld) {
  MR_UNROLL
  for (int i = 0; i < 4; i++)
    b.r[i] = (short)p[(MR_LANE / 16 * 4 + i) * ld + MR_LANE % 16];
}
#if defined(MR_EMU)
typedef struct mr_emu_product {
  float *c;
  const short *a, *b;
} mr_emu_product;
static void mr_emu_mma(void **slots) {
  float a[16][16], b[16][16];
  for (int l = 0; l < 64; l++)
    for (int i = 0; i < 4; i++) {
      const mr_emu_product *p = (const mr_emu_product *)slots[l];
      a[l % 16][l / 16 * 4 + i] = mr_wide((mr_gpu_bf16)p->a[i]);
      b[l / 16 * 4 + i][l % 16] = mr_wide((mr_gpu_bf16)p->b[i]);
    }
  for (int m = 0; m < 16; m++) {
    float sum[16] = {0};
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 16; n++)
        sum[n] += a[m][k] * b[k][n];
    for (int n = 0; n < 16; n++)
      ((mr_emu_product *)slots[m / 4 * 16 + n])->c[m % 4] += sum[n];
  }
}
MR_FN void mr_mma(mr_frag_c &c, const mr_frag_a &a, const mr_frag_b &b) {
  mr_emu_product p = {c.r, a.r, b.r};
  mr_emu_warp(mr_emu_mma, &p, __LINE__);
}
#else
typedef short mr_s4 __attribute__((ext_vector_type(4)));
typedef float mr_f4 __attribute__((ext_vector_type(4)));
MR_FN void mr_mma(mr_frag_c &c, const mr_frag_a &a, const mr_frag_b &b) {
  mr_s4 x = {a.r[0], a.r[1], a.r[2], a.r[3]}, y = {b.r[0], b.r[1], b.r[2], b.r[3]};
  mr_f4 z = {c.r[0], c.r[1], c.r[2], c.r[3]};
  z = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, z, 0, 0, 0);
  MR_UNROLL
  for (int i = 0; i < 4; i++)
    c.r[i] = z[i];
}
#endif

#else
/* Lanes l and l+16 hold the same: in A row l%16, in B column l%16, all 16 k; in C lane l holds
 * column l%16 and rows l/16, l/16+2, .. l/16+14. */
#define MR_C 8
struct mr_frag_a {
  short r[16];
};
struct mr_frag_b {
  short r[16];
};
struct mr_frag_c {
  float r[MR_C];
};

MR_FN int mr_row(int i) {
  return 2 * i + MR_LANE / 16;
}
MR_FN int mr_col(int i) {
  (void)i;
  return MR_LANE % 16;
}
MR_FN void mr_load_a(mr_frag_a &a, const mr_gpu_bf16 *p, int ld) {
  MR_UNROLL
  for (int i = 0; i < 16; i++)
    a.r[i] = (short)p[MR_LANE % 16 * ld + i];
}
MR_FN void mr_load_b(mr_frag_b &b, const mr_gpu_bf16 *p, int ld) {
  MR_UNROLL
  for (int i = 0; i < 16; i++)
    b.r[i] = (short)p[MR_LANE % 16 * ld + i];
}
MR_FN void mr_load_bt(mr_frag_b &b, const mr_gpu_bf16 *p, int ld) {
  MR_UNROLL
  for (int i = 0; i < 16; i++)
    b.r[i] = (short)p[i * ld + MR_LANE % 16];
}
#if defined(MR_EMU)
typedef struct mr_emu_product {
  float *c;
  const short *a, *b;
} mr_emu_product;
static void mr_emu_mma(void **slots) {
  for (int l = 0; l < 32; l++) {
    mr_emu_product *p = (mr_emu_product *)slots[l];
    for (int i = 0; i < MR_C; i++) {
      int m = 2 * i + l / 16;
      const short *a = ((mr_emu_product *)slots[m])->a,
                  *twin = ((mr_emu_product *)slots[m + 16])->a;
      float sum = 0;
      for (int k = 0; k < 16; k++) /* lanes that disagree give nonsense on the hardware */
        sum += a[k] == twin[k] ? mr_wide((mr_gpu_bf16)a[k]) * mr_wide((mr_gpu_bf16)p->b[k])
                               : mr_float(0x7fc00000u);
      p->c[i] += sum;
    }
  }
}
MR_FN void mr_mma(mr_frag_c &c, const mr_frag_a &a, const mr_frag_b &b) {
  mr_emu_product p = {c.r, a.r, b.r};
  mr_emu_warp(mr_emu_mma, &p, __LINE__);
}
#else
typedef short mr_s16 __attribute__((ext_vector_type(16)));
typedef float mr_f8 __attribute__((ext_vector_type(8)));
MR_FN void mr_mma(mr_frag_c &c, const mr_frag_a &a, const mr_frag_b &b) {
  mr_s16 x, y;
  mr_f8 z;
  MR_UNROLL
  for (int i = 0; i < 16; i++) {
    x[i] = a.r[i];
    y[i] = b.r[i];
  }
  MR_UNROLL
  for (int i = 0; i < 8; i++)
    z[i] = c.r[i];
  z = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(x, y, z);
  MR_UNROLL
  for (int i = 0; i < 8; i++)
    c.r[i] = z[i];
}
#endif
#endif

MR_FN void mr_zero(mr_frag_c &c) {
  MR_UNROLL
  for (int i = 0; i < MR_C; i++)
    c.r[i] = 0;
}

#endif
