#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "io/sys.h"
#include "src/template.h"
#include "unzipped.h"

#define NOON 1772719629.0 /* 2026-03-05 14:07:09 UTC */
#define CONFORMANCE "conformance/templates/"

/* ---- helpers ---- */

static const char context[] =
    "{\"s\": \"Hello World\", \"n\": 5, \"f\": 2.5, \"t\": true, \"no\": null, \"l\": [3, 1, 2],"
    " \"e\": \"\", \"u\": \"na\\u00efve \\u6f22\\ud83d\\ude00\", \"names\": [\"b\", \"A\", \"c\"],"
    " \"d\": {\"b\": 1, \"a\": \"two\", \"items\": 0}, \"html\": \"<b>&\\\"'\","
    " \"m\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"bot\", \"content\": null}]}";

/* Renders src over JSON variables. The text, or the error's words, in one static buffer. */
static mr_code render(const char *src, const char *vars, const mr_template_limits *limits,
                      const char **words) {
  static char said[4096];
  mr_template *t = NULL;
  mr_rendered out = {0};
  mr_err e = MR_ERR_INIT;
  json_t *v = json_loads(vars, JSON_ALLOW_NUL, NULL);
  assert_non_null(v);
  mr_code c = mr_template_parse(&t, src, strlen(src), &e);
  if (!c)
    c = mr_template_render(t, v, limits, NOON, &out, NULL, &e);
  assert_int_equal(out.text.len, out.taint.len);
  snprintf(said, sizeof said, "%s", c ? e.text : out.text.data ? out.text.data : "");
  *words = said;
  assert_int_equal(c, e.code);
  mr_rendered_free(&out);
  mr_template_free(t);
  json_decref(v);
  return c;
}

typedef struct row {
  const char *src, *want;
} row;

static void check_all(const row *rows, size_t n) {
  const char *got;
  int bad = 0;
  for (size_t i = 0; i < n; i++) {
    mr_code c = render(rows[i].src, context, NULL, &got);
    if (c || strcmp(got, rows[i].want)) {
      print_error("%s\n  gives  %d \"%s\"\n  wanted \"%s\"\n", rows[i].src, c, got, rows[i].want);
      bad++;
    }
  }
  assert_int_equal(bad, 0);
}

static void check_errors(const row *rows, size_t n) {
  const char *got;
  int bad = 0;
  for (size_t i = 0; i < n; i++) {
    mr_code c = render(rows[i].src, context, NULL, &got);
    if (c != MR_E_DATA || !strstr(got, rows[i].want)) {
      print_error("%s\n  gives  %d \"%s\"\n  wanted \"%s\"\n", rows[i].src, c, got, rows[i].want);
      bad++;
    }
  }
  assert_int_equal(bad, 0);
}

#define CHECK(rows) check_all(rows, sizeof(rows) / sizeof *(rows))
#define CHECK_ERRORS(rows) check_errors(rows, sizeof(rows) / sizeof *(rows))

/* ---- the language ---- */

static void values_print_as_in_python(void **state) {
  static const row rows[] = {
      {"{{ s }} {{ n }} {{ f }} {{ t }} {{ no }} {{ l }} {{ missing }}",
       "Hello World 5 2.5 True None [3, 1, 2] "},
      {"{{ d }} {{ (1,) }} {{ () }} {{ ['a\"b', \"c'd\", '\\n'] }}",
       "{'b': 1, 'a': 'two', 'items': 0} (1,) () ['a\"b', \"c'd\", '\\n']"},
      {"{{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 100.0 }} {{ 0.1 + 0.2 }}",
       "1e+16 1000000000000000.0 0.0001 1e-05 100.0 0.30000000000000004"},
      {"{{ 99999999999 * 99999999999 }} {{ 2 ** 100 }}",
       "9999999999800000000001 1267650600228229401496703205376"},
      {"{{ 'a' 'b' }} {{ '\\u00e9\\x41\\q' }} {{ 0x1F }} {{ 1_000 }}", "ab \xc3\xa9"
                                                                       "A\\q 31 1000"},
      {"{{ range(3) }} {{ d.keys() }} {{ d.items() }}",
       "range(0, 3) dict_keys(['b', 'a', 'items']) dict_items([('b', 1), ('a', 'two'), "
       "('items', 0)])"},
  };
  (void)state;
  CHECK(rows);
}

static void operators(void **state) {
  static const row rows[] = {
      {"{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ -7.5 // 2 }} {{ 2 ** -1 }}",
       "3 -4 2 3.5 -4.0 0.5"},
      {"{{ -2 ** 2 }} {{ 2 + 3 * 4 }} {{ 1 ~ 2 * 3 }} {{ -1 | abs }}", "4 14 16 1"},
      {"{{ 'ab' * 2 }} {{ [1] + [2] }} {{ 'n=%03d %s' % (3, 'x') }}", "abab [1, 2] n=003 x"},
      {"{{ 1 < 2 < 3 }} {{ 1 < 2 > 5 }} {{ 1 == 1.0 }} {{ 1 == '1' }} {{ t == 1 }}",
       "True False True False True"},
      {"{{ 3 in l }} {{ 'el' in s }} {{ 'b' in d }} {{ 9 not in l }} {{ 'x' in missing }}",
       "True True True True False"},
      {"{{ e or 'x' }} {{ s and n }} {{ not e }} {{ 0 and 1 / 0 }}", "x 5 True 0"},
      {"{{ 'y' if n > 3 else 'z' }}{{ 'y' if no }}{{ 1 if 0 else 2 if 0 else 3 }}", "y3"},
      {"{{ l[0] }}{{ l[-1] }}{{ l[1:] }}{{ l[::-1] }}{{ s[1:4] }}{{ s[::-2] }}",
       "32[1, 2][2, 1, 3]elldrWolH"},
      {"{{ u[2] }}{{ u[-1] }}{{ u | length }}{{ u[6:7] }}", "\xc3\xaf\xf0\x9f\x98\x80"
                                                            "8\xe6\xbc\xa2"},
  };
  static const row errors[] = {
      {"{{ 1 + 'a' }}", "unsupported operand"},
      {"{{ 'a' + 1 }}", "can only concatenate str"},
      {"{{ 1 // 0 }}", "by zero"},
      {"{{ missing + 1 }}", "'missing' is undefined"},
      {"{{ missing.x }}", "'missing' is undefined"},
      {"{{ d.zz.x }}", "'dict object' has no attribute 'zz'"},
      {"{{ 1 < 'a' }}", "not supported between"},
      {"{{ 2 ** 200 }}", "overflow"},
      {"{{ l[::0] }}", "zero"},
      {"{{ no() }}", "not callable"},
      {"{{ {[1]: 2} }}", "unhashable"},
  };
  (void)state;
  CHECK(rows);
  CHECK_ERRORS(errors);
}

static void attributes_and_methods(void **state) {
  static const row rows[] = {
      {"{{ d.b }}{{ d['a'] }}{{ d.zz }}{{ d['items'] }}{{ d.get('q', 'w') }}{{ n.x }}", "1two0w"},
      {"{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "b=1;a=two;items=0;"},
      {"{{ ' a  b '.split() }}{{ 'a,b,,c'.split(',', 1) }}{{ 'a,b'.rsplit(',')[-1] }}",
       "['a', 'b']['a', 'b,,c']b"},
      {"{{ '  x '.strip() }}|{{ 'xax'.lstrip('x') }}|{{ s.upper() }}|{{ 'ab cd'.title() }}",
       "x|ax|HELLO WORLD|Ab Cd"},
      {"{{ s.startswith('He') }}{{ s.endswith(('x', 'ld')) }}{{ s.find('o') }}{{ s.count('l') }}",
       "TrueTrue43"},
      {"{{ s.replace('l', 'L', 1) }} {{ ','.join(names) }} {{ 'a'.center(5, '*') }}",
       "HeLlo World b,A,c **a**"},
      {"{{ '{0} {x:>4}|{0!r}'.format('q', x=1) }}", "q    1|'q'"},
      {"{{ '{:,} {:.2f} {:#x}'.format(1234567, 3.14159, 255) }}", "1,234,567 3.14 0xff"},
      {"{{ '\xc3\x9f'.upper() }} {{ '\xc4\xb0'.lower() | length }} {{ 'ab\\ncd'.splitlines() }}",
       "SS 2 ['ab', 'cd']"},
      {"{{ s.__class__ }}{{ l.append }}{{ d.update is defined }}", "False"},
  };
  static const row errors[] = {
      {"{{ l.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"},
      {"{{ d.update({}) }}", "unsafe"},
      {"{{ s.__class__() }}", "unsafe"},
      {"{{ s.nothing() }}", "has no attribute 'nothing'"},
      {"{{ ','.join([1]) }}", "expected str instance, int found"},
      {"{{ '{} {0}'.format(1, 2) }}", "fields"},
      {"{{ s.split('') }}", "empty separator"},
  };
  (void)state;
  CHECK(rows);
  CHECK_ERRORS(errors);
}

static void filters(void **state) {
  static const row rows[] = {
      {"{{ d | tojson }} {{ u | tojson }} {{ u | tojson(ensure_ascii=true) }}",
       "{\"b\": 1, \"a\": \"two\", \"items\": 0} \"na\xc3\xafve \xe6\xbc\xa2\xf0\x9f\x98\x80\" "
       "\"na\\u00efve \\u6f22\\ud83d\\ude00\""},
      {"{{ [1, [], {}] | tojson(indent=1) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, "
       "separators=(',', ':')) }}",
       "[\n 1,\n [],\n {}\n]{\"a\":2,\"b\":1}"},
      {"{{ names | sort }}{{ names | sort(case_sensitive=true) }}{{ l | sort(true) }}",
       "['A', 'b', 'c']['A', 'b', 'c'][3, 2, 1]"},
      {"{{ d | dictsort(by='key') }}", "[('a', 'two'), ('b', 1), ('items', 0)]"},
      {"{{ m | map(attribute='role') | join('+') }} {{ names | map('upper') | list }}",
       "user+bot ['B', 'A', 'C']"},
      {"{{ m | selectattr('content') | list | length }}{{ l | select('gt', 1) | list }}"
       "{{ l | reject('odd') | list }}",
       "1[3, 2][2]"},
      {"{{ m | rejectattr('role', 'equalto', 'bot') | map(attribute='content') | first }}", "hi"},
      {"{% for g in m | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
       "bot1user1"},
      {"{{ l | max }}{{ l | min }}{{ l | sum }}{{ [1, 1, 'a', 'A'] | unique | list }}",
       "316[1, 'a']"},
      {"{{ [1, 2, 3] | batch(2, 'x') | list }}{{ [1, 2, 3] | slice(2) | list }}",
       "[[1, 2], [3, 'x']][[1, 2], [3]]"},
      {"{{ missing | default('D') }}{{ e | default('D') }}{{ e | d('E', true) }}", "DE"},
      {"{{ '42' | int }}{{ 'x' | int(7) }}{{ '0x1f' | int(base=16) }}{{ '2.5' | float }}",
       "427312.5"},
      {"{{ 2.5 | round }} {{ 3.14159 | round(2) }} {{ 2.1 | round(0, 'ceil') }} {{ 7 | round }}",
       "2.0 3.14 3.0 7"},
      {"{{ html | e }}{{ html | safe }}{{ ('<' | safe) + '<' }}",
       "&lt;b&gt;&amp;&#34;&#39;<b>&\"'<&lt;"},
      {"{{ 'a\\n\\nb' | indent(2) }}|{{ 'a\\nb' | indent(1, true) }}", "a\n\n  b| a\n b"},
      {"{{ 'hello world foo' | truncate(9, leeway=0) }} {{ 'a b c' | wordcount }}", "hello... 3"},
      {"{{ 'aa bb cc' | wordwrap(5) }} {{ '<i>a</i>  b' | striptags }}", "aa bb\ncc a b"},
      {"{% filter upper %}a{{ n }}{% endfilter %}{% set x | trim %} q {% endset %}[{{ x }}]",
       "A5[q]"},
      {"{% set g = l | map('string') %}{{ g | list }}{{ g | list }}", "['3', '1', '2'][]"},
  };
  static const row errors[] = {
      {"{{ missing | tojson }}", "Undefined is not JSON serializable"},
      {"{{ l | map('string') | tojson }}", "generator is not JSON"},
      {"{{ no | length }}", "has no len()"},
      {"{{ l | items | list }}", "item pairs from a mapping"},
      {"{{ s | nothing }}", "No filter named 'nothing'"},
      {"{{ l | map('nothing') | list }}", "No filter named 'nothing'"},
      {"{{ s is nothing }}", "No test named 'nothing'"},
      {"{{ s | replace('a') }}", "missing required argument"},
      {"{{ [1, 'a'] | sort }}", "not supported between"},
  };
  (void)state;
  CHECK(rows);
  CHECK_ERRORS(errors);
}

static void tests_behind_is(void **state) {
  static const row rows[] = {
      {"{{ s is defined }}{{ missing is undefined }}{{ d.zz is defined }}{{ no is none }}",
       "TrueTrueFalseTrue"},
      {"{{ s is string }}{{ d is mapping }}{{ l is sequence }}{{ d is iterable }}{{ n is number }}",
       "TrueTrueTrueTrueTrue"},
      {"{{ t is true }}{{ n is true }}{{ n is odd }}{{ n is divisibleby 5 }}{{ n is not eq 4 }}",
       "TrueFalseTrueTrueTrue"},
      {"{{ 'a' is in 'abc' }}{{ l is sameas l }}{{ 'A' is upper }}{{ range is callable }}",
       "TrueTrueTrueTrue"},
      {"{% if false %}{{ s | nothing }}{% endif %}{{ 1 if true else (s is nothing) }}", "1"},
  };
  (void)state;
  CHECK(rows);
}

static void loops_and_scopes(void **state) {
  static const row rows[] = {
      {"{% for x in l %}{{ loop.index }}/{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }} "
       "{% endfor %}",
       "1/2TrueFalse 2/1FalseFalse 3/0FalseTrue "},
      {"{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }};{% endfor %}",
       "<3>1;3<1>2;1<2>;"},
      {"{% for x in l if x > 1 %}{{ x }}of{{ loop.length }} {% else %}-{% endfor %}", "3of2 2of2 "},
      {"{% for x in [] %}{% else %}none{% endfor %}{% for x in missing %}{% else %}u{% endfor %}",
       "noneu"},
      {"{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}"
       "{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}",
       "323"},
      {"{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}({{ loop(x) }})"
       "{% else %}{{ x }}@{{ loop.depth }}{% endif %}{% endfor %}",
       "(1@2(2@3))(3@2)"},
      {"{% for x in l %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }} {% endfor %}",
       "aTrue bTrue aTrue "},
      {"{% set x = 1 %}{% for i in l %}{% set x = i %}{% endfor %}{{ x }}{% if t %}"
       "{% set x = 2 %}{% endif %}{{ x }}",
       "12"},
      {"{% set ns = namespace(a=0) %}{% for i in l %}{% set ns.a = ns.a + i %}{% endfor %}"
       "{{ ns.a }}{{ ns.zz }}",
       "6"},
      {"{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set q %}x{{ n }}{% endset %}{{ q }}", "12x5"},
      {"{% with a = 1, b = n %}{{ a + b }}{% endwith %}{{ a is defined }}", "6False"},
      {"{% for (a, (b, c)) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}", "123"},
      {"{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}{{ c.next() }}"
       "{% set j = joiner('; ') %}{{ j() }}a{{ j() }}b",
       "121a; b"},
      {"{% block b %}x{{ n }}{% endblock %}{{ self.b() }}{% generation %}g{% endgeneration %}",
       "x5x5g"},
      {"{% autoescape true %}{{ html }}{{ html | safe }}{% endautoescape %}",
       "&lt;b&gt;&amp;&#34;&#39;<b>&\"'"},
  };
  static const row errors[] = {
      {"{% for x in no %}{% endfor %}", "'NoneType' object is not iterable"},
      {"{% for a, b in [[1, 2, 3]] %}{% endfor %}", "too many values to unpack (expected 2)"},
      {"{% set d.a = 1 %}", "non-namespace"},
      {"{% break %}", "outside loop"},
      {"{{ range(100001) }}", "Range too big"},
      {"{% include 'x' %}", "no other template"},
  };
  (void)state;
  CHECK(rows);
  CHECK_ERRORS(errors);
}

static void macros(void **state) {
  static const row rows[] = {
      {"{% macro f(a, b='x', c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}{{ f(1, c=3) }}",
       "1x11x3"},
      {"{% macro f(x) %}{% if x > 0 %}{{ x }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
       "321"},
      {"{% macro f() %}<{{ caller(2) }}>{% endmacro %}{% call(y) f() %}in{{ y }}{% endcall %}",
       "<in2>"},
      {"{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, z=3) }}",
       "1(2,){'z': 3}"},
      {"{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f() }}{{ f(*[1]) }}{{ f(**{'a': 2}) }}",
       "[][1][2]"},
      {"{% macro f() %}{{ v }}{% endmacro %}{% set v = 7 %}{{ f() }}{{ f.name }}", "7f"},
  };
  static const row errors[] = {
      {"{% macro f(a) %}{% endmacro %}{{ f(zz=1) }}", "macro 'f' takes no keyword argument 'zz'"},
      {"{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}", "not more than 1 argument"},
      {"{% macro f() %}{% endmacro %}{% call f() %}{% endcall %}", "'caller'"},
      {"{% macro f(a=1, b) %}{% endmacro %}", "non-default argument"},
  };
  (void)state;
  CHECK(rows);
  CHECK_ERRORS(errors);
}

static void white_space(void **state) {
  static const row rows[] = {
      {"  {% if t %}\n  x\n  {% endif %}\n  y\n", "  x\n  y"},
      {"a {%- if t %} b {%- endif %} c", "a b c"},
      {"a\n  {% set x = 1 %}  \nb", "a\n  \nb"},
      {"  {%+ if t %}x{% endif +%}\ny", "  x\ny"},
      {"x\n    {{- s -}}  \n\ny", "xHello Worldy"},
      {"a {# c #} b\n{# d #}\nc", "a  b\nc"},
      {"{%- raw -%} {{ x }} {%- endraw -%} z{% raw %}{% if %}{% endraw %}", "{{ x }}z{% if %}"},
      {"{{ s }}\n\n", "Hello World\n"},
      {"a\r\nb\rc", "a\nb\nc"},
      {"\xc2\xa0{%- if t %}x{% endif %}", "x"},
      {"text { and } and % and # {", "text { and } and % and # {"},
  };
  (void)state;
  CHECK(rows);
}

static void clock_and_exceptions(void **state) {
  static const row rows[] = {
      {"{{ strftime_now('%Y-%m-%d %H:%M:%S %A %B %-d %j %p %%') }}",
       "2026-03-05 14:07:09 Thursday March 5 064 PM %"},
      {"{{ dict(a=1, b=2) }}{{ namespace(a=1) }}", "{'a': 1, 'b': 2}<Namespace {'a': 1}>"}};
  mr_template *t = NULL;
  mr_rendered out = {0};
  mr_err e = MR_ERR_INIT;
  bool raised = false;
  static const char src[] = "\n{{ raise_exception('no ' ~ role) }}",
                    wordless[] = "{{ raise_exception(nothing) }}",
                    now[] = "{{ strftime_now('') }}";
  json_t *vars = json_pack("{s:s}", "role", "dog");
  (void)state;
  CHECK(rows);
  assert_int_equal(mr_template_parse(&t, src, strlen(src), &e), MR_OK);
  assert_int_equal(mr_template_render(t, vars, NULL, NOON, &out, &raised, &e), MR_E_DATA);
  assert_true(raised);
  assert_string_equal(e.text, "no dog");
  mr_template_free(t);
  mr_err_clear(&e);
  assert_int_equal(mr_template_parse(&t, wordless, strlen(wordless), &e), MR_OK);
  assert_int_equal(mr_template_render(t, vars, NULL, NOON, &out, &raised, &e), MR_E_DATA);
  assert_non_null(strstr(e.text, "without a message"));
  mr_template_free(t);
  mr_err_clear(&e);
  assert_int_equal(mr_template_parse(&t, now, strlen(now), &e), MR_OK);
  assert_int_equal(mr_template_render(t, vars, NULL, -1, &out, &raised, &e), MR_E_DATA);
  assert_false(raised);
  assert_non_null(strstr(e.text, "'strftime_now' is undefined"));
  mr_template_free(t);
  mr_rendered_free(&out);
  json_decref(vars);
}

static void syntax_errors_name_the_line(void **state) {
  static const struct {
    const char *src, *words;
    int line;
  } rows[] = {{"a\n{% if t %}\n", "Unexpected end of template", 2},
              {"a\n\n{{ 1 + }}", "unexpected 'end of print statement'", 3},
              {"{% for x in l %}{% endif %}", "Encountered unknown tag 'endif'", 1},
              {"{% nothing %}", "Encountered unknown tag 'nothing'", 1},
              {"{{ 'a }}", "has no end", 1},
              {"\n{# open", "Missing end of comment tag", 2},
              {"{% set = 1 %}", "unexpected '='", 1},
              {"{{ (1] }}", "another bracket", 1},
              {"{{ 1) }}", "unexpected ')'", 1},
              {"{% set true = 1 %}", "can't assign", 1},
              {"{{ a ? b }}", "unexpected char '?'", 1},
              {"\xff", "not UTF-8", 1}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mr_template *t = NULL;
    mr_err e = MR_ERR_INIT;
    assert_int_equal(mr_template_parse(&t, rows[i].src, strlen(rows[i].src), &e), MR_E_DATA);
    assert_null(t);
    if (!strstr(e.text, rows[i].words) || e.line != rows[i].line)
      fail_msg("%s: line %d \"%s\"", rows[i].src, (int)e.line, e.text);
  }
}

/* ---- taint ---- */

/* The taint of the rendered text as digits, in one static buffer. */
static const char *taint_of(const char *src, const char *vars) {
  static char digits[512];
  mr_template *t = NULL;
  mr_rendered out = {0};
  mr_err e = MR_ERR_INIT;
  json_t *v = json_loads(vars, 0, NULL);
  assert_int_equal(mr_template_parse(&t, src, strlen(src), &e), MR_OK);
  if (mr_template_render(t, v, NULL, NOON, &out, NULL, &e))
    fail_msg("%s: %s", src, e.text);
  assert_in_range(out.taint.len, 0, sizeof digits - 1);
  for (size_t i = 0; i <= out.taint.len; i++)
    digits[i] = i < out.taint.len ? (char)('0' + out.taint.data[i]) : '\0';
  mr_rendered_free(&out);
  mr_template_free(t);
  json_decref(v);
  return digits;
}

static void text_of_users_is_tainted(void **state) {
  static const char vars[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"<E>\"}],"
                             " \"bos\": \"<s>\", \"tools\": [{\"name\": \"t\"}]}";
  static const row rows[] = {
      {"<E>{{ messages[0].content }}<E>", "000111000"},
      {"{{ bos }}{{ messages[0]['role'] }}", "0001111"},
      {"{{ 'a' + messages[0].content ~ 'b' }}", "01110"},
      {"{{ (' ' + messages[0].content + ' ').strip() }}", "111"},
      {"{{ ('a' + messages[0].content)[0:2] }}{{ ('a' + messages[0].content)[::-1] }}", "011110"},
      {"{{ messages[0].content.split('E') | join('-') }}", "101"},
      {"{{ 'xEx'.replace('E', messages[0].content) }}", "01110"},
      {"{{ messages[0].content | upper }}{{ '%s.' % messages[0].content }}", "1111110"},
      {"{{ '{}.'.format(messages[0].content) }}", "1110"},
      {"{{ messages[0].content | tojson }}", "01110"},
      {"{{ tools[0] | tojson }}", "0011110000100"},
      {"{{ [messages[0].content] }}", "0011100"},
      {"{% for k in messages[0] %}{{ k }}{% endfor %}", "11111111111"},
      {"{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].content) }}", "01110"},
      {"{% set x %}a{{ messages[0].content }}{% endset %}{{ x }}", "0111"},
      {"{% filter replace('E', 'F') %}{{ messages[0].content }}{% endfilter %}", "101"},
      {"{{ messages[0].content | length }}{{ messages[0].content == '<E>' }}", "00000"},
      {"{% set messages = messages[0:1] %}{{ messages[0].content | e }}", "111111111"},
  };
  int bad = 0;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const char *got = taint_of(rows[i].src, vars);
    if (strcmp(got, rows[i].want)) {
      print_error("%s: %s, wanted %s\n", rows[i].src, got, rows[i].want);
      bad++;
    }
  }
  assert_int_equal(bad, 0);
}

/* ---- limits ---- */

static void bombs_end_in_an_error(void **state) {
  static const row rows[] = {
      {"{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}", "than"},
      {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested deeper"},
      {"{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('ab') }}", "than"},
      {"{{ 'a' * 99999999999 }}", "longer than"},
      {"{{ [1] * 99999999999 }}", "than"},
      {"{{ '%99999999d' % 5 }}", "wide"},
      {"{{ 'a' | center(999999999) }}", "too long"},
      {"{{ '{:999999999}'.format(1) }}", "wide"},
      {"{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x * 2 %}{% endfor "
       "%}",
       "than"},
      {"{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor "
       "%}"
       "{{ ns.x }}",
       "nested deeper"},
      {"{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor "
       "%}"
       "{{ ns.x | tojson }}",
       "nested deeper"},
      {"{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", "nested deeper"},
      {"{% set ns = namespace(x=()) %}{% for i in range(9999) %}{% set ns.x = (ns.x,) %}{% endfor "
       "%}"
       "{{ {ns.x: 1} }}",
       "nested deeper"},
      {"{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "nested deeper"},
      {"{% for a in range(100000) %}{% set x = l * 1000 %}{% endfor %}", "than"},
      {"{% for a in range(99999) %}{{ 'abcabcabcabcabcabcabcabcabc' * 99999 }}{% endfor %}",
       "than"},
  };
  double start = mr_sys_seconds();
  (void)state;
  CHECK_ERRORS(rows);
  assert_in_range((int)(mr_sys_seconds() - start), 0, 20);
}

/* n times `open`, then `end`. */
static void nested(const char *open, const char *end, size_t n, const char *words) {
  mr_text t = {0};
  mr_template *parsed = NULL;
  mr_err e = MR_ERR_INIT;
  for (size_t i = 0; i < n; i++)
    mr_text_adds(&t, open);
  mr_text_adds(&t, end);
  assert_int_equal(mr_template_parse(&parsed, t.data, t.len, &e), MR_E_DATA);
  if (!strstr(e.text, words))
    fail_msg("%s: %s", open, e.text);
  mr_text_free(&t);
}

static void deep_sources_are_refused(void **state) {
  (void)state;
  nested("{% if t %}", "x", 100000, "blocks within blocks");
  nested("{{ (", "1", 100000, "too deep");
  mr_text t = {0};
  mr_text_adds(&t, "{{ ");
  for (int i = 0; i < 100000; i++)
    mr_text_adds(&t, i % 2 ? "not " : "not ");
  nested(t.data, "x }}", 1, "nested deeper");
  mr_text_clear(&t);
  mr_text_adds(&t, "{{ ");
  for (int i = 0; i < 100000; i++)
    mr_text_adds(&t, "(");
  nested(t.data, "x }}", 1, "too deep");
  mr_text_clear(&t);
  mr_text_adds(&t, "{{ ");
  for (int i = 0; i < 100000; i++)
    mr_text_adds(&t, "- ");
  nested(t.data, "x }}", 1, "nested deeper");
  mr_text_free(&t);
}

static void limits_are_the_callers(void **state) {
  const char *got;
  const mr_template_limits few = {.steps = 50, .depth = 100, .output = 1000},
                           flat = {.steps = 1000, .depth = 4, .output = 1000},
                           brief = {.steps = 1000, .depth = 100, .output = 5};
  (void)state;
  assert_int_equal(render("{% for i in l %}{{ i }}{% endfor %}", context, &few, &got), MR_OK);
  assert_int_equal(render("{% for i in range(60) %}{{ i }}{% endfor %}", context, &few, &got),
                   MR_E_DATA);
  assert_int_equal(render("{{ [[[[1]]]] }}", context, &flat, &got), MR_E_DATA);
  assert_int_equal(render("12345", context, &brief, &got), MR_OK);
  assert_int_equal(render("123456", context, &brief, &got), MR_E_DATA);
}

static void any_allocation_may_fail(void **state) {
  static const char src[] =
      "{% macro f(a) %}[{{ a }}]{% endmacro %}{% for x in m %}{{ f(x.role ~ 'x') | upper }}"
      "{{ x | tojson(indent=1) }}{% endfor %}{% set q %}{{ l | sort }}{% endset %}{{ q }}";
  int64_t live = mr_mem_live();
  json_t *v = json_loads(context, 0, NULL);
  int failures = 0;
  (void)state;
  for (int64_t n = 0;; n++) {
    mr_template *t = NULL;
    mr_rendered out = {0};
    mr_err e = MR_ERR_INIT;
    mr_mem_fail_after(n);
    mr_code c = mr_template_parse(&t, src, strlen(src), &e);
    if (!c)
      c = mr_template_render(t, v, NULL, NOON, &out, NULL, &e);
    mr_mem_fail_after(-1);
    mr_rendered_free(&out);
    mr_template_free(t);
    assert_int_equal(mr_mem_live(), live);
    if (c == MR_OK)
      break;
    assert_int_equal(c, MR_E_NOMEM);
    failures++;
  }
  assert_in_range(failures, 3, 1000);
  json_decref(v);
}

/* ---- conformance ---- */

static mr_template *parse_file(const char *path, mr_err *e) {
  size_t len = 0;
  mr_template *t = NULL;
  char *src = path ? read_whole(path, &len) : NULL;
  if (src)
    mr_template_parse(&t, src, len, e);
  free(src);
  return t;
}

/* Renders one case over `vars` and compares; 1: right. */
static int right(mr_template *t, const json_t *c, json_t *vars, double now, mr_err *e) {
  mr_rendered out = {0};
  const json_t *want = json_object_get(c, "expected"), *error = json_object_get(c, "error");
  mr_code rc = t ? mr_template_render(t, vars, NULL, now, &out, NULL, e) : MR_E_DATA;
  int good = rc == MR_OK && want && out.text.len == json_string_length(want) &&
             memcmp(out.text.data ? out.text.data : "", json_string_value(want), out.text.len) == 0;
  if (json_is_false(json_object_get(c, "compare")))
    good = rc == MR_OK;
  if (error && rc) {
    const char *words = json_string_value(json_object_get(error, "message"));
    good = !json_is_true(json_object_get(error, "raised_by_template")) ||
           (words && strstr(e->text, words));
  }
  if (!good)
    print_error("%s: %d %s %s\n", json_string_value(json_object_get(c, "id")), rc, e->text,
                out.text.data ? out.text.data : "");
  mr_rendered_free(&out);
  return good;
}

static void conversations_of_the_conformance_data(void **state) {
  const char *path = data_path(CONFORMANCE "cases.jsonl.gz");
  static const char *const others[] = {"id", "template_file", "expected", "error", "now"};
  char name[256] = "", file[512];
  mr_template *t = NULL;
  int bad = 0, n = 0;
  (void)state;
  if (!path)
    skip();
  mr_text text = read_unzipped(path);
  for (char *line = text.data, *nl; line && (nl = strchr(line, '\n')); line = nl + 1) {
    json_t *c = json_loadb(line, (size_t)(nl - line), JSON_ALLOW_NUL, NULL);
    const char *wants = json_string_value(json_object_get(c, "template_file"));
    mr_err e = MR_ERR_INIT;
    assert_non_null(wants);
    if (strcmp(name, wants)) {
      snprintf(name, sizeof name, "%s", wants);
      snprintf(file, sizeof file, CONFORMANCE "templates/%s", name);
      mr_template_free(t);
      t = parse_file(data_path(file), &e);
    }
    json_t *vars = json_copy(c);
    double now = json_is_null(json_object_get(c, "now")) ? -1 : NOON;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
      json_object_del(vars, others[i]);
    bad += !right(t, c, vars, now, &e);
    n++;
    json_decref(vars);
    json_decref(c);
  }
  mr_template_free(t);
  mr_text_free(&text);
  assert_in_range(n, 1, INT32_MAX);
  assert_int_equal(bad, 0);
}

static void language_cases_of_the_conformance_data(void **state) {
  const char *path = data_path(CONFORMANCE "micro_context.json");
  size_t len = 0;
  int bad = 0;
  (void)state;
  if (!path)
    skip();
  char *raw = read_whole(path, &len);
  char *big = strstr(raw, "12345678901234567890");
  if (big) /* beyond 64 bits: the command that reads variables knows how, see jobs/cmd_template.c */
    memset(big + 1, ' ', 19);
  json_t *vars = json_loads(raw, 0, NULL);
  if (big)
    json_object_set_new_nocheck(vars, "big",
                                json_string_nocheck("\xff"
                                                    "12345678901234567890"));
  free(raw);
  char *text = read_whole(data_path(CONFORMANCE "micro.jsonl"), &len);
  for (char *line = text, *nl; line && (nl = strchr(line, '\n')); line = nl + 1) {
    json_t *c = json_loadb(line, (size_t)(nl - line), JSON_ALLOW_NUL, NULL);
    const json_t *src = json_object_get(c, "template");
    mr_template *t = NULL;
    mr_err e = MR_ERR_INIT;
    mr_template_parse(&t, json_string_value(src), json_string_length(src), &e);
    bad += !right(t, c, vars, NOON, &e);
    mr_template_free(t);
    json_decref(c);
  }
  free(text);
  json_decref(vars);
  assert_int_equal(bad, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(values_print_as_in_python),
      cmocka_unit_test(operators),
      cmocka_unit_test(attributes_and_methods),
      cmocka_unit_test(filters),
      cmocka_unit_test(tests_behind_is),
      cmocka_unit_test(loops_and_scopes),
      cmocka_unit_test(macros),
      cmocka_unit_test(white_space),
      cmocka_unit_test(clock_and_exceptions),
      cmocka_unit_test(syntax_errors_name_the_line),
      cmocka_unit_test(text_of_users_is_tainted),
      cmocka_unit_test(bombs_end_in_an_error),
      cmocka_unit_test(deep_sources_are_refused),
      cmocka_unit_test(limits_are_the_callers),
      cmocka_unit_test(any_allocation_may_fail),
      cmocka_unit_test(conversations_of_the_conformance_data),
      cmocka_unit_test(language_cases_of_the_conformance_data),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
