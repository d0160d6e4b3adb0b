#include <string.h>

#include "io/mem.h"
#include "io/spill.h"
#include "io/sys.h"
#include "jobs/pace.h"
#include "jobs/run.h"
#include "jobs/schedule.h"
#include "jobs/signals.h"
#include "jobs/tuned.h"
#include "src/machine.h"

#define FIRST_ROWS 8
#define SAVE_S 4.0    /* for keys and values of rows in flight, of the 10 s that a stop may take */
#define KEEP_S 2.0    /* for the prefix cache, at a stop */
#define END_S 0.3     /* for the last commit and the end of the process */
#define MEMORY_S 1.0  /* between two looks at the machine's memory */
#define MEMORY_LOW 32 /* a part of it that is left, and from twice that on it is no more */
#define HOPELESS 3.0  /* times what is left: even half of the rows do not end */
#define MARGIN 1.1    /* on what rows are expected to take */
#define BEGIN_S 1.0   /* before a stop no row is begun any more that has to be saved */
#define KEEP_ALL_S 600.0
#define AHEAD 32
#define DEFERRED_MAX 16384

/* A row that would not end before the deadline: others are looked for that do. */
typedef struct deferred {
  uint64_t row, expected;
  int chosen;
  mr_plan_entry left;
} deferred;

/* A row that comes soon: the engine is told what its prompt shares. */
typedef struct coming {
  uint64_t row, expected;
} coming;

/* A row in the engine. Its record is needed again when its result comes. */
typedef struct slot {
  mr_plan_record rec;
  uint64_t expected; /* by the engine; 0: it was not told */
  double work;
  bool used;
  int chosen; /* tokens of it, by a run before */
} slot;

typedef struct loop {
  mr_run *r;
  mr_engine *engine;
  mr_schedule *schedule;
  mr_render render;
  slot *slots;
  size_t n_slots;
  size_t *free_slots, n_free;
  bool pending; /* slot `next` holds a row that the engine had no room for */
  size_t next;
  mr_text line;
  int begun;           /* rows of r->saved that have come */
  coming ahead[AHEAD]; /* the next rows of the schedule, a ring of n_ahead from first_ahead on */
  int first_ahead, n_ahead;
  deferred *deferred; /* [n_deferred] in the order of the schedule */
  size_t n_deferred;
  bool closed; /* the next row would not finish before the deadline */
  mr_pace pace;
  double step_s;       /* the last one took */
  double looked_s;     /* when the machine's memory was looked at */
  mr_engine_left left; /* now */
  uint64_t flying;     /* rows in the engine */
  bool hopeless;       /* no row in flight comes to its end before the deadline */
} loop;

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* Tokens of a row, an output token counted as much as a prompt token: only shares of a whole
 * matter. */
static double work_of(const mr_plan_entry *e) {
  return (double)e->n_prompt + (double)e->n_out;
}

bool mr_run_is_open(const mr_run *r, uint64_t row) {
  return mr_shard_has(r->shard, row) &&
         !mr_commit_is_done(r->commit, mr_shard_local(r->shard, row));
}

static mr_code count_work(mr_run *r, mr_err *err) {
  mr_plan_scan s;
  mr_plan_scan_start(&s, r->plan, err);
  while (mr_plan_scan_next(&s))
    if (s.e->kind != MR_ROW_BAD && mr_run_is_open(r, s.row))
      r->now.work += work_of(s.e);
  return s.rc;
}

/* Rows that the run before had begun come before the others. */
static bool skip_row(void *ctx, uint64_t row) {
  return !mr_run_is_open(ctx, row) || mr_saved_has(((mr_run *)ctx)->saved, row);
}

/* ---- lines into the commit */

static mr_code commit_line(loop *l, const mr_line_info *info, mr_err *err) {
  double t = mr_sys_seconds();
  mr_code rc = l->line.failed ? nomem(err)
                              : mr_commit_add(l->r->commit, info, l->line.data, l->line.len, err);
  l->r->report.commit_s += mr_sys_seconds() - t;
  l->r->now.rows_done++;
  l->r->now.rows_failed += info->kind == MR_LINE_ERROR;
  l->r->report.rows_this_run++;
  return rc;
}

static mr_code commit_bad(loop *l, const mr_plan_record *rec, mr_err *err) {
  mr_line_info info = {.row = mr_shard_local(l->r->shard, rec->row), .kind = MR_LINE_ERROR};
  mr_text_clear(&l->line);
  mr_code rc = mr_render_bad(&l->render, rec, &l->line, err);
  return rc ? rc : commit_line(l, &info, err);
}

static mr_code commit_failed(loop *l, const mr_plan_record *rec, const mr_row_error *why,
                             mr_err *err) {
  mr_line_info info = {.row = mr_shard_local(l->r->shard, rec->row), .kind = MR_LINE_ERROR};
  mr_text_clear(&l->line);
  mr_code rc = mr_render_failed(&l->render, rec, why, &l->line, err);
  return rc ? rc : commit_line(l, &info, err);
}

static mr_code commit_result(loop *l, const slot *s, const mr_result *res, mr_err *err) {
  bool is_error = false;
  mr_text_clear(&l->line);
  mr_code rc = mr_render_result(&l->render, &s->rec, res, &l->line, &is_error, err);
  if (rc)
    return rc;
  mr_line_info info = {.row = mr_shard_local(l->r->shard, s->rec.row),
                       .kind = is_error ? MR_LINE_ERROR : MR_LINE_RESULT};
  if (!is_error) {
    bool score = s->rec.e.kind == MR_ROW_SCORE;
    info.prompt_tokens = (uint64_t)s->rec.e.n_prompt; /* as in the line's usage */
    for (int i = 0; i < res->n_choices; i++)
      info.output_tokens += (uint64_t)(score ? res->choices[i].n_ids : res->choices[i].n_sampled);
  }
  mr_report_row(&l->r->report, res);
  return commit_line(l, &info, err);
}

/* ---- slots */

static mr_code take_slot(loop *l, size_t *at, mr_err *err) {
  if (l->n_free == 0) {
    size_t cap = l->n_slots, n = l->n_slots ? l->n_slots * 2 : 64, cap_free = l->n_slots;
    if (!mr_mem_grow((void **)&l->slots, &cap, n, sizeof *l->slots) ||
        !mr_mem_grow((void **)&l->free_slots, &cap_free, n, sizeof *l->free_slots))
      return nomem(err);
    for (size_t i = n; i-- > l->n_slots;) {
      memset(&l->slots[i], 0, sizeof l->slots[i]);
      l->free_slots[l->n_free++] = i;
    }
    l->n_slots = n;
  }
  *at = l->free_slots[--l->n_free];
  l->slots[*at].used = true;
  return MR_OK;
}

static void give_slot(loop *l, size_t at) {
  mr_plan_record_free(&l->slots[at].rec);
  memset(&l->slots[at], 0, sizeof l->slots[at]);
  l->free_slots[l->n_free++] = at;
}

/* ---- admission */

static bool next_begun(loop *l, uint64_t *row, int *chosen) {
  const mr_run *r = l->r;
  while (l->begun < mr_saved_rows(r->saved)) {
    const mr_saved_row *s = mr_saved_at(r->saved, l->begun++);
    *row = s->row;
    *chosen = mr_saved_picks(s);
    if (*row < mr_plan_rows(r->plan) && mr_run_is_open(r, *row))
      return true;
  }
  return false;
}

static mr_code load_row(loop *l, uint64_t row, mr_err *err) {
  mr_code rc = take_slot(l, &l->next, err);
  if (rc)
    return rc;
  slot *s = &l->slots[l->next];
  rc = mr_plan_read(l->r->plan, row, &s->rec, err);
  if (rc) {
    memset(&s->rec, 0, sizeof s->rec);
    give_slot(l, l->next);
    return rc;
  }
  s->work = work_of(&s->rec.e);
  l->pending = true;
  return MR_OK;
}

static mr_code expect_row(loop *l, coming *c, mr_err *err) {
  mr_plan_record rec;
  mr_code rc = mr_plan_read(l->r->plan, c->row, &rec, err);
  if (rc)
    return rc;
  if (rec.e.kind != MR_ROW_BAD && rec.e.n_prompt > 0)
    c->expected = mr_engine_expect(l->engine, (int)rec.e.adapter, rec.prompt, rec.e.n_prompt);
  mr_plan_record_free(&rec);
  return MR_OK;
}

/* The next row of the schedule, of which AHEAD are known to the engine once there is one. */
static mr_code next_scheduled(loop *l, coming *c, bool *more, mr_err *err) {
  mr_code rc = MR_OK;
  *more = true;
  while (!rc && *more && l->n_ahead < (l->engine ? AHEAD : 1)) {
    coming *new = &l->ahead[(l->first_ahead + l->n_ahead) % AHEAD];
    *new = (coming){0, 0};
    rc = mr_schedule_next(l->schedule, &new->row, more, err);
    if (!rc && *more && l->engine)
      rc = expect_row(l, new, err);
    l->n_ahead += !rc && *more;
  }
  *more = l->n_ahead > 0;
  if (rc || !*more)
    return rc;
  *c = l->ahead[l->first_ahead];
  l->first_ahead = (l->first_ahead + 1) % AHEAD;
  l->n_ahead--;
  return MR_OK;
}

/* The next row into slot l->next. *more false: the schedule is at its end. */
static mr_code next_row(loop *l, bool *more, mr_err *err) {
  coming c = {0, 0};
  mr_code rc = MR_OK;
  int chosen = 0;
  *more = next_begun(l, &c.row, &chosen);
  if (!*more) {
    chosen = 0;
    rc = next_scheduled(l, &c, more, err);
  }
  if (rc || !*more)
    return rc;
  rc = load_row(l, c.row, err);
  if (!rc) {
    l->slots[l->next].expected = c.expected;
    l->slots[l->next].chosen = chosen;
  }
  return rc;
}

/* A row that can never run (its keys and values alone are over the budget ...) is an error row. */
static mr_code refuse_row(loop *l, const mr_err *why, mr_err *err) {
  mr_row_error e = {.type = "invalid_request_error", .code = "row_too_large"};
  size_t n = strlen(why->text) < sizeof e.message ? strlen(why->text) : sizeof e.message - 1;
  memcpy(e.message, why->text, n);
  mr_code rc = commit_failed(l, &l->slots[l->next].rec, &e, err);
  l->r->now.work_done += l->slots[l->next].work;
  give_slot(l, l->next);
  l->pending = false;
  return rc;
}

/* MR_E_AGAIN: the engine is full. */
static mr_code admit_pending(loop *l, mr_err *err) {
  mr_row_keep keep;
  mr_request req;
  mr_err why = MR_ERR_INIT;
  memset(&keep, 0, sizeof keep);
  mr_code rc =
      mr_row_request(&l->slots[l->next].rec, mr_prompter_vocab(l->r->prompter), &req, &keep, &why);
  if (!rc) {
    req.tag = l->next;
    req.expected = l->slots[l->next].expected;
    rc = mr_engine_admit(l->engine, &req, &why);
  }
  mr_row_keep_free(&keep);
  if (rc == MR_OK) {
    l->pending = false;
    l->flying++;
    return MR_OK;
  }
  if (rc == MR_E_DATA)
    return refuse_row(l, &why, err);
  return rc == MR_E_AGAIN ? rc
                          : mr_err_set(err, rc, "row %llu: %s",
                                       (unsigned long long)l->slots[l->next].rec.row, why.text);
}

/* ---- before a deadline */

/* Whether its keys and values outlast the run. */
static bool is_kept(const mr_run *r) {
  return r->job.kv_disk > 0 && r->job.format != MR_OUT_STDOUT && !r->job.expire;
}

/* Bytes of keys and values in memory and on disk, by the time that it takes to save them. */
static double save_s(const loop *l) {
  const mr_engine_stats *s = &l->r->report.stats;
  const mr_engine_info *i = &l->r->report.info;
  double page = (double)i->kv_page_bytes;
  double parked =
      s->kv_spill_bytes > s->kv_fetch_bytes ? (double)(s->kv_spill_bytes - s->kv_fetch_bytes) : 0;
  double bytes = (double)s->kv_pages_used * page + parked, most = (double)l->r->job.kv_disk;
  double seconds = (bytes < most ? bytes : most) / MR_SPILL_BYTES_PER_S;
  return seconds < SAVE_S ? seconds : SAVE_S;
}

/* At most `most` seconds, of what is left to the deadline; a quarter of them in any case. */
static double within_deadline(const mr_run *r, double most, double others_s) {
  double left = r->deadline_s - mr_sys_seconds() - END_S - others_s;
  if (r->deadline_s <= 0 || mr_signals_stop())
    return most;
  return left > most ? most : left > most / 4 ? left : most / 4;
}

/* Of the tokens of prompts, those that have to be computed: others share the rest. */
static double computed_share(const mr_engine_stats *s) {
  double computed = (double)s->prompt_tokens_computed;
  double all = computed + (double)(s->prompt_tokens_shared + s->prompt_tokens_cached);
  return all > 0 ? computed / all : 1;
}

/* What is in flight and, if e is not NULL, this row with it. */
static mr_pace_work work_with(const loop *l, const mr_plan_entry *e) {
  const mr_engine_left *left = &l->left;
  bool score = e && e->kind == MR_ROW_SCORE;
  double in = e ? e->n_prompt : 0, out = e && !score ? e->n_out : 0, scored = score ? e->n_out : 0;
  double longest = (double)left->longest;
  in = computed_share(&l->r->report.stats) * ((double)left->prompt_tokens + in);
  return (mr_pace_work){.prompt_tokens = in + scored,
                        .output_tokens = (double)left->tokens + out,
                        .longest = longest > out ? longest : out};
}

static double expect_s(const loop *l, const mr_plan_entry *e) {
  mr_pace_work w = work_with(l, e);
  return mr_pace_expect_s(&l->pace, &w);
}

/* When the last row has to be at its end. */
static double end_s(const loop *l) {
  return l->r->deadline_s - END_S - (l->r->job.prefix_cache ? KEEP_S / 2 : 0);
}

/* When steps end: before that, where there are rows that have to be saved. */
static double stop_s(const loop *l) {
  double end = end_s(l);
  if (!l->engine || !l->flying || !is_kept(l->r) || mr_sys_seconds() + expect_s(l, NULL) <= end)
    return end;
  return end - save_s(l);
}

static bool all_end(loop *l, double margin) {
  mr_engine_left_get(l->engine, &l->left);
  return mr_sys_seconds() + margin * expect_s(l, NULL) <= end_s(l);
}

/* Steps took longer than was thought, or rows are longer: those that are farthest from their end
 * stand back, so that the others come to theirs; half of them at most, as what is computed of a row
 * that is cut is not lost, and none where that does not help. */
static void choose_who_ends(loop *l) {
  if (l->r->deadline_s <= 0)
    return;
  mr_engine_left_get(l->engine, &l->left);
  uint64_t held = l->left.held;
  while (held && mr_engine_release(l->engine)) {
    held--;
    if (2 * held >= l->flying || all_end(l, MARGIN))
      continue;
    held += mr_engine_hold(l->engine);
    break;
  }
  while (2 * (held + 1) <= l->flying && !all_end(l, 1) && mr_engine_hold(l->engine))
    held++;
  l->hopeless = !all_end(l, 1 / HOPELESS);
  while (l->hopeless && mr_engine_release(l->engine))
    ;
}

/* Rows in flight at the deadline have to wait for the next run, so those go first with which all
 * end before. */
static bool would_be_cut(const loop *l, const mr_plan_entry *e) {
  return l->r->deadline_s > 0 && mr_sys_seconds() + MARGIN * expect_s(l, e) > end_s(l);
}

/* The first rows are few: a step says how many more can be done. */
static bool may_admit(const loop *l) {
  return l->r->deadline_s <= 0 || mr_pace_known(&l->pace) || l->flying < FIRST_ROWS;
}

/* Without the tokens that a run before has chosen. */
static mr_plan_entry what_is_left(const slot *s) {
  mr_plan_entry e = s->rec.e;
  e.n_out -= s->chosen < e.n_out ? s->chosen : e.n_out;
  return e;
}

/* The pending row is put off; no place for it: nothing more is looked at. */
static mr_code defer(loop *l, mr_err *err) {
  const slot *s = &l->slots[l->next];
  if (l->n_deferred == DEFERRED_MAX) {
    l->closed = true;
    return MR_OK;
  }
  if (!l->deferred)
    l->deferred = mr_mem_alloc(DEFERRED_MAX, sizeof *l->deferred);
  if (!l->deferred)
    return nomem(err);
  l->deferred[l->n_deferred++] = (deferred){
      .row = s->rec.row, .expected = s->expected, .chosen = s->chosen, .left = what_is_left(s)};
  give_slot(l, l->next);
  l->pending = false;
  return MR_OK;
}

static mr_code take_deferred(loop *l, size_t i, mr_err *err) {
  deferred d = l->deferred[i];
  l->n_deferred--;
  memmove(&l->deferred[i], &l->deferred[i + 1], (l->n_deferred - i) * sizeof *l->deferred);
  mr_code rc = load_row(l, d.row, err);
  if (!rc) {
    l->slots[l->next].expected = d.expected;
    l->slots[l->next].chosen = d.chosen;
  }
  return rc;
}

/* One that would end in time after all, as rows were faster than it had seemed. */
static mr_code next_deferred(loop *l, bool *more, mr_err *err) {
  size_t i = 0;
  while (i < l->n_deferred && would_be_cut(l, &l->deferred[i].left))
    i++;
  *more = i < l->n_deferred;
  return *more ? take_deferred(l, i, err) : MR_OK;
}

/* No row would end in time. Where its keys and values outlast the run, one can be begun: a few
 * while there are rows that do end, which would be late with more, else as many as can be saved. */
static mr_code begin_deferred(loop *l, bool *more, mr_err *err) {
  uint64_t most = l->hopeless ? UINT64_MAX : FIRST_ROWS;
  *more = l->n_deferred > 0 && is_kept(l->r) && l->flying < most && save_s(l) < SAVE_S / 2 &&
          mr_sys_seconds() + BEGIN_S < stop_s(l);
  l->closed = !*more && l->n_deferred > 0;
  return *more && !l->pending ? take_deferred(l, 0, err) : MR_OK;
}

/* ---- admission */

/* Makes a row pending that is to be admitted now, if there is one. */
static mr_code choose_row(loop *l, bool *more, mr_err *err) {
  mr_code rc = MR_OK;
  *more = true;
  if (l->r->deadline_s > 0)
    mr_engine_left_get(l->engine, &l->left);
  if (!l->pending)
    rc = next_deferred(l, more, err);
  while (!rc && !l->closed) {
    if (!l->pending)
      rc = next_row(l, more, err);
    if (rc || !*more || l->slots[l->next].rec.e.kind == MR_ROW_BAD)
      break;
    mr_plan_entry left = what_is_left(&l->slots[l->next]);
    if (!would_be_cut(l, &left))
      break;
    rc = defer(l, err);
  }
  if (!rc && (l->closed || !*more))
    rc = begin_deferred(l, more, err);
  return rc;
}

static mr_code admit_all(loop *l, mr_err *err) {
  l->closed = false;
  while (!l->closed && may_admit(l)) {
    bool more = true;
    mr_code rc = choose_row(l, &more, err);
    if (rc || !more)
      return rc;
    if (l->slots[l->next].rec.e.kind == MR_ROW_BAD) {
      rc = commit_bad(l, &l->slots[l->next].rec, err);
      give_slot(l, l->next);
      l->pending = false;
    } else {
      rc = admit_pending(l, err);
    }
    if (rc)
      return rc == MR_E_AGAIN ? MR_OK : rc;
  }
  return MR_OK;
}

/* ---- steps */

static mr_code collect_all(loop *l, mr_err *err) {
  mr_result *res;
  mr_code rc = MR_OK;
  while (!rc && (res = mr_engine_collect(l->engine)) != NULL) {
    size_t at = (size_t)res->tag;
    if (at >= l->n_slots || !l->slots[at].used) {
      rc = mr_err_set(err, MR_E_INTERNAL, "the engine returned a row that is not in it");
    } else {
      rc = commit_result(l, &l->slots[at], res, err);
      mr_pace_row(&l->pace, res, l->slots[at].rec.e.n_out);
      l->r->now.work_done += l->slots[at].work;
      l->flying--;
      give_slot(l, at);
    }
    mr_result_free(res);
  }
  return rc;
}

static mr_code one_step(loop *l, mr_err *err) {
  mr_run *r = l->r;
  mr_engine_stats *s = &r->report.stats;
  uint64_t tokens = s->output_tokens, all = s->batch_tokens_sum;
  double t = mr_sys_seconds(), commit_s = r->report.commit_s;
  int batch = (int)l->flying;
  mr_code rc = mr_engine_step(l->engine, err);
  if (!rc)
    rc = collect_all(l, err);
  if (!rc) {
    double c = mr_sys_seconds();
    rc = mr_commit_tick(r->commit, err);
    r->report.commit_s += mr_sys_seconds() - c;
  }
  mr_engine_stats_get(l->engine, s);
  double took = mr_sys_seconds() - t;
  r->report.run_s += took - (r->report.commit_s - commit_s);
  mr_report_sample(&r->report, took, (double)(s->output_tokens - tokens), batch);
  double chosen = (double)(s->output_tokens - tokens), fed = (double)(s->batch_tokens_sum - all);
  l->step_s = took;
  mr_pace_step(&l->pace, fed > chosen ? fed - chosen : 0, chosen, took);
  r->now.prompt_tokens = s->prompt_tokens_computed;
  r->now.output_tokens = s->output_tokens;
  r->now.batch = (int)l->flying;
  mr_run_tick(r, "run");
  return rc;
}

static const char *deadline_name(const mr_run *r) {
  return r->job.time_limit_s > 0 && r->deadline_s == r->start_s + r->job.time_limit_s
             ? "the time limit"
             : "--until";
}

/* A signal or the deadline ends the run after the present step. */
static bool may_go_on(const loop *l) {
  mr_run *r = l->r;
  if (mr_signals_stop())
    r->stopped = "a signal";
  else if (r->deadline_s > 0 && mr_sys_seconds() + l->step_s >= stop_s(l))
    r->stopped = deadline_name(r);
  return !r->stopped;
}

/* Other work takes the memory that keys and values were to have: they get along with what they
 * have.
 */
static void watch_memory(loop *l) {
  double now = mr_sys_seconds();
  if (now < l->looked_s + MEMORY_S)
    return;
  l->looked_s = now;
  mr_memory m = mr_machine_memory();
  if (m.available < m.total / MEMORY_LOW)
    mr_engine_memory_low(l->engine, true);
  else if (m.available > m.total / MEMORY_LOW * 2)
    mr_engine_memory_low(l->engine, false);
}

static mr_code run_engine(loop *l, mr_err *err) {
  while (may_go_on(l)) {
    double t = mr_sys_seconds(), commit_s = l->r->report.commit_s;
    watch_memory(l);
    choose_who_ends(l);
    mr_code rc = admit_all(l, err);
    l->r->report.run_s += mr_sys_seconds() - t - (l->r->report.commit_s - commit_s);
    if (rc)
      return rc;
    if (l->flying == 0 && l->pending && !l->closed)
      return mr_err_set(err, MR_E_INTERNAL, "the engine is empty and has no room for row %llu",
                        (unsigned long long)l->slots[l->next].rec.row);
    if (l->flying == 0) {
      l->r->stopped = l->closed ? deadline_name(l->r) : NULL;
      return MR_OK;
    }
    rc = one_step(l, err);
    if (rc)
      return rc;
  }
  return MR_OK;
}

/* The bad rows come first and need no engine: a job of which only they are left loads no weights.
 */
static mr_code bad_rows(loop *l, bool *more, mr_err *err) {
  mr_code rc;
  while ((rc = next_row(l, more, err)) == MR_OK && *more &&
         l->slots[l->next].rec.e.kind == MR_ROW_BAD) {
    rc = commit_bad(l, &l->slots[l->next].rec, err);
    give_slot(l, l->next);
    l->pending = false;
    if (rc || !may_go_on(l))
      return rc;
  }
  return rc;
}

static mr_code load_and_run(loop *l, mr_err *err) {
  mr_run *r = l->r;
  mr_run_tick(r, "load");
  if (!may_go_on(l))
    return MR_OK;
  double t = mr_sys_seconds();
  mr_code rc = mr_engine_open(&l->engine, &r->engine_opts, r->prompter, err);
  r->report.load_s = mr_sys_seconds() - t;
  if (rc)
    return rc;
  mr_tuned_save(&r->tuning, &r->estimate);
  r->report.info = *mr_engine_describe(l->engine);
  r->report.has_engine = true;
  mr_run_tick(r, "run");
  mr_watch watch = mr_machine_watch();
  rc = run_engine(l, err);
  r->report.waited_share = mr_machine_waited_share(&watch);
  if (!rc)
    mr_engine_keep_prefixes(l->engine,
                            r->stopped ? within_deadline(r, KEEP_S, save_s(l)) : KEEP_ALL_S);
  mr_engine_stats_get(l->engine, &r->report.stats);
  return rc;
}

/* Rows in flight go on in the next run where they are now. That is worth much, but nothing is lost
 * for want of it. */
static void save_begun(loop *l) {
  mr_run *r = l->r;
  mr_err ignored = MR_ERR_INIT;
  char *prefix = NULL;
  if (!l->engine || l->flying == 0 || r->job.expire || r->job.format == MR_OUT_STDOUT)
    return;
  prefix = mr_paths_kv(&r->paths);
  if (prefix)
    mr_engine_save(l->engine, prefix, r->job.kv_disk, within_deadline(r, SAVE_S, 0), &ignored);
  mr_mem_free(prefix);
  mr_engine_stats_get(l->engine, &r->report.stats);
}

static mr_code load_begun(mr_run *r, mr_err *err) {
  char *prefix = mr_paths_kv(&r->paths);
  mr_code rc = prefix ? mr_saved_open(&r->saved, prefix, err) : nomem(err);
  mr_mem_free(prefix);
  r->engine_opts.saved = r->saved;
  return rc;
}

/* --expire: what has no result at the deadline gets its error line, and the job is finished. */
static mr_code expire_rows(mr_run *r, loop *l, mr_err *err) {
  mr_row_error why = {.message = "This row was not executed before the job's deadline.",
                      .type = "batch_expired",
                      .code = "batch_expired"};
  mr_code rc = MR_OK;
  for (uint64_t row = 0; !rc && row < mr_plan_rows(r->plan); row++) {
    mr_plan_record rec;
    if (!mr_run_is_open(r, row))
      continue;
    rc = mr_plan_read(r->plan, row, &rec, err);
    if (rc)
      break;
    rc = rec.e.kind == MR_ROW_BAD ? commit_bad(l, &rec, err) : commit_failed(l, &rec, &why, err);
    mr_plan_record_free(&rec);
  }
  if (!rc)
    r->stopped = NULL;
  return rc;
}

static void set_render(loop *l) {
  mr_run *r = l->r;
  l->render = (mr_render){.created = r->id.created,
                          .model = mr_prompter_name(r->prompter),
                          .vocab = mr_prompter_vocab(r->prompter),
                          .keep_prompt = r->job.keep_prompt,
                          .files = mr_plan_files(r->plan)};
  memcpy(l->render.job_id, r->id.job_id, sizeof l->render.job_id);
}

static void close_loop(loop *l) {
  for (size_t i = 0; i < l->n_slots; i++)
    if (l->slots[i].used)
      mr_plan_record_free(&l->slots[i].rec);
  mr_mem_free(l->slots);
  mr_mem_free(l->free_slots);
  mr_mem_free(l->deferred);
  mr_schedule_close(l->schedule);
  mr_engine_close(l->engine);
  mr_text_free(&l->line);
}

mr_code mr_run_rows(mr_run *r, mr_err *err) {
  loop l = {.r = r};
  mr_err flush_err = MR_ERR_INIT;
  bool more = false;
  set_render(&l);
  r->now.rows = r->id.rows;
  r->now.rows_done = mr_commit_done_rows(r->commit);
  r->now.rows_failed = mr_commit_totals_get(r->commit)->rows_failed;
  mr_code rc = count_work(r, err);
  if (!rc)
    rc = load_begun(r, err);
  if (!rc)
    rc = mr_schedule_open(&l.schedule, r->plan, r->paths.run, 0, skip_row, r, err);
  if (!rc)
    rc = mr_run_predict(r, l.schedule, err);
  if (!rc)
    rc = bad_rows(&l, &more, err);
  if (!rc && !r->stopped && more)
    rc = load_and_run(&l, err);
  if (!rc && r->stopped && r->job.expire && !mr_signals_stop())
    rc = expire_rows(r, &l, err);
  double t = mr_sys_seconds();
  /* Also after an error: rows that are finished are not lost with those that failed. */
  mr_code flushed = mr_commit_flush(r->commit, rc ? &flush_err : err);
  r->report.commit_s += mr_sys_seconds() - t;
  if (!rc && !flushed && r->stopped)
    save_begun(&l);
  close_loop(&l);
  return rc ? rc : flushed;
}
