/* adapter_config.json: which modules, ranks and factors; and what is refused. */
#include "src/lora_int.h"

#include <math.h>
#include <string.h>

#include "io/json.h"
#include "io/mem.h"

#define MAX_CONFIG ((size_t)4 << 20)
#define MAX_PATTERNS 65536

typedef struct reader {
  mr_lora_config *c;
  const json_t *j;
  const char *path;
  mr_err *err;
  mr_code rc;
} reader;

#define FAIL(r, ...)                                                                               \
  ((r)->rc = (r)->rc ? (r)->rc : mr_err_at((r)->err, MR_E_DATA, (r)->path, 0, -1, __VA_ARGS__))

/* Absent, null, false, 0 and empty lists all mean: not used. */
static bool is_set(const json_t *v) {
  if (json_is_array(v) || json_is_object(v))
    return json_array_size(v) + json_object_size(v) > 0;
  return v && !json_is_null(v) && !json_is_false(v) &&
         !(json_is_number(v) && json_number_value(v) == 0);
}

/* Each computes something else than scale * B (A x) beside the base. */
static void refuse_kinds(reader *r) {
  static const char *const refused[] = {
      "use_dora",        "use_qalora",   "use_bdlora",        "alora_invocation_tokens",
      "arrow_config",    "kasa_config",  "velora_config",     "monteclora_config",
      "megatron_config", "loftq_config", "layer_replication", "trainable_token_indices",
      "modules_to_save", "corda_config", "lora_ga_config"};
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    if (is_set(json_object_get(r->j, refused[i])))
      FAIL(r,
           "%s is set, which is not supported; plain LoRA and rsLoRA of linear layers, of fused "
           "experts and of the embedding are",
           refused[i]);
}

/* Ways to begin the training that change the base have the adapter beside another base. */
static void check_init(reader *r) {
  static const char *const plain[] = {"gaussian", "orthogonal", "eva"};
  const json_t *v = json_object_get(r->j, "init_lora_weights");
  if (!json_is_string(v))
    return;
  for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
    if (!strcmp(json_string_value(v), plain[i]))
      return;
  FAIL(r,
       "init_lora_weights is \"%.32s\": such adapters belong to a changed base; convert it to a "
       "plain LoRA (PEFT: path_initial_model_for_weight_conversion)",
       json_string_value(v));
}

static void check_kind(reader *r) {
  const json_t *type = json_object_get(r->j, "peft_type"), *bias = json_object_get(r->j, "bias");
  if (!json_is_string(type) || strcmp(json_string_value(type), "LORA") != 0)
    FAIL(r, "peft_type is %s%.32s%s; only \"LORA\" is supported", json_is_string(type) ? "\"" : "",
         json_is_string(type) ? json_string_value(type) : "missing",
         json_is_string(type) ? "\"" : "");
  if (json_is_string(bias) && strcmp(json_string_value(bias), "none") &&
      strcmp(json_string_value(bias), "all") && strcmp(json_string_value(bias), "lora_only"))
    FAIL(r, "bias is \"%.32s\"; it must be none, all or lora_only", json_string_value(bias));
}

static bool good_rank(double v) {
  return v >= 1 && v <= MR_LORA_RANK_MAX && v == floor(v);
}

static void read_numbers(reader *r) {
  const json_t *rank = json_object_get(r->j, "r"), *alpha = json_object_get(r->j, "lora_alpha");
  double v = json_number_value(rank), a = json_is_number(alpha) ? json_number_value(alpha) : 8;
  if (!good_rank(v))
    FAIL(r, "r must be a whole number from 1 to %d", MR_LORA_RANK_MAX);
  else
    r->c->r = (int)v;
  if (!isfinite(a) || fabs(a) > 1e9)
    FAIL(r, "lora_alpha must be a number");
  r->c->alpha = a;
  r->c->tied = json_is_true(json_object_get(r->j, "ensure_weight_tying"));
  r->c->rslora = json_is_true(json_object_get(r->j, "use_rslora"));
}

static bool ends_with(const char *module, const char *name) {
  size_t n = strlen(module), m = strlen(name);
  return n >= m && !strcmp(module + n - m, name) && (n == m || module[n - m - 1] == '.');
}

/* An expression that must fit a whole name, or with `tail` its end after a dot. */
static mr_regex *compile(reader *r, const char *key, bool tail) {
  mr_text t = {0};
  mr_err why = MR_ERR_INIT;
  mr_regex *re = NULL;
  mr_text_addf(&t, tail ? "\\A(?:.*\\.)?(?:%s)\\z" : "\\A(?:%s)\\z", key);
  mr_code rc = t.failed ? MR_E_NOMEM : mr_regex_open(&re, t.data, t.len, &why);
  mr_text_free(&t);
  if (rc == MR_E_NOMEM)
    r->rc = mr_err_at(r->err, MR_E_NOMEM, r->path, 0, -1, "no memory");
  else if (rc)
    FAIL(r, "\"%.64s\" is no expression that can be read: %.200s", key, why.text);
  return re;
}

static void read_patterns(reader *r, const char *name, mr_lora_pattern **out, size_t *n,
                          bool rank) {
  json_t *map = json_object_get(r->j, name), *v;
  const char *key;
  size_t size = json_object_size(map);
  if (!map || json_is_null(map) || r->rc)
    return;
  if (!json_is_object(map) || size > MAX_PATTERNS) {
    FAIL(r, "%s must be an object of at most %d names", name, MAX_PATTERNS);
    return;
  }
  *out = mr_mem_alloc(size, sizeof **out);
  if (!*out)
    r->rc = mr_err_at(r->err, MR_E_NOMEM, r->path, 0, -1, "no memory");
  json_object_foreach(map, key, v) {
    double x = json_number_value(v);
    if (r->rc)
      return;
    if (!json_is_number(v) || !(rank ? good_rank(x) : isfinite(x) && fabs(x) <= 1e9)) {
      FAIL(r, "%s: the value of \"%.64s\" is not possible", name, key);
      return;
    }
    (*out)[*n] = (mr_lora_pattern){compile(r, key, true), x};
    *n += (*out)[*n].re != NULL;
  }
}

/* Others of a module would lie between these in the order that says which tensor is whose. */
static void read_parameters(reader *r) {
  static const char *const known[] = {"gate_up_proj", "down_proj", "weight"};
  json_t *v = json_object_get(r->j, "target_parameters"), *item;
  size_t i;
  if (!is_set(v))
    return;
  if (!json_is_array(v))
    FAIL(r, "target_parameters must be a list of names");
  json_array_foreach(v, i, item) {
    bool found = false;
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
      found |= json_is_string(item) && ends_with(json_string_value(item), known[k]);
    if (!found)
      FAIL(r,
           "target_parameters[%zu] is none of ...gate_up_proj, ...down_proj and ...weight, which "
           "are supported",
           i);
  }
  if (!r->rc)
    r->c->parameters = json_incref(v);
}

static void read_targets(reader *r) {
  json_t *v = json_object_get(r->j, "target_modules"), *item;
  size_t i;
  if (json_is_string(v) && strcmp(json_string_value(v), "all-linear") != 0)
    r->c->target = compile(r, json_string_value(v), false);
  json_array_foreach(v, i, item) {
    if (!json_is_string(item))
      FAIL(r, "target_modules[%zu] is not a string", i);
  }
  if (json_is_array(v))
    r->c->targets = json_incref(v);
  json_t *layers = json_object_get(r->j, "layers_to_transform");
  if (json_is_integer(layers)) {
    r->c->layers = json_array();
    if (!r->c->layers || json_array_append(r->c->layers, layers))
      r->rc = mr_err_at(r->err, MR_E_NOMEM, r->path, 0, -1, "no memory");
  } else if (json_is_array(layers)) {
    r->c->layers = json_incref(layers);
  }
}

mr_code mr_lora_config_read(mr_lora_config *c, const char *path, mr_err *err) {
  *c = (mr_lora_config){0};
  json_t *root = mr_json_read(path, MAX_CONFIG, err);
  if (!root)
    return err && err->code ? err->code : MR_E_DATA;
  reader r = {.c = c, .j = root, .path = path, .err = err};
  if (!json_is_object(root))
    FAIL(&r, "it must hold an object");
  check_kind(&r);
  refuse_kinds(&r);
  check_init(&r);
  read_numbers(&r);
  read_targets(&r);
  read_parameters(&r);
  read_patterns(&r, "rank_pattern", &c->ranks, &c->n_ranks, true);
  read_patterns(&r, "alpha_pattern", &c->alphas, &c->n_alphas, false);
  json_decref(root);
  if (r.rc)
    mr_lora_config_free(c);
  return r.rc;
}

static void free_patterns(mr_lora_pattern *p, size_t n) {
  for (size_t i = 0; i < n; i++)
    mr_regex_close(p[i].re);
  mr_mem_free(p);
}

void mr_lora_config_free(mr_lora_config *c) {
  free_patterns(c->ranks, c->n_ranks);
  free_patterns(c->alphas, c->n_alphas);
  mr_regex_close(c->target);
  json_decref(c->targets);
  json_decref(c->layers);
  json_decref(c->parameters);
  mr_regex_scratch_free(&c->scratch);
  *c = (mr_lora_config){0};
}

static bool fits(mr_lora_config *c, const mr_regex *re, const char *module) {
  mr_match m = {0};
  return mr_regex_next(re, &c->scratch, module, strlen(module), &m, &c->failed) > 0;
}

bool mr_lora_config_targets(mr_lora_config *c, const char *module, int layer) {
  json_t *v;
  size_t i;
  bool found = !c->layers || layer < 0;
  json_array_foreach(c->layers, i, v) {
    found = found || json_integer_value(v) == layer;
  }
  if (!found)
    return false;
  if (c->target)
    return fits(c, c->target, module);
  json_array_foreach(c->targets, i, v) {
    if (ends_with(module, json_string_value(v)))
      return true;
  }
  return !c->targets;
}

bool mr_lora_config_parameter(const mr_lora_config *c, const char *name) {
  json_t *v;
  size_t i;
  json_array_foreach(c->parameters, i, v) {
    if (ends_with(name, json_string_value(v)))
      return true;
  }
  return false;
}

static double pick(mr_lora_config *c, const mr_lora_pattern *p, size_t n, const char *module,
                   double otherwise) {
  for (size_t i = 0; i < n; i++)
    if (fits(c, p[i].re, module))
      return p[i].value;
  return otherwise;
}

void mr_lora_config_module(mr_lora_config *c, const char *module, int *rank, float *scale) {
  *rank = (int)pick(c, c->ranks, c->n_ranks, module, c->r);
  double alpha = pick(c, c->alphas, c->n_alphas, module, c->alpha);
  *scale = (float)(alpha / (c->rslora ? sqrt(*rank) : *rank));
}
