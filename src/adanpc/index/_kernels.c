/* Upper bounds of similarities from codes of rows: what must run at the speed of memory.

   adanpc/index/kernels.py says what each function computes, and computes the same in NumPy. All sums are of whole
   numbers, which have no order, and all float arithmetic is one IEEE operation after another, never contracted
   (-ffp-contract=off). So every path here, and NumPy, give the same bits. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <cpuid.h>
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,prefer-vector-width=512")))
#define AVX512_COUNTS __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512vpopcntdq,prefer-vector-width=512")))
#else
#define X86 0
#endif
#if defined(__GNUC__)
#define ALWAYS __attribute__((always_inline))  /* into callers that may use more of the processor */
#define APART __attribute__((noinline))
#else
#define ALWAYS
#define APART
#endif

#define LANES 16  /* rows of a tile: number r of each stands side by side with number r of the others */
#define PLANES 4  /* bits of a query's coordinate beside a row's single bit */
#define AHEAD 4   /* rows that are asked from memory before they are needed */
#define SIDE 8    /* queries that are multiplied with a tile side by side */
#define TILE 64   /* rows whose products with a query stand side by side */
#define FOUR 4    /* rows that are multiplied with queries together: as many sums as there are registers for */
#define EIGHT 8
#define BRIEF 2048  /* bytes of rows so short that the next ones are asked from memory before they are needed */
#define INFINITE 0x7F800000  /* bits of the magnitude of infinity in float32; those of NaN are higher */
#define LONGEST_SQUARES 8192  /* coordinates of rows whose squares are sure to fit into the 53 bits of float64 */
#define LARGEST_WHOLE (127 * 256)  /* the largest whole number in a query that is multiplied by bytes */
#define LONGEST_READ 2.05  /* the longest row that bytes may stand for; a stored row is at most 1.01 long */
#define BEYOND_ROUNDING 1e-5  /* beyond what float32 may round in a bound, and by which a row or query may be longer than one */
#define ROUNDED_UP 1.0001  /* a bound on a length stays one in spite of its rounding; as in adanpc/index/grid.py */
#define LONGEST 65536  /* coordinates of rows whose products with bytes are sure to fit into 32 bits */

enum path { PLAIN, WITH_AVX2, WITH_AVX512, PATHS };
static const char *const PATH_NAMES[PATHS] = {"plain", "avx2", "avx512"};

/* Asks memory for bytes that are read soon. Rows that are read side by side look like no pattern to the processor, which
   therefore asks for little by itself where rows are short. */
ALWAYS static inline void ask_ahead(const char *start, Py_ssize_t bytes) {
#if defined(__GNUC__)
    for (Py_ssize_t line = 0; line < bytes; line += 64) __builtin_prefetch(start + line);
#else
    (void)start, (void)bytes;
#endif
}

/* What a scan of tiles needs to know of a query. */
struct scan {
    const int8_t *head;    /* (tiles, pairs, LANES, 2) */
    const uint32_t *bits;  /* (tiles, words, LANES) */
    const float *weights;  /* (tiles, 3, LANES): scale of the head, weight of the bits, spread of what they leave out */
    Py_ssize_t tiles, first, pairs, words;
    const int16_t *query_head;   /* (pairs, 2) */
    const uint32_t *query_bits;  /* (words, PLANES) */
    const float *centers;        /* of each span of tiles: what its center contributes */
    Py_ssize_t span;
    float head_step, head_slack, bit_step, bit_shift, spread, rounding, sigmas;
    float *base, *upper;  /* (tiles, LANES) */
};

/* What bounds of single rows need to know of a query. */
struct rows {
    const uint8_t *nibbles;  /* (rows, width): two coordinates in a byte */
    const float *weights;    /* (rows, 2): weight of the nibbles, spread of what they leave out */
    const int64_t *slots;    /* (count,) */
    Py_ssize_t count, first, width;
    const int8_t *high, *low;  /* (2, width): a query's coordinate is 256 * high + low */
    const float *base;         /* of all rows */
    float step, shift, spread, rounding;
    float *upper;  /* (count,) */
};

static int32_t whole(uint32_t bits) {
    int32_t number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The bounds of one tile from its whole sums. */
static inline void combine(const struct scan *s, Py_ssize_t tile, const int32_t *heads, const int32_t *tails) {
    const float *weight = s->weights + tile * 3 * LANES;
    const float center = s->centers[(s->first + tile) / s->span];
    for (int lane = 0; lane < LANES; lane++) {
        float scale = weight[lane], tail = weight[LANES + lane], left_out = weight[2 * LANES + lane];
        float base = scale * ((float)heads[lane] * s->head_step + s->head_slack) + center;
        float estimate = tail * ((float)tails[lane] * s->bit_step - s->bit_shift);
        float variance = (left_out * left_out) * s->spread + (tail * tail) * s->rounding;
        s->base[tile * LANES + lane] = base;
        s->upper[tile * LANES + lane] = (base + estimate) + sqrtf(variance) * s->sigmas;
    }
}

static void scan_plain(const struct scan *s) {
    for (Py_ssize_t tile = 0; tile < s->tiles; tile++) {
        const int8_t *head = s->head + tile * s->pairs * LANES * 2;
        const uint32_t *bits = s->bits + tile * s->words * LANES;
        int32_t heads[LANES] = {0}, tails[LANES] = {0};
        for (Py_ssize_t pair = 0; pair < s->pairs; pair++, head += 2 * LANES)
            for (int lane = 0; lane < LANES; lane++)
                heads[lane] += head[2 * lane] * s->query_head[2 * pair]
                             + head[2 * lane + 1] * s->query_head[2 * pair + 1];
        for (Py_ssize_t word = 0; word < s->words; word++, bits += LANES) {
            const uint32_t *plane = s->query_bits + word * PLANES;
            for (int lane = 0; lane < LANES; lane++)
                tails[lane] += __builtin_popcount(bits[lane] & plane[0]) + 2 * __builtin_popcount(bits[lane] & plane[1])
                             + 4 * __builtin_popcount(bits[lane] & plane[2])
                             - 8 * __builtin_popcount(bits[lane] & plane[3]);
        }
        combine(s, tile, heads, tails);
    }
}

static inline float row_bound(const struct rows *s, Py_ssize_t number, int32_t sum) {
    const int64_t slot = s->slots[number];
    const float *weight = s->weights + 2 * (slot - s->first);
    float estimate = weight[0] * ((float)sum * s->step - s->shift);
    float width = weight[1] * s->spread + weight[0] * s->rounding;
    return (s->base[slot] + estimate) + width;
}

static void rows_plain(const struct rows *s) {
    for (Py_ssize_t number = 0; number < s->count; number++) {
        const uint8_t *nibbles = s->nibbles + (s->slots[number] - s->first) * s->width;
        int32_t high = 0, low = 0;
        for (Py_ssize_t place = 0; place < s->width; place++) {
            int first = nibbles[place] & 15, second = nibbles[place] >> 4;
            high += first * s->high[place] + second * s->high[s->width + place];
            low += first * s->low[place] + second * s->low[s->width + place];
        }
        s->upper[number] = row_bound(s, number, 256 * high + low);
    }
}

/* What exact scores of rows need: every product is a multiple of 2**-48 and every sum below 2, so that float64 adds
   without rounding, in any order. */
struct score {
    const void *row;
    const double *query;
    Py_ssize_t dim;
};

/* A 16-bit float as a float. Not by way of a denormal float, which may be set to be zero. */
static inline float wide(uint16_t half) {
    uint32_t magnitude = half & 0x7FFF, sign = (uint32_t)(half & 0x8000) << 16, bits;
    float value;
    if (magnitude < 0x0400) {
        value = (float)magnitude * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | ((magnitude << 13) + (magnitude < 0x7C00 ? 112u << 23 : 224u << 23));
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double half_plain(const struct score *s) {
    const uint16_t *row = s->row;
    double sum = 0;
    for (Py_ssize_t place = 0; place < s->dim; place++) sum += (double)wide(row[place]) * s->query[place];
    return sum;
}

static double single_plain(const struct score *s) {
    const float *row = s->row;
    double sum = 0;
    for (Py_ssize_t place = 0; place < s->dim; place++) sum += (double)row[place] * s->query[place];
    return sum;
}

/* A row in two bytes a coordinate and its query. */
struct two_bytes {
    const int8_t *coarse, *fine;
    float scale;
    const double *query;
    Py_ssize_t dim;
};

/* The exact product: the row is read by one float operation after another, as in adanpc/index/grid.py. */
ALWAYS static inline double product_of_two_bytes(const struct two_bytes *b) {
    const float unit = b->scale * 0x1p24f, step = ceilf(b->scale / 254 * 0x1p24f);
    double sums[8] = {0};
    Py_ssize_t place = 0;
    for (; place + 8 <= b->dim; place += 8)
        for (int lane = 0; lane < 8; lane++) {
            const float number = rintf(b->coarse[place + lane] * unit) + b->fine[place + lane] * step;
            sums[lane] += (double)(number * 0x1p-24f) * b->query[place + lane];
        }
    for (; place < b->dim; place++) {
        const float number = rintf(b->coarse[place] * unit) + b->fine[place] * step;
        sums[0] += (double)(number * 0x1p-24f) * b->query[place];
    }
    for (int lane = 1; lane < 8; lane++) sums[0] += sums[lane];
    return sums[0];
}

static double two_bytes_plain(const struct two_bytes *b) { return product_of_two_bytes(b); }

/* Features that become rows of length one on the grid. */
struct features {
    const float *given;  /* (count, dim) */
    Py_ssize_t count, dim;
    float *made;         /* (count, dim) */
};

/* The largest magnitude in a row as its bits, which are in the order of magnitudes; NaN and infinity are the highest. */
ALWAYS static inline int32_t largest_bits(const float *row, Py_ssize_t dim) {
    int32_t largest = 0;
    for (Py_ssize_t place = 0; place < dim; place++) {
        int32_t bits;
        memcpy(&bits, row + place, sizeof bits);
        bits &= 0x7FFFFFFF;
        if (bits > largest) largest = bits;
    }
    return largest;
}

/* Whether every row is finite and has a coordinate that is neither zero nor denormal. */
ALWAYS static inline int all_have_direction(const struct features *f) {
    for (Py_ssize_t number = 0; number < f->count; number++) {
        const int32_t largest = largest_bits(f->given + number * f->dim, f->dim);
        if (largest < 0x00800000 || largest >= INFINITE) return 0;
    }
    return 1;
}

/* One IEEE operation after another, as in adanpc/index/grid.py; squares of whole numbers add up without rounding.
   Returns 0 at the first row that is not finite. */
ALWAYS static inline int make_unit(const struct features *f) {
    for (Py_ssize_t number = 0; number < f->count; number++) {
        const float *given = f->given + number * f->dim;
        float *made = f->made + number * f->dim, magnitude;
        const int32_t bits = largest_bits(given, f->dim);
        if (bits >= INFINITE) return 0;
        memcpy(&magnitude, &bits, sizeof magnitude);
        const double largest = magnitude > 0 ? magnitude : 1e-300;
        double sums[8] = {0};
        Py_ssize_t place = 0;
        for (; place + 8 <= f->dim; place += 8)
            for (int lane = 0; lane < 8; lane++) {
                const double whole = rint(given[place + lane] / largest * 0x1p20);
                sums[lane] += whole * whole;
            }
        for (; place < f->dim; place++) {
            const double whole = rint(given[place] / largest * 0x1p20);
            sums[0] += whole * whole;
        }
        for (int lane = 1; lane < 8; lane++) sums[0] += sums[lane];
        const double length = sqrt(sums[0]), factor = 0x1p44 / (length > 1 ? length : 1);
        for (place = 0; place < f->dim; place++)
            made[place] = (float)(rint(given[place] / largest * factor) * 0x1p-24 + 0.0);
    }
    return 1;
}

static int directed_plain(const struct features *f) { return all_have_direction(f); }
static int unit_plain(const struct features *f) { return make_unit(f); }

/* Rows that get a byte for each coordinate. */
struct coarse {
    const float *rows;  /* (count, dim) */
    Py_ssize_t count, dim;
    int8_t *bytes;      /* (count, dim) */
    float *scales;      /* (count,): the value of one unit of a byte */
    float *residuals;   /* (count,): at least the length of what the bytes leave out */
};

/* One IEEE operation after another, as in adanpc/index/grid.py; only the sums of squares have another order there. */
ALWAYS static inline void make_coarse(const struct coarse *c) {
    for (Py_ssize_t number = 0; number < c->count; number++) {
        const float *row = c->rows + number * c->dim;
        int8_t *bytes = c->bytes + number * c->dim;
        const int32_t bits = largest_bits(row, c->dim);
        float largest;
        memcpy(&largest, &bits, sizeof largest);
        const float scale = (largest > 0x1p-24f ? largest : 0x1p-24f) / 127;
        double sums[8] = {0};
        Py_ssize_t place = 0;
        for (; place + 8 <= c->dim; place += 8)
            for (int lane = 0; lane < 8; lane++) {
                const float whole = rintf(row[place + lane] / scale);
                const double left = row[place + lane] - (double)whole * scale;
                bytes[place + lane] = (int8_t)whole;
                sums[lane] += left * left;
            }
        for (; place < c->dim; place++) {
            const float whole = rintf(row[place] / scale);
            const double left = row[place] - (double)whole * scale;
            bytes[place] = (int8_t)whole;
            sums[0] += left * left;
        }
        for (int lane = 1; lane < 8; lane++) sums[0] += sums[lane];
        c->scales[number] = scale;
        c->residuals[number] = (float)(sqrt(sums[0]) * ROUNDED_UP);
    }
}

static void coarse_plain(const struct coarse *c) { make_coarse(c); }

/* What products of whole rows need: few queries, and a block of rows that is read once for all of them. */
struct products {
    const char *rows;      /* (tiles, TILE, dim): float32, float16 or int8 */
    Py_ssize_t tiles, dim, queries;
    int width;             /* bytes of a coordinate */
    const float *floats;   /* (queries, dim), beside float32 and float16 */
    const int8_t *bytes;   /* (queries, 2, dim), beside int8: a coordinate is steps * (256 * high + low) */
    const double *steps;   /* (queries,) */
    float *out;            /* (tiles, queries, TILE) */
};

/* The product of whole numbers that its two parts add up to; float64 holds every such number. */
static inline float joined_parts(int32_t high, int32_t low, double step) {
    return (float)((256.0 * high + low) * step);
}

static inline float coordinate(const struct products *p, const char *row, Py_ssize_t place) {
    return p->width == 2 ? wide(((const uint16_t *)row)[place]) : ((const float *)row)[place];
}

/* In eight sums, so that none rounds more often than dim / 8 + 15 times; kernels.py relies on it. */
static float float_product_plain(const struct products *p, const char *row, const float *query) {
    float sums[8] = {0};
    Py_ssize_t place = 0;
    for (; place + 8 <= p->dim; place += 8)
        for (int lane = 0; lane < 8; lane++) sums[lane] += coordinate(p, row, place + lane) * query[place + lane];
    for (int lane = 1; lane < 8; lane++) sums[0] += sums[lane];
    for (; place < p->dim; place++) sums[0] += coordinate(p, row, place) * query[place];
    return sums[0];
}

static float byte_product_plain(const struct products *p, const char *row, Py_ssize_t query) {
    const int8_t *codes = (const int8_t *)row, *parts = p->bytes + query * 2 * p->dim;
    int32_t high = 0, low = 0;
    for (Py_ssize_t place = 0; place < p->dim; place++) {
        high += codes[place] * parts[place];
        low += codes[place] * parts[p->dim + place];
    }
    return joined_parts(high, low, p->steps[query]);
}

static void products_plain(const struct products *p) {
    for (Py_ssize_t number = 0; number < p->tiles * TILE; number++) {
        const char *row = p->rows + number * p->dim * p->width;
        float *out = p->out + number / TILE * p->queries * TILE + number % TILE;
        for (Py_ssize_t query = 0; query < p->queries; query++) {
            if (p->width == 1) out[query * TILE] = byte_product_plain(p, row, query);
            else out[query * TILE] = float_product_plain(p, row, p->floats + query * p->dim);
        }
    }
}

#if X86

/* Sums of the four bytes, or of the two bytes' products, of each lane. */
AVX2 static inline __m256i in_lanes(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

/* For four bits of a row, the sum of a query's coordinates where they are set, plus OFFSET: one entry for each of the 16
   combinations. Both halves of a vector look up side by side, for two words of bits. */
#define FOURS 8         /* of four bits in a word */
#define OFFSET 32        /* so that no entry is negative; four of them fit into a byte */
#define MOST_WORDS 256   /* of a row's bits: as many entries as 16 bits are sure to hold the sum of */

static void fill_table(const uint32_t *planes, int group, uint8_t *table) {
    table[0] = OFFSET;
    for (int bit = 0; bit < 4; bit++) {
        const int place = 4 * group + bit;
        const int unit = (planes[0] >> place & 1) + 2 * (planes[1] >> place & 1) + 4 * (planes[2] >> place & 1)
                       - 8 * (int)(planes[3] >> place & 1);
        for (int number = 0; number < 1 << bit; number++) {
            table[number + (1 << bit)] = (uint8_t)(table[number] + unit);
        }
    }
}

/* The four bytes of 16 words: in vector number n, byte n of every word. Each half of a vector holds 16 words. */
AVX2 static inline void by_byte(const uint32_t *bits, __m256i *bytes) {
    const __m256i sorted = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m256i four[4];
    for (int part = 0; part < 4; part++) {
        const __m128i low = _mm_loadu_si128((const __m128i *)(bits + 4 * part));
        const __m128i high = _mm_loadu_si128((const __m128i *)(bits + LANES + 4 * part));
        four[part] = _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), sorted);
    }
    const __m256i first = _mm256_unpacklo_epi32(four[0], four[1]), second = _mm256_unpacklo_epi32(four[2], four[3]);
    const __m256i third = _mm256_unpackhi_epi32(four[0], four[1]), fourth = _mm256_unpackhi_epi32(four[2], four[3]);
    bytes[0] = _mm256_unpacklo_epi64(first, second), bytes[1] = _mm256_unpackhi_epi64(first, second);
    bytes[2] = _mm256_unpacklo_epi64(third, fourth), bytes[3] = _mm256_unpackhi_epi64(third, fourth);
}

/* The sums of a tile's signed coordinates, from tables for each pair of words. */
AVX2 static inline void sum_of_bits(const uint32_t *bits, Py_ssize_t words, const __m256i *tables, int32_t *tails) {
    const __m256i nibble = _mm256_set1_epi8(15), low_byte = _mm256_set1_epi16(255);
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (Py_ssize_t word = 0; word < words; word += 2, bits += 2 * LANES, tables += FOURS) {
        __m256i bytes[4];
        by_byte(bits, bytes);
        for (int half = 0; half < 2; half++) {
            __m256i sum = _mm256_setzero_si256();
            for (int part = 2 * half; part < 2 * half + 2; part++) {
                const __m256i low = _mm256_and_si256(bytes[part], nibble);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes[part], 4), nibble);
                sum = _mm256_add_epi8(sum, _mm256_shuffle_epi8(tables[2 * part], low));
                sum = _mm256_add_epi8(sum, _mm256_shuffle_epi8(tables[2 * part + 1], high));
            }
            even = _mm256_add_epi16(even, _mm256_and_si256(sum, low_byte));
            odd = _mm256_add_epi16(odd, _mm256_srli_epi16(sum, 8));
        }
    }
    uint16_t sums[2][LANES];
    _mm256_storeu_si256((__m256i *)sums[0], even);
    _mm256_storeu_si256((__m256i *)sums[1], odd);
    for (int lane = 0; lane < LANES; lane++) {
        const uint16_t *half = sums[lane % 2];
        tails[lane] = half[lane / 2] + half[lane / 2 + LANES / 2] - (int32_t)words * FOURS * OFFSET;
    }
}

AVX2 static void scan_avx2(const struct scan *s) {
    uint8_t tables[MOST_WORDS / 2 * FOURS * 32] __attribute__((aligned(32)));
    if (s->words % 2 || s->words > MOST_WORDS) {
        scan_plain(s);
        return;
    }
    for (Py_ssize_t word = 0; word < s->words; word++)
        for (int group = 0; group < FOURS; group++)
            fill_table(s->query_bits + word * PLANES, group,
                       tables + (word / 2 * FOURS + group) * 32 + word % 2 * 16);
    for (Py_ssize_t tile = 0; tile < s->tiles; tile++) {
        int32_t heads[LANES], tails[LANES];
        for (int half = 0; half < 2; half++) {
            const int8_t *head = s->head + tile * s->pairs * LANES * 2 + half * LANES;
            __m256i sum = _mm256_setzero_si256();
            for (Py_ssize_t pair = 0; pair < s->pairs; pair++, head += 2 * LANES) {
                int32_t query;
                memcpy(&query, s->query_head + 2 * pair, sizeof query);
                __m256i row = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)head));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(row, _mm256_set1_epi32(query)));
            }
            _mm256_storeu_si256((__m256i *)(heads + half * LANES / 2), sum);
        }
        sum_of_bits(s->bits + tile * s->words * LANES, s->words, (const __m256i *)tables, tails);
        combine(s, tile, heads, tails);
    }
}

AVX2 static inline int32_t sum_of_lanes(__m256i lanes) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
    return _mm_cvtsi128_si32(sum);
}

AVX2 static void rows_avx2(const struct rows *s) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (Py_ssize_t number = 0; number < s->count; number++) {
        const uint8_t *nibbles = s->nibbles + (s->slots[number] - s->first) * s->width;
        __m256i high = _mm256_setzero_si256(), low = _mm256_setzero_si256();
        for (Py_ssize_t place = 0; place < s->width; place += 32) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(nibbles + place));
            __m256i first = _mm256_and_si256(both, nibble);
            __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
            const int8_t *h = s->high + place, *l = s->low + place;
            __m256i sum = _mm256_maddubs_epi16(first, _mm256_loadu_si256((const __m256i *)h));
            __m256i more = _mm256_maddubs_epi16(second, _mm256_loadu_si256((const __m256i *)(h + s->width)));
            high = _mm256_add_epi32(high, in_lanes(_mm256_add_epi16(sum, more)));
            sum = _mm256_maddubs_epi16(first, _mm256_loadu_si256((const __m256i *)l));
            more = _mm256_maddubs_epi16(second, _mm256_loadu_si256((const __m256i *)(l + s->width)));
            low = _mm256_add_epi32(low, in_lanes(_mm256_add_epi16(sum, more)));
        }
        s->upper[number] = row_bound(s, number, 256 * sum_of_lanes(high) + sum_of_lanes(low));
    }
}

AVX512 static inline void combine_avx512(const struct scan *s, Py_ssize_t tile, __m512i heads, __m512i tails) {
    const float *weight = s->weights + tile * 3 * LANES;
    const __m512 center = _mm512_set1_ps(s->centers[(s->first + tile) / s->span]);
    __m512 scale = _mm512_loadu_ps(weight);
    __m512 tail = _mm512_loadu_ps(weight + LANES);
    __m512 left_out = _mm512_loadu_ps(weight + 2 * LANES);
    __m512 head = _mm512_mul_ps(_mm512_cvtepi32_ps(heads), _mm512_set1_ps(s->head_step));
    head = _mm512_add_ps(head, _mm512_set1_ps(s->head_slack));
    __m512 base = _mm512_add_ps(_mm512_mul_ps(scale, head), center);
    __m512 estimate = _mm512_mul_ps(_mm512_cvtepi32_ps(tails), _mm512_set1_ps(s->bit_step));
    estimate = _mm512_mul_ps(tail, _mm512_sub_ps(estimate, _mm512_set1_ps(s->bit_shift)));
    __m512 variance = _mm512_mul_ps(_mm512_mul_ps(left_out, left_out), _mm512_set1_ps(s->spread));
    __m512 rounding = _mm512_mul_ps(_mm512_mul_ps(tail, tail), _mm512_set1_ps(s->rounding));
    __m512 deviation = _mm512_sqrt_ps(_mm512_add_ps(variance, rounding));
    __m512 upper = _mm512_add_ps(_mm512_add_ps(base, estimate), _mm512_mul_ps(deviation, _mm512_set1_ps(s->sigmas)));
    _mm512_storeu_ps(s->base + tile * LANES, base);
    _mm512_storeu_ps(s->upper + tile * LANES, upper);
}

AVX512_COUNTS static inline __m512i common_bits(__m512i row, uint32_t query) {
    return _mm512_popcnt_epi32(_mm512_and_si512(row, _mm512_set1_epi32(whole(query))));
}

/* Counts bits by an instruction of its own, which processors of 2019 with AVX-512 do not have. */
AVX512_COUNTS static void scan_avx512(const struct scan *s) {
    for (Py_ssize_t tile = 0; tile < s->tiles; tile++) {
        const int8_t *head = s->head + tile * s->pairs * LANES * 2;
        const uint32_t *bits = s->bits + tile * s->words * LANES;
        __m512i heads = _mm512_setzero_si512();
        __m512i ones = heads, twos = heads, fours = heads, eights = heads;
        for (Py_ssize_t pair = 0; pair < s->pairs; pair++, head += 2 * LANES) {
            int32_t query;
            memcpy(&query, s->query_head + 2 * pair, sizeof query);
            __m512i row = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)head));
            heads = _mm512_dpwssd_epi32(heads, row, _mm512_set1_epi32(query));
        }
        for (Py_ssize_t word = 0; word < s->words; word++, bits += LANES) {
            const uint32_t *plane = s->query_bits + word * PLANES;
            __m512i row = _mm512_loadu_si512(bits);
            ones = _mm512_add_epi32(ones, common_bits(row, plane[0]));
            twos = _mm512_add_epi32(twos, common_bits(row, plane[1]));
            fours = _mm512_add_epi32(fours, common_bits(row, plane[2]));
            eights = _mm512_add_epi32(eights, common_bits(row, plane[3]));
        }
        __m512i tails = _mm512_add_epi32(ones, _mm512_slli_epi32(twos, 1));
        tails = _mm512_add_epi32(tails, _mm512_slli_epi32(fours, 2));
        tails = _mm512_sub_epi32(tails, _mm512_slli_epi32(eights, 3));
        combine_avx512(s, tile, heads, tails);
    }
}

AVX512 static void rows_avx512(const struct rows *s) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (Py_ssize_t number = 0; number < s->count; number++) {
        const uint8_t *nibbles = s->nibbles + (s->slots[number] - s->first) * s->width;
        if (number + AHEAD < s->count) {
            const uint8_t *later = s->nibbles + (s->slots[number + AHEAD] - s->first) * s->width;
            for (Py_ssize_t place = 0; place < s->width; place += 64) _mm_prefetch((const char *)later + place, _MM_HINT_T0);
            _mm_prefetch((const char *)(s->weights + 2 * (s->slots[number + AHEAD] - s->first)), _MM_HINT_T0);
        }
        __m512i high = _mm512_setzero_si512(), low = high;
        for (Py_ssize_t place = 0; place < s->width; place += 64) {
            __m512i both = _mm512_loadu_si512(nibbles + place);
            __m512i first = _mm512_and_si512(both, nibble);
            __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            high = _mm512_dpbusd_epi32(high, first, _mm512_loadu_si512(s->high + place));
            low = _mm512_dpbusd_epi32(low, first, _mm512_loadu_si512(s->low + place));
            high = _mm512_dpbusd_epi32(high, second, _mm512_loadu_si512(s->high + s->width + place));
            low = _mm512_dpbusd_epi32(low, second, _mm512_loadu_si512(s->low + s->width + place));
        }
        int32_t sum = 256 * _mm512_reduce_add_epi32(high) + _mm512_reduce_add_epi32(low);
        s->upper[number] = row_bound(s, number, sum);
    }
}

AVX2 static double half_avx2(const struct score *s) {
    const uint16_t *row = s->row;
    Py_ssize_t place = 0;
    __m256d first = _mm256_setzero_pd(), second = first;
    for (; place + 8 <= s->dim; place += 8) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + place)));
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(wide));
        __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(wide, 1));
        first = _mm256_add_pd(first, _mm256_mul_pd(low, _mm256_loadu_pd(s->query + place)));
        second = _mm256_add_pd(second, _mm256_mul_pd(high, _mm256_loadu_pd(s->query + place + 4)));
    }
    double parts[4];
    _mm256_storeu_pd(parts, _mm256_add_pd(first, second));
    struct score rest = {row + place, s->query + place, s->dim - place};
    return parts[0] + parts[1] + parts[2] + parts[3] + half_plain(&rest);
}

AVX2 static double single_avx2(const struct score *s) {
    const float *row = s->row;
    Py_ssize_t place = 0;
    __m256d first = _mm256_setzero_pd(), second = first;
    for (; place + 8 <= s->dim; place += 8) {
        __m256d low = _mm256_cvtps_pd(_mm_loadu_ps(row + place));
        __m256d high = _mm256_cvtps_pd(_mm_loadu_ps(row + place + 4));
        first = _mm256_add_pd(first, _mm256_mul_pd(low, _mm256_loadu_pd(s->query + place)));
        second = _mm256_add_pd(second, _mm256_mul_pd(high, _mm256_loadu_pd(s->query + place + 4)));
    }
    double parts[4];
    _mm256_storeu_pd(parts, _mm256_add_pd(first, second));
    struct score rest = {row + place, s->query + place, s->dim - place};
    return parts[0] + parts[1] + parts[2] + parts[3] + single_plain(&rest);
}

/* Adds the products of sixteen coordinates, which are exact, as the sums are. */
AVX512 static inline void add_products(__m512 row, const double *query, __m512d *first, __m512d *second) {
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(row));
    __m512d high = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(row), 1)));
    *first = _mm512_fmadd_pd(low, _mm512_loadu_pd(query), *first);
    *second = _mm512_fmadd_pd(high, _mm512_loadu_pd(query + 8), *second);
}

AVX512 static double half_avx512(const struct score *s) {
    const uint16_t *row = s->row;
    Py_ssize_t place = 0;
    __m512d first = _mm512_setzero_pd(), second = first;
    for (; place + 16 <= s->dim; place += 16)
        add_products(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(row + place))), s->query + place, &first, &second);
    struct score rest = {row + place, s->query + place, s->dim - place};
    return _mm512_reduce_add_pd(_mm512_add_pd(first, second)) + half_plain(&rest);
}

AVX512 static double single_avx512(const struct score *s) {
    const float *row = s->row;
    Py_ssize_t place = 0;
    __m512d first = _mm512_setzero_pd(), second = first;
    for (; place + 16 <= s->dim; place += 16)
        add_products(_mm512_loadu_ps(row + place), s->query + place, &first, &second);
    struct score rest = {row + place, s->query + place, s->dim - place};
    return _mm512_reduce_add_pd(_mm512_add_pd(first, second)) + single_plain(&rest);
}

AVX2 static int directed_avx2(const struct features *f) { return all_have_direction(f); }
AVX2 static int unit_avx2(const struct features *f) { return make_unit(f); }
AVX2 static double two_bytes_avx2(const struct two_bytes *b) { return product_of_two_bytes(b); }
AVX2 static void coarse_avx2(const struct coarse *c) { make_coarse(c); }
AVX512 static int directed_avx512(const struct features *f) { return all_have_direction(f); }
AVX512 static int unit_avx512(const struct features *f) { return make_unit(f); }
AVX512 static double two_bytes_avx512(const struct two_bytes *b) { return product_of_two_bytes(b); }
AVX512 static void coarse_avx512(const struct coarse *c) { make_coarse(c); }

AVX2 static inline __m256 floats_avx2(const char *row, Py_ssize_t place, int width) {
    if (width == 2) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * place)));
    return _mm256_loadu_ps((const float *)row + place);
}

AVX2 static inline float sum_of_floats(__m256 lanes) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    sum = _mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1));
    return _mm_cvtss_f32(sum);
}

/* Products of a tile with a few queries, whose number is known when this is compiled. Each sum rounds dim / 8 + 11 times
   at most. */
AVX2 ALWAYS static inline void float_products_avx2(const struct products *p, const char *tile, const float *first,
                                                   float *out, int width, int queries) {
    const Py_ssize_t dim = p->dim;
    const float *theirs[2] = {first, first + dim};
    const int brief = dim * width <= BRIEF;
    for (int start = 0; start < TILE; start += FOUR) {
        const char *rows[FOUR];
        __m256 sums[FOUR][2];
        Py_ssize_t place = 0;
        for (int row = 0; row < FOUR; row++) {
            rows[row] = tile + (start + row) * dim * width;
            for (int query = 0; query < queries; query++) sums[row][query] = _mm256_setzero_ps();
        }
        for (; place + 8 <= dim; place += 8) {
            if (brief) ask_ahead(rows[0] + FOUR * width * (dim + place), FOUR * width * 8);
            for (int row = 0; row < FOUR; row++) {
                const __m256 values = floats_avx2(rows[row], place, width);
                for (int query = 0; query < queries; query++) {
                    const __m256 product = _mm256_mul_ps(values, _mm256_loadu_ps(theirs[query] + place));
                    sums[row][query] = _mm256_add_ps(sums[row][query], product);
                }
            }
        }
        for (int row = 0; row < FOUR; row++)
            for (int query = 0; query < queries; query++) {
                float sum = sum_of_floats(sums[row][query]);
                for (Py_ssize_t rest = place; rest < dim; rest++)
                    sum += coordinate(p, rows[row], rest) * theirs[query][rest];
                out[query * TILE + start + row] = sum;
            }
    }
}

/* Functions of their own: where all are parts of one, there are too few registers for the places of rows. */
#define FLOAT_PRODUCTS(path, target, width, queries)                                                                   \
    target APART static void float_products_##path##_##width##_##queries(const struct products *p, const char *tile,   \
                                                                         const float *first, float *out) {             \
        float_products_##path(p, tile, first, out, width, queries);                                                    \
    }
FLOAT_PRODUCTS(avx2, AVX2, 2, 1)
FLOAT_PRODUCTS(avx2, AVX2, 2, 2)
FLOAT_PRODUCTS(avx2, AVX2, 4, 1)
FLOAT_PRODUCTS(avx2, AVX2, 4, 2)

AVX2 static inline __m256i wide_bytes(const int8_t *bytes) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)bytes));
}

AVX2 APART static void byte_products_avx2(const struct products *p, const char *tile, const int8_t *parts, double step,
                                          float *out) {
    const Py_ssize_t dim = p->dim;
    for (int start = 0; start < TILE; start += FOUR) {
        const int8_t *rows[FOUR];
        __m256i high[FOUR], low[FOUR];
        Py_ssize_t place = 0;
        for (int row = 0; row < FOUR; row++) {
            rows[row] = (const int8_t *)tile + (start + row) * dim;
            high[row] = low[row] = _mm256_setzero_si256();
        }
        for (; place + 16 <= dim; place += 16) {
            ask_ahead((const char *)rows[0] + FOUR * (dim + place), FOUR * 16);
            const __m256i above = wide_bytes(parts + place), below = wide_bytes(parts + dim + place);
            for (int row = 0; row < FOUR; row++) {
                const __m256i codes = wide_bytes(rows[row] + place);
                high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(codes, above));
                low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(codes, below));
            }
        }
        for (int row = 0; row < FOUR; row++) {
            int32_t above = sum_of_lanes(high[row]), below = sum_of_lanes(low[row]);
            for (Py_ssize_t rest = place; rest < dim; rest++) {
                above += rows[row][rest] * parts[rest];
                below += rows[row][rest] * parts[dim + rest];
            }
            out[start + row] = joined_parts(above, below, step);
        }
    }
}

AVX2 static void products_avx2(const struct products *p) {
    static void (*const HALF[])(const struct products *, const char *, const float *, float *) = {
        NULL, float_products_avx2_2_1, float_products_avx2_2_2};
    static void (*const SINGLE[])(const struct products *, const char *, const float *, float *) = {
        NULL, float_products_avx2_4_1, float_products_avx2_4_2};
    const Py_ssize_t dim = p->dim, queries = p->queries;
    for (Py_ssize_t number = 0; number < p->tiles; number++) {
        const char *tile = p->rows + number * TILE * dim * p->width;
        float *out = p->out + number * queries * TILE;
        if (p->width == 1)
            for (Py_ssize_t query = 0; query < queries; query++)
                byte_products_avx2(p, tile, p->bytes + query * 2 * dim, p->steps[query], out + query * TILE);
        else
            for (Py_ssize_t query = 0; query < queries; query += 2) {
                const Py_ssize_t together = queries - query < 2 ? 1 : 2;
                (p->width == 2 ? HALF : SINGLE)[together](p, tile, p->floats + query * dim, out + query * TILE);
            }
    }
}

AVX512 ALWAYS static inline __m512 floats_avx512(const char *row, Py_ssize_t place, int width, __mmask16 there) {
    if (width == 2) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, row + 2 * place));
    return _mm512_maskz_loadu_ps(there, (const float *)row + place);
}

/* Adds the products of sixteen coordinates of EIGHT rows and a few queries, of those coordinates that are there. */
AVX512 ALWAYS static inline void add_float_products(const char *const rows[EIGHT], const float *const theirs[2],
                                                    Py_ssize_t place, __mmask16 there, int width, int queries,
                                                    __m512 sums[EIGHT][2]) {
    __m512 coordinates[2];
    for (int query = 0; query < queries; query++)
        coordinates[query] = _mm512_maskz_loadu_ps(there, theirs[query] + place);
    for (int row = 0; row < EIGHT; row++) {
        const __m512 values = floats_avx512(rows[row], place, width, there);
        for (int query = 0; query < queries; query++)
            sums[row][query] = _mm512_fmadd_ps(values, coordinates[query], sums[row][query]);
    }
}

/* Products of a tile with a few queries, whose number is known when this is compiled. Each sum rounds dim / 16 + 5 times
   at most. */
AVX512 ALWAYS static inline void float_products_avx512(const struct products *p, const char *tile, const float *first,
                                                       float *out, int width, int queries) {
    const Py_ssize_t dim = p->dim;
    const float *theirs[2] = {first, first + dim};
    const int brief = dim * width <= BRIEF;
    for (int start = 0; start < TILE; start += EIGHT) {
        const char *rows[EIGHT];
        __m512 sums[EIGHT][2];
        Py_ssize_t place = 0;
        for (int row = 0; row < EIGHT; row++) {
            rows[row] = tile + (start + row) * dim * width;
            for (int query = 0; query < queries; query++) sums[row][query] = _mm512_setzero_ps();
        }
        for (; place + 16 <= dim; place += 16) {
            if (brief) ask_ahead(rows[0] + EIGHT * width * (dim + place), EIGHT * width * 16);
            add_float_products(rows, theirs, place, 0xFFFF, width, queries, sums);
        }
        if (place < dim)
            add_float_products(rows, theirs, place, (__mmask16)((1u << (dim - place)) - 1), width, queries, sums);
        for (int row = 0; row < EIGHT; row++)
            for (int query = 0; query < queries; query++)
                out[query * TILE + start + row] = _mm512_reduce_add_ps(sums[row][query]);
    }
}

FLOAT_PRODUCTS(avx512, AVX512, 2, 1)
FLOAT_PRODUCTS(avx512, AVX512, 2, 2)
FLOAT_PRODUCTS(avx512, AVX512, 4, 1)
FLOAT_PRODUCTS(avx512, AVX512, 4, 2)

/* Rows become unsigned, as the instruction wants one of its factors, by adding 128; what that adds is subtracted. */
AVX512 APART static void byte_products_avx512(const struct products *p, const char *tile, const int8_t *parts, double step,
                                              float *out) {
    const Py_ssize_t dim = p->dim;
    const __m512i shift = _mm512_set1_epi8(-128);
    for (int start = 0; start < TILE; start += EIGHT) {
        const char *rows[EIGHT];
        __m512i high[EIGHT], low[EIGHT], high_added = _mm512_setzero_si512(), low_added = high_added;
        for (int row = 0; row < EIGHT; row++) {
            rows[row] = tile + (start + row) * dim;
            high[row] = low[row] = _mm512_setzero_si512();
        }
        for (Py_ssize_t place = 0; place < dim; place += 64) {
            const Py_ssize_t left = dim - place;
            const __mmask64 there = left < 64 ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
            ask_ahead(rows[0] + EIGHT * (dim + place), EIGHT * 64);
            const __m512i above = _mm512_maskz_loadu_epi8(there, parts + place);
            const __m512i below = _mm512_maskz_loadu_epi8(there, parts + dim + place);
            high_added = _mm512_dpbusd_epi32(high_added, shift, above);
            low_added = _mm512_dpbusd_epi32(low_added, shift, below);
            for (int row = 0; row < EIGHT; row++) {
                const __m512i codes = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, rows[row] + place), shift);
                high[row] = _mm512_dpbusd_epi32(high[row], codes, above);
                low[row] = _mm512_dpbusd_epi32(low[row], codes, below);
            }
        }
        for (int row = 0; row < EIGHT; row++) {
            const int32_t above = _mm512_reduce_add_epi32(_mm512_sub_epi32(high[row], high_added));
            const int32_t below = _mm512_reduce_add_epi32(_mm512_sub_epi32(low[row], low_added));
            out[start + row] = joined_parts(above, below, step);
        }
    }
}

AVX512 static void products_avx512(const struct products *p) {
    static void (*const HALF[])(const struct products *, const char *, const float *, float *) = {
        NULL, float_products_avx512_2_1, float_products_avx512_2_2};
    static void (*const SINGLE[])(const struct products *, const char *, const float *, float *) = {
        NULL, float_products_avx512_4_1, float_products_avx512_4_2};
    const Py_ssize_t dim = p->dim, queries = p->queries;
    for (Py_ssize_t number = 0; number < p->tiles; number++) {
        const char *tile = p->rows + number * TILE * dim * p->width;
        float *out = p->out + number * queries * TILE;
        if (p->width == 1)
            for (Py_ssize_t query = 0; query < queries; query++)
                byte_products_avx512(p, tile, p->bytes + query * 2 * dim, p->steps[query], out + query * TILE);
        else
            for (Py_ssize_t query = 0; query < queries; query += 2) {
                const Py_ssize_t together = queries - query < 2 ? 1 : 2;
                (p->width == 2 ? HALF : SINGLE)[together](p, tile, p->floats + query * dim, out + query * TILE);
            }
    }
}

#endif

static int (*const DIRECTED[PATHS])(const struct features *) = {
    directed_plain,
#if X86
    directed_avx2, directed_avx512,
#endif
};
static int (*const UNITS[PATHS])(const struct features *) = {
    unit_plain,
#if X86
    unit_avx2, unit_avx512,
#endif
};
static double (*const TWO_BYTES[PATHS])(const struct two_bytes *) = {
    two_bytes_plain,
#if X86
    two_bytes_avx2, two_bytes_avx512,
#endif
};
static void (*const COARSE[PATHS])(const struct coarse *) = {
    coarse_plain,
#if X86
    coarse_avx2, coarse_avx512,
#endif
};
static void (*const PRODUCTS[PATHS])(const struct products *) = {
    products_plain,
#if X86
    products_avx2, products_avx512,
#endif
};

static void (*SCANS[PATHS])(const struct scan *) = {
    scan_plain,
#if X86
    scan_avx2, scan_avx512,
#endif
};
static void (*const ROWS[PATHS])(const struct rows *) = {
    rows_plain,
#if X86
    rows_avx2, rows_avx512,
#endif
};

static double (*const HALVES[PATHS])(const struct score *) = {
    half_plain,
#if X86
    half_avx2, half_avx512,
#endif
};
static double (*const SINGLES[PATHS])(const struct score *) = {
    single_plain,
#if X86
    single_avx2, single_avx512,
#endif
};
/* Puts a value in place of the least of a heap. */
static void replace_least(float *heap, Py_ssize_t count, float value) {
    Py_ssize_t place = 0;
    for (;;) {
        Py_ssize_t child = 2 * place + 1;
        if (child >= count) break;
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= value) break;
        heap[place] = heap[child];
        place = child;
    }
    heap[place] = value;
}

/* The searches of some queries, among rows that are all read. */
struct search {
    const char *const *rows;      /* of each block: (size, dim) float32, float16, or the second byte of two */
    const int64_t *const *ids;    /* of each block: (size,) */
    const char *const *bytes;     /* of each block: (size, dim) int8, which are read first; NULL if there are none */
    const float *const *scales;   /* of each block: (size,): the value of one unit of a byte */
    const float *const *residuals; /* of each block: (size,): the length of what the bytes leave out */
    Py_ssize_t size, dim, slots;  /* rows in a block, their length, rows in use in all blocks */
    int width;                    /* bytes of a coordinate */
    const float *queries;         /* (count, dim) */
    Py_ssize_t count;
    const uint8_t *groups;        /* of all slots; NULL if every row may be found */
    const int64_t *wanted;        /* (searches, 2): how many rows of which group; 0 for all that are not hidden */
    Py_ssize_t searches;          /* that are made for each query */
    double slack;                 /* by how much a product of a row may be off, for two rows together */
    Py_ssize_t crowd, most;       /* candidates that are too many to score; the most rows that are wanted */
    int64_t *found_slots, *found_ids;  /* (count, searches, most) */
    double *found;                /* (count, searches, most): similarities */
    int8_t *settled;              /* (count,): whether there were not too many candidates */
    /* Room for SIDE queries: */
    int8_t *parts;                /* (SIDE, 2, dim): a coordinate of a query is a step times 256 * first + second */
    float *products;              /* (slots in whole tiles, SIDE) */
    /* Room for one of them: */
    float *upper, *lower;         /* (slots in whole tiles,): bounds on similarities */
    float *best;                  /* (most,) a heap, the least first */
    double *precise;              /* (dim,) the query */
    struct candidate *candidates; /* (crowd,) */
};

struct candidate {
    double similarity;
    int64_t id, slot;
};

/* The most similar first, ties to the lowest id. */
static int in_order_of_rank(const void *left, const void *right) {
    const struct candidate *one = left, *other = right;
    if (one->similarity != other->similarity) return one->similarity > other->similarity ? -1 : 1;
    return one->id < other->id ? -1 : one->id > other->id;
}

static inline int may_be_found(const struct search *s, Py_ssize_t slot, int64_t group) {
    if (!s->groups) return 1;
    return group ? s->groups[slot] == group : s->groups[slot] != 0;
}

/* Writes the products of all rows, or of all their bytes, with some queries. */
static void multiply_all(const struct search *s, int path, const float *floats, const double *steps, Py_ssize_t queries,
                         float *out) {
    for (Py_ssize_t first = 0; first < s->slots; first += s->size) {
        const Py_ssize_t rows = s->slots - first < s->size ? s->slots - first : s->size;
        const struct products p = {
            .rows = (floats ? s->rows : s->bytes)[first / s->size], .tiles = (rows + TILE - 1) / TILE, .dim = s->dim,
            .queries = queries, .width = floats ? s->width : 1, .floats = floats, .bytes = s->parts, .steps = steps,
            .out = out + first * queries,
        };
        PRODUCTS[path](&p);
    }
}

/* Rounds a query to two bytes a coordinate; returns at least the length of what that leaves out of it. */
static double round_query(const float *query, Py_ssize_t dim, int8_t *parts, double *step) {
    double largest = 0, square = 0;
    for (Py_ssize_t place = 0; place < dim; place++) {
        const double magnitude = fabs(query[place]);
        if (magnitude > largest) largest = magnitude;
    }
    *step = (largest > 0x1p-48 ? largest : 0x1p-48) / LARGEST_WHOLE;
    for (Py_ssize_t place = 0; place < dim; place++) {
        const double number = rint(query[place] / *step), high = floor((number + 128) / 256);
        const double left = query[place] - number * *step;
        parts[place] = (int8_t)high, parts[dim + place] = (int8_t)(number - 256 * high);
        square += left * left;
    }
    return sqrt(square) * ROUNDED_UP;
}

/* Bounds from the products of all bytes with some queries, for one of them: the similarity differs from what a row's
   bytes say by no more than what they leave out of the row, whose length is the residual, and what was left out of the
   query, times the length of what the bytes stand for. That is less than twice the length of the row, since no
   coordinate is rounded by more than itself. */
static void bound_by_bytes(const struct search *s, Py_ssize_t query, Py_ssize_t queries, double left_out) {
    const float certain = (float)(LONGEST_READ * left_out + BEYOND_ROUNDING);
    for (Py_ssize_t first = 0; first < s->slots; first += TILE) {
        const float *products = s->products + first * queries + query * TILE;
        const float *scales = s->scales[first / s->size] + first % s->size;
        const float *residuals = s->residuals[first / s->size] + first % s->size;
        for (int lane = 0; lane < TILE; lane++) {
            const float middle = products[lane] * scales[lane], width = residuals[lane] + certain;
            s->upper[first + lane] = middle + width;
            s->lower[first + lane] = middle - width;
        }
    }
}

/* What an upper bound must reach so that its row may be among the k best. */
static double least_bound(const struct search *s, const float *lower, Py_ssize_t k, int64_t group) {
    for (Py_ssize_t number = 0; number < k; number++) s->best[number] = -INFINITY;
    for (Py_ssize_t first = 0; first < s->slots; first += LANES) {
        const Py_ssize_t end = s->slots - first < LANES ? s->slots : first + LANES;
        int higher = 0;
        for (Py_ssize_t slot = first; slot < end; slot++) higher |= lower[slot] > s->best[0];
        for (Py_ssize_t slot = first; higher && slot < end; slot++)
            if (lower[slot] > s->best[0] && may_be_found(s, slot, group)) replace_least(s->best, k, lower[slot]);
    }
    return s->best[0];
}

/* Lists the rows whose upper bounds reach this; returns how many there are, or -1 if there are too many. */
static Py_ssize_t list_candidates(const struct search *s, double least, int64_t group) {
    Py_ssize_t count = 0;
    for (Py_ssize_t first = 0; first < s->slots; first += LANES) {
        const Py_ssize_t end = s->slots - first < LANES ? s->slots : first + LANES;
        int some = 0;
        for (Py_ssize_t slot = first; slot < end; slot++) some |= s->upper[slot] >= least;
        for (Py_ssize_t slot = first; some && slot < end; slot++) {
            if (!(s->upper[slot] >= least) || !may_be_found(s, slot, group)) continue;
            if (count == s->crowd) return -1;
            s->candidates[count++].slot = slot;
        }
    }
    return count;
}

static inline const char *row_in(const struct search *s, int64_t slot) {
    return s->rows[slot / s->size] + slot % s->size * s->dim * s->width;
}

static double similarity_of(const struct search *s, int path, int64_t slot) {
    if (s->width == 1) {
        const Py_ssize_t block = slot / s->size, row = slot % s->size;
        const struct two_bytes both = {(const int8_t *)s->bytes[block] + row * s->dim, (const int8_t *)row_in(s, slot),
                                       s->scales[block][row], s->precise, s->dim};
        return TWO_BYTES[path](&both);
    }
    const struct score pair = {row_in(s, slot), s->precise, s->dim};
    return s->width == 2 ? HALVES[path](&pair) : SINGLES[path](&pair);
}

static void score_candidates(const struct search *s, int path, Py_ssize_t count) {
    for (Py_ssize_t number = 0; number < count; number++) {
        struct candidate *c = s->candidates + number;
        if (number + AHEAD < count) ask_ahead(row_in(s, c[AHEAD].slot), s->dim * s->width);
        c->similarity = similarity_of(s, path, c->slot);
        c->id = s->ids[c->slot / s->size][c->slot % s->size];
    }
    qsort(s->candidates, count, sizeof *s->candidates, in_order_of_rank);
}

/* Makes all searches of one query by its bounds; returns whether none of them has too many candidates. */
static int find_nearest(const struct search *s, int path, Py_ssize_t query, const float *lower, double slack) {
    for (Py_ssize_t number = 0; number < s->searches; number++) {
        const Py_ssize_t k = (Py_ssize_t)s->wanted[2 * number], start = (query * s->searches + number) * s->most;
        const int64_t group = s->wanted[2 * number + 1];
        const double least = least_bound(s, lower, k, group) - slack;
        const Py_ssize_t count = list_candidates(s, least > -FLT_MAX ? least : -FLT_MAX, group);
        if (count < 0) return 0;
        score_candidates(s, path, count);
        for (Py_ssize_t place = 0; place < s->most; place++) {
            const int there = place < k && place < count;
            s->found_slots[start + place] = there ? s->candidates[place].slot : -1;
            s->found_ids[start + place] = there ? s->candidates[place].id : -1;
            s->found[start + place] = there ? s->candidates[place].similarity : -INFINITY;
        }
    }
    return 1;
}

/* Reads the bytes of all rows once for SIDE queries; where there are none, or they leave too many candidates, reads
   float rows themselves for each query. Returns how many queries are settled. */
static Py_ssize_t search_all(const struct search *s, int path) {
    Py_ssize_t settled_ones = 0;
    for (Py_ssize_t first = 0; first < s->count; first += SIDE) {
        const Py_ssize_t queries = s->count - first < SIDE ? s->count - first : SIDE;
        double steps[SIDE], left_out[SIDE];
        if (s->bytes) {
            for (Py_ssize_t number = 0; number < queries; number++)
                left_out[number] = round_query(s->queries + (first + number) * s->dim, s->dim,
                                               s->parts + 2 * number * s->dim, steps + number);
            multiply_all(s, path, NULL, steps, queries, s->products);
        }
        for (Py_ssize_t number = 0; number < queries; number++) {
            const float *query = s->queries + (first + number) * s->dim;
            int settled = 0;
            for (Py_ssize_t place = 0; place < s->dim; place++) s->precise[place] = query[place];
            if (s->bytes) {
                bound_by_bytes(s, number, queries, left_out[number]);
                settled = find_nearest(s, path, first + number, s->lower, 0);
            }
            if (!settled && s->width > 1) {
                multiply_all(s, path, query, NULL, 1, s->upper);
                settled = find_nearest(s, path, first + number, s->upper, s->slack);
            }
            s->settled[first + number] = (int8_t)settled;
            settled_ones += settled;
        }
    }
    return settled_ones;
}

/* SIDE queries as they are multiplied with tiles. */
struct side {
    const int8_t *nibbles;  /* (width / 4, SIDE, 2, 4): four coordinates beside low nibbles, then four beside high ones */
    const int16_t *heads;   /* (pairs, SIDE, 2) */
};

/* A tile of rows as it is multiplied with queries. */
struct tile {
    const uint8_t *nibbles;  /* (LANES, width) */
    const int8_t *head;      /* (pairs, LANES, 2) */
    Py_ssize_t width, pairs;
    void *room;              /* for nibbles and heads in another order */
};

/* Whole sums of the products of a tile and SIDE queries, each (SIDE, LANES). */
struct sums {
    int32_t nibbles[SIDE * LANES], heads[SIDE * LANES];
};

static void arrange_plain(const struct tile *t) { (void)t; }

static void multiply_plain(const struct tile *t, const struct side *s, struct sums *sums) {
    memset(sums, 0, sizeof *sums);
    for (int query = 0; query < SIDE; query++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint8_t *row = t->nibbles + lane * t->width;
            int32_t sum = 0, head = 0;
            for (Py_ssize_t place = 0; place < t->width; place++) {
                const int8_t *both = s->nibbles + (place / 4 * SIDE + query) * 8 + place % 4;
                sum += (row[place] & 15) * both[0] + (row[place] >> 4) * both[4];
            }
            for (Py_ssize_t pair = 0; pair < t->pairs; pair++) {
                const int8_t *two = t->head + (pair * LANES + lane) * 2;
                const int16_t *their = s->heads + (pair * SIDE + query) * 2;
                head += two[0] * their[0] + two[1] * their[1];
            }
            sums->nibbles[query * LANES + lane] = sum;
            sums->heads[query * LANES + lane] = head;
        }
}

#if X86

/* Row by row becomes four coordinates of each row side by side; heads become 16 bits wide. */
AVX2 static void arrange_avx2(const struct tile *t) {
    int32_t *nibbles = t->room;
    for (Py_ssize_t word = 0; word < t->width / 4; word++)
        for (int lane = 0; lane < LANES; lane++)
            memcpy(nibbles + word * LANES + lane, t->nibbles + lane * t->width + 4 * word, 4);
    __m256i *heads = (__m256i *)(nibbles + t->width / 4 * LANES);
    for (Py_ssize_t half = 0; half < 2 * t->pairs; half++)
        heads[half] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(t->head + half * LANES)));
}

AVX2 static void multiply_avx2(const struct tile *t, const struct side *s, struct sums *sums) {
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i *nibbles = t->room, *heads = nibbles + t->width / 4 * 2;
    for (int half = 0; half < 2; half++)
        for (int query = 0; query < SIDE; query++) {
            __m256i sum = _mm256_setzero_si256(), head = sum;
            for (Py_ssize_t word = 0; word < t->width / 4; word++) {
                int32_t both[2];
                memcpy(both, s->nibbles + (word * SIDE + query) * 8, 8);
                __m256i row = nibbles[2 * word + half];
                __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(row, nibble), _mm256_set1_epi32(both[0]));
                row = _mm256_and_si256(_mm256_srli_epi16(row, 4), nibble);
                low = _mm256_add_epi16(low, _mm256_maddubs_epi16(row, _mm256_set1_epi32(both[1])));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(low, ones));
            }
            for (Py_ssize_t pair = 0; pair < t->pairs; pair++) {
                int32_t two;
                memcpy(&two, s->heads + (pair * SIDE + query) * 2, 4);
                head = _mm256_add_epi32(head, _mm256_madd_epi16(heads[2 * pair + half], _mm256_set1_epi32(two)));
            }
            _mm256_storeu_si256((__m256i *)(sums->nibbles + query * LANES + half * 8), sum);
            _mm256_storeu_si256((__m256i *)(sums->heads + query * LANES + half * 8), head);
        }
}

/* Sixteen rows of sixteen numbers become sixteen columns. */
AVX512 static inline void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

AVX512 static void arrange_avx512(const struct tile *t) {
    __m512i *nibbles = t->room;
    for (Py_ssize_t place = 0; place < t->width; place += 64) {
        __m512i rows[LANES];
        for (int lane = 0; lane < LANES; lane++) rows[lane] = _mm512_loadu_si512(t->nibbles + lane * t->width + place);
        transpose(rows);
        for (int word = 0; word < 16; word++) nibbles[place / 4 + word] = rows[word];
    }
    __m512i *heads = nibbles + t->width / 4;
    for (Py_ssize_t pair = 0; pair < t->pairs; pair++)
        heads[pair] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(t->head + pair * LANES * 2)));
}

/* By name and not in arrays, so that all sums stay in registers. */
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define ZERO(n) __m512i low##n = _mm512_setzero_si512(), high##n = low##n;
/* In assembler: of the intrinsics for these two, GCC 12 makes two copies of every sum in every round. */
#define MULTIPLY_ADD(how, sum, rows, query) \
    __asm__(how " %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(rows), "m"(query));
#define NIBBLE_PRODUCTS(n)                              \
    MULTIPLY_ADD("vpdpbusd", low##n, first, both[2 * n]) \
    MULTIPLY_ADD("vpdpbusd", high##n, second, both[2 * n + 1])
#define KEEP_NIBBLES(n)                                                                       \
    _mm512_storeu_si512(sums->nibbles + n * LANES, _mm512_add_epi32(low##n, high##n));        \
    low##n = _mm512_setzero_si512();
#define HEAD_PRODUCTS(n) MULTIPLY_ADD("vpdpwssd", low##n, head, two[n])
#define KEEP_HEADS(n) _mm512_storeu_si512(sums->heads + n * LANES, low##n);
typedef int32_t __attribute__((may_alias)) word;  /* several coordinates at once */

AVX512 static void multiply_avx512(const struct tile *t, const struct side *s, struct sums *sums) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i *nibbles = t->room, *heads = nibbles + t->width / 4;
    const word *both = (const word *)s->nibbles, *two = (const word *)s->heads;
    EACH(ZERO)
    for (Py_ssize_t place = 0; place < t->width / 4; place++, both += 2 * SIDE) {
        const __m512i first = _mm512_and_si512(nibbles[place], nibble);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi16(nibbles[place], 4), nibble);
        EACH(NIBBLE_PRODUCTS)
    }
    EACH(KEEP_NIBBLES)
    for (Py_ssize_t pair = 0; pair < t->pairs; pair++, two += SIDE) {
        const __m512i head = heads[pair];
        EACH(HEAD_PRODUCTS)
    }
    EACH(KEEP_HEADS)
}

#endif

static void (*const ARRANGE[PATHS])(const struct tile *) = {
    arrange_plain,
#if X86
    arrange_avx2, arrange_avx512,
#endif
};
static void (*const MULTIPLY[PATHS])(const struct tile *, const struct side *, struct sums *) = {
    multiply_plain,
#if X86
    multiply_avx2, multiply_avx512,
#endif
};

enum { HEAD_STEP, HEAD_SLACK, STEP, SHIFT, SPREAD, ROUNDING, NUMBERS };

/* A search of one query among the rows of a group. */
struct hunt {
    int group;       /* 0 for all rows that are not hidden, negative for all */
    Py_ssize_t k;    /* rows that are wanted */
    float *best;     /* (k,) a heap, the least first: what rows probably reach */
    float *floor;    /* rows that cannot reach it are left out */
    int64_t *slots;  /* (room,) of candidates */
    float *upper;    /* (room,) their bounds */
    int64_t *count;  /* how many, or -1 if there is no room for them */
};

/* A pass over a block of codes for many queries. */
struct pass {
    int path, sampling;
    const int8_t *head;      /* (tiles, pairs, LANES, 2) */
    const float *weights;    /* (tiles, 3, LANES) */
    const uint8_t *nibbles;  /* (rows, width) */
    const float *factors;    /* (rows, 2) */
    const uint8_t *groups;   /* of all slots */
    Py_ssize_t tiles, first, span, stride, slots, rows, width, pairs, queries, wanted, spans, room;
    const int8_t *query_nibbles;  /* (sides, width / 4, SIDE, 2, 4) */
    const int16_t *query_heads;   /* (sides, pairs, SIDE, 2) */
    const float *centers;         /* (queries, spans) */
    const float *numbers;         /* (queries, NUMBERS) */
    float caution;                /* how far below its upper bound a row probably is, in halves of its range */
    struct hunt *hunts;           /* (queries, wanted) */
    void *memory;                 /* for a tile */
};

/* Drops candidates that cannot reach the floor any more. */
static void thin_out(struct hunt *h) {
    int64_t kept = 0;
    for (int64_t number = 0; number < *h->count; number++) {
        if (!(h->upper[number] >= *h->floor)) continue;
        h->slots[kept] = h->slots[number];
        h->upper[kept++] = h->upper[number];
    }
    *h->count = kept;
}

/* Takes in a row that reaches the floor. */
static void take_in(const struct pass *p, struct hunt *h, int64_t slot, float upper, float width) {
    float reached = upper - width * p->caution;
    if (reached > h->best[0]) {
        replace_least(h->best, h->k, reached);
        if (h->best[0] > *h->floor) *h->floor = h->best[0];
    }
    if (p->sampling || *h->count < 0) return;
    if (*h->count == p->room) thin_out(h);
    if (*h->count == p->room) {
        *h->count = -1;
        return;
    }
    h->slots[*h->count] = slot;
    h->upper[*h->count] = upper;
    ++*h->count;
}

/* The bounds of a tile's rows for one query, and what lies between their middle and them. Returns a bit for each row whose
   bound reaches the floor. */
typedef unsigned bounds_of_tile(const struct pass *p, const float *scale, const float *factors, Py_ssize_t query,
                                float center, const int32_t *nibbles, const int32_t *heads, float floor, float *upper,
                                float *width);

ALWAYS static inline unsigned bound_tile(const struct pass *p, const float *scale, const float *factors, Py_ssize_t query,
                                         float center, const int32_t *nibbles, const int32_t *heads, float floor,
                                         float *upper, float *width) {
    const float *n = p->numbers + query * NUMBERS;
    unsigned reached = 0;
    for (int lane = 0; lane < LANES; lane++) {
        float weight = factors[lane], left_out = factors[LANES + lane];
        float middle = scale[lane] * ((float)heads[lane] * n[HEAD_STEP]) + center;
        float estimate = weight * ((float)nibbles[lane] * n[STEP] - n[SHIFT]);
        width[lane] = (left_out * n[SPREAD] + scale[lane] * n[HEAD_SLACK]) + n[ROUNDING];
        upper[lane] = (middle + estimate) + width[lane];
        reached |= (unsigned)(upper[lane] >= floor) << lane;
    }
    return reached;
}

#if X86
/* Most tiles have no row that reaches the floor: nothing of them is written. */
AVX512 ALWAYS static inline unsigned bound_tile_avx512(const struct pass *p, const float *scales, const float *factors,
                                                       Py_ssize_t query, float center, const int32_t *nibbles,
                                                       const int32_t *heads, float floor, float *upper, float *width) {
    const float *n = p->numbers + query * NUMBERS;
    const __m512 scale = _mm512_loadu_ps(scales);
    __m512 middle = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(heads)), _mm512_set1_ps(n[HEAD_STEP]));
    middle = _mm512_add_ps(_mm512_mul_ps(scale, middle), _mm512_set1_ps(center));
    __m512 estimate = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(nibbles)), _mm512_set1_ps(n[STEP]));
    estimate = _mm512_mul_ps(_mm512_loadu_ps(factors), _mm512_sub_ps(estimate, _mm512_set1_ps(n[SHIFT])));
    __m512 range = _mm512_mul_ps(_mm512_loadu_ps(factors + LANES), _mm512_set1_ps(n[SPREAD]));
    range = _mm512_add_ps(range, _mm512_mul_ps(scale, _mm512_set1_ps(n[HEAD_SLACK])));
    range = _mm512_add_ps(range, _mm512_set1_ps(n[ROUNDING]));
    const __m512 bound = _mm512_add_ps(_mm512_add_ps(middle, estimate), range);
    const unsigned reached = _mm512_cmp_ps_mask(bound, _mm512_set1_ps(floor), _CMP_GE_OQ);
    if (!reached) return 0;
    _mm512_storeu_ps(upper, bound);
    _mm512_storeu_ps(width, range);
    return reached;
}
#endif

/* Looks at one tile for SIDE queries, or as many as are left. */
ALWAYS static inline void look_at(const struct pass *p, Py_ssize_t tile, const float *factors, Py_ssize_t first_query,
                                  const struct sums *sums, bounds_of_tile *bound) {
    const Py_ssize_t first = (p->first + tile) * LANES, span = (p->first + tile) / p->span;
    const unsigned in_use = p->slots - first < LANES ? (1u << (p->slots - first)) - 1 : (1u << LANES) - 1;
    const Py_ssize_t queries = p->queries - first_query < SIDE ? p->queries - first_query : SIDE;
    for (Py_ssize_t number = 0; number < queries; number++) {
        float upper[LANES], width[LANES];
        const Py_ssize_t query = first_query + number;
        struct hunt *hunts = p->hunts + query * p->wanted;
        float floor = *hunts->floor;
        for (Py_ssize_t which = 1; which < p->wanted; which++)
            if (*hunts[which].floor < floor) floor = *hunts[which].floor;
        const unsigned reached = in_use & bound(p, p->weights + tile * 3 * LANES, factors, query,
                                                p->centers[query * p->spans + span], sums->nibbles + number * LANES,
                                                sums->heads + number * LANES, floor, upper, width);
        for (Py_ssize_t which = 0; reached && which < p->wanted; which++) {
            struct hunt *h = hunts + which;
            for (int lane = 0; lane < LANES; lane++) {
                if (!(reached >> lane & 1) || !(upper[lane] >= *h->floor)) continue;
                const uint8_t group = p->groups[first + lane];
                if (h->group > 0 ? group != h->group : h->group == 0 && group == 0) continue;
                take_in(p, h, first + lane, upper[lane], width[lane]);
            }
        }
    }
}

ALWAYS static inline void go_through(const struct pass *p, bounds_of_tile *bound) {
    const Py_ssize_t sides = (p->queries + SIDE - 1) / SIDE, bytes = LANES * p->width, share = bytes / sides;
    for (Py_ssize_t tile = 0; tile < p->tiles; tile += p->stride) {
        float factors[2 * LANES];
        struct tile t = {p->nibbles + tile * bytes, p->head + tile * p->pairs * LANES * 2, p->width, p->pairs, p->memory};
        for (int lane = 0; lane < LANES; lane++) {
            factors[lane] = p->factors[(tile * LANES + lane) * 2];
            factors[LANES + lane] = p->factors[(tile * LANES + lane) * 2 + 1];
        }
        ARRANGE[p->path](&t);
        for (Py_ssize_t side = 0; side < sides; side++) {
            struct side s = {p->query_nibbles + side * p->width * 2 * SIDE, p->query_heads + side * p->pairs * 2 * SIDE};
            struct sums sums;
            if (tile + p->stride < p->tiles) ask_ahead((const char *)t.nibbles + p->stride * bytes + side * share, share);
            MULTIPLY[p->path](&t, &s, &sums);
            look_at(p, tile, factors, side * SIDE, &sums, bound);
        }
    }
    for (Py_ssize_t number = 0; number < p->queries * p->wanted; number++)
        if (!p->sampling && *p->hunts[number].count > 0) thin_out(p->hunts + number);
}

#if X86
AVX512 static void pass_avx512(const struct pass *p) { go_through(p, bound_tile_avx512); }
AVX2 static void pass_avx2(const struct pass *p) { go_through(p, bound_tile); }
#endif
static void pass_plain(const struct pass *p) { go_through(p, bound_tile); }

static void (*const PASSES[PATHS])(const struct pass *) = {
    pass_plain,
#if X86
    pass_avx2, pass_avx512,
#endif
};

/* How rows become codes; see adanpc/index/codes.py, whose arithmetic this is. Sums are of eight parts each, in an order
   that no path changes. */
struct encoder {
    const double *rows, *directions, *scales;   /* (n, dim), (heads, dim), (heads,) */
    const double *dense;                        /* (padded, padded), or NULL */
    const double *signs, *lefts, *rights;       /* (2, padded), (2, side, side), (2, 64, 64) */
    const double *center;                       /* (padded,) */
    Py_ssize_t count, dim, padded, heads, signed_part;
    double nibble_step, useful;
    double *split_heads;  /* (n, heads) */
    double *tails;        /* (n, padded) */
    int8_t *head;         /* (n, heads); NULL if rows are split only */
    uint32_t *bits;       /* (n, signed_part / 32) */
    float *weights;       /* (n, 3) */
    uint8_t *nibbles;     /* (n, padded / 2) */
    float *factors;       /* (n, 2) */
    double *lengths;      /* (n,) */
    double *room;         /* (padded,) */
};

ALWAYS static inline double in_order(const double *parts) {
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

ALWAYS static inline double product(const double *left, const double *right, Py_ssize_t count) {
    double parts[8] = {0};
    Py_ssize_t place = 0;
    for (; place + 8 <= count; place += 8)
        for (int part = 0; part < 8; part++) parts[part] += left[place + part] * right[place + part];
    for (int part = 0; place < count; place++, part++) parts[part] += left[place] * right[place];
    return in_order(parts);
}

/* Writes factors (count,) times the rows of a matrix (count, stride), columns from the first on, 64 of them. */
ALWAYS static inline void combine_rows(const double *factors, Py_ssize_t count, const double *matrix, Py_ssize_t stride,
                                       double *sums) {
    double parts[64] = {0};
    for (Py_ssize_t row = 0; row < count; row++)
        for (int column = 0; column < 64; column++) parts[column] += factors[row] * matrix[row * stride + column];
    memcpy(sums, parts, sizeof parts);
}

ALWAYS static inline void turn(const struct encoder *e, double *tail, double *other) {
    if (e->dense) {
        memcpy(other, tail, e->padded * sizeof *tail);
        for (Py_ssize_t column = 0; column < e->padded; column += 64)
            combine_rows(other, e->padded, e->dense + column, e->padded, tail + column);
        return;
    }
    const Py_ssize_t side = e->padded / 64;
    for (int round = 0; round < 2; round++) {
        const double *signs = e->signs + round * e->padded, *left = e->lefts + round * side * side;
        for (Py_ssize_t place = 0; place < e->padded; place++) tail[place] *= signs[place];
        for (Py_ssize_t row = 0; row < side; row++)
            combine_rows(tail + row * 64, 64, e->rights + round * 64 * 64, 64, other + row * 64);
        for (Py_ssize_t row = 0; row < side; row++) {
            double turned[64];
            combine_rows(left + row * side, side, other, 64, turned);
            for (int column = 0; column < 64; column++) tail[column * side + row] = turned[column];
        }
    }
}

/* F and G of a code, from |z|^2, <y, z> and |y|^2. */
ALWAYS static inline void weigh(const struct encoder *e, double square, double along, double code_square, float *pair) {
    double weight = 0, left_out = sqrt(square * (double)e->padded);
    if (along > e->useful * sqrt(square * code_square)) {
        weight = square / along;
        left_out = weight * weight * code_square - square;
        left_out = sqrt(left_out > 0 ? left_out : 0);
    }
    pair[0] = (float)weight, pair[1] = (float)(left_out * (1 + 1e-6));
}

ALWAYS static inline void encode_head(const struct encoder *e, Py_ssize_t number, const double *head) {
    double most = 0;
    for (Py_ssize_t place = 0; place < e->heads; place++) {
        double size = fabs(head[place] / e->scales[place]);
        if (size > most) most = size;
    }
    const float scale = (float)(most / 127 > 1e-30 ? most / 127 : 1e-30);
    e->weights[3 * number] = scale;
    for (Py_ssize_t place = 0; place < e->heads; place++) {
        double unit = rint(head[place] / ((double)scale * e->scales[place]));
        e->head[number * e->heads + place] = fabs(unit) <= 127 ? (int8_t)unit : 0;  /* not of what was never written */
    }
}

ALWAYS static inline void encode_tail(const struct encoder *e, Py_ssize_t number, const double *tail, double *centered) {
    double sizes[8] = {0}, along[8] = {0}, squares[8] = {0};
    const Py_ssize_t width = e->padded / 2;
    uint32_t *bits = e->bits + number * e->signed_part / 32;
    uint8_t *nibbles = e->nibbles + number * width;
    for (Py_ssize_t place = 0; place < e->padded; place++) centered[place] = tail[place] - e->center[place];
    const double square = product(centered, centered, e->padded);
    for (Py_ssize_t place = 0; place < e->signed_part; place += 8)
        for (int part = 0; part < 8; part++) sizes[part] += fabs(centered[place + part]);
    for (Py_ssize_t word = 0; word < e->signed_part / 32; word++) {
        uint32_t all = 0;
        for (int bit = 0; bit < 32; bit++) all |= (uint32_t)(centered[word * 32 + bit] > 0) << bit;
        bits[word] = all;
    }
    weigh(e, square, in_order(sizes), (double)e->signed_part, e->weights + 3 * number + 1);
    const double deviation = sqrt(square / (double)e->padded);
    const double step = e->nibble_step * (deviation > 1e-30 ? deviation : 1e-30);
    for (Py_ssize_t place = 0; place < e->padded; place += 8)
        for (int part = 0; part < 8; part++) {
            double level = floor(centered[place + part] / step) + 8;
            level = level > 0 ? level : 0;  /* and where there is no number */
            level = level < 15 ? level : 15;
            const uint8_t nibble = (uint8_t)(int)level;
            if (place < width) nibbles[place + part] = nibble;
            else nibbles[place + part - width] |= (uint8_t)(nibble << 4);
            along[part] += (level - 7.5) * centered[place + part];
            squares[part] += (level - 7.5) * (level - 7.5);
        }
    weigh(e, square, in_order(along), in_order(squares), e->factors + 2 * number);
    e->lengths[number] = (double)e->factors[2 * number] * sqrt(in_order(squares));
}

/* The head of a row, and its turned tail. */
ALWAYS static inline void split(const struct encoder *e, const double *row, double *head, double *tail) {
    double *other = e->room;
    for (Py_ssize_t place = 0; place < e->heads; place++) head[place] = product(row, e->directions + place * e->dim, e->dim);
    memset(tail, 0, e->padded * sizeof *tail);
    Py_ssize_t place = 0;
    for (; place + 64 <= e->dim; place += 64) {
        combine_rows(head, e->heads, e->directions + place, e->dim, other);
        for (int column = 0; column < 64; column++) tail[place + column] = row[place + column] - other[column];
    }
    for (; place < e->dim; place++) {
        double sum = 0;
        for (Py_ssize_t direction = 0; direction < e->heads; direction++)
            sum += head[direction] * e->directions[direction * e->dim + place];
        tail[place] = row[place] - sum;
    }
    turn(e, tail, other);
}

ALWAYS static inline void encode_all(const struct encoder *e) {
    for (Py_ssize_t number = 0; number < e->count; number++) {
        double *split_head = e->split_heads + number * e->heads, *tail = e->tails + number * e->padded;
        split(e, e->rows + number * e->dim, split_head, tail);
        if (!e->head) continue;
        encode_head(e, number, split_head);
        encode_tail(e, number, tail, e->room);
    }
}

static void encode_plain(const struct encoder *e) { encode_all(e); }
#if X86
AVX2 static void encode_avx2(const struct encoder *e) { encode_all(e); }
AVX512 static void encode_avx512(const struct encoder *e) { encode_all(e); }
#endif

static void (*const ENCODERS[PATHS])(const struct encoder *) = {
    encode_plain,
#if X86
    encode_avx2, encode_avx512,
#endif
};

#if X86
/* Whether the processor converts 16-bit floats: not every compiler knows this feature by name. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

static int supported(int path) {
#if X86
    __builtin_cpu_init();
    if (path == WITH_AVX2) return __builtin_cpu_supports("avx2") && has_f16c();
    if (path == WITH_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
    return path == PLAIN;
}

/* Which paths run here, found out once: in a virtual machine, asking the processor takes longer than a small search. */
static int runs_here[PATHS];

static PyObject *paths(PyObject *self, PyObject *unused) {
    PyObject *names = PyList_New(0);
    for (int path = PATHS - 1; names && path >= 0; path--) {
        if (!runs_here[path]) continue;
        PyObject *name = PyUnicode_FromString(PATH_NAMES[path]);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

/* The number of a path that runs here, or -1 with an exception. */
static int path_of(const char *name) {
    for (int path = 0; path < PATHS; path++)
        if (strcmp(name, PATH_NAMES[path]) == 0 && runs_here[path]) return path;
    PyErr_Format(PyExc_ValueError, "no kernels '%s' run on this machine", name);
    return -1;
}

/* Arguments are never nested in tuples: Python makes room to release as many buffers as there are outer arguments, and
   writes beyond it if inner ones are more. */

/* Whether a buffer has exactly, or at least, so many bytes; else an exception says that shapes do not fit. */
static int fits(int right, const char *what) {
    if (!right) PyErr_Format(PyExc_ValueError, "the shape of %s does not fit", what);
    return right;
}

static PyObject *scan_tiles(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer head, bits, weights, query_head, query_bits, centers, base, upper;
    struct scan s;
    if (!PyArg_ParseTuple(args, "sy*y*y*nny*y*y*n(fffffff)w*w*", &name, &head, &bits, &weights, &s.tiles, &s.first,
                          &query_head, &query_bits, &centers, &s.span, &s.head_step, &s.head_slack, &s.bit_step,
                          &s.bit_shift, &s.spread, &s.rounding, &s.sigmas, &base, &upper))
        return NULL;
    int path = path_of(name);
    s.pairs = query_head.len / 4;
    s.words = query_bits.len / (4 * PLANES);
    int right = path >= 0 && fits(s.tiles >= 0 && s.first >= 0 && s.span > 0, "the tiles")
        && fits(head.len >= s.tiles * s.pairs * LANES * 2, "head") && fits(bits.len >= s.tiles * s.words * LANES * 4, "bits")
        && fits(weights.len >= s.tiles * 3 * LANES * 4, "weights")
        && fits(s.tiles == 0 || centers.len >= 4 * ((s.first + s.tiles - 1) / s.span + 1), "centers")
        && fits(base.len >= s.tiles * LANES * 4 && upper.len >= s.tiles * LANES * 4, "what is written");
    if (right) {
        s.head = head.buf, s.bits = bits.buf, s.weights = weights.buf;
        s.query_head = query_head.buf, s.query_bits = query_bits.buf, s.centers = centers.buf;
        s.base = base.buf, s.upper = upper.buf;
        Py_BEGIN_ALLOW_THREADS
        SCANS[path](&s);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *all[] = {&head, &bits, &weights, &query_head, &query_bits, &centers, &base, &upper};
    for (int number = 0; number < 8; number++) PyBuffer_Release(all[number]);
    if (!right) return NULL;
    Py_RETURN_NONE;
}

/* Whether all slots lie among the rows of a block, and among those that have a base. */
static int slots_within(const struct rows *s, Py_ssize_t rows, Py_ssize_t bases) {
    for (Py_ssize_t number = 0; number < s->count; number++) {
        int64_t slot = s->slots[number];
        if (slot < s->first || slot >= s->first + rows || slot >= bases) return 0;
    }
    return 1;
}

static PyObject *bound_rows(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer nibbles, weights, slots, high, low, base, upper;
    struct rows s;
    if (!PyArg_ParseTuple(args, "sy*y*y*ny*y*y*(ffff)w*", &name, &nibbles, &weights, &slots, &s.first, &high, &low,
                          &base, &s.step, &s.shift, &s.spread, &s.rounding, &upper))
        return NULL;
    int path = path_of(name);
    s.width = high.len / 2;
    s.count = slots.len / 8;
    s.slots = slots.buf;
    int right = path >= 0 && fits(s.width > 0 && s.width % 64 == 0 && low.len == high.len, "the query")
        && fits(upper.len >= 4 * s.count, "what is written")
        && fits(weights.len / 8 == nibbles.len / s.width, "weights")
        && fits(slots_within(&s, nibbles.len / s.width, base.len / 4), "the slots");
    if (right) {
        s.nibbles = nibbles.buf, s.weights = weights.buf;
        s.high = high.buf, s.low = low.buf, s.base = base.buf, s.upper = upper.buf;
        Py_BEGIN_ALLOW_THREADS
        ROWS[path](&s);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *all[] = {&nibbles, &weights, &slots, &high, &low, &base, &upper};
    for (int number = 0; number < 7; number++) PyBuffer_Release(all[number]);
    if (!right) return NULL;
    Py_RETURN_NONE;
}

#define TOGETHER 64  /* rows that are asked from memory at once, and bounded together */

/* Writes the slots of a block's rows whose first and second bound reach a similarity, and returns how many. */
static Py_ssize_t find_reaching(struct rows *s, int path, Py_ssize_t rows, const float *upper, const uint8_t *usable,
                                float first_least, float least, int64_t *found) {
    int64_t slots[TOGETHER];
    float bounds[TOGETHER];
    Py_ssize_t count = 0;
    s->slots = slots, s->upper = bounds, s->count = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        const Py_ssize_t slot = s->first + row;
        if (upper[slot] >= first_least && (!usable || usable[slot])) {
            ask_ahead((const char *)s->nibbles + row * s->width, s->width);
            ask_ahead((const char *)(s->weights + 2 * row), 1);
            slots[s->count++] = slot;
        }
        if (s->count < TOGETHER && row + 1 < rows) continue;
        ROWS[path](s);
        for (Py_ssize_t number = 0; number < s->count; number++)
            if (bounds[number] >= least) found[count++] = slots[number];
        s->count = 0;
    }
    return count;
}

static PyObject *reach_rows(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer nibbles, weights, high, low, base, upper, usable, found;
    Py_ssize_t rows, count = 0;
    float first_least, least;
    struct rows s;
    if (!PyArg_ParseTuple(args, "sy*y*nny*y*y*(ffff)y*y*ffw*", &name, &nibbles, &weights, &s.first, &rows, &high, &low,
                          &base, &s.step, &s.shift, &s.spread, &s.rounding, &upper, &usable, &first_least, &least, &found))
        return NULL;
    int path = path_of(name);
    s.width = high.len / 2;
    int right = path >= 0 && fits(s.width > 0 && s.width % 64 == 0 && low.len == high.len, "the query")
        && fits(s.first >= 0 && rows >= 0 && nibbles.len / s.width >= rows && weights.len / 8 >= rows, "the rows")
        && fits(base.len / 4 >= s.first + rows && upper.len / 4 >= s.first + rows, "the bounds")
        && fits(usable.len == 0 || usable.len >= s.first + rows, "what is usable")
        && fits(found.len / 8 >= rows, "what is written");
    if (right) {
        s.nibbles = nibbles.buf, s.weights = weights.buf, s.high = high.buf, s.low = low.buf, s.base = base.buf;
        Py_BEGIN_ALLOW_THREADS
        count = find_reaching(&s, path, rows, upper.buf, usable.len ? usable.buf : NULL, first_least, least, found.buf);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *all[] = {&nibbles, &weights, &high, &low, &base, &upper, &usable, &found};
    for (int number = 0; number < 8; number++) PyBuffer_Release(all[number]);
    if (!right) return NULL;
    return PyLong_FromSsize_t(count);
}

/* Buffers of a sequence of objects, each of at least one byte a unit; NULL with an exception. */
static Py_buffer *buffers_of(PyObject *blocks, Py_ssize_t *count) {
    *count = PySequence_Size(blocks);
    if (*count < 0) return NULL;
    Py_buffer *found = PyMem_Calloc(*count + 1, sizeof *found);
    if (!found) return (Py_buffer *)PyErr_NoMemory();
    for (Py_ssize_t number = 0; number < *count; number++) {
        PyObject *block = PySequence_GetItem(blocks, number);
        int failed = !block || PyObject_GetBuffer(block, found + number, PyBUF_SIMPLE) < 0;
        Py_XDECREF(block);
        if (!failed) continue;
        while (number--) PyBuffer_Release(found + number);
        PyMem_Free(found);
        return NULL;
    }
    return found;
}

static void release_all(Py_buffer *buffers, Py_ssize_t count) {
    for (Py_ssize_t number = 0; buffers && number < count; number++) PyBuffer_Release(buffers + number);
    PyMem_Free(buffers);
}

static PyObject *score_rows(PyObject *self, PyObject *args) {
    const char *name;
    PyObject *list;
    Py_buffer slots, owners, queries, similarity;
    Py_ssize_t size, dim, width, blocks = 0;
    if (!PyArg_ParseTuple(args, "sOnnny*y*y*w*", &name, &list, &size, &dim, &width, &slots, &owners, &queries, &similarity))
        return NULL;
    Py_buffer *rows = NULL;
    int path = path_of(name);
    const int64_t *places = slots.buf, *who = owners.buf;
    const Py_ssize_t count = slots.len / 8;
    int right = path >= 0 && fits(size > 0 && dim > 0 && (width == 2 || width == 4), "the rows")
        && fits(owners.len == slots.len && similarity.len == slots.len, "what is written")
        && (rows = buffers_of(list, &blocks)) != NULL;
    for (Py_ssize_t number = 0; right && number < count; number++) {
        const int64_t block = places[number] / size;
        right = fits(places[number] >= 0 && block < blocks && rows[block].len / (dim * width) > places[number] % size, "the slots")
            && fits(who[number] >= 0 && queries.len / (8 * dim) > who[number], "the queries");
    }
    if (right) {
        double (*const score)(const struct score *) = width == 2 ? HALVES[path] : SINGLES[path];
        double *written = similarity.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t number = 0; number < count; number++) {
            const char *row = (const char *)rows[places[number] / size].buf + places[number] % size * dim * width;
            struct score s = {row, (const double *)queries.buf + who[number] * dim, dim};
#if X86
            if (number + AHEAD < count) {
                const int64_t later = places[number + AHEAD];
                const char *next = (const char *)rows[later / size].buf + later % size * dim * width;
                for (Py_ssize_t place = 0; place < dim * width; place += 64) _mm_prefetch(next + place, _MM_HINT_T0);
            }
#endif
            written[number] = score(&s);
        }
        Py_END_ALLOW_THREADS
    }
    release_all(rows, blocks);
    Py_buffer *all[] = {&slots, &owners, &queries, &similarity};
    for (int number = 0; number < 4; number++) PyBuffer_Release(all[number]);
    if (!right) return NULL;
    Py_RETURN_NONE;
}

enum { ROW_BLOCKS, ID_BLOCKS, BYTE_BLOCKS, SCALE_BLOCKS, RESIDUAL_BLOCKS, LISTS };

/* Bytes of a row in the blocks of each list. */
static Py_ssize_t bytes_in(const struct search *s, int list) {
    const Py_ssize_t sizes[LISTS] = {s->dim * s->width, 8, s->dim, 4, 4};
    return sizes[list];
}

/* Whether the blocks of a list hold all rows in use; what is multiplied is read in whole tiles. */
static int blocks_fit(const struct search *s, int list, const Py_buffer *blocks, Py_ssize_t count) {
    if (!fits(count >= (s->slots + s->size - 1) / s->size, "the blocks")) return 0;
    for (Py_ssize_t block = 0; block * s->size < s->slots; block++) {
        const Py_ssize_t left = s->slots - block * s->size, used = left < s->size ? left : s->size;
        const Py_ssize_t read = list == ID_BLOCKS ? used : (used + TILE - 1) / TILE * TILE;
        if (!fits(blocks[block].len / bytes_in(s, list) >= read, list == ID_BLOCKS ? "the ids" : "the rows")) return 0;
    }
    return 1;
}

/* Memory of a search in one piece, and where the blocks begin; NULL with an exception. */
static char *prepare_search(struct search *s, Py_buffer *const lists[LISTS], int given) {
    const Py_ssize_t slots = (s->slots + TILE - 1) / TILE * TILE, blocks = (s->slots + s->size - 1) / s->size;
    const Py_ssize_t together = given < LISTS ? 0 : s->count < SIDE ? s->count : SIDE;
    char *memory = PyMem_Malloc(given * blocks * sizeof(void *) + s->crowd * sizeof(struct candidate)
                                + s->dim * sizeof(double) + ((together + 2) * slots + s->most) * sizeof(float)
                                + together * 2 * s->dim);
    if (!memory) return (char *)PyErr_NoMemory();
    const void **starts = (const void **)memory;
    for (int list = 0; list < given; list++)
        for (Py_ssize_t block = 0; block < blocks; block++) starts[list * blocks + block] = lists[list][block].buf;
    s->rows = (const char *const *)starts, s->ids = (const int64_t *const *)(starts + ID_BLOCKS * blocks);
    if (given == LISTS) {
        s->bytes = (const char *const *)(starts + BYTE_BLOCKS * blocks);
        s->scales = (const float *const *)(starts + SCALE_BLOCKS * blocks);
        s->residuals = (const float *const *)(starts + RESIDUAL_BLOCKS * blocks);
    }
    s->candidates = (struct candidate *)(starts + given * blocks);
    s->precise = (double *)(s->candidates + s->crowd);
    s->upper = (float *)(s->precise + s->dim), s->lower = s->upper + slots;
    s->products = s->lower + slots;
    s->best = s->products + together * slots;
    s->parts = (int8_t *)(s->best + s->most);
    return memory;
}

/* Whether the numbers of a search fit together, and each k is from one to the most that are wanted. */
static int search_fits(const struct search *s, const Py_buffer *queries, const Py_buffer *groups, const Py_buffer *wanted,
                       const Py_buffer *slots) {
    if (!fits(s->size > 0 && s->size % TILE == 0 && s->slots > 0, "the slots")) return 0;
    if (!fits(s->dim > 0 && (s->width == 1 || s->width == 2 || s->width == 4), "the rows")) return 0;
    if (!fits(s->count > 0 && queries->len == 4 * s->dim * s->count, "the queries")) return 0;
    if (!fits(groups->len == 0 || groups->len >= s->slots, "the groups")) return 0;
    if (!fits(s->searches > 0 && s->most > 0 && s->crowd >= s->most, "what is wanted")) return 0;
    for (Py_ssize_t number = 0; number < s->searches; number++) {
        const int64_t k = ((const int64_t *)wanted->buf)[2 * number];
        if (!fits(k > 0 && k <= s->most, "what is wanted")) return 0;
    }
    return fits(slots->len == 8 * s->count * s->searches * s->most, "what is written");
}

static PyObject *nearest_rows(PyObject *self, PyObject *args) {
    const char *name;
    PyObject *objects;
    Py_buffer queries, groups, wanted, slots, ids, similarity, settled, *lists[LISTS] = {NULL};
    Py_ssize_t counts[LISTS] = {0}, settled_ones = 0;
    struct search s;
    memset(&s, 0, sizeof s);
    if (!PyArg_ParseTuple(args, "sOnniny*y*y*nndw*w*w*w*", &name, &objects, &s.size, &s.dim, &s.width, &s.slots, &queries,
                          &groups, &wanted, &s.most, &s.crowd, &s.slack, &slots, &ids, &similarity, &settled))
        return NULL;
    const int path = path_of(name);
    const Py_ssize_t given = PySequence_Size(objects);
    char *memory = NULL;
    s.count = settled.len, s.searches = wanted.len / 16;
    int right = path >= 0 && fits((given == BYTE_BLOCKS && s.width > 1) || (given == LISTS && s.dim <= LONGEST), "the lists")
        && search_fits(&s, &queries, &groups, &wanted, &slots)
        && fits(ids.len == slots.len && similarity.len == slots.len, "what is written");
    for (int list = 0; right && list < given; list++) {
        PyObject *blocks = PySequence_GetItem(objects, list);
        right = blocks && (lists[list] = buffers_of(blocks, counts + list)) != NULL
            && blocks_fit(&s, list, lists[list], counts[list]);
        Py_XDECREF(blocks);
    }
    if (right) right = (memory = prepare_search(&s, lists, (int)given)) != NULL;
    if (right) {
        s.queries = queries.buf, s.groups = groups.len ? groups.buf : NULL, s.wanted = wanted.buf;
        s.found_slots = slots.buf, s.found_ids = ids.buf, s.found = similarity.buf, s.settled = settled.buf;
        Py_BEGIN_ALLOW_THREADS
        settled_ones = search_all(&s, path);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(memory);
    for (int list = 0; list < LISTS; list++) release_all(lists[list], counts[list]);
    Py_buffer *all[] = {&queries, &groups, &wanted, &slots, &ids, &similarity, &settled};
    for (int number = 0; number < 7; number++) PyBuffer_Release(all[number]);
    if (!right) return NULL;
    return PyLong_FromSsize_t(settled_ones);
}

static PyObject *coarse_rows(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer rows, bytes, scales, residuals;
    struct coarse c;
    if (!PyArg_ParseTuple(args, "sy*nw*w*w*", &name, &rows, &c.dim, &bytes, &scales, &residuals)) return NULL;
    const int path = path_of(name);
    c.count = scales.len / 4;
    const int right = path >= 0 && fits(c.dim > 0 && rows.len == 4 * c.dim * c.count, "the rows")
        && fits(bytes.len == c.dim * c.count && residuals.len == scales.len, "what is written");
    if (right) {
        c.rows = rows.buf, c.bytes = bytes.buf, c.scales = scales.buf, c.residuals = residuals.buf;
        Py_BEGIN_ALLOW_THREADS
        COARSE[path](&c);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *all[] = {&rows, &bytes, &scales, &residuals};
    for (int number = 0; number < 4; number++) PyBuffer_Release(all[number]);
    if (!right) return NULL;
    Py_RETURN_NONE;
}

static PyObject *have_direction(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer given;
    struct features f;
    int directed = 0;
    if (!PyArg_ParseTuple(args, "sy*n", &name, &given, &f.dim)) return NULL;
    const int path = path_of(name);
    const int right = path >= 0 && fits(f.dim > 0 && given.len % (4 * f.dim) == 0, "the features");
    if (right) {
        f.given = given.buf, f.made = NULL, f.count = given.len / (4 * f.dim);
        directed = DIRECTED[path](&f);
    }
    PyBuffer_Release(&given);
    if (!right) return NULL;
    return PyBool_FromLong(directed);
}

static PyObject *unit_rows(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer given, made;
    struct features f;
    int finite = 0;
    if (!PyArg_ParseTuple(args, "sy*nw*", &name, &given, &f.dim, &made)) return NULL;
    const int path = path_of(name);
    const int right = path >= 0 && fits(f.dim > 0 && f.dim <= LONGEST_SQUARES && given.len % (4 * f.dim) == 0, "the features")
        && fits(made.len == given.len, "what is written");
    if (right) {
        f.given = given.buf, f.made = made.buf, f.count = given.len / (4 * f.dim);
        Py_BEGIN_ALLOW_THREADS
        finite = UNITS[path](&f);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&given);
    PyBuffer_Release(&made);
    if (!right) return NULL;
    return PyBool_FromLong(finite);
}

/* Whether the buffers of products have the sizes that follow from the numbers of tiles and queries. */
static int products_fit(const struct products *p, const Py_buffer *rows, const Py_buffer *queries, const Py_buffer *steps,
                        const Py_buffer *out) {
    const Py_ssize_t numbers = p->queries * p->dim;
    return fits(p->tiles >= 0 && p->dim > 0 && (p->width == 1 || p->width == 2 || p->width == 4), "the rows")
        && fits(rows->len >= p->tiles * TILE * p->dim * p->width, "the rows")
        && fits(p->queries > 0 && queries->len == numbers * (p->width == 1 ? 2 : 4), "the queries")
        && fits(p->width != 1 || (p->dim <= LONGEST && steps->len == p->queries * 8), "the steps")
        && fits(out->len >= p->tiles * p->queries * TILE * 4, "what is written");
}

static PyObject *multiply_rows(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer rows, queries, steps, out;
    struct products p;
    if (!PyArg_ParseTuple(args, "sy*innny*y*w*", &name, &rows, &p.width, &p.tiles, &p.dim, &p.queries, &queries, &steps, &out))
        return NULL;
    const int path = path_of(name);
    const int right = path >= 0 && products_fit(&p, &rows, &queries, &steps, &out);
    if (right) {
        p.rows = rows.buf, p.floats = queries.buf, p.bytes = queries.buf, p.steps = steps.buf, p.out = out.buf;
        Py_BEGIN_ALLOW_THREADS
        PRODUCTS[path](&p);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *all[] = {&rows, &queries, &steps, &out};
    for (int number = 0; number < 4; number++) PyBuffer_Release(all[number]);
    if (!right) return NULL;
    Py_RETURN_NONE;
}

enum { HEAD, WEIGHTS, NIBBLES, FACTORS, GROUPS, QUERY_NIBBLES, QUERY_HEADS, CENTERS, QUERY_NUMBERS, WANTED, BEST, FLOORS,
       COUNTS, CANDIDATES, BOUNDS, BUFFERS };

/* Whether all buffers of a pass have the sizes that follow from the numbers of queries and tiles. */
static int pass_fits(const struct pass *p, const Py_buffer *b, Py_ssize_t most) {
    const Py_ssize_t tiles = p->tiles, queries = p->queries, hunts = queries * p->wanted;
    const Py_ssize_t sides = (queries + SIDE - 1) / SIDE;
    const int64_t *wanted = b[WANTED].buf;
    for (Py_ssize_t number = 0; number < p->wanted; number++)
        if (!fits(wanted[2 * number] > 0 && wanted[2 * number] <= most, "what is wanted")) return 0;
    return fits(tiles > 0 && p->first >= 0 && p->span > 0 && p->stride > 0 && p->room > 0, "the tiles")
        && fits(p->slots > (p->first + tiles - 1) * LANES && p->slots <= b[GROUPS].len, "groups")
        && fits(p->width > 0 && p->width % 64 == 0 && b[QUERY_NIBBLES].len == sides * p->width * 2 * SIDE
                && b[QUERY_HEADS].len == sides * p->pairs * 4 * SIDE && b[QUERY_NUMBERS].len == queries * NUMBERS * 4,
                "the queries")
        && fits(b[CENTERS].len == queries * p->spans * 4 && (p->first + tiles - 1) / p->span < p->spans, "centers")
        && fits(b[HEAD].len >= tiles * p->pairs * LANES * 2, "head") && fits(b[WEIGHTS].len >= tiles * 3 * LANES * 4, "weights")
        && fits(p->rows >= tiles * LANES, "nibbles") && fits(b[FACTORS].len / 8 >= p->rows, "factors")
        && fits(b[BEST].len == hunts * most * 4 && b[FLOORS].len == hunts * 4 && b[COUNTS].len == hunts * 8
                && b[CANDIDATES].len == hunts * p->room * 8 && b[BOUNDS].len == hunts * p->room * 4, "what is written");
}

static PyObject *hunt_tiles(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer b[BUFFERS];
    struct pass p;
    Py_ssize_t most = 0;
    memset(&p, 0, sizeof p);
    if (!PyArg_ParseTuple(args, "siy*y*y*y*nnnny*ny*y*y*y*nnfy*w*w*w*w*w*n", &name, &p.sampling, b + HEAD,
                          b + WEIGHTS, b + NIBBLES, b + FACTORS, &p.tiles, &p.first, &p.span, &p.stride, b + GROUPS,
                          &p.slots, b + QUERY_NIBBLES, b + QUERY_HEADS, b + CENTERS, b + QUERY_NUMBERS, &p.queries,
                          &p.width, &p.caution, b + WANTED, b + BEST, b + FLOORS, b + COUNTS, b + CANDIDATES,
                          b + BOUNDS, &p.room))
        return NULL;
    p.path = path_of(name);
    int right = p.path >= 0 && fits(p.queries > 0 && p.width > 0 && b[WANTED].len >= 16, "the queries");
    if (right) {
        const Py_ssize_t sides = (p.queries + SIDE - 1) / SIDE;
        p.wanted = b[WANTED].len / 16;
        p.pairs = b[QUERY_HEADS].len / (4 * SIDE * sides);
        p.spans = b[CENTERS].len / (4 * p.queries);
        p.rows = b[NIBBLES].len / p.width;
        most = b[BEST].len / (4 * p.queries * p.wanted);
        right = pass_fits(&p, b, most);
    }
    char *memory = NULL;
    if (right) {
        p.hunts = PyMem_Calloc(p.queries * p.wanted + 1, sizeof *p.hunts);
        memory = PyMem_Calloc(1, (p.width / 4 + p.pairs) * LANES * 4 + 64);
        if (!p.hunts || !memory) PyErr_NoMemory();
        right = p.hunts && memory;
    }
    if (right) {
        const int64_t *wanted = b[WANTED].buf;
        for (Py_ssize_t number = 0; number < p.queries * p.wanted; number++) {
            const Py_ssize_t which = number % p.wanted;
            p.hunts[number] = (struct hunt){
                .group = (int)wanted[2 * which + 1], .k = (Py_ssize_t)wanted[2 * which],
                .best = (float *)b[BEST].buf + number * most, .floor = (float *)b[FLOORS].buf + number,
                .slots = (int64_t *)b[CANDIDATES].buf + number * p.room, .upper = (float *)b[BOUNDS].buf + number * p.room,
                .count = (int64_t *)b[COUNTS].buf + number,
            };
        }
        p.head = b[HEAD].buf, p.weights = b[WEIGHTS].buf, p.nibbles = b[NIBBLES].buf, p.factors = b[FACTORS].buf;
        p.groups = b[GROUPS].buf, p.query_nibbles = b[QUERY_NIBBLES].buf, p.query_heads = b[QUERY_HEADS].buf;
        p.centers = b[CENTERS].buf, p.numbers = b[QUERY_NUMBERS].buf;
        p.memory = memory + (64 - (uintptr_t)memory % 64) % 64;  /* vectors begin with a line of the cache */
        Py_BEGIN_ALLOW_THREADS
        PASSES[p.path](&p);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(p.hunts);
    PyMem_Free(memory);
    for (int number = 0; number < BUFFERS; number++) PyBuffer_Release(b + number);
    if (!right) return NULL;
    Py_RETURN_NONE;
}

enum { ROWS_GIVEN, DIRECTIONS, SCALES, DENSE, SIGNS, LEFTS, RIGHTS, SPLIT_HEADS, TAILS, SPLIT_BUFFERS,
       CENTER = SPLIT_BUFFERS, CODED_HEAD, CODED_BITS, CODED_WEIGHTS, CODED_NIBBLES, CODED_FACTORS, LENGTHS,
       ENCODER_BUFFERS };

/* Takes over what rows are split by, if it fits. */
static int prepare_encoder(struct encoder *e, const Py_buffer *b) {
    const Py_ssize_t padded = e->padded, heads = b[SCALES].len / 8, side = padded / 64;
    if (!fits(e->dim > 0 && e->dim <= padded && padded % 128 == 0 && b[ROWS_GIVEN].len % (8 * e->dim) == 0, "the rows")
        || !fits(heads > 0 && b[DIRECTIONS].len == heads * e->dim * 8, "the directions")
        || !fits(b[DENSE].len == padded * padded * 8
                     || (b[DENSE].len == 0 && b[SIGNS].len == 16 * padded && b[LEFTS].len == 16 * side * side
                         && b[RIGHTS].len == 16 * 64 * 64),
                 "the rotation"))
        return 0;
    e->count = b[ROWS_GIVEN].len / (8 * e->dim), e->heads = heads;
    if (!fits(b[SPLIT_HEADS].len == e->count * heads * 8 && b[TAILS].len == e->count * padded * 8, "what is written")) return 0;
    e->rows = b[ROWS_GIVEN].buf, e->directions = b[DIRECTIONS].buf, e->scales = b[SCALES].buf;
    e->dense = b[DENSE].len ? b[DENSE].buf : NULL;
    e->signs = b[SIGNS].buf, e->lefts = b[LEFTS].buf, e->rights = b[RIGHTS].buf;
    e->split_heads = b[SPLIT_HEADS].buf, e->tails = b[TAILS].buf;
    e->room = PyMem_Calloc(padded, sizeof(double));
    if (!e->room) PyErr_NoMemory();
    return e->room != NULL;
}

static PyObject *encoded(int path, int right, struct encoder *e, Py_buffer *b, int buffers) {
    if (right) {
        Py_BEGIN_ALLOW_THREADS
        ENCODERS[path](e);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(e->room);
    for (int number = 0; number < buffers; number++) PyBuffer_Release(b + number);
    if (!right) return NULL;
    Py_RETURN_NONE;
}

static PyObject *split_rows(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer b[SPLIT_BUFFERS];
    struct encoder e;
    memset(&e, 0, sizeof e);
    if (!PyArg_ParseTuple(args, "snny*y*y*y*y*y*y*w*w*", &name, &e.dim, &e.padded, b, b + 1, b + 2, b + 3, b + 4, b + 5,
                          b + 6, b + 7, b + 8))
        return NULL;
    const int path = path_of(name);
    const int right = path >= 0 && prepare_encoder(&e, b);
    return encoded(path, right, &e, b, SPLIT_BUFFERS);
}

static PyObject *encode_rows(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer b[ENCODER_BUFFERS];
    struct encoder e;
    memset(&e, 0, sizeof e);
    if (!PyArg_ParseTuple(args, "snny*y*y*y*y*y*y*w*w*y*nddw*w*w*w*w*w*", &name, &e.dim, &e.padded, b, b + 1, b + 2, b + 3,
                          b + 4, b + 5, b + 6, b + 7, b + 8, b + 9, &e.signed_part, &e.nibble_step, &e.useful, b + 10,
                          b + 11, b + 12, b + 13, b + 14, b + 15))
        return NULL;
    const int path = path_of(name);
    const Py_ssize_t part = e.signed_part;
    int right = path >= 0 && prepare_encoder(&e, b);
    if (right) {
        const Py_ssize_t n = e.count;
        right = fits(b[CENTER].len == e.padded * 8, "the center")
            && fits(part > 0 && part % 32 == 0 && part <= e.padded, "the signs")
            && fits(b[CODED_HEAD].len == n * e.heads && b[CODED_BITS].len == n * part / 8 && b[CODED_WEIGHTS].len == n * 12
                    && b[CODED_NIBBLES].len == n * e.padded / 2 && b[CODED_FACTORS].len == n * 8 && b[LENGTHS].len == n * 8,
                    "what is written");
        e.center = b[CENTER].buf, e.head = b[CODED_HEAD].buf, e.bits = b[CODED_BITS].buf;
        e.weights = b[CODED_WEIGHTS].buf, e.nibbles = b[CODED_NIBBLES].buf, e.factors = b[CODED_FACTORS].buf;
        e.lengths = b[LENGTHS].buf;
    }
    return encoded(path, right, &e, b, ENCODER_BUFFERS);
}

static PyMethodDef METHODS[] = {
    {"split_rows", split_rows, METH_VARARGS, "See adanpc.index.kernels.split_rows."},
    {"encode_rows", encode_rows, METH_VARARGS, "See adanpc.index.kernels.encode_rows."},
    {"have_direction", have_direction, METH_VARARGS, "See adanpc.index.kernels.have_direction."},
    {"unit_rows", unit_rows, METH_VARARGS, "See adanpc.index.kernels.unit_rows."},
    {"multiply_rows", multiply_rows, METH_VARARGS, "See adanpc.index.kernels.multiply_rows."},
    {"coarse_rows", coarse_rows, METH_VARARGS, "See adanpc.index.kernels.coarse_rows."},
    {"nearest_rows", nearest_rows, METH_VARARGS, "See adanpc.index.kernels.nearest_rows."},
    {"score_rows", score_rows, METH_VARARGS, "See adanpc.index.kernels.score_rows."},
    {"hunt_tiles", hunt_tiles, METH_VARARGS, "See adanpc.index.kernels.hunt_tiles."},
    {"paths", paths, METH_NOARGS, "The names of the kernels that run on this machine, the fastest first."},
    {"scan_tiles", scan_tiles, METH_VARARGS, "See adanpc.index.kernels.scan_tiles."},
    {"reach_rows", reach_rows, METH_VARARGS, "See adanpc.index.kernels.reach_rows."},
    {"bound_rows", bound_rows, METH_VARARGS, "See adanpc.index.kernels.bound_rows."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_kernels", "Bounds of similarities at memory speed.", -1,
                                    METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) {
    for (int path = 0; path < PATHS; path++) runs_here[path] = supported(path);
#if X86
    if (!__builtin_cpu_supports("avx512vpopcntdq")) SCANS[WITH_AVX512] = scan_avx2;
#endif
    return PyModule_Create(&MODULE);
}
