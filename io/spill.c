#include "io/spill.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "io/hash.h"
#include "io/mem.h"
#include "io/sys.h"

#define NONE (-1)
#define ALIGN 4096                    /* of file offsets and buffers, for direct I/O */
#define STAGES 16                     /* blocks that wait to be written */
#define STAGE_BYTES ((size_t)4 << 20) /* mr_mem_pages aligns from here up */
#define FAILURES_MAX 4
#define NAMES 64

typedef struct slot {
  uint64_t check;
  void *to;      /* READING */
  int32_t next;  /* in the queue, or among the free ones */
  int16_t stage; /* WRITING */
  uint8_t state; /* mr_spill_status */
  bool dropped;  /* while it is being written */
} slot;

struct mr_spill {
  int fd;
  size_t bytes, stride;
  slot *slots; /* [n] */
  int n, n_free;
  int32_t free, first, last; /* free slots; the queue */
  int n_queued;              /* and in work */
  uint8_t *stages;           /* [STAGES + 1, stride]; the last is for reading */
  int16_t free_stage[STAGES];
  int n_stages; /* free ones */
  bool stop;
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  pthread_t thread;
  mr_spill_stats stats;
};

/* ---------------------------------------------------------------- the thread */

static off_t offset_of(const mr_spill *s, int at) {
  return (off_t)at * (off_t)s->stride;
}

static uint8_t *stage_of(mr_spill *s, int i) {
  return s->stages + (size_t)i * s->stride;
}

/* Both without the lock: nobody else touches a slot in the queue but for `dropped`. */
static bool write_slot(mr_spill *s, int at) {
  uint8_t *from = stage_of(s, s->slots[at].stage);
  s->slots[at].check = mr_hash_64(from, s->bytes);
  return mr_sys_pwrite_full(s->fd, from, s->stride, offset_of(s, at)) == 0;
}

static bool read_slot(mr_spill *s, int at) {
  uint8_t *from = stage_of(s, STAGES);
  ssize_t n = mr_sys_pread_full(s->fd, from, s->stride, offset_of(s, at));
  if (n != (ssize_t)s->stride || mr_hash_64(from, s->bytes) != s->slots[at].check)
    return false;
  memcpy(s->slots[at].to, from, s->bytes);
  return true;
}

static void give_slot(mr_spill *s, int at) {
  s->slots[at] = (slot){.next = s->free, .state = MR_SPILL_FREE};
  s->free = at;
  s->n_free++;
}

static void finish(mr_spill *s, int at, bool ok, double seconds) {
  slot *t = &s->slots[at];
  bool writing = t->state == MR_SPILL_WRITING;
  s->stats.failures += !ok;
  *(writing ? &s->stats.write_s : &s->stats.read_s) += seconds;
  if (ok)
    *(writing ? &s->stats.written_bytes : &s->stats.read_bytes) += s->bytes;
  if (writing)
    s->free_stage[s->n_stages++] = t->stage;
  t->state = !ok ? MR_SPILL_BAD : writing ? MR_SPILL_STORED : MR_SPILL_READY;
  if (t->dropped)
    give_slot(s, at);
}

static void *run(void *ctx) {
  mr_spill *s = ctx;
  pthread_mutex_lock(&s->lock);
  while (!s->stop) {
    int at = s->first;
    if (at == NONE) {
      pthread_cond_wait(&s->work, &s->lock);
      continue;
    }
    s->first = s->slots[at].next;
    s->last = s->first == NONE ? NONE : s->last;
    bool writing = s->slots[at].state == MR_SPILL_WRITING;
    pthread_mutex_unlock(&s->lock);
    double t = mr_sys_seconds();
    bool ok = writing ? write_slot(s, at) : read_slot(s, at);
    t = mr_sys_seconds() - t;
    pthread_mutex_lock(&s->lock);
    finish(s, at, ok, t);
    s->n_queued--;
    pthread_cond_broadcast(&s->done);
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

/* ---------------------------------------------------------------- open and close */

/* Some file systems (tmpfs) refuse direct I/O. */
static int open_name(const char *path) {
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  int fd = mr_sys_now->open(path, flags | O_DIRECT, 0600);
  if (fd >= 0 || errno != EINVAL)
    return fd;
  mr_sys_now->unlink(path); /* it may have been made before it was refused */
  return mr_sys_now->open(path, flags, 0600);
}

static mr_code open_file(mr_spill *s, const char *dir, mr_err *err) {
  char path[PATH_MAX];
  s->fd = -1;
  for (int i = 0; i < NAMES && s->fd < 0; i++) {
    int n = snprintf(path, sizeof path, "%s/millrace-spill-%d-%d", dir, (int)getpid(), i);
    if (n < 0 || n >= (int)sizeof path)
      return mr_err_set(err, MR_E_CANTCREATE, "--spill-dir: the path is too long");
    s->fd = open_name(path);
    if (s->fd < 0 && errno != EEXIST)
      break;
  }
  if (s->fd < 0)
    return mr_err_errno(err, MR_E_CANTCREATE, path, "cannot create the file to spill to");
  mr_sys_now->unlink(path);
  return MR_OK;
}

static mr_code open_memory(mr_spill *s, uint64_t max_bytes, mr_err *err) {
  uint64_t n = max_bytes / s->stride;
  s->n = n < INT_MAX / 2 ? (int)n : INT_MAX / 2;
  size_t bytes = s->stride * (STAGES + 1);
  s->slots = mr_mem_alloc((size_t)s->n, sizeof *s->slots);
  s->stages = mr_mem_pages(bytes < STAGE_BYTES ? STAGE_BYTES : bytes);
  if (!s->slots || !s->stages)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for spilling; use a smaller --kv-disk");
  s->free = s->first = s->last = NONE;
  for (int i = s->n - 1; i >= 0; i--)
    give_slot(s, i);
  for (int i = 0; i < STAGES; i++)
    s->free_stage[s->n_stages++] = (int16_t)i;
  return MR_OK;
}

static void free_parts(mr_spill *s) {
  if (s->fd >= 0)
    mr_sys_now->close(s->fd);
  mr_mem_free(s->slots);
  mr_mem_free(s->stages);
  mr_mem_free(s);
}

mr_code mr_spill_open(mr_spill **out, const char *dir, size_t slot_bytes, uint64_t max_bytes,
                      mr_err *err) {
  mr_spill *s = mr_mem_alloc(1, sizeof *s);
  if (!s)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for spilling");
  s->bytes = slot_bytes;
  s->stride = (slot_bytes + ALIGN - 1) / ALIGN * ALIGN;
  mr_code rc = open_file(s, dir, err);
  if (!rc)
    rc = open_memory(s, max_bytes, err);
  if (rc) {
    free_parts(s);
    return rc;
  }
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->work, NULL);
  pthread_cond_init(&s->done, NULL);
  if (pthread_create(&s->thread, NULL, run, s)) {
    free_parts(s);
    return mr_err_set(err, MR_E_UNAVAILABLE, "the thread for spilling could not be had");
  }
  *out = s;
  return MR_OK;
}

void mr_spill_close(mr_spill *s) {
  if (!s)
    return;
  pthread_mutex_lock(&s->lock);
  s->stop = true;
  pthread_cond_signal(&s->work);
  pthread_mutex_unlock(&s->lock);
  pthread_join(s->thread, NULL);
  pthread_mutex_destroy(&s->lock);
  pthread_cond_destroy(&s->work);
  pthread_cond_destroy(&s->done);
  free_parts(s);
}

/* ---------------------------------------------------------------- calls */

static void queue(mr_spill *s, int at, mr_spill_status state) {
  s->slots[at].state = (uint8_t)state;
  s->slots[at].next = NONE;
  *(s->last == NONE ? &s->first : &s->slots[s->last].next) = at;
  s->last = at;
  s->n_queued++;
  pthread_cond_signal(&s->work);
}

/* With the lock, which is given up meanwhile. */
static void stall(mr_spill *s) {
  double t = mr_sys_seconds();
  pthread_cond_wait(&s->done, &s->lock);
  s->stats.stall_s += mr_sys_seconds() - t;
}

int mr_spill_put(mr_spill *s, const void *bytes) {
  pthread_mutex_lock(&s->lock);
  while (s->n_stages == 0)
    stall(s);
  int at = s->stats.failures < FAILURES_MAX ? s->free : NONE;
  if (at != NONE) {
    s->free = s->slots[at].next;
    s->n_free--;
    s->slots[at].stage = s->free_stage[--s->n_stages];
    memcpy(stage_of(s, s->slots[at].stage), bytes, s->bytes);
    queue(s, at, MR_SPILL_WRITING);
  }
  pthread_mutex_unlock(&s->lock);
  return at;
}

void mr_spill_get(mr_spill *s, int at, void *to) {
  pthread_mutex_lock(&s->lock);
  while (s->slots[at].state == MR_SPILL_WRITING)
    stall(s);
  if (s->slots[at].state == MR_SPILL_STORED || s->slots[at].state == MR_SPILL_READY) {
    s->slots[at].to = to;
    queue(s, at, MR_SPILL_READING);
  }
  pthread_mutex_unlock(&s->lock);
}

mr_spill_status mr_spill_state(mr_spill *s, int at) {
  pthread_mutex_lock(&s->lock);
  mr_spill_status state = (mr_spill_status)s->slots[at].state;
  pthread_mutex_unlock(&s->lock);
  return state;
}

void mr_spill_wait(mr_spill *s) {
  pthread_mutex_lock(&s->lock);
  if (s->n_queued)
    stall(s);
  pthread_mutex_unlock(&s->lock);
}

void mr_spill_drop(mr_spill *s, int at) {
  pthread_mutex_lock(&s->lock);
  while (s->slots[at].state == MR_SPILL_READING)
    stall(s);
  if (s->slots[at].state == MR_SPILL_WRITING)
    s->slots[at].dropped = true;
  else
    give_slot(s, at);
  pthread_mutex_unlock(&s->lock);
}

int mr_spill_room(mr_spill *s) {
  pthread_mutex_lock(&s->lock);
  int n = s->stats.failures < FAILURES_MAX ? s->n_free : 0;
  pthread_mutex_unlock(&s->lock);
  return n;
}

void mr_spill_stats_get(mr_spill *s, mr_spill_stats *out) {
  pthread_mutex_lock(&s->lock);
  *out = s->stats;
  pthread_mutex_unlock(&s->lock);
}
