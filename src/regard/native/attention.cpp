// Softmax attention over lists of tiles, forward and backward.
//
// A tile is 64 queries by 64 keys. Scores are stored transposed, one row of queries per key, so that keys and values are read
// as they are in memory and the softmax needs no reduction within a vector. Queries are processed in strips of two vectors; in
// each tile a strip computes only the keys from the first to the last that is visible to one of its queries.
#include "tiles.h"

#include <cmath>
#include <vector>

template <class T> constexpr T MAX_GROWTH = T(8);  // of scores before the running maximum is updated; exp(8) cannot overflow

namespace {

// The visible pairs of a tile: one bit per query for each key, and for each strip the range of keys lo..hi-1.
template <class T> struct TileMask {
    using Word = typename Lanes<T>::Word;
    bool full;
    uint64_t bits[TILE];
    int lo[Strip<T>::count], hi[Strip<T>::count];

    // Loads the mask of tile `tile` for head h of example b; returns whether any pair is visible.
    bool load_mask(const AttentionArgs& call, const TilePart& part, long tile, const TokenTile& queries, const TokenTile& keys, long b, long h) {
        const int mask = part.mask_ids[tile];
        const uint8_t* key_mask = call.key_mask ? call.key_mask + b * call.keys : nullptr;
        full = mask == 1 && !key_mask && !call.pair_mask.data;
        for (long i = 0; i < keys.count && !full; i++) {
            const uint64_t own = mask == 1 ? ~uint64_t(0) : part.masks[long(mask) * TILE + i];
            bits[i] = key_mask && !key_mask[keys[i]] ? 0 : own;
        }
        if (call.pair_mask.data) hide_pairs(call.pair_mask, queries, keys, b, h);
        bool some = false;
        for (int g = 0; g < Strip<T>::count; g++) {
            const uint64_t mine = (~uint64_t(0) >> (TILE - Strip<T>::tokens)) << (g * Strip<T>::tokens);
            lo[g] = 0, hi[g] = int(keys.count);
            while (!full && lo[g] < hi[g] && !(bits[lo[g]] & mine)) lo[g]++;
            while (!full && lo[g] < hi[g] && !(bits[hi[g] - 1] & mine)) hi[g]--;
            some |= lo[g] < hi[g];
        }
        return some;
    }
    // Hides the pairs that the pair mask does not keep. A tile of which nothing is hidden becomes a full one.
    void hide_pairs(const TensorRef& mask, const TokenTile& queries, const TokenTile& keys, long b, long h) {
        uint64_t kept[TILE];
        std::fill_n(kept, TILE, queries.count < TILE ? ~uint64_t(0) << queries.count : 0);
        for (long j = 0; j < queries.count; j++) {
            const uint8_t* row = head_data<uint8_t>(mask, b, h) + queries[j] * mask.row;
            for (long i = 0; i < keys.count; i++) kept[i] |= uint64_t(row[keys[i]] != 0) << j;
        }
        full = true;
        for (long i = 0; i < keys.count; i++) {
            bits[i] &= kept[i];
            full &= bits[i] == ~uint64_t(0);
        }
    }
    // Scores of key i with the queries from `lane` on, -inf for pairs that are not visible.
    Vector<T> operator()(Vector<T> scores, int i, int lane) const {
        if (full) return scores;
        Integers<T> one{};
        for (int j = 0; j < Lanes<T>::N; j++) one[j] = Word(1) << j;
        const auto mine = (Word(bits[i] >> lane) - Integers<T>{}) & one;
        return mine != 0 ? scores : broadcast(-std::numeric_limits<T>::infinity());
    }
};

// A row of tiles of one query head. Rows are numbered so that the query heads that share a key head follow each other: what they
// read is still in the CPU cache.
struct HeadRow {
    long b, h, kv, row;

    HeadRow(const AttentionArgs& call, const TilePart& part, long i) {
        const long group = call.heads / call.kv_heads, x = i / group / part.rows;
        b = x / call.kv_heads, kv = x % call.kv_heads, h = kv * group + i % group, row = i / group % part.rows;
    }
};

// ------------------------------------------------------------------------------------------ forward
// Online softmax: replaces the scores of one strip by weights. `most` (running maximum) and `sum` carry over from tile to tile.
// `most` is updated only if the maximum has grown by more than MAX_GROWTH, because then `out` must be rescaled.
template <class T> void softmax_strip(const TileMask<T>& visible, int g, T* s, T* out, long width, T* most, T* sum) {
    constexpr int N = Lanes<T>::N, queries = Strip<T>::tokens;
    const Vector<T> nothing = broadcast(-std::numeric_limits<T>::infinity());
    Vector<T> top[VECTORS], safe[VECTORS], total[VECTORS];
    for (int l = 0; l < VECTORS; l++) top[l] = nothing;
    for (int i = visible.lo[g]; i < visible.hi[g]; i++)
        for (int l = 0; l < VECTORS; l++) {
            const Vector<T> x = visible(load(s + i * queries + l * N), i, g * queries + l * N);
            if (!visible.full) store(s + i * queries + l * N, x);
            top[l] = x > top[l] ? x : top[l];
        }
    for (int l = 0; l < VECTORS; l++) {
        const int lane = l * N;
        const Vector<T> before = load(most + lane);
        const auto grown = top[l] > before + broadcast(MAX_GROWTH<T>);
        bool some = false;
        for (int i = 0; i < N; i++) some |= grown[i] != 0;
        if (some) {
            const Vector<T> now = grown ? top[l] : before;
            const Vector<T> fade = before == nothing ? broadcast(T(0)) : vector_exp<T>(before - now);
            for (long j = 0; j < width; j++) store(out + j * queries + lane, load(out + j * queries + lane) * fade);
            store(sum + lane, load(sum + lane) * fade);
            store(most + lane, now);
        }
        const Vector<T> now = load(most + lane);
        safe[l] = now == nothing ? broadcast(T(0)) : now;
        total[l] = load(sum + lane);
    }
    for (int i = visible.lo[g]; i < visible.hi[g]; i++)
        for (int l = 0; l < VECTORS; l++) {
            const Vector<T> p = vector_exp<T>(load(s + i * queries + l * N) - safe[l]);
            store(s + i * queries + l * N, p);
            total[l] += p;
        }
    for (int l = 0; l < VECTORS; l++) store(sum + l * N, total[l]);
}

template <class T> struct ForwardBuffers {  // of one thread
    AlignedBuffer<T> held;
    T *q, *out, *scores, *most, *sum;
    RowCache<T> k, v;

    explicit ForwardBuffers(long w)
        : held(2 * w * TILE + TILE * Strip<T>::tokens + 2 * TILE + 2 * RowCache<T>::size(w)), q(held.data), out(q + w * TILE),
          scores(out + w * TILE), most(scores + TILE * Strip<T>::tokens), sum(most + TILE), k(sum + TILE), v(k.space + RowCache<T>::size(w)) {}
};

template <class T> void forward_row(const AttentionArgs& call, const TilePart& part, const HeadRow& at_row, bool fresh, ForwardBuffers<T>& at) {
    const T infinity = std::numeric_limits<T>::infinity();
    const auto [b, h, kv, row] = at_row;
    const long width = call.width, strip = Strip<T>::tokens;
    const T *all_q = head_data<T>(call.q, b, h), *all_k = head_data<T>(call.k, b, kv), *all_v = head_data<T>(call.v, b, kv);
    T *result = head_data<T>(call.out, b, h), *lse = call.lse.data ? head_data<T>(call.lse, b, h) : nullptr;
    const TokenTile queries(part.q_order, row, part.n);
    queries.to_strips<T>(all_q, call.q.row, width, T(call.scale), at.q);
    if (row + 1 < part.rows) TokenTile(part.q_order, row + 1, part.n).prefetch<T>(all_q, call.q.row, width);
    std::fill_n(at.most, TILE, -infinity);
    std::fill_n(at.sum, TILE, T(0));
    if (fresh) {
        std::fill_n(at.out, width * TILE, T(0));
    } else {
        queries.to_strips<T>(result, call.out.row, width, T(1), at.out);
        for (long i = 0; i < queries.count; i++) at.most[i] = lse[queries[i]], at.sum[i] = at.most[i] > -infinity;
    }
    TileMask<T> visible;
    for (long i = part.row_starts[row]; i < part.row_starts[row + 1]; i++) {
        const TokenTile keys(part.k_order, part.columns[i], part.m);
        if (!visible.load_mask(call, part, i, queries, keys, b, h)) continue;
        const T *k = at.k(keys, all_k, call.k.row, width), *v = at.v(keys, all_v, call.v.row, width);
        for (int g = 0; g * strip < queries.count; g++) {
            const long lo = visible.lo[g], some = visible.hi[g] - lo;
            if (some <= 0) continue;
            T *s = at.scores + lo * strip, *own = at.out + g * width * strip;
            matmul<T, false>(k + lo * width, width, 1, at.q + g * width * strip, strip, s, strip, some, strip, width);
            softmax_strip<T>(visible, g, at.scores, own, width, at.most + g * strip, at.sum + g * strip);
            matmul<T, true>(v + lo * width, 1, width, s, strip, own, strip, width, strip, some);
        }
    }
    for (long i = 0; i < queries.count && lse; i++) lse[queries[i]] = at.sum[i] != 0 ? at.most[i] + std::log(at.sum[i]) : -infinity;
    for (long i = 0; i < TILE; i++) at.sum[i] = at.sum[i] != 0 ? 1 / at.sum[i] : 0;
    queries.from_strips<T>(at.out, at.sum, result, call.out.row, width);
}

template <class T> void forward(const AttentionArgs& call) {
    for (long p = 0; p < call.parts; p++) {
        const TilePart& part = call.part[p];
        const auto row = [&](long i, ForwardBuffers<T>& space) { forward_row<T>(call, part, HeadRow(call, part, i), p == 0, space); };
        parallel_for(call.threads, call.batch * call.heads * part.rows, 2, [&] { return ForwardBuffers<T>(call.width); }, row);
    }
}

// ------------------------------------------------------------------------------------------ backward
// Gradients of keys and values, rows from `start` on, in the token order of the part.
template <class T> struct KeyGradients {
    T *k, *v;
    long start, k_row, v_row;
};

// Replaces scores (`s`) by weights P, and dP (`ds`) by dS = P (dP - rowsum(dout out)), for one strip.
template <class T> void softmax_backward_strip(const TileMask<T>& visible, int g, T* s, T* ds, const T* lse, const T* shift, T scale) {
    constexpr int queries = Strip<T>::tokens;
    for (int lane = 0; lane < queries; lane += Lanes<T>::N) {
        const Vector<T> norm = load(lse + lane), less = load(shift + lane);
        for (int i = visible.lo[g]; i < visible.hi[g]; i++) {
            const long at = i * queries + lane;
            const Vector<T> p = vector_exp<T>(visible(load(s + at), i, g * queries + lane) - norm);
            store(s + at, p);
            store(ds + at, p * (load(ds + at) - less) * broadcast(scale));
        }
    }
}

template <class T> struct BackwardBuffers {  // of one thread
    AlignedBuffer<T> held;
    T *q, *dout, *dq, *plain_q, *plain_dout, *scores, *dscores, *lse, *shift, *ones;
    RowCache<T> k, v;

    explicit BackwardBuffers(long w)
        : held(5 * w * TILE + 2 * TILE * Strip<T>::tokens + 3 * TILE + 2 * RowCache<T>::size(w)), q(held.data), dout(q + w * TILE), dq(dout + w * TILE),
          plain_q(dq + w * TILE), plain_dout(plain_q + w * TILE), scores(plain_dout + w * TILE), dscores(scores + TILE * Strip<T>::tokens),
          lse(dscores + TILE * Strip<T>::tokens), shift(lse + TILE), ones(shift + TILE), k(ones + TILE), v(k.space + RowCache<T>::size(w)) {
        std::fill_n(ones, TILE, T(1));
    }
};

template <class T>
void backward_row(const AttentionArgs& call, const AttentionGrads& grads, const TilePart& part, const HeadRow& at_row, bool fresh, const KeyGradients<T>& sums, BackwardBuffers<T>& at) {
    const T infinity = std::numeric_limits<T>::infinity();
    const auto [b, h, kv, row] = at_row;
    const long width = call.width, strip = Strip<T>::tokens;
    const TokenTile queries(part.q_order, row, part.n);
    const T *all_q = head_data<T>(call.q, b, h), *all_k = head_data<T>(call.k, b, kv), *all_v = head_data<T>(call.v, b, kv);
    const T *all_dout = head_data<T>(grads.out, b, h), *all_out = head_data<T>(call.out, b, h);
    T* all_dq = head_data<T>(grads.q, b, h);
    queries.to_strips<T>(all_q, call.q.row, width, T(call.scale), at.q);
    queries.to_strips<T>(all_dout, grads.out.row, width, T(1), at.dout);
    if (fresh) std::fill_n(at.dq, width * TILE, T(0));
    else queries.to_strips<T>(all_dq, grads.q.row, width, T(1), at.dq);
    const T* plain_q = queries.contiguous_rows<T>(all_q, call.q.row, width, at.plain_q);
    const T* plain_dout = queries.contiguous_rows<T>(all_dout, grads.out.row, width, at.plain_dout);
    std::fill_n(at.lse, TILE, infinity);
    std::fill_n(at.shift, TILE, T(0));
    for (long i = 0; i < queries.count; i++) {
        const T own = head_data<T>(call.lse, b, h)[queries[i]];
        at.lse[i] = own == -infinity ? infinity : own;  // a query that sees nothing has zero weights
        at.shift[i] = dot(all_out + queries[i] * call.out.row, plain_dout + i * width, width);
    }
    TileMask<T> visible;
    for (long i = part.row_starts[row]; i < part.row_starts[row + 1]; i++) {
        const TokenTile keys(part.k_order, part.columns[i], part.m);
        if (!visible.load_mask(call, part, i, queries, keys, b, h)) continue;
        const T *k = at.k(keys, all_k, call.k.row, width), *v = at.v(keys, all_v, call.v.row, width);
        T *dk = sums.k + (keys.start - sums.start) * sums.k_row, *dv = sums.v + (keys.start - sums.start) * sums.v_row;
        for (int g = 0; g * strip < queries.count; g++) {
            const long lo = visible.lo[g], some = visible.hi[g] - lo, lane = g * strip, depth = std::min(strip, queries.count - lane);
            if (some <= 0) continue;
            T *s = at.scores + lo * strip, *ds = at.dscores + lo * strip;
            matmul<T, false>(k + lo * width, width, 1, at.q + lane * width, strip, s, strip, some, strip, width);
            matmul<T, false>(v + lo * width, width, 1, at.dout + lane * width, strip, ds, strip, some, strip, width);
            softmax_backward_strip<T>(visible, g, at.scores, at.dscores, at.lse + lane, at.shift + lane, T(call.scale));
            matmul<T, true>(k + lo * width, 1, width, ds, strip, at.dq + lane * width, strip, width, strip, some);
            matmul<T, true>(s, strip, 1, plain_dout + lane * width, width, dv + lo * sums.v_row, sums.v_row, some, width, depth);
            matmul<T, true>(ds, strip, 1, plain_q + lane * width, width, dk + lo * sums.k_row, sums.k_row, some, width, depth);
        }
    }
    queries.from_strips<T>(at.dq, at.ones, all_dq, grads.q.row, width);
}

// Splits the rows of tiles into pieces of about equal work.
std::vector<long> split_rows(const TilePart& part, long count) {
    std::vector<long> cuts(count + 1, part.rows);
    for (long i = 0; i < count; i++) cuts[i] = std::lower_bound(part.row_starts, part.row_starts + part.rows, part.row_starts[part.rows] * i / count) - part.row_starts;
    cuts[0] = 0;
    return cuts;
}

// The range of keys that a piece reads.
std::pair<long, long> key_range(const TilePart& part, long from, long to) {
    if (part.row_starts[from] == part.row_starts[to]) return {0, 0};
    const auto ends = std::minmax_element(part.columns + part.row_starts[from], part.columns + part.row_starts[to]);
    return {*ends.first * TILE, std::min<long>((*ends.second + 1) * TILE, part.m)};
}

template <class T> void scatter_add_rows(const TilePart& part, const std::pair<long, long>& keys, const T* from, T* to, long row, long width) {
    for (long i = keys.first; i < keys.second; i++) {
        T* own = to + (part.k_order ? part.k_order[i] : i) * row;
        for (long j = 0; j < width; j++) own[j] += from[(i - keys.first) * width + j];
    }
}

// Parallel over key heads and, if there are too few, over pieces of the queries. Each piece accumulates key gradients in its own
// buffer; the buffers are summed afterwards. The query heads that share a key head are in one piece.
template <class T> void backward(const AttentionArgs& call, const AttentionGrads& grads) {
    const long heads = call.batch * call.kv_heads, group = call.heads / call.kv_heads, width = call.width;
    const long each = pieces_per_head(heads, call.threads);
    for (long p = 0; p < call.parts; p++) {
        const TilePart& part = call.part[p];
        const bool direct = each == 1 && !part.k_order;
        const std::vector<long> cuts = split_rows(part, each);
        std::vector<std::unique_ptr<T[]>> own(direct ? 0 : heads * each);
        const auto piece = [&](long i, BackwardBuffers<T>& space) {
            const long x = i / each, b = x / call.kv_heads, h = x % call.kv_heads, from = cuts[i % each], to = cuts[i % each + 1];
            const auto keys = key_range(part, from, to);
            const long size = (keys.second - keys.first) * width;
            KeyGradients<T> sums{head_data<T>(grads.k, b, h), head_data<T>(grads.v, b, h), 0, grads.k.row, grads.v.row};
            if (!direct) {
                own[i].reset(new T[2 * size]());
                sums = {own[i].get(), own[i].get() + size, keys.first, width, width};
            }
            for (long row = (x * part.rows + from) * group; row < (x * part.rows + to) * group; row++)
                backward_row<T>(call, grads, part, HeadRow(call, part, row), p == 0, sums, space);
        };
        parallel_for(call.threads, heads * each, 1, [&] { return BackwardBuffers<T>(width); }, piece);
        parallel_for(call.threads, direct ? 0 : heads, 1, [&](long x) {
            for (long i = 0; i < each; i++) {
                const auto keys = key_range(part, cuts[i], cuts[i + 1]);
                const T* mine = own[x * each + i].get();
                scatter_add_rows<T>(part, keys, mine, head_data<T>(grads.k, x / call.kv_heads, x % call.kv_heads), grads.k.row, width);
                scatter_add_rows<T>(part, keys, mine + (keys.second - keys.first) * width, head_data<T>(grads.v, x / call.kv_heads, x % call.kv_heads), grads.v.row, width);
            }
        });
    }
}

}  // namespace

extern "C" {
void attention_forward_float(const AttentionArgs* call) { forward<float>(*call); }
void attention_forward_double(const AttentionArgs* call) { forward<double>(*call); }
void attention_backward_float(const AttentionArgs* call, const AttentionGrads* grads) { backward<float>(*call, *grads); }
void attention_backward_double(const AttentionArgs* call, const AttentionGrads* grads) { backward<double>(*call, *grads); }
}
