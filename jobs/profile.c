#include "jobs/profile.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "io/cachedir.h"
#include "io/hash.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "kernels/kernels.h"
#include "src/machine.h"

#define FILE_BYTES_MAX 65535
#define LEAST_S 0.2 /* a part that takes less teaches nothing */
#define WEIGHT (1.0 / 3)
#define SPEED_MAX 2.0
/* Rates are measured: what is further off was other work, or another program. */
#define FACTOR_MAX 1.25

const char *const mr_part_names[MR_PARTS] = {"load", "gemm", "attention", "other", "rest"};

/* Numbers of mr_rates by name. */
typedef struct field {
  const char *name;
  size_t at;
} field;
#define F(name)                                                                                    \
  { #name, offsetof(mr_rates, name) }
static const field fields[] = {F(head_share),   F(prefill_token), F(prefill_key),    F(tail_key),
                               F(decode_token), F(decode_key),    F(decode_own_key), F(logit),
                               F(step),         F(token)};
#define N_FIELDS (sizeof fields / sizeof *fields)

static double *number_at(mr_rates *r, const field *f) {
  return (double *)((char *)r + f->at);
}

/* ---------------------------------------------------------------- the place */

static bool find_dir(mr_text *t) {
  const char *own = getenv("MILLRACE_CACHE"), *xdg = getenv("XDG_CACHE_HOME");
  const char *home = getenv("HOME");
  if (own) {
    mr_text_adds(t, own);
    return *own;
  }
  if (xdg && *xdg == '/')
    mr_text_adds(t, xdg);
  else if (home && *home == '/')
    mr_text_addf(t, "%s/.cache", home);
  else
    return false;
  mr_sys_now->mkdir(t->failed ? "" : t->data, 0700);
  mr_text_adds(t, "/millrace");
  return true;
}

/* The model is known by its shape: a digest of its bytes would take longer than all of this. */
bool mr_profile_path(char *path, size_t size, const char *kind, const mr_engine_info *i) {
  char cpu[128], hex[MR_HASH_HEX];
  bool room = false;
  mr_text dir = {0}, key = {0};
  mr_text_addf(&key, "%s, %d threads, %s, %s, kv %s, %s, %llu, %llu, numerics %d, " MR_VERSION,
               mr_machine_cpu(cpu, sizeof cpu), i->threads, i->isa, i->scheme, i->kv_type, i->arch,
               (unsigned long long)i->n_params, (unsigned long long)i->weight_bytes,
               MR_NUMERICS_VERSION);
  if (find_dir(&dir) && !dir.failed && !key.failed && dir.len + 64 < size) {
    mr_hash_hex(key.data, key.len, hex);
    mr_sys_now->mkdir(dir.data, 0700);
    snprintf(path, size, "%s/%s-%s.json", dir.data, kind, hex);
    room = true;
  }
  mr_text_free(&dir);
  mr_text_free(&key);
  return room;
}

/* ---------------------------------------------------------------- reading */

/* False: not a number that a time can be made of. */
static bool get(const json_t *o, const char *name, double *x) {
  const json_t *v = json_object_get(o, name);
  *x = json_number_value(v);
  return json_is_number(v) && isfinite(*x) && *x >= 0;
}

static bool get_rates(const json_t *o, mr_rates *r) {
  const json_t *body = json_object_get(o, "body");
  size_t n = json_array_size(body);
  if (n < 1 || n > MR_RATE_POINTS)
    return false;
  for (size_t i = 0; i < n; i++) {
    const json_t *point = json_array_get(body, i);
    mr_rate_point *b = &r->body[i];
    b->tokens = json_number_value(json_array_get(point, 0));
    b->s = json_number_value(json_array_get(point, 1));
    if (!isfinite(b->tokens) || !isfinite(b->s) || b->s < 0 || b->tokens <= (i ? b[-1].tokens : 0))
      return false;
  }
  r->n_body = (int)n;
  for (size_t i = 0; i < N_FIELDS; i++)
    if (!get(o, fields[i].name, number_at(r, &fields[i])))
      return false;
  return true;
}

static void take(mr_profile *p, const json_t *o) {
  double runs = 0, x;
  const json_t *factors = json_object_get(o, "factors");
  mr_rates r = {0};
  if (get(o, "runs", &runs) && runs < 1e6)
    p->runs = (int)runs;
  for (int i = 0; i < MR_PARTS; i++)
    if (get(factors, mr_part_names[i], &x) && x >= 1 / FACTOR_MAX && x <= FACTOR_MAX)
      p->factor[i] = x;
  p->waited = get(o, "waited", &x) ? x : 0;
  p->measured = get_rates(json_object_get(o, "rates"), &r) && get(o, "load_s", &p->load_s) &&
                get(o, "memory_bytes_per_s", &p->memory_bytes_per_s) &&
                get(o, "peak_ops", &p->peak_ops);
  p->rates = r;
}

void mr_profile_load(mr_profile *p, const mr_engine_info *info) {
  *p = (mr_profile){.runs = 0};
  for (int i = 0; i < MR_PARTS; i++)
    p->factor[i] = 1;
  mr_profile_path(p->path, sizeof p->path, "profile", info);
  json_t *o = *p->path ? mr_json_read(p->path, FILE_BYTES_MAX, NULL) : NULL;
  if (o)
    take(p, o);
  json_decref(o);
}

/* ---------------------------------------------------------------- writing */

static json_t *rates_of(const mr_profile *p) {
  mr_rates r = p->rates;
  json_t *o = json_object(), *body = json_array();
  for (int i = 0; i < r.n_body; i++)
    json_array_append_new(body, json_pack("[f, f]", r.body[i].tokens, r.body[i].s));
  json_object_set_new(o, "body", body);
  for (size_t i = 0; i < N_FIELDS; i++)
    json_object_set_new(o, fields[i].name, json_real(*number_at(&r, &fields[i])));
  return o;
}

void mr_profile_write(const char *path, json_t *o) {
  mr_err ignored = MR_ERR_INIT;
  char *text = o ? mr_json_dumps(o, JSON_INDENT(1)) : NULL;
  const mr_bytes part = {text, text ? strlen(text) : 0};
  if (text)
    mr_cachedir_write(path, &part, 1, &ignored);
  mr_mem_free(text);
  json_decref(o);
}

void mr_profile_save(const mr_profile *p) {
  if (!*p->path)
    return;
  json_t *factors = json_object(), *o = json_pack("{s:i}", "runs", p->runs);
  for (int i = 0; i < MR_PARTS; i++)
    json_object_set_new(factors, mr_part_names[i], json_real(p->factor[i]));
  json_object_set_new(o, "factors", factors);
  if (p->measured) {
    json_object_set_new(o, "load_s", json_real(p->load_s));
    json_object_set_new(o, "memory_bytes_per_s", json_real(p->memory_bytes_per_s));
    json_object_set_new(o, "peak_ops", json_real(p->peak_ops));
    json_object_set_new(o, "waited", json_real(p->waited));
    json_object_set_new(o, "rates", rates_of(p));
  }
  mr_profile_write(p->path, o);
}

/* ---------------------------------------------------------------- learning */

bool mr_profile_learn(mr_profile *p, const double said[MR_PARTS], const double took[MR_PARTS],
                      double speed, double waited) {
  double weight = p->runs < 2 ? 1.0 / (p->runs + 1) : WEIGHT;
  if (waited > MR_MACHINE_WAITED)
    return false;
  if (!isfinite(speed) || speed <= 0)
    speed = 1;
  speed = speed > SPEED_MAX ? SPEED_MAX : speed < 1 / SPEED_MAX ? 1 / SPEED_MAX : speed;
  for (int i = 0; i < MR_PARTS; i++) {
    if (said[i] < LEAST_S || took[i] < LEAST_S || !isfinite(said[i]) || !isfinite(took[i]))
      continue;
    double x = took[i] * speed / said[i];
    x = x > FACTOR_MAX ? FACTOR_MAX : x < 1 / FACTOR_MAX ? 1 / FACTOR_MAX : x;
    p->factor[i] += (x - p->factor[i]) * weight;
  }
  p->runs++;
  return true;
}
