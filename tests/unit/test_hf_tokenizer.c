#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "conformance.h"
#include "io/json.h"
#include "io/mem.h"
#include "src/hf_tokenizer.h"
#include "starve.h"

enum { ADD = MR_TOK_ADD_SPECIAL, PARSE = MR_TOK_PARSE_SPECIAL, UP = MR_TOK_UPSTREAM };

/* Files are written with ' for ". */
static json_t *value(const char *text) {
  mr_err e = MR_ERR_INIT;
  mr_text t = {0};
  for (; *text; text++)
    mr_text_addc(&t, *text == '\'' ? '"' : *text == '"' ? '\'' : *text);
  json_t *v = mr_json_parse(t.data, t.len, NULL, &e);
  if (!v)
    fail_msg("%s: %s", e.text, t.data);
  mr_text_free(&t);
  return v;
}

static mr_vocab *opened(const char *file) {
  mr_err e = MR_ERR_INIT;
  mr_vocab *v = NULL;
  json_t *root = value(file);
  if (mr_hf_open(&v, root, NULL, &e))
    fail_msg("%s", e.text);
  json_decref(root);
  return v;
}

/* The ids of a text in words, or the error's. */
static const char *ids_of(const mr_vocab *v, const char *text, const uint8_t *plain, int flags) {
  static char said[1200];
  mr_err e = MR_ERR_INIT;
  mr_ids ids = {0};
  size_t n = 0;
  said[0] = '\0';
  if (mr_tokenizer_encode(v, text, strlen(text), plain, flags, &ids, &e))
    snprintf(said, sizeof said, "%s", e.text);
  for (size_t i = 0; i < ids.n && n + 16 < sizeof said; i++)
    n += (size_t)snprintf(said + n, sizeof said - n, i ? " %d" : "%d", (int)ids.ids[i]);
  mr_ids_free(&ids);
  return said;
}

static void once(const char *file, const char *text, int flags, const char *want) {
  mr_vocab *v = opened(file);
  const char *got = ids_of(v, text, NULL, flags);
  if (strcmp(got, want))
    fail_msg("\"%s\" is %s, not %s, with %s", text, got, want, file);
  mr_vocab_close(v);
}

/* The text of ids that end with -1. */
static const char *text_of(const mr_vocab *v, bool strip, bool control, const int32_t *ids) {
  static mr_text out;
  mr_detok d;
  mr_text_clear(&out);
  mr_detok_init(&d, v, strip, control);
  for (; *ids >= 0; ids++)
    mr_detok_push(&d, *ids, &out);
  mr_detok_finish(&d, &out);
  mr_text_addc(&out, '|');
  return out.data;
}

#define TEXT(v, strip, control, ...) text_of(v, strip, control, (const int32_t[]){__VA_ARGS__, -1})

/* ---- models ---- */

#define BPE_VOCAB "'vocab':{'a':0,'b':1,'ab':2,'c':3,'abc':4,'bc':5,'<unk>':6}"

static void bpe(void **state) {
  (void)state;
  const char *strings = "{'model':{'type':'BPE'," BPE_VOCAB ",'merges':['a b','ab c','b c']}}";
  const char *arrays =
      "{'model':{" BPE_VOCAB ",'merges':[['a','b'],['ab','c'],['b','c']],'unk_token':'<unk>'}}";
  once(strings, "abcab", 0, "4 2");
  once(strings, "bcabc", 0, "5 4");
  once(strings, "", 0, "");
  once(strings, "axb", UP, "2"); /* what has no token is left out, as upstream does */
  once(arrays, "axxb", 0, "0 6 6 1");
  once("{'model':{" BPE_VOCAB ",'merges':[],'unk_token':'<unk>','fuse_unk':true}}", "axxb", 0,
       "0 6 1");
  once("{'model':{" BPE_VOCAB ",'merges':[],'ignore_merges':true}}", "abc", 0, "4");
  mr_vocab *v = opened(strings);
  assert_non_null(strstr(ids_of(v, "axb", NULL, 0), "no token for the character \"x\""));
  assert_string_equal(mr_vocab_kind(v), "bpe");
  mr_vocab_close(v);
}

static void bpe_affixes_and_bytes(void **state) {
  (void)state;
  once("{'model':{'type':'BPE','vocab':{'a':0,'##b':1,'##b</w>':2,'ab':3,'ab</w>':4},"
       "'merges':['a ##b','a "
       "##b</w>'],'continuing_subword_prefix':'##','end_of_word_suffix':'</w>'},"
       "'pre_tokenizer':{'type':'WhitespaceSplit'}}",
       "ab abb", 0, "4 3 2");
  once("{'model':{'type':'BPE','vocab':{'a':0,'<0xC3>':1,'<0xA9>':2,'<unk>':3},'merges':[],"
       "'byte_fallback':true,'unk_token':'<unk>'}}",
       "a\xc3\xa9\xc3\xa8", 0, "0 1 2 3");
}

static void unigram(void **state) {
  (void)state;
  const char *file = "{'model':{'type':'Unigram','unk_id':0,'vocab':[['<unk>',0],['a',-2],['b',-2],"
                     "['ab',-3],['abc',-9],['c',-1],['\xc3\xa9',-4]]}}";
  once(file, "abc", 0, "3 5"); /* -4 rather than -9 or -5 */
  once(file, "abxyab", 0, "3 0 3");
  once(file,
       "\xc3\xa9"
       "b",
       0, "6 2");
  once("{'model':{'type':'Unigram','unk_id':0,'byte_fallback':true,'vocab':[['<unk>',0],['a',-2],"
       "['<0x78>',-5]]}}",
       "axy", 0, "1 0");
  once("{'model':{'type':'Unigram','unk_id':0,'byte_fallback':true,'vocab':[['<unk>',0],['a',-2],"
       "['<0x78>',-5]]}}",
       "axx", 0, "1 2 2");
  mr_vocab *v = opened("{'model':{'type':'Unigram','vocab':[['a',-2]]}}");
  assert_non_null(strstr(ids_of(v, "b", NULL, 0), "no unknown token"));
  mr_vocab_close(v);
}

static void wordpiece(void **state) {
  (void)state;
  const char *file =
      "{'normalizer':{'type':'BertNormalizer'},'pre_tokenizer':{'type':"
      "'BertPreTokenizer'},'decoder':{'type':'WordPiece'},'model':{'type':"
      "'WordPiece','unk_token':'[UNK]','max_input_chars_per_word':5,'vocab':{"
      "'[UNK]':0,'un':1,'##aff':2,'##able':3,'a':4,'##a':5,',':6,'\xe6\xbc\xa2':7}}}";
  once(file,
       "Un\xc3\xa0"
       "aff A",
       0, "0 4");
  once(file, "un\xc3\xa0 aaaaa aaaaaa", 0, "1 5 4 5 5 5 5 0");
  once(file,
       "a,\xe6\xbc\xa2"
       "a",
       0, "4 6 7 4");
  mr_vocab *v = opened(file);
  assert_string_equal(TEXT(v, true, false, 1, 2, 4, 6, 4), "unaff a, a|");
  assert_string_equal(TEXT(v, false, false, 4, 5), " aa|");
  mr_vocab_close(v);
  once("{'pre_tokenizer':{'type':'Whitespace'},'model':{'type':'WordLevel','unk_token':'<u>',"
       "'vocab':{'<u>':0,'one':1}}}",
       "one two-one", 0, "1 0 0 1");
}

/* ---- added tokens and what surrounds a text ---- */

#define MARKS                                                                                      \
  "'added_tokens':[{'id':3,'content':'<s>','special':true,'normalized':false},"                    \
  "{'id':4,'content':'<m>','special':true,'lstrip':true,'rstrip':true},"                           \
  "{'id':5,'content':'ba','single_word':true},{'id':6,'content':'<s><s>','special':true}]"
#define ABC "'model':{'type':'BPE','vocab':{'a':0,'b':1,' ':2},'merges':[]}"

static void added_tokens(void **state) {
  (void)state;
  const char *file = "{" MARKS "," ABC ",'post_processor':{'type':'TemplateProcessing','single':["
                     "{'SpecialToken':{'id':'<s>','type_id':0}},{'Sequence':{'id':'A'}}],"
                     "'special_tokens':{'<s>':{'id':'<s>','ids':[3]}}}}";
  once(file, "a<s>b", PARSE, "0 3 1");
  once(file, "a<s>b", 0 | UP, "0 1"); /* plain text: no tokens for its characters */
  once(file, "<s><s>a", PARSE, "6 0");
  once(file, "a  <m>  b", PARSE, "0 4 1");
  once(file, "ba aba ba", 0, "5 2 0 1 0 2 5");
  once(file, "a", ADD, "3 0");
  once(file, "<s>a", ADD | PARSE | UP, "3 3 0");
  mr_vocab *v = opened(file);
  static const uint8_t plain[] = {0, 0, 0, 1, 1, 1, 1};
  assert_string_equal(ids_of(v, "<s>a<s>", plain, PARSE | UP), "3 0");
  assert_true(mr_vocab_is_control(v, 3));
  assert_false(mr_vocab_is_control(v, 5));
  assert_string_equal(TEXT(v, true, false, 0, 3, 5), "a ba|"); /* no decoder: spaces between */
  assert_string_equal(TEXT(v, true, true, 3, 0), "<s> a|");
  mr_vocab_close(v);
}

/* A user's text never becomes a control token, not even after normalizing. */
static void marks_follow_the_text(void **state) {
  (void)state;
  mr_vocab *v =
      opened("{'added_tokens':[{'id':1,'content':'<x>','special':true,'normalized':true}],"
             "'normalizer':{'type':'Sequence','normalizers':[{'type':'NFKC'},{'type':"
             "'Lowercase'},{'type':'Replace','pattern':{'String':'!'},'content':''}]},"
             "'model':{'type':'BPE','vocab':{'a':0},'merges':[]}}");
  static const uint8_t plain[] = {0, 0, 0, 0, 0, 1, 1, 1, 1, 1};
  assert_string_equal(ids_of(v, "<!X>a<!X>a", plain, PARSE | UP), "1 0 0");
  assert_string_equal(ids_of(v, "<!X>a<!X>a", NULL, PARSE | UP), "1 0 1 0");
  mr_vocab_close(v);
}

/* ---- steps ---- */

#define CHARS                                                                                      \
  "'model':{'type':'WordLevel','unk_token':'?','vocab':{'?':0,'a':1,'b':2,'ab':3,'12':4,'1':5,"    \
  "'2':6,'-':7,'a-':8,'-b':9,'--':10,'\xe2\x96\x81"                                                \
  "a':11,'A':12,' b':13,'\xc3\xa9':14,'e':15}}"

static void pre_tokenizers(void **state) {
  (void)state;
  once("{" CHARS ",'pre_tokenizer':{'type':'Digits','individual_digits':false}}", "a12b", 0,
       "1 4 2");
  once("{" CHARS ",'pre_tokenizer':{'type':'Digits','individual_digits':true}}", "a12b", 0,
       "1 5 6 2");
  once("{" CHARS ",'pre_tokenizer':{'type':'CharDelimiterSplit','delimiter':'-'}}", "a-b", 0,
       "1 2");
  once("{" CHARS ",'pre_tokenizer':{'type':'Metaspace','replacement':'\xe2\x96\x81',"
       "'prepend_scheme':'first'}}",
       "a a", 0, "11 11");
  static const struct {
    const char *behavior, *want;
  } cuts[] = {{"Removed", "1 2"},
              {"Isolated", "1 7 7 2"},
              {"MergedWithPrevious", "8 7 2"},
              {"MergedWithNext", "1 7 9"},
              {"Contiguous", "1 10 2"}};
  for (size_t i = 0; i < 5; i++) {
    char file[600];
    snprintf(file, sizeof file,
             "{" CHARS ",'pre_tokenizer':{'type':'Split','pattern':{'Regex':'-'},'behavior':'%s'}}",
             cuts[i].behavior);
    once(file, "a--b", 0, cuts[i].want);
    snprintf(file, sizeof file,
             "{" CHARS ",'pre_tokenizer':{'type':'Punctuation','behavior':'%s'}}",
             cuts[i].behavior);
    once(file, "a--b", 0, cuts[i].want);
  }
  once("{" CHARS ",'pre_tokenizer':{'type':'Split','pattern':{'String':'-'},'behavior':'Removed',"
       "'invert':true}}",
       "a-b", 0, "7");
}

static void normalizers(void **state) {
  (void)state;
  once("{" CHARS ",'normalizer':{'type':'Strip'}}",
       " \xe3\x80\x80"
       "ab\n",
       0, "3");
  once("{" CHARS ",'normalizer':{'type':'Lowercase'}}", "AB", 0, "3");
  once("{" CHARS ",'normalizer':{'type':'NFC'}}", "e\xcc\x81", 0, "14");
  once("{" CHARS ",'normalizer':{'type':'Sequence','normalizers':[{'type':'NFD'},{'type':"
       "'StripAccents'}]}}",
       "\xc3\xa9", 0, "15");
  once("{" CHARS ",'normalizer':{'type':'Prepend','prepend':'\xe2\x96\x81'}}", "a", 0, "11");
  once("{" CHARS ",'normalizer':{'type':'Replace','pattern':{'Regex':'x+'},'content':'b'}}", "axx",
       0, "3");
}

static void decoders(void **state) {
  (void)state;
  mr_vocab *v = opened("{'decoder':{'type':'Sequence','decoders':[{'type':'Replace','pattern':{"
                       "'String':'_'},'content':' '},{'type':'ByteFallback'},{'type':'Fuse'},{"
                       "'type':'Strip','content':' ','start':1,'stop':0}]},'model':{'type':'BPE',"
                       "'vocab':{'_a':0,'<0xC3>':1,'<0xA9>':2,'__b':3},'merges':[]}}");
  assert_string_equal(TEXT(v, true, false, 0, 1, 2, 0), "a\xc3\xa9 a|");
  assert_string_equal(TEXT(v, true, false, 3, 0), " b a|");
  assert_string_equal(TEXT(v, false, false, 0, 1), " a\xef\xbf\xbd|"); /* half a character */
  mr_vocab_close(v);
  v = opened("{'decoder':{'type':'ByteLevel'},'model':{'type':'BPE','vocab':{'\xc4\xa0"
             "a':0,'\xc3\x83':1,'\xc2\xa9':2,'\xe6\xbc\xa2':3},'merges':[]}}");
  assert_string_equal(TEXT(v, true, false, 0, 1, 2, 3), " a\xc3\xa9\xe6\xbc\xa2|");
  mr_vocab_close(v);
}

/* ---- hostile files ---- */

static void refused(const char *file, const char *words) {
  mr_err e = MR_ERR_INIT;
  mr_vocab *v = NULL;
  int64_t live;
  json_t *root = value(file);
  live = mr_mem_live();
  assert_int_equal(mr_hf_open(&v, root, NULL, &e), MR_E_DATA);
  assert_null(v);
  if (!strstr(e.text, words))
    fail_msg("\"%s\" does not say \"%s\"", e.text, words);
  assert_int_equal(mr_mem_live(), live);
  json_decref(root);
}

static void broken_files(void **state) {
  (void)state;
  refused("{}", "no model");
  refused("{'model':{'type':'Neural','vocab':{}}}", "model \"Neural\"");
  refused("{'model':{'type':'BPE','vocab':{},'merges':[]}}", "no vocabulary");
  refused("{'model':{'type':'BPE','vocab':{'a':-1},'merges':[]}}", "out of range");
  refused("{'model':{'type':'BPE','vocab':{'a':99999999},'merges':[]}}", "out of range");
  refused("{'model':{'type':'BPE','vocab':{'a':0,'b':0},'merges':[]}}", "the id 0");
  refused("{'model':{'type':'BPE','vocab':{'a':0},'merges':['a b']}}", "merge 0");
  refused("{'model':{'type':'BPE','vocab':{'a':0},'merges':['aa']}}", "not two texts");
  refused("{'model':{'type':'BPE','vocab':{'a':0},'merges':[],'dropout':0.1}}", "dropout");
  refused("{'model':{'type':'BPE','vocab':{'a':0}}}", "merges");
  refused("{'model':{'type':'Unigram','vocab':[['a']]}}", "score of token 0");
  refused("{'model':{'type':'Unigram','vocab':[[1,2]]}}", "token 0 has no text");
  refused("{'model':{'type':'Unigram','unk_id':7,'vocab':[['a',1]]}}", "unk_id 7");
  refused("{'model':{'type':'WordPiece','unk_token':'[UNK]','vocab':{'a':0}}}", "[UNK]");
  refused("{" CHARS ",'normalizer':{'type':'Magic'}}", "normalizer \"Magic\"");
  refused("{" CHARS ",'pre_tokenizer':{'type':'Magic'}}", "pre-tokenizer \"Magic\"");
  refused("{" CHARS ",'post_processor':{'type':'Magic'}}", "post-processor \"Magic\"");
  refused("{" CHARS ",'decoder':{'type':'CTC'}}", "decoder \"CTC\"");
  refused("{" CHARS
          ",'pre_tokenizer':{'type':'Split','pattern':{'Regex':'('},'behavior':'Removed'}}",
          "does not compile");
  refused("{" CHARS ",'pre_tokenizer':{'type':'Split','pattern':3}}", "neither");
  refused("{" CHARS ",'post_processor':{'type':'BertProcessing','sep':['a',99],'cls':['b',1]}}",
          "99 is no token id");
  refused("{" CHARS ",'normalizer':{'type':'Precompiled','precompiled_charsmap':'AAAA'}}", "trie");
  refused("{" CHARS ",'added_tokens':[{'id':3}]}", "no content");
}

static void deep_nesting(void **state) {
  (void)state;
  mr_text t = {0};
  mr_text_adds(&t, "{" CHARS ",'normalizer':");
  for (int i = 0; i < 100; i++)
    mr_text_adds(&t, "{'type':'Sequence','normalizers':[");
  mr_text_adds(&t, "{'type':'NFC'}");
  for (int i = 0; i < 100; i++)
    mr_text_adds(&t, "]}");
  mr_text_addc(&t, '}');
  refused(t.data, "nested too deeply");
  mr_text_free(&t);
}

/* Steps that double a text again and again are stopped. */
static void growing_texts(void **state) {
  (void)state;
  static const char *const steps[] = {"{'type':'Replace','pattern':{'String':'a'},'content':'aa'}",
                                      "{'type':'ByteLevel'}"};
  for (int k = 0; k < 4; k++) {
    mr_text t = {0};
    mr_text_adds(&t, "{" CHARS);
    mr_text_adds(&t, k < 2    ? ",'normalizer':{'type':'Sequence','normalizers':["
                     : k == 2 ? ",'pre_tokenizer':{'type':'Sequence','pretokenizers':["
                              : ",'decoder':{'type':'Sequence','decoders':[");
    for (int i = 0; i < 60; i++)
      mr_text_addf(&t, "%s%s", i ? "," : "", steps[k == 1 || k == 2]);
    mr_text_adds(&t, "]}}");
    mr_vocab *v = opened(t.data);
    if (k < 3)
      assert_non_null(strstr(ids_of(v, "a\xc3\xa9", NULL, 0), "64 times"));
    else
      assert_true(strlen(TEXT(v, true, true, 1)) < (4 << 20));
    mr_vocab_close(v);
    mr_text_free(&t);
  }
}

static const char whole[] =
    "{" MARKS ",'normalizer':{'type':'Sequence','normalizers':[{'type':'NFC'},{'type':'Prepend',"
    "'prepend':'_'},{'type':'Replace','pattern':{'String':' '},'content':'_'}]},'pre_tokenizer':{"
    "'type':'Sequence','pretokenizers':[{'type':'Split','pattern':{'Regex':'\\\\d'},'behavior':"
    "'Isolated'},{'type':'ByteLevel','add_prefix_space':true}]},'decoder':{'type':'ByteLevel'},"
    "'model':{'type':'BPE','vocab':{'a':0,'b':1,'ab':2},'merges':['a b'],'unk_token':'a'}}";

static void memory_may_run_out(void **state) {
  (void)state;
  json_t *root = value(whole);
  int64_t live = mr_mem_live();
  bool more = true;
  for (int64_t n = 0; more; n++) {
    mr_err e = MR_ERR_INIT;
    mr_vocab *v = NULL;
    mr_ids ids = {0};
    static const uint8_t plain[12] = {1};
    mr_mem_fail_after(n);
    mr_code c = mr_hf_open(&v, root, NULL, &e);
    if (!c)
      c = mr_tokenizer_encode(v,
                              "\xff"
                              "ab <s>1 ba",
                              11, plain, ADD | PARSE, &ids, &e);
    more = starved(n);
    assert_true(c == MR_OK || c == MR_E_NOMEM);
    mr_ids_free(&ids);
    mr_vocab_close(v);
    assert_int_equal(mr_mem_live(), live);
  }
  json_decref(root);
}

/* Base64 that found no memory is not called wrong. */
static void no_memory_for_a_charsmap(void **state) {
  (void)state;
  json_t *root =
      value("{" CHARS ",'normalizer':{'type':'Precompiled','precompiled_charsmap':'AAAA'}}");
  mr_code c = MR_E_NOMEM;
  for (int64_t n = 0; c == MR_E_NOMEM; n++) {
    mr_err e = MR_ERR_INIT;
    mr_vocab *v = NULL;
    mr_mem_fail_after(n);
    c = mr_hf_open(&v, root, NULL, &e);
    mr_mem_fail_after(-1);
    if (c != MR_E_NOMEM && !strstr(e.text, "trie"))
      fail_msg("%s", e.text);
  }
  assert_int_equal(c, MR_E_DATA);
  json_decref(root);
}

/* Files with a few bytes changed are read or refused, and what is read can be used. */
static void changed_files(void **state) {
  (void)state;
  static const char *const files[] = {
      whole, "{'model':{'type':'Unigram','unk_id':0,'vocab':[['<unk>',0],['a',-2],['ab',-3]]},"
             "'normalizer':{'type':'BertNormalizer'},'pre_tokenizer':{'type':'Metaspace'}}"};
  static const char letters[] = "0123456789-'{}[],:abeptrue";
  uint64_t x = 5;
  int opened_n = 0;
  for (int k = 0; k < 20000; k++) {
    mr_err e = MR_ERR_INIT;
    mr_vocab *v = NULL;
    mr_text t = {0};
    mr_text_adds(&t, files[k & 1]);
    for (int i = 0; i < 1 + k % 3; i++) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      t.data[(x >> 33) % t.len] = letters[(x >> 20) % (sizeof letters - 1)];
    }
    for (size_t i = 0; i < t.len; i++)
      t.data[i] = t.data[i] == '\'' ? '"' : t.data[i];
    json_t *root = mr_json_parse(t.data, t.len, NULL, &e);
    if (root && !mr_hf_open(&v, root, NULL, &e)) {
      opened_n++;
      ids_of(v, "ab <s>a1 \xc3\xa9 ba<m> x", NULL, ADD | PARSE);
      TEXT(v, true, true, 0, 1, 2, 3);
    }
    mr_vocab_close(v);
    json_decref(root);
    mr_text_free(&t);
  }
  assert_true(opened_n > 1000);
}

/* ---- data ---- */

static void tiny_samples(void **state) {
  (void)state;
  const char *path = data_path("tiny/tokenizer/tokenizer.json");
  mr_err e = MR_ERR_INIT;
  mr_vocab *v = NULL;
  if (!path)
    skip();
  json_t *root = mr_json_read(path, 1 << 20, &e);
  assert_int_equal(mr_hf_open(&v, root, NULL, &e), MR_OK);
  json_t *samples = mr_json_read(data_path("tiny/tokenizer/samples.json"), 1 << 20, &e), *s;
  size_t i, k;
  assert_true(json_array_size(samples) > 0);
  json_array_foreach(samples, i, s) {
    mr_ids ids = {0};
    json_t *want = json_object_get(s, "ids"), *id, *text = json_object_get(s, "text");
    assert_int_equal(mr_tokenizer_encode(v, json_string_value(text), json_string_length(text), NULL,
                                         ADD | PARSE, &ids, &e),
                     MR_OK);
    assert_int_equal(ids.n, json_array_size(want));
    json_array_foreach(want, k, id) assert_int_equal(ids.ids[k], json_integer_value(id));
    mr_ids_free(&ids);
  }
  json_decref(root);
  json_decref(samples);
  mr_vocab_close(v);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bpe),
      cmocka_unit_test(bpe_affixes_and_bytes),
      cmocka_unit_test(unigram),
      cmocka_unit_test(wordpiece),
      cmocka_unit_test(added_tokens),
      cmocka_unit_test(marks_follow_the_text),
      cmocka_unit_test(pre_tokenizers),
      cmocka_unit_test(normalizers),
      cmocka_unit_test(decoders),
      cmocka_unit_test(broken_files),
      cmocka_unit_test(deep_nesting),
      cmocka_unit_test(growing_texts),
      cmocka_unit_test(memory_may_run_out),
      cmocka_unit_test(no_memory_for_a_charsmap),
      cmocka_unit_test(changed_files),
      cmocka_unit_test(tiny_samples),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
