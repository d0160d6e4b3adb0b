#include "jobs/score.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "io/hash.h"
#include "io/json.h"
#include "io/lines.h"
#include "io/mem.h"
#include "jobs/score_int.h"

#define BIT(metric) (1u << MR_METRIC_##metric)

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for scores");
}

static mr_str str_of(const mr_text *t) {
  return (mr_str){t->data ? t->data : "", t->len};
}

/* ------------------------------------------------------------------ open */

static mr_code set_rules(mr_score *s, mr_err *err) {
  const mr_score_opts *o = s->opts;
  s->rules = (mr_score_rules){.metrics = o->metrics,
                              .by_kind = !o->metrics,
                              .ignore = o->ignore ? o->ignore : MR_IGNORE_SPACE,
                              .outputs = o->outputs};
  if (!o->metrics)
    s->rules.metrics = BIT(EXACT_MATCH) | BIT(CHOICE) | BIT(CHOICE_NORMALIZED) | BIT(PERPLEXITY);
  if (o->metrics & BIT(REGEX) && !o->extract)
    return mr_err_set(err, MR_E_USAGE,
                      "the metric regex needs the pattern that it looks for (--extract)");
  if (!o->extract)
    return MR_OK;
  return mr_extract_open(&s->rules.extract, o->extract, strlen(o->extract), o->extract_last, err);
}

static score_group *add_group(mr_score *s, const char *name) {
  if (!mr_mem_grow((void **)&s->groups, &s->cap_groups, s->n_groups + 1, sizeof *s->groups))
    return NULL;
  score_group *g = &s->groups[s->n_groups];
  memset(g, 0, sizeof *g);
  if (name && !(g->name = mr_mem_copy(name, strlen(name))))
    return NULL;
  s->n_groups++;
  return g;
}

mr_code mr_score_open(mr_score **out, const mr_score_opts *o, mr_err *err) {
  mr_score *s = mr_mem_alloc(1, sizeof *s);
  *out = NULL;
  if (!s)
    return no_memory(err);
  s->opts = o;
  s->by_name = json_object();
  mr_code rc = s->by_name && add_group(s, NULL) ? set_rules(s, err) : no_memory(err);
  if (!rc && o->refs.n) {
    mr_refs_opts refs = {.files = (const char *const *)o->refs.s,
                         .n = o->refs.n,
                         .field = o->ref_field,
                         .by = o->by};
    rc = mr_refs_open(&s->refs, &refs, err);
    s->counts.blank = rc ? 0 : mr_refs_blank(s->refs);
  }
  if (rc)
    mr_score_close(s);
  else
    *out = s;
  return rc;
}

void mr_score_is_part(mr_score *s) {
  s->part = true;
}

void mr_score_rows_to(mr_score *s, mr_outfile *rows) {
  s->rows = rows;
}

/* ------------------------------------------------------------------ groups */

/* The group of a row: a field of its result, else of its reference, else "(none)". */
static mr_code find_group(mr_score *s, const json_t *object, const mr_ref *ref, score_group **out,
                          mr_err *err) {
  const json_t *v = object ? mr_refs_member(object, s->opts->by) : NULL;
  mr_text_clear(&s->name);
  if (v)
    mr_refs_text(v, &s->name);
  else if (ref && ref->group.s)
    mr_text_add(&s->name, ref->group.s, ref->group.len);
  else
    mr_text_adds(&s->name, "(none)");
  for (size_t i = 0; i < s->name.len; i++) /* a name is a text of C */
    s->name.data[i] = s->name.data[i] ? s->name.data[i] : ' ';
  if (s->name.failed)
    return no_memory(err);
  const char *name = s->name.data ? s->name.data : "";
  const json_t *known = json_object_get(s->by_name, name);
  if (known) {
    *out = &s->groups[json_integer_value(known)];
    return MR_OK;
  }
  if (s->n_groups > MR_SCORE_GROUPS_MAX)
    return mr_err_set(err, MR_E_DATA,
                      "the field %.100s has more than %d values: no field to group by", s->opts->by,
                      MR_SCORE_GROUPS_MAX);
  *out = add_group(s, name);
  if (!*out || json_object_set_new(s->by_name, name, json_integer((json_int_t)s->n_groups - 1)))
    return no_memory(err);
  return MR_OK;
}

static void add_values(score_group *g, const mr_score_values *v) {
  g->rows++;
  for (int m = 0; m < MR_METRICS; m++)
    if (v->has & 1u << m)
      mr_stats_add(&g->stats[m], v->value[m], v->weight[m]);
}

/* ------------------------------------------------------------------ lines of rows */

static double shown(const mr_score_values *v, int m) {
  double x = v->value[m] / v->weight[m];
  return m == MR_METRIC_PERPLEXITY ? exp(x) : x;
}

static mr_code put_line(mr_score *s, mr_err *err) {
  mr_text_adds(&s->line, "}\n");
  return s->line.failed ? no_memory(err) : mr_outfile_line(s->rows, s->line.data, s->line.len, err);
}

static void begin_line(mr_score *s, const json_t *id, mr_str text) {
  mr_text_clear(&s->line);
  mr_text_adds(&s->line, "{\"id\":");
  if (id)
    mr_json_add(&s->line, id);
  else
    mr_json_add_string(&s->line, text.s, text.len);
  if (s->opts->by) {
    mr_text_adds(&s->line, ",\"group\":");
    mr_json_add_string(&s->line, s->name.data ? s->name.data : "", s->name.len);
  }
}

static mr_code write_row(mr_score *s, const mr_score_line *l, const json_t *answers, mr_err *err) {
  const mr_score_values *v = &s->values;
  if (!s->rows)
    return MR_OK;
  begin_line(s, l->id, (mr_str){"", 0});
  for (int m = 0; m < MR_METRICS; m++)
    if (v->has & 1u << m) {
      mr_text_addf(&s->line, ",\"%s\":", score_metric_name((mr_metric)m));
      mr_json_add_real(&s->line, shown(v, m));
    }
  if (v->has & mr_metrics_of_text) {
    mr_text_adds(&s->line, ",\"answer\":");
    if (v->has_answer)
      mr_json_add_string(&s->line, str_of(&v->answer).s, v->answer.len);
    else
      mr_text_adds(&s->line, "null");
  }
  mr_text_adds(&s->line, ",\"reference\":");
  if (json_array_size(answers) == 1)
    mr_json_add(&s->line, json_array_get(answers, 0));
  else if (answers)
    mr_json_add(&s->line, answers);
  else
    mr_text_adds(&s->line, "null");
  return put_line(s, err);
}

static mr_code write_missing(mr_score *s, const json_t *id, mr_str text, mr_err *err) {
  if (!s->rows)
    return MR_OK;
  begin_line(s, id, text);
  mr_text_adds(&s->line, ",\"missing\":true");
  return put_line(s, err);
}

/* ------------------------------------------------------------------ rows */

/* The answers that a result brings along; NULL: none. */
static mr_code own_answers(mr_score *s, const json_t *object, mr_err *err) {
  json_decref(s->own);
  s->own = NULL;
  for (size_t i = 0; !s->own; i++) {
    const char *name = s->opts->ref_field ? s->opts->ref_field : mr_refs_fields[i];
    if (!name || (s->opts->ref_field && i))
      break;
    s->own = mr_refs_answers(mr_refs_member(object, name));
  }
  return !s->own && mr_json_ran_out() ? no_memory(err) : MR_OK;
}

typedef struct row {
  mr_score_line l;
  mr_text id;
  mr_ref ref;
  bool has_ref;
  bool repeated;
} row;

static mr_code find_reference(mr_score *s, row *r, mr_err *err) {
  mr_str id = str_of(&r->id);
  mr_code rc = MR_OK;
  if (s->refs && r->l.id) {
    rc = mr_refs_find(s->refs, id, &r->ref, &r->has_ref, err);
    r->repeated = !rc && r->has_ref && r->ref.asked;
  } else if (!s->refs) {
    if (r->l.id)
      rc = mr_idset_add(&s->seen, mr_hash_64(id.s, id.len), &r->repeated, err);
    if (!rc && !r->repeated)
      rc = own_answers(s, r->l.object, err);
    r->has_ref = s->own != NULL;
    r->ref.answers = s->own;
  }
  return rc;
}

static mr_code miss(mr_score *s, const json_t *object, const mr_ref *ref, const json_t *id,
                    mr_err *err) {
  score_group *g = NULL;
  s->counts.missing++;
  s->groups[0].missing++;
  mr_code rc = MR_OK;
  if (s->opts->by) {
    rc = find_group(s, object, ref, &g, err);
    if (!rc)
      g->missing++;
  }
  return rc ? rc : write_missing(s, id, ref ? ref->id : (mr_str){"", 0}, err);
}

/* A row that failed. Where references are given, those without a result are found at the end; of a
 * shard only its own rows count. */
static mr_code failed_row(mr_score *s, row *r, mr_err *err) {
  s->counts.failed++;
  if (s->opts->skip_missing || (s->refs && !s->part))
    return MR_OK;
  if (!s->refs)
    return miss(s, r->l.object, NULL, r->l.id ? r->l.id : json_null(), err);
  mr_code rc = find_reference(s, r, err);
  if (rc || !r->has_ref || r->repeated)
    return rc;
  return miss(s, r->l.object, &r->ref, r->l.id, err);
}

static mr_code score_row(mr_score *s, row *r, mr_err *err) {
  const json_t *answers = r->has_ref ? r->ref.answers : NULL;
  mr_score_values *v = &s->values;
  score_group *g = NULL;
  s->counts.results++;
  mr_code rc = mr_score_row(&s->rules, &r->l, answers, v, err);
  if (!rc && s->opts->by)
    rc = find_group(s, r->l.object, r->has_ref ? &r->ref : NULL, &g, err);
  if (rc)
    return rc;
  bool fits = s->rules.by_kind && v->has; /* a metric that needs none was the one to compute */
  s->counts.scored += v->has != 0;
  s->counts.unreferenced += !answers && !fits && s->rules.metrics & mr_metrics_referenced;
  s->counts.unextracted += v->unextracted;
  s->counts.limited += v->limited;
  add_values(&s->groups[0], v);
  if (g)
    add_values(g, v);
  return write_row(s, &r->l, answers, err);
}

static mr_code take_object(mr_score *s, const json_t *object, row *r, mr_err *err) {
  if (!mr_score_line_read(&r->l, object))
    return mr_err_set(err, MR_E_DATA, "is not a JSON object");
  if (r->l.id)
    mr_refs_text(r->l.id, &r->id);
  if (r->id.failed)
    return no_memory(err);
  if (r->l.failed)
    return failed_row(s, r, err);
  mr_code rc = find_reference(s, r, err);
  if (rc)
    return rc;
  if (r->repeated) {
    s->counts.repeated++;
    return MR_OK;
  }
  return score_row(s, r, err);
}

static mr_code take_line(mr_score *s, const char *name, const mr_line *line, row *r, mr_err *err) {
  mr_err why = MR_ERR_INIT;
  if (line->too_long)
    return mr_err_at(err, MR_E_DATA, name, (int64_t)line->number, -1,
                     "a line of %zu bytes; results have at most %zu", line->len, MR_SCORE_LINE_MAX);
  mr_text id = r->id;
  mr_text_clear(&id);
  *r = (row){.id = id};
  mr_json_ran_out();
  json_t *o = mr_json_parse(line->s, line->len, NULL, &why);
  mr_code rc = o ? take_object(s, o, r, &why) : why.code;
  json_decref(o);
  if (!rc)
    return MR_OK;
  if (why.file[0]) {
    *err = why;
    return rc;
  }
  return mr_err_at(err, rc, name, (int64_t)line->number, -1, "%s", why.text);
}

/* ------------------------------------------------------------------ files */

static mr_code read_texts(mr_score *s, mr_source *source, mr_lines *l, row *r, mr_err *err) {
  for (;;) {
    bool more;
    mr_line line;
    mr_code rc = mr_source_next(source, &more, err);
    if (rc || !more)
      return rc;
    mr_lines_start(l);
    while ((rc = mr_lines_next(l, &line, err)) == MR_OK && line.s)
      if ((rc = take_line(s, mr_source_name(source), &line, r, err)) != MR_OK)
        return rc;
    if (rc)
      return rc;
  }
}

mr_code mr_score_read(mr_score *s, const char *const *paths, int n, mr_err *err) {
  mr_source *source;
  mr_lines l;
  row r = {.has_ref = false};
  mr_code rc = mr_source_open(&source, paths, n, err);
  if (rc)
    return rc;
  mr_lines_init(&l, source, MR_SCORE_LINE_MAX, NULL);
  rc = read_texts(s, source, &l, &r, err);
  mr_text_free(&r.id);
  mr_lines_free(&l);
  mr_source_close(source);
  return rc;
}

/* ------------------------------------------------------------------ the end */

/* References that no result asked for. */
static mr_code take_rest(mr_score *s, mr_err *err) {
  uint64_t at = 0;
  for (;;) {
    mr_ref ref;
    bool more;
    mr_code rc = mr_refs_rest(s->refs, &at, &ref, &more, err);
    if (rc || !more)
      return rc;
    if (s->part)
      s->counts.elsewhere++;
    else if (!s->opts->skip_missing)
      rc = miss(s, NULL, &ref, NULL, err);
    if (rc)
      return rc;
  }
}

/* Rows without a result are zeros of the metrics that were asked for, or that other rows have. */
static void add_missing(mr_score *s) {
  for (int m = 0; m < MR_METRICS; m++) {
    bool counts = s->opts->metrics & 1u << m || s->groups[0].stats[m].n;
    if (!(mr_metrics_of_missing & 1u << m) || !counts)
      continue;
    for (size_t i = 0; i < s->n_groups; i++)
      mr_stats_add_zeros(&s->groups[i].stats[m], s->groups[i].missing);
  }
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const score_group *)a)->name, ((const score_group *)b)->name);
}

static mr_code refuse_nothing(const mr_score *s, mr_err *err) {
  const mr_score_counts *c = &s->counts;
  if (!c->results || c->scored)
    return MR_OK;
  if (c->unreferenced == c->results && s->refs)
    return mr_err_set(err, MR_E_DATA,
                      "none of %" PRIu64 " results has its id among the %" PRIu64 " references",
                      c->results, mr_refs_count(s->refs));
  if (c->unreferenced == c->results)
    return mr_err_set(err, MR_E_DATA,
                      "none of %" PRIu64 " results has %s%.100s; give references with --ref FILE, "
                      "or name the field with --ref-field",
                      c->results, s->opts->ref_field ? "the field " : "a field answer, target, ",
                      s->opts->ref_field ? s->opts->ref_field : "label or reference");
  return mr_err_set(err, MR_E_DATA,
                    "none of %" PRIu64 " results has what the metrics need (docs/score.md)",
                    c->results);
}

mr_code mr_score_finish(mr_score *s, mr_err *err) {
  mr_code rc = s->refs ? take_rest(s, err) : MR_OK;
  s->rows = NULL;
  if (!rc)
    rc = refuse_nothing(s, err);
  if (rc)
    return rc;
  add_missing(s);
  if (s->n_groups > 2)
    qsort(s->groups + 1, s->n_groups - 1, sizeof *s->groups, by_name);
  return MR_OK;
}

const mr_score_counts *mr_score_counts_get(const mr_score *s) {
  return &s->counts;
}

mr_mean mr_score_estimate(const mr_score *s, mr_metric m) {
  return score_estimate(&s->groups[0], m);
}

uint64_t mr_score_incomplete(const mr_score *s) {
  return s->counts.missing + s->counts.unreferenced;
}

void mr_score_close(mr_score *s) {
  if (!s)
    return;
  for (size_t i = 0; i < s->n_groups; i++)
    mr_mem_free(s->groups[i].name);
  mr_mem_free(s->groups);
  mr_extract_close(s->rules.extract);
  mr_refs_close(s->refs);
  mr_idset_free(&s->seen);
  mr_score_values_free(&s->values);
  mr_text_free(&s->name);
  mr_text_free(&s->line);
  json_decref(s->by_name);
  json_decref(s->own);
  mr_mem_free(s);
}
