/* outname.h: what the name of the output means: its format, and OUT, the base of other names. */
#ifndef MR_JOBS_OUTNAME_H
#define MR_JOBS_OUTNAME_H

#include "jobs/options.h"

/* Splits j->output into j->base and j->format. A name without any of the endings is OUT itself, and
 * gets .jsonl.zst; "-" has no base. MR_E_USAGE: the name of something else. */
mr_code mr_outname_set(mr_job *j, mr_err *err);

#endif
