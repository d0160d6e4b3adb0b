/* list.h: a few texts that grow one by one, such as the files of an option that may be repeated.
 *
 *     mr_list l = {0};
 *     mr_code rc = mr_list_add(&l, "a.jsonl", err);
 *     mr_list_free(&l);
 */
#ifndef MR_JOBS_LIST_H
#define MR_JOBS_LIST_H

#include "io/err.h"

typedef struct mr_list {
  char **s; /* owned, and each of them */
  int n;
} mr_list;

mr_code mr_list_add(mr_list *l, const char *s, mr_err *err); /* a copy of s */
void mr_list_free(mr_list *l);

#endif
