/* signals.h: how a run is asked to stop or to say where it is.
 *
 * SIGTERM, SIGINT: the first asks (mr_signals_stop becomes true, and a wait for input ends); the
 * run drains and ends by itself, with 75. If it has not ended after 9 s (a long load, a long step)
 * the process ends at once with 75: whatever is committed stays, the rest is computed again. The
 * second signal ends the process at once, with 75 too. SIGUSR1: progress is printed. SIGPIPE and
 * SIGHUP are ignored: a job goes on when its terminal has gone. In every command SIGXFSZ (a limit
 * of the size of files) is ignored, too: the write fails instead, as on a full disk.
 */
#ifndef MR_JOBS_SIGNALS_H
#define MR_JOBS_SIGNALS_H

#include <stdbool.h>

void mr_signals_ignore_limits(void);
void mr_signals_install(void);
bool mr_signals_stop(void);          /* a first SIGTERM or SIGINT has come */
bool mr_signals_take_progress(void); /* SIGUSR1 since the last call */

#endif
