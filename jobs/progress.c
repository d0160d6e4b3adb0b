#include "jobs/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "io/durable.h"
#include "io/mem.h"
#include "io/sys.h"

#define BAR_S 0.2
#define LINE_S 30.0
#define JSON_S 5.0
#define METRICS_S 15.0
#define RATE_S 5.0 /* the present rate is measured over so long at least */
#define BAR_CELLS 20

struct mr_progress {
  mr_progress_kind kind;
  const char *metrics_file; /* borrowed; NULL: none */
  bool color, bar_open, metrics_failed;
  const char *phase;
  double start_s, printed_s, metrics_s;
  double run_s;            /* when the phase "run" began; 0: not yet */
  double mark_s, now_rate; /* the present rate, tokens/s, and where it is measured from */
  uint64_t mark_tokens;
};

static bool wants_color(void) {
  const char *no = getenv("NO_COLOR"), *term = getenv("TERM");
  return !(no && *no) && term && strcmp(term, "dumb") != 0;
}

mr_code mr_progress_open(mr_progress **out, mr_progress_kind kind, const char *metrics_file,
                         mr_err *err) {
  mr_progress *p = mr_mem_alloc(1, sizeof *p);
  if (!p)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  bool terminal = isatty(STDERR_FILENO);
  p->kind = kind == MR_PROGRESS_AUTO ? (terminal ? MR_PROGRESS_BAR : MR_PROGRESS_LINE) : kind;
  p->color = terminal && wants_color();
  p->metrics_file = metrics_file;
  p->start_s = mr_sys_seconds();
  *out = p;
  return MR_OK;
}

const char *mr_progress_duration(double seconds, char *buf, size_t cap) {
  unsigned long long s = seconds > 0 && seconds < 1e12 ? (unsigned long long)(seconds + 0.5) : 0;
  if (s >= 86400)
    snprintf(buf, cap, "%llud%02lluh", s / 86400, s % 86400 / 3600);
  else if (s >= 3600)
    snprintf(buf, cap, "%lluh%02llum", s / 3600, s % 3600 / 60);
  else if (s >= 60)
    snprintf(buf, cap, "%llum%02llus", s / 60, s % 60);
  else
    snprintf(buf, cap, "%llus", s);
  return buf;
}

const char *mr_progress_count(uint64_t n, char *buf, size_t cap) {
  char digits[24];
  int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
  size_t o = 0;
  for (int i = 0; i < len && o + 2 < cap; i++) {
    if (i > 0 && (len - i) % 3 == 0)
      buf[o++] = ',';
    buf[o++] = digits[i];
  }
  buf[o] = '\0';
  return buf;
}

static double mean_rate(const mr_progress *p, const mr_progress_now *now) {
  double s = p->run_s > 0 ? mr_sys_seconds() - p->run_s : 0;
  return s > 0 ? (double)now->output_tokens / s : 0;
}

/* Seconds left, or -1 while there is nothing to judge by. */
static double eta_s(const mr_progress *p, const mr_progress_now *now) {
  double s = p->run_s > 0 ? mr_sys_seconds() - p->run_s : 0;
  if (s <= 0 || now->work_done <= 0 || now->work <= now->work_done)
    return -1;
  return s * (now->work - now->work_done) / now->work_done;
}

static void measure_rate(mr_progress *p, const mr_progress_now *now) {
  double t = mr_sys_seconds();
  if (p->mark_s <= 0 || now->output_tokens < p->mark_tokens) {
    p->mark_s = t;
    p->mark_tokens = now->output_tokens;
  } else if (t - p->mark_s >= RATE_S) {
    p->now_rate = (double)(now->output_tokens - p->mark_tokens) / (t - p->mark_s);
    p->mark_s = t;
    p->mark_tokens = now->output_tokens;
  }
}

void mr_progress_words(const mr_progress *p, const mr_progress_now *now, mr_text *out) {
  char a[32], b[32];
  mr_text_adds(out, now->phase);
  if (now->rows)
    mr_text_addf(out, "  %s/%s rows", mr_progress_count(now->rows_done, a, sizeof a),
                 mr_progress_count(now->rows, b, sizeof b));
  else
    mr_text_addf(out, "  %s rows", mr_progress_count(now->rows_done, a, sizeof a));
  if (now->rows_failed)
    mr_text_addf(out, "  %s failed", mr_progress_count(now->rows_failed, a, sizeof a));
  if (p->run_s > 0)
    mr_text_addf(out, "  %.0f tok/s now, %.0f mean",
                 p->now_rate > 0 ? p->now_rate : mean_rate(p, now), mean_rate(p, now));
  double left = eta_s(p, now);
  if (left >= 0)
    mr_text_addf(out, "  ETA %s", mr_progress_duration(left, a, sizeof a));
  if (now->batch)
    mr_text_addf(out, "  batch %d", now->batch);
  if (now->memory_bytes)
    mr_text_addf(out, "  %.1f GiB", (double)now->memory_bytes / (double)(1u << 30));
}

void mr_progress_json(const mr_progress *p, const mr_progress_now *now, mr_text *out) {
  double left = eta_s(p, now);
  mr_text_addf(
      out,
      "{\"phase\":\"%s\",\"seconds\":%.1f,\"rows\":%llu,\"rows_done\":%llu,\"rows_failed\":%llu,"
      "\"prompt_tokens\":%llu,\"output_tokens\":%llu,\"tokens_per_s\":%.1f,\"tokens_per_s_mean\":%."
      "1f,",
      now->phase, mr_sys_seconds() - p->start_s, (unsigned long long)now->rows,
      (unsigned long long)now->rows_done, (unsigned long long)now->rows_failed,
      (unsigned long long)now->prompt_tokens, (unsigned long long)now->output_tokens, p->now_rate,
      mean_rate(p, now));
  if (left >= 0)
    mr_text_addf(out, "\"eta_seconds\":%.0f,", left);
  mr_text_addf(out, "\"batch\":%d,\"memory_bytes\":%llu}", now->batch,
               (unsigned long long)now->memory_bytes);
}

static void metric(mr_text *t, const char *name, const char *type, const char *help, double value) {
  mr_text_addf(t, "# HELP millrace_%s %s\n# TYPE millrace_%s %s\nmillrace_%s %.17g\n", name, help,
               name, type, name, value);
}

void mr_progress_metrics(const mr_progress *p, const mr_progress_now *now, mr_text *t) {
  metric(t, "rows", "gauge", "Rows of the job.", (double)now->rows);
  metric(t, "rows_done", "gauge", "Rows finished, failed ones too.", (double)now->rows_done);
  metric(t, "rows_failed", "gauge", "Rows that failed.", (double)now->rows_failed);
  metric(t, "prompt_tokens_total", "counter", "Prompt tokens computed by this run.",
         (double)now->prompt_tokens);
  metric(t, "output_tokens_total", "counter", "Tokens generated by this run.",
         (double)now->output_tokens);
  metric(t, "output_tokens_per_second", "gauge", "Tokens generated a second, lately.", p->now_rate);
  metric(t, "batch_sequences", "gauge", "Sequences in flight.", now->batch);
  metric(t, "memory_peak_bytes", "gauge", "Peak resident memory.", (double)now->memory_bytes);
  metric(t, "run_seconds_total", "counter", "Seconds since this run began.",
         mr_sys_seconds() - p->start_s);
  double left = eta_s(p, now);
  if (left >= 0)
    metric(t, "eta_seconds", "gauge", "Estimated seconds left.", left);
  mr_text_addf(t,
               "# HELP millrace_phase The phase that the run is in.\n# TYPE millrace_phase gauge\n"
               "millrace_phase{phase=\"%s\"} 1\n",
               now->phase);
}

/* What fits beside the bar on one line of the terminal: a wrapped line could not be redrawn. */
static int room_for_words(void) {
  struct winsize w;
  int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
  int room = columns - BAR_CELLS - 10;
  return room > 0 ? room : 0;
}

static void draw_bar(mr_progress *p, const mr_progress_now *now, const mr_text *words) {
  double share = now->work > 0 ? now->work_done / now->work
                 : now->rows   ? (double)now->rows_done / (double)now->rows
                               : 0;
  char cells[BAR_CELLS + 1];
  for (int i = 0; i < BAR_CELLS; i++)
    cells[i] = (i + 0.5) / BAR_CELLS < share ? '#' : '-';
  cells[BAR_CELLS] = '\0';
  fprintf(stderr, "\r%s[%s]%s %3.0f%%  %.*s\033[K", p->color ? "\033[36m" : "", cells,
          p->color ? "\033[0m" : "", share > 1 ? 100 : share * 100, room_for_words(), words->data);
  fflush(stderr);
  p->bar_open = true;
}

static void print(mr_progress *p, const mr_progress_now *now, bool force) {
  mr_text t = {0};
  if (p->kind == MR_PROGRESS_JSON)
    mr_progress_json(p, now, &t);
  else
    mr_progress_words(p, now, &t);
  if (t.failed || !t.data) {
    mr_text_free(&t);
    return;
  }
  if (p->kind == MR_PROGRESS_BAR && !force)
    draw_bar(p, now, &t);
  else if (p->kind == MR_PROGRESS_JSON)
    fprintf(stderr, "%s\n", t.data);
  else
    fprintf(stderr, "%smillrace: %s\n", p->bar_open ? "\n" : "", t.data);
  mr_text_free(&t);
}

static void write_metrics(mr_progress *p, const mr_progress_now *now) {
  mr_text t = {0};
  mr_err e = MR_ERR_INIT;
  mr_progress_metrics(p, now, &t);
  if (!t.failed && mr_durable_write(p->metrics_file, t.data, t.len, &e) && !p->metrics_failed) {
    mr_err_print(&e, stderr); /* once: metrics never stop a job */
    p->metrics_failed = true;
  }
  mr_text_free(&t);
}

void mr_progress_update(mr_progress *p, const mr_progress_now *now, bool force) {
  static const double period[] = {LINE_S, LINE_S, LINE_S, BAR_S, JSON_S}; /* by mr_progress_kind */
  double t = mr_sys_seconds();
  bool changed = p->phase == NULL || strcmp(p->phase, now->phase) != 0;
  bool last = !strcmp(now->phase, "done") || !strcmp(now->phase, "stopped");
  p->phase = now->phase;
  if (changed && !strcmp(now->phase, "run"))
    p->run_s = t;
  if (p->run_s > 0)
    measure_rate(p, now);
  bool due = changed ? !last || p->kind != MR_PROGRESS_LINE : t - p->printed_s >= period[p->kind];
  if (force || (p->kind != MR_PROGRESS_NONE && due)) {
    print(p, now, force);
    p->printed_s = t;
  }
  if (p->metrics_file && (changed || last || t - p->metrics_s >= METRICS_S)) {
    write_metrics(p, now);
    p->metrics_s = t;
  }
}

void mr_progress_close(mr_progress *p) {
  if (!p)
    return;
  if (p->bar_open)
    fputc('\n', stderr);
  mr_mem_free(p);
}
