#define PCRE2_CODE_UNIT_WIDTH 8

#include "src/pretok.h"

#include <pcre2.h>
#include <string.h>

#include "io/mem.h"

#define MAX_PATTERNS 6
#define MATCH_LIMIT 100000000u /* steps of one match: far above any text that is not an attack */

/* Pieces of patterns. The members of White_Space are written out: see pretok.h. */
#define WS                                                                                         \
  "\\t-\\r "                                                                                       \
  "\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define SP "[" WS "]"
#define NOT_SP "[^" WS "]"
#define SPACES SP "+(?!" NOT_SP ")|" SP "+"
#define SHORT "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define OTHER " ?[^" WS "\\p{L}\\p{N}]+"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define LEAD "[^\\r\\n\\p{L}\\p{N}]?"
#define WORD LEAD "\\p{L}+"
#define CASED(tail) LEAD UPPER "*" LOWER "+" tail "|" LEAD UPPER "+" LOWER "*" tail

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|" OTHER "|" SPACES
#define MODERN(digits) SHORT "|" WORD "|" digits "|" OTHER "[\\r\\n]*|" SP "*[\\r\\n]+|" SPACES
#define CASED_WORDS(tail, digits)                                                                  \
  CASED(tail) "|" digits "|" OTHER "[\\r\\n/]*|" SP "*[\\r\\n]+|" SPACES
#define SENTENCES " ?[^(" WS "|.,!?\\x{2026}\\x{3002}\\x{ff0c}\\x{3001}\\x{964}\\x{6d4}\\x{60c})]+"

/* Letters with case, as the DeepSeek tokenizers list them. */
#define DEEPSEEK_LETTERS                                                                           \
  "[A-Za-z\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}"                  \
  "\\x{1c4}-\\x{293}\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37b}-\\x{37d}"           \
  "\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}\\x{38e}-\\x{3a1}\\x{3a3}-\\x{3f5}"                    \
  "\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}\\x{13a0}-\\x{13f5}"      \
  "\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}\\x{1d00}-\\x{1d2b}"                   \
  "\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}\\x{1f18}-\\x{1f1d}"                   \
  "\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}\\x{1f59}\\x{1f5b}\\x{1f5d}"           \
  "\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}\\x{1fc2}-\\x{1fc4}"          \
  "\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}\\x{1fe0}-\\x{1fec}"                   \
  "\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}\\x{2107}\\x{210a}-\\x{2113}\\x{2115}"           \
  "\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}"           \
  "\\x{2139}\\x{213c}-\\x{213f}\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}"                     \
  "\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}"                    \
  "\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}\\x{a771}-\\x{a787}"                   \
  "\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}"                   \
  "\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}\\x{104b0}-\\x{104d3}"               \
  "\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}\\x{10cc0}-\\x{10cf2}\\x{118a0}-\\x{118df}"           \
  "\\x{1e900}-\\x{1e943}]"
#define DEEPSEEK_MARKS                                                                             \
  "[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]"
#define DEEPSEEK_EAST "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+"
#define DEEPSEEK_V3                                                                                \
  "[!\"#$%&'()*+,\\-./"                                                                            \
  ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"                \
  " ?[\\p{P}\\p{S}]+[\\r\\n]*|" SP "*[\\r\\n]+|" SPACES

enum { WHOLE_WORDS = 1, ADDS_BOS = 2 };

typedef struct recipe {
  const char *names; /* separated by spaces */
  int flags;
  const char *patterns[MAX_PATTERNS + 1];
} recipe;

/* "(?<!space)" before "space++$" changes no match; it keeps a long run of spaces from being tried
 * at each of them. */
/* clang-format off */
static const recipe recipes[] = {
    {"default", 0, {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
    {"llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", WHOLE_WORDS | ADDS_BOS,
     {MODERN("\\p{N}{1,3}")}},
    {"dbrx smaug-bpe glm4 chatglm-bpe", 0, {MODERN("\\p{N}{1,3}")}},
    {"qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", 0,
     {MODERN("\\p{N}")}},
    {"qwen35", 0,
     {SHORT "|" LEAD "[\\p{L}\\p{M}]+|\\p{N}| ?[^" WS "\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|"
      SP "*[\\r\\n]+|" SPACES}},
    {"gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
     "exaone4 mpt olmo jais trillion granite-docling", 0, {GPT2}},
    {"starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", 0, {"\\p{N}", GPT2}},
    {"falcon", 0, {"[\\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"}},
    {"deepseek-llm", 0,
     {"[\\r\\n]", SP "?" DEEPSEEK_LETTERS "+", SP "?" DEEPSEEK_MARKS "+", "(?<!" SP ")" SP "++$",
      DEEPSEEK_EAST, "\\p{N}+"}},
    {"deepseek-coder", 0, {"[\\r\\n]", SP "?\\p{L}+", SP "?\\p{P}+", DEEPSEEK_EAST, "\\p{N}"}},
    {"deepseek-v3 hunyuan-dense joyai-llm", 0,
     {"\\p{N}{1,3}", "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{30ff}]+", DEEPSEEK_V3}},
    {"tekken", WHOLE_WORDS | ADDS_BOS, {CASED_WORDS("", "\\p{N}")}},
    {"gpt-4o llama4 kanana2 minimax-m2", 0, {CASED_WORDS(SHORT "?", "\\p{N}{1,3}")}},
    {"poro-chat bloom gpt3-finnish", 0, {SENTENCES}},
    {"viking", 0, {SENTENCES, "\\p{N}"}},
    {"chameleon", ADDS_BOS,
     {"<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", "[\\t\\n]|    |  ", "\\p{N}",
      "[\\p{P}!-/:-@\\[-`{-~]", GPT2}},
    {"bailingmoe bailingmoe2 llada-moe", 0,
     {"'(?i:[sdmt]|ll|ve|re)|" WORD "|\\p{N}|" OTHER "[\\r\\n]*|" SP "*[\\r\\n]|" SPACES}},
    {"seed-coder", 0,
     {SHORT "|" WORD "|\\p{N}| ?[^" WS "\\p{L}\\p{N}\\r\\n]+|" SP "*[\\r\\n]+|" SPACES}},
};
/* clang-format on */

struct mr_pretok {
  const recipe *kind;
  pcre2_general_context *memory;
  pcre2_match_context *limits;
  pcre2_code *code[MAX_PATTERNS];
  int n;
};

static void *get(PCRE2_SIZE n, void *tag) {
  (void)tag;
  return mr_mem_alloc(n, 1);
}

static void put(void *p, void *tag) {
  (void)tag;
  mr_mem_free(p);
}

static bool named(const char *names, const char *name, size_t len) {
  for (const char *p = names; *p;) {
    size_t n = strcspn(p, " ");
    if (n == len && !memcmp(p, name, n))
      return true;
    p += n + (p[n] == ' ');
  }
  return false;
}

static const recipe *find(const char *name, size_t len) {
  for (size_t i = 0; i < sizeof recipes / sizeof recipes[0]; i++)
    if (named(recipes[i].names, name, len))
      return &recipes[i];
  return NULL;
}

static mr_code compile(mr_pretok *p, const char *pattern, mr_err *err) {
  int code = 0;
  PCRE2_SIZE at = 0;
  pcre2_compile_context *cc = pcre2_compile_context_create(p->memory);
  if (!cc)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  pcre2_code *re = pcre2_compile(
      (PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
      PCRE2_UTF | PCRE2_UCP | PCRE2_DOLLAR_ENDONLY | PCRE2_NEVER_BACKSLASH_C, &code, &at, cc);
  pcre2_compile_context_free(cc);
  if (!re)
    return mr_err_set(err, code == PCRE2_ERROR_HEAP_FAILED ? MR_E_NOMEM : MR_E_INTERNAL,
                      "pre-tokenizer pattern %d does not compile: PCRE2 error %d at %zu", p->n,
                      code, (size_t)at);
  pcre2_jit_compile(re, PCRE2_JIT_COMPLETE); /* without it the interpreter does the same, slower */
  p->code[p->n++] = re;
  return MR_OK;
}

mr_code mr_pretok_open(mr_pretok **out, const char *name, size_t len, mr_err *err) {
  *out = NULL;
  const recipe *kind = len ? find(name, len) : find("default", 7);
  if (!kind)
    return mr_err_set(
        err, MR_E_DATA,
        "tokenizer.ggml.pre: pre-tokenizer \"%.*s\" is not known; its text would be cut "
        "wrongly",
        len > 64 ? 64 : (int)len, name);
  mr_pretok *p = mr_mem_alloc(1, sizeof *p);
  if (!p)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  p->kind = kind;
  p->memory = pcre2_general_context_create(get, put, NULL);
  p->limits = p->memory ? pcre2_match_context_create(p->memory) : NULL;
  mr_code c = p->limits ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (p->limits)
    pcre2_set_match_limit(p->limits, MATCH_LIMIT);
  for (int i = 0; !c && i < MAX_PATTERNS && kind->patterns[i]; i++)
    c = compile(p, kind->patterns[i], err);
  if (c)
    mr_pretok_close(p);
  else
    *out = p;
  return c;
}

void mr_pretok_close(mr_pretok *p) {
  if (!p)
    return;
  for (int i = 0; i < p->n; i++)
    pcre2_code_free(p->code[i]);
  pcre2_match_context_free(p->limits);
  pcre2_general_context_free(p->memory);
  mr_mem_free(p);
}

bool mr_pretok_whole_words(const mr_pretok *p) {
  return p->kind->flags & WHOLE_WORDS;
}

bool mr_pretok_adds_bos(const mr_pretok *p) {
  return p->kind->flags & ADDS_BOS;
}

static int add(mr_cuts *c, size_t end) {
  if (c->n_next == c->cap_next &&
      !mr_mem_grow((void **)&c->next, &c->cap_next, c->n_next + 1, sizeof *c->next))
    return 0;
  c->next[c->n_next++] = end;
  return 1;
}

/* What was written becomes what is read. */
static void turn(mr_cuts *c) {
  size_t *end = c->end, cap = c->cap;
  c->end = c->next, c->cap = c->cap_next, c->n = c->n_next;
  c->next = end, c->cap_next = cap, c->n_next = 0;
}

/* Cuts the piece [from, to) of text by one pattern. Returns 1, 0 (out of memory) or a negative
 * PCRE2 error. */
static int cut_piece(const mr_pretok *p, const pcre2_code *re, pcre2_match_data *md,
                     const char *text, size_t from, size_t to, mr_cuts *c) {
  size_t len = to - from, at = 0, done = 0;
  PCRE2_SPTR s = (PCRE2_SPTR)text + from;
  const PCRE2_SIZE *span = pcre2_get_ovector_pointer(md);
  while (at < len) {
    int r = pcre2_match(re, s, len, at, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, md, p->limits);
    if (r == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its stack on the heap */
      r = pcre2_match(re, s, len, at, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY | PCRE2_NO_JIT, md,
                      p->limits);
    if (r == PCRE2_ERROR_NOMATCH)
      break;
    if (r < 0)
      return r;
    if (span[0] > done && !add(c, from + span[0]))
      return 0;
    if (!add(c, from + span[1]))
      return 0;
    at = done = span[1];
  }
  return done == len || add(c, to);
}

mr_code mr_pretok_cut(const mr_pretok *p, const char *text, size_t len, mr_cuts *cuts,
                      mr_err *err) {
  cuts->n = cuts->n_next = 0;
  if (!len)
    return MR_OK;
  pcre2_match_data *md = pcre2_match_data_create(1, p->memory);
  int r = md && add(cuts, len);
  for (int i = 0; i < p->n && r > 0; i++) {
    size_t from = 0;
    turn(cuts);
    for (size_t k = 0; k < cuts->n && r > 0; from = cuts->end[k++])
      r = cut_piece(p, p->code[i], md, text, from, cuts->end[k], cuts);
  }
  pcre2_match_data_free(md);
  turn(cuts);
  if (r > 0)
    return MR_OK;
  cuts->n = 0;
  if (!r || r == PCRE2_ERROR_NOMEMORY)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  return mr_err_set(err, MR_E_DATA,
                    "text cannot be cut into words: PCRE2 error %d (limit %u steps a word)", r,
                    MATCH_LIMIT);
}

void mr_cuts_free(mr_cuts *c) {
  mr_mem_free(c->end);
  mr_mem_free(c->next);
  *c = (mr_cuts){0};
}
