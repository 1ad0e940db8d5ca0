// Lloyd's algorithm on bits: each token goes to the centre from which it differs in the fewest, and each bit of a centre becomes
// that of the majority of its tokens.
#include "rows.h"

#include <vector>

namespace {

struct Clusters {
    long batch, heads, n, bits, clusters, iterations, threads;
    const char* x;        // (batch heads n bits): a bit is whether a number is zero or above
    const uint8_t* real;  // (batch n): whether a token has a vote; nullptr: all have
    const long* first;    // (batch heads clusters): the tokens that are the first centres
    long* nearest;        // (batch heads n)
};

constexpr long WORD = 64;
using Words = std::vector<uint64_t>;

// One head.  Words of tokens stand token by token, those of centres word by word: a vector holds that word of many centres.
struct Head {
    long n, words, clusters;
    const uint8_t* real;
    long* nearest;
    Words tokens, centres;
};

template <class T> void begin(const Clusters& call, long h, Head& head) {
    head.n = call.n, head.words = (call.bits + WORD - 1) / WORD, head.clusters = call.clusters;
    head.real = call.real ? call.real + h / call.heads * call.n : nullptr;
    head.nearest = call.nearest + h * call.n;
    head.tokens.assign(call.n * head.words, 0);
    head.centres.resize(head.words * call.clusters);
    const T* x = reinterpret_cast<const T*>(call.x) + h * call.n * call.bits;
    for (long i = 0; i < call.n; i++)
        for (long j = 0; j < call.bits; j++) head.tokens[i * head.words + j / WORD] |= uint64_t(x[i * call.bits + j] >= 0) << j % WORD;
    for (long c = 0; c < call.clusters; c++)
        for (long w = 0; w < head.words; w++) head.centres[w * call.clusters + c] = head.tokens[call.first[h * call.clusters + c] * head.words + w];
}

// The nearest centre of tokens from..to-1, the first of those that are equally near.
void assign(Head& head, long from, long to) {
    Words apart(head.clusters);
    for (long i = from; i < to; i++) {
        for (long c = 0; c < head.clusters; c++) apart[c] = 0;
        for (long w = 0; w < head.words; w++) {
            const uint64_t own = head.tokens[i * head.words + w];
            const uint64_t* centre = head.centres.data() + w * head.clusters;
            for (long c = 0; c < head.clusters; c++) apart[c] += uint64_t(__builtin_popcountll(own ^ centre[c]));
        }
        uint64_t best = ~uint64_t(0);
        for (long c = 0; c < head.clusters; c++) best = std::min(best, apart[c] << 32 | uint64_t(c));
        head.nearest[i] = long(best & 0xffffffff);
    }
}

// A tie, or a cluster without a vote, leaves a bit as it was.
void vote(Head& head) {
    const long size = head.words * WORD;
    std::vector<int32_t> ones(head.clusters * size), count(head.clusters);
    for (long i = 0; i < head.n; i++) {
        if (head.real && !head.real[i]) continue;
        const long c = head.nearest[i];
        count[c]++;
        for (long w = 0; w < head.words; w++) {
            const uint64_t own = head.tokens[i * head.words + w];
            int32_t* sum = ones.data() + c * size + w * WORD;
            for (long j = 0; j < WORD; j++) sum[j] += int32_t(own >> j & 1);
        }
    }
    for (long c = 0; c < head.clusters; c++)
        for (long j = 0; j < size; j++) {
            uint64_t& word = head.centres[j / WORD * head.clusters + c];
            const int32_t lead = 2 * ones[c * size + j] - count[c];
            if (lead != 0) word = (word & ~(uint64_t(1) << j % WORD)) | uint64_t(lead > 0) << j % WORD;
        }
}

// Parallel over heads; where there are too few of them, also over pieces of the tokens.
template <class T> void cluster(const Clusters& call) {
    const long heads = call.batch * call.heads, each = pieces_of(heads, call.threads);
    std::vector<Head> all(heads);
#pragma omp parallel num_threads(int(call.threads))
    {
#pragma omp for schedule(dynamic, 1)
        for (long h = 0; h < heads; h++) begin<T>(call, h, all[h]);
        for (long round = 0; round <= call.iterations; round++) {
#pragma omp for schedule(dynamic, 1)
            for (long i = 0; i < heads * each; i++) assign(all[i / each], call.n * (i % each) / each, call.n * (i % each + 1) / each);
            if (round == call.iterations) break;
#pragma omp for schedule(dynamic, 1)
            for (long h = 0; h < heads; h++) vote(all[h]);
        }
    }
}

}  // namespace

extern "C" {
void cluster_float(const Clusters* call) { cluster<float>(*call); }
void cluster_double(const Clusters* call) { cluster<double>(*call); }
}
