#include "jobs/signals.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "io/err.h"
#include "io/sys.h"

#define GRACE_S 9 /* the contract says 10 */

static volatile sig_atomic_t stops, asked;

/* Only what a signal handler may call. */
static void end_at_once(const char *words) {
  ssize_t ignored = mr_sys_now->write(STDERR_FILENO, words, strlen(words));
  (void)ignored;
  _exit(MR_E_STOPPED);
}

static void on_stop(int sig) {
  (void)sig;
  if (stops++ > 0)
    end_at_once("\nmillrace: stopped at once; the same command resumes the job\n");
  alarm(GRACE_S);
  mr_sys_wake();
}

static void on_alarm(int sig) {
  (void)sig;
  end_at_once(
      "\nmillrace: stopped without finishing this step; the same command resumes the job\n");
}

static void on_ask(int sig) {
  (void)sig;
  asked = 1;
}

static void handle(int sig, void (*what)(int)) {
  struct sigaction a;
  memset(&a, 0, sizeof a);
  sigemptyset(&a.sa_mask);
  a.sa_handler = what;
  a.sa_flags = SA_RESTART;
  sigaction(sig, &a, NULL);
}

void mr_signals_ignore_limits(void) {
  handle(SIGXFSZ, SIG_IGN);
}

void mr_signals_install(void) {
  mr_sys_wake_open(); /* without it a wait for input ends with the alarm */
  handle(SIGTERM, on_stop);
  handle(SIGINT, on_stop);
  handle(SIGALRM, on_alarm);
  handle(SIGUSR1, on_ask);
  handle(SIGPIPE, SIG_IGN);
  handle(SIGHUP, SIG_IGN);
}

bool mr_signals_stop(void) {
  return stops > 0;
}

bool mr_signals_take_progress(void) {
  bool was = asked;
  asked = 0;
  return was;
}
