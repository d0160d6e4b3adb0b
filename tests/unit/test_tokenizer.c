#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <archive.h>
#include <archive_entry.h>
#include <dirent.h>
#include <zstd.h>

#include "conformance.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "vocab_builder.h"

enum { ADD = MR_TOK_ADD_SPECIAL, PARSE = MR_TOK_PARSE_SPECIAL, UP = MR_TOK_UPSTREAM };

static mr_vocab *good(const vocab_parts *p) {
  mr_err err = MR_ERR_INIT;
  mr_vocab *v = NULL;
  assert_int_equal(open_parts(p, &v, &err), MR_OK);
  return v;
}

/* The ids of a text, in words: "1 2 3". */
static void ids_are(const mr_vocab *v, const char *text, size_t len, const uint8_t *plain,
                    int flags, const char *want) {
  mr_err err = MR_ERR_INIT;
  mr_ids ids = {0};
  mr_text got = {0};
  assert_int_equal(mr_tokenizer_encode(v, text, len, plain, flags, &ids, &err), MR_OK);
  for (size_t i = 0; i < ids.n; i++)
    mr_text_addf(&got, i ? " %d" : "%d", ids.ids[i]);
  assert_string_equal(got.data ? got.data : "", want);
  mr_text_free(&got);
  mr_ids_free(&ids);
}

#define IDS(v, text, flags, want) ids_are(v, text, sizeof text - 1, NULL, flags, want)

/* ---- hand-made vocabularies ---- */

static void bpe_merges(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  mr_vocab *v = good(&p);
  IDS(v, "", 0, "");
  IDS(v, "", ADD, "264");
  IDS(v, "hello", 0, "259");
  IDS(v, "hello wor", ADD, "264 259 262");
  IDS(v, "hellll", 0, "258 257"); /* "h e" comes before "l l", and of "l l" the leftmost */
  IDS(v, "llll", 0, "257 257");
  IDS(v, "a\0b", 0, "97 0 98");
  IDS(v, "\xc3\xa9", 0, "263");
  mr_vocab_close(v);
}

/* llama3 and its kin take a word that is a token before they merge; here no merge leads to it. */
static void whole_words(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  int32_t id = add_token(&p, "xyz", MR_TOKEN_NORMAL, 0);
  mr_vocab *v = good(&p);
  IDS(v, "xyz", 0, "120 121 122");
  mr_vocab_close(v);
  p.pre = "llama-bpe";
  v = good(&p);
  char want[16];
  snprintf(want, sizeof want, "%d", id);
  IDS(v, "xyz", 0, want);
  mr_vocab_close(v);
}

static void invalid_utf8(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  mr_vocab *v = good(&p);
  IDS(v, "a\xff", 0, "97 239 191 189");
  IDS(v, "\xe2\x82", 0, "239 191 189 239 191 189");
  IDS(v, "\xed\xa0\x80", 0, "237 160 128"); /* a surrogate */
  IDS(v, "\xc0\x80", 0, "0");               /* overlong */
  IDS(v, "\xf4\x90\x80\x80", 0, "239 191 189 239 191 189 239 191 189 239 191 189");
  mr_vocab_close(v);
  p = spm_parts();
  v = good(&p);
  IDS(v, "\xff\xe2\x82", 0, "259 258 229 133");
  mr_vocab_close(v);
}

static void missing_bytes(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  snprintf(p.text['q'], sizeof p.text['q'], "qqq");
  mr_vocab *v = good(&p);
  mr_err err = MR_ERR_INIT;
  mr_ids ids = {0};
  assert_true(mr_ids_push(&ids, 7));
  assert_int_equal(mr_tokenizer_encode(v, "aqb", 3, NULL, 0, &ids, &err), MR_E_DATA);
  assert_non_null(strstr(err.text, "0x71"));
  assert_int_equal(ids.n, 1); /* nothing was added */
  IDS(v, "aqb", UP, "97 98");
  mr_ids_free(&ids);
  mr_vocab_close(v);
}

static void special_tokens(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  mr_vocab *v = good(&p);
  IDS(v, "a<u>b", 0, "97 267 98"); /* user-defined: always */
  IDS(v, "<|im_end|>", PARSE, "265");
  IDS(v, "<|s|>", 0, "60 124 115 124 62");
  IDS(v, "<|s|>x", PARSE | ADD, "264 120"); /* no second BOS */
  IDS(v, "<|s|>x", PARSE | ADD | UP, "264 264 120");
  IDS(v, "x<|s|>", PARSE | ADD, "264 120 264");
  IDS(v, "<|s|><|im_end|>", PARSE, "264 265");            /* the longest token comes first */
  IDS(v, "<|s|><|s|><|", PARSE, "266 115 124 62 60 124"); /* of equal length the leftmost */
  IDS(v, "<|s|><|im", PARSE, "266 105 109");
  static const uint8_t plain[] = {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  ids_are(v, "<|s|><u><|s|>", 13, plain, PARSE, "60 124 115 124 62 267 264");
  mr_vocab_close(v);
}

/* Longest first at one place gives way to a shorter one where a longer token has taken a part. */
static void overlaps(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  int32_t n[4];
  for (int i = 1; i < 4; i++)
    n[i] = add_token(&p, &"\n\n\n"[3 - i], MR_TOKEN_USER, 0);
  mr_vocab *v = good(&p);
  char want[32];
  snprintf(want, sizeof want, "%d %d %d", n[3], n[3], n[1]);
  IDS(v, "\n\n\n\n\n\n\n", 0, want);
  snprintf(want, sizeof want, "%d 97 %d", n[2], n[1]);
  IDS(v, "\n\na\n", 0, want);
  mr_vocab_close(v);
}

static void stripped_spaces(void **state) {
  (void)state;
  vocab_parts p = spm_parts();
  mr_vocab *v = good(&p);
  IDS(v, "a<x> \na", PARSE, "262 267 266 13 260"); /* "▁▁", "\n" as a byte, "a" */
  mr_vocab_close(v);
  p.name = "Phi-3 mini";
  v = good(&p);
  IDS(v, "a<x> \na", PARSE, "262 267 262");
  IDS(v, "a<s> a", PARSE, "262 1 259 262"); /* not this one */
  mr_vocab_close(v);
}

static void spm_merges(void **state) {
  (void)state;
  vocab_parts p = spm_parts();
  mr_vocab *v = good(&p);
  IDS(v, "", ADD, "1");
  IDS(v, "ab", ADD, "1 264");
  IDS(v, "a b", 0, "262 259 261");
  IDS(v, "aab", 0, "262 263");             /* "ab" scores above "▁a" and "▁ab" */
  IDS(v, "ab<x>ab", PARSE, "264 267 264"); /* a space after a special token too */
  IDS(v, "ab<u>ab", 0, "264 268 264");
  IDS(v, "<s>ab", PARSE | ADD, "1 264");
  IDS(v, "<s>", 0, "259 63 118 65"); /* a control token is no merge */
  IDS(v, "\xc3\xa9\xc3\xa8", 0, "259 265 198 171");
  mr_vocab_close(v);
  p.space_prefix = 0, p.add_eos = 1;
  v = good(&p);
  IDS(v, "ab", ADD, "1 263 2");
  mr_vocab_close(v);
}

static void text_is(const mr_vocab *v, const int32_t *ids, size_t n, bool strip, bool control,
                    const char *want) {
  mr_detok d;
  mr_text out = {0};
  mr_detok_init(&d, v, strip, control);
  for (size_t i = 0; i < n; i++) {
    mr_detok_push(&d, ids[i], &out);
    assert_true(mr_utf8_valid(out.data ? out.data : "", out.len) < 0); /* never half a character */
  }
  mr_detok_finish(&d, &out);
  assert_string_equal(out.data ? out.data : "", want);
  mr_text_free(&out);
}

#define TEXT(v, strip, control, want, ...)                                                         \
  do {                                                                                             \
    const int32_t list[] = {__VA_ARGS__};                                                          \
    text_is(v, list, sizeof list / sizeof *list, strip, control, want);                            \
  } while (0)

static void detokenize(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  mr_vocab *v = good(&p);
  TEXT(v, true, false, "hello wor", 264, 259, 262, 265);
  TEXT(v, true, true, "<|s|> wor<u>", 264, 262, 267);
  TEXT(v, true, false, " wor", 262); /* only SentencePiece adds a space, so only there it goes */
  TEXT(v, true, false, "\xe2\x82\xac\xc3\xa9", 0xe2, 0x82, 0xac, 0xc3, 0xa9);
  TEXT(v, true, false, "\xef\xbf\xbd", 0xe2, 0x82);
  TEXT(v, true, false,
       "\xef\xbf\xbd"
       "a",
       0xe2, 0x82, 'a');
  TEXT(v, true, false, "\xef\xbf\xbd\xc3\xa9", 0xf0, 263);
  TEXT(v, true, false, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 0xed, 0xa0, 0x80);
  TEXT(v, true, false, "a", -1, 4000, 'a'); /* no such ids: nothing */
  mr_vocab_close(v);
  p = spm_parts();
  v = good(&p);
  TEXT(v, true, false, "ab ab", 1, 264, 264, 2);
  TEXT(v, false, false, " ab", 264);
  TEXT(v, true, false, " a", 266, 260);
  TEXT(v, true, false, "\xc3\xa9<u>", 3 + 0xc3, 3 + 0xa9, 268);
  mr_vocab_close(v);
  p.space_prefix = 0;
  v = good(&p);
  TEXT(v, true, false, " ab", 264);
  mr_vocab_close(v);
}

static uint32_t next_random(uint64_t *x) {
  *x = *x * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*x >> 33);
}

/* Random valid UTF-8 that the vocabulary's words and special texts occur in. */
static void random_text(uint64_t *seed, mr_text *t) {
  static const char *const words[] = {"hello", " wor", "ll", "<u>",
                                      "<|s|>", "  ",   "\n", "\xc3\xa9"};
  for (uint32_t n = next_random(seed) % 40; n; n--) {
    uint32_t r = next_random(seed), code = r % (r & 1 ? 0x250 : 0x110000);
    if (r & 2)
      mr_text_adds(t, words[(r >> 3) % 8]);
    else if (code < 0xd800 || code > 0xdfff)
      mr_text_add_code(t, code);
  }
}

static void round_trip(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  mr_vocab *v = good(&p);
  mr_err err = MR_ERR_INIT;
  uint64_t seed = 11;
  for (int k = 0; k < 3000; k++) {
    mr_text text = {0}, back = {0};
    mr_ids ids = {0};
    mr_detok d;
    random_text(&seed, &text);
    int flags = k & 1 ? PARSE : 0;
    assert_int_equal(
        mr_tokenizer_encode(v, text.data ? text.data : "", text.len, NULL, flags, &ids, &err),
        MR_OK);
    mr_detok_init(&d, v, true, true);
    for (size_t i = 0; i < ids.n; i++)
      mr_detok_push(&d, ids.ids[i], &back);
    mr_detok_finish(&d, &back);
    assert_int_equal(back.len, text.len);
    assert_true(!text.len || !memcmp(back.data, text.data, text.len));
    mr_text_free(&text);
    mr_text_free(&back);
    mr_ids_free(&ids);
  }
  mr_vocab_close(v);
}

/* A text of one long word or run must not be quadratic. */
static void long_texts(void **state) {
  (void)state;
  vocab_parts parts[] = {bpe_parts(), spm_parts()};
  add_token(&parts[1], "\n\n", MR_TOKEN_USER, 0);
  size_t n = 200000;
  char *text = malloc(n);
  double start = mr_sys_seconds();
  for (int k = 0; k < 2; k++) {
    mr_vocab *v = good(&parts[k]);
    for (const char *unit = "ahlb \n<"; *unit; unit++) {
      mr_err err = MR_ERR_INIT;
      mr_ids ids = {0};
      memset(text, *unit, n);
      assert_int_equal(mr_tokenizer_encode(v, text, n, NULL, PARSE, &ids, &err), MR_OK);
      assert_true(ids.n >= n / 2 - 1);
      mr_ids_free(&ids);
    }
    mr_vocab_close(v);
  }
  assert_true(mr_sys_seconds() - start < 30);
  free(text);
}

static void failing_memory(void **state) {
  (void)state;
  vocab_parts parts[] = {bpe_parts(), spm_parts()};
  static const char text[] = "hello <u> ab <|s|>\xff <x> abab";
  for (int k = 0; k < 2; k++) {
    mr_vocab *v = good(&parts[k]);
    int64_t live = mr_mem_live();
    mr_code c = MR_E_NOMEM;
    for (int64_t n = 0; c; n++) {
      mr_err err = MR_ERR_INIT;
      mr_ids ids = {0};
      mr_mem_fail_after(n);
      c = mr_tokenizer_encode(v, text, sizeof text - 1, NULL, ADD | PARSE, &ids, &err);
      mr_mem_fail_after(-1);
      assert_true(c == MR_OK || (c == MR_E_NOMEM && !ids.n));
      mr_ids_free(&ids);
      assert_int_equal(mr_mem_live(), live);
    }
    mr_vocab_close(v);
  }
}

/* ---- conformance data ---- */

/* All of a file, through gzip if it is; freed by the caller. */
static void read_lines(const char *path, mr_text *out) {
  struct archive *a = archive_read_new();
  struct archive_entry *e;
  archive_read_support_filter_gzip(a);
  archive_read_support_format_raw(a);
  assert_int_equal(archive_read_open_filename(a, path, 1 << 16), ARCHIVE_OK);
  assert_int_equal(archive_read_next_header(a, &e), ARCHIVE_OK);
  char buf[1 << 14];
  for (ssize_t n; (n = archive_read_data(a, buf, sizeof buf)) != 0;) {
    assert_true(n > 0);
    mr_text_add(out, buf, (size_t)n);
  }
  archive_read_free(a);
  assert_false(out->failed);
}

static mr_vocab *open_packed(const char *path) {
  size_t n = 0;
  char *packed = read_whole(path, &n);
  assert_non_null(packed);
  unsigned long long size = ZSTD_getFrameContentSize(packed, n);
  assert_true(size < (1u << 30));
  char *raw = malloc((size_t)size);
  assert_int_equal(ZSTD_decompress(raw, (size_t)size, packed, n), size);
  const char *file = build_write("vocab.gguf", raw, (size_t)size);
  mr_err err = MR_ERR_INIT;
  mr_gguf *g = NULL;
  mr_vocab *v = NULL;
  assert_int_equal(mr_gguf_open(&g, file, &err), MR_OK);
  assert_int_equal(mr_vocab_open(&v, g, &err), MR_OK);
  mr_gguf_close(g);
  build_remove(file);
  free(raw);
  free(packed);
  return v;
}

static bool same(const mr_ids *ids, json_t *want) {
  bool equal = json_array_size(want) == ids->n;
  for (size_t i = 0; equal && i < ids->n; i++)
    equal = json_integer_value(json_array_get(want, i)) == ids->ids[i];
  return equal;
}

static bool case_right(const mr_vocab *v, json_t *line) {
  mr_err err = MR_ERR_INIT;
  mr_text text = {0};
  mr_ids ids = {0};
  json_t *plain = json_object_get(line, "text"), *coded = json_object_get(line, "text_b64");
  if (plain)
    mr_text_add(&text, json_string_value(plain), json_string_length(plain));
  else
    assert_true(mr_base64_decode(json_string_value(coded), json_string_length(coded), &text));
  int flags = UP | (json_is_true(json_object_get(line, "add_special")) ? ADD : 0) |
              (json_is_true(json_object_get(line, "parse_special")) ? PARSE : 0);
  mr_code c = mr_tokenizer_encode(v, text.data ? text.data : "", text.len, NULL, flags, &ids, &err);
  bool right = !c && same(&ids, json_object_get(line, "ids"));
  mr_text_free(&text);
  mr_ids_free(&ids);
  return right;
}

/* Counts the cases of a file that no line of theirs agrees with; lines of one case stand together.
 */
static int wrong_cases(const mr_vocab *v, const char *path, int *n) {
  mr_text all = {0};
  mr_err err = MR_ERR_INIT;
  char last[64] = "";
  bool right = true;
  int wrong = 0;
  read_lines(path, &all);
  for (char *s = all.data, *end; s < all.data + all.len; s = end + 1) {
    end = memchr(s, '\n', (size_t)(all.data + all.len - s));
    end = end ? end : all.data + all.len;
    json_t *line = mr_json_parse(s, (size_t)(end - s), NULL, &err);
    assert_non_null(line);
    const char *name = json_string_value(json_object_get(line, "case"));
    if (strcmp(name, last)) {
      wrong += !right;
      right = false;
      snprintf(last, sizeof last, "%s", name);
      ++*n;
    }
    right = right || case_right(v, line);
    json_decref(line);
  }
  mr_text_free(&all);
  return wrong + !right;
}

static void conformance(void **state) {
  (void)state;
  const char *found = data_path("conformance/tokenizers");
  if (!found)
    skip();
  char base[4096], path[4600];
  snprintf(base, sizeof base, "%s", found);
  snprintf(path, sizeof path, "%s/vocab", base);
  DIR *dir = opendir(path);
  assert_non_null(dir);
  int n = 0, wrong = 0;
  for (struct dirent *e; (e = readdir(dir));) {
    char *dot = strstr(e->d_name, ".gguf.zst");
    if (!dot)
      continue;
    snprintf(path, sizeof path, "%s/vocab/%s", base, e->d_name);
    mr_vocab *v = open_packed(path);
    *dot = 0;
    for (int k = 0; v && k < 2; k++) {
      struct stat st;
      snprintf(path, sizeof path, k ? "%s/vendor/%s.jsonl" : "%s/cases/%s.jsonl.gz", base,
               e->d_name);
      int bad = stat(path, &st) ? 0 : wrong_cases(v, path, &n);
      if (bad)
        print_message("%s: %d wrong\n", path, bad);
      wrong += bad;
    }
    mr_vocab_close(v);
  }
  closedir(dir);
  assert_int_equal(wrong, 0);
  assert_true(n > 1000);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bpe_merges),      cmocka_unit_test(whole_words),
      cmocka_unit_test(invalid_utf8),    cmocka_unit_test(missing_bytes),
      cmocka_unit_test(special_tokens),  cmocka_unit_test(overlaps),
      cmocka_unit_test(stripped_spaces), cmocka_unit_test(spm_merges),
      cmocka_unit_test(detokenize),      cmocka_unit_test(round_trip),
      cmocka_unit_test(long_texts),      cmocka_unit_test(failing_memory),
      cmocka_unit_test(conformance),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
