// Linear attention, forward and backward: out_i = S q_i and count_i = z q_i, where S and z are the sums of k v and of k over all
// keys or, where causal, over those up to token i.
//
// Causal: 64 tokens at a time meet by products, cut along the diagonal into strips; what was before them they get from the state, which
// stays in the cache.  The backward pass goes through twice: forward for dq, with the states, and back for dk and dv, with the
// sums of what comes after.  Parallel over heads, and where they are too few also over pieces of the sequence, whose sums are
// taken first.
#include "rows.h"

#include <vector>

namespace {

struct Linear {  // widths are whole vectors
    long batch, heads, n, keys, rank, width, threads;
    Rows q, k, v, out, count;       // (b h n .); count (b h n 1)
    Rows state, sum, after, total;  // S and z before the first token, and after the last: (b h rank width), (b h 1 rank)
};

struct LinearGrads {
    Rows out, count, state, sum;  // given, of out, count and the last S and z
    Rows q, k, v, before, least;  // asked for, of q, k, v and the first S and z
};

// A matrix of sums over tokens and a vector beside it: Σ a b (rows cols), and Σ a c (rows), for c a number a token, or 1.
template <class T> struct State {
    T *matrix, *vector;
    long rows, cols;

    void add(const T* a, long a_row, const T* b, long b_row, const T* c, long c_row, long tokens) const {
        product<T, true>(a, 1, a_row, b, b_row, matrix, cols, rows, cols, tokens);
        for (long i = 0; i < tokens; i++) {
            const Vector<T> own = all(c ? c[i * c_row] : T(1));
            for (long j = 0; j < rows; j += Lanes<T>::N) store(vector + j, load(vector + j) + own * load(a + i * a_row + j));
        }
    }
    void add(const State& other) const {
        for (long i = 0; i < rows * cols; i++) matrix[i] += other.matrix[i];
        for (long i = 0; i < rows; i++) vector[i] += other.vector[i];
    }
    void read(const Rows& from, const Rows& beside, long b, long h) const {
        for (long i = 0; i < rows; i++) std::copy_n(head_of<T>(from, b, h) + i * from.row, cols, matrix + i * cols);
        std::copy_n(head_of<T>(beside, b, h), rows, vector);
    }
    void write(const Rows& to, const Rows& beside, long b, long h) const {
        for (long i = 0; i < rows; i++) std::copy_n(matrix + i * cols, cols, head_of<T>(to, b, h) + i * to.row);
        std::copy_n(vector, rows, head_of<T>(beside, b, h));
    }
    void turned(T* to) const {  // (cols rows)
        constexpr int N = Lanes<T>::N;
        for (long i = 0; i < rows; i += N)
            for (long j = 0; j < cols; j += N) {
                Vector<T> own[N];
                for (int t = 0; t < N; t++) own[t] = load(matrix + (i + t) * cols + j);
                transpose<T>(own);
                for (int t = 0; t < N; t++) store(to + (j + t) * rows + i, own[t]);
            }
    }
};

template <class T> struct View {  // the rows of 64 tokens, or fewer
    const T* data;
    long row;
    View(const Rows& x, long b, long h, const Tokens& tokens) : data(head_of<T>(x, b, h) + tokens.start * x.row), row(x.row) {}
};

// For each strip of tokens the products of a with them, (strips 64 tokens): with LATER of the tokens from the first of the strip
// on, else of those up to its last.  Pairs in the wrong order are zero; to the others `more` is added, a number for each token
// of a with LATER, else for each token of the strip.
template <class T, bool LATER> void meet(const View<T>& a, const T* strips, long width, const Tokens& tokens, const View<T>* more, T* to) {
    constexpr long wide = Strip<T>::tokens;
    T ones[wide], own[wide] = {};
    std::fill_n(ones, wide, T(1));
    for (long g = 0; g * wide < tokens.count; g++) {
        const long first = g * wide, last = std::min(first + wide, tokens.count);
        const long from = LATER ? first : 0, end = LATER ? tokens.count : last;
        T* block = to + (g * SIDE + from) * wide;
        product<T, false>(a.data + from * a.row, a.row, 1, strips + g * width * wide, wide, block, wide, end - from, wide, width);
        for (long i = first; i < last && more; i++) own[i - first] = more->data[i * more->row];
        if (more && LATER) product<T, true>(more->data + from * more->row, more->row, 1, ones, wide, block, wide, end - from, wide, 1);
        if (more && !LATER) product<T, true>(ones, 0, 1, own, wide, block, wide, end - from, wide, 1);
        for (long i = first; i < last; i++) {
            T* row = to + (g * SIDE + i) * wide;
            if (LATER) std::fill_n(row + i - first + 1, wide - 1 - (i - first), T(0));
            else std::fill_n(row, i - first, T(0));
        }
    }
}

// to[i, :] += the products of token i with those of the strips, from `meet`, times their rows of b
template <class T, bool LATER> void spread(const T* met, const View<T>& b, long width, const Tokens& tokens, T* to, long to_row) {
    constexpr long wide = Strip<T>::tokens;
    for (long g = 0; g * wide < tokens.count; g++) {
        const long first = g * wide, last = std::min(first + wide, tokens.count);
        const long from = LATER ? first : 0, end = LATER ? tokens.count : last;
        product<T, true>(met + (g * SIDE + from) * wide, wide, 1, b.data + first * b.row, b.row, to + from * to_row, to_row, end - from, width, last - first);
    }
}

// out and count, with the sums Σ k v and Σ k before these tokens
template <class T> void forward_chunk(const Linear& x, long b, long h, const Tokens& tokens, const State<T>& state, T* space) {
    const View<T> q(x.q, b, h, tokens), k(x.k, b, h, tokens), v(x.v, b, h, tokens);
    T *strips = space, *met = strips + x.rank * SIDE;
    T *out = head_of<T>(x.out, b, h) + tokens.start * x.out.row, *count = head_of<T>(x.count, b, h) + tokens.start * x.count.row;
    tokens.strips<T>(head_of<T>(x.k, b, h), x.k.row, x.rank, T(1), strips);
    meet<T, true>(q, strips, x.rank, tokens, nullptr, met);
    product<T, false>(q.data, q.row, 1, state.matrix, x.width, out, x.out.row, tokens.count, x.width, x.rank);
    spread<T, true>(met, v, x.width, tokens, out, x.out.row);
    for (long i = 0; i < tokens.count; i++) {
        Vector<T> own = all(T(0));
        for (long lane = 0; lane <= i; lane += Lanes<T>::N) own += load(met + Strip<T>::at(lane, i, SIDE));
        count[i * x.count.row] = dot(q.data + i * q.row, state.vector, x.rank) + sum_of<T>(own);
    }
    state.add(k.data, k.row, v.data, v.row, nullptr, 0, tokens.count);
}

// dq, with the same sums
template <class T>
void query_chunk(const Linear& x, const LinearGrads& grads, long b, long h, const Tokens& tokens, const State<T>& state, T* space) {
    const View<T> k(x.k, b, h, tokens), v(x.v, b, h, tokens), dout(grads.out, b, h, tokens), dcount(grads.count, b, h, tokens);
    T *strips = space, *met = strips + x.width * SIDE, *turned = met + SIDE * SIDE;
    T* dq = head_of<T>(grads.q, b, h) + tokens.start * grads.q.row;
    tokens.strips<T>(head_of<T>(x.v, b, h), x.v.row, x.width, T(1), strips);
    meet<T, true>(dout, strips, x.width, tokens, &dcount, met);
    state.turned(turned);
    product<T, false>(dout.data, dout.row, 1, turned, x.rank, dq, grads.q.row, tokens.count, x.rank, x.width);
    product<T, true>(dcount.data, dcount.row, 1, state.vector, x.rank, dq, grads.q.row, tokens.count, x.rank, 1);
    spread<T, true>(met, k, x.rank, tokens, dq, grads.q.row);
    state.add(k.data, k.row, v.data, v.row, nullptr, 0, tokens.count);
}

// dk and dv, with the sums Σ q dout and Σ q dcount of what comes after these tokens
template <class T>
void key_chunk(const Linear& x, const LinearGrads& grads, long b, long h, const Tokens& tokens, const State<T>& state, T* space) {
    const View<T> q(x.q, b, h, tokens), k(x.k, b, h, tokens), v(x.v, b, h, tokens);
    const View<T> dout(grads.out, b, h, tokens), dcount(grads.count, b, h, tokens);
    T *strips = space, *met = strips + std::max(x.rank, x.width) * SIDE, *turned = met + SIDE * SIDE;
    T *dk = head_of<T>(grads.k, b, h) + tokens.start * grads.k.row, *dv = head_of<T>(grads.v, b, h) + tokens.start * grads.v.row;
    tokens.strips<T>(head_of<T>(x.q, b, h), x.q.row, x.rank, T(1), strips);
    meet<T, false>(k, strips, x.rank, tokens, nullptr, met);
    product<T, false>(k.data, k.row, 1, state.matrix, x.width, dv, grads.v.row, tokens.count, x.width, x.rank);
    spread<T, false>(met, dout, x.width, tokens, dv, grads.v.row);
    tokens.strips<T>(head_of<T>(grads.out, b, h), grads.out.row, x.width, T(1), strips);
    meet<T, false>(v, strips, x.width, tokens, &dcount, met);
    state.turned(turned);
    for (long i = 0; i < tokens.count; i++) std::copy_n(state.vector, x.rank, dk + i * grads.k.row);
    product<T, true>(v.data, v.row, 1, turned, x.rank, dk, grads.k.row, tokens.count, x.rank, x.width);
    spread<T, false>(met, q, x.rank, tokens, dk, grads.k.row);
    state.add(q.data, q.row, dout.data, dout.row, dcount.data, dcount.row, tokens.count);
}

// Runs `chunk` over all tokens of all heads, from the first to the last or with BACK the other way, with a state that `add` fills:
// first the sums of each piece, where there are several, then each piece from what stands before it.
template <class T, bool BACK, class Add, class Chunk>
void sweep(const Linear& x, const Rows& start, const Rows& beside, const Rows& end, const Rows& end_beside, Add add, Chunk chunk) {
    const long heads = x.batch * x.heads, chunks = (x.n + SIDE - 1) / SIDE;
    const long each = std::min(pieces_of(heads, x.threads), chunks);
    const long size = x.rank * x.width + x.rank;
    std::vector<T> sums(heads * each * size, T(0));
    const auto state_of = [&](long i) { return State<T>{&sums[i * size], &sums[i * size + x.rank * x.width], x.rank, x.width}; };
    const auto over = [&](long i, auto run) {
        const long piece = i % each, from = chunks * piece / each, to = chunks * (piece + 1) / each;
        for (long c = from; c < to; c++) run(i / each / x.heads, i / each % x.heads, Tokens(nullptr, BACK ? from + to - 1 - c : c, x.n));
    };
#pragma omp parallel num_threads(int(x.threads))
    {
        Buffer<T> space((2 * std::max(x.rank, x.width) + SIDE) * SIDE + x.rank * x.width);
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < (each > 1 ? heads * each : 0); i++)
            over(i, [&](long b, long h, const Tokens& tokens) { add(b, h, tokens, state_of(i)); });
#pragma omp for schedule(dynamic, 1)
        for (long head = 0; head < heads; head++) {  // what each piece added becomes what stands before it
            Buffer<T> own(2 * size);
            State<T> now{own.data, own.data + x.rank * x.width, x.rank, x.width};
            State<T> last{own.data + size, own.data + size + x.rank * x.width, x.rank, x.width};
            now.read(start, beside, head / x.heads, head % x.heads);
            for (long p = 0; p < each; p++) {
                const State<T> mine = state_of(head * each + (BACK ? each - 1 - p : p));
                std::copy_n(mine.matrix, size, last.matrix);
                std::copy_n(now.matrix, size, mine.matrix);
                now.add(last);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < heads * each; i++) {
            const State<T> state = state_of(i);
            over(i, [&](long b, long h, const Tokens& tokens) { chunk(b, h, tokens, state, space.data); });
            if (i % each == (BACK ? 0 : each - 1)) state.write(end, end_beside, i / each / x.heads, i / each % x.heads);
        }
    }
}

template <class T> void forward(const Linear& x) {
    const auto add = [&](long b, long h, const Tokens& tokens, const State<T>& state) {
        const View<T> k(x.k, b, h, tokens), v(x.v, b, h, tokens);
        state.add(k.data, k.row, v.data, v.row, nullptr, 0, tokens.count);
    };
    const auto chunk = [&](long b, long h, const Tokens& tokens, const State<T>& state, T* space) {
        forward_chunk<T>(x, b, h, tokens, state, space);
    };
    sweep<T, false>(x, x.state, x.sum, x.after, x.total, add, chunk);
}

template <class T> void backward(const Linear& x, const LinearGrads& grads) {
    const auto add = [&](long b, long h, const Tokens& tokens, const State<T>& state) {
        const View<T> k(x.k, b, h, tokens), v(x.v, b, h, tokens);
        state.add(k.data, k.row, v.data, v.row, nullptr, 0, tokens.count);
    };
    const auto queries = [&](long b, long h, const Tokens& tokens, const State<T>& state, T* space) {
        query_chunk<T>(x, grads, b, h, tokens, state, space);
    };
    sweep<T, false>(x, x.state, x.sum, x.after, x.total, add, queries);
    const auto add_back = [&](long b, long h, const Tokens& tokens, const State<T>& state) {
        const View<T> q(x.q, b, h, tokens), dout(grads.out, b, h, tokens), dcount(grads.count, b, h, tokens);
        state.add(q.data, q.row, dout.data, dout.row, dcount.data, dcount.row, tokens.count);
    };
    const auto keys = [&](long b, long h, const Tokens& tokens, const State<T>& state, T* space) {
        key_chunk<T>(x, grads, b, h, tokens, state, space);
    };
    sweep<T, true>(x, grads.state, grads.sum, grads.before, grads.least, add_back, keys);
}

// ------------------------------------------------------------------------------------------ over all keys
// Calls piece(head, part, from, to, space) for chunks from..to-1 of n tokens, of every head, with room for so many numbers.
template <class T, class Piece> void by_pieces(const Linear& x, long n, long room, Piece piece) {
    const long heads = x.batch * x.heads, chunks = (n + SIDE - 1) / SIDE, each = std::min(pieces_of(heads, x.threads), chunks);
#pragma omp parallel num_threads(int(x.threads))
    {
        Buffer<T> space(room);
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < heads * each; i++) piece(i / each, i % each, chunks * (i % each) / each, chunks * (i % each + 1) / each, space.data);
    }
}

// Σ a b and Σ a c over n tokens, for c a number a token, or 1; to (b h rank width) and (b h 1 rank)
template <class T> void sum_up(const Linear& x, long n, const Rows& a, const Rows& b, const Rows* c, const Rows& to, const Rows& beside) {
    const long heads = x.batch * x.heads, each = pieces_of(heads, x.threads), size = x.rank * x.width + x.rank;
    std::vector<T> sums(heads * each * size, T(0));
    const auto state_of = [&](long i) { return State<T>{&sums[i * size], &sums[i * size + x.rank * x.width], x.rank, x.width}; };
    by_pieces<T>(x, n, 1, [&](long head, long part, long from, long end, T*) {
        for (long i = from; i < end; i++) {
            const Tokens tokens(nullptr, i, n);
            const View<T> own(a, head / x.heads, head % x.heads, tokens), other(b, head / x.heads, head % x.heads, tokens);
            const T* count = c ? View<T>(*c, head / x.heads, head % x.heads, tokens).data : nullptr;
            state_of(head * each + part).add(own.data, own.row, other.data, other.row, count, c ? c->row : 0, tokens.count);
        }
    });
    for (long head = 0; head < heads; head++) {
        for (long p = 1; p < each; p++) state_of(head * each).add(state_of(head * each + p));
        state_of(head * each).write(to, beside, head / x.heads, head % x.heads);
    }
}

template <class T> void forward_all(const Linear& x) {
    sum_up<T>(x, x.keys, x.k, x.v, nullptr, x.after, x.total);
    by_pieces<T>(x, x.n, 1, [&](long head, long, long from, long end, T*) {
        const long b = head / x.heads, h = head % x.heads;
        for (long i = from; i < end; i++) {
            const Tokens tokens(nullptr, i, x.n);
            const View<T> q(x.q, b, h, tokens);
            T *out = head_of<T>(x.out, b, h) + tokens.start * x.out.row, *count = head_of<T>(x.count, b, h) + tokens.start * x.count.row;
            product<T, false>(q.data, q.row, 1, head_of<T>(x.after, b, h), x.width, out, x.out.row, tokens.count, x.width, x.rank);
            for (long t = 0; t < tokens.count; t++) count[t * x.count.row] = dot(q.data + t * q.row, head_of<T>(x.total, b, h), x.rank);
        }
    });
}

// With S and z in x.state and x.sum: dq = dout Sᵀ + dcount z; and with G = Σ q dout and g = Σ q dcount, which go to grads.before
// and grads.least, dk = v Gᵀ + g and dv = k G.
template <class T> void backward_all(const Linear& x, const LinearGrads& grads) {
    const long size = x.rank * x.width;
    sum_up<T>(x, x.n, x.q, grads.out, &grads.count, grads.before, grads.least);
    by_pieces<T>(x, x.n, size, [&](long head, long, long from, long end, T* turned) {
        const long b = head / x.heads, h = head % x.heads;
        State<T>{head_of<T>(x.state, b, h), nullptr, x.rank, x.width}.turned(turned);
        for (long i = from; i < end; i++) {
            const Tokens tokens(nullptr, i, x.n);
            const View<T> dout(grads.out, b, h, tokens), dcount(grads.count, b, h, tokens);
            T* dq = head_of<T>(grads.q, b, h) + tokens.start * grads.q.row;
            product<T, false>(dout.data, dout.row, 1, turned, x.rank, dq, grads.q.row, tokens.count, x.rank, x.width);
            product<T, true>(dcount.data, dcount.row, 1, head_of<T>(x.sum, b, h), x.rank, dq, grads.q.row, tokens.count, x.rank, 1);
        }
    });
    by_pieces<T>(x, x.keys, size, [&](long head, long, long from, long end, T* turned) {
        const long b = head / x.heads, h = head % x.heads;
        State<T>{head_of<T>(grads.before, b, h), nullptr, x.rank, x.width}.turned(turned);
        for (long i = from; i < end; i++) {
            const Tokens tokens(nullptr, i, x.keys);
            const View<T> k(x.k, b, h, tokens), v(x.v, b, h, tokens);
            T *dk = head_of<T>(grads.k, b, h) + tokens.start * grads.k.row, *dv = head_of<T>(grads.v, b, h) + tokens.start * grads.v.row;
            for (long t = 0; t < tokens.count; t++) std::copy_n(head_of<T>(grads.least, b, h), x.rank, dk + t * grads.k.row);
            product<T, true>(v.data, v.row, 1, turned, x.rank, dk, grads.k.row, tokens.count, x.rank, x.width);
            product<T, false>(k.data, k.row, 1, head_of<T>(grads.before, b, h), x.width, dv, grads.v.row, tokens.count, x.width, x.rank);
        }
    });
}

}  // namespace

extern "C" {
void linear_forward_float(const Linear* x) { forward<float>(*x); }
void linear_forward_double(const Linear* x) { forward<double>(*x); }
void linear_backward_float(const Linear* x, const LinearGrads* grads) { backward<float>(*x, *grads); }
void linear_backward_double(const Linear* x, const LinearGrads* grads) { backward<double>(*x, *grads); }
void linear_all_forward_float(const Linear* x) { forward_all<float>(*x); }
void linear_all_forward_double(const Linear* x) { forward_all<double>(*x); }
void linear_all_backward_float(const Linear* x, const LinearGrads* grads) { backward_all<float>(*x, *grads); }
void linear_all_backward_double(const Linear* x, const LinearGrads* grads) { backward_all<double>(*x, *grads); }
}
