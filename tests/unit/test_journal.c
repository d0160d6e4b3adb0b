#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"
#include "jobs/framerec.h"
#include "jobs/journal.h"

static char dir[] = "/tmp/mr_test_journal_XXXXXX";
static char path[64];

typedef struct seen {
  int n;
  uint32_t types[16];
  char text[1024]; /* payloads, one after the other */
  size_t len;
  int refuse; /* refuse the record with this number; -1: none */
} seen;

static mr_code look(void *ctx, uint32_t type, const unsigned char *payload, size_t len) {
  seen *s = ctx;
  if (s->n == s->refuse || s->n == 16 || len > sizeof s->text - s->len)
    return MR_E_DATA;
  s->types[s->n++] = type;
  memcpy(s->text + s->len, payload, len);
  s->len += len;
  return MR_OK;
}

static const char *const payloads[] = {"first", "", "a longer third record", "4"};
#define N_PAYLOADS 4

static size_t make(mr_text *bytes, size_t ends[N_PAYLOADS + 1]) {
  mr_journal *j;
  mr_err e = MR_ERR_INIT;
  struct stat st;
  unlink(path);
  assert_int_equal(mr_journal_create(&j, path, "{\"head\":1}", 10, &e), MR_OK);
  for (int i = 0; i <= N_PAYLOADS; i++) {
    assert_int_equal(stat(path, &st), 0);
    ends[i] = (size_t)st.st_size;
    if (i < N_PAYLOADS)
      assert_int_equal(mr_journal_append(j, MR_RECORD_FRAME, payloads[i], strlen(payloads[i]), &e),
                       MR_OK);
  }
  mr_journal_close(j);
  int fd = open(path, O_RDONLY);
  char buf[512];
  ssize_t n = read(fd, buf, sizeof buf);
  close(fd);
  mr_text_add(bytes, buf, (size_t)n);
  return bytes->len;
}

static void save(const char *bytes, size_t len) {
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  assert_int_equal(write(fd, bytes, len), (ssize_t)len);
  close(fd);
}

static void round_trip(void **state) {
  (void)state;
  mr_text bytes = {0};
  size_t ends[N_PAYLOADS + 1];
  seen s = {.refuse = -1};
  uint64_t torn = 9;
  mr_err e = MR_ERR_INIT;
  make(&bytes, ends);
  assert_int_equal(mr_journal_read(path, look, &s, &torn, &e), MR_OK);
  assert_int_equal(s.n, 1 + N_PAYLOADS);
  assert_int_equal(torn, 0);
  assert_int_equal(s.types[0], MR_RECORD_HEADER);
  assert_memory_equal(s.text, "{\"head\":1}firsta longer third record4", s.len);
  mr_text_free(&bytes);
}

/* J1, J2: torn at every byte, the whole records before it remain, the rest is cut, and appending
 * goes on. */
static void torn_at_every_byte(void **state) {
  (void)state;
  mr_text bytes = {0};
  size_t ends[N_PAYLOADS + 1], len = make(&bytes, ends);
  for (size_t cut = 0; cut < len; cut++) {
    mr_journal *j = NULL;
    mr_err e = MR_ERR_INIT;
    seen s = {.refuse = -1}, again = {.refuse = -1};
    struct stat st;
    int whole = 0;
    while (whole <= N_PAYLOADS && ends[whole] <= cut)
      whole++;
    save(bytes.data, cut);
    mr_code rc = mr_journal_open(&j, path, look, &s, &e);
    assert_int_equal(rc, whole ? MR_OK : MR_E_DATA);
    if (rc)
      continue;
    assert_int_equal(s.n, whole);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, ends[whole - 1]);
    assert_int_equal(mr_journal_append(j, MR_RECORD_RUN, "more", 4, &e), MR_OK);
    mr_journal_close(j);
    assert_int_equal(mr_journal_read(path, look, &again, NULL, &e), MR_OK);
    assert_int_equal(again.n, whole + 1);
    assert_memory_equal(again.text + again.len - 4, "more", 4);
  }
  mr_text_free(&bytes);
  assert_int_equal(mr_mem_live(), 0);
}

/* J1: a flipped bit ends the good prefix at its record; no later record is taken. */
static void every_flipped_bit(void **state) {
  (void)state;
  mr_text bytes = {0};
  size_t ends[N_PAYLOADS + 1], len = make(&bytes, ends);
  for (size_t bit = 0; bit < len * 8; bit++) {
    mr_err e = MR_ERR_INIT;
    seen s = {.refuse = -1};
    int whole = 0;
    while (whole <= N_PAYLOADS && ends[whole] <= bit / 8)
      whole++;
    bytes.data[bit / 8] ^= (char)(1 << bit % 8);
    save(bytes.data, len);
    bytes.data[bit / 8] ^= (char)(1 << bit % 8);
    assert_int_equal(mr_journal_read(path, look, &s, NULL, &e), whole ? MR_OK : MR_E_DATA);
    assert_int_equal(s.n, whole);
  }
  mr_text_free(&bytes);
}

/* J5: what the reader refuses ends the prefix too. Reading alone changes nothing. */
static void refused_record(void **state) {
  (void)state;
  mr_text bytes = {0};
  size_t ends[N_PAYLOADS + 1], len = make(&bytes, ends);
  for (int r = 1; r <= N_PAYLOADS; r++) {
    mr_err e = MR_ERR_INIT;
    seen s = {.refuse = r};
    uint64_t torn = 0;
    struct stat st;
    assert_int_equal(mr_journal_read(path, look, &s, &torn, &e), MR_OK);
    assert_int_equal(s.n, r);
    assert_int_equal(torn, len - ends[r - 1]);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, len);
  }
  mr_text_free(&bytes);
}

static int fail_sync(int fd) {
  (void)fd;
  errno = EIO;
  return -1;
}

/* J4: after a failed sync nothing more is written, also when syncs would succeed again. */
static void failed_sync_is_final(void **state) {
  (void)state;
  mr_journal *j;
  mr_err e = MR_ERR_INIT;
  struct stat before, after;
  mr_sys bad = mr_sys_os;
  bad.fdatasync = fail_sync;
  unlink(path);
  assert_int_equal(mr_journal_create(&j, path, "{}", 2, &e), MR_OK);
  mr_sys_now = &bad;
  assert_int_equal(mr_journal_append(j, MR_RECORD_RUN, "x", 1, &e), MR_E_IO);
  mr_sys_now = &mr_sys_os;
  assert_int_equal(stat(path, &before), 0);
  assert_int_equal(mr_journal_append(j, MR_RECORD_RUN, "y", 1, &e), MR_E_IO);
  assert_int_equal(stat(path, &after), 0);
  assert_int_equal(before.st_size, after.st_size);
  mr_journal_close(j);
}

/* J3: a failing call at any point of creation leaves no journal without a header. */
static int calls_left;

static ssize_t failing_write(int fd, const void *b, size_t n) {
  return calls_left-- == 0 ? (errno = ENOSPC, -1) : mr_sys_os.write(fd, b, n);
}

static int failing_fsync(int fd) {
  return calls_left-- == 0 ? (errno = EIO, -1) : mr_sys_os.fsync(fd);
}

static int failing_rename(const char *a, const char *b) {
  return calls_left-- == 0 ? (errno = EIO, -1) : mr_sys_os.rename(a, b);
}

static void creation_fails_at_each_call(void **state) {
  (void)state;
  mr_sys bad = mr_sys_os;
  bad.write = failing_write;
  bad.fsync = failing_fsync;
  bad.rename = failing_rename;
  mr_code rc = MR_E_IO;
  for (int n = 0; rc != MR_OK; n++) {
    mr_journal *j = NULL;
    mr_err e = MR_ERR_INIT;
    seen s = {.refuse = -1};
    unlink(path);
    calls_left = n;
    mr_sys_now = &bad;
    rc = mr_journal_create(&j, path, "{}", 2, &e);
    mr_sys_now = &mr_sys_os;
    if (rc == MR_OK)
      mr_journal_close(j);
    else if (access(path, F_OK) == 0)
      assert_int_equal(mr_journal_read(path, look, &s, NULL, &e), MR_OK);
    assert_true(n < 10);
  }
  assert_int_equal(mr_mem_live(), 0);
}

static void frame_record_round_trip(void **state) {
  (void)state;
  mr_frame_line lines[] = {{7, 10}, {3, 1}, {4, 300}, {999999, 70000}, {0, 2}};
  mr_frame_rec rec = {.stream = MR_LINE_ERROR,
                      .offset = 1u << 20,
                      .bytes = 12345,
                      .text_bytes = 70313,
                      .prompt_tokens = 77,
                      .output_tokens = 0,
                      .check = 0xfedcba9876543210u,
                      .n_lines = 5},
               got;
  mr_text t = {0};
  mr_framerec_encode(&rec, lines, &t);
  const unsigned char *bytes = (const unsigned char *)t.data;
  assert_true(mr_framerec_decode(&got, bytes, t.len, 1000000));
  assert_int_equal(got.stream, MR_LINE_ERROR);
  assert_true(got.offset == rec.offset && got.bytes == rec.bytes && got.check == rec.check);
  assert_true(got.prompt_tokens == 77 && got.output_tokens == 0 && got.n_lines == 5);
  mr_frame_line l = {0};
  const unsigned char *p = got.lines;
  for (int i = 0; i < 5; i++) {
    assert_true(mr_framerec_next(&got, &p, &l));
    assert_true(l.row == lines[i].row && l.bytes == lines[i].bytes);
  }
  assert_false(mr_framerec_next(&got, &p, &l));
  assert_false(mr_framerec_decode(&got, bytes, t.len, 999999)); /* J5: a row beyond the job */
  for (size_t n = 0; n < t.len; n++)
    assert_false(mr_framerec_decode(&got, bytes, n, 1000000));
  mr_text_free(&t);
}

/* J5: any bytes may stand in a record; decoding never reads beyond them (run under the sanitizers).
 */
static void frame_record_of_noise(void **state) {
  (void)state;
  uint64_t x = 88172645463325252u;
  for (int round = 0; round < 20000; round++) {
    size_t len = (size_t)(round % 40);
    unsigned char *b = malloc(len ? len : 1);
    mr_frame_rec rec;
    for (size_t i = 0; i < len; i++) {
      x ^= x << 13, x ^= x >> 7, x ^= x << 17;
      b[i] = (unsigned char)(i == 0 ? x & 1 : round & 1 ? x & 0x83 : x);
    }
    if (mr_framerec_decode(&rec, b, len, 1000))
      assert_true(rec.n_lines > 0 && rec.n_lines <= len);
    free(b);
  }
}

static int begin(void **state) {
  (void)state;
  if (!mkdtemp(dir))
    return -1;
  snprintf(path, sizeof path, "%s/journal", dir);
  return 0;
}

static int end(void **state) {
  (void)state;
  unlink(path);
  return rmdir(dir);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(round_trip),
      cmocka_unit_test(torn_at_every_byte),
      cmocka_unit_test(every_flipped_bit),
      cmocka_unit_test(refused_record),
      cmocka_unit_test(failed_sync_is_final),
      cmocka_unit_test(creation_fails_at_each_call),
      cmocka_unit_test(frame_record_round_trip),
      cmocka_unit_test(frame_record_of_noise),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
