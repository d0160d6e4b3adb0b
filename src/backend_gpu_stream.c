/* Weights of layers that do not fit into the device's memory: they lie in the host's, as the device
 * holds them, and go over while the layer before is computed, into one of two places by turns
 * (FlexGen, Sheng et al. 2023). A step reads each such layer once, whatever its tokens: large steps
 * pay for it. */
#include "src/backend_gpu.h"

#include "io/mem.h"

mr_code mr_gpu_stream_open(mr_gpu *g, const size_t *bytes) {
  mr_gpu_streaming *s = &g->streaming;
  const mr_device_ops *o = g->dev->ops;
  s->now = s->in[0] = s->in[1] = -1;
  if (!s->n)
    return MR_OK;
  s->host = mr_mem_alloc((size_t)s->n, sizeof *s->host);
  s->bytes = mr_mem_alloc((size_t)s->n, sizeof *s->bytes);
  mr_code rc = s->host && s->bytes ? o->stream_new(g->dev, &s->copy) : MR_E_NOMEM;
  size_t most = 0;
  for (int i = 0; i < s->n && !rc; i++) {
    s->bytes[i] = bytes[i];
    most = bytes[i] > most ? bytes[i] : most;
    rc = o->host_alloc(g->dev, bytes[i], (void **)&s->host[i]);
  }
  for (int i = 0; i < 2 && !rc; i++) {
    s->place[i] = mr_device_take(g->dev, most);
    rc = s->place[i] ? o->event_new(g->dev, &s->came[i]) : MR_E_UNAVAILABLE;
    if (!rc)
      rc = o->event_new(g->dev, &s->free[i]);
  }
  return rc;
}

void mr_gpu_stream_close(mr_gpu *g) {
  mr_gpu_streaming *s = &g->streaming;
  const mr_device_ops *o = g->dev->ops;
  if (s->copy)
    o->sync(g->dev, s->copy);
  for (int i = 0; s->host && i < s->n; i++)
    if (s->host[i])
      o->host_release(g->dev, s->host[i]);
  for (int i = 0; i < 2; i++) {
    o->event_free(g->dev, s->came[i]);
    o->event_free(g->dev, s->free[i]);
  }
  o->stream_free(g->dev, s->copy);
  mr_mem_free(s->host);
  mr_mem_free(s->bytes);
}

/* ------------------------------------------------------------------ in a step */

/* Layer i goes into its place, once that is free. */
static mr_code bring(mr_gpu *g, int i) {
  mr_gpu_streaming *s = &g->streaming;
  const mr_device_ops *o = g->dev->ops;
  int at = i % 2;
  if (s->in[at] == i)
    return MR_OK;
  mr_code rc = o->wait(g->dev, s->copy, s->free[at]);
  if (!rc)
    rc = o->copy(g->dev, s->copy, MR_TO_DEVICE, s->place[at], s->host[i], s->bytes[i]);
  s->in[at] = i;
  return rc ? rc : o->record(g->dev, s->came[at], s->copy);
}

/* The step comes to layer i: the one before has been asked of all that it does, the next one may
 * come. After the last one that is the first, for the next step. */
static mr_code enter(mr_gpu *g, int i) {
  mr_gpu_streaming *s = &g->streaming;
  const mr_device_ops *o = g->dev->ops;
  int next = (i + 1) % s->n;
  mr_code rc = s->now >= 0 ? o->record(g->dev, s->free[s->now % 2], g->stream) : MR_OK;
  s->now = i;
  if (!rc)
    rc = bring(g, i);
  if (!rc && next % 2 != i % 2)
    rc = bring(g, next);
  return rc ? rc : o->wait(g->dev, g->stream, s->came[i % 2]);
}

const mr_gpu_matrix *mr_gpu_use(mr_gpu *g, const mr_matrix *w) {
  const mr_gpu_matrix *m = mr_gpu_find(g, w);
  if (m->streamed >= 0 && m->streamed != g->streaming.now && !g->rc)
    g->rc = enter(g, m->streamed);
  return m;
}
