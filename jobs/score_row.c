#include "jobs/score_row.h"

#include <math.h>
#include <string.h>

#include "io/json.h"
#include "jobs/refs.h"

#define BIT(metric) (1u << MR_METRIC_##metric)

const unsigned mr_metrics_of_text = BIT(EXACT_MATCH) | BIT(CONTAINS) | BIT(REGEX) | BIT(NUMBER) |
                                    BIT(F1) | BIT(ROUGE_L) | BIT(JSON_VALID);
const unsigned mr_metrics_referenced = BIT(EXACT_MATCH) | BIT(CONTAINS) | BIT(NUMBER) | BIT(F1) |
                                       BIT(ROUGE_L) | BIT(CHOICE) | BIT(CHOICE_NORMALIZED);
const unsigned mr_metrics_of_missing = BIT(EXACT_MATCH) | BIT(CONTAINS) | BIT(REGEX) | BIT(NUMBER) |
                                       BIT(F1) | BIT(ROUGE_L) | BIT(CHOICE) |
                                       BIT(CHOICE_NORMALIZED) | BIT(JSON_VALID);

typedef struct scorer {
  const mr_score_rules *rules;
  const mr_score_line *line;
  const json_t *answers;
  mr_score_values *v;
  unsigned wanted; /* of the metrics of texts */
  bool failed;     /* memory */
} scorer;

static mr_str str_of(const mr_text *t) {
  return (mr_str){t->data ? t->data : "", t->len};
}

static void put(mr_score_values *v, mr_metric m, double value, double weight) {
  v->has |= 1u << m;
  v->value[m] = value;
  v->weight[m] = weight;
}

/* ------------------------------------------------------------------ texts */

/* One metric of one output against one acceptable text. -2: it cannot be told. */
static double against(scorer *s, mr_metric m, mr_str answer, mr_str ref) {
  double x = 0;
  switch (m) {
  case MR_METRIC_NUMBER:
    return mr_score_same_number(answer, ref);
  case MR_METRIC_F1:
    x = mr_score_f1(answer, ref);
    break;
  case MR_METRIC_ROUGE_L:
    x = mr_score_rouge_l(answer, ref);
    break;
  default: {
    mr_str a = str_of(&s->v->norm), b;
    mr_text_clear(&s->v->norm_ref);
    mr_score_normalize(ref, s->rules->ignore, &s->v->norm_ref);
    b = str_of(&s->v->norm_ref);
    s->failed |= s->v->norm_ref.failed;
    x = m == MR_METRIC_CONTAINS ? mr_score_contains(a, b)
                                : a.len == b.len && (!a.len || !memcmp(a.s, b.s, a.len));
  }
  }
  s->failed |= x == -1;
  return x;
}

static double best_of_refs(scorer *s, mr_metric m, mr_str answer) {
  double best = -2;
  for (size_t i = 0; i < json_array_size(s->answers); i++) {
    mr_text_clear(&s->v->ref);
    mr_refs_text(json_array_get(s->answers, i), &s->v->ref);
    s->failed |= s->v->ref.failed;
    double x = against(s, m, answer, str_of(&s->v->ref));
    best = x > best ? x : best;
  }
  return best;
}

static double is_json(scorer *s, mr_str answer) {
  mr_err why = MR_ERR_INIT;
  json_t *o = mr_json_parse(answer.s, answer.len, NULL, &why);
  s->failed |= why.code == MR_E_NOMEM;
  json_decref(o);
  return o != NULL;
}

/* The part of output i that counts; false: the pattern is not in it. */
static bool extract(scorer *s, int i, mr_str *answer) {
  *answer = mr_score_line_output(s->line, i);
  if (!s->rules->extract)
    return true;
  size_t from = 0, to = 0;
  switch (mr_extract_find(s->rules->extract, answer->s, answer->len, &from, &to)) {
  case MR_EXTRACT_FOUND:
    *answer = (mr_str){answer->s + from, to - from};
    return true;
  case MR_EXTRACT_NOMEM:
    s->failed = true;
    return false;
  case MR_EXTRACT_LIMIT:
    s->v->limited = true;
    return false;
  default:
    s->v->unextracted = true;
    return false;
  }
}

static void score_output(scorer *s, int i, double values[MR_METRICS]) {
  mr_str answer;
  bool found = extract(s, i, &answer);
  if (i == 0 && found) {
    mr_text_add(&s->v->answer, answer.s, answer.len);
    s->v->has_answer = true;
  }
  mr_text_clear(&s->v->norm);
  if (found)
    mr_score_normalize(answer, s->rules->ignore, &s->v->norm);
  s->failed |= s->v->norm.failed;
  for (int m = 0; m < MR_METRICS && !s->failed; m++) {
    if (!(s->wanted & 1u << m))
      continue;
    values[m] = !found                      ? 0
                : m == MR_METRIC_REGEX      ? 1
                : m == MR_METRIC_JSON_VALID ? is_json(s, answer)
                                            : best_of_refs(s, (mr_metric)m, answer);
  }
}

static void score_texts(scorer *s) {
  double sum[MR_METRICS] = {0}, values[MR_METRICS] = {0};
  int n = s->rules->outputs == MR_OUTPUTS_FIRST ? 1 : s->line->n_outputs;
  unsigned untold = 0;
  for (int i = 0; i < n && !s->failed; i++) {
    score_output(s, i, values);
    for (int m = 0; m < MR_METRICS; m++) {
      untold |= values[m] < 0 ? 1u << m : 0;
      sum[m] = s->rules->outputs == MR_OUTPUTS_BEST ? fmax(sum[m], values[m]) : sum[m] + values[m];
    }
  }
  double by = s->rules->outputs == MR_OUTPUTS_MEAN ? n : 1;
  for (int m = 0; m < MR_METRICS; m++)
    if (s->wanted & ~untold & 1u << m)
      put(s->v, (mr_metric)m, sum[m] / by, 1);
}

/* ------------------------------------------------------------------ choices, probabilities */

static void score_choice(scorer *s, mr_metric m) {
  int best = mr_score_line_best(s->line, m == MR_METRIC_CHOICE_NORMALIZED);
  bool labelled = false, right = false;
  for (size_t i = 0; best >= 0 && i < json_array_size(s->answers); i++) {
    const json_t *a = json_array_get(s->answers, i);
    mr_text_clear(&s->v->ref);
    mr_refs_text(a, &s->v->ref);
    s->failed |= s->v->ref.failed;
    int label = json_is_boolean(a) ? json_is_true(a) : mr_score_label(str_of(&s->v->ref));
    labelled |= label >= 0;
    right |= label == best;
  }
  if (labelled)
    put(s->v, m, right, 1);
}

/* The bytes of the only acceptable text, for a line that does not hold what it scored. */
static double bytes_of_ref(scorer *s) {
  const json_t *a = json_array_get(s->answers, 0);
  return json_array_size(s->answers) == 1 ? (double)json_string_length(a) : 0;
}

static void score_logprobs(scorer *s, unsigned metrics) {
  double sum, tokens, bytes;
  if (!mr_score_line_logprobs(s->line, &sum, &tokens, &bytes))
    return;
  if (metrics & BIT(PERPLEXITY))
    put(s->v, MR_METRIC_PERPLEXITY, -sum, tokens);
  if (bytes == 0 && s->line->n_outputs == 0)
    bytes = bytes_of_ref(s);
  if (metrics & BIT(BITS_PER_BYTE) && bytes > 0)
    put(s->v, MR_METRIC_BITS_PER_BYTE, -sum / M_LN2, bytes);
}

mr_code mr_score_row(const mr_score_rules *rules, const mr_score_line *line, const json_t *answers,
                     mr_score_values *out, mr_err *err) {
  unsigned metrics = rules->metrics;
  scorer s = {.rules = rules, .line = line, .answers = answers, .v = out};
  out->has = 0;
  out->unextracted = out->limited = out->has_answer = false;
  mr_text_clear(&out->answer);
  if (!answers)
    metrics &= ~mr_metrics_referenced;
  bool other = line->n_outputs || mr_score_line_best(line, false) >= 0;
  if (rules->by_kind && other)
    metrics &= ~(BIT(PERPLEXITY) | BIT(BITS_PER_BYTE));
  s.wanted = metrics & mr_metrics_of_text;
  if (s.wanted && line->n_outputs)
    score_texts(&s);
  for (int m = MR_METRIC_CHOICE; m <= MR_METRIC_CHOICE_NORMALIZED; m++)
    if (metrics & 1u << m)
      score_choice(&s, (mr_metric)m);
  if (metrics & (BIT(PERPLEXITY) | BIT(BITS_PER_BYTE)))
    score_logprobs(&s, metrics);
  return s.failed || out->answer.failed ? mr_err_set(err, MR_E_NOMEM, "out of memory for a score")
                                        : MR_OK;
}

void mr_score_values_free(mr_score_values *v) {
  mr_text_free(&v->answer);
  mr_text_free(&v->ref);
  mr_text_free(&v->norm);
  mr_text_free(&v->norm_ref);
}
