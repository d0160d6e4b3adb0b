/* The report as one page: no scripts, no other files, charts as SVG. Reads only the object of
 * mr_report_to_json. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "jobs/progress.h"
#include "jobs/report.h"

#define CHART_W 720
#define CHART_H 190
#define PLOT_X 64 /* left of the plot: labels */
#define PLOT_Y 12
#define PLOT_W (CHART_W - PLOT_X - 12)
#define PLOT_H (CHART_H - PLOT_Y - 34)
#define SCORE_GROUPS 100 /* shown */

static const char style[] =
    ":root{color-scheme:light "
    "dark;--bg:#fbfbfa;--card:#fff;--ink:#1c2024;--soft:#60646c;--line:#e3e4e8;--a:#2f6fdb;"
    "--b:#0d9373;--c:#c2620a;--d:#8b5cd6;--e:#b4304a;--f:#8a8f98}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#131518;--card:#1b1e22;--ink:#e8eaed;--soft:#"
    "9ba1a9;--line:#30343a;"
    "--a:#6ea2ff;--b:#3fc6a2;--c:#f0a154;--d:#b795f5;--e:#f2788f;--f:#7b818a}}\n"
    "*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 "
    "system-ui,-apple-system,"
    "\"Segoe UI\",Roboto,\"DejaVu Sans\",sans-serif}main{max-width:800px;margin:0 "
    "auto;padding:32px 20px 48px}\n"
    "h1{font-size:24px;margin:0 0 2px;letter-spacing:-.01em}h2{font-size:16px;margin:0 0 10px}"
    ".sub{color:var(--soft);margin:0 0 22px;overflow-wrap:anywhere}"
    ".tiles{display:grid;grid-template-columns:repeat(3,1fr);gap:12px;margin:0 0 16px}"
    ".tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}"
    ".tile{padding:12px 14px}.tile "
    "b{display:block;font-size:21px;font-variant-numeric:tabular-nums;line-height:1.25}"
    ".tile span{color:var(--soft);font-size:12.5px}.bad b{color:var(--e)}"
    ".card{padding:16px 18px;margin:0 0 16px;break-inside:avoid}\n"
    "svg{display:block;width:100%;height:auto}svg "
    "text{fill:var(--soft);font-size:11.5px;font-family:inherit}"
    ".grid{stroke:var(--line);stroke-width:1}"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
    "td,th{padding:5px 0;border-top:1px solid var(--line);text-align:right;vertical-align:top}"
    "tr:first-child>*{border-top:0}td:first-child,th:first-child{text-align:left;padding-right:"
    "16px}"
    "th{font-weight:600;color:var(--soft);font-size:13px}td:first-child{color:var(--soft)}.wrap{"
    "overflow-wrap:anywhere}"
    ".key{display:flex;flex-wrap:wrap;gap:4px 18px;margin:10px 0 "
    "0;color:var(--soft);font-size:13px}"
    ".key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}\n"
    "@media "
    "print{:root{color-scheme:light;--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb}main{"
    "padding:0;"
    "max-width:none}.card,.tile{border-radius:4px}svg,i{print-color-adjust:exact;-webkit-print-"
    "color-adjust:exact}}\n";

/* ---- reading the object */

static const json_t *get(const json_t *o, const char *a, const char *b) {
  const json_t *v = json_object_get(o, a);
  return b ? json_object_get(v, b) : v;
}

static double number(const json_t *o, const char *a, const char *b) {
  return json_number_value(get(o, a, b)); /* 0 for null */
}

static const char *text(const json_t *o, const char *a, const char *b) {
  const char *s = json_string_value(get(o, a, b));
  return s ? s : "";
}

/* ---- writing */

static void escaped(mr_text *t, const char *s) {
  for (; *s; s++) {
    if (*s == '<')
      mr_text_adds(t, "&lt;");
    else if (*s == '>')
      mr_text_adds(t, "&gt;");
    else if (*s == '&')
      mr_text_adds(t, "&amp;");
    else if (*s == '"')
      mr_text_adds(t, "&quot;");
    else
      mr_text_addc(t, *s);
  }
}

/* 12345678 → "12.3 M": three digits. Returns buf. */
static const char *brief(double x, char *buf, size_t cap) {
  static const char *const unit[] = {"", " k", " M", " G", " T", " P"};
  int i = 0;
  for (; fabs(x) >= 999.5 && i < 5; i++)
    x /= 1000;
  snprintf(buf, cap, fabs(x) >= 99.95 ? "%.0f%s" : "%.3g%s", x, unit[i]);
  return buf;
}

static const char *seconds_text(double s, char *buf, size_t cap) {
  if (s >= 60)
    return mr_progress_duration(s, buf, cap);
  snprintf(buf, cap, s >= 10 ? "%.1f s" : s >= 0.1 ? "%.2f s" : "%.3f s", s);
  return buf;
}

static void tile(mr_text *t, const char *value, const char *label, bool bad) {
  mr_text_addf(t, "<div class=\"tile%s\"><b>%s</b><span>%s</span></div>", bad ? " bad" : "", value,
               label);
}

static void row(mr_text *t, const char *name, const char *value) {
  mr_text_addf(t, "<tr><td>%s</td><td class=\"wrap\">", name);
  escaped(t, value);
  mr_text_adds(t, "</td></tr>");
}

static void row_count(mr_text *t, const char *name, double n) {
  char buf[40];
  row(t, name, mr_progress_count(n > 0 ? (uint64_t)n : 0, buf, sizeof buf));
}

static void row_brief(mr_text *t, const char *name, double x, const char *unit) {
  char num[32], buf[64];
  brief(x, num, sizeof num);
  bool spaced = *unit && !strchr(num, ' ');
  snprintf(buf, sizeof buf, "%s%s%s", num, spaced ? " " : "", unit);
  row(t, name, buf);
}

static void percent_or_dash(const json_t *v, char *buf, size_t cap) {
  if (json_is_number(v))
    snprintf(buf, cap, "%.1f %%", 100 * json_number_value(v));
  else
    snprintf(buf, cap, "–");
}

static void tiles(mr_text *t, const json_t *r) {
  char a[40];
  mr_text_adds(t, "<div class=\"tiles\">");
  tile(t, mr_progress_count((uint64_t)number(r, "rows_ok", NULL), a, sizeof a), "rows done", false);
  double failed = number(r, "rows_failed", NULL);
  tile(t, mr_progress_count((uint64_t)failed, a, sizeof a), "rows failed", failed > 0);
  tile(t, seconds_text(number(r, "seconds", "total"), a, sizeof a), "this run", false);
  tile(t, brief(number(r, "throughput", "output_tokens_per_s"), a, sizeof a), "output tok/s",
       false);
  percent_or_dash(get(r, "mfu", NULL), a, sizeof a);
  tile(t, a, "of the peak arithmetic", false);
  percent_or_dash(get(r, "mbu", NULL), a, sizeof a);
  tile(t, a, "of the peak bandwidth", false);
  mr_text_adds(t, "</div>\n");
}

/* The next of 1, 2, 5 times a power of ten at or above x. */
static double nice(double x) {
  double p = pow(10, floor(log10(x)));
  double m = x / p;
  return (m <= 1 ? 1 : m <= 2 ? 2 : m <= 5 ? 5 : 10) * p;
}

static double largest(const json_t *a) {
  double m = 0;
  for (size_t i = 0; i < json_array_size(a); i++)
    m = fmax(m, json_number_value(json_array_get(a, i)));
  return m;
}

static const char *tick_text(double s, char *buf, size_t cap) {
  if (s >= 60)
    return mr_progress_duration(s, buf, cap);
  snprintf(buf, cap, "%.3g s", s);
  return buf;
}

static void axes(mr_text *t, double top, double step, double end_s) {
  char a[40];
  for (double v = 0; v <= top * 1.0001; v += step) {
    double y = PLOT_Y + PLOT_H * (1 - v / top);
    mr_text_addf(t, "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", PLOT_X,
                 PLOT_X + PLOT_W, y, y);
    mr_text_addf(t, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>", PLOT_X - 8, y + 4,
                 brief(v, a, sizeof a));
  }
  double tick = nice(end_s / 6);
  for (double v = 0; v <= end_s; v += tick)
    mr_text_addf(t, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>",
                 PLOT_X + PLOT_W * v / end_s, CHART_H - 14,
                 v == 0 ? "0" : tick_text(v, a, sizeof a));
}

static void chart(mr_text *t, const char *title, const json_t *x, const json_t *y,
                  const char *color) {
  size_t n = json_array_size(x) < json_array_size(y) ? json_array_size(x) : json_array_size(y);
  double top = largest(y), last = largest(x),
         first = n ? json_number_value(json_array_get(x, 0)) : 0;
  if (n == 0 || top <= 0 || last <= 0)
    return;
  double step = nice(top / 4), end_s = last + first; /* points stand in the middle of their time */
  top = ceil(top / step) * step;
  mr_text_addf(t,
               "<section class=\"card\"><h2>%s</h2><svg viewBox=\"0 0 %d %d\" role=\"img\" "
               "aria-label=\"%s\">",
               title, CHART_W, CHART_H, title);
  axes(t, top, step, end_s);
  mr_text line = {0};
  for (size_t i = 0; i < n; i++) {
    double px = PLOT_X + PLOT_W * json_number_value(json_array_get(x, i)) / end_s;
    double py = PLOT_Y + PLOT_H * (1 - json_number_value(json_array_get(y, i)) / top);
    mr_text_addf(&line, "%s%.1f,%.1f", i ? " " : "", px, py);
  }
  double left = PLOT_X + PLOT_W * first / end_s, right = PLOT_X + PLOT_W * last / end_s;
  mr_text_addf(t, "<polygon points=\"%.1f,%d %s %.1f,%d\" fill=\"var(--%s)\" opacity=\".14\"/>",
               left, PLOT_Y + PLOT_H, line.data ? line.data : "", right, PLOT_Y + PLOT_H, color);
  mr_text_addf(t,
               "<polyline points=\"%s\" fill=\"none\" stroke=\"var(--%s)\" stroke-width=\"1.8\" "
               "stroke-linejoin=\"round\"/></svg></section>\n",
               line.data ? line.data : "", color);
  t->failed |= line.failed;
  mr_text_free(&line);
}

typedef struct part {
  const char *name, *a, *b, *color; /* number at seconds.a, or at seconds.a.b */
} part;

static double part_s(const json_t *r, const part *p) {
  const json_t *v = json_object_get(get(r, "seconds", NULL), p->a);
  return json_number_value(p->b ? json_object_get(v, p->b) : v);
}

static void stacked(mr_text *t, const json_t *r, const part *parts, size_t n, const char *title) {
  double sum = 0, at = 0;
  char a[40];
  for (size_t i = 0; i < n; i++)
    sum += part_s(r, &parts[i]);
  if (sum <= 0)
    return;
  mr_text_addf(t, "<svg viewBox=\"0 0 %d 26\" role=\"img\" aria-label=\"%s\">", CHART_W, title);
  for (size_t i = 0; i < n; i++) {
    double w = CHART_W * part_s(r, &parts[i]) / sum;
    mr_text_addf(t, "<rect x=\"%.2f\" y=\"2\" width=\"%.2f\" height=\"22\" fill=\"var(--%s)\"/>",
                 at, w, parts[i].color);
    at += w;
  }
  mr_text_adds(t, "</svg><div class=\"key\">");
  for (size_t i = 0; i < n; i++)
    mr_text_addf(t, "<span><i style=\"background:var(--%s)\"></i>%s %s (%.1f %%)</span>",
                 parts[i].color, parts[i].name, seconds_text(part_s(r, &parts[i]), a, sizeof a),
                 100 * part_s(r, &parts[i]) / sum);
  mr_text_adds(t, "</div>");
}

static void time_card(mr_text *t, const json_t *r) {
  static const part phases[] = {{"preflight", "preflight", NULL, "c"},
                                {"load", "load", NULL, "d"},
                                {"run", "run", NULL, "a"},
                                {"commit", "commit", NULL, "e"},
                                {"assemble", "assemble", NULL, "b"},
                                {"other", "other", NULL, "f"}};
  static const part steps[] = {{"matrix products", "steps", "gemm", "a"},
                               {"attention", "steps", "attention", "b"},
                               {"sampling", "steps", "sampling", "c"},
                               {"other", "steps", "other", "f"}};
  mr_text_adds(t, "<section class=\"card\"><h2>Where the time went</h2>");
  stacked(t, r, phases, sizeof phases / sizeof *phases, "time by phase");
  if (number(r, "batch", "steps") > 0) {
    mr_text_adds(t, "<h2 style=\"margin-top:18px\">Within the steps</h2>");
    stacked(t, r, steps, sizeof steps / sizeof *steps, "time within steps");
  }
  mr_text_adds(t, "</section>\n");
}

static void prediction_row(mr_text *t, const char *name, double said, double took) {
  char a[40], b[40];
  mr_text_addf(t, "<tr><td>%s</td><td>%s</td><td>%s</td><td>%+.0f %%</td></tr>", name,
               seconds_text(said, a, sizeof a), seconds_text(took, b, sizeof b),
               said > 0 ? 100 * (took / said - 1) : 0);
}

static void prediction_card(mr_text *t, const json_t *r) {
  static const char *const parts[][2] = {{"load", "load the model"},
                                         {"gemm", "matrix products"},
                                         {"attention", "attention"},
                                         {"other", "other in steps"},
                                         {"rest", "read rows, write results"}};
  const json_t *p = json_object_get(r, "prediction"), *all = json_object_get(p, "parts");
  if (!json_is_object(p))
    return;
  mr_text_adds(t, "<section class=\"card\"><h2>Predicted and actual</h2><table><tr><th></th>"
                  "<th>predicted</th><th>took</th><th>off by</th></tr>");
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    const json_t *one = json_object_get(all, parts[i][0]);
    prediction_row(t, parts[i][1], json_number_value(json_object_get(one, "predicted")),
                   json_number_value(json_object_get(one, "took")));
  }
  prediction_row(t, "all", number(r, "prediction", "predicted_seconds"),
                 number(r, "prediction", "took_seconds"));
  double share = number(r, "prediction", "share_of_tokens");
  mr_text_adds(t, "</table>");
  if (share < 0.95)
    mr_text_addf(t, "<p>Rows ended early: %.0f %% of the tokens that had been counted.</p>",
                 100 * share);
  mr_text_adds(t, "</section>\n");
}

static void work_card(mr_text *t, const json_t *r) {
  mr_text_adds(t, "<section class=\"card\"><h2>Work</h2><table>");
  row_count(t, "Rows", number(r, "rows", NULL));
  row_count(t, "Rows in this run", number(r, "rows_this_run", NULL));
  row_count(t, "Prompt tokens", number(r, "prompt_tokens", NULL));
  row_count(t, "Prompt tokens computed in this run", number(r, "prefill_tokens_computed", NULL));
  row_count(t, "Prompt tokens shared, not computed again",
            number(r, "prefill_tokens_shared", NULL));
  row_count(t, "Prompt tokens out of the prefix cache", number(r, "prefix_cache", "tokens"));
  row_count(t, "Output tokens", number(r, "output_tokens", NULL));
  row_brief(t, "Prompt tokens a second", number(r, "throughput", "prompt_tokens_per_s"), "");
  row_brief(t, "Rows a second", number(r, "throughput", "rows_per_s"), "");
  row_count(t, "Steps", number(r, "batch", "steps"));
  row_brief(t, "Tokens in a step, mean", number(r, "batch", "tokens_per_step"), "");
  row_brief(t, "Sequences in flight, mean", number(r, "batch", "sequences_mean"), "");
  row_count(t, "Sequences in flight, most", number(r, "batch", "sequences_max"));
  row_brief(t, "Peak memory", number(r, "peak_memory_bytes", NULL), "B");
  row_brief(t, "Keys and values spilled", number(r, "kv_spill_bytes", NULL), "B");
  row_brief(t, "Keys and values fetched", number(r, "kv_fetch_bytes", NULL), "B");
  row_count(t, "Earlier runs of this job", number(r, "runs", "earlier"));
  mr_text_adds(t, "</table></section>\n");
}

static void latency_row(mr_text *t, const json_t *r, const char *name, const char *key) {
  static const char *const columns[] = {"p50", "p90", "p99", "max"};
  mr_text_addf(t, "<tr><td>%s</td>", name);
  for (size_t i = 0; i < 4; i++) {
    char a[40];
    mr_text_addf(t, "<td>%s</td>", seconds_text(number(r, key, columns[i]) / 1000, a, sizeof a));
  }
  mr_text_adds(t, "</tr>");
}

static void latency_card(mr_text *t, const json_t *r) {
  if (number(r, "ttft_ms", "rows") <= 0)
    return;
  mr_text_adds(t, "<section class=\"card\"><h2>Latency of a "
                  "row</h2><table><tr><th></th><th>half</th><th>90 %</th>"
                  "<th>99 %</th><th>most</th></tr>");
  latency_row(t, r, "To the first token, from admission", "ttft_ms");
  latency_row(t, r, "Between tokens", "tpot_ms");
  mr_text_adds(t, "</table></section>\n");
}

static void score_row(mr_text *t, const char *group, const char *name, const json_t *m) {
  static const char *const columns[] = {"value", "low", "high"};
  char a[40];
  mr_text_adds(t, "<tr><td>");
  escaped(t, group);
  mr_text_addf(t, "%s%s</td>", *group ? " · " : "", name);
  for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
    const json_t *v = json_object_get(m, columns[i]);
    mr_text_addf(t, json_is_number(v) ? "<td>%.4f</td>" : "<td>–</td>", json_number_value(v));
  }
  mr_text_addf(
      t, "<td>%s</td></tr>",
      mr_progress_count((uint64_t)json_integer_value(json_object_get(m, "rows")), a, sizeof a));
}

static void score_rows(mr_text *t, const char *group, json_t *metrics) {
  const char *name;
  json_t *m;
  json_object_foreach(metrics, name, m) score_row(t, group, name, m);
}

static void score_card(mr_text *t, const json_t *r) {
  json_t *score = json_object_get(r, "score"), *groups = json_object_get(score, "groups"), *g;
  const char *name;
  int shown = 0;
  if (!score)
    return;
  mr_text_adds(t, "<section class=\"card\"><h2>Score</h2>");
  if (json_object_get(score, "error")) {
    mr_text_adds(t, "<p>");
    escaped(t, text(r, "score", "error"));
    mr_text_adds(t, "</p></section>\n");
    return;
  }
  mr_text_adds(t, "<table><tr><th></th><th>value</th><th>95 % from</th><th>to</th>"
                  "<th>rows</th></tr>");
  score_rows(t, "", json_object_get(score, "metrics"));
  json_object_foreach(groups, name, g) {
    if (shown++ < SCORE_GROUPS)
      score_rows(t, name, json_object_get(g, "metrics"));
  }
  mr_text_adds(t, "</table><table>");
  row_count(t, "Results without a reference", number(r, "score", "unreferenced"));
  row_count(t, "Missing, counted as wrong", number(r, "score", "missing"));
  mr_text_adds(t, "</table>");
  if (shown > SCORE_GROUPS)
    mr_text_addf(t, "<p>The first %d of %d groups; the others are in the JSON report.</p>",
                 SCORE_GROUPS, shown);
  mr_text_adds(t, "</section>\n");
}

static void errors_card(mr_text *t, const json_t *r) {
  const char *kind;
  json_t *n, *errors = json_object_get(r, "errors");
  if (json_object_size(errors) == 0)
    return;
  mr_text_adds(t, "<section class=\"card\"><h2>Failed rows</h2><table>");
  json_object_foreach(errors, kind, n) {
    char a[40];
    mr_text_adds(t, "<tr><td>");
    escaped(t, kind);
    mr_text_addf(t, "</td><td>%s</td></tr>",
                 mr_progress_count((uint64_t)json_integer_value(n), a, sizeof a));
  }
  mr_text_adds(t, "</table></section>\n");
}

static void setup_card(mr_text *t, const json_t *r) {
  mr_text_adds(t, "<section class=\"card\"><h2>What ran</h2><table>");
  row(t, "Model", text(r, "model", "path"));
  row(t, "Architecture", text(r, "engine", "arch"));
  row(t, "Numerics", text(r, "numerics", NULL));
  row_count(t, "Threads", number(r, "engine", "threads"));
  row_brief(t, "Memory for keys and values", number(r, "engine", "kv_memory_bytes"), "B");
  row_brief(t, "Peak arithmetic", number(r, "peaks", "ops_per_s"), "op/s");
  row_brief(t, "Peak bandwidth", number(r, "peaks", "bytes_per_s"), "B/s");
  row(t, "Peaks are", text(r, "peaks", "basis"));
  row(t, "Digest of the inputs", text(r, "digests", "inputs"));
  row(t, "Digest of the model", text(r, "digests", "model"));
  row(t, "Digest of the options", text(r, "digests", "options"));
  row(t, "Job", text(r, "job_id", NULL));
  row(t, "Version", text(r, "version", NULL));
  mr_text_adds(t, "</table></section>\n");
}

mr_code mr_report_html(const json_t *r, mr_text *t, mr_err *err) {
  const json_t *line = get(r, "timeline", NULL);
  const json_t *x = json_object_get(line, "seconds");
  mr_text_adds(
      t, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
         "content=\"width=device-width,initial-scale=1\"><title>");
  escaped(t, text(r, "output", NULL));
  mr_text_addf(t,
               " – millrace</title><style>\n%s</style></head><body><main>\n<h1>millrace "
               "report</h1><p class=\"sub\">",
               style);
  escaped(t, text(r, "output", NULL));
  mr_text_adds(t, " · ");
  escaped(t, text(r, "model", "name"));
  mr_text_adds(t, "</p>\n");
  tiles(t, r);
  chart(t, "Output tokens a second", x, json_object_get(line, "output_tokens_per_s"), "a");
  chart(t, "Sequences in flight", x, json_object_get(line, "sequences"), "b");
  score_card(t, r);
  time_card(t, r);
  prediction_card(t, r);
  errors_card(t, r);
  work_card(t, r);
  latency_card(t, r);
  setup_card(t, r);
  mr_text_adds(t, "</main></body></html>\n");
  return t->failed ? mr_err_set(err, MR_E_NOMEM, "out of memory for the report") : MR_OK;
}
