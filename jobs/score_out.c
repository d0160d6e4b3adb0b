/* What was scored, as JSON, as a table and as one line. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "jobs/progress.h"
#include "jobs/score_int.h"

#define NAME_MAX_SHOWN 40

static const char *const names[] = {
    "exact_match", "contains",          "regex",      "number",        "f1",        "rouge_l",
    "choice",      "choice_normalized", "perplexity", "bits_per_byte", "json_valid"};

const char *score_metric_name(mr_metric m) {
  return names[m];
}

mr_mean score_estimate(const score_group *g, mr_metric m) {
  bool unbounded = m == MR_METRIC_PERPLEXITY || m == MR_METRIC_BITS_PER_BYTE;
  mr_mean e = mr_stats_estimate(&g->stats[m], 0, unbounded ? INFINITY : 1);
  if (m == MR_METRIC_PERPLEXITY) {
    e.mean = exp(e.mean);
    e.error *= e.mean; /* to first order */
    e.low = exp(e.low);
    e.high = exp(e.high);
  }
  return e;
}

/* Asked for, or there. */
static bool is_shown(const mr_score *s, const score_group *g, int m) {
  return g->stats[m].n || (g == s->groups && s->opts->metrics & 1u << m);
}

/* ------------------------------------------------------------------ JSON */

static json_t *real(double x) {
  return isfinite(x) ? json_real(x) : json_null();
}

static json_t *metrics_json(const mr_score *s, const score_group *g) {
  json_t *all = json_object();
  for (int m = 0; m < MR_METRICS; m++) {
    if (!is_shown(s, g, m))
      continue;
    mr_mean e = score_estimate(g, (mr_metric)m);
    json_t *o =
        json_pack("{s:o, s:o, s:o, s:o, s:I}", "value", real(e.mean), "stderr", real(e.error),
                  "low", real(e.low), "high", real(e.high), "rows", (json_int_t)e.n);
    if (json_object_set_new(all, names[m], o)) {
      json_decref(all);
      return NULL;
    }
  }
  return all;
}

static json_t *groups_json(const mr_score *s) {
  json_t *all = json_object();
  for (size_t i = 1; all && i < s->n_groups; i++) {
    const score_group *g = &s->groups[i];
    json_t *o = json_pack("{s:I, s:I, s:o}", "results", (json_int_t)g->rows, "missing",
                          (json_int_t)g->missing, "metrics", metrics_json(s, g));
    if (json_object_set_new(all, g->name, o)) {
      json_decref(all);
      all = NULL;
    }
  }
  return all;
}

json_t *mr_score_to_json(const mr_score *s) {
  const mr_score_counts *c = &s->counts;
  json_t *o = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "results",
                        (json_int_t)c->results, "scored", (json_int_t)c->scored, "missing",
                        (json_int_t)c->missing, "failed", (json_int_t)c->failed, "unreferenced",
                        (json_int_t)c->unreferenced, "repeated", (json_int_t)c->repeated,
                        "unextracted", (json_int_t)c->unextracted, "extract_limited",
                        (json_int_t)c->limited, "references_without_answer", (json_int_t)c->blank,
                        "metrics", metrics_json(s, s->groups));
  if (!o || !s->opts->by)
    return o;
  if (!json_object_set_new(o, "by", json_string(s->opts->by)) &&
      !json_object_set_new(o, "groups", groups_json(s)))
    return o;
  json_decref(o);
  return NULL;
}

/* ------------------------------------------------------------------ the table */

static const char *number(double x, char *buf, size_t cap) {
  if (isfinite(x))
    snprintf(buf, cap, fabs(x) < 100 ? "%.4f" : "%.6g", x);
  else
    snprintf(buf, cap, "-");
  return buf;
}

static void count_line(mr_text *out, uint64_t n, const char *what) {
  char buf[32];
  if (n)
    mr_text_addf(out, ", %s %s", mr_progress_count(n, buf, sizeof buf), what);
}

static void counts_line(const mr_score *s, mr_text *out) {
  const mr_score_counts *c = &s->counts;
  char buf[32];
  mr_text_addf(out, "%s results", mr_progress_count(c->results, buf, sizeof buf));
  count_line(out, c->results - c->scored, "not scored");
  count_line(out, c->missing, "missing and counted as wrong");
  count_line(out, c->unreferenced, "without a reference");
  count_line(out, c->repeated, "repeated and passed over");
  count_line(out, c->unextracted, "without a match of the pattern");
  count_line(out, c->limited, "beyond the limits of matching");
  count_line(out, c->elsewhere, "references of other shards");
  count_line(out, c->blank, "lines of references without an answer");
}

/* A name from a file, for a terminal: at most NAME_MAX_SHOWN characters; others count in width. */
static int clean_name(const char *s, char *buf, size_t cap) {
  size_t at = 0;
  int width = 0;
  for (size_t len = strlen(s), i = 0; i < len && width < NAME_MAX_SHOWN && at + 5 < cap; width++) {
    uint32_t c;
    int n = mr_utf8_next(s + i, len - i, &c);
    if (c < 0x20 || (c >= 0x7f && c < 0xa0)) {
      buf[at++] = '?';
    } else {
      memcpy(buf + at, s + i, (size_t)n);
      at += (size_t)n;
    }
    i += (size_t)n;
  }
  buf[at] = '\0';
  return width;
}

static int name_width(const mr_score *s) {
  char buf[4 * NAME_MAX_SHOWN + 8];
  int most = 3;
  for (size_t i = 1; i < s->n_groups; i++) {
    int n = clean_name(s->groups[i].name, buf, sizeof buf);
    most = n > most ? n : most;
  }
  return most;
}

static void group_column(const char *name, int width, mr_text *out) {
  char buf[4 * NAME_MAX_SHOWN + 8];
  int n = clean_name(name, buf, sizeof buf);
  if (width)
    mr_text_addf(out, "%s%*s  ", buf, width > n ? width - n : 0, "");
}

static void table_row(const mr_score *s, const score_group *g, int m, int width, mr_text *out) {
  char a[32], b[32], c[32], d[32], n[32];
  mr_mean e = score_estimate(g, (mr_metric)m);
  group_column(g == s->groups ? "all" : g->name, width, out);
  mr_text_addf(out, "%-17s  %9s  %9s to %-9s  %9s  %9s\n", names[m], number(e.mean, a, sizeof a),
               number(e.low, b, sizeof b), number(e.high, c, sizeof c),
               number(e.error, d, sizeof d), mr_progress_count(e.n, n, sizeof n));
}

void mr_score_table(const mr_score *s, mr_text *out) {
  int width = s->opts->by ? name_width(s) : 0;
  counts_line(s, out);
  mr_text_adds(out, "\n");
  group_column(s->opts->by ? s->opts->by : "", width, out);
  mr_text_addf(out, "%-17s  %9s  %22s  %9s  %9s\n", "metric", "value", "95 % interval   ", "stderr",
               "rows");
  for (size_t i = 0; i < s->n_groups; i++)
    for (int m = 0; m < MR_METRICS; m++)
      if (is_shown(s, &s->groups[i], m))
        table_row(s, &s->groups[i], m, width, out);
}

void mr_score_brief(const mr_score *s, mr_text *out) {
  char a[32], b[32], c[32];
  for (int m = 0; m < MR_METRICS; m++) {
    if (!is_shown(s, s->groups, m))
      continue;
    mr_mean e = score_estimate(s->groups, (mr_metric)m);
    mr_text_addf(out, "%s %s (%s to %s), ", names[m], number(e.mean, a, sizeof a),
                 number(e.low, b, sizeof b), number(e.high, c, sizeof c));
  }
  counts_line(s, out);
}
