// Softmax attention over the tiles of a layout, forward and backward.
//
// A tile is 64 queries by 64 keys.  Its scores are kept transposed, a row of 64 queries for each key: then keys and values are
// read as they stand in memory, and the softmax runs down vectors, without a reduction inside of one.  Queries come in strips
// of two vectors, and of each tile a strip computes only the keys from the first to the last that one of its queries sees.
#include "rows.h"

#include <cmath>
#include <vector>

template <class T> constexpr T SLACK = T(8);  // exp of it is far from overflow

namespace {

struct Part {  // the tiles of one order of the tokens
    long n, m;
    const long *q_order, *k_order;  // nullptr: as they come
    long rows;
    const long* first;         // (rows + 1): where the tiles of each row begin in the next two
    const int *column, *mask;  // mask 1: every pair is seen
    const uint64_t* masks;     // (masks 64): for each key of a tile, one bit a query
};

struct Call {
    long batch, heads, keys, width, threads;
    double scale;
    Rows q, k, v, out, lse;  // lse nowhere: one part, and no backward pass
    const uint8_t* real;  // (batch keys): whether a key is a token; nullptr: all are
    long parts;
    const Part* part;
};

struct Grads {
    Rows out, q, k, v;
};

// Which pairs of a tile are seen: for each key a bit a query, and for each strip the keys lo..hi-1.
template <class T> struct Seen {
    using Word = typename Lanes<T>::Word;
    bool full;
    uint64_t bits[SIDE];
    int lo[Strip<T>::count], hi[Strip<T>::count];

    // Whether there are any.
    bool find(const Part& part, int mask, const Tokens& keys, const uint8_t* real) {
        full = mask == 1 && !real;
        for (long i = 0; i < keys.count && !full; i++) {
            const uint64_t own = mask == 1 ? ~uint64_t(0) : part.masks[long(mask) * SIDE + i];
            bits[i] = real && !real[keys[i]] ? 0 : own;
        }
        bool some = false;
        for (int g = 0; g < Strip<T>::count; g++) {
            const uint64_t mine = (~uint64_t(0) >> (SIDE - Strip<T>::tokens)) << (g * Strip<T>::tokens);
            lo[g] = 0, hi[g] = int(keys.count);
            while (!full && lo[g] < hi[g] && !(bits[lo[g]] & mine)) lo[g]++;
            while (!full && lo[g] < hi[g] && !(bits[hi[g] - 1] & mine)) hi[g]--;
            some |= lo[g] < hi[g];
        }
        return some;
    }
    // Scores of key i with the queries from `lane` on, -inf where they are not seen.
    Vector<T> operator()(Vector<T> scores, int i, int lane) const {
        if (full) return scores;
        Integers<T> one{};
        for (int j = 0; j < Lanes<T>::N; j++) one[j] = Word(1) << j;
        const auto mine = (Word(bits[i] >> lane) - Integers<T>{}) & one;
        return mine != 0 ? scores : all(-std::numeric_limits<T>::infinity());
    }
};

// ------------------------------------------------------------------------------------------ forward
// Scores to weights, in place, for one strip.  `most` and `sum` go on from tile to tile; `most` follows the largest score only
// where that has grown by more than SLACK, for then what there is of `out` must fade.
template <class T> void weigh(const Seen<T>& seen, int g, T* s, T* out, long width, T* most, T* sum) {
    constexpr int N = Lanes<T>::N, queries = Strip<T>::tokens;
    const Vector<T> nothing = all(-std::numeric_limits<T>::infinity());
    Vector<T> top[VECTORS], safe[VECTORS], total[VECTORS];
    for (int l = 0; l < VECTORS; l++) top[l] = nothing;
    for (int i = seen.lo[g]; i < seen.hi[g]; i++)
        for (int l = 0; l < VECTORS; l++) {
            const Vector<T> x = seen(load(s + i * queries + l * N), i, g * queries + l * N);
            if (!seen.full) store(s + i * queries + l * N, x);
            top[l] = x > top[l] ? x : top[l];
        }
    for (int l = 0; l < VECTORS; l++) {
        const int lane = l * N;
        const Vector<T> before = load(most + lane);
        const auto grown = top[l] > before + all(SLACK<T>);
        bool some = false;
        for (int i = 0; i < N; i++) some |= grown[i] != 0;
        if (some) {
            const Vector<T> now = grown ? top[l] : before;
            const Vector<T> fade = before == nothing ? all(T(0)) : exp_of<T>(before - now);
            for (long j = 0; j < width; j++) store(out + j * queries + lane, load(out + j * queries + lane) * fade);
            store(sum + lane, load(sum + lane) * fade);
            store(most + lane, now);
        }
        const Vector<T> now = load(most + lane);
        safe[l] = now == nothing ? all(T(0)) : now;
        total[l] = load(sum + lane);
    }
    for (int i = seen.lo[g]; i < seen.hi[g]; i++)
        for (int l = 0; l < VECTORS; l++) {
            const Vector<T> p = exp_of<T>(load(s + i * queries + l * N) - safe[l]);
            store(s + i * queries + l * N, p);
            total[l] += p;
        }
    for (int l = 0; l < VECTORS; l++) store(sum + l * N, total[l]);
}

template <class T> struct Forward {  // what a thread needs
    Buffer<T> held;
    T *q, *out, *scores, *most, *sum;
    Near<T> k, v;

    explicit Forward(long w)
        : held(2 * w * SIDE + SIDE * Strip<T>::tokens + 2 * SIDE + 2 * Near<T>::size(w)), q(held.data), out(q + w * SIDE),
          scores(out + w * SIDE), most(scores + SIDE * Strip<T>::tokens), sum(most + SIDE), k(sum + SIDE), v(k.space + Near<T>::size(w)) {}
};

template <class T> void forward_row(const Call& call, const Part& part, long b, long h, long row, bool fresh, Forward<T>& at) {
    const T infinity = std::numeric_limits<T>::infinity();
    const long width = call.width, strip = Strip<T>::tokens;
    const T *all_q = head_of<T>(call.q, b, h), *all_k = head_of<T>(call.k, b, h), *all_v = head_of<T>(call.v, b, h);
    T *result = head_of<T>(call.out, b, h), *lse = call.lse.data ? head_of<T>(call.lse, b, h) : nullptr;
    const Tokens queries(part.q_order, row, part.n);
    queries.strips<T>(all_q, call.q.row, width, T(call.scale), at.q);
    if (row + 1 < part.rows) Tokens(part.q_order, row + 1, part.n).expect<T>(all_q, call.q.row, width);
    std::fill_n(at.most, SIDE, -infinity);
    std::fill_n(at.sum, SIDE, T(0));
    if (fresh) {
        std::fill_n(at.out, width * SIDE, T(0));
    } else {
        queries.strips<T>(result, call.out.row, width, T(1), at.out);
        for (long i = 0; i < queries.count; i++) at.most[i] = lse[queries[i]], at.sum[i] = at.most[i] > -infinity;
    }
    Seen<T> seen;
    for (long i = part.first[row]; i < part.first[row + 1]; i++) {
        const Tokens keys(part.k_order, part.column[i], part.m);
        if (!seen.find(part, part.mask[i], keys, call.real ? call.real + b * call.keys : nullptr)) continue;
        const T *k = at.k(keys, all_k, call.k.row, width), *v = at.v(keys, all_v, call.v.row, width);
        for (int g = 0; g * strip < queries.count; g++) {
            const long lo = seen.lo[g], some = seen.hi[g] - lo;
            if (some <= 0) continue;
            T *s = at.scores + lo * strip, *own = at.out + g * width * strip;
            product<T, false>(k + lo * width, width, 1, at.q + g * width * strip, strip, s, strip, some, strip, width);
            weigh<T>(seen, g, at.scores, own, width, at.most + g * strip, at.sum + g * strip);
            product<T, true>(v + lo * width, 1, width, s, strip, own, strip, width, strip, some);
        }
    }
    for (long i = 0; i < queries.count && lse; i++) lse[queries[i]] = at.sum[i] != 0 ? at.most[i] + std::log(at.sum[i]) : -infinity;
    for (long i = 0; i < SIDE; i++) at.sum[i] = at.sum[i] != 0 ? 1 / at.sum[i] : 0;
    queries.put<T>(at.out, at.sum, result, call.out.row, width);
}

template <class T> void forward(const Call& call) {
    for (long p = 0; p < call.parts; p++) {
        const Part& part = call.part[p];
#pragma omp parallel num_threads(int(call.threads))
        {
            Forward<T> space(call.width);
#pragma omp for schedule(dynamic, 2)
            for (long i = 0; i < call.batch * call.heads * part.rows; i++) {
                const long x = i / part.rows;
                forward_row<T>(call, part, x / call.heads, x % call.heads, i % part.rows, p == 0, space);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------ backward
// Rows from `start` on of the gradients of keys or values, in the order of the part.
template <class T> struct Sums {
    T *k, *v;
    long start, k_row, v_row;
};

// Scores (in `s`) to weights, and dP (in `ds`) to dS = P (dP - rowsum(dout out)), in place, for one strip.
template <class T> void weigh_back(const Seen<T>& seen, int g, T* s, T* ds, const T* lse, const T* shift, T scale) {
    constexpr int queries = Strip<T>::tokens;
    for (int lane = 0; lane < queries; lane += Lanes<T>::N) {
        const Vector<T> norm = load(lse + lane), less = load(shift + lane);
        for (int i = seen.lo[g]; i < seen.hi[g]; i++) {
            const long at = i * queries + lane;
            const Vector<T> p = exp_of<T>(seen(load(s + at), i, g * queries + lane) - norm);
            store(s + at, p);
            store(ds + at, p * (load(ds + at) - less) * all(scale));
        }
    }
}

template <class T> struct Backward {  // what a thread needs
    Buffer<T> held;
    T *q, *dout, *dq, *plain_q, *plain_dout, *scores, *dscores, *lse, *shift, *ones;
    Near<T> k, v;

    explicit Backward(long w)
        : held(5 * w * SIDE + 2 * SIDE * Strip<T>::tokens + 3 * SIDE + 2 * Near<T>::size(w)), q(held.data), dout(q + w * SIDE), dq(dout + w * SIDE),
          plain_q(dq + w * SIDE), plain_dout(plain_q + w * SIDE), scores(plain_dout + w * SIDE), dscores(scores + SIDE * Strip<T>::tokens),
          lse(dscores + SIDE * Strip<T>::tokens), shift(lse + SIDE), ones(shift + SIDE), k(ones + SIDE), v(k.space + Near<T>::size(w)) {
        std::fill_n(ones, SIDE, T(1));
    }
};

template <class T>
void backward_row(const Call& call, const Grads& grads, const Part& part, long b, long h, long row, bool fresh, const Sums<T>& sums, Backward<T>& at) {
    const T infinity = std::numeric_limits<T>::infinity();
    const long width = call.width, strip = Strip<T>::tokens;
    const Tokens queries(part.q_order, row, part.n);
    const T *all_q = head_of<T>(call.q, b, h), *all_k = head_of<T>(call.k, b, h), *all_v = head_of<T>(call.v, b, h);
    const T *all_dout = head_of<T>(grads.out, b, h), *all_out = head_of<T>(call.out, b, h);
    T* all_dq = head_of<T>(grads.q, b, h);
    queries.strips<T>(all_q, call.q.row, width, T(call.scale), at.q);
    queries.strips<T>(all_dout, grads.out.row, width, T(1), at.dout);
    if (fresh) std::fill_n(at.dq, width * SIDE, T(0));
    else queries.strips<T>(all_dq, grads.q.row, width, T(1), at.dq);
    const T* plain_q = queries.rows<T>(all_q, call.q.row, width, at.plain_q);
    const T* plain_dout = queries.rows<T>(all_dout, grads.out.row, width, at.plain_dout);
    std::fill_n(at.lse, SIDE, infinity);
    std::fill_n(at.shift, SIDE, T(0));
    for (long i = 0; i < queries.count; i++) {
        const T own = head_of<T>(call.lse, b, h)[queries[i]];
        at.lse[i] = own == -infinity ? infinity : own;  // a query that sees nothing has no weight anywhere
        at.shift[i] = dot(all_out + queries[i] * call.out.row, plain_dout + i * width, width);
    }
    Seen<T> seen;
    for (long i = part.first[row]; i < part.first[row + 1]; i++) {
        const Tokens keys(part.k_order, part.column[i], part.m);
        if (!seen.find(part, part.mask[i], keys, call.real ? call.real + b * call.keys : nullptr)) continue;
        const T *k = at.k(keys, all_k, call.k.row, width), *v = at.v(keys, all_v, call.v.row, width);
        T *dk = sums.k + (keys.start - sums.start) * sums.k_row, *dv = sums.v + (keys.start - sums.start) * sums.v_row;
        for (int g = 0; g * strip < queries.count; g++) {
            const long lo = seen.lo[g], some = seen.hi[g] - lo, lane = g * strip, depth = std::min(strip, queries.count - lane);
            if (some <= 0) continue;
            T *s = at.scores + lo * strip, *ds = at.dscores + lo * strip;
            product<T, false>(k + lo * width, width, 1, at.q + lane * width, strip, s, strip, some, strip, width);
            product<T, false>(v + lo * width, width, 1, at.dout + lane * width, strip, ds, strip, some, strip, width);
            weigh_back<T>(seen, g, at.scores, at.dscores, at.lse + lane, at.shift + lane, T(call.scale));
            product<T, true>(k + lo * width, 1, width, ds, strip, at.dq + lane * width, strip, width, strip, some);
            product<T, true>(s, strip, 1, plain_dout + lane * width, width, dv + lo * sums.v_row, sums.v_row, some, width, depth);
            product<T, true>(ds, strip, 1, plain_q + lane * width, width, dk + lo * sums.k_row, sums.k_row, some, width, depth);
        }
    }
    queries.put<T>(at.dq, at.ones, all_dq, grads.q.row, width);
}

// Rows of tiles, cut into pieces of about equal work.
std::vector<long> pieces(const Part& part, long count) {
    std::vector<long> cuts(count + 1, part.rows);
    for (long i = 0; i < count; i++) cuts[i] = std::lower_bound(part.first, part.first + part.rows, part.first[part.rows] * i / count) - part.first;
    cuts[0] = 0;
    return cuts;
}

// The keys that a piece touches, from the first to the last.
std::pair<long, long> reach(const Part& part, long from, long to) {
    if (part.first[from] == part.first[to]) return {0, 0};
    const auto ends = std::minmax_element(part.column + part.first[from], part.column + part.first[to]);
    return {*ends.first * SIDE, std::min<long>((*ends.second + 1) * SIDE, part.m)};
}

template <class T> void add_rows(const Part& part, const std::pair<long, long>& keys, const T* from, T* to, long row, long width) {
    for (long i = keys.first; i < keys.second; i++) {
        T* own = to + (part.k_order ? part.k_order[i] : i) * row;
        for (long j = 0; j < width; j++) own[j] += from[(i - keys.first) * width + j];
    }
}

// Parallel over heads; where there are too few of them, also over pieces of the queries, each with sums of its own for the
// keys that it touches, which are added up afterwards.
template <class T> void backward(const Call& call, const Grads& grads) {
    const long heads = call.batch * call.heads, width = call.width;
    const long each = pieces_of(heads, call.threads);
    for (long p = 0; p < call.parts; p++) {
        const Part& part = call.part[p];
        const bool direct = each == 1 && !part.k_order;
        const std::vector<long> cuts = pieces(part, each);
        std::vector<std::unique_ptr<T[]>> own(direct ? 0 : heads * each);
#pragma omp parallel num_threads(int(call.threads))
        {
            Backward<T> space(width);
#pragma omp for schedule(dynamic, 1)
            for (long i = 0; i < heads * each; i++) {
                const long x = i / each, b = x / call.heads, h = x % call.heads, from = cuts[i % each], to = cuts[i % each + 1];
                const auto keys = reach(part, from, to);
                const long size = (keys.second - keys.first) * width;
                Sums<T> sums{head_of<T>(grads.k, b, h), head_of<T>(grads.v, b, h), 0, grads.k.row, grads.v.row};
                if (!direct) {
                    own[i].reset(new T[2 * size]());
                    sums = {own[i].get(), own[i].get() + size, keys.first, width, width};
                }
                for (long row = from; row < to; row++) backward_row<T>(call, grads, part, b, h, row, p == 0, sums, space);
            }
#pragma omp for schedule(dynamic, 1)
            for (long x = 0; x < (direct ? 0 : heads); x++)
                for (long piece = 0; piece < each; piece++) {
                    const auto keys = reach(part, cuts[piece], cuts[piece + 1]);
                    const T* mine = own[x * each + piece].get();
                    add_rows<T>(part, keys, mine, head_of<T>(grads.k, x / call.heads, x % call.heads), grads.k.row, width);
                    add_rows<T>(part, keys, mine + (keys.second - keys.first) * width, head_of<T>(grads.v, x / call.heads, x % call.heads), grads.v.row, width);
                }
        }
    }
}

}  // namespace

extern "C" {
void forward_float(const Call* call) { forward<float>(*call); }
void forward_double(const Call* call) { forward<double>(*call); }
void backward_float(const Call* call, const Grads* grads) { backward<float>(*call, *grads); }
void backward_double(const Call* call, const Grads* grads) { backward<double>(*call, *grads); }
}
