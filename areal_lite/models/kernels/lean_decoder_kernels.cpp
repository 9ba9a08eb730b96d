// Arithmetic of a layer between its matrix products, in bfloat16: lean_decoder_kernels.py compiles this for one model.
// WIDTH is that of a head, GROUPS the queries that share a key. Sums are float32; rounds where the model's own forward does.

#include "bfloat16.h"

// RMS norm of one row.
static inline void norm_row(const Half* row, const Half* weight, float eps, Count width, Half* out) {
    float power = 0;
#pragma omp simd reduction(+ : power)
    for (Count i = 0; i < width; i++) power += wide(row[i]) * wide(row[i]);
    const float inverse = static_cast<float>(1 / std::sqrt(static_cast<double>(power / width + eps)));
#pragma omp simd
    for (Count i = 0; i < width; i++) out[i] = narrow(rounded(wide(row[i]) * inverse) * wide(weight[i]));
}

// Rotary position embedding of one head; the first half of sin has its sign changed.
static inline void turn(const Half* head, const Half* cos, const Half* sin, Half* out) {
    for (int side = 0; side < 2; side++) {
        const int first = side * (WIDTH / 2), other = WIDTH / 2 - first;
#pragma omp simd
        for (int i = 0; i < WIDTH / 2; i++)
            out[first + i] = narrow(rounded(wide(head[first + i]) * wide(cos[first + i])) +
                                    rounded(wide(head[other + i]) * wide(sin[first + i])));
    }
}

// Ask memory for a key or value that is read soon.
static inline void fetch(const Half* row) {
    for (int i = 0; i < WIDTH; i += 32) __builtin_prefetch(row + i);
}

// Attention of the queries that share a key, over `length` keys and values; fetches those that are read after them.
static inline void read(const Half (*queries)[WIDTH], const Half* keys, const Half* values, const Half* next_keys,
                        const Half* next_values, Count length, float scale, float* scores, Half* out) {
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
        for (int i = 0; i < WIDTH; i++) out[g * WIDTH + i] = narrow(sums[g][i] / total[g]);
}

extern "C" {

// n tokens: stores their keys and values, each at its slot's column, then reads the last `window` columns of the slot up
// to that one.
// states [n, (GROUPS + 2) * heads, WIDTH]: queries, keys, values; cos, sin [n, WIDTH]; keys, values [slots, heads,
// capacity, WIDTH]; out [n, heads * GROUPS, WIDTH]. The norms of queries and keys may be null.
void attend(const Half* states, const Half* cos, const Half* sin, const Half* query_norm, const Half* key_norm, float eps,
            Half* keys, Half* values, const Count* slots, const Count* columns, Count n, Count heads, Count capacity,
            Count window, float scale, Half* out, int threads) {
    const auto turned = [=](Count row, Count number, const Half* norm, Half* target) {
        Half normed[WIDTH];
        const Half* source = states + (row * (GROUPS + 2) * heads + number) * WIDTH;
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
            const Half* value = states + ((row * (GROUPS + 2) + GROUPS + 1) * heads + head) * WIDTH;
            std::memcpy(values + column, value, WIDTH * sizeof(Half));
        }
        std::vector<float> scores;
#pragma omp for schedule(dynamic, std::clamp<Count>(n * heads / (4 * threads), 1, 8 * heads))
        for (Count pair = 0; pair < n * heads; pair++) {
            const Count row = pair / heads, head = pair % heads, length = columns[row] + 1 - begin(pair);
            Half queries[GROUPS][WIDTH];
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
void add_norm(Half* hidden, const Half* added, const Half* weight, float eps, Count n, Count width, Half* out,
              int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        Half* own = hidden + row * width;
#pragma omp simd
        for (Count i = 0; i < width; i++) own[i] = narrow(wide(own[i]) + wide(added[row * width + i]));
        norm_row(own, weight, eps, width, out + row * width);
    }
}

// silu(gate) * up of joined rows [n, 2 * width].
void gated_silu(const Half* joined, Count n, Count width, Half* out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        const Half *gate = joined + 2 * row * width, *up = gate + width;
#pragma omp simd
        for (Count i = 0; i < width; i++) {
            const float x = bounded(wide(gate[i]));
            out[row * width + i] = narrow(rounded(x / (1 + std::exp(-x))) * wide(up[i]));
        }
    }
}
}
