// Arithmetic of a training pass beside its matrix products: fused_decoder_kernels.py compiles this. Rows are bfloat16 (Half),
// or float32 where sums are kept; arithmetic is float32.
//
// -ffast-math excludes infinities and NaN, and lets the compiler reorder sums and divide through approximate
// reciprocals. So a masked score is a large negative number (UNSEEN), arguments of exp are bounded, and no result may rest on a
// difference that is exactly 0, such as 1 - sigmoid(x) of a large x: CPUs with and without AVX-512 differ in it.

#include "bfloat16.h"

constexpr Count LANES = 16;
using Lanes = float __attribute__((vector_size(LANES * sizeof(float))));

static inline Count whole(Count size) { return (size + LANES - 1) / LANES * LANES; }

// Rows that begin on whole lanes, or with `row` and `column` exchanged, columns.
struct Matrix {
    float* numbers;
    Count row, column = 1;
    float* operator[](Count r) const { return numbers + r * row; }
    Matrix from(Count r, Count c = 0) const { return {numbers + r * row + c, row, column}; }
    Matrix exchanged() const { return {numbers, column, row}; }
};

struct Zeros : Matrix {
    Zeros(Count rows, Count columns) : lanes(rows * whole(columns) / LANES) {
        numbers = reinterpret_cast<float*>(lanes.data());
        row = whole(columns);
    }

  private:
    std::vector<Lanes> lanes;
};

template <int ROWS, int COLUMNS>
static inline void multiply_tile(Matrix left, Matrix right, Matrix out, Count depth, bool add) {
    Lanes sums[ROWS][COLUMNS];
    const auto lanes = [](Matrix matrix, Count r) { return reinterpret_cast<Lanes*>(matrix[r]); };
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = add ? lanes(out, r)[c] : Lanes{};
    for (Count d = 0; d < depth; d++)
        for (int r = 0; r < ROWS; r++) {
            const float factor = left[r][d * left.column];
            for (int c = 0; c < COLUMNS; c++) sums[r][c] += factor * lanes(right, d)[c];
        }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) lanes(out, r)[c] = sums[r][c];
}

template <int ROWS>
static inline void multiply_rows(Matrix left, Matrix right, Matrix out, Count columns, Count depth, bool add) {
    for (Count c = 0; c < columns; c += 4 * LANES) switch ((columns - c) / LANES) {
            case 1: multiply_tile<ROWS, 1>(left, right.from(0, c), out.from(0, c), depth, add); break;
            case 2: multiply_tile<ROWS, 2>(left, right.from(0, c), out.from(0, c), depth, add); break;
            case 3: multiply_tile<ROWS, 3>(left, right.from(0, c), out.from(0, c), depth, add); break;
            default: multiply_tile<ROWS, 4>(left, right.from(0, c), out.from(0, c), depth, add);
        }
}

// out [rows, columns] = left [rows, depth] * right [depth, columns], or adds it; computes whole lanes of columns.
static void multiply(Matrix left, Matrix right, Matrix out, Count rows, Count columns, Count depth, bool add = false) {
    columns = whole(columns);
    Count r = 0;
    for (; r + 6 <= rows; r += 6) multiply_rows<6>(left.from(r), right, out.from(r), columns, depth, add);
    for (; r + 3 <= rows; r += 3) multiply_rows<3>(left.from(r), right, out.from(r), columns, depth, add);
    for (; r < rows; r++) multiply_rows<1>(left.from(r), right, out.from(r), columns, depth, add);
}

static inline void widen(const Half* from, Count n, float factor, float* to, Count step = 1) {
#pragma omp simd
    for (Count i = 0; i < n; i++) to[i * step] = wide(from[i]) * factor;
}

static inline void store(const float* from, Count n, float factor, Half* to) {
#pragma omp simd
    for (Count i = 0; i < n; i++) to[i] = narrow(from[i] * factor);
}

static inline float dot(const float* a, const float* b, Count n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Count i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

constexpr Count TOKENS = 8;       // whose attention is computed at once
constexpr float UNSEEN = -1e30f;  // in place of an infinity, which -ffast-math excludes

// The tokens of all bins, one bin after another, and the form of their states [T, (groups + 2) * heads, width]: queries,
// keys and values; `groups` queries share a key.
struct Layout {
    const float *cos, *sin;      // [T, width / 2]
    const Count* bins_segments;  // [bins + 1], the first segment of each bin
    const Count* query_ends;     // [segments + 1] of the queries, which are the tokens in their order
    const Count* key_ends;       // [segments + 1] of the keys
    const Count* seen;           // the token of each key; a segment's queries are its last keys, and see those up to themselves
    Count bins, heads, groups, width;
    float scale;

    // Where states have a token's head: queries in groups, then keys, then values.
    Count query(Count token, Count head, Count g) const { return at(token, head * groups + g); }
    Count key(Count token, Count head) const { return at(token, groups * heads + head); }
    Count value(Count token, Count head) const { return at(token, (groups + 1) * heads + head); }
    Count at(Count token, Count number) const { return (token * (groups + 2) * heads + number) * width; }
    // The number of a query among all of them.
    Count number(Count token, Count head, Count g) const { return (token * heads + head) * groups + g; }

    // Rotary position embedding of a head; `sign` -1 turns a gradient back.
    void turn(const float* head, Count token, float sign, Half* out) const {
        const Count half = width / 2;
        const float *c = cos + token * half, *s = sin + token * half;
#pragma omp simd
        for (Count i = 0; i < half; i++) {
            out[i] = narrow(head[i] * c[i] - sign * head[half + i] * s[i]);
            out[half + i] = narrow(head[half + i] * c[i] + sign * head[i] * s[i]);
        }
    }
};

// The queries of a segment and the keys that they see.
struct Segment {
    Count first, queries, keys;  // the token of the first query; how many
    const Count* seen;           // [keys]

    Segment(const Layout& layout, Count s)
        : first(layout.query_ends[s]),
          queries(layout.query_ends[s + 1] - first),
          keys(layout.key_ends[s + 1] - layout.key_ends[s]),
          seen(layout.seen + layout.key_ends[s]) {}
    // How many keys the query sees.
    Count sees(Count query) const { return keys - queries + query + 1; }
};

// Scores of the keys that are seen become exp(score - less), the others 0. Returns their sum.
static float weigh(float* scores, Count seen, Count columns, float less) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Count k = 0; k < seen; k++) {
        scores[k] = std::exp(std::min(std::max(scores[k] - less, -80.0f), 1.0f));
        sum += scores[k];
    }
    std::fill(scores + seen, scores + columns, 0.0f);
    return sum;
}

static void attend_segment(const Layout& layout, const Segment& segment, Count head, const Half* turned, Half* read,
                           float* normalizer) {
    const Count groups = layout.groups, width = layout.width;
    const Zeros queries(segment.queries * groups, width), keys(width, segment.keys), values(segment.keys, width),
        scores(TOKENS * groups, segment.keys), sums(TOKENS * groups, width), totals(1, TOKENS * groups);
    for (Count t = 0; t < segment.queries * groups; t++)
        widen(turned + layout.query(segment.first + t / groups, head, t % groups), width, layout.scale, queries[t]);
    for (Count k = 0; k < segment.keys; k++) {
        widen(turned + layout.key(segment.seen[k], head), width, 1, keys[0] + k, keys.row);
        widen(turned + layout.value(segment.seen[k], head), width, 1, values[k]);
    }
    for (Count begin = 0; begin < segment.queries; begin += TOKENS) {
        const Count end = std::min(begin + TOKENS, segment.queries), rows = (end - begin) * groups;
        const Count columns = segment.sees(end - 1);
        multiply(queries.from(begin * groups), keys, scores, rows, columns, width);
        for (Count r = 0; r < rows; r++) {
            const Count t = begin + r / groups, seen = segment.sees(t);
            float top = UNSEEN;
#pragma omp simd reduction(max : top)
            for (Count k = 0; k < seen; k++) top = std::max(top, scores[r][k]);
            totals[0][r] = weigh(scores[r], seen, whole(columns), top);
            normalizer[layout.number(segment.first + t, head, r % groups)] = top + std::log(totals[0][r]);
        }
        multiply(scores, values, sums, rows, width, columns);
        for (Count r = 0; r < rows; r++) {
            const Count number = layout.number(segment.first + begin + r / groups, head, r % groups);
            store(sums[r], width, 1 / totals[0][r], read + number * width);
        }
    }
}

static void attend_bin(const Layout& layout, Count bin, Count head, const Half* states, Half* turned, Half* read,
                       float* normalizer) {
    const Count groups = layout.groups, width = layout.width;
    const Count begin = layout.bins_segments[bin], end = layout.bins_segments[bin + 1];
    const Zeros own(1, width);
    for (Count t = layout.query_ends[begin]; t < layout.query_ends[end]; t++) {
        const auto turn = [&](Count at) {
            widen(states + at, width, 1, own[0]);
            layout.turn(own[0], t, 1, turned + at);
        };
        for (Count g = 0; g < groups; g++) turn(layout.query(t, head, g));
        turn(layout.key(t, head));
        const Count value = layout.value(t, head);
        std::memcpy(turned + value, states + value, width * sizeof(Half));
    }
    // Only now are the keys of all segments there.
    for (Count s = begin; s < end; s++) attend_segment(layout, {layout, s}, head, turned, read, normalizer);
}

// Adds the gradients of the keys and values that the segment sees to those of the bin, whose first token is `first`.
// Scores are computed again from the kept normalizer instead of kept, which would take memory quadratic in the bin. The
// gradient of a softmax needs the mean of its weights' gradients: the product of what was read with its gradient.
static void attend_gradient_segment(const Layout& layout, const Segment& segment, Count head, const Half* grad,
                                    const Half* turned, const Half* read, const float* normalizer, Count first,
                                    Matrix bin_keys, Matrix bin_values, Half* out) {
    const Count groups = layout.groups, width = layout.width, length = segment.keys;
    const Zeros queries(segment.queries * groups, width), below(segment.queries * groups, width),
        means(1, segment.queries * groups), key(length, width), keys(width, length), values(width, length), own(1, width),
        weights(TOKENS * groups, length), changes(TOKENS * groups, length), grad_queries(TOKENS * groups, width),
        grad_keys(length, width), grad_values(length, width);
    for (Count row = 0; row < segment.queries * groups; row++) {
        const Count t = segment.first + row / groups, number = layout.number(t, head, row % groups);
        widen(turned + layout.query(t, head, row % groups), width, layout.scale, queries[row]);
        widen(grad + number * width, width, 1, below[row]);
        widen(read + number * width, width, 1, own[0]);
        means[0][row] = dot(below[row], own[0], width);
    }
    for (Count k = 0; k < length; k++) {
        const Half* from = turned + layout.key(segment.seen[k], head);
        widen(from, width, 1, key[k]);
        widen(from, width, 1, keys[0] + k, keys.row);
        widen(turned + layout.value(segment.seen[k], head), width, 1, values[0] + k, values.row);
    }
    for (Count begin = 0; begin < segment.queries; begin += TOKENS) {
        const Count end = std::min(begin + TOKENS, segment.queries), rows = (end - begin) * groups;
        const Count columns = segment.sees(end - 1);
        const Matrix own_queries = queries.from(begin * groups), own_below = below.from(begin * groups);
        multiply(own_queries, keys, weights, rows, columns, width);
        multiply(own_below, values, changes, rows, columns, width);
        for (Count r = 0; r < rows; r++) {
            const Count t = begin + r / groups;
            const float less = normalizer[layout.number(segment.first + t, head, r % groups)];
            weigh(weights[r], segment.sees(t), whole(columns), less);
            const float mean = means[0][begin * groups + r];
#pragma omp simd
            for (Count k = 0; k < columns; k++) changes[r][k] = weights[r][k] * (changes[r][k] - mean);
        }
        multiply(changes, key, grad_queries, rows, width, columns);
        multiply(changes.exchanged(), own_queries, grad_keys, columns, width, rows, true);
        multiply(weights.exchanged(), own_below, grad_values, columns, width, rows, true);
        for (Count r = 0; r < rows; r++) {
            const Count token = segment.first + begin + r / groups;
            for (Count i = 0; i < width; i++) grad_queries[r][i] *= layout.scale;
            layout.turn(grad_queries[r], token, -1, out + layout.query(token, head, r % groups));
        }
    }
    for (Count k = 0; k < length; k++) {
        float *to_key = bin_keys[segment.seen[k] - first], *to_value = bin_values[segment.seen[k] - first];
#pragma omp simd
        for (Count i = 0; i < width; i++) to_key[i] += grad_keys[k][i], to_value[i] += grad_values[k][i];
    }
}

static void attend_gradient_bin(const Layout& layout, Count bin, Count head, const Half* grad, const Half* turned,
                                const Half* read, const float* normalizer, Half* out) {
    const Count begin = layout.bins_segments[bin], end = layout.bins_segments[bin + 1], first = layout.query_ends[begin];
    const Count length = layout.query_ends[end] - first;
    const Zeros grad_keys(length, layout.width), grad_values(length, layout.width);
    for (Count s = begin; s < end; s++)
        attend_gradient_segment(layout, {layout, s}, head, grad, turned, read, normalizer, first, grad_keys, grad_values,
                                out);
    for (Count t = 0; t < length; t++) {
        layout.turn(grad_keys[t], first + t, -1, out + layout.key(first + t, head));
        store(grad_values[t], layout.width, 1, out + layout.value(first + t, head));
    }
}

extern "C" {

// Reads values [T, groups * heads, width] of states. Keeps the states with turned queries and keys, and the log of each
// query's softmax denominator [T, groups * heads].
void attend(const Layout* layout, const Half* states, Half* turned, Half* read, float* normalizer, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) collapse(2)
    for (Count bin = 0; bin < layout->bins; bin++)
        for (Count head = 0; head < layout->heads; head++)
            attend_bin(*layout, bin, head, states, turned, read, normalizer);
}

// The gradient of states, from that of what was read.
void attend_gradient(const Layout* layout, const Half* grad, const Half* turned, const Half* read, const float* normalizer,
                     Half* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) collapse(2)
    for (Count bin = 0; bin < layout->bins; bin++)
        for (Count head = 0; head < layout->heads; head++)
            attend_gradient_bin(*layout, bin, head, grad, turned, read, normalizer, out);
}

// total [n, width] = hidden + added, its RMS norm, and the factor [n] that makes a row's mean square 1.
void add_norm(const float* hidden, const Half* added, const float* scale, float eps, Count n, Count width, float* total,
              float* inverse, Half* normed, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        const Count first = row * width;
        float power = 0;
#pragma omp simd reduction(+ : power)
        for (Count i = first; i < first + width; i++) {
            total[i] = hidden[i] + wide(added[i]);
            power += total[i] * total[i];
        }
        const float factor = inverse[row] = 1 / std::sqrt(power / width + eps);
#pragma omp simd
        for (Count i = 0; i < width; i++) normed[first + i] = narrow(total[first + i] * factor * scale[i]);
    }
}

// The gradient of hidden, the same in bfloat16 for what was added, and that of the scale: from those of normed and total.
void norm_gradient(const Half* grad, const float* grad_total, const float* total, const float* scale, const float* inverse,
                   Count n, Count width, float* grad_hidden, Half* grad_added, float* grad_scale, int threads) {
    std::vector<float> sums(threads * width);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Count thread = 0; thread < threads; thread++) {
        float* sum = sums.data() + thread * width;
        for (Count row = n * thread / threads; row < n * (thread + 1) / threads; row++) {
            const Count first = row * width;
            const float factor = inverse[row];
            float radial = 0;
#pragma omp simd reduction(+ : radial)
            for (Count i = 0; i < width; i++) {
                const float product = wide(grad[first + i]) * total[first + i] * factor;
                sum[i] += product;
                radial += product * scale[i];
            }
            radial *= factor * factor / width;
#pragma omp simd
            for (Count i = 0; i < width; i++) {
                const Count at = first + i;
                grad_hidden[at] = grad_total[at] + wide(grad[at]) * scale[i] * factor - total[at] * radial;
                grad_added[at] = narrow(grad_hidden[at]);
            }
        }
    }
    for (Count i = 0; i < width; i++) {
        grad_scale[i] = 0;
        for (Count thread = 0; thread < threads; thread++) grad_scale[i] += sums[thread * width + i];
    }
}

// silu(gate) * up of joined rows [n, 2 * width].
void gate(const Half* joined, Count n, Count width, Half* out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        const Half *gates = joined + 2 * row * width, *ups = gates + width;
#pragma omp simd
        for (Count i = 0; i < width; i++) {
            const float x = bounded(wide(gates[i]));
            out[row * width + i] = narrow(x / (1 + std::exp(-x)) * wide(ups[i]));
        }
    }
}

void gate_gradient(const Half* grad, const Half* joined, Count n, Count width, Half* out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        const Half *gates = joined + 2 * row * width, *ups = gates + width, *own = grad + row * width;
#pragma omp simd
        for (Count i = 0; i < width; i++) {
            const float x = bounded(wide(gates[i])), part = 1 / (1 + std::exp(-x)), above = wide(own[i]);
            // Above 80 the derivative is 1, but `1 - part` may be 1e-7 instead of 0, which an x of 3e38 would multiply.
            out[2 * row * width + i] = narrow(above * wide(ups[i]) * part * (1 + std::min(x, 80.0f) * (1 - part)));
            out[(2 * row + 1) * width + i] = narrow(above * x * part);
        }
    }
}
}
