#include "src/vocab.h"

#include <math.h>
#include <string.h>

#include "io/hash.h"
#include "io/mem.h"
#include "src/bpe.h"
#include "src/hf_tokenizer.h"

#define K_MODEL "tokenizer.ggml.model"
#define K_TOKENS "tokenizer.ggml.tokens"
#define K_TYPES "tokenizer.ggml.token_type"
#define K_SCORES "tokenizer.ggml.scores"
#define K_MERGES "tokenizer.ggml.merges"
#define K_BOS "tokenizer.ggml.bos_token_id"
#define K_EOS "tokenizer.ggml.eos_token_id"
#define K_ADD_BOS "tokenizer.ggml.add_bos_token"
#define K_ADD_EOS "tokenizer.ggml.add_eos_token"

#define MAX_TOKENS (1 << 28)
#define FREE_PAIR UINT64_MAX

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* ---- indexes ---- */

int mr_vocab_index_init(mr_index *x, size_t n) {
  size_t size = 16;
  while (size < 2 * n)
    size *= 2;
  x->slot = mr_mem_alloc(size, sizeof *x->slot);
  if (!x->slot)
    return 0;
  memset(x->slot, 0xff, size * sizeof *x->slot);
  x->mask = (uint32_t)size - 1;
  return 1;
}

/* The slot that holds the text, or the free one where it belongs. */
static uint32_t slot_of(const mr_vocab *v, const mr_index *x, const char *s, size_t len) {
  uint32_t i = (uint32_t)mr_hash_64(s, len) & x->mask;
  for (;; i = (i + 1) & x->mask) {
    int32_t id = x->slot[i];
    if (id < 0)
      return i;
    mr_str t = mr_vocab_text(v, id);
    if (t.len == len && !memcmp(t.s, s, len))
      return i;
  }
}

int32_t mr_vocab_bound(const mr_vocab *v, const int32_t *ids, int32_t lo, int32_t hi,
                       uint32_t depth, int c) {
  while (lo < hi) {
    int32_t mid = lo + (hi - lo) / 2;
    if ((uint8_t)v->blob[v->at[ids[mid]] + depth] < c)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

int32_t mr_vocab_lookup(const mr_vocab *v, const mr_index *x, const char *s, size_t len) {
  return x->slot[slot_of(v, x, s, len)];
}

void mr_vocab_index_add(const mr_vocab *v, mr_index *x, int32_t id, bool replace) {
  mr_str t = mr_vocab_text(v, id);
  uint32_t i = slot_of(v, x, t.s, t.len);
  if (x->slot[i] < 0 || replace)
    x->slot[i] = id;
}

int mr_vocab_rules_init(mr_vocab *v, size_t n) {
  size_t size = 16;
  while (size < 2 * n)
    size *= 2;
  v->rules = mr_mem_alloc(size, sizeof *v->rules);
  if (!v->rules)
    return 0;
  v->rules_mask = (uint32_t)size - 1;
  for (size_t i = 0; i < size; i++)
    v->rules[i].pair = FREE_PAIR;
  return 1;
}

static uint32_t rule_slot(const mr_vocab *v, uint64_t pair) {
  uint32_t i = (uint32_t)((pair * 0x9e3779b97f4a7c15u) >> 32) & v->rules_mask;
  while (v->rules[i].pair != FREE_PAIR && v->rules[i].pair != pair)
    i = (i + 1) & v->rules_mask;
  return i;
}

bool mr_vocab_rule(const mr_vocab *v, int32_t left, int32_t right, int32_t *rank, int32_t *id) {
  uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
  const mr_merge_rule *r = &v->rules[rule_slot(v, pair)];
  if (r->pair == FREE_PAIR)
    return false;
  *rank = r->rank, *id = r->id;
  return true;
}

void mr_vocab_rule_put(mr_vocab *v, int32_t left, int32_t right, int32_t rank, int32_t id) {
  uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
  v->rules[rule_slot(v, pair)] = (mr_merge_rule){pair, rank, id};
}

/* ---- texts ---- */

/* Byte-level vocabularies write each byte as a printable character: those that are printable in
 * Latin-1 as themselves, the others as U+0100 and up, in order. Returns the byte of a character,
 * -1: none. */
static int byte_of(uint32_t code) {
  if ((code >= 0x21 && code <= 0x7e) || (code >= 0xa1 && code <= 0xac) ||
      (code >= 0xae && code <= 0xff))
    return (int)code;
  if (code < 0x100 || code > 0x143)
    return -1;
  uint32_t k = code - 0x100; /* 0x00-0x20, then 0x7f-0xa0, then 0xad */
  return (int)(k <= 0x20 ? k : k <= 0x42 ? k - 0x21 + 0x7f : 0xad);
}

int64_t mr_vocab_decode_bytes(mr_str s, char *out) {
  size_t n = 0;
  uint32_t code;
  for (size_t i = 0; i < s.len;) {
    i += (size_t)mr_utf8_next(s.s + i, s.len - i, &code);
    if (byte_of(code) < 0)
      return -1;
  }
  for (size_t i = 0; i < s.len;) {
    i += (size_t)mr_utf8_next(s.s + i, s.len - i, &code);
    out[n++] = (char)byte_of(code);
  }
  return (int64_t)n;
}

static bool is_special(const mr_vocab *v, int32_t id) {
  uint8_t t = v->type[id];
  return t == MR_TOKEN_CONTROL || t == MR_TOKEN_UNKNOWN || t == MR_TOKEN_USER;
}

/* Whether merging may give the token. A byte-level user-defined text that stands for other bytes
 * may not. */
static bool is_word(const mr_vocab *v, int32_t id) {
  mr_str t = mr_vocab_text(v, id);
  uint8_t type = v->type[id];
  if (!t.len || type == MR_TOKEN_CONTROL || type == MR_TOKEN_UNKNOWN ||
      (v->spm && type == MR_TOKEN_BYTE))
    return false;
  if (v->spm || type != MR_TOKEN_USER)
    return true;
  for (size_t i = 0; i < t.len; i++)
    if ((uint8_t)t.s[i] <= ' ' || (uint8_t)t.s[i] >= 0x7f)
      return false;
  return true;
}

/* ---- reading ---- */

static mr_code read_kind(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  mr_str model;
  if (!mr_gguf_str(g, K_MODEL, &model, err))
    return err->code ? err->code : mr_err_set(err, MR_E_DATA, K_MODEL " is missing");
  v->spm = model.len == 5 && !memcmp(model.s, "llama", 5);
  if (v->spm || (model.len == 4 && !memcmp(model.s, "gpt2", 4)))
    return MR_OK;
  if (model.len == 4 && !memcmp(model.s, "bert", 4)) {
    v->hf = mr_hf_new(MR_HF_WORDPIECE);
    v->kind = "wordpiece";
    return v->hf ? MR_OK : no_memory(err);
  }
  return mr_err_set(err, MR_E_DATA,
                    K_MODEL
                    ": vocabularies of kind \"%.*s\" are not supported (gpt2: byte-level BPE, "
                    "llama: SentencePiece BPE, and bert: WordPiece, are)",
                    model.len > 32 ? 32 : (int)model.len, model.s);
}

/* The array under key, of n items (any number when n < 0) of strings or of numbers; *kv NULL if
 * absent. */
static mr_code find_array(const mr_gguf *g, const char *key, bool strings, int64_t n,
                          const mr_gguf_kv **kv, mr_err *err) {
  *kv = mr_gguf_find(g, key);
  if (!*kv)
    return MR_OK;
  mr_gguf_type item = (*kv)->item;
  bool text = item == MR_GGUF_STRING, other = item == MR_GGUF_ARRAY || item == MR_GGUF_BOOL;
  if ((*kv)->type != MR_GGUF_ARRAY || text != strings || (!text && other))
    return mr_err_set(err, MR_E_DATA, "%s is not an array of %s", key,
                      strings ? "strings" : "numbers");
  if (n >= 0 && (*kv)->count < (uint64_t)n)
    return mr_err_set(err, MR_E_DATA, "%s has %llu entries for %lld tokens", key,
                      (unsigned long long)(*kv)->count, (long long)n);
  return MR_OK;
}

static mr_code read_types(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  const mr_gguf_kv *types, *scores;
  if (find_array(g, K_TYPES, false, v->n, &types, err) ||
      find_array(g, K_SCORES, false, v->n, &scores, err))
    return err->code;
  if (v->spm && !scores)
    return mr_err_set(err, MR_E_DATA,
                      K_SCORES " is missing: a SentencePiece vocabulary merges by score");
  for (int32_t i = 0; i < v->n; i++) {
    int64_t t = types ? mr_gguf_item_int(types, (uint64_t)i) : MR_TOKEN_NORMAL;
    v->type[i] = t > MR_TOKEN_NORMAL && t <= MR_TOKEN_BYTE ? (uint8_t)t : MR_TOKEN_NORMAL;
    v->score[i] = v->spm ? (float)mr_gguf_item_real(scores, (uint64_t)i) : 0;
    if (isnan(v->score[i]))
      return mr_err_set(err, MR_E_DATA, K_SCORES ": the score of token %d is not a number", i);
  }
  return MR_OK;
}

static mr_code read_tokens(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  const mr_gguf_kv *kv;
  if (find_array(g, K_TOKENS, true, -1, &kv, err))
    return err->code;
  if (!kv || !kv->count || kv->count > MAX_TOKENS || kv->bytes > UINT32_MAX)
    return mr_err_set(err, MR_E_DATA, K_TOKENS " has %llu entries (1 to %d are possible)",
                      (unsigned long long)(kv ? kv->count : 0), MAX_TOKENS);
  size_t n = (size_t)kv->count;
  v->n = (int32_t)n;
  v->at = mr_mem_alloc(n + 1, sizeof *v->at);
  v->type = mr_mem_alloc(n, 1);
  v->mark = mr_mem_alloc(n, 1);
  v->score = mr_mem_alloc(n, sizeof *v->score);
  v->blob = mr_mem_alloc((size_t)kv->bytes, 1);
  if (!v->at || !v->type || !v->mark || !v->score || !v->blob)
    return no_memory(err);
  if (read_types(v, g, err))
    return err->code;
  uint64_t cursor = 0;
  for (int32_t i = 0; i < v->n; i++) {
    mr_str s = mr_gguf_item_str(kv, &cursor);
    char *to = v->blob + v->at[i];
    bool literal = v->spm || v->hf || is_special(v, i) || v->type[i] == MR_TOKEN_BYTE;
    int64_t len = literal ? -1 : mr_vocab_decode_bytes(s, to);
    if (len < 0)
      memcpy(to, s.s, s.len);
    v->at[i + 1] = v->at[i] + (uint32_t)(len < 0 ? (int64_t)s.len : len);
  }
  return MR_OK;
}

/* Notes which bytes may stand before a space mark inside a word: elsewhere a text may be cut there,
 * since no merge can reach across. */
static void note_joins(mr_vocab *v, mr_str t) {
  for (size_t i = 1; i + 3 <= t.len; i++)
    if (!memcmp(t.s + i, MR_SPACE_MARK, 3))
      v->joins[(uint8_t)t.s[i - 1]] = true;
}

static mr_code fill_indexes(mr_vocab *v, mr_err *err) {
  if (!mr_vocab_index_init(&v->all, (size_t)v->n) || !mr_vocab_index_init(&v->words, (size_t)v->n))
    return no_memory(err);
  for (int32_t i = 0; i < v->n; i++) {
    mr_vocab_index_add(v, &v->all, i, false);
    if (!is_word(v, i))
      continue;
    mr_vocab_index_add(v, &v->words, i, false);
    mr_str t = mr_vocab_text(v, i);
    v->longest = t.len > v->longest ? (uint32_t)t.len : v->longest;
    if (v->spm)
      note_joins(v, t);
  }
  for (int b = 0; b < 256; b++) {
    char name[8] = {(char)b};
    int n = v->spm ? snprintf(name, sizeof name, "<0x%02X>", b) : 1;
    v->byte_id[b] = mr_vocab_lookup(v, v->spm ? &v->all : &v->words, name, (size_t)n);
  }
  return MR_OK;
}

/* Token of a part of a merge, -1: none. */
static int32_t part_id(const mr_vocab *v, mr_str s, char *buf) {
  int64_t n = mr_vocab_decode_bytes(s, buf);
  return n < 0 ? -1 : mr_vocab_lookup(v, &v->words, buf, (size_t)n);
}

/* Adds the rule "left right". A part or a result that is no token can never come up: left out. */
static mr_code add_rule(mr_vocab *v, mr_str s, int32_t rank, mr_text *buf, mr_err *err) {
  const char *space = s.len > 2 ? memchr(s.s + 1, ' ', s.len - 2) : NULL;
  if (!space)
    return mr_err_set(err, MR_E_DATA, K_MERGES ": entry %d is not two texts with a space between",
                      rank);
  mr_text_clear(buf);
  mr_text_add(buf, s.s, s.len); /* decoding never grows a text: room for both halves */
  if (buf->failed)
    return no_memory(err);
  mr_str left = {s.s, (size_t)(space - s.s)}, right = {space + 1, s.len - left.len - 1};
  int32_t a = part_id(v, left, buf->data), b = part_id(v, right, buf->data);
  int64_t n = a < 0 || b < 0 ? -1 : mr_vocab_decode_bytes(left, buf->data);
  if (n < 0)
    return MR_OK;
  n += mr_vocab_decode_bytes(right, buf->data + n);
  int32_t id = mr_vocab_lookup(v, &v->words, buf->data, (size_t)n);
  uint64_t pair = (uint64_t)(uint32_t)a << 32 | (uint32_t)b;
  mr_merge_rule *r = &v->rules[rule_slot(v, pair)];
  if (id >= 0 && r->pair == FREE_PAIR) /* of equal rules the first counts */
    *r = (mr_merge_rule){pair, rank, id};
  return MR_OK;
}

static mr_code read_merges(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  const mr_gguf_kv *kv;
  if (find_array(g, K_MERGES, true, -1, &kv, err))
    return err->code;
  if (!kv || kv->count > MAX_TOKENS)
    return mr_err_set(err, MR_E_DATA, K_MERGES " is %s",
                      kv ? "too long" : "missing: a byte-level vocabulary needs it");
  if (!mr_vocab_rules_init(v, (size_t)kv->count))
    return no_memory(err);
  mr_text buf = {0};
  uint64_t cursor = 0;
  mr_code c = MR_OK;
  for (uint64_t i = 0; !c && i < kv->count; i++)
    c = add_rule(v, mr_gguf_item_str(kv, &cursor), (int32_t)i, &buf, err);
  mr_text_free(&buf);
  return c;
}

/* Words that are a token, and stay one when they are merged from bytes, need no merging later. */
static mr_code mark_whole(mr_vocab *v, mr_err *err) {
  mr_bpe b = {0};
  mr_ids ids = {0};
  mr_code c = MR_OK;
  for (int32_t i = 0; i < v->n && c != MR_E_NOMEM; i++) {
    mr_str t = mr_vocab_text(v, i);
    if (mr_vocab_lookup(v, &v->words, t.s, t.len) != i)
      continue;
    ids.n = 0;
    c = mr_bpe_word(v, &b, t.s, t.len, &ids, NULL);
    if (!c && ids.n == 1 && ids.ids[0] == i)
      v->mark[i] |= MR_MARK_WHOLE;
  }
  mr_bpe_free(&b);
  mr_ids_free(&ids);
  return c == MR_E_NOMEM ? no_memory(err) : MR_OK;
}

static mr_code read_bpe(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  mr_str pre = {"", 0};
  if (!mr_gguf_str(g, "tokenizer.ggml.pre", &pre, err) && err->code)
    return err->code;
  v->pre = mr_mem_copy(pre.s, pre.len);
  if (!v->pre)
    return no_memory(err);
  if (mr_pretok_open(&v->pretok, pre.s, pre.len, err) || read_merges(v, g, err))
    return err->code;
  return mr_pretok_whole_words(v->pretok) ? MR_OK : mark_whole(v, err);
}

/* ---- special tokens ---- */

static mr_code read_id(const mr_vocab *v, const mr_gguf *g, const char *key, int32_t *id,
                       mr_err *err) {
  uint32_t u;
  if (!mr_gguf_u32(g, key, &u, err))
    return err->code;
  if (u >= (uint32_t)v->n)
    return mr_err_set(err, MR_E_DATA, "%s is %u, but the vocabulary has %d tokens", key, u, v->n);
  *id = (int32_t)u;
  return MR_OK;
}

/* Reads "add_..."; a file that asks for a token it does not name is refused. */
static mr_code read_add(const mr_gguf *g, const char *key, const char *id_key, int32_t id,
                        bool *add, mr_err *err) {
  if (!mr_gguf_bool(g, key, add, err)) {
    *add = *add && id >= 0;
    return err->code;
  }
  return !*add || id >= 0
             ? MR_OK
             : mr_err_set(err, MR_E_DATA, "%s is true, but %s is missing", key, id_key);
}

static int32_t control_named(const mr_vocab *v, const char *text) {
  int32_t id = mr_vocab_lookup(v, &v->all, text, strlen(text));
  return id >= 0 && v->type[id] == MR_TOKEN_CONTROL ? id : -1;
}

/* Chat models end a turn with other tokens than EOS, and files seldom say so: the usual ones are
 * known by name. */
void mr_vocab_mark_ends(mr_vocab *v) {
  static const char *const names[] = {
      "<|eot_id|>",
      "<|im_end|>",
      "<|end|>",
      "<|return|>",
      "<|call|>",
      "<end_of_turn>",
      "<|endoftext|>",
      "</s>",
      "<|eom_id|>",
      "<EOT>",
      "_<EOT>",
      "[EOT]",
      "[EOS]",
      "<|end_of_text|>",
      "<end_of_utterance>",
      "<eos>",
      "<\357\275\234end\342\226\201of\342\226\201sentence\357\275\234>"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    int32_t id = control_named(v, names[i]);
    if (id >= 0)
      v->mark[id] |= MR_MARK_END;
  }
  int32_t end = control_named(v, "<|end|>"); /* ends a message, not a turn, where these are in use
                                              */
  if (end >= 0 && control_named(v, "<|return|>") >= 0 && control_named(v, "<|call|>") >= 0)
    v->mark[end] &= (uint8_t)~MR_MARK_END;
}

static mr_code read_ends(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  static const char *const keys[] = {K_EOS, "tokenizer.ggml.eot_token_id",
                                     "tokenizer.ggml.eom_token_id"};
  mr_vocab_mark_ends(v);
  if (v->eos >= 0)
    v->mark[v->eos] |= MR_MARK_END;
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    int32_t id = -1;
    if (read_id(v, g, keys[i], &id, err))
      return err->code;
    if (id >= 0)
      v->mark[id] |= MR_MARK_END;
  }
  return MR_OK;
}

static bool name_has(mr_str s, const char *word) {
  size_t n = strlen(word);
  for (size_t i = 0; i + n <= s.len; i++) {
    size_t k = 0;
    while (k < n && (s.s[i + k] | (s.s[i + k] >= 'A' && s.s[i + k] <= 'Z' ? 0x20 : 0)) == word[k])
      k++;
    if (k == n)
      return true;
  }
  return false;
}

/* Phi-3's tokenizer takes the white space after its special tokens away, which GGUF cannot say; the
 * model is known by its name, as upstream does. */
static mr_code mark_strips(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  static const char *const not_these[] = {"<unk>", "<s>", "<|endoftext|>"};
  mr_str name;
  if (!mr_gguf_str(g, "general.name", &name, err))
    return err->code;
  if (!name_has(name, "phi-3") && !name_has(name, "phi3"))
    return MR_OK;
  for (int32_t i = 0; i < v->n_special; i++)
    v->mark[v->special[i]] |= MR_MARK_RSTRIP;
  for (size_t i = 0; i < sizeof not_these / sizeof not_these[0]; i++) {
    int32_t id = mr_vocab_lookup(v, &v->all, not_these[i], strlen(not_these[i]));
    if (id >= 0)
      v->mark[id] &= (uint8_t)~MR_MARK_RSTRIP;
  }
  return MR_OK;
}

static int compare(const mr_vocab *v, int32_t a, int32_t b) {
  mr_str s = mr_vocab_text(v, a), t = mr_vocab_text(v, b);
  int d = memcmp(s.s, t.s, s.len < t.len ? s.len : t.len);
  return d ? d : s.len != t.len ? (s.len < t.len ? -1 : 1) : a - b;
}

/* Heap sort: no context argument in qsort, and no quadratic case. */
static void sink(const mr_vocab *v, int32_t *a, int32_t i, int32_t n) {
  for (int32_t k; (k = 2 * i + 1) < n; i = k) {
    if (k + 1 < n && compare(v, a[k], a[k + 1]) < 0)
      k++;
    if (compare(v, a[i], a[k]) >= 0)
      return;
    int32_t t = a[i];
    a[i] = a[k], a[k] = t;
  }
}

void mr_vocab_sort(const mr_vocab *v, int32_t *a, int32_t n) {
  for (int32_t i = n / 2 - 1; i >= 0; i--)
    sink(v, a, i, n);
  for (int32_t k = n - 1; k > 0; k--) {
    int32_t t = a[0];
    a[0] = a[k], a[k] = t;
    sink(v, a, 0, k);
  }
}

static mr_code list_special(mr_vocab *v, mr_err *err) {
  for (int32_t i = 0; i < v->n; i++)
    v->n_special += is_special(v, i) && v->at[i + 1] > v->at[i];
  int32_t *a = v->special = mr_mem_alloc((size_t)v->n_special, sizeof *v->special);
  if (!a)
    return no_memory(err);
  int32_t n = 0;
  for (int32_t i = 0; i < v->n; i++) {
    if (!is_special(v, i) || v->at[i + 1] == v->at[i])
      continue;
    uint8_t first = (uint8_t)v->blob[v->at[i]];
    a[n++] = i;
    v->special_from[first + 1]++;
    v->first_user[first] |= v->type[i] == MR_TOKEN_USER;
  }
  mr_vocab_sort(v, a, n);
  for (int b = 0; b < 256; b++)
    v->special_from[b + 1] += v->special_from[b];
  return MR_OK;
}

/* The first token that one of the keys names. */
static mr_code read_either(const mr_vocab *v, const mr_gguf *g, const char *key, const char *other,
                           int32_t *id, mr_err *err) {
  mr_code c = read_id(v, g, other, id, err);
  return c ? c : read_id(v, g, key, id, err);
}

/* BERT's: [CLS] before a text and [SEP] after it. The format spells one key wrongly. */
static mr_code read_wordpiece(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  int32_t unk = -1;
  v->bos = v->eos = -1;
  if (read_either(v, g, "tokenizer.ggml.cls_token_id", K_BOS, &v->bos, err) ||
      read_either(v, g, "tokenizer.ggml.seperator_token_id", K_EOS, &v->eos, err) ||
      read_id(v, g, "tokenizer.ggml.separator_token_id", &v->eos, err) ||
      read_id(v, g, "tokenizer.ggml.unknown_token_id", &unk, err))
    return err->code;
  v->add_bos = v->bos >= 0;
  v->add_eos = v->eos >= 0;
  v->add_space_prefix = true;
  if (v->eos >= 0)
    v->mark[v->eos] |= MR_MARK_END;
  return list_special(v, err) ? err->code : mr_hf_open_bert(v, unk, err);
}

static mr_code read_special(mr_vocab *v, const mr_gguf *g, mr_err *err) {
  bool usual = v->spm && v->n > 2; /* where a SentencePiece file is silent: <s> is 1 and </s> is 2
                                    */
  v->bos = usual && v->type[1] == MR_TOKEN_CONTROL ? 1 : -1;
  v->eos = usual && v->type[2] == MR_TOKEN_CONTROL ? 2 : -1;
  if (read_id(v, g, K_BOS, &v->bos, err) || read_id(v, g, K_EOS, &v->eos, err))
    return err->code;
  v->add_bos = v->spm || mr_pretok_adds_bos(v->pretok);
  v->add_space_prefix = v->spm;
  if (read_add(g, K_ADD_BOS, K_BOS, v->bos, &v->add_bos, err) ||
      read_add(g, K_ADD_EOS, K_EOS, v->eos, &v->add_eos, err))
    return err->code;
  if (!mr_gguf_bool(g, "tokenizer.ggml.add_space_prefix", &v->add_space_prefix, err) && err->code)
    return err->code;
  v->add_space_prefix = v->add_space_prefix && v->spm;
  if (list_special(v, err) || mark_strips(v, g, err))
    return err->code;
  return read_ends(v, g, err);
}

/* ---- interface ---- */

mr_code mr_vocab_open(mr_vocab **out, const mr_gguf *g, mr_err *err) {
  mr_err own = MR_ERR_INIT; /* the reads above tell absent from broken by it */
  *out = NULL;
  mr_vocab *v = mr_mem_alloc(1, sizeof *v);
  if (!v)
    return no_memory(err);
  mr_code c = read_kind(v, g, &own);
  if (!c)
    c = read_tokens(v, g, &own);
  if (!c)
    c = fill_indexes(v, &own);
  if (!c && !v->spm && !v->hf)
    c = read_bpe(v, g, &own);
  if (!c)
    c = v->hf ? read_wordpiece(v, g, &own) : read_special(v, g, &own);
  if (!c) {
    *out = v;
    return MR_OK;
  }
  mr_vocab_close(v);
  return mr_err_at(err, c, own.file[0] ? own.file : mr_gguf_path(g), own.line, own.offset, "%s",
                   own.text);
}

void mr_vocab_close(mr_vocab *v) {
  if (!v)
    return;
  mr_mem_free(v->blob);
  mr_mem_free(v->at);
  mr_mem_free(v->type);
  mr_mem_free(v->mark);
  mr_mem_free(v->score);
  mr_mem_free(v->all.slot);
  mr_mem_free(v->words.slot);
  mr_mem_free(v->rules);
  mr_mem_free(v->special);
  mr_mem_free(v->pre);
  mr_pretok_close(v->pretok);
  mr_hf_close(v->hf);
  mr_mem_free(v);
}

bool mr_vocab_present(const mr_gguf *g) {
  return mr_gguf_find(g, K_TOKENS) != NULL;
}

static bool known(const mr_vocab *v, int32_t id) {
  return id >= 0 && id < v->n;
}

int32_t mr_vocab_size(const mr_vocab *v) {
  return v->n;
}

int32_t mr_vocab_bos(const mr_vocab *v) {
  return v->bos;
}

int32_t mr_vocab_eos(const mr_vocab *v) {
  return v->eos;
}

bool mr_vocab_adds_bos(const mr_vocab *v) {
  return v->add_bos;
}

bool mr_vocab_is_end(const mr_vocab *v, int32_t id) {
  return known(v, id) && v->mark[id] & MR_MARK_END;
}

bool mr_vocab_is_control(const mr_vocab *v, int32_t id) {
  return known(v, id) && (v->type[id] == MR_TOKEN_CONTROL || v->type[id] == MR_TOKEN_UNKNOWN);
}

const char *mr_vocab_kind(const mr_vocab *v) {
  return v->kind ? v->kind : v->spm ? "spm" : "bpe";
}

const char *mr_vocab_pre(const mr_vocab *v) {
  return v->pre ? v->pre : "";
}

bool mr_vocab_piece(const mr_vocab *v, int32_t id, mr_str *out) {
  if (!known(v, id))
    return false;
  *out = mr_vocab_text(v, id);
  return true;
}

int32_t mr_vocab_find(const mr_vocab *v, const char *s, size_t len) {
  return mr_vocab_lookup(v, &v->all, s, len);
}
