// Linear attention, forward and backward: out_i = S q_i and normalizer_i = z q_i, where S and z are the sums of k v and of k over
// all keys or, if causal, over the keys up to token i.
//
// Causal: 64 tokens at a time are multiplied with each other, in strips along the diagonal; earlier tokens contribute through
// the state, which stays in the CPU cache. The backward pass scans twice: forward for dq, with the states, and in reverse for dk
// and dv, with the sums over later tokens. Parallel over heads and, if there are too few, over pieces of the sequence, whose
// sums are computed first.
#include "tiles.h"

#include <vector>

namespace {

// Sums over tokens: a matrix Σ a b (rows cols) and a vector Σ a c (rows), where c is a number per token, or 1.
template <class T> struct State {
    T *matrix, *vector;
    long rows, cols;

    void add(const T* a, long a_row, const T* b, long b_row, const T* c, long c_row, long tokens) const {
        matmul<T, true>(a, 1, a_row, b, b_row, matrix, cols, rows, cols, tokens);
        for (long i = 0; i < tokens; i++) {
            const Vector<T> own = broadcast(c ? c[i * c_row] : T(1));
            for (long j = 0; j < rows; j += Lanes<T>::N) store(vector + j, load(vector + j) + own * load(a + i * a_row + j));
        }
    }
    void add(const State& other) const {
        for (long i = 0; i < rows * cols; i++) matrix[i] += other.matrix[i];
        for (long i = 0; i < rows; i++) vector[i] += other.vector[i];
    }
    void read(const TensorRef& from, const TensorRef& beside, long b, long h) const {
        for (long i = 0; i < rows; i++) std::copy_n(head_data<T>(from, b, h) + i * from.row, cols, matrix + i * cols);
        std::copy_n(head_data<T>(beside, b, h), rows, vector);
    }
    void write(const TensorRef& to, const TensorRef& beside, long b, long h) const {
        for (long i = 0; i < rows; i++) std::copy_n(matrix + i * cols, cols, head_data<T>(to, b, h) + i * to.row);
        std::copy_n(vector, rows, head_data<T>(beside, b, h));
    }
    void transpose_to(T* to) const {  // (cols rows)
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

template <class T> struct View {  // the rows of a tile of tokens
    const T* data;
    long row;
    View(const TensorRef& x, long b, long h, const TokenTile& tokens) : data(head_data<T>(x, b, h) + tokens.start * x.row), row(x.row) {}
};

// Dot products of the tokens of `a` with each strip of tokens, (strips 64 tokens): if LATER, of tokens from the start of the
// strip on, else of tokens up to its end. Pairs in the wrong order are zero. `more` is added to the others: a number per token
// of `a` if LATER, else per token of the strip.
template <class T, bool LATER> void strip_products(const View<T>& a, const T* strips, long width, const TokenTile& tokens, const View<T>* more, T* to) {
    constexpr long wide = Strip<T>::tokens;
    T ones[wide], own[wide] = {};
    std::fill_n(ones, wide, T(1));
    for (long g = 0; g * wide < tokens.count; g++) {
        const long first = g * wide, last = std::min(first + wide, tokens.count);
        const long from = LATER ? first : 0, end = LATER ? tokens.count : last;
        T* block = to + (g * TILE + from) * wide;
        matmul<T, false>(a.data + from * a.row, a.row, 1, strips + g * width * wide, wide, block, wide, end - from, wide, width);
        for (long i = first; i < last && more; i++) own[i - first] = more->data[i * more->row];
        if (more && LATER) matmul<T, true>(more->data + from * more->row, more->row, 1, ones, wide, block, wide, end - from, wide, 1);
        if (more && !LATER) matmul<T, true>(ones, 0, 1, own, wide, block, wide, end - from, wide, 1);
        for (long i = first; i < last; i++) {
            T* row = to + (g * TILE + i) * wide;
            if (LATER) std::fill_n(row + i - first + 1, wide - 1 - (i - first), T(0));
            else std::fill_n(row, i - first, T(0));
        }
    }
}

// to[i, :] += the dot products of token i with the tokens of the strips, times their rows of b
template <class T, bool LATER> void apply_products(const T* products, const View<T>& b, long width, const TokenTile& tokens, T* to, long to_row) {
    constexpr long wide = Strip<T>::tokens;
    for (long g = 0; g * wide < tokens.count; g++) {
        const long first = g * wide, last = std::min(first + wide, tokens.count);
        const long from = LATER ? first : 0, end = LATER ? tokens.count : last;
        matmul<T, true>(products + (g * TILE + from) * wide, wide, 1, b.data + first * b.row, b.row, to + from * to_row, to_row, end - from, width, last - first);
    }
}

// out and normalizer, given the sums Σ k v and Σ k over earlier tokens
template <class T> void forward_chunk(const LinearArgs& x, long b, long h, const TokenTile& tokens, const State<T>& state, T* space) {
    const View<T> q(x.q, b, h, tokens), k(x.k, b, h, tokens), v(x.v, b, h, tokens);
    T *strips = space, *products = strips + x.rank * TILE;
    T *out = head_data<T>(x.out, b, h) + tokens.start * x.out.row, *normalizer = head_data<T>(x.normalizer, b, h) + tokens.start * x.normalizer.row;
    tokens.to_strips<T>(head_data<T>(x.k, b, h), x.k.row, x.rank, T(1), strips);
    strip_products<T, true>(q, strips, x.rank, tokens, nullptr, products);
    matmul<T, false>(q.data, q.row, 1, state.matrix, x.width, out, x.out.row, tokens.count, x.width, x.rank);
    apply_products<T, true>(products, v, x.width, tokens, out, x.out.row);
    for (long i = 0; i < tokens.count; i++) {
        Vector<T> own = broadcast(T(0));
        for (long lane = 0; lane <= i; lane += Lanes<T>::N) own += load(products + Strip<T>::at(lane, i, TILE));
        normalizer[i * x.normalizer.row] = dot(q.data + i * q.row, state.vector, x.rank) + horizontal_sum<T>(own);
    }
    state.add(k.data, k.row, v.data, v.row, nullptr, 0, tokens.count);
}

// dq, given the same sums
template <class T>
void query_chunk(const LinearArgs& x, const LinearGrads& grads, long b, long h, const TokenTile& tokens, const State<T>& state, T* space) {
    const View<T> k(x.k, b, h, tokens), v(x.v, b, h, tokens), dout(grads.out, b, h, tokens), dnormalizer(grads.normalizer, b, h, tokens);
    T *strips = space, *products = strips + x.width * TILE, *transposed = products + TILE * TILE;
    T* dq = head_data<T>(grads.q, b, h) + tokens.start * grads.q.row;
    tokens.to_strips<T>(head_data<T>(x.v, b, h), x.v.row, x.width, T(1), strips);
    strip_products<T, true>(dout, strips, x.width, tokens, &dnormalizer, products);
    state.transpose_to(transposed);
    matmul<T, false>(dout.data, dout.row, 1, transposed, x.rank, dq, grads.q.row, tokens.count, x.rank, x.width);
    matmul<T, true>(dnormalizer.data, dnormalizer.row, 1, state.vector, x.rank, dq, grads.q.row, tokens.count, x.rank, 1);
    apply_products<T, true>(products, k, x.rank, tokens, dq, grads.q.row);
    state.add(k.data, k.row, v.data, v.row, nullptr, 0, tokens.count);
}

// dk and dv, given the sums Σ q dout and Σ q dnormalizer over later tokens
template <class T>
void key_chunk(const LinearArgs& x, const LinearGrads& grads, long b, long h, const TokenTile& tokens, const State<T>& state, T* space) {
    const View<T> q(x.q, b, h, tokens), k(x.k, b, h, tokens), v(x.v, b, h, tokens);
    const View<T> dout(grads.out, b, h, tokens), dnormalizer(grads.normalizer, b, h, tokens);
    T *strips = space, *products = strips + std::max(x.rank, x.width) * TILE, *transposed = products + TILE * TILE;
    T *dk = head_data<T>(grads.k, b, h) + tokens.start * grads.k.row, *dv = head_data<T>(grads.v, b, h) + tokens.start * grads.v.row;
    tokens.to_strips<T>(head_data<T>(x.q, b, h), x.q.row, x.rank, T(1), strips);
    strip_products<T, false>(k, strips, x.rank, tokens, nullptr, products);
    matmul<T, false>(k.data, k.row, 1, state.matrix, x.width, dv, grads.v.row, tokens.count, x.width, x.rank);
    apply_products<T, false>(products, dout, x.width, tokens, dv, grads.v.row);
    tokens.to_strips<T>(head_data<T>(grads.out, b, h), grads.out.row, x.width, T(1), strips);
    strip_products<T, false>(v, strips, x.width, tokens, &dnormalizer, products);
    state.transpose_to(transposed);
    for (long i = 0; i < tokens.count; i++) std::copy_n(state.vector, x.rank, dk + i * grads.k.row);
    matmul<T, true>(v.data, v.row, 1, transposed, x.rank, dk, grads.k.row, tokens.count, x.rank, x.width);
    apply_products<T, false>(products, q, x.rank, tokens, dk, grads.k.row);
    state.add(q.data, q.row, dout.data, dout.row, dnormalizer.data, dnormalizer.row, tokens.count);
}

// Runs `chunk` over all tokens of all heads, in order or with BACK in reverse, with a state that `add` accumulates. If heads are
// split, the sums of each piece are computed first; then each piece starts from the sum of the pieces before it.
template <class T, bool BACK, class Add, class Chunk>
void scan(const LinearArgs& x, const TensorRef& start, const TensorRef& beside, const TensorRef& end, const TensorRef& end_beside, Add add, Chunk chunk) {
    const long heads = x.batch * x.heads, chunks = (x.n + TILE - 1) / TILE;
    const long each = std::min(pieces_per_head(heads, x.threads), chunks);
    const long size = x.rank * x.width + x.rank;
    std::vector<T> sums(heads * each * size, T(0));
    const auto state_of = [&](long i) { return State<T>{&sums[i * size], &sums[i * size + x.rank * x.width], x.rank, x.width}; };
    const auto for_chunks = [&](long i, auto run) {
        const long piece = i % each, from = chunks * piece / each, to = chunks * (piece + 1) / each;
        for (long c = from; c < to; c++) run(i / each / x.heads, i / each % x.heads, TokenTile(nullptr, BACK ? from + to - 1 - c : c, x.n));
    };
    parallel_for(x.threads, each > 1 ? heads * each : 0, 1, [&](long i) {
        for_chunks(i, [&](long b, long h, const TokenTile& tokens) { add(b, h, tokens, state_of(i)); });
    });
    parallel_for(x.threads, heads, 1, [&](long head) {  // exclusive scan over the pieces
        AlignedBuffer<T> own(2 * size);
        State<T> now{own.data, own.data + x.rank * x.width, x.rank, x.width};
        State<T> last{own.data + size, own.data + size + x.rank * x.width, x.rank, x.width};
        now.read(start, beside, head / x.heads, head % x.heads);
        for (long p = 0; p < each; p++) {
            const State<T> mine = state_of(head * each + (BACK ? each - 1 - p : p));
            std::copy_n(mine.matrix, size, last.matrix);
            std::copy_n(now.matrix, size, mine.matrix);
            now.add(last);
        }
    });
    const long room = (2 * std::max(x.rank, x.width) + TILE) * TILE + x.rank * x.width;
    parallel_for(x.threads, heads * each, 1, [&] { return AlignedBuffer<T>(room); }, [&](long i, AlignedBuffer<T>& space) {
        const State<T> state = state_of(i);
        for_chunks(i, [&](long b, long h, const TokenTile& tokens) { chunk(b, h, tokens, state, space.data); });
        if (i % each == (BACK ? 0 : each - 1)) state.write(end, end_beside, i / each / x.heads, i / each % x.heads);
    });
}

template <class T> void forward(const LinearArgs& x) {
    const auto add = [&](long b, long h, const TokenTile& tokens, const State<T>& state) {
        const View<T> k(x.k, b, h, tokens), v(x.v, b, h, tokens);
        state.add(k.data, k.row, v.data, v.row, nullptr, 0, tokens.count);
    };
    const auto chunk = [&](long b, long h, const TokenTile& tokens, const State<T>& state, T* space) {
        forward_chunk<T>(x, b, h, tokens, state, space);
    };
    scan<T, false>(x, x.state, x.sum, x.after, x.total, add, chunk);
}

template <class T> void backward(const LinearArgs& x, const LinearGrads& grads) {
    const auto add = [&](long b, long h, const TokenTile& tokens, const State<T>& state) {
        const View<T> k(x.k, b, h, tokens), v(x.v, b, h, tokens);
        state.add(k.data, k.row, v.data, v.row, nullptr, 0, tokens.count);
    };
    const auto queries = [&](long b, long h, const TokenTile& tokens, const State<T>& state, T* space) {
        query_chunk<T>(x, grads, b, h, tokens, state, space);
    };
    scan<T, false>(x, x.state, x.sum, x.after, x.total, add, queries);
    const auto add_back = [&](long b, long h, const TokenTile& tokens, const State<T>& state) {
        const View<T> q(x.q, b, h, tokens), dout(grads.out, b, h, tokens), dnormalizer(grads.normalizer, b, h, tokens);
        state.add(q.data, q.row, dout.data, dout.row, dnormalizer.data, dnormalizer.row, tokens.count);
    };
    const auto keys = [&](long b, long h, const TokenTile& tokens, const State<T>& state, T* space) {
        key_chunk<T>(x, grads, b, h, tokens, state, space);
    };
    scan<T, true>(x, grads.state, grads.sum, grads.first_state, grads.first_sum, add_back, keys);
}

// ------------------------------------------------------------------------------------------ over all keys
// Calls piece(head, part, from, to, space) for chunks from..to-1 of n tokens of every head, with `room` elements of scratch space.
template <class T, class Piece> void for_pieces(const LinearArgs& x, long n, long room, Piece piece) {
    const long heads = x.batch * x.heads, chunks = (n + TILE - 1) / TILE, each = std::min(pieces_per_head(heads, x.threads), chunks);
    parallel_for(x.threads, heads * each, 1, [&] { return AlignedBuffer<T>(room); }, [&](long i, AlignedBuffer<T>& space) {
        piece(i / each, i % each, chunks * (i % each) / each, chunks * (i % each + 1) / each, space.data);
    });
}

// Σ a b and Σ a c over n tokens, where c is a number per token, or 1; to (b h rank width) and (b h 1 rank)
template <class T> void sum_products(const LinearArgs& x, long n, const TensorRef& a, const TensorRef& b, const TensorRef* c, const TensorRef& to, const TensorRef& beside) {
    const long heads = x.batch * x.heads, each = pieces_per_head(heads, x.threads), size = x.rank * x.width + x.rank;
    std::vector<T> sums(heads * each * size, T(0));
    const auto state_of = [&](long i) { return State<T>{&sums[i * size], &sums[i * size + x.rank * x.width], x.rank, x.width}; };
    for_pieces<T>(x, n, 1, [&](long head, long part, long from, long end, T*) {
        for (long i = from; i < end; i++) {
            const TokenTile tokens(nullptr, i, n);
            const View<T> own(a, head / x.heads, head % x.heads, tokens), other(b, head / x.heads, head % x.heads, tokens);
            const T* normalizer = c ? View<T>(*c, head / x.heads, head % x.heads, tokens).data : nullptr;
            state_of(head * each + part).add(own.data, own.row, other.data, other.row, normalizer, c ? c->row : 0, tokens.count);
        }
    });
    for (long head = 0; head < heads; head++) {
        for (long p = 1; p < each; p++) state_of(head * each).add(state_of(head * each + p));
        state_of(head * each).write(to, beside, head / x.heads, head % x.heads);
    }
}

template <class T> void forward_all(const LinearArgs& x) {
    sum_products<T>(x, x.keys, x.k, x.v, nullptr, x.after, x.total);
    for_pieces<T>(x, x.n, 1, [&](long head, long, long from, long end, T*) {
        const long b = head / x.heads, h = head % x.heads;
        for (long i = from; i < end; i++) {
            const TokenTile tokens(nullptr, i, x.n);
            const View<T> q(x.q, b, h, tokens);
            T *out = head_data<T>(x.out, b, h) + tokens.start * x.out.row, *normalizer = head_data<T>(x.normalizer, b, h) + tokens.start * x.normalizer.row;
            matmul<T, false>(q.data, q.row, 1, head_data<T>(x.after, b, h), x.width, out, x.out.row, tokens.count, x.width, x.rank);
            for (long t = 0; t < tokens.count; t++) normalizer[t * x.normalizer.row] = dot(q.data + t * q.row, head_data<T>(x.total, b, h), x.rank);
        }
    });
}

// With S and z in x.state and x.sum: dq = dout Sᵀ + dnormalizer z. With G = Σ q dout and g = Σ q dnormalizer, which are stored in
// grads.first_state and grads.first_sum: dk = v Gᵀ + g and dv = k G.
template <class T> void backward_all(const LinearArgs& x, const LinearGrads& grads) {
    const long size = x.rank * x.width;
    sum_products<T>(x, x.n, x.q, grads.out, &grads.normalizer, grads.first_state, grads.first_sum);
    for_pieces<T>(x, x.n, size, [&](long head, long, long from, long end, T* transposed) {
        const long b = head / x.heads, h = head % x.heads;
        State<T>{head_data<T>(x.state, b, h), nullptr, x.rank, x.width}.transpose_to(transposed);
        for (long i = from; i < end; i++) {
            const TokenTile tokens(nullptr, i, x.n);
            const View<T> dout(grads.out, b, h, tokens), dnormalizer(grads.normalizer, b, h, tokens);
            T* dq = head_data<T>(grads.q, b, h) + tokens.start * grads.q.row;
            matmul<T, false>(dout.data, dout.row, 1, transposed, x.rank, dq, grads.q.row, tokens.count, x.rank, x.width);
            matmul<T, true>(dnormalizer.data, dnormalizer.row, 1, head_data<T>(x.sum, b, h), x.rank, dq, grads.q.row, tokens.count, x.rank, 1);
        }
    });
    for_pieces<T>(x, x.keys, size, [&](long head, long, long from, long end, T* transposed) {
        const long b = head / x.heads, h = head % x.heads;
        State<T>{head_data<T>(grads.first_state, b, h), nullptr, x.rank, x.width}.transpose_to(transposed);
        for (long i = from; i < end; i++) {
            const TokenTile tokens(nullptr, i, x.keys);
            const View<T> k(x.k, b, h, tokens), v(x.v, b, h, tokens);
            T *dk = head_data<T>(grads.k, b, h) + tokens.start * grads.k.row, *dv = head_data<T>(grads.v, b, h) + tokens.start * grads.v.row;
            for (long t = 0; t < tokens.count; t++) std::copy_n(head_data<T>(grads.first_sum, b, h), x.rank, dk + t * grads.k.row);
            matmul<T, true>(v.data, v.row, 1, transposed, x.rank, dk, grads.k.row, tokens.count, x.rank, x.width);
            matmul<T, false>(k.data, k.row, 1, head_data<T>(grads.first_state, b, h), x.width, dv, grads.v.row, tokens.count, x.width, x.rank);
        }
    });
}

}  // namespace

extern "C" {
void linear_forward_float(const LinearArgs* x) { forward<float>(*x); }
void linear_forward_double(const LinearArgs* x) { forward<double>(*x); }
void linear_backward_float(const LinearArgs* x, const LinearGrads* grads) { backward<float>(*x, *grads); }
void linear_backward_double(const LinearArgs* x, const LinearGrads* grads) { backward<double>(*x, *grads); }
void linear_all_forward_float(const LinearArgs* x) { forward_all<float>(*x); }
void linear_all_forward_double(const LinearArgs* x) { forward_all<double>(*x); }
void linear_all_backward_float(const LinearArgs* x, const LinearGrads* grads) { backward_all<float>(*x, *grads); }
void linear_all_backward_double(const LinearArgs* x, const LinearGrads* grads) { backward_all<double>(*x, *grads); }
}
