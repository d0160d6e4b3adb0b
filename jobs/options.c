#include "jobs/options.h"

#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "jobs/adapters.h"
#include "jobs/options_int.h"
#include "jobs/outname.h"
#include "jobs/params.h"

#define JOB_FILE_MAX (64u << 20)

#define AT(field) offsetof(mr_job, field)
#define RUN (1u << MR_CMD_RUN | 1u << MR_CMD_PLAN)
#define MERGE (1u << MR_CMD_MERGE)
#define SCORE (1u << MR_CMD_SCORE)
#define JSON (1u << MR_CMD_PLAN | 1u << MR_CMD_STATUS | 1u << MR_CMD_CHECK | SCORE)

const option mr_options[] = {
    {"model", 'm', K_TEXT, AT(model), 0, "PATH", RUN,
     "the model: a GGUF file or a Hugging Face directory"},
    {"lora", 0, K_ADAPTER, 0, 0, "NAME=DIR", RUN,
     "a PEFT adapter for the rows whose model is NAME; may be given again"},
    {"output", 'o', K_TEXT, AT(output), 0, "OUT", RUN,
     "results: OUT.jsonl.zst (or .jsonl, .jsonl.gz), or - for standard output"},
    {"output", 'o', K_TEXT, AT(output), 0, "OUT", MERGE,
     "results: OUT.jsonl.zst (or .jsonl, .jsonl.gz)"},
    {"output", 'o', K_TEXT, AT(output), 0, "OUT", SCORE,
     "the scores of each row, in OUT.jsonl.zst (or .jsonl, .jsonl.gz)"},
    {"defaults", 0, K_DEFAULTS, 0, 0, "FILE|JSON", RUN,
     "body parameters for rows that do not set them"},
    {"max-tokens", 0, K_PARAM, 0, 0, "N", RUN,
     "default of max_tokens (else what the context leaves)"},
    {"temperature", 0, K_PARAM, 0, 0, "X", RUN, "default of temperature (else 1)"},
    {"top-p", 0, K_PARAM, 0, 0, "X", RUN, "default of top_p (else 1)"},
    {"top-k", 0, K_PARAM, 0, 0, "N", RUN, "default of top_k (else all tokens)"},
    {"min-p", 0, K_PARAM, 0, 0, "X", RUN, "default of min_p (else 0)"},
    {"seed", 0, K_PARAM, 0, 0, "N", RUN, "default of seed"},
    {"stop", 0, K_PARAM, 0, 0, "TEXT", RUN, "default of stop; may be given again"},
    {"long-prompt", 0, K_CHOICE, AT(long_prompt), 0, "error|truncate-left", RUN,
     "what to do with a prompt that is longer than the context"},
    {"duplicates", 0, K_CHOICE, AT(duplicates), 0, "error-row|refuse", RUN,
     "a repeated id: an error row, or no run at all"},
    {"max-line", 0, K_SIZE, AT(max_line), 0, "SIZE", RUN, "longest input line (16MiB)"},
    {"keep-prompt", 0, K_FLAG, AT(keep_prompt), 0, NULL, RUN,
     "plain rows come back with their prompt"},
    {"order", 0, K_CHOICE01, AT(completion_order), 0, "input|completion", RUN,
     "order of the results"},
    {"tolerate", 0, K_TOLERATE, 0, 0, "N|P%", RUN | MERGE | SCORE,
     "exit 0 although so many rows failed or are missing"},
    {"until", 0, K_CLOCK, AT(until_min), 0, "HH:MM", RUN,
     "stop at this time of day, to be resumed"},
    {"time-limit", 0, K_DURATION, AT(time_limit_s), 0, "D", RUN,
     "stop after this time (90s, 15m, 8h)"},
    {"expire", 0, K_FLAG, AT(expire), 0, NULL, RUN,
     "at the deadline write the rows left as batch_expired and finish"},
    {"shard", 0, K_SHARD, AT(shard), 0, "I/N", RUN,
     "only this part of the rows; \"slurm\": by the task of a Slurm array"},
    {"created", 0, K_SECONDS, AT(created), 0, "SECONDS", RUN,
     "the job's time, in templates and results (since 1970; now)"},
    {"compute", 0, K_CHOICE, AT(compute), 0, "fast|exact", RUN,
     "fast may quantize activations; exact is float32 throughout"},
    {"device", 0, K_TEXT, AT(device), 0, "NAME", RUN,
     "auto, cpu, cuda[:N], hip[:N], sim[:wave64] (see millrace devices)"},
    {"device-memory", 0, K_SIZE, AT(device_memory), 0, "SIZE", RUN,
     "memory of a GPU that is taken (nine tenths of what is free)"},
    {"device-weights", 0, K_CHOICE, AT(device_weights), 0, "auto|bf16|int8|int4", RUN,
     "how a GPU holds weights (4 or 8 bits where the file has no more; int8 where bf16 does not "
     "fit)"},
    {"device-gemm", 0, K_CHOICE, AT(device_gemm), 0, "own|library", RUN,
     "whose products of bfloat16 a GPU uses: cublasLt's or hipBLASLt's where their bits do not "
     "depend on the batch"},
    {"other-numerics", 0, K_FLAG, AT(other_numerics), 0, NULL, RUN,
     "go on with a job that was begun on another device or instruction set: what is done stays"},
    {"threads", 0, K_INT, AT(threads), 1, "N", RUN, "threads (all CPUs that the process may use)"},
    {"pin", 0, K_FLAG, AT(pin), 0, NULL, RUN, "bind each thread to a CPU"},
    {"max-batch", 0, K_INT, AT(max_batch), 1, "N", RUN, "rows in flight at most (chosen)"},
    {"max-step-tokens", 0, K_INT, AT(max_step_tokens), 1, "N", RUN,
     "tokens a step at most (chosen)"},
    {"context", 0, K_INT, AT(context), 1, "N", RUN, "caps the model's context, in tokens"},
    {"kv-memory", 0, K_SIZE, AT(kv_memory), 0, "SIZE", RUN, "memory for keys and values (chosen)"},
    {"kv-disk", 0, K_SIZE0, AT(kv_disk), 0, "SIZE", RUN,
     "disk for keys and values when memory runs out (0)"},
    {"spill-dir", 0, K_TEXT, AT(spill_dir), 0, "DIR", RUN, "where that is (/var/tmp)"},
    {"kv-policy", 0, K_CHOICE, AT(kv_policy), 0, "auto|fewer|spill|recompute", RUN,
     "when memory for keys and values runs out: what costs least; fewer rows at once; to disk and "
     "back; compute again"},
    {"kv-type", 0, K_CHOICE, AT(kv_type), 0, "f32|f16|bf16|int8|q4|fp8", RUN,
     "type of keys and values (bf16 with AMX, int8 with AVX-512, else f16; f32 with --compute "
     "exact)"},
    {"prefix-sharing", 0, K_CHOICE01, AT(no_prefix_sharing), 0, "on|off", RUN,
     "compute what prompts begin with alike once (on)"},
    {"prefix-cache", 0, K_TEXT, AT(prefix_cache), 0, "DIR", RUN,
     "keep shared beginnings of prompts for later runs, and take them from there (none)"},
    {"prefix-cache-size", 0, K_SIZE, AT(prefix_cache_bytes), 0, "SIZE", RUN,
     "what is kept there; the least recently used goes first (4GiB)"},
    {"level", 0, K_LEVEL, AT(zstd_level), 1, "N", RUN | MERGE | SCORE,
     "compression level of the results, 1 to 19 (3)"},
    {"progress", 0, K_CHOICE, AT(progress), 0, "auto|none|line|bar|json", RUN,
     "progress on standard error; none: not a word unless something is wrong"},
    {"metrics-file", 0, K_TEXT, AT(metrics_file), 0, "PATH", RUN,
     "write Prometheus metrics to this file"},
    {"score-ref", 0, K_LIST, AT(score.refs), 0, "FILE", RUN | SCORE,
     "references: lines {\"id\", \"answer\"}; may be given again"},
    {"score-ref-field", 0, K_TEXT, AT(score.ref_field), 0, "NAME", RUN | SCORE,
     "the field with the answer (answer, target, label, reference); of the results without a FILE"},
    {"score-metric", 0, K_NAMES, AT(score.metrics), 0, MR_METRIC_NAMES, RUN | SCORE,
     "what to compute; may be given again"},
    {"score-extract", 0, K_TEXT, AT(score.extract), 0, "PATTERN", RUN | SCORE,
     "take the first group of this pattern as the answer"},
    {"score-extract-match", 0, K_CHOICE, AT(score.extract_last), 0, "first|last", RUN | SCORE,
     "of several matches"},
    {"score-ignore", 0, K_NAMES, AT(score.ignore), 0, MR_IGNORE_NAMES, RUN | SCORE,
     "what exact_match and contains pass over (space)"},
    {"score-outputs", 0, K_CHOICE, AT(score.outputs), 0, "mean|best|first", RUN | SCORE,
     "how a row with several outputs counts"},
    {"score-missing", 0, K_CHOICE, AT(score.skip_missing), 0, "wrong|skip", RUN | SCORE,
     "how rows without a result count"},
    {"score-by", 0, K_TEXT, AT(score.by), 0, "FIELD", RUN | SCORE,
     "scores for each value of this field"},
    {"json", 0, K_FLAG, AT(json), 0, NULL, JSON, "print JSON"},
    {"help", 'h', K_FLAG, AT(help), 0, NULL, ~0u, "print this page"},
};
#define N_OPTIONS (sizeof mr_options / sizeof *mr_options)
const size_t mr_n_options = N_OPTIONS;

const char *mr_option_name(const option *o, mr_command cmd) {
  bool own = cmd == MR_CMD_SCORE && !strncmp(o->name, "score-", 6);
  return o->name + (own ? 6 : 0);
}

void mr_job_init(mr_job *j) {
  *j = (mr_job){.kv_type = -1,
                .until_min = -1,
                .created = -1,
                .max_line = 16u << 20,
                .zstd_level = 3,
                .prefix_cache_bytes = (uint64_t)4 << 30};
}

static void free_inputs(mr_job *j) {
  mr_list l = {j->inputs, j->n_inputs};
  mr_list_free(&l);
  j->inputs = NULL;
  j->n_inputs = 0;
}

void mr_job_free(mr_job *j) {
  mr_adapters_free(j);
  free_inputs(j);
  mr_mem_free(j->job_file);
  mr_mem_free(j->model);
  mr_mem_free(j->output);
  mr_mem_free(j->base);
  mr_mem_free(j->device);
  mr_mem_free(j->metrics_file);
  mr_mem_free(j->spill_dir);
  mr_mem_free(j->prefix_cache);
  mr_list_free(&j->score.refs);
  mr_mem_free(j->score.ref_field);
  mr_mem_free(j->score.extract);
  mr_mem_free(j->score.by);
  json_decref(j->defaults);
  mr_job_init(j);
}

/* ------------------------------------------------------------------ setting one option */

typedef mr_option_origin origin;

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for the options");
}

static mr_code set_text(char **at, const char *s, mr_err *err) {
  char *copy = mr_mem_copy(s, strlen(s));
  if (!copy)
    return no_memory(err);
  mr_mem_free(*at);
  *at = copy;
  return MR_OK;
}

static bool read_choice(const char *choices, const char *s, int *value) {
  size_t len = strlen(s);
  for (int i = 0;; i++) {
    size_t n = strcspn(choices, "|");
    if (n == len && !memcmp(choices, s, n)) {
      *value = i;
      return true;
    }
    if (!choices[n])
      return false;
    choices += n + 1;
  }
}

/* Adds names with commas between them to a set. */
static bool add_names(unsigned *set, const char *choices, const char *s) {
  char name[32];
  for (;;) {
    size_t n = strcspn(s, ",");
    int i;
    if (n >= sizeof name)
      return false;
    memcpy(name, s, n);
    name[n] = '\0';
    if (!read_choice(choices, name, &i))
      return false;
    *set |= 1u << i;
    if (!s[n])
      return true;
    s += n + 1;
  }
}

static bool read_int(const char *s, int min, int max, int *value) {
  int64_t v;
  if (!mr_parse_int(s, &v) || v < min || v > max)
    return false;
  *value = (int)v;
  return true;
}

static bool read_tolerate(mr_job *j, const char *s) {
  char number[64];
  size_t n = strlen(s);
  if (!n || n >= sizeof number)
    return false;
  memcpy(number, s, n + 1);
  bool percent = number[n - 1] == '%';
  if (percent)
    number[n - 1] = '\0';
  double v;
  if (!mr_parse_real(number, &v) || v < 0 || (percent && v > 100))
    return false;
  j->tolerate = percent ? v / 100 : v;
  j->tolerate_percent = percent;
  return true;
}

static const char *wanted(const option *o) {
  switch (o->kind) {
  case K_INT:
    return "a whole number from 1 to 2147483647";
  case K_LEVEL:
    return "a whole number from 1 to 19";
  case K_SIZE:
  case K_SIZE0:
    return "a size such as 512MiB or 2GiB";
  case K_DURATION:
    return "a time such as 90s, 15m or 8h";
  case K_CLOCK:
    return "a time of day HH:MM";
  case K_SECONDS:
    return "a whole number of seconds since 1970";
  case K_SHARD:
    return "a string such as \"1/8\"";
  case K_TOLERATE:
    return "a number of rows, or a share such as 5%";
  case K_LIST:
    return "a string, or a list of strings";
  default:
    return o->arg ? o->arg : "true or false";
  }
}

/* The scalar kinds, from their text. False: not one. */
static bool set_scalar(mr_job *j, const option *o, const char *s) {
  char *at = (char *)j + o->at;
  int choice = 0;
  switch (o->kind) {
  case K_INT:
    return read_int(s, o->min, INT_MAX, (int *)(void *)at);
  case K_LEVEL:
    return read_int(s, o->min, 19, (int *)(void *)at);
  case K_SIZE:
    return mr_parse_size(s, (uint64_t *)(void *)at) && *(uint64_t *)(void *)at > 0;
  case K_SIZE0:
    return mr_parse_size(s, (uint64_t *)(void *)at);
  case K_DURATION:
    return mr_parse_duration(s, (double *)(void *)at) && *(double *)(void *)at > 0;
  case K_CLOCK:
    return mr_parse_clock(s, (int *)(void *)at);
  case K_SECONDS:
    return mr_parse_int(s, (int64_t *)(void *)at) && *(int64_t *)(void *)at >= 0;
  case K_CHOICE:
    return read_choice(o->arg, s, (int *)(void *)at);
  case K_CHOICE01:
    if (!read_choice(o->arg, s, &choice))
      return false;
    *(bool *)(void *)at = choice == 1;
    return true;
  case K_TOLERATE:
    return read_tolerate(j, s);
  case K_NAMES:
    return add_names((unsigned *)(void *)at, o->arg, s);
  default:
    return false;
  }
}

static mr_code set_from_text(mr_job *j, const option *o, const char *s, const origin *from,
                             mr_err *err) {
  void *at = (char *)j + o->at;
  if ((o->kind == K_TEXT || o->kind == K_LIST) && !*s)
    return mr_err_at(err, from->code, from->file, 0, -1, "%s%s is empty", from->prefix,
                     mr_option_name(o, from->cmd));
  if (o->kind == K_TEXT)
    return set_text(at, s, err);
  if (o->kind == K_LIST)
    return mr_list_add(at, s, err);
  const char *why = NULL;
  if (o->kind == K_SHARD ? mr_shard_parse(s, &j->shard, &why) : set_scalar(j, o, s))
    return MR_OK;
  return mr_err_at(err, from->code, from->file, 0, -1, "%s%s %s: %s%s", from->prefix,
                   mr_option_name(o, from->cmd), s, why ? "" : "it must be ",
                   why ? why : wanted(o));
}

/* ------------------------------------------------------------------ defaults of rows */

static mr_code need_defaults(mr_job *j, mr_err *err) {
  if (!j->defaults)
    j->defaults = json_object();
  return j->defaults ? MR_OK : no_memory(err);
}

static mr_code check_defaults(const mr_job *j, const origin *from, mr_err *err) {
  mr_row_error why = {0};
  if (mr_params_check_defaults(j->defaults, &why))
    return MR_OK;
  return mr_err_at(err, from->code, from->file, 0, -1, "defaults: %s", why.message);
}

static mr_code set_defaults(mr_job *j, const json_t *object, const origin *from, mr_err *err) {
  if (!json_is_object(object))
    return mr_err_at(err, from->code, from->file, 0, -1,
                     "%sdefaults must be a JSON object of body parameters", from->prefix);
  mr_code rc = need_defaults(j, err);
  if (rc == MR_OK && json_object_update(j->defaults, (json_t *)(uintptr_t)object))
    rc = no_memory(err);
  return rc == MR_OK ? check_defaults(j, from, err) : rc;
}

static mr_code set_defaults_text(mr_job *j, const char *s, const origin *from, mr_err *err) {
  mr_err why = MR_ERR_INIT;
  json_t *v =
      *s == '{' ? mr_json_parse(s, strlen(s), NULL, &why) : mr_json_read(s, JOB_FILE_MAX, &why);
  if (!v)
    return mr_err_at(err, why.code == MR_E_DATA ? from->code : why.code,
                     why.file[0] ? why.file : NULL, why.line, why.offset, "%sdefaults: %s",
                     from->prefix, why.text);
  mr_code rc = set_defaults(j, v, from, err);
  json_decref(v);
  return rc;
}

/* Takes v. A body parameter's name is the option's with _ for -. */
static mr_code set_param(mr_job *j, const option *o, json_t *v, const origin *from, mr_err *err) {
  char name[32];
  size_t n = strlen(o->name);
  memcpy(name, o->name, n + 1);
  for (char *p = name; *p; p++)
    if (*p == '-')
      *p = '_';
  mr_code rc = v ? need_defaults(j, err) : no_memory(err);
  if (rc != MR_OK || json_object_set(j->defaults, name, v))
    rc = no_memory(err);
  json_decref(v);
  return rc == MR_OK ? check_defaults(j, from, err) : rc;
}

/* A parameter from the command line: a number where the text is one; --stop gathers texts. */
static mr_code set_param_text(mr_job *j, const option *o, const char *s, bool *stop_given,
                              const origin *from, mr_err *err) {
  if (!strcmp(o->name, "stop")) {
    json_t *list =
        *stop_given && j->defaults ? json_incref(json_object_get(j->defaults, "stop")) : NULL;
    if (!list)
      list = json_array();
    if (list && json_array_append_new(list, json_string(s))) {
      json_decref(list);
      return mr_err_at(err, from->code, from->file, 0, -1, "--stop: the text is not valid UTF-8");
    }
    *stop_given = true;
    return set_param(j, o, list, from, err);
  }
  int64_t whole;
  double real;
  json_t *v = mr_parse_int(s, &whole)   ? json_integer(whole)
              : mr_parse_real(s, &real) ? json_real(real)
                                        : json_string(s);
  return set_param(j, o, v, from, err);
}

/* ------------------------------------------------------------------ JOB.json */

static const option *find(const char *name, mr_command cmd) {
  for (size_t i = 0; i < N_OPTIONS; i++)
    if (mr_options[i].commands & 1u << cmd && !strcmp(mr_option_name(&mr_options[i], cmd), name))
      return &mr_options[i];
  return NULL;
}

/* The nearest known name, for a message: "; did you mean X?" or nothing. */
static const char *suggest(const char *word, mr_command cmd, const char *prefix, char *buf,
                           size_t cap) {
  const char *names[N_OPTIONS + 1];
  size_t n = 0;
  for (size_t i = 0; i < N_OPTIONS; i++)
    if (mr_options[i].commands & 1u << cmd && (*prefix || mr_options[i].letter != 'h'))
      names[n++] = mr_option_name(&mr_options[i], cmd);
  if (!*prefix)
    names[n++] = "inputs";
  const char *near = mr_nearest(word, names, n);
  buf[0] = '\0';
  if (near)
    snprintf(buf, cap, "; did you mean %s%s?", prefix, near);
  return buf;
}

static mr_code add_input(mr_job *j, const char *s, mr_err *err) {
  mr_list l = {j->inputs, j->n_inputs};
  mr_code rc = mr_list_add(&l, s, err);
  j->inputs = l.s;
  j->n_inputs = l.n;
  return rc;
}

static mr_code file_inputs(mr_job *j, const json_t *v, const origin *from, mr_err *err) {
  if (json_is_string(v))
    return add_input(j, json_string_value(v), err);
  for (size_t i = 0; i < json_array_size(v); i++) {
    const json_t *item = json_array_get(v, i);
    if (!json_is_string(item))
      return mr_err_at(err, from->code, from->file, 0, -1, "inputs[%zu] is not a string", i);
    mr_code rc = add_input(j, json_string_value(item), err);
    if (rc != MR_OK)
      return rc;
  }
  if (json_array_size(v))
    return MR_OK;
  return mr_err_at(err, from->code, from->file, 0, -1,
                   "inputs must be a string or a list of strings");
}

static mr_code file_list(mr_job *j, const option *o, const json_t *v, const origin *from,
                         mr_err *err) {
  mr_code rc = MR_OK;
  for (size_t i = 0; !rc && i < json_array_size(v); i++) {
    const char *s = json_string_value(json_array_get(v, i));
    rc = s ? set_from_text(j, o, s, from, err)
           : mr_err_at(err, from->code, from->file, 0, -1, "%s[%zu] is not a string", o->name, i);
  }
  return rc;
}

static mr_code file_value(mr_job *j, const option *o, const json_t *v, const origin *from,
                          mr_err *err) {
  if (o->kind == K_DEFAULTS)
    return json_is_string(v) ? set_defaults_text(j, json_string_value(v), from, err)
                             : set_defaults(j, v, from, err);
  if (o->kind == K_ADAPTER)
    return mr_adapters_put_json(j, v, from, err);
  if (o->kind == K_PARAM)
    return set_param(j, o, json_incref((json_t *)(uintptr_t)v), from, err);
  if ((o->kind == K_LIST || o->kind == K_NAMES) && json_array_size(v))
    return file_list(j, o, v, from, err);
  if (o->kind == K_FLAG && json_is_boolean(v)) {
    *(bool *)(void *)((char *)j + o->at) = json_is_true(v);
    return MR_OK;
  }
  if (o->kind != K_FLAG && json_is_string(v))
    return set_from_text(j, o, json_string_value(v), from, err);
  mr_text t = {0};
  mr_json_add(&t, v);
  mr_code rc = t.failed ? no_memory(err) : MR_OK;
  if (rc == MR_OK && o->kind != K_FLAG && o->kind != K_TEXT && o->kind != K_LIST &&
      json_is_number(v))
    rc = set_from_text(j, o, t.data, from, err);
  else if (rc == MR_OK)
    rc = mr_err_at(err, from->code, from->file, 0, -1, "%s is %.200s; it must be %s", o->name,
                   t.data, wanted(o));
  mr_text_free(&t);
  return rc;
}

/* A text with a NUL would be cut there: no name of a file, no choice. Texts of rows may hold one.
 */
static bool is_cut(const option *o, const json_t *v) {
  size_t i;
  const char *name;
  json_t *item;
  if (o && (o->kind == K_PARAM || (o->kind == K_DEFAULTS && !json_is_string(v))))
    return false;
  if (json_is_string(v))
    return strlen(json_string_value(v)) != json_string_length(v);
  json_array_foreach((json_t *)(uintptr_t)v, i, item) {
    if (is_cut(o, item))
      return true;
  }
  json_object_foreach((json_t *)(uintptr_t)v, name, item) { /* adapters */
    if (o && is_cut(o, item))
      return true;
  }
  return false;
}

/* Members of an object; names of nested ones join with a dash. */
static mr_code file_object(mr_job *j, mr_command cmd, json_t *object, const char *prefix,
                           const origin *from, mr_err *err) {
  const char *key;
  json_t *v;
  json_object_foreach(object, key, v) {
    char name[128], near[160];
    if (snprintf(name, sizeof name, "%s%s%s", prefix, *prefix ? "-" : "", key) >= (int)sizeof name)
      return mr_err_at(err, from->code, from->file, 0, -1, "unknown key %.60s...", name);
    const option *o = find(name, cmd);
    if (o && o->kind == K_FLAG && o->letter == 'h')
      o = NULL;
    mr_code rc;
    if (is_cut(o, v))
      rc = mr_err_at(err, from->code, from->file, 0, -1, "%s holds a NUL character", name);
    else if (o)
      rc = file_value(j, o, v, from, err);
    else if (!strcmp(name, "inputs"))
      rc = file_inputs(j, v, from, err);
    else if (json_is_object(v) && strlen(name) < 64)
      rc = file_object(j, cmd, v, name, from, err);
    else
      rc = mr_err_at(err, from->code, from->file, 0, -1, "unknown key %s%s", name,
                     suggest(name, cmd, "", near, sizeof near));
    if (rc != MR_OK)
      return rc;
  }
  return MR_OK;
}

static mr_code read_job_file(mr_job *j, mr_command cmd, mr_err *err) {
  const origin from = {MR_E_CONFIG, "", j->job_file, cmd};
  mr_err why = MR_ERR_INIT;
  json_t *v = mr_json_read(j->job_file, JOB_FILE_MAX, &why);
  if (!v)
    return mr_err_at(err, why.code == MR_E_DATA ? MR_E_CONFIG : why.code, j->job_file, why.line,
                     why.offset, "%s", why.text);
  mr_code rc = json_is_object(v)
                   ? file_object(j, cmd, v, "", &from, err)
                   : mr_err_at(err, MR_E_CONFIG, j->job_file, 0, -1, "is not a JSON object");
  json_decref(v);
  return rc;
}

/* ------------------------------------------------------------------ the command line */

typedef struct args {
  int argc;
  char **argv;
  int at;          /* the next argument */
  bool only_words; /* after -- */
} args;

/* One option taken apart: its entry and its value (NULL for flags). */
static mr_code take_option(args *a, mr_command cmd, const char *arg, const option **o,
                           const char **value, mr_err *err) {
  const char *equals = NULL;
  char name[128], near[160];
  *o = NULL;
  if (arg[1] == '-') {
    equals = strchr(arg, '=');
    size_t n = equals ? (size_t)(equals - arg) - 2 : strlen(arg) - 2;
    if (n < sizeof name) {
      memcpy(name, arg + 2, n);
      name[n] = '\0';
      *o = find(name, cmd);
    }
  } else {
    for (size_t i = 0; i < N_OPTIONS && !*o; i++)
      if (mr_options[i].letter && mr_options[i].letter == arg[1] &&
          mr_options[i].commands & 1u << cmd)
        *o = &mr_options[i];
    if (*o && arg[2])
      equals = arg + 1; /* -mFILE */
  }
  if (!*o)
    return mr_err_set(err, MR_E_USAGE, "unknown option %.100s%s (-h prints the known ones)", arg,
                      arg[1] == '-' ? suggest(arg + 2, cmd, "--", near, sizeof near) : "");
  *value = equals ? equals + 1 : NULL;
  if ((*o)->kind == K_FLAG)
    return equals ? mr_err_set(err, MR_E_USAGE, "--%s takes no value", mr_option_name(*o, cmd))
                  : MR_OK;
  if (!equals && a->at == a->argc)
    return mr_err_set(err, MR_E_USAGE, "--%s needs a value: %s", mr_option_name(*o, cmd),
                      (*o)->arg);
  if (!equals)
    *value = a->argv[a->at++];
  return MR_OK;
}

/* The next argument: a word (*o NULL, *value) or an option. *done: none is left. */
static mr_code next_arg(args *a, mr_command cmd, const option **o, const char **value, bool *done,
                        mr_err *err) {
  *o = NULL;
  *done = a->at >= a->argc;
  if (*done)
    return MR_OK;
  const char *arg = a->argv[a->at++];
  if (!a->only_words && !strcmp(arg, "--")) {
    a->only_words = true;
    return next_arg(a, cmd, o, value, done, err);
  }
  if (a->only_words || arg[0] != '-' || !arg[1]) {
    *value = arg;
    return MR_OK;
  }
  return take_option(a, cmd, arg, o, value, err);
}

static bool is_job_file(const char *s) {
  size_t n = strlen(s);
  return n > 5 && !strcmp(s + n - 5, ".json");
}

/* First pass: help, and the job file, which lies below the options of the command line. */
static mr_code find_job_file(mr_job *j, mr_command cmd, int argc, char **argv, mr_err *err) {
  args a = {argc, argv, 1, false};
  bool first = true;
  for (;;) {
    const option *o;
    const char *value;
    bool done;
    mr_code rc = next_arg(&a, cmd, &o, &value, &done, err);
    if (rc != MR_OK || done)
      return rc;
    if (o && o->letter == 'h') {
      j->help = true;
      return MR_OK;
    }
    if (!o && first && is_job_file(value) && (rc = set_text(&j->job_file, value, err)) != MR_OK)
      return rc;
    first = first && o;
  }
}

/* What JOB.json gathered gives way to the command line. */
static void forget_list(mr_job *j, const option *o) {
  void *at = (char *)j + o->at;
  if (o->kind == K_LIST)
    mr_list_free(at);
  else if (o->kind == K_NAMES)
    *(unsigned *)at = 0;
}

static mr_code set_from_args(mr_job *j, mr_command cmd, int argc, char **argv, mr_err *err) {
  const origin from = {MR_E_USAGE, "--", NULL, cmd};
  args a = {argc, argv, 1, false};
  bool job_file = j->job_file != NULL, inputs = false, stop_given = false;
  bool given[N_OPTIONS] = {false};
  for (;;) {
    const option *o;
    const char *value;
    bool done;
    mr_code rc = next_arg(&a, cmd, &o, &value, &done, err);
    if (rc != MR_OK || done)
      return rc;
    if (!o && job_file) {
      job_file = false; /* its own word */
      continue;
    }
    if (!o) {
      if (!inputs)
        free_inputs(j); /* those of JOB.json give way */
      inputs = true;
      rc = add_input(j, value, err);
    } else if (o->kind == K_FLAG) {
      *(bool *)(void *)((char *)j + o->at) = true;
    } else if (o->kind == K_DEFAULTS) {
      rc = set_defaults_text(j, value, &from, err);
    } else if (o->kind == K_ADAPTER) {
      rc = mr_adapters_put(j, value, &from, err);
    } else if (o->kind == K_PARAM) {
      rc = set_param_text(j, o, value, &stop_given, &from, err);
    } else {
      if (!given[o - mr_options])
        forget_list(j, o);
      given[o - mr_options] = true;
      rc = set_from_text(j, o, value, &from, err);
    }
    if (rc != MR_OK)
      return rc;
  }
}

/* ------------------------------------------------------------------ what belongs together */

/* status and check: the one word is the output. */
static mr_code word_is_output(mr_job *j, mr_err *err) {
  if (j->n_inputs != 1)
    return mr_err_set(err, MR_E_USAGE, "give one argument: the output (OUT.jsonl.zst, or OUT)");
  mr_code rc = set_text(&j->output, j->inputs[0], err);
  free_inputs(j);
  return rc;
}

/* A run may be resumed, and then needs its references again; standard input is read once. */
static mr_code check_score(const mr_job *j, mr_command cmd, mr_err *err) {
  bool refs = false, inputs = false;
  for (int i = 0; i < j->score.refs.n; i++)
    refs |= !strcmp(j->score.refs.s[i], "-");
  for (int i = 0; i < j->n_inputs; i++)
    inputs |= !strcmp(j->inputs[i], "-");
  if (refs && cmd != MR_CMD_SCORE)
    return mr_err_set(err, MR_E_USAGE, "references of a job cannot come from standard input");
  if (refs && inputs)
    return mr_err_set(err, MR_E_USAGE,
                      "standard input cannot be the results and the references at once");
  if (cmd == MR_CMD_RUN && j->format == MR_OUT_STDOUT && mr_job_has_score(j))
    return mr_err_set(err, MR_E_USAGE,
                      "results on standard output cannot be scored: name a file with -o");
  return MR_OK;
}

static mr_code check_whole(mr_job *j, mr_command cmd, mr_err *err) {
  mr_code rc = MR_OK;
  if (cmd == MR_CMD_STATUS || cmd == MR_CMD_CHECK) {
    rc = word_is_output(j, err);
  } else if (cmd == MR_CMD_MERGE && (!j->output || !j->n_inputs)) {
    rc = mr_err_set(err, MR_E_USAGE, "give the output with -o, and the outputs of all shards");
  } else if (cmd == MR_CMD_SCORE && !j->n_inputs) {
    rc = mr_err_set(err, MR_E_USAGE, "no results: name the output of a job, or files of results");
  } else if (cmd == MR_CMD_SCORE && j->output && !strcmp(j->output, "-")) {
    rc = mr_err_set(err, MR_E_USAGE, "-o names a file; the table goes to standard output");
  } else if (cmd != MR_CMD_MERGE && cmd != MR_CMD_SCORE && !j->model) {
    rc = mr_err_set(err, MR_E_USAGE, "no model: give one with -m FILE");
  } else if (!j->n_inputs) {
    rc = mr_err_set(err, MR_E_USAGE, "no input: name files, directories, or - for standard input");
  } else if (cmd == MR_CMD_RUN && !j->output) {
    rc = mr_err_set(err, MR_E_USAGE, "no output: give one with -o OUT.jsonl.zst");
  }
  if (rc == MR_OK && j->output)
    rc = mr_outname_set(j, err);
  if (rc == MR_OK)
    rc = check_score(j, cmd, err);
  return rc;
}

mr_code mr_job_parse(mr_job *j, mr_command cmd, int argc, char **argv, mr_err *err) {
  bool job = cmd == MR_CMD_RUN || cmd == MR_CMD_PLAN;
  mr_code rc = find_job_file(j, cmd, argc, argv, err);
  if (rc != MR_OK || j->help)
    return rc;
  if (!job) {
    mr_mem_free(j->job_file); /* only a job has one: here the word is the output */
    j->job_file = NULL;
  }
  if (j->job_file && (rc = read_job_file(j, cmd, err)) != MR_OK)
    return rc;
  if ((rc = set_from_args(j, cmd, argc, argv, err)) != MR_OK)
    return rc;
  if (!j->device && (rc = set_text(&j->device, "auto", err)) != MR_OK)
    return rc;
  return check_whole(j, cmd, err);
}
