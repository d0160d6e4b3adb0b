#include "jobs/framerec.h"

static void put_varint(mr_text *t, uint64_t v) {
  for (; v >= 0x80; v >>= 7)
    mr_text_addc(t, (char)(v | 0x80));
  mr_text_addc(t, (char)v);
}

static bool get_varint(const unsigned char **p, const unsigned char *end, uint64_t *v) {
  uint64_t r = 0;
  for (int shift = 0; shift < 64 && *p < end; shift += 7) {
    uint64_t b = *(*p)++;
    if (shift == 63 && b > 1)
      return false;
    r |= (b & 0x7f) << shift;
    if (b < 0x80) {
      *v = r;
      return true;
    }
  }
  return false;
}

/* The difference as a 64-bit wrap-around, zigzag: small steps either way take one byte. */
static uint64_t zigzag(uint64_t from, uint64_t to) {
  uint64_t d = to - from;
  return d << 1 ^ (0 - (d >> 63));
}

static uint64_t unzigzag(uint64_t from, uint64_t z) {
  return from + (z >> 1 ^ (0 - (z & 1)));
}

void mr_framerec_encode(const mr_frame_rec *rec, const mr_frame_line *lines, mr_text *t) {
  uint64_t row = 0;
  mr_text_addc(t, (char)rec->stream);
  put_varint(t, rec->offset);
  put_varint(t, rec->bytes);
  put_varint(t, rec->text_bytes);
  put_varint(t, rec->prompt_tokens);
  put_varint(t, rec->output_tokens);
  put_varint(t, rec->n_lines);
  for (int i = 0; i < 8; i++)
    mr_text_addc(t, (char)(rec->check >> (8 * i)));
  for (uint64_t i = 0; i < rec->n_lines; i++) {
    put_varint(t, zigzag(row, lines[i].row));
    put_varint(t, lines[i].bytes);
    row = lines[i].row;
  }
}

bool mr_framerec_next(const mr_frame_rec *rec, const unsigned char **p, mr_frame_line *l) {
  uint64_t z, n;
  if (*p >= rec->end || !get_varint(p, rec->end, &z) || !get_varint(p, rec->end, &n) ||
      n > UINT32_MAX)
    return false;
  l->row = unzigzag(l->row, z);
  l->bytes = (uint32_t)n;
  return true;
}

bool mr_framerec_decode(mr_frame_rec *rec, const unsigned char *payload, size_t len,
                        uint64_t rows) {
  const unsigned char *p = payload, *end = payload + len;
  if (len < 1 || *p >= MR_STREAMS)
    return false;
  *rec = (mr_frame_rec){.stream = (mr_line_kind)*p++, .end = end};
  if (!get_varint(&p, end, &rec->offset) || !get_varint(&p, end, &rec->bytes) ||
      !get_varint(&p, end, &rec->text_bytes) || !get_varint(&p, end, &rec->prompt_tokens) ||
      !get_varint(&p, end, &rec->output_tokens) || !get_varint(&p, end, &rec->n_lines) ||
      end - p < 8)
    return false;
  for (int i = 0; i < 8; i++)
    rec->check |= (uint64_t)*p++ << (8 * i);
  rec->lines = p;
  mr_frame_line l = {0};
  uint64_t n = 0, text = 0;
  for (; mr_framerec_next(rec, &p, &l); n++) {
    if (l.row >= rows || l.bytes == 0)
      return false;
    text += l.bytes;
  }
  return p == end && n == rec->n_lines && n > 0 && text == rec->text_bytes;
}
