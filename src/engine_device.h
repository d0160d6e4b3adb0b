/* engine_device.h: what an engine on a GPU needs beside the CPU's: the device, how weights are held
 * on it, the plan of its memory, and where pages of keys and values lie.
 *
 *     mr_engine_device d;
 *     mr_engine_device_open(&d, opts, &err);             nothing for the CPU: d.dev is NULL
 *     mr_engine_device_plan(&d, opts, model, &info, &pages, &err);
 *     mr_kv_open_on(&kv, ..., mr_engine_device_pages(&d), &err);
 *     mr_engine_device_close(&d);                        after the cache and the forward pass
 */
#ifndef MR_SRC_ENGINE_DEVICE_H
#define MR_SRC_ENGINE_DEVICE_H

#include "src/engine.h"
#include "src/forward.h"

typedef struct mr_engine_device {
  mr_device *dev; /* NULL: the CPU; owned */
  mr_gpu_scheme scheme;
  int streamed;        /* layers whose weights come over in each step */
  mr_stream *stream;   /* for pages, waited for; owned, as all that follow */
  mr_stream *out, *in; /* for pages beside a step */
  int n_stage;         /* pages that can be on their way out */
  size_t page_bytes;
  uint8_t *stage, *stage_host; /* [n_stage] pages: the device's (not owned), the host's */
  mr_kv_memory pages;
} mr_engine_device;

mr_code mr_engine_device_open(mr_engine_device *d, const mr_engine_opts *o, mr_err *err);
void mr_engine_device_close(mr_engine_device *d);

/* Changes a plan for the CPU (all sizes filled in) to one for the device: weights, then a step,
 * then pages, in what was taken of its memory. */
mr_code mr_engine_device_plan(mr_engine_device *d, const mr_engine_opts *o, const mr_model *m,
                              mr_engine_info *info, int *pages, mr_err *err);
const mr_kv_memory *mr_engine_device_pages(const mr_engine_device *d); /* NULL: the host's */

/* Which shapes the maker's library multiplies, once the forward pass is open; NULL: there is none.
 * It outlives the engine. */
const char *mr_engine_device_gemm(const mr_engine_device *d);

/* Rows of logits of a step. */
int mr_engine_logit_rows(const mr_engine_info *info);

#endif
