#include "jobs/preflight.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "io/hash.h"
#include "io/json.h"
#include "io/lines.h"
#include "io/mem.h"
#include "io/sys.h"
#include "jobs/repeats.h"
#include "jobs/rows.h"
#include "kernels/pool.h"

#define TICK_ROWS 256 /* rows between two calls of tick, and texts, whichever comes first */
#define BATCH_BYTES                                                                                \
  ((size_t)4 << 20) /* of lines that are read before they are parsed; or TICK_ROWS */

typedef struct piece { /* a line, and what it becomes */
  mr_line line;        /* s is not set: */
  size_t at;           /* in the batch's text */
  mr_plan_record rec;
  mr_code rc;
  mr_err err;
} piece;

typedef struct preflight {
  const mr_job *j;
  const mr_prompter *p;
  double now, began;
  int max_context;
  mr_plan_writer *w;
  mr_preflight_stats *stats;
  mr_preflight_tick tick;
  void *ctx;
  mr_err *err;
  mr_source *source;
  mr_hasher *hasher;
  mr_lines lines;
  mr_pool *pool; /* NULL: there has been no full batch yet, or one thread is all */
  piece *batch;  /* [TICK_ROWS], of which there are n_batch */
  int n_batch;
  mr_text text; /* the lines of the batch */
  mr_row_source src;
  mr_repeats *ids;
  uint64_t repeats;
  uint64_t first_repeat; /* --duplicates refuse: the first row that is one, */
  mr_err refused;        /* and what to say of it; code MR_OK: none */
} preflight;

static mr_code ask(preflight *f) {
  f->stats->text_bytes = f->lines.text_bytes;
  f->stats->input_bytes = mr_source_file_bytes(f->source);
  f->stats->seconds = mr_sys_seconds() - f->began;
  if (!f->tick || f->tick(f->ctx, f->stats))
    return MR_OK;
  return mr_err_set(f->err, MR_E_STOPPED, "stopped while the input was read");
}

/* Keeps the error of the first repetition in input order, for --duplicates refuse. */
static mr_code refuse_repeat(preflight *f, const mr_plan_record *rec, const char *id) {
  size_t len;
  const char *file = mr_plan_file_name(f->w, rec->e.file, &len);
  if (f->refused.code != MR_OK && rec->row >= f->first_repeat)
    return MR_OK;
  char *name = mr_mem_copy(file, len);
  if (!name)
    return mr_err_set(f->err, MR_E_NOMEM, "out of memory for a row");
  f->first_repeat = rec->row;
  mr_err_clear(&f->refused);
  mr_err_at(&f->refused, MR_E_DATA, name, (int64_t)rec->e.line, -1,
            "the id \"%.100s\" is that of an earlier row (--duplicates refuse)", id);
  mr_mem_free(name);
  return MR_OK;
}

/* The record of a repeated id becomes an error record, or ends the job. */
static mr_code repeat(void *ctx, const mr_plan_record *rec, const char *id, mr_err *err) {
  preflight *f = ctx;
  mr_code rc = ++f->repeats % TICK_ROWS == 0 ? ask(f) : MR_OK;
  if (rc != MR_OK || f->j->duplicates == MR_DUP_REFUSE)
    return rc != MR_OK ? rc : refuse_repeat(f, rec, id);
  if (rec->e.kind == MR_ROW_BAD) /* it has an error already */
    return MR_OK;
  const mr_row_source src = {.file_index = rec->e.file, .line = rec->e.line};
  mr_row_error why = {0};
  mr_row_error_set(&why, "custom_id", "duplicate_id", "the id \"%.100s\" is that of an earlier row",
                   id);
  mr_plan_record bad;
  rc = mr_row_bad(&src, id, &why, &bad, err);
  if (rc != MR_OK)
    return rc;
  bad.row = rec->row;
  rc = mr_plan_replace(f->w, &rec->e, &bad, err);
  mr_plan_record_free(&bad);
  f->stats->bad_rows++;
  return rc;
}

/* ------------------------------------------------------------------ lines, a batch at a time */

static mr_code make_record(const preflight *f, const mr_row_source *src, piece *p) {
  if (!p->line.too_long)
    return mr_row_parse(f->j, f->p, f->now, f->max_context, src, f->text.data + p->at, p->line.len,
                        &p->rec, &p->err);
  mr_row_error why = {0};
  mr_row_error_set(&why, NULL, "line_too_long",
                   "the line is %zu bytes long; the limit is %" PRIu64 " (--max-line), %" PRIu64
                   " fewer",
                   p->line.len, f->j->max_line, (uint64_t)p->line.len - f->j->max_line);
  return mr_row_bad(src, NULL, &why, &p->rec, &p->err);
}

static void parse(void *ctx, int item, int worker) {
  (void)worker;
  preflight *f = ctx;
  piece *p = &f->batch[item];
  mr_row_source src = f->src;
  src.line = p->line.number;
  p->rc = make_record(f, &src, p);
}

static mr_code take_record(preflight *f, const mr_plan_record *rec) {
  mr_code rc = MR_OK;
  if (rec->id_hash)
    rc = mr_repeats_add(f->ids, rec->id_hash, f->stats->rows, f->err);
  if (rc == MR_OK)
    rc = mr_plan_append(f->w, rec, f->err);
  f->stats->rows++;
  f->stats->bad_rows += rec->e.kind == MR_ROW_BAD;
  return rc;
}

/* A small job is read by one thread; without more of them, so is a large one. */
static void call_threads(preflight *f) {
  int threads = f->j->threads > 0 ? f->j->threads : mr_pool_cpus();
  if (!f->pool && threads > 1 && f->n_batch == TICK_ROWS)
    f->pool = mr_pool_new(threads, false);
}

/* The lines that were read are parsed, by all threads, and written in their order. */
static mr_code take_batch(preflight *f) {
  mr_code rc = MR_OK;
  call_threads(f);
  if (f->pool)
    mr_pool_run(f->pool, parse, f, f->n_batch);
  for (int i = 0; i < f->n_batch; i++) {
    piece *p = &f->batch[i];
    if (!f->pool && rc == MR_OK)
      parse(f, i, 0);
    if (rc == MR_OK && p->rc != MR_OK)
      *f->err = p->err;
    rc = rc != MR_OK ? rc : p->rc != MR_OK ? p->rc : take_record(f, &p->rec);
    mr_plan_record_free(&p->rec);
    *p = (piece){.err = MR_ERR_INIT};
  }
  f->n_batch = 0;
  mr_text_clear(&f->text);
  return rc == MR_OK ? ask(f) : rc;
}

static mr_code add_line(preflight *f, const mr_line *line) {
  f->batch[f->n_batch++] = (piece){.line = *line, .at = f->text.len, .err = MR_ERR_INIT};
  mr_text_add(&f->text, line->s, line->too_long ? 0 : line->len);
  if (f->text.failed)
    return mr_err_set(f->err, MR_E_NOMEM, "out of memory for the lines of the input");
  return f->n_batch == TICK_ROWS || f->text.len >= BATCH_BYTES ? take_batch(f) : MR_OK;
}

static mr_code take_text(preflight *f) {
  const char *name = mr_source_name(f->source);
  f->src = (mr_row_source){.file = name, .file_index = (uint32_t)f->stats->files};
  mr_code rc = mr_plan_add_file(f->w, name, f->err);
  f->stats->files++;
  mr_lines_start(&f->lines);
  while (rc == MR_OK) {
    mr_line line;
    rc = mr_lines_next(&f->lines, &line, f->err);
    if (rc == MR_OK && !line.s)
      return take_batch(f);
    if (rc == MR_OK)
      rc = add_line(f, &line);
  }
  return rc;
}

static mr_code take_all(preflight *f) {
  mr_lines_init(&f->lines, f->source, (size_t)f->j->max_line, f->hasher);
  for (;;) {
    bool more;
    mr_code rc = mr_source_next(f->source, &more, f->err);
    if (rc != MR_OK || !more)
      return rc;
    if ((rc = take_text(f)) != MR_OK)
      return rc;
  }
}

mr_code mr_preflight_run(const mr_job *j, const mr_prompter *p, double now, int max_context,
                         mr_plan_writer *w, mr_preflight_stats *stats, mr_preflight_tick tick,
                         void *ctx, mr_err *err) {
  preflight f = {.j = j,
                 .p = p,
                 .now = now,
                 .began = mr_sys_seconds(),
                 .max_context = max_context,
                 .w = w,
                 .stats = stats,
                 .tick = tick,
                 .ctx = ctx,
                 .refused = MR_ERR_INIT,
                 .err = err};
  *stats = (mr_preflight_stats){0};
  mr_code rc = mr_source_open(&f.source, (const char *const *)j->inputs, j->n_inputs, err);
  if (rc != MR_OK)
    return rc;
  f.hasher = mr_hasher_new();
  f.batch = mr_mem_alloc(TICK_ROWS, sizeof *f.batch);
  rc = f.hasher && f.batch ? mr_repeats_open(&f.ids, mr_plan_writer_dir(w), 0, err)
                           : mr_err_set(err, MR_E_NOMEM, "out of memory for the inputs");
  if (rc == MR_OK)
    rc = take_all(&f);
  if (rc == MR_OK)
    rc = mr_repeats_find(f.ids, w, repeat, &f, err);
  if (rc == MR_OK && f.refused.code != MR_OK) {
    *err = f.refused;
    rc = err->code;
  }
  if (rc == MR_OK) {
    mr_hasher_hex(f.hasher, stats->input_digest);
    mr_plan_set_digest(w, stats->input_digest);
    rc = ask(&f);
  }
  mr_pool_free(f.pool);
  mr_mem_free(f.batch);
  mr_text_free(&f.text);
  mr_hasher_free(f.hasher);
  mr_lines_free(&f.lines);
  mr_repeats_close(f.ids);
  mr_source_close(f.source);
  return rc;
}
