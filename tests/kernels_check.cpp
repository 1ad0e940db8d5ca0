// Checks the C++ kernels against plain loops in double, without Python: for processors that are only emulated. Prints one line
// for each check and returns the number of failures.
#include "kernels.h"

#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <type_traits>
#include <vector>

namespace {

constexpr long TILE = 64;
using Numbers = std::vector<double>;
int failures = 0;

Numbers draw(long size) {
    static std::mt19937_64 generator(7);
    std::normal_distribution<double> normal;
    Numbers x(size);
    for (double& value : x) value = float(normal(generator));  // exact in both types
    return x;
}

// A contiguous tensor (batch heads length width) of type T.
template <class T> struct Array {
    std::vector<T> data;
    long heads, length, width;

    Array(long batch, long h, long n, long w, T value = T(0)) : data(batch * h * n * w, value), heads(h), length(n), width(w) {}
    Array(const Numbers& from, long h, long n, long w) : data(from.begin(), from.end()), heads(h), length(n), width(w) {}
    TensorRef ref() { return {reinterpret_cast<char*>(data.data()), heads * length * width, length * width, width}; }
};

template <class T> void expect_close(const char* name, const std::vector<T>& got, const Numbers& want) {
    double worst = 0, size = 1;
    for (size_t i = 0; i < want.size(); i++) {
        worst = std::max(worst, std::isfinite(double(got[i])) ? std::abs(double(got[i]) - want[i]) : INFINITY);
        size = std::max(size, std::abs(want[i]));
    }
    const bool good = got.size() == want.size() && worst < size * (sizeof(T) == 4 ? 2e-5 : 1e-12);
    failures += !good;
    std::printf("%s %s %s: largest error %.1e of %.1e\n", good ? "ok  " : "FAIL", sizeof(T) == 4 ? "float " : "double", name, worst, size);
}

// ------------------------------------------------------------------------------------------ softmax attention
using Visible = std::function<bool(long i, long j)>;

// The tiles of a pattern, each with a mask of its own.
struct Tiles {
    std::vector<long> row_starts{0};
    std::vector<int> columns, mask_ids;
    std::vector<uint64_t> masks = std::vector<uint64_t>(TILE, 0);  // mask 0; 1 is a full tile
    TilePart part;

    Tiles(long n, long m, const Visible& visible) {
        masks.resize(2 * TILE, ~uint64_t(0));
        const long rows = (n + TILE - 1) / TILE, cols = (m + TILE - 1) / TILE;
        for (long r = 0; r < rows; r++) {
            for (long c = 0; c < cols; c++) {
                uint64_t bits[TILE] = {}, some = 0;
                bool full = true;
                for (long j = 0; j < TILE && c * TILE + j < m; j++)
                    for (long i = 0; i < TILE && r * TILE + i < n; i++) {
                        const uint64_t seen = visible(r * TILE + i, c * TILE + j);
                        bits[j] |= seen << i, some |= seen, full &= seen != 0;
                    }
                if (!some) continue;
                columns.push_back(int(c));
                mask_ids.push_back(full ? 1 : int(masks.size() / TILE));
                if (!full) masks.insert(masks.end(), bits, bits + TILE);
            }
            row_starts.push_back(long(columns.size()));
        }
        part = {n, m, nullptr, nullptr, rows, row_starts.data(), columns.data(), mask_ids.data(), masks.data()};
    }
};

template <class T> void check_attention(const char* name, long batch, long heads, long kv_heads, long n, long m, long width, long threads, const Visible& visible) {
    const long group = heads / kv_heads, queries = batch * heads * n * width, keys = batch * kv_heads * m * width;
    const Numbers q = draw(queries), k = draw(keys), v = draw(keys), dout = draw(queries);
    const double scale = 1 / std::sqrt(double(width));
    std::vector<uint8_t> mask(batch * m, 1);
    mask[m / 3] = 0;

    Numbers out(queries), dq(queries), dk(keys), dv(keys);
    for (long x = 0; x < batch * heads; x++)
        for (long i = 0; i < n; i++) {
            const long y = x / group;  // the head of keys and values
            const double *own = &q[(x * n + i) * width], *grad = &dout[(x * n + i) * width];
            Numbers p(m), dp(m);
            double sum = 0, shift = 0;
            for (long j = 0; j < m; j++) {
                if (!visible(i, j) || !mask[x / heads * m + j]) continue;
                for (long e = 0; e < width; e++) p[j] += scale * own[e] * k[(y * m + j) * width + e];
                sum += p[j] = std::exp(p[j]);
            }
            for (long j = 0; j < m; j++) {
                p[j] /= sum > 0 ? sum : 1;
                for (long e = 0; e < width; e++) {
                    out[(x * n + i) * width + e] += p[j] * v[(y * m + j) * width + e];
                    dv[(y * m + j) * width + e] += p[j] * grad[e];
                    dp[j] += grad[e] * v[(y * m + j) * width + e];
                }
                shift += p[j] * dp[j];
            }
            for (long j = 0; j < m; j++)
                for (long e = 0; e < width; e++) {
                    const double ds = scale * p[j] * (dp[j] - shift);
                    dq[(x * n + i) * width + e] += ds * k[(y * m + j) * width + e];
                    dk[(y * m + j) * width + e] += ds * own[e];
                }
        }

    Tiles tiles(n, m, visible);
    Array<T> aq(q, heads, n, width), ak(k, kv_heads, m, width), av(v, kv_heads, m, width), aout(batch, heads, n, width), lse(batch, heads, 1, n);
    Array<T> adout(dout, heads, n, width), adq(batch, heads, n, width), adk(batch, kv_heads, m, width), adv(batch, kv_heads, m, width);
    AttentionArgs call{batch, heads, kv_heads, m, width, threads, scale, aq.ref(), ak.ref(), av.ref(), aout.ref(), lse.ref(), mask.data(), TensorRef{}, 1, &tiles.part};
    AttentionGrads grads{adout.ref(), adq.ref(), adk.ref(), adv.ref()};
    if constexpr (std::is_same_v<T, float>) attention_forward_float(&call), attention_backward_float(&call, &grads);
    else attention_forward_double(&call), attention_backward_double(&call, &grads);
    std::printf("attention, %s, %ld threads\n", name, threads);
    expect_close("out", aout.data, out);
    expect_close("dq", adq.data, dq);
    expect_close("dk", adk.data, dk);
    expect_close("dv", adv.data, dv);
}

// ------------------------------------------------------------------------------------------ linear attention
template <class T> void check_linear(bool causal, long batch, long heads, long n, long rank, long width, long threads) {
    const long all = batch * heads;
    const Numbers q = draw(all * n * rank), k = draw(all * n * rank), v = draw(all * n * width);
    const Numbers dout = draw(all * n * width), dnorm = draw(all * n);
    Numbers out(all * n * width), norm(all * n), dq(q.size()), dk(k.size()), dv(v.size());
    for (long x = 0; x < all; x++)
        for (long i = 0; i < n; i++)
            for (long j = 0; j < (causal ? i + 1 : n); j++) {
                const long a = x * n + i, b = x * n + j;
                double s = 0, ds = dnorm[a];
                for (long e = 0; e < rank; e++) s += q[a * rank + e] * k[b * rank + e];
                for (long e = 0; e < width; e++) {
                    ds += dout[a * width + e] * v[b * width + e];
                    out[a * width + e] += s * v[b * width + e];
                    dv[b * width + e] += s * dout[a * width + e];
                }
                norm[a] += s;
                for (long e = 0; e < rank; e++) dq[a * rank + e] += ds * k[b * rank + e], dk[b * rank + e] += ds * q[a * rank + e];
            }

    Array<T> aq(q, heads, n, rank), ak(k, heads, n, rank), av(v, heads, n, width), aout(batch, heads, n, width), anorm(batch, heads, n, 1);
    Array<T> state(batch, heads, rank, width), sum(batch, heads, 1, rank), after = state, total = sum;
    LinearArgs call{batch, heads, n, n, rank, width, threads, aq.ref(), ak.ref(), av.ref(), aout.ref(), anorm.ref(), state.ref(), sum.ref(), after.ref(), total.ref()};
    Array<T> adout(dout, heads, n, width), adnorm(dnorm, heads, n, 1), dstate(batch, heads, rank, width), dsum(batch, heads, 1, rank);
    Array<T> adq(batch, heads, n, rank), adk = adq, adv(batch, heads, n, width), first = dstate, first_sum = dsum;
    LinearGrads grads{adout.ref(), adnorm.ref(), dstate.ref(), dsum.ref(), adq.ref(), adk.ref(), adv.ref(), first.ref(), first_sum.ref()};
    constexpr bool single = std::is_same_v<T, float>;
    if (causal) {
        if constexpr (single) linear_forward_float(&call), linear_backward_float(&call, &grads);
        else linear_forward_double(&call), linear_backward_double(&call, &grads);
    } else {
        LinearArgs back = call;  // the backward pass reads the sums over all keys
        back.state = after.ref(), back.sum = total.ref();
        if constexpr (single) linear_all_forward_float(&call), linear_all_backward_float(&back, &grads);
        else linear_all_forward_double(&call), linear_all_backward_double(&back, &grads);
    }
    std::printf("linear attention, %s, %ld threads\n", causal ? "causal" : "all keys", threads);
    expect_close("out", aout.data, out);
    expect_close("normalizer", anorm.data, norm);
    expect_close("dq", adq.data, dq);
    expect_close("dk", adk.data, dk);
    expect_close("dv", adv.data, dv);
}

// ------------------------------------------------------------------------------------------ elu(x) + 1 and clusters
template <class T> void check_elu(long width) {
    const Numbers x = draw(6 * width), dout = draw(6 * width);
    Numbers out(x.size()), dx(x.size());
    for (size_t i = 0; i < x.size(); i++) out[i] = x[i] > 0 ? x[i] + 1 : std::exp(x[i]), dx[i] = dout[i] * std::min(out[i], 1.0);
    Array<T> ax(x, 2, 3, width), aout(1, 2, 3, width), adout(dout, 2, 3, width), adx(1, 2, 3, width);
    EluArgs call{1, 2, 3, width, 2, 0, ax.ref(), ax.ref(), aout.ref()}, back{1, 2, 3, width, 2, 0, adout.ref(), aout.ref(), adx.ref()};
    if constexpr (std::is_same_v<T, float>) elu_forward_float(&call), elu_backward_float(&back);
    else elu_forward_double(&call), elu_backward_double(&back);
    std::printf("elu(x) + 1, width %ld\n", width);
    expect_close("out", aout.data, out);
    expect_close("dx", adx.data, dx);
}

template <class T> void check_clusters(long n, long bits, long clusters) {
    const Numbers x = draw(n * bits);
    std::vector<long> first(clusters), nearest(n);
    for (long c = 0; c < clusters; c++) first[c] = c * (n / clusters);
    Numbers want(n);
    for (long i = 0; i < n; i++) {
        long least = bits + 1;
        for (long c = 0; c < clusters; c++) {
            long apart = 0;
            for (long j = 0; j < bits; j++) apart += (x[i * bits + j] >= 0) != (x[first[c] * bits + j] >= 0);
            if (apart < least) least = apart, want[i] = double(c);
        }
    }
    Array<T> ax(x, 1, n, bits);
    ClusterArgs call{1, 1, n, bits, clusters, 0, 2, ax.ref().data, nullptr, first.data(), nearest.data()};
    if constexpr (std::is_same_v<T, float>) cluster_float(&call);
    else cluster_double(&call);
    std::printf("clusters\n");
    expect_close("nearest", std::vector<T>(nearest.begin(), nearest.end()), want);
}

template <class T> void check_all() {
    const Visible full = [](long, long) { return true; }, band = [](long i, long j) { return std::abs(i - j) <= 9 || j < 3; };
    const Visible causal = [](long i, long j) { return j <= i; }, gaps = [](long i, long j) { return i != 5 && (i + j) % 7 == 0; };
    for (long threads : {1, 3}) {
        check_attention<T>("full", 2, 2, 2, 70, 130, 16, threads, full);
        check_attention<T>("band", 1, 6, 2, 200, 200, 32, threads, band);
        check_attention<T>("causal", 1, 1, 1, 150, 150, 48, threads, causal);
        check_attention<T>("gaps", 1, 3, 1, 66, 65, 16, threads, gaps);
        check_linear<T>(true, 1, 2, 150, 16, 32, threads);
        check_linear<T>(false, 2, 1, 100, 32, 16, threads);
    }
    check_elu<T>(37);
    check_clusters<T>(100, 70, 9);
}

}  // namespace

int main() {
    check_all<float>();
    check_all<double>();
    std::printf("%d failures\n", failures);
    return failures > 0;
}
