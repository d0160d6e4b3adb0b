/* blobs.h: the kernels as the GPUs take them, embedded by `make gpu`; without it there are none. */
#ifndef MR_KERNELS_GPU_BLOBS_H
#define MR_KERNELS_GPU_BLOBS_H

#include <stddef.h>

typedef struct mr_gpu_blob {
  const char *arch; /* "cuda": a fat binary for all; "gfx942": a code object for that one */
  const unsigned char *bytes;
  size_t n;
} mr_gpu_blob;

/* Those that are there, ended by one without arch. */
const mr_gpu_blob *mr_gpu_blobs(void);

#endif
