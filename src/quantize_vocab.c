/* The tokenizer of a directory as keys of a GGUF file: byte-level BPE with a pre-tokenizer that has
 * a name there, and BPE with byte fallback, which is SentencePiece's. Whether the file's tokenizer
 * gives the same ids is tried out, on a text of everything that tokenizers differ in. */
#include <stdio.h>
#include <string.h>

#include "io/mem.h"
#include "src/hf_dir.h"
#include "src/hf_tokenizer.h"
#include "src/quantize_plan.h"

static const char probe[] =
    "Hello, World! It's what they'd say: I'LL, you've; don't. 1 22 333 4444 55555 3.14159 1,000\n"
    "  two spaces\n\n\n\tTabs\t\tand   runs \r\n  \n x=y+z; a->b[i]++ /* c */ {\"k\": [1, 2]} !!! "
    "?? ...\n"
    "CamelCaseWords HTTPServer snake_case UPPER lower McDonald's caf\xc3\xa9 na\xc3\xafve "
    "\xc3\x9c"
    "ber stra\xc3\x9f"
    "e \xd0\x9f\xd1\x80\xd0\xb8\xd0\xb2\xd0\xb5\xd1\x82, \xd0\xbc\xd0\xb8\xd1\x80! "
    "\xe4\xbd\xa0\xe5\xa5\xbd\xef\xbc\x8c\xe4\xb8\x96\xe7\x95\x8c\xe3\x80\x82"
    "\xe3\x81\x93\xe3\x82\x93\xe3\x81\xab\xe3\x81\xa1\xe3\x81\xaf "
    "\xec\x95\x88\xeb\x85\x95 "
    "\xe0\xa4\xa8\xe0\xa4\xae\xe0\xa4\xb8\xe0\xa5\x8d\xe0\xa4\xa4\xe0\xa5\x87 "
    "\xd9\x85\xd8\xb1\xd8\xad\xd8\xa8\xd8\xa7 \xf0\x9f\x98\x80\xf0\x9f\x91\x8d\xf0\x9f\x8f\xbd "
    "\xc2\xa0nbsp \xe2\x80\x94 dash 12\xc2\xbd \xd9\xa1\xd9\xa2\xd9\xa3 \xe2\x82\xac"
    "5 x\xc2\xb2 'quoted' \"double\" $100 50% #tag @user http://a.b/c?d=e&f=g     ";

typedef struct source { /* of the directory */
  mr_hf_dir dir;
  mr_vocab *v; /* NULL: none */
} source;

static mr_code source_open(source *s, const char *dir, mr_err *err) {
  *s = (source){0};
  mr_code rc = mr_hf_dir_open(&s->dir, dir, err);
  return rc ? rc : mr_hf_dir_vocab(&s->dir, &s->v, err);
}

static void source_close(source *s) {
  mr_vocab_close(s->v);
  mr_hf_dir_close(&s->dir);
}

/* ------------------------------------------------------------------ which pre-tokenizer */

/* Characters of a piece: bytes of the text, in byte-level spelling. */
static size_t characters(const char *s, size_t n) {
  size_t count = 0;
  for (size_t i = 0; i < n; i++)
    count += ((uint8_t)s[i] & 0xc0) != 0x80;
  return count;
}

static bool same_cuts(const mr_hf_pieces *p, const mr_cuts *c) {
  size_t at = 0;
  if (p->n != c->n)
    return false;
  for (size_t i = 0; i < c->n; i++) {
    at += characters(p->s.data + p->p[i].at, p->p[i].len);
    if (at != c->end[i])
      return false;
  }
  return true;
}

/* The name of the pre-tokenizer that cuts as the directory's does; NULL: none. */
static mr_code find_pre(const mr_vocab *v, const char **name, mr_err *err) {
  static const char *const names[] = {
      "gpt-2",  "llama-bpe", "qwen2",        "smollm",         "gpt-4o",      "tekken",
      "falcon", "dbrx",      "deepseek-llm", "deepseek-coder", "deepseek-v3", "bloom",
      "viking", "qwen35",    "default",      "chameleon",      "bailingmoe",  "seed-coder"};
  mr_hf_work w = {0};
  mr_cuts cuts = {0};
  *name = NULL;
  mr_code rc = mr_hf_cut(v->hf, &w, probe, sizeof probe - 1, true, err);
  for (size_t i = 0; i < sizeof names / sizeof *names && !rc && !*name; i++) {
    mr_pretok *p = NULL;
    rc = mr_pretok_open(&p, names[i], strlen(names[i]), err);
    if (!rc)
      rc = mr_pretok_cut(p, probe, sizeof probe - 1, &cuts, err);
    if (!rc && same_cuts(&w.cur, &cuts) && mr_pretok_whole_words(p) == v->hf->whole_words)
      *name = names[i];
    mr_pretok_close(p);
  }
  mr_cuts_free(&cuts);
  mr_hf_work_free(&w);
  return rc;
}

/* ------------------------------------------------------------------ tables */

static bool is_byte(const mr_vocab *v, int32_t id) {
  for (int b = 0; b < 256; b++)
    if (v->byte_id[b] == id)
      return true;
  return false;
}

static void texts(mr_gguf_writer *w, const mr_vocab *v, int rows) {
  char name[32];
  mr_gguf_write_array(w, "tokenizer.ggml.tokens", MR_GGUF_STRING, (uint64_t)rows);
  for (int32_t i = 0; i < rows; i++) {
    mr_str s = i < v->n ? mr_vocab_text(v, i) : (mr_str){"", 0};
    if (!s.len) /* an id without a text: names must differ */
      s = (mr_str){name, (size_t)snprintf(name, sizeof name, "[PAD%d]", i)};
    mr_gguf_write_item_str(w, s.s, s.len);
  }
}

static void types(mr_gguf_writer *w, const mr_vocab *v, int rows, bool spm) {
  mr_gguf_write_array(w, "tokenizer.ggml.token_type", MR_GGUF_I32, (uint64_t)rows);
  for (int32_t i = 0; i < rows; i++) {
    int type = i < v->n ? v->type[i] : MR_TOKEN_UNUSED;
    if (spm && i == v->hf->unk)
      type = MR_TOKEN_UNKNOWN;
    else if (spm && type == MR_TOKEN_NORMAL && is_byte(v, i))
      type = MR_TOKEN_BYTE;
    mr_gguf_write_item_i32(w, type);
  }
}

/* Rules by rank: an array of slots, UINT32_MAX where there is none. */
static uint32_t *by_rank(const mr_vocab *v, uint32_t *n) {
  *n = 0;
  for (uint32_t i = 0; v->rules && i <= v->rules_mask; i++)
    if (v->rules[i].pair != UINT64_MAX && (uint32_t)v->rules[i].rank >= *n)
      *n = (uint32_t)v->rules[i].rank + 1;
  uint32_t *slots = mr_mem_alloc(*n, sizeof *slots);
  if (!slots)
    return NULL;
  memset(slots, 0xff, *n * sizeof *slots);
  for (uint32_t i = 0; v->rules && i <= v->rules_mask; i++)
    if (v->rules[i].pair != UINT64_MAX)
      slots[v->rules[i].rank] = i;
  return slots;
}

/* False: no memory. */
static bool merges(mr_gguf_writer *w, const mr_vocab *v, const uint32_t *slots, uint32_t n) {
  uint64_t count = 0;
  mr_text t = {0};
  for (uint32_t i = 0; i < n; i++)
    count += slots[i] != UINT32_MAX;
  mr_gguf_write_array(w, "tokenizer.ggml.merges", MR_GGUF_STRING, count);
  for (uint32_t i = 0; i < n; i++) {
    if (slots[i] == UINT32_MAX)
      continue;
    uint64_t pair = v->rules[slots[i]].pair;
    mr_str a = mr_vocab_text(v, (int32_t)(pair >> 32)), b = mr_vocab_text(v, (int32_t)pair);
    mr_text_clear(&t);
    mr_text_add(&t, a.s, a.len);
    mr_text_addc(&t, ' ');
    mr_text_add(&t, b.s, b.len);
    mr_gguf_write_item_str(w, t.data ? t.data : "", t.len);
  }
  bool ok = !t.failed;
  mr_text_free(&t);
  return ok;
}

/* SentencePiece merges by score: the earlier the rule that makes a token, the higher. */
static bool scores(mr_gguf_writer *w, const mr_vocab *v, const uint32_t *slots, uint32_t n,
                   int rows) {
  float *s = mr_mem_alloc((size_t)rows, sizeof *s);
  if (!s)
    return false;
  for (int i = 0; i < rows; i++)
    s[i] = -1e9f;
  for (uint32_t i = n; i-- > 0;)
    if (slots[i] != UINT32_MAX && v->rules[slots[i]].id < rows)
      s[v->rules[slots[i]].id] = -(float)i;
  mr_gguf_write_array(w, "tokenizer.ggml.scores", MR_GGUF_F32, (uint64_t)rows);
  for (int i = 0; i < rows; i++)
    mr_gguf_write_item_f32(w, s[i]);
  mr_mem_free(s);
  return true;
}

/* ------------------------------------------------------------------ keys */

static void specials(mr_gguf_writer *w, const source *s, bool spm) {
  const mr_vocab *v = s->v;
  if (v->bos >= 0)
    mr_gguf_write_u32(w, "tokenizer.ggml.bos_token_id", (uint32_t)v->bos);
  if (v->eos >= 0)
    mr_gguf_write_u32(w, "tokenizer.ggml.eos_token_id", (uint32_t)v->eos);
  if (spm && v->hf->unk >= 0)
    mr_gguf_write_u32(w, "tokenizer.ggml.unknown_token_id", (uint32_t)v->hf->unk);
  for (int32_t i = 0; i < v->n; i++)
    if ((v->mark[i] & MR_MARK_END) && i != v->eos) {
      mr_gguf_write_u32(w, "tokenizer.ggml.eot_token_id", (uint32_t)i);
      break;
    }
  mr_gguf_write_bool(w, "tokenizer.ggml.add_bos_token", v->add_bos);
  mr_gguf_write_bool(w, "tokenizer.ggml.add_eos_token", v->add_eos);
  if (s->dir.plain.len)
    mr_gguf_write_str(w, "tokenizer.chat_template", s->dir.plain.data, s->dir.plain.len);
  if (s->dir.with_tools.len)
    mr_gguf_write_str(w, "tokenizer.chat_template.tool_use", s->dir.with_tools.data,
                      s->dir.with_tools.len);
}

static mr_code refuse(const char *dir, const char *why, mr_err *err) {
  return mr_err_at(
      err, MR_E_UNAVAILABLE, dir, 0, -1,
      "the tokenizer cannot be written to GGUF: %s; --no-vocab leaves it out (the file "
      "then serves rows of token ids)",
      why);
}

static mr_code tables(mr_gguf_writer *w, const source *s, int rows, const char *pre, bool spm,
                      mr_err *err) {
  uint32_t n;
  uint32_t *slots = by_rank(s->v, &n);
  if (!slots)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the tokenizer");
  mr_code rc = MR_OK;
  mr_gguf_write_str(w, "tokenizer.ggml.model", spm ? "llama" : "gpt2", spm ? 5 : 4);
  mr_gguf_write_str(w, "tokenizer.ggml.pre", pre, strlen(pre));
  texts(w, s->v, rows);
  types(w, s->v, rows, spm);
  if (spm ? !scores(w, s->v, slots, n, rows) : !merges(w, s->v, slots, n))
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the tokenizer");
  mr_mem_free(slots);
  specials(w, s, spm);
  return rc;
}

static mr_code write_vocab(mr_gguf_writer *w, const source *s, const char *dir, int rows,
                           mr_err *err) {
  const char *pre = "default";
  if (!s->v) {
    mr_gguf_write_str(w, "tokenizer.ggml.model", "none", 4);
    return MR_OK;
  }
  if (s->v->hf->model != MR_HF_BPE)
    return refuse(dir, "only byte-level BPE and BPE with byte fallback can be", err);
  if (s->v->n > rows)
    return refuse(dir, "it has more tokens than the embedding has rows", err);
  bool spm = s->v->hf->byte_fallback;
  mr_code rc = spm ? MR_OK : find_pre(s->v, &pre, err);
  if (!rc && !pre)
    return refuse(dir, "no pre-tokenizer that has a name there cuts text as this one does", err);
  return rc ? rc : tables(w, s, rows, pre, spm, err);
}

mr_code mr_out_vocab(mr_gguf_writer *w, const char *dir, int n_rows, mr_err *err) {
  source s;
  mr_code rc = source_open(&s, dir, err);
  if (!rc)
    rc = write_vocab(w, &s, dir, n_rows, err);
  source_close(&s);
  return rc;
}

/* ------------------------------------------------------------------ reading back */

static mr_code same_ids(const mr_vocab *a, const mr_vocab *b, const char *dir, mr_err *err) {
  mr_ids x = {0}, y = {0};
  int flags = MR_TOK_ADD_SPECIAL | MR_TOK_PARSE_SPECIAL;
  mr_code rc = mr_tokenizer_encode(a, probe, sizeof probe - 1, NULL, flags, &x, err);
  if (!rc)
    rc = mr_tokenizer_encode(b, probe, sizeof probe - 1, NULL, flags, &y, err);
  if (!rc && (x.n != y.n || memcmp(x.ids, y.ids, x.n * sizeof *x.ids)))
    rc = refuse(dir, "the file's tokenizer would give other ids for the same text", err);
  mr_ids_free(&x);
  mr_ids_free(&y);
  return rc;
}

mr_code mr_out_check_vocab(const char *dir, const char *path, mr_err *err) {
  source s;
  mr_gguf *g = NULL;
  mr_vocab *back = NULL;
  mr_code rc = source_open(&s, dir, err);
  if (!rc && s.v)
    rc = mr_gguf_open(&g, path, err);
  if (g && !rc)
    rc = mr_vocab_open(&back, g, err);
  if (back)
    rc = same_ids(s.v, back, dir, err);
  mr_vocab_close(back);
  mr_gguf_close(g);
  source_close(&s);
  return rc;
}
