/* Open, close, and the plan of memory. */
#include "src/engine.h"

#include <limits.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "src/engine_int.h"
#include "src/machine.h"
#include "src/tune.h"

#define DEFAULT_BATCH 128 /* GEMMs are compute-bound well before */
#define DEFAULT_STEP_TOKENS 512
#define DEFAULT_TOKENS 1024 /* of a sequence, where the budget is chosen */
#define LOGIT_BYTES ((size_t)256 << 20)

static const char *const policy_names[] = {"auto", "fewer", "spill", "recompute"};

/* ---------------------------------------------------------------- the plan: sizes from options and
 * model */

static mr_code get_kernels(const mr_kernels **k, mr_err *err) {
  *k = mr_kernels_best();
  return *k ? MR_OK
            : mr_err_set(err, MR_E_UNAVAILABLE,
                         "MILLRACE_ISA names an instruction set that this CPU cannot run");
}

static mr_scheme scheme_of(const mr_engine_opts *o, const mr_kernels *k, const mr_model *m) {
  return mr_model_scheme(m, k, o->compute == MR_COMPUTE_EXACT);
}

static int kv_type_of(const mr_engine_opts *o, const mr_kernels *k, const mr_model *m) {
  if (o->kv_type >= 0)
    return o->kv_type;
  if (o->compute != MR_COMPUTE_EXACT && mr_device_is_gpu(o->device))
    return MR_KV_BF16;
  return mr_model_kv_type(m, k, scheme_of(o, k, m));
}

static uint64_t packed_bytes(const mr_gemm_ops *g, const mr_matrix *w) {
  if (w->dtype < 0)
    return 0;
  return ((uint64_t)w->n + (uint64_t)g->nr - 1) / (uint64_t)g->nr * g->panel_bytes(w->k);
}

static uint64_t model_packed_bytes(const mr_gemm_ops *g, const mr_model *m) {
  uint64_t sum = packed_bytes(g, &m->head);
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++)
      sum += packed_bytes(g, mr_layer_matrix(&m->layers[i], j));
  return sum;
}

/* The KV budget in pages: as asked, or enough for a full batch of middling sequences and for one of
 * full length, but no more than half of the memory that is left. */
static uint64_t pages_of(const mr_engine_info *info, int tokens) {
  return (uint64_t)(tokens + MR_KV_BLOCK - 1) / MR_KV_BLOCK * (uint64_t)info->kv_groups +
         (uint64_t)info->kv_own_pages;
}

static mr_code plan_pages(const mr_engine_opts *o, const mr_engine_info *info, int *pages,
                          mr_err *err) {
  uint64_t budget = o->kv_memory;
  size_t page = info->kv_page_bytes, block = page * (size_t)info->kv_groups;
  if (!budget) {
    int tokens = info->context < DEFAULT_TOKENS ? info->context : DEFAULT_TOKENS;
    uint64_t batch = (uint64_t)info->max_batch * pages_of(info, tokens);
    uint64_t one = pages_of(info, info->context);
    uint64_t available = mr_machine_memory().available;
    uint64_t half = available > info->packed_bytes ? (available - info->packed_bytes) / 2 : 0;
    budget = (batch > one ? batch : one) * page;
    budget = available && budget > half ? half : budget;
    budget = budget < block ? block : budget;
  }
  uint64_t n = budget / page;
  if (budget < block)
    return mr_err_set(err, MR_E_DATA,
                      "--kv-memory is %llu bytes, but %d tokens of this model need %zu",
                      (unsigned long long)budget, MR_KV_BLOCK, block);
  *pages = (int)(n < INT_MAX / MR_KV_BLOCK ? n : INT_MAX / MR_KV_BLOCK);
  return MR_OK;
}

int mr_engine_logit_rows(const mr_engine_info *info) {
  size_t rows = LOGIT_BYTES / ((size_t)info->n_vocab * sizeof(float));
  return rows < 1 ? 1 : rows < (size_t)info->max_step_tokens ? (int)rows : info->max_step_tokens;
}

/* What a window reaches back from the first token of a step, and the step. */
int mr_engine_window_blocks(const mr_engine_info *info) {
  int64_t tokens = (int64_t)info->kv_window - 1 + info->max_step_tokens;
  return info->kv_window ? (int)((tokens + MR_KV_BLOCK - 1) / MR_KV_BLOCK) + 1 : INT_MAX;
}

void mr_engine_set_step(const mr_engine_opts *o, mr_engine_info *info) {
  int measured = o->tuning ? o->tuning->step_tokens : 0;
  info->max_step_tokens = o->max_step_tokens > 0 ? o->max_step_tokens
                          : measured > 0         ? measured
                                                 : DEFAULT_STEP_TOKENS;
  info->step_measured = !o->max_step_tokens && measured > 0;
  if (!o->max_step_tokens && info->max_step_tokens < 2 * info->max_batch)
    info->max_step_tokens = 2 * info->max_batch; /* room for prefill beside a full batch */
}

static mr_code plan(const mr_engine_opts *o, const mr_kernels *k, const mr_model *m,
                    mr_engine_device *device, mr_engine_info *info, int *pages, mr_err *err) {
  const mr_config *c = &m->c;
  mr_scheme scheme = scheme_of(o, k, m);
  int type = kv_type_of(o, k, m);
  if (type >= MR_KV_TYPES || !mr_kv_part_bytes((mr_kv_type)type, c->head_dim))
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "keys and values of type %s are not supported by this build; use f16 or f32",
                      type < MR_KV_TYPES ? mr_kv_type_name((mr_kv_type)type) : "?");
  mr_kv_groups groups = mr_kv_groups_of(c, (mr_kv_type)type);
  *info = (mr_engine_info){
      .arch = c->arch.name,
      .isa = k->name,
      .scheme = mr_scheme_name(scheme),
      .products = scheme,
      .kv_type = mr_kv_type_name((mr_kv_type)type),
      .device = "cpu",
      .kv_policy = policy_names[o->kv_policy],
      .policy = o->kv_policy,
      .kv_disk = o->kv_disk,
      .context = o->context > 0 && o->context < c->context ? o->context : c->context,
      .n_vocab = c->n_vocab,
      .max_batch = o->max_batch > 0 ? o->max_batch : DEFAULT_BATCH,
      .threads = o->threads > 0 ? o->threads : mr_pool_cpus(),
      .n_params = m->n_params,
      .weight_bytes = mr_weights_bytes(m->weights),
      .packed_bytes = model_packed_bytes(&k->gemm[scheme], m) + (m->lora ? m->lora->bytes : 0),
      .kv_bytes_per_token = mr_kv_token_bytes(c, (mr_kv_type)type),
      .kv_page_bytes = mr_kv_page_bytes(c, (mr_kv_type)type),
      .kv_groups = groups.n,
      .kv_window_groups = groups.n - groups.n_full,
      .kv_window = groups.window,
      .kv_own_pages = mr_kv_own_pages(c, (mr_kv_type)type),
      .flops_per_prompt_token = mr_model_layer_flops(m),
      .flops_per_output_token = mr_model_layer_flops(m) + mr_model_head_flops(m),
  };
  mr_code rc = plan_pages(o, info, pages, err);
  if (rc)
    return rc;
  info->kv_memory = (uint64_t)*pages * info->kv_page_bytes;
  info->kv_tokens = (uint64_t)(*pages / groups.n) * MR_KV_BLOCK;
  int least = groups.n + info->kv_own_pages; /* a sequence holds a block at least */
  if (info->max_batch > *pages / least)
    info->max_batch = *pages / least;
  info->max_batch = info->max_batch > 0 ? info->max_batch : 1;
  mr_engine_set_step(o, info);
  return device->dev ? mr_engine_device_plan(device, o, m, info, pages, err) : MR_OK;
}

/* Checks the adapters against the model; packs them, or counts their bytes. */
static mr_code open_adapters(mr_lora **out, const mr_engine_opts *o, mr_model *m,
                             const mr_kernels *k, mr_lora_form form, mr_err *err) {
  if (o->n_adapters < 1)
    return MR_OK;
  mr_code rc = mr_lora_new(out, m, o->n_adapters, k, scheme_of(o, k, m), form, err);
  for (int i = 0; i < o->n_adapters && !rc; i++)
    rc = mr_lora_add(*out, i, o->adapters[i].name, o->adapters[i].dir, err);
  return rc;
}

mr_code mr_engine_estimate(const mr_engine_opts *opts, mr_engine_info *info, mr_err *err) {
  const mr_kernels *k;
  mr_model *m = NULL;
  mr_engine_device device;
  mr_lora *lora = NULL;
  int pages;
  mr_code rc = mr_engine_device_open(&device, opts, err);
  if (!rc)
    rc = get_kernels(&k, err);
  if (!rc)
    rc = mr_model_open(&m, opts->model_path, err);
  if (!rc)
    rc = open_adapters(&lora, opts, m, k, MR_LORA_COUNT, err);
  if (!rc)
    rc = plan(opts, k, m, &device, info, &pages, err);
  mr_lora_close(lora);
  mr_engine_device_close(&device);
  mr_model_close(m); /* the architecture's name is the table's */
  return rc;
}

/* ---------------------------------------------------------------- open and close */

static mr_code find_ends(mr_engine *e, mr_err *err) {
  int32_t n = e->vocab ? mr_vocab_size(e->vocab) : 0;
  for (int32_t id = 0; id < n; id++) {
    if (!mr_vocab_is_end(e->vocab, id))
      continue;
    if (!mr_mem_grow((void **)&e->ends, &e->cap_ends, e->n_ends + 1, sizeof *e->ends))
      return mr_err_set(err, MR_E_NOMEM, "out of memory for the vocabulary");
    e->ends[e->n_ends++] = id;
  }
  return MR_OK;
}

/* What a step needs beside the forward pass's own memory. */
static mr_code make_room(mr_engine *e, mr_err *err) {
  size_t tokens = (size_t)e->info.max_step_tokens, row = (size_t)e->info.n_vocab * sizeof(float);
  size_t bytes = 0;
  e->copy_bytes = (row + 63) & ~(size_t)63;
  e->scratch_bytes = (e->copy_bytes + mr_sampler_scratch(e->info.n_vocab) + 63) & ~(size_t)63;
  e->runs = mr_mem_alloc(tokens, sizeof *e->runs);
  e->owners = mr_mem_alloc(tokens, sizeof *e->owners);
  e->ones = mr_mem_alloc(tokens, 1);
  if (mr_mem_mul(e->scratch_bytes, (size_t)e->info.threads, &bytes))
    e->scratch = mr_mem_pages(bytes);
  bool asks = mr_forward_can_ask(e->forward);
  if (asks) {
    e->asks = mr_mem_alloc((size_t)e->max_logits, sizeof *e->asks);
    e->fetch = mr_mem_alloc((size_t)e->max_logits, sizeof *e->fetch);
  }
  if (!e->runs || !e->owners || !e->ones || !e->scratch || (asks && (!e->asks || !e->fetch)))
    return mr_err_set(err, MR_E_NOMEM, "out of memory for steps of %d tokens",
                      e->info.max_step_tokens);
  memset(e->ones, 1, tokens);
  return MR_OK;
}

static mr_code make_pool(mr_engine *e, const mr_engine_opts *o, mr_err *err) {
  e->pool = mr_pool_new(e->info.threads, o->pin);
  if (!e->pool)
    return mr_err_set(err, MR_E_UNAVAILABLE, "%d threads could not be had; use a smaller --threads",
                      e->info.threads);
  e->info.threads = mr_pool_threads(e->pool);
  return MR_OK;
}

static mr_code open_parts(mr_engine *e, const mr_engine_opts *o, mr_err *err) {
  int pages = 0;
  mr_code rc = mr_engine_device_open(&e->device, o, err);
  if (!rc)
    rc = get_kernels(&e->k, err);
  if (!rc)
    rc = mr_model_open(&e->model, o->model_path, err);
  if (!rc)
    rc = open_adapters(&e->lora, o, e->model, e->k, e->device.dev ? MR_LORA_ROWS : MR_LORA_PANELS,
                       err);
  if (!rc)
    rc = plan(o, e->k, e->model, &e->device, &e->info, &pages, err);
  if (!rc)
    rc = make_pool(e, o, err);
  if (!rc && !e->device.dev)
    rc = mr_model_pack(e->model, e->k, e->info.products, e->pool, err);
  if (!rc)
    rc = mr_kv_open_on(&e->kv, &e->model->c, (mr_kv_type)kv_type_of(o, e->k, e->model), pages,
                       mr_engine_device_pages(&e->device), err);
  if (!rc)
    rc = mr_kvtier_open(&e->tier, e->kv, o->kv_policy, o->kv_disk, o->spill_dir, err);
  /* With LongRoPE keys differ by the prompt's length, and cannot be shared. */
  if (!rc && !o->no_prefix_sharing && e->model->c.rope_scaling != MR_SCALING_LONGROPE)
    rc = mr_prefix_open(&e->prefix, e->kv, err);
  if (!rc && !e->device.dev && o->tuning && !o->tuning->step_tokens) {
    rc = mr_tune(o->tuning, e->model, e->k, e->pool, e->kv, err);
    mr_engine_set_step(o, &e->info);
  }
  if (rc)
    return rc;
  e->model->tuning = o->tuning;
  e->policy = o->kv_policy;
  e->saved = o->saved;
  e->groups = mr_kv_groups_in(e->kv);
  e->window_blocks = mr_engine_window_blocks(&e->info);
  if (!e->device.dev)
    e->info.packed_bytes = e->model->packed_bytes + (e->lora ? e->lora->bytes : 0);
  rc = mr_engine_open_store(e, o, err);
  if (rc)
    return rc;
  e->max_logits = mr_engine_logit_rows(&e->info);
  rc = e->device.dev
           ? mr_forward_open_gpu(&e->forward, e->model, e->device.dev, e->kv, e->device.scheme,
                                 e->device.streamed, e->info.max_step_tokens, e->max_logits, err)
           : mr_forward_open(&e->forward, e->model, e->k, e->pool, e->kv, e->info.max_step_tokens,
                             e->max_logits, err);
  mr_lora_drop_rows(e->lora); /* a device has its own */
  e->info.gemm = mr_engine_device_gemm(&e->device);
  if (!rc)
    rc = find_ends(e, err);
  return rc ? rc : make_room(e, err);
}

mr_code mr_engine_open(mr_engine **out, const mr_engine_opts *opts, const mr_prompter *p,
                       mr_err *err) {
  double start = mr_sys_seconds();
  mr_engine *e = mr_mem_alloc(1, sizeof *e);
  if (!e)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the engine");
  e->vocab = p ? mr_prompter_vocab(p) : NULL;
  e->flights_end = &e->flights;
  e->finished_end = &e->finished;
  mr_code rc = open_parts(e, opts, err);
  if (rc) {
    mr_engine_close(e);
    return rc;
  }
  e->info.load_s = mr_sys_seconds() - start;
  *out = e;
  return MR_OK;
}

static void free_list(mr_engine *e, mr_flight *f) {
  while (f) {
    mr_flight *next = f->next;
    mr_flight_free(e, f);
    f = next;
  }
}

void mr_engine_close(mr_engine *e) {
  if (!e)
    return;
  free_list(e, e->flights);
  free_list(e, e->finished);
  mr_forward_close(e->forward);
  mr_prefix_close(e->prefix);
  mr_prefixstore_close(e->store);
  mr_mem_free(e->stored_block);
  mr_kvtier_close(e->tier);
  mr_kv_close(e->kv);
  mr_engine_device_close(&e->device);
  mr_pool_free(e->pool);
  mr_lora_close(e->lora);
  mr_model_close(e->model);
  mr_mem_free(e->ends);
  mr_mem_free(e->runs);
  mr_mem_free(e->owners);
  mr_mem_free(e->ones);
  mr_mem_free(e->jobs);
  mr_mem_free(e->scratch);
  mr_mem_free(e->asks);
  mr_mem_free(e->fetch);
  mr_mem_free(e);
}

/* ---------------------------------------------------------------- what it is, what it did */

void mr_engine_touch(mr_engine *e) {
  mr_kv_touch(e->kv);
}

const mr_engine_info *mr_engine_describe(const mr_engine *e) {
  return &e->info;
}

void mr_engine_stats_get(const mr_engine *e, mr_engine_stats *out) {
  *out = e->stats;
  out->active = e->n_active;
  out->waiting = 0;
  for (const mr_flight *f = e->flights; f; f = f->next)
    out->waiting += f->fed == 0;
  out->kv_pages_total = (uint64_t)mr_kv_most_pages(e->kv);
  mr_kvtier_stats kv;
  mr_kvtier_stats_get(e->tier, &kv);
  out->kv_spill_bytes = kv.spill_bytes;
  out->kv_fetch_bytes = kv.fetch_bytes;
  out->kv_failures = kv.failures;
  out->kv_stall_s = kv.stall_s;
  mr_prefixstore_stats store = {0};
  if (e->store)
    mr_prefixstore_stats_get(e->store, &store);
  out->cache_read_bytes = store.read_bytes;
  out->cache_written_bytes = store.written_bytes;
  out->cache_bad = store.bad;
  out->kv_pages_used = (uint64_t)mr_engine_used_pages(e);
}
