/* Upper bounds of similarities from codes of rows: what must run at the speed of memory.

   adanpc/index/kernels.py says what each function computes, and computes the same in NumPy. All sums are of whole
   numbers, which have no order, and all float arithmetic is one IEEE operation after another, never contracted
   (-ffp-contract=off). So every path here, and NumPy, give the same bits. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512vpopcntdq")))
#else
#define X86 0
#endif

#define LANES 16  /* rows of a tile: number r of each stands side by side with number r of the others */
#define PLANES 4  /* bits of a query's coordinate beside a row's single bit */
#define AHEAD 4   /* rows that are asked from memory before they are needed */

enum path { PLAIN, WITH_AVX2, WITH_AVX512, PATHS };
static const char *const PATH_NAMES[PATHS] = {"plain", "avx2", "avx512"};

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

#if X86

/* The number of bits in each byte. */
AVX2 static inline __m256i bits_of_bytes(__m256i value) {
    const __m256i counts = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,
                                            0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i low = _mm256_shuffle_epi8(counts, _mm256_and_si256(value, nibble));
    __m256i high = _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi16(value, 4), nibble));
    return _mm256_add_epi8(low, high);
}

/* Sums of the four bytes, or of the two bytes' products, of each lane. */
AVX2 static inline __m256i in_lanes(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

AVX2 static void scan_avx2(const struct scan *s) {
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i weights[PLANES] = {ones, _mm256_set1_epi8(2), _mm256_set1_epi8(4), _mm256_set1_epi8(-8)};
    for (Py_ssize_t tile = 0; tile < s->tiles; tile++) {
        int32_t heads[LANES], tails[LANES];
        for (int half = 0; half < 2; half++) {
            const int8_t *head = s->head + tile * s->pairs * LANES * 2 + half * LANES;
            const uint32_t *bits = s->bits + tile * s->words * LANES + half * LANES / 2;
            __m256i sum = _mm256_setzero_si256(), tail = _mm256_setzero_si256();
            for (Py_ssize_t pair = 0; pair < s->pairs; pair++, head += 2 * LANES) {
                int32_t query;
                memcpy(&query, s->query_head + 2 * pair, sizeof query);
                __m256i row = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)head));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(row, _mm256_set1_epi32(query)));
            }
            for (Py_ssize_t word = 0; word < s->words; word++, bits += LANES) {
                __m256i row = _mm256_loadu_si256((const __m256i *)bits);
                __m256i total = _mm256_setzero_si256();
                for (int plane = 0; plane < PLANES; plane++) {
                    __m256i query = _mm256_set1_epi32(whole(s->query_bits[word * PLANES + plane]));
                    __m256i count = bits_of_bytes(_mm256_and_si256(row, query));
                    total = _mm256_add_epi16(total, _mm256_maddubs_epi16(count, weights[plane]));
                }
                tail = _mm256_add_epi32(tail, in_lanes(total));
            }
            _mm256_storeu_si256((__m256i *)(heads + half * LANES / 2), sum);
            _mm256_storeu_si256((__m256i *)(tails + half * LANES / 2), tail);
        }
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

AVX512 static inline __m512i common_bits(__m512i row, uint32_t query) {
    return _mm512_popcnt_epi32(_mm512_and_si512(row, _mm512_set1_epi32(whole(query))));
}

AVX512 static void scan_avx512(const struct scan *s) {
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

#endif

static void (*const SCANS[PATHS])(const struct scan *) = {
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

static int runs_here(int path) {
#if X86
    __builtin_cpu_init();
    if (path == WITH_AVX2) return __builtin_cpu_supports("avx2");
    if (path == WITH_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")
            && __builtin_cpu_supports("avx512vpopcntdq");
#endif
    return path == PLAIN;
}

static PyObject *paths(PyObject *self, PyObject *unused) {
    PyObject *names = PyList_New(0);
    for (int path = PATHS - 1; names && path >= 0; path--) {
        if (!runs_here(path)) continue;
        PyObject *name = PyUnicode_FromString(PATH_NAMES[path]);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

/* The number of a path that runs here, or -1 with an exception. */
static int path_of(const char *name) {
    for (int path = 0; path < PATHS; path++)
        if (strcmp(name, PATH_NAMES[path]) == 0 && runs_here(path)) return path;
    PyErr_Format(PyExc_ValueError, "no kernels '%s' run on this machine", name);
    return -1;
}

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

static PyMethodDef METHODS[] = {
    {"paths", paths, METH_NOARGS, "The names of the kernels that run on this machine, the fastest first."},
    {"scan_tiles", scan_tiles, METH_VARARGS, "See adanpc.index.kernels.scan_tiles."},
    {"bound_rows", bound_rows, METH_VARARGS, "See adanpc.index.kernels.bound_rows."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_kernels", "Bounds of similarities at memory speed.", -1,
                                    METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&MODULE); }
