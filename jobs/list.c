#include "jobs/list.h"

#include <string.h>

#include "io/mem.h"

mr_code mr_list_add(mr_list *l, const char *s, mr_err *err) {
  char **grown = mr_mem_resize(l->s, (size_t)l->n + 1, sizeof *grown), *copy;
  if (grown)
    l->s = grown;
  if (!grown || !(copy = mr_mem_copy(s, strlen(s))))
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  l->s[l->n++] = copy;
  return MR_OK;
}

void mr_list_free(mr_list *l) {
  for (int i = 0; i < l->n; i++)
    mr_mem_free(l->s[i]);
  mr_mem_free(l->s);
  *l = (mr_list){0};
}
