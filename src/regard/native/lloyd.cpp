// Lloyd's algorithm (k-means) in Hamming space: each token is assigned to the nearest centre, and each bit of a centre becomes the
// majority of its tokens.
#include "tiles.h"

#include <vector>

namespace {

constexpr long WORD = 64;
using Words = std::vector<uint64_t>;

// One head. Words of tokens are stored token by token, words of centres word by word, so that a vector holds one word of many
// centres.
struct Head {
    long n, words, clusters;
    const uint8_t* mask;
    long* nearest;
    Words tokens, centres;
};

template <class T> void init_head(const ClusterArgs& call, long h, Head& head) {
    head.n = call.n, head.words = (call.bits + WORD - 1) / WORD, head.clusters = call.clusters;
    head.mask = call.mask ? call.mask + h / call.heads * call.n : nullptr;
    head.nearest = call.nearest + h * call.n;
    head.tokens.assign(call.n * head.words, 0);
    head.centres.resize(head.words * call.clusters);
    const T* x = reinterpret_cast<const T*>(call.x) + h * call.n * call.bits;
    for (long i = 0; i < call.n; i++)
        for (long j = 0; j < call.bits; j++) head.tokens[i * head.words + j / WORD] |= uint64_t(x[i * call.bits + j] >= 0) << j % WORD;
    for (long c = 0; c < call.clusters; c++)
        for (long w = 0; w < head.words; w++) head.centres[w * call.clusters + c] = head.tokens[call.first[h * call.clusters + c] * head.words + w];
}

// Assigns tokens from..to-1 to the nearest centre, the first one on ties.
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

// Updates the centres. A tie, or an empty cluster, leaves a bit unchanged.
void update_centres(Head& head) {
    const long size = head.words * WORD;
    std::vector<int32_t> ones(head.clusters * size), count(head.clusters);
    for (long i = 0; i < head.n; i++) {
        if (head.mask && !head.mask[i]) continue;
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

// Parallel over heads and, if there are too few, over pieces of the tokens.
template <class T> void cluster(const ClusterArgs& call) {
    const long heads = call.batch * call.heads, each = pieces_per_head(heads, call.threads);
    std::vector<Head> all(heads);
    parallel_for(call.threads, heads, 1, [&](long h) { init_head<T>(call, h, all[h]); });
    for (long round = 0; round <= call.iterations; round++) {
        parallel_for(call.threads, heads * each, 1, [&](long i) {
            assign(all[i / each], call.n * (i % each) / each, call.n * (i % each + 1) / each);
        });
        if (round < call.iterations) parallel_for(call.threads, heads, 1, [&](long h) { update_centres(all[h]); });
    }
}

}  // namespace

extern "C" {
void cluster_float(const ClusterArgs* call) { cluster<float>(*call); }
void cluster_double(const ClusterArgs* call) { cluster<double>(*call); }
}
