#include "jobs/tuned.h"

#include <jansson.h>

#include "io/json.h"
#include "jobs/profile.h"
#include "src/device.h"

#define FILE_BYTES_MAX 65535
#define STEP_MAX 65536
#define PATH_BYTES 4096

static bool take(mr_tuning *t, const json_t *o) {
  const json_t *shapes = json_object_get(o, "shapes"), *shape;
  json_int_t step = json_integer_value(json_object_get(o, "step_tokens"));
  size_t i;
  if (step < 1 || step > STEP_MAX || json_array_size(shapes) > MR_TUNE_SHAPES)
    return false;
  json_array_foreach(shapes, i, shape) {
    mr_tuned *s = &t->shapes[i];
    if (json_unpack((json_t *)(uintptr_t)shape, "{s:i, s:i, s:i}", "k", &s->k, "n", &s->n,
                    "own_rows", &s->own_rows) ||
        s->own_rows < 1)
      return false;
  }
  t->n_shapes = (int)i;
  t->step_tokens = (int)step;
  return true;
}

void mr_tuned_load(mr_tuning *t, mr_engine_opts *opts, mr_engine_info *info) {
  char path[PATH_BYTES];
  *t = (mr_tuning){.step_tokens = 0};
  if (mr_device_is_gpu(opts->device) || !mr_profile_path(path, sizeof path, "tuning", info))
    return;
  json_t *o = mr_json_read(path, FILE_BYTES_MAX, NULL);
  if (!take(t, o))
    *t = (mr_tuning){.step_tokens = 0};
  json_decref(o);
  opts->tuning = t;
  mr_engine_set_step(opts, info);
}

void mr_tuned_save(const mr_tuning *t, const mr_engine_info *info) {
  char path[PATH_BYTES];
  if (t->took_s <= 0 || !mr_profile_path(path, sizeof path, "tuning", info))
    return;
  json_t *shapes = json_array();
  for (int i = 0; i < t->n_shapes; i++)
    json_array_append_new(shapes, json_pack("{s:i, s:i, s:i}", "k", t->shapes[i].k, "n",
                                            t->shapes[i].n, "own_rows", t->shapes[i].own_rows));
  json_t *o = json_pack("{s:i, s:o}", "step_tokens", t->step_tokens, "shapes", shapes);
  mr_profile_write(path, o);
}
