/* adapters.h: --lora NAME=DIR: which adapters a job has (src/lora.h reads them).
 *
 * They are kept in the order of their names, so that their numbers do not depend on the order of
 * options; a name that is given again takes the place of the first.
 */
#ifndef MR_JOBS_ADAPTERS_H
#define MR_JOBS_ADAPTERS_H

#include "jobs/options.h"

/* "NAME=DIR". The errors are of the origin's code. */
mr_code mr_adapters_put(mr_job *j, const char *s, const mr_option_origin *from, mr_err *err);
/* {"NAME": "DIR"}, "NAME=DIR" or a list of these. */
mr_code mr_adapters_put_json(mr_job *j, const json_t *v, const mr_option_origin *from, mr_err *err);
void mr_adapters_free(mr_job *j);

#endif
