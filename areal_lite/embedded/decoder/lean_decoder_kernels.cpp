// Arithmetic of a layer, and matrix products of few rows: lean_decoder_kernels.py compiles this for one model, in bfloat16
// or with FLOAT32. WIDTH is that of a head, GROUPS the queries that share a key. Sums are float32; rounds where the model's
// own forward does.

#include "bfloat16.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__) && !defined(FLOAT32)  // oneDNN's products with AMX are faster
#define PANEL 48
#include <immintrin.h>
#else
#define PANEL 0
#endif

#ifdef FLOAT32
using Number = float;
static inline float wide(float number) { return number; }
static inline Number stored(float number) { return number; }
#else
using Number = Half;
static inline Number stored(float number) { return narrow(number); }
#endif
static inline float as_stored(float number) { return wide(stored(number)); }

// RMS norm of one row.
static inline void norm_row(const Number* row, const Number* weight, float eps, Count width, Number* out) {
    float power = 0;
#pragma omp simd reduction(+ : power)
    for (Count i = 0; i < width; i++) power += wide(row[i]) * wide(row[i]);
    const float inverse = static_cast<float>(1 / std::sqrt(static_cast<double>(power / width + eps)));
#pragma omp simd
    for (Count i = 0; i < width; i++) out[i] = stored(as_stored(wide(row[i]) * inverse) * wide(weight[i]));
}

// Rotary position embedding of one head; the first half of sin has its sign changed.
static inline void turn(const Number* head, const Number* cos, const Number* sin, Number* out) {
    for (int side = 0; side < 2; side++) {
        const int first = side * (WIDTH / 2), other = WIDTH / 2 - first;
#pragma omp simd
        for (int i = 0; i < WIDTH / 2; i++)
            out[first + i] = stored(as_stored(wide(head[first + i]) * wide(cos[first + i])) +
                                    as_stored(wide(head[other + i]) * wide(sin[first + i])));
    }
}

// Ask memory for a key or value that is read soon.
static inline void fetch(const Number* row) {
    for (int i = 0; i < WIDTH; i += 64 / sizeof(Number)) __builtin_prefetch(row + i);
}

// Attention of the queries that share a key, over `length` keys and values; fetches those that are read after them.
static inline void read(const Number (*queries)[WIDTH], const Number* keys, const Number* values, const Number* next_keys,
                        const Number* next_values, Count length, float scale, float* scores, Number* out) {
    float query[GROUPS][WIDTH], sums[GROUPS][WIDTH] = {}, total[GROUPS];
    for (int g = 0; g < GROUPS; g++)
        for (int i = 0; i < WIDTH; i++) query[g][i] = wide(queries[g][i]) * scale;
    for (Count t = 0; t < length; t++) {
        fetch(next_keys + t * WIDTH);
        fetch(next_values + t * WIDTH);
        float key[WIDTH];
#pragma omp simd
        for (int i = 0; i < WIDTH; i++) key[i] = wide(keys[t * WIDTH + i]);
        for (int g = 0; g < GROUPS; g++) {
            float score = 0;
#pragma omp simd reduction(+ : score)
            for (int i = 0; i < WIDTH; i++) score += key[i] * query[g][i];
            scores[g * length + t] = score;
        }
    }
    for (int g = 0; g < GROUPS; g++) {
        float *row = scores + g * length, top = row[0], sum = 0;
#pragma omp simd reduction(max : top)
        for (Count t = 0; t < length; t++) top = std::max(top, row[t]);
#pragma omp simd reduction(+ : sum)
        for (Count t = 0; t < length; t++) {
            row[t] = std::exp(row[t] - top);
            sum += row[t];
        }
        total[g] = sum;
    }
    for (Count t = 0; t < length; t++) {
        float value[WIDTH];
#pragma omp simd
        for (int i = 0; i < WIDTH; i++) value[i] = wide(values[t * WIDTH + i]);
        for (int g = 0; g < GROUPS; g++) {
            const float weight = scores[g * length + t];
#pragma omp simd
            for (int i = 0; i < WIDTH; i++) sums[g][i] += weight * value[i];
        }
    }
    for (int g = 0; g < GROUPS; g++)
        for (int i = 0; i < WIDTH; i++) out[g * WIDTH + i] = stored(sums[g][i] / total[g]);
}

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));

static inline Floats load(const float* at) {
    Floats numbers;
    std::memcpy(&numbers, at, sizeof numbers);
    return numbers;
}

static inline Floats load(const Half* at) {
    typedef Half Halves __attribute__((vector_size(2 * LANES)));
    typedef std::uint32_t Words __attribute__((vector_size(4 * LANES)));
    Halves halves;
    std::memcpy(&halves, at, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// ROWS rows of states [ROWS, width] times OUTS rows of the weight [OUTS, width]; the sums, PARTS of each, stay in registers.
template <int ROWS, int OUTS, int PARTS>
static inline void tile(const float* states, const Number* weight, const Number* bias, Count width, Count stride,
                        Number* out) {
    Floats sums[OUTS][PARTS][ROWS] = {};
    const auto add = [&](Count i, int o, int part) {
        __builtin_prefetch(weight + o * width + i + 4096 / sizeof(Number));  // hardware stops at the end of a page
        const Floats column = load(weight + o * width + i);
        for (int r = 0; r < ROWS; r++) sums[o][part][r] += column * load(states + r * width + i);
    };
    Count i = 0;
    for (; i + PARTS * LANES <= width; i += PARTS * LANES)
        for (int o = 0; o < OUTS; o++)
            for (int part = 0; part < PARTS; part++) add(i + part * LANES, o, part);
    for (; i < width; i += LANES)
        for (int o = 0; o < OUTS; o++) add(i, o, 0);
    for (int o = 0; o < OUTS; o++)
        for (int r = 0; r < ROWS; r++) {
            Floats lanes = sums[o][0][r];
            for (int part = 1; part < PARTS; part++) lanes += sums[o][part][r];
            float sum = bias ? wide(bias[o]) : 0;
            for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
            out[r * stride + o] = stored(sum);
        }
}

// Few rows read the weight row by row, as fast as memory gives it; many rows compute OUTS of its rows at once.
template <int OUTS>
static void strip(const float* states, const Number* weight, const Number* bias, Count rows, Count width, Count stride,
                  Number* out) {
    constexpr decltype(&tile<1, 1, 2>) few[] = {tile<1, 1, 2>, tile<2, 1, 2>, tile<3, 1, 2>, tile<4, 1, 2>};
    if (rows <= 4) {
        for (int o = 0; o < OUTS; o++)
            few[rows - 1](states, weight + o * width, bias ? bias + o : nullptr, width, stride, out + o);
        return;
    }
    Count row = 0;
    for (; row + 3 <= rows; row += 3)
        tile<3, OUTS, 1>(states + row * width, weight, bias, width, stride, out + row * stride);
    for (; row < rows; row++)
        tile<1, OUTS, 1>(states + row * width, weight, bias, width, stride, out + row * stride);
}

#if PANEL
// ROWS rows of states [ROWS, width] times a panel [width / 2, PANEL, 2], of which `count` outs are stored.
template <int ROWS>
static void panel_tile(const Half* states, const Half* panel, const float* bias, Count width, Count stride, Count count,
                       Half* out) {
    constexpr int VECTORS = PANEL / LANES;
    __m512 sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_loadu_ps(bias + v * LANES);
    for (Count pair = 0; pair < width / 2; pair++) {
        __m512i columns[VECTORS];
        for (int v = 0; v < VECTORS; v++) columns[v] = _mm512_loadu_si512(panel + 2 * (pair * PANEL + v * LANES));
        for (int r = 0; r < ROWS; r++) {
            int state;
            std::memcpy(&state, states + r * width + 2 * pair, sizeof state);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(state);
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, (__m512bh)columns[v]);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        Half row[PANEL];
        for (int v = 0; v < VECTORS; v++) {
            const __m256bh numbers = _mm512_cvtneps_pbh(sums[r][v]);
            std::memcpy(row + v * LANES, &numbers, sizeof numbers);
        }
        std::memcpy(out + r * stride, row, count * sizeof(Half));
    }
}
#endif

extern "C" {

// outs of a panel; 0 without the instructions
extern const int panel = PANEL;

// n tokens: stores their keys and values, each at its slot's column, then reads the last `window` columns of the slot up
// to that one.
// states [n, (GROUPS + 2) * heads, WIDTH]: queries, keys, values; cos, sin [n, WIDTH]; keys, values [slots, heads,
// capacity, WIDTH]; out [n, heads * GROUPS, WIDTH]. The norms of queries and keys may be null.
void attend(const Number* states, const Number* cos, const Number* sin, const Number* query_norm, const Number* key_norm, float eps,
            Number* keys, Number* values, const Count* slots, const Count* columns, Count n, Count heads, Count capacity,
            Count window, float scale, Number* out, int threads) {
    const auto turned = [=](Count row, Count number, const Number* norm, Number* target) {
        Number normed[WIDTH];
        const Number* source = states + (row * (GROUPS + 2) * heads + number) * WIDTH;
        if (norm) norm_row(source, norm, eps, WIDTH, normed);
        turn(norm ? normed : source, cos + row * WIDTH, sin + row * WIDTH, target);
    };
    const auto start = [=](Count pair) { return (slots[pair / heads] * heads + pair % heads) * capacity * WIDTH; };
    const auto begin = [=](Count pair) { return std::max<Count>(columns[pair / heads] + 1 - window, 0); };
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (Count pair = 0; pair < n * heads; pair++) {
            const Count row = pair / heads, head = pair % heads, column = start(pair) + columns[row] * WIDTH;
            turned(row, GROUPS * heads + head, key_norm, keys + column);
            const Number* value = states + ((row * (GROUPS + 2) + GROUPS + 1) * heads + head) * WIDTH;
            std::memcpy(values + column, value, WIDTH * sizeof(Number));
        }
        std::vector<float> scores;
#pragma omp for schedule(dynamic, std::clamp<Count>(n * heads / (4 * threads), 1, 8 * heads))
        for (Count pair = 0; pair < n * heads; pair++) {
            const Count row = pair / heads, head = pair % heads, length = columns[row] + 1 - begin(pair);
            Number queries[GROUPS][WIDTH];
            for (int g = 0; g < GROUPS; g++) turned(row, head * GROUPS + g, query_norm, queries[g]);
            const Count after = std::min(pair + 1, n * heads - 1);
            const Count first = start(pair) + begin(pair) * WIDTH, next = start(after) + begin(after) * WIDTH;
            scores.resize(GROUPS * length);
            read(queries, keys + first, values + first, keys + next, values + next, length, scale, scores.data(),
                 out + pair * GROUPS * WIDTH);
        }
    }
}

// hidden [n, width] += added, and its RMS norm.
void add_norm(Number* hidden, const Number* added, const Number* weight, float eps, Count n, Count width, Number* out,
              int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        Number* own = hidden + row * width;
#pragma omp simd
        for (Count i = 0; i < width; i++) own[i] = stored(wide(own[i]) + wide(added[row * width + i]));
        norm_row(own, weight, eps, width, out + row * width);
    }
}

// silu(gate) * up of joined rows [n, 2 * width].
void gated_silu(const Number* joined, Count n, Count width, Number* out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        const Number *gate = joined + 2 * row * width, *up = gate + width;
#pragma omp simd
        for (Count i = 0; i < width; i++) {
            const float x = bounded(wide(gate[i]));
            out[row * width + i] = stored(as_stored(x / (1 + std::exp(-x))) * wide(up[i]));
        }
    }
}

// states [n, width] times weight [outs, width], plus bias, which may be null; the width is a multiple of 16.
void product(const Number* states, const Number* weight, const Number* bias, Count n, Count width, Count outs,
             Number* out, int threads) {
    constexpr Count ROWS = 48, OUTS = 4;  // the wide states of so many rows stay in the cache
    std::vector<float> rows(std::min(n, ROWS) * width);
    for (Count first = 0; first < n; first += ROWS) {
        const Count count = std::min(n - first, ROWS), strips = outs / OUTS;
        for (Count i = 0; i < count * width; i++) rows[i] = wide(states[first * width + i]);
        const auto run = [&, target = out + first * outs](auto compute, Count o) {
            compute(rows.data(), weight + o * width, bias ? bias + o : nullptr, count, width, outs, target + o);
        };
#pragma omp parallel for num_threads(threads)
        for (Count i = 0; i < strips; i++) run(strip<OUTS>, i * OUTS);
        for (Count o = strips * OUTS; o < outs; o++) run(strip<1>, o);
    }
}

// The same from panels [outs / PANEL, width / 2, PANEL, 2] of the weight; a sum's order does not depend on other rows.
void packed_product(const Half* states, const Half* panels, const Half* bias, Count n, Count width, Count outs, Half* out,
                    int threads) {
#if PANEL
    constexpr int ROWS = 8;  // their sums are in registers
    constexpr decltype(&panel_tile<1>) tiles[] = {panel_tile<1>, panel_tile<2>, panel_tile<3>, panel_tile<4>,
                                                  panel_tile<5>, panel_tile<6>, panel_tile<7>, panel_tile<8>};
    const Count count = (outs + PANEL - 1) / PANEL;
    const Count each = std::clamp<Count>(n * count / (4 * threads) / ROWS * ROWS, ROWS, 64), parts = (n + each - 1) / each;
#pragma omp parallel for num_threads(threads) schedule(guided)
    for (Count task = 0; task < count * parts; task++) {
        const Count first = task / parts * PANEL, size = std::min<Count>(outs - first, PANEL);
        float added[PANEL] = {};
        for (Count o = 0; bias && o < size; o++) added[o] = wide(bias[first + o]);
        const Count end = std::min(n, (task % parts + 1) * each);
        for (Count row = task % parts * each; row < end; row += ROWS)
            tiles[std::min<Count>(end - row, ROWS) - 1](states + row * width, panels + first * width, added, width, outs,
                                                        size, out + row * outs + first);
    }
#endif
}
}
