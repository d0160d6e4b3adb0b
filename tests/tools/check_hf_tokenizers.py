#!/usr/bin/env python3
"""Compares the ids and texts of `millrace model tokenize` and `detokenize` with the tokenizers package, kind by kind.

Usage: check_hf_tokenizers.py [MILLRACE [KIND...]]. Makes tokenizer.json directories of every kind in a temporary folder:
small ones trained here on words of the test texts, and vocabularies of the conformance data ($MR_DATA, else
../shared/data) written as tokenizer.json. Skips when tokenizers is not installed; exits 1 when anything differs.
"""
import base64, collections, glob, gzip, json, math, os, pathlib, random, struct, subprocess, sys, tempfile, unicodedata

try:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError:
    sys.exit(print("skip: the tokenizers package is not installed"))

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DATA = pathlib.Path(os.environ.get("MR_DATA") or ROOT.parent / "shared/data")
MILLRACE = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "build/millrace")
ONLY = sys.argv[2:]
rng = random.Random(7)


# ---------------------------------------------------------------- texts
def conformance_texts():
    seen = []
    for path in sorted(glob.glob(str(DATA / "conformance/tokenizers/cases/*.gz"))):
        for line in gzip.open(path, "rt", encoding="utf-8"):
            case = json.loads(line)
            text = case["text"] if "text" in case else base64.b64decode(case["text_b64"]).decode("utf-8", "ignore")
            seen.append(text)
    return list(dict.fromkeys(seen))


ALPHABETS = ["abcdefgh ABCDEF", "aé ñüß ÀÉİıſK", "０１２ ½ ²Ⅷ 123", "漢字かなカナ 한글 ", "\u0301\u0300\u0323e\u0308ạ̈ ", " \t\n\r\u00a0\u3000\u2028\u180e\u200b",
             ".,!?;:'\"()[]{}<>|@#$%^&*-_+=~`", "😀👍🏽👨‍👩‍👧🇩🇪 ", "\x00\x01\x7f\x85\xad\ufffd\ufeff", "ﬁﬀ①㎏㍿Å가 ", "▁ ▁▁a_", "مرحبا שלום हिन्दी ไทย ", "'s 're 'LL n't ",
             "<>|s/unkmaskpad[]CLSEP ", "##ab ĠĊ<0x0A>"]
SPECIALS = ["<s>", "</s>", "<unk>", "<|im_end|>", "<u>", "[CLS]", "[MASK]", " <mask> ", "<0x41>"]


def random_texts(n):
    out = []
    for _ in range(n):
        parts = []
        for _ in range(rng.randint(1, 6)):
            a = rng.choice(ALPHABETS)
            parts.append("".join(rng.choice(a) for _ in range(rng.randint(1, 9))))
            if rng.random() < 0.3:
                parts.append(rng.choice(SPECIALS))
            if rng.random() < 0.1:
                c = chr(rng.choice([rng.randint(0x20, 0xd7ff), rng.randint(0xe000, 0x10ffff)]))
                known = unicodedata.ucd_3_2_0.category(c) == unicodedata.category(c) != "Cn"  # the package's tables are of several ages
                parts.append(c if known else "?")
        out.append("".join(parts))
    return out


# ---------------------------------------------------------------- vocabularies of GGUF files
def read_gguf(path):
    raw = subprocess.run(["zstd", "-dqc", path], check=True, capture_output=True).stdout
    at = 8

    def take(fmt):
        nonlocal at
        v = struct.unpack_from("<" + fmt, raw, at)[0]
        at += struct.calcsize("<" + fmt)
        return v

    def text():
        nonlocal at
        n = take("Q")
        at += n
        return raw[at - n:at].decode("utf-8", "surrogateescape")

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            item, n = take("I"), take("Q")
            return [value(item) for _ in range(n)]
        return take("BbHhIif?"[kind] if kind < 8 else "QqdE"[kind - 10])

    take("Q")
    n = take("Q")
    return {text(): value(take("I")) for _ in range(n)}


def gguf(name):
    path = DATA / f"conformance/tokenizers/vocab/{name}.gguf.zst"
    return read_gguf(str(path)) if path.exists() else None


def special_tokens(g):
    kinds = g["tokenizer.ggml.token_type"]
    return [AddedToken(t, special=k != 4, normalized=False) for t, k in zip(g["tokenizer.ggml.tokens"], kinds) if k in (2, 3, 4)]


def from_bpe(name, pre, ignore=False, norm=None):
    g = gguf(name)
    if not g:
        return None
    vocab = {t: i for i, t in enumerate(g["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in g["tokenizer.ggml.merges"]]
    t = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore))
    t.pre_tokenizer, t.decoder = pre, decoders.ByteLevel()
    if norm:
        t.normalizer = norm
    t.add_tokens(special_tokens(g))
    return t


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def spm_merges(g):
    """Every way to join two pieces into a third, by its score: what the conversion of a SentencePiece model writes."""
    ids = {t: i for i, t in enumerate(g["tokenizer.ggml.tokens"])}
    score = g["tokenizer.ggml.scores"]
    out = []
    for piece, i in ids.items():
        local = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in ids and piece[k:] in ids]
        out += [(score[i], i, *sorted(local, key=lambda p: (ids[p[0]], ids[p[1]]))[j]) for j in range(len(local))]
    out.sort(key=lambda m: -m[0])
    return [(a, b) for _, _, a, b in out]


def from_spm(name, gemma):
    g = gguf(name)
    if not g:
        return None
    vocab = {t: i for i, t in enumerate(g["tokenizer.ggml.tokens"])}
    t = Tokenizer(models.BPE(vocab, spm_merges(g), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        t.normalizer = normalizers.Replace(" ", "▁")
        t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    t.decoder = decoders.Sequence(steps)
    t.add_tokens(special_tokens(g))
    bos = "<bos>" if gemma else "<s>"
    t.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])])
    return t


def from_bert():
    g = gguf("bert-bge")
    if not g:
        return None
    words = [t[1:] if t.startswith("▁") else t if t.startswith("[") and t.endswith("]") and len(t) > 3 else "##" + t for t in g["tokenizer.ggml.tokens"]]
    t = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer, t.decoder = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    t.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    t.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
                                                     special_tokens=[("[CLS]", 101), ("[SEP]", 102)])
    return t


# ---------------------------------------------------------------- small ones, trained here
def train(model, trainer, norm, pre, dec, texts, added=()):
    t = Tokenizer(model)
    if norm:
        t.normalizer = norm
    if pre:
        t.pre_tokenizer = pre
    if dec:
        t.decoder = dec
    t.train_from_iterator(texts, trainer)
    t.add_tokens(list(added))
    return t


ODD = [AddedToken("<mask>", lstrip=True, special=True), AddedToken("<|im_end|>", special=True, rstrip=True), AddedToken("<u>", normalized=True),
       AddedToken("word", single_word=True), AddedToken("Abé", normalized=True), AddedToken("▁▁", normalized=False)]


def small_bpe(texts, pre, norm=None, dec=None, **kw):
    model_args = {k: kw[k] for k in ("unk_token", "fuse_unk", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix") if k in kw}
    args = {k: model_args[k] for k in ("continuing_subword_prefix", "end_of_word_suffix") if k in model_args}
    special = ["<unk>", "<s>", "</s>"] + ([f"<0x{b:02X}>" for b in range(256)] if model_args.get("byte_fallback") else [])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kw.get("bytes") else []
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False, initial_alphabet=alphabet, limit_alphabet=400, **args)
    t = train(models.BPE(**model_args), trainer, norm, pre, dec, texts, ODD)
    t.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    return t


def small_unigram(texts, pre, norm=None, dec=None, byte_fallback=False):
    """Frequent parts of words with made-up scores: the package's trainer gives up on texts like these."""
    counts = collections.Counter()
    for text in texts:
        text = norm.normalize_str(text[:300]) if norm else text[:300]
        for piece, _ in pre.pre_tokenize_str(text):
            counts.update(piece[i:i + n] for i in range(len(piece)) for n in range(1, 7) if i + n <= len(piece))
    best = [t for t, n in counts.most_common(4000)]
    special = ["<unk>", "<s>", "</s>"] + ([f"<0x{b:02X}>" for b in range(256)] if byte_fallback else [])
    scored = [(s, 0.0) for s in special] + [(t, math.log(counts[t] / 1e5) + rng.random() * len(t)) for t in best if t not in special]
    t = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=byte_fallback))
    t.pre_tokenizer, t.decoder = pre, dec
    if norm:
        t.normalizer = norm
    t.add_special_tokens(special[:3])
    t.add_tokens(ODD)
    return t


def small_wordpiece(texts, norm, pre):
    trainer = trainers.WordPieceTrainer(vocab_size=1500, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False, limit_alphabet=300)
    t = train(models.WordPiece(unk_token="[UNK]"), trainer, norm, pre, decoders.WordPiece(), texts, ODD)
    t.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return t


def small_wordlevel(texts, pre):
    trainer = trainers.WordLevelTrainer(vocab_size=1500, special_tokens=["<unk>"], show_progress=False)
    return train(models.WordLevel(unk_token="<unk>"), trainer, None, pre, None, texts, ODD)


def sentencepiece_charsmap():
    """The nmt_nfkc table of a SentencePiece model, if that package is there."""
    try:
        import sentencepiece
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as d:
        pathlib.Path(d, "t.txt").write_text("a few words to train on, and more of them\n" * 50)
        sentencepiece.SentencePieceTrainer.train(input=f"{d}/t.txt", model_prefix=f"{d}/m", vocab_size=30, hard_vocab_limit=False, minloglevel=2)
        from sentencepiece import sentencepiece_model_pb2
        m = sentencepiece_model_pb2.ModelProto()
        m.ParseFromString(pathlib.Path(d, "m.model").read_bytes())
        return m.normalizer_spec.precompiled_charsmap


def kinds(texts):
    P, N, D = pre_tokenizers, normalizers, decoders
    meta = lambda scheme, cut=True: P.Metaspace(prepend_scheme=scheme, split=cut)
    yield "smollm2", lambda: from_bpe("smollm2", P.Sequence([P.Digits(individual_digits=True), P.ByteLevel(add_prefix_space=False)]))
    yield "gpt-2", lambda: from_bpe("gpt-2", P.ByteLevel(add_prefix_space=False))
    yield "llama3", lambda: from_bpe("llama3", split(LLAMA3), ignore=True)
    yield "qwen2", lambda: from_bpe("qwen2", split(LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")), norm=N.NFC())
    yield "starcoder-bloom", lambda: from_bpe("starcoder", split(BLOOM))
    yield "gemma3", lambda: from_spm("gemma3", True)
    yield "llama-spm", lambda: from_spm("llama-spm", False)
    yield "bert-bge", from_bert
    yield "tiny", lambda: Tokenizer.from_file(str(DATA / "tiny/tokenizer/tokenizer.json")) if (DATA / "tiny/tokenizer").exists() else None
    yield "bpe-bytes", lambda: small_bpe(texts, P.ByteLevel(add_prefix_space=True), dec=D.ByteLevel(), bytes=True)
    yield "bpe-fallback", lambda: small_bpe(texts, meta("first"), dec=D.Sequence([D.Metaspace(), D.ByteFallback(), D.Fuse()]), byte_fallback=True, unk_token="<unk>")
    yield "bpe-fuse-unk", lambda: small_bpe(texts, P.Whitespace(), N.NFKC(), unk_token="<unk>", fuse_unk=True)
    yield "bpe-unk", lambda: small_bpe(texts, P.WhitespaceSplit(), N.Sequence([N.NFD(), N.StripAccents(), N.Lowercase()]), unk_token="<unk>")
    yield "bpe-affixes", lambda: small_bpe(texts, P.WhitespaceSplit(), N.Strip(), unk_token="<unk>", continuing_subword_prefix="##", end_of_word_suffix="</w>")
    yield "unigram", lambda: small_unigram(texts, meta("always"), N.Sequence([N.Nmt(), N.NFKC(), N.Replace(Regex(" {2,}"), " ")]), D.Metaspace())
    yield "unigram-first", lambda: small_unigram(texts, meta("first", False), None, D.Metaspace(prepend_scheme="first"))
    yield "unigram-bytes", lambda: small_unigram(texts, meta("never"), N.NFD(), D.Sequence([D.Metaspace(prepend_scheme="never"), D.ByteFallback(), D.Fuse()]), byte_fallback=True)
    charsmap = sentencepiece_charsmap()
    if charsmap:
        yield "unigram-charsmap", lambda: small_unigram(texts, meta("always"), N.Precompiled(charsmap), D.Metaspace())
    yield "wordpiece", lambda: small_wordpiece(texts, N.BertNormalizer(lowercase=True), P.BertPreTokenizer())
    yield "wordpiece-cased", lambda: small_wordpiece(texts, N.BertNormalizer(lowercase=False, strip_accents=True), P.BertPreTokenizer())
    yield "wordlevel", lambda: small_wordlevel(texts, P.Sequence([P.Whitespace(), P.Digits(individual_digits=False)]))
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            yield f"split-{behavior}-{invert}", lambda: small_bpe(texts, P.Sequence([P.Split(Regex(r"[\s,.]|\p{Lu}|\b"), behavior, invert), P.ByteLevel(use_regex=False)]), dec=D.ByteLevel(), bytes=True)
        yield f"punctuation-{behavior}", lambda: small_bpe(texts, P.Sequence([P.Punctuation(behavior), P.CharDelimiterSplit("a")]), N.NFKD(), unk_token="<unk>")


# ---------------------------------------------------------------- comparing
def ask(command, folder, lines):
    data = "".join(json.dumps(x) + "\n" for x in lines)
    r = subprocess.run([MILLRACE, "model", command, "--jsonl", folder], input=data.encode(), capture_output=True)
    if r.returncode not in (0, 1):
        return r.stderr.decode()
    return [json.loads(x) for x in r.stdout.decode().split("\n")[:-1]]


def compare(name, tok, texts):
    with tempfile.TemporaryDirectory() as folder:
        tok.save(folder + "/tokenizer.json")
        pathlib.Path(folder, "config.json").write_text('{"model_type": "llama"}')
        modes = [(True, True), (False, True), (False, False)]
        lines = [{"text": t, "add_special": a, "parse_special": p} for a, p in modes for t in texts]
        got = ask("tokenize", folder, lines)
        if isinstance(got, str):
            print(f"{name:28} FAILED: {got.strip()}")
            return 1
        want = []
        for add, parse in modes:
            tok.encode_special_tokens = not parse
            want += [e.ids for e in tok.encode_batch(texts, add_special_tokens=add)]
        bad = [(q, g, w) for q, g, w in zip(lines, got, want) if g.get("ids") != w]
        for q, g, w in bad[:1]:
            print(f"  {name}: {json.dumps(q)[:300]}\n    got  {str(g.get('ids', g))[:300]}\n    want {str(w)[:300]}")
            print("    ", [tok.id_to_token(i) for i in w][:40])
        some = want[:len(texts)]
        texts_got = ask("detokenize", folder, [{"ids": w} for w in some])
        texts_want = tok.decode_batch(some, skip_special_tokens=True)
        odd = tok.token_to_id("Abé")  # the package decodes it as its normalizer left it
        wrong = [(w, g.get("text"), t) for w, g, t in zip(some, texts_got, texts_want) if g.get("text") != t and "\ufffd" not in t and odd not in w]
        for w, g, t in wrong[:1]:
            print(f"  {name}: text of {str(w)[:200]}\n    got  {g!r:.200}\n    want {t!r:.200}")
    print(f"{name:28} {len(want) - len(bad)} of {len(want)} ids equal, {len(some) - len(wrong)} of {len(some)} texts")
    return bool(bad or wrong)


def main():
    texts = conformance_texts() + random_texts(1500)
    words = [t for t in texts if len(t) < 3000 and "\0" not in t]  # a NUL in a name of an object is not read
    failed = 0
    for name, make in kinds(words):
        if ONLY and not any(name.startswith(o) for o in ONLY):
            continue
        tok = make()
        failed += compare(name, tok, texts) if tok else 0
    sys.exit(1 if failed else 0)


main()
