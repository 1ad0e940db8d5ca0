// elu(x) + 1, forward and backward, each in one pass: exp(x) below zero, which is more accurate than the sum, and 1 + x above.
#include "tiles.h"

#include <cmath>

namespace {

constexpr double LOWEST = -80;  // exp(-80) is just above the smallest float

// Calls row(x, y, out) for all rows, in the memory order of x.
template <class T, class Row> void for_rows(const EluArgs& e, Row row) {
    const bool heads_last = e.x.head < e.x.row;
    const long rows = e.batch * e.heads * e.n, share = std::max(1L, (rows + e.threads - 1) / e.threads);
    parallel_for(e.threads, rows, share, [&](long i) {
        const long within = i % (e.heads * e.n), b = i / (e.heads * e.n);
        const long h = heads_last ? within % e.heads : within / e.n, t = heads_last ? within / e.heads : within % e.n;
        row(head_data<T>(e.x, b, h) + t * e.x.row, head_data<T>(e.y, b, h) + t * e.y.row, head_data<T>(e.out, b, h) + t * e.out.row);
    });
}

template <class T> T row_max(const T* x, long width) {
    Vector<T> top = broadcast(-std::numeric_limits<T>::infinity());
    long i = 0;
    for (; i + Lanes<T>::N <= width; i += Lanes<T>::N) top = load(x + i) > top ? load(x + i) : top;
    T most = horizontal_max<T>(top);
    for (; i < width; i++) most = x[i] > most ? x[i] : most;
    return most;
}

template <class T> void forward(const EluArgs& e) {
    constexpr int N = Lanes<T>::N;
    const long whole = e.width / N * N;
    for_rows<T>(e, [&](const T* x, const T*, T* out) {
        const T less = e.shift_negative ? std::min(row_max<T>(x, e.width), T(0)) : T(0);
        for (long i = 0; i < whole; i += N) {
            const Vector<T> own = load(x + i) - broadcast(less), below = own < broadcast(T(LOWEST)) ? broadcast(T(LOWEST)) : own;
            store(out + i, vector_exp<T>(below > broadcast(T(0)) ? broadcast(T(0)) : below) + (own > broadcast(T(0)) ? own : broadcast(T(0))));
        }
        for (long i = whole; i < e.width; i++) {
            const T own = x[i] - less, below = own < T(LOWEST) ? T(LOWEST) : own;
            out[i] = std::exp(below > 0 ? T(0) : below) + (own > 0 ? own : T(0));
        }
    });
}

template <class T> void backward(const EluArgs& e) {
    for_rows<T>(e, [&](const T* grad, const T* phi, T* out) {
        for (long i = 0; i < e.width; i++) out[i] = grad[i] * (phi[i] > 1 ? T(1) : phi[i]);
    });
}

}  // namespace

extern "C" {
void elu_forward_float(const EluArgs* e) { forward<float>(*e); }
void elu_forward_double(const EluArgs* e) { forward<double>(*e); }
void elu_backward_float(const EluArgs* e) { backward<float>(*e); }
void elu_backward_double(const EluArgs* e) { backward<double>(*e); }
}
