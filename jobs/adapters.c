#include "jobs/adapters.h"

#include <string.h>

#include "io/mem.h"
#include "io/text.h"

static void free_adapter(mr_adapter *a) {
  mr_mem_free((void *)(uintptr_t)a->name);
  mr_mem_free((void *)(uintptr_t)a->dir);
}

void mr_adapters_free(mr_job *j) {
  for (int i = 0; i < j->n_adapters; i++)
    free_adapter(&j->adapters[i]);
  mr_mem_free(j->adapters);
}

/* In the order of names; a name given again takes the place of the first. */
static mr_code put_adapter(mr_job *j, const char *name, size_t n, const char *dir,
                           const mr_option_origin *from, mr_err *err) {
  int at = 0;
  if (n == 0 || !*dir || mr_utf8_valid(name, n) >= 0 || n > 256)
    return mr_err_at(err, from->code, from->file, 0, -1,
                     "%slora %.200s: it must be NAME=DIR, with a name of up to 256 bytes",
                     from->prefix, name);
  mr_adapter a = {mr_mem_copy(name, n), mr_mem_copy(dir, strlen(dir))};
  mr_adapter *all =
      a.name && a.dir ? mr_mem_resize(j->adapters, (size_t)j->n_adapters + 1, sizeof *all) : NULL;
  if (!all) {
    free_adapter(&a);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the options");
  }
  j->adapters = all;
  while (at < j->n_adapters && strcmp(all[at].name, a.name) < 0)
    at++;
  if (at < j->n_adapters && !strcmp(all[at].name, a.name))
    free_adapter(&all[at]);
  else
    memmove(all + at + 1, all + at, (size_t)(j->n_adapters++ - at) * sizeof *all);
  all[at] = a;
  return MR_OK;
}

mr_code mr_adapters_put(mr_job *j, const char *s, const mr_option_origin *from, mr_err *err) {
  const char *equals = strchr(s, '=');
  return put_adapter(j, s, equals ? (size_t)(equals - s) : 0, equals ? equals + 1 : "", from, err);
}

mr_code mr_adapters_put_json(mr_job *j, const json_t *v, const mr_option_origin *from,
                             mr_err *err) {
  const char *name;
  json_t *item;
  mr_code rc = MR_OK;
  if (json_is_string(v))
    return mr_adapters_put(j, json_string_value(v), from, err);
  if (json_is_array(v)) {
    for (size_t i = 0; i < json_array_size(v) && !rc; i++)
      rc = json_is_string(json_array_get(v, i))
               ? mr_adapters_put_json(j, json_array_get(v, i), from, err)
               : mr_err_at(err, from->code, from->file, 0, -1, "lora[%zu] is not NAME=DIR", i);
    return rc;
  }
  if (!json_is_object(v))
    return mr_err_at(err, from->code, from->file, 0, -1, "lora must be {\"NAME\": \"DIR\"}");
  json_object_foreach((json_t *)(uintptr_t)v, name, item) {
    const char *dir = json_string_value(item);
    if (!rc)
      rc = put_adapter(j, name, strlen(name), dir ? dir : "", from, err);
  }
  return rc;
}

int mr_job_adapter(const mr_job *j, const char *name) {
  for (int i = 0; name && i < j->n_adapters; i++)
    if (!strcmp(j->adapters[i].name, name))
      return i + 1;
  return 0;
}
