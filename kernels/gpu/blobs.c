#include "kernels/gpu/blobs.h"

#define EMBED(name, file)                                                                          \
  __asm__(".section .rodata\n.balign 4096\n"                                                       \
          ".globl mr_blob_" #name "\nmr_blob_" #name ":\n.incbin \"" file "\"\n"                   \
          ".globl mr_blob_" #name "_end\nmr_blob_" #name "_end:\n.byte 0\n.previous\n");           \
  extern const unsigned char mr_blob_##name[], mr_blob_##name##_end[];

#define ENTRY(i, name)                                                                             \
  all[i] = (mr_gpu_blob){#name, mr_blob_##name, (size_t)(mr_blob_##name##_end - mr_blob_##name)};  \
  i++

/* The Makefile defines those whose files there are. */
#if defined(MR_BLOB_CUDA)
EMBED(cuda, MR_BLOB_CUDA)
#endif
#if defined(MR_BLOB_GFX90A)
EMBED(gfx90a, MR_BLOB_GFX90A)
#endif
#if defined(MR_BLOB_GFX942)
EMBED(gfx942, MR_BLOB_GFX942)
#endif
#if defined(MR_BLOB_GFX1100)
EMBED(gfx1100, MR_BLOB_GFX1100)
#endif

const mr_gpu_blob *mr_gpu_blobs(void) {
  static mr_gpu_blob all[8];
  int n = 0;
#if defined(MR_BLOB_CUDA)
  ENTRY(n, cuda);
#endif
#if defined(MR_BLOB_GFX90A)
  ENTRY(n, gfx90a);
#endif
#if defined(MR_BLOB_GFX942)
  ENTRY(n, gfx942);
#endif
#if defined(MR_BLOB_GFX1100)
  ENTRY(n, gfx1100);
#endif
  all[n] = (mr_gpu_blob){0};
  return all;
}
