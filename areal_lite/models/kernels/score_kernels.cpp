// Scores of tokens from rows of logits [n, width], and the gradient of the logits: score_kernels.py compiles this.
// `factor` is what logits are multiplied with, 1 / temperature.

#include "bfloat16.h"

extern "C" {

// Per row: log-prob of the target, entropy, sum of squared probabilities, and the log of the softmax denominator.
void score(const Half* logits, const Count* targets, float factor, Count n, Count width, float* chosen, float* entropy,
           float* squared, float* normalizer, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        const Half* own = logits + row * width;
        float top = wide(own[0]) * factor, sum = 0, squares = 0, distance = 0;
#pragma omp simd reduction(max : top)
        for (Count i = 0; i < width; i++) top = std::max(top, wide(own[i]) * factor);
#pragma omp simd reduction(+ : sum, squares, distance)
        for (Count i = 0; i < width; i++) {
            const float below = bounded(wide(own[i]) * factor - top), weight = std::exp(below);
            sum += weight;
            squares += weight * weight;
            distance += weight * below;
        }
        normalizer[row] = top + std::log(sum);
        chosen[row] = wide(own[targets[row]]) * factor - normalizer[row];
        entropy[row] = std::log(sum) - distance / sum;
        squared[row] = squares / (sum * sum);
    }
}

// From the gradients of log-probs and entropies.
void score_gradient(const Half* logits, const Count* targets, float factor, const float* normalizer, const float* entropy,
                    const float* grad_chosen, const float* grad_entropy, Count n, Count width, Half* out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        const Half* own = logits + row * width;
        const float of_chosen = grad_chosen[row] * factor, of_entropy = grad_entropy[row] * factor;
        const auto gradient = [&](Count i) {  // dH/dlogit = -p (log p + H); dlogprob/dlogit = [logit is the target's] - p
            const float logprob = bounded(wide(own[i]) * factor - normalizer[row]);
            return -std::exp(logprob) * (of_chosen + of_entropy * (logprob + entropy[row]));
        };
#pragma omp simd
        for (Count i = 0; i < width; i++) out[row * width + i] = narrow(gradient(i));
        out[row * width + targets[row]] = narrow(gradient(targets[row]) + of_chosen);
    }
}

// Per row, an id drawn from softmax(logits / temperature) by inverting its cumulative sum at a uniform number, and its
// log-prob; the first of the most probable ids at temperature 0, which does not divide. First chooses a block of ids, then
// an id of it: that needs no sum of the whole row in float64. A row with a NaN or +inf, or all -inf, gets the log-prob NaN.
void sample(const Half* logits, const float* temperatures, const double* uniforms, Count n, Count width, Count* ids,
            float* logprobs, int threads) {
    constexpr Count BLOCK = 128;
#pragma omp parallel for num_threads(threads)
    for (Count row = 0; row < n; row++) {
        const Half* own = logits + row * width;
        const float factor = temperatures[row] > 0 ? 1 / temperatures[row] : 1;
        float top = wide(own[0]) * factor;
#pragma omp simd reduction(max : top)
        for (Count i = 0; i < width; i++) top = std::max(top, wide(own[i]) * factor);
        const auto weight = [=](Count i) { return std::exp(bounded(wide(own[i]) * factor - top)); };
        std::vector<float> sums((width + BLOCK - 1) / BLOCK);
        double total = 0;
        for (Count b = 0; b < static_cast<Count>(sums.size()); b++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (Count i = b * BLOCK; i < std::min(width, (b + 1) * BLOCK); i++) sum += weight(i);
            total += sums[b] = sum;
        }
        Count id = 0, last = width - 1;
        if (temperatures[row] > 0) {
            double left = uniforms[row] * total;
            for (; (id + 1) * BLOCK < width && left >= sums[id]; id++) left -= sums[id];
            last = std::min(last, (id + 1) * BLOCK - 1);
            for (id *= BLOCK; id < last && left >= weight(id); id++) left -= weight(id);
        } else
            while (id < last && wide(own[id]) < top) id++;
        ids[row] = id;
        logprobs[row] = wide(own[id]) * factor - top - static_cast<float>(std::log(total));
        Half largest = 0;  // by their bits, because -ffast-math excludes NaN and infinities
#pragma omp simd reduction(max : largest)
        for (Count i = 0; i < width; i++) largest = std::max<Half>(largest, own[i] & 0x7FFF);
        const auto broken = [](Half half) { return half != 0xFF80 && (half & 0x7FFF) >= 0x7F80; };
        const auto excluded = [](Half half) { return half == 0xFF80; };
        if (largest >= 0x7F80 && (std::any_of(own, own + width, broken) || std::all_of(own, own + width, excluded)))
            std::memset(logprobs + row, 0xFF, sizeof(float));
    }
}
}
