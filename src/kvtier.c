#include "src/kvtier.h"

#include "io/mem.h"
#include "io/spill.h"

#define DEFAULT_DIR "/var/tmp"
#define MEASURED_BYTES (32u << 20)
/* in place of a slot; -1: the page is lost */
#define LEAVING (-2) /* it is still on its way from the device */
#define DROPPED (-3) /* there was none */

struct mr_kvtier {
  mr_kv *kv;
  mr_spill *spill; /* NULL: no disk */
  mr_kv_policy policy;
  uint8_t *page; /* a device's page on its way to the disk; NULL: pages are the host's; owned */
  uint64_t saved_bytes;       /* read of a run before */
  const mr_kv_memory *memory; /* of a device whose pages move beside its steps; or NULL */
  int32_t **leaving; /* [memory->staged] slots of pages on their way, in their places; owned */
  int n_leaving, n_departed;
};

mr_code mr_kvtier_open(mr_kvtier **out, mr_kv *kv, mr_kv_policy policy, uint64_t disk_bytes,
                       const char *dir, mr_err *err) {
  size_t page = mr_kv_size_of_page(kv);
  bool disk = policy == MR_KV_AUTO || policy == MR_KV_SPILL;
  if (policy == MR_KV_SPILL && disk_bytes < page)
    return mr_err_set(err, MR_E_USAGE,
                      "--kv-policy spill needs --kv-disk, of %zu bytes (a page) at least", page);
  mr_kvtier *t = mr_mem_alloc(1, sizeof *t);
  if (!t)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for spilling");
  t->kv = kv;
  t->policy = policy;
  mr_code rc = disk && disk_bytes >= page
                   ? mr_spill_open(&t->spill, dir ? dir : DEFAULT_DIR, page, disk_bytes, err)
                   : MR_OK;
  if (!rc && mr_kv_on_device(kv) && !(t->page = mr_mem_pages(page)))
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for spilling");
  if (mr_kv_on_device(kv) && mr_kv_memory_of(kv)->staged > 0) {
    t->memory = mr_kv_memory_of(kv);
    t->leaving = mr_mem_alloc((size_t)t->memory->staged, sizeof(int32_t *));
    if (!rc && !t->leaving)
      rc = mr_err_set(err, MR_E_NOMEM, "out of memory for spilling");
  }
  if (rc)
    mr_kvtier_close(t);
  else
    *out = t;
  return rc;
}

void mr_kvtier_close(mr_kvtier *t) {
  if (!t)
    return;
  if (t->n_leaving)
    t->memory->arrive_out(t->memory->ctx);
  mr_spill_close(t->spill);
  mr_mem_free(t->leaving);
  mr_mem_free(t->page);
  mr_mem_free(t);
}

/* ---------------------------------------------------------------- the choice */

static double per_byte_s(uint64_t bytes, double seconds) {
  return bytes >= MEASURED_BYTES ? seconds / (double)bytes : 1 / MR_SPILL_BYTES_PER_S;
}

/* Slots that are free and not promised to pages on their way. */
static int room_left(const mr_kvtier *t) {
  return mr_spill_room(t->spill) - t->n_leaving;
}

bool mr_kvtier_has_disk(const mr_kvtier *t) {
  return t->spill && room_left(t) > 0;
}

bool mr_kvtier_spills(const mr_kvtier *t, int pages, int64_t tokens, double token_s) {
  if (!t->spill || room_left(t) < pages)
    return false;
  if (t->policy != MR_KV_AUTO)
    return true;
  mr_spill_stats st;
  mr_spill_stats_get(t->spill, &st);
  double both = per_byte_s(st.written_bytes, st.write_s) + per_byte_s(st.read_bytes, st.read_s);
  return (double)pages * (double)mr_kv_size_of_page(t->kv) * both < (double)tokens * token_s;
}

/* ---------------------------------------------------------------- to disk and back */

static mr_code depart(mr_kvtier *t) {
  int from = t->n_departed;
  t->n_departed = t->n_leaving;
  return from == t->n_leaving
             ? MR_OK
             : t->memory->depart(t->memory->ctx, from, t->n_leaving, mr_kv_size_of_page(t->kv));
}

/* Pages that were on their way get their slots; those that never came none. */
static void land(mr_kvtier *t) {
  if (!t->n_leaving)
    return;
  bool lost = depart(t);
  lost = t->memory->arrive_out(t->memory->ctx) || lost;
  for (int i = 0; i < t->n_leaving; i++) {
    const void *at = t->memory->staged_at(t->memory->ctx, i, mr_kv_size_of_page(t->kv));
    *t->leaving[i] = lost ? -1 : mr_spill_put(t->spill, at);
  }
  t->n_leaving = t->n_departed = 0;
}

/* What is done with p needs its slots. */
static void land_parked(mr_kvtier *t, const mr_parked *p) {
  for (int i = 0; i < p->n && !p->saved; i++)
    if (p->slots[i] == LEAVING) {
      land(t);
      return;
    }
}

static bool send_away(mr_kvtier *t, int32_t *slot, int32_t page) {
  if (t->n_leaving == t->memory->staged)
    land(t);
  if (t->memory->stage(t->memory->ctx, t->n_leaving, mr_kv_page(t->kv, page),
                       mr_kv_size_of_page(t->kv)))
    return false;
  *slot = LEAVING;
  t->leaving[t->n_leaving++] = slot;
  return true;
}

/* The slot of a page, or -1. */
static int put_page(mr_kvtier *t, int32_t page) {
  const void *bytes = mr_kv_view(t->kv, page, t->page);
  return bytes ? mr_spill_put(t->spill, bytes) : -1;
}

bool mr_kvtier_park(mr_kvtier *t, const mr_kv_seq *s, int first, int end, int len, mr_parked *p) {
  int n = end - first;
  *p = (mr_parked){.first = first, .len = len};
  if (n <= 0)
    return true;
  p->slots = mr_mem_alloc((size_t)n, sizeof *p->slots);
  if (!p->slots)
    return false;
  for (; p->n < n; p->n++) {
    int32_t *slot = &p->slots[p->n], page = mr_kv_seq_place(t->kv, s, first + p->n);
    *slot = page < 0 ? DROPPED : t->memory ? -1 : put_page(t, page);
    if (page < 0 || (t->memory ? send_away(t, slot, page) : *slot >= 0))
      continue;
    mr_kvtier_forget(t, p);
    return false;
  }
  if (!t->memory || !depart(t))
    return true;
  mr_kvtier_forget(t, p);
  return false;
}

/* Where a page from the disk goes: into its place, or for a device into room beside. */
static uint8_t *landing(const mr_kvtier *t, mr_parked *p, int at, int32_t page) {
  if (!t->page)
    return mr_kv_page(t->kv, page);
  p->to[at] = page;
  return p->room + (size_t)at * mr_kv_size_of_page(t->kv);
}

static bool take_room(const mr_kvtier *t, mr_parked *p) {
  size_t bytes;
  if (!t->page || !p->n)
    return true;
  if (mr_mem_mul((size_t)p->n, mr_kv_size_of_page(t->kv), &bytes))
    p->room = t->memory ? t->memory->room(t->memory->ctx, bytes) : mr_mem_pages(bytes);
  p->to = mr_mem_alloc((size_t)p->n, sizeof *p->to);
  p->lost = !p->room || !p->to;
  return !p->lost;
}

/* The page that is brought back to this place; -1: none. */
static int32_t page_at(const mr_kvtier *t, const mr_kv_seq *s, int place, int from) {
  return place >= from && place < mr_kv_seq_places(t->kv, s) ? mr_kv_seq_place(t->kv, s, place)
                                                             : -1;
}

/* At once: it happens at the start of a run, and the file was written lately. */
static void fetch_saved(mr_kvtier *t, mr_parked *p, const mr_kv_seq *s, int from) {
  for (int i = 0; i < p->n && !p->lost; i++) {
    int32_t page = page_at(t, s, p->first + i, from);
    if (page < 0)
      continue;
    uint8_t *to = t->page ? t->page : mr_kv_page(t->kv, page);
    p->lost =
        !mr_saved_read(p->saved, &p->pages[i], to) || (t->page && mr_kv_write(t->kv, page, to));
    t->saved_bytes += mr_kv_size_of_page(t->kv);
  }
  p->n = 0;
}

void mr_kvtier_fetch(mr_kvtier *t, mr_parked *p, const mr_kv_seq *s, int from) {
  int kept = 0;
  if (p->saved) {
    fetch_saved(t, p, s, from);
    return;
  }
  land_parked(t, p);
  for (int i = 0; i < p->n; i++)
    p->lost = p->lost || p->slots[i] == -1 ||
              (p->slots[i] == DROPPED && page_at(t, s, p->first + i, from) >= 0);
  if (p->lost || !take_room(t, p))
    return;
  for (int i = 0; i < p->n; i++) {
    int32_t page = page_at(t, s, p->first + i, from);
    if (page < 0) {
      if (p->slots[i] >= 0)
        mr_spill_drop(t->spill, p->slots[i]);
      continue;
    }
    mr_spill_get(t->spill, p->slots[i], landing(t, p, kept, page));
    p->slots[kept++] = p->slots[i];
  }
  p->first = p->first > from ? p->first : from;
  p->n = kept;
}

/* From the host's memory into the pages. MR_E_AGAIN: it has just begun. */
static mr_code bring_in(mr_kvtier *t, mr_parked *p) {
  size_t bytes = mr_kv_size_of_page(t->kv);
  mr_code rc = MR_OK;
  if (t->memory && p->sent) {
    p->sent = false;
    return t->memory->arrive_in(t->memory->ctx) ? MR_E_IO : MR_OK;
  }
  for (int i = 0; i < p->n && !rc; i++) {
    const uint8_t *from = p->room + (size_t)i * bytes;
    rc = t->memory ? t->memory->send(t->memory->ctx, mr_kv_page(t->kv, p->to[i]), from, bytes)
                   : mr_kv_write(t->kv, p->to[i], from);
  }
  p->sent = t->memory && p->n;
  return rc ? MR_E_IO : p->sent ? MR_E_AGAIN : MR_OK;
}

mr_code mr_kvtier_fetched(mr_kvtier *t, mr_parked *p) {
  mr_code rc = p->lost ? MR_E_IO : MR_OK;
  for (int i = 0; i < p->n && !p->lost; i++) {
    mr_spill_status state = mr_spill_state(t->spill, p->slots[i]);
    if (state == MR_SPILL_READING)
      return MR_E_AGAIN;
    if (state != MR_SPILL_READY)
      rc = MR_E_IO;
  }
  if (!rc && p->room)
    rc = bring_in(t, p);
  if (rc == MR_E_AGAIN)
    return rc;
  mr_kvtier_forget(t, p);
  return rc;
}

bool mr_kvtier_has(const mr_parked *p, int i) {
  return p->saved ? p->pages[i].at != MR_SAVED_DROPPED : p->slots[i] != DROPPED;
}

bool mr_kvtier_read(mr_kvtier *t, const mr_parked *p, int i, void *to) {
  if (p->saved)
    return mr_saved_read(p->saved, &p->pages[i], to);
  land_parked(t, p);
  if (p->slots[i] < 0)
    return false;
  mr_spill_get(t->spill, p->slots[i], to);
  while (mr_spill_state(t->spill, p->slots[i]) == MR_SPILL_READING)
    mr_spill_wait(t->spill);
  return mr_spill_state(t->spill, p->slots[i]) == MR_SPILL_READY;
}

void mr_kvtier_forget(mr_kvtier *t, mr_parked *p) {
  land_parked(t, p);
  if (p->sent)
    t->memory->arrive_in(t->memory->ctx);
  for (int i = 0; i < p->n && !p->saved; i++)
    if (p->slots[i] >= 0)
      mr_spill_drop(t->spill, p->slots[i]);
  mr_mem_free(p->slots);
  if (t->memory && p->room)
    t->memory->room_free(t->memory->ctx, p->room);
  else
    mr_mem_free(p->room);
  mr_mem_free(p->to);
  *p = (mr_parked){0};
}

void mr_kvtier_wait(mr_kvtier *t) {
  if (t->spill)
    mr_spill_wait(t->spill);
}

void mr_kvtier_stats_get(const mr_kvtier *t, mr_kvtier_stats *out) {
  mr_spill_stats st = {0};
  if (t->spill)
    mr_spill_stats_get(t->spill, &st);
  *out = (mr_kvtier_stats){.spill_bytes = st.written_bytes,
                           .fetch_bytes = st.read_bytes + t->saved_bytes,
                           .failures = st.failures,
                           .stall_s = st.stall_s};
}
