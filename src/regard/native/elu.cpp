// elu(x) + 1, forward and backward, each in one pass: exp(x) below zero, which keeps the digits that the sum would lose, and 1 + x
// above.
#include "rows.h"

#include <cmath>

namespace {

struct Elements {  // tensors (batch heads n width)
    long batch, heads, n, width, threads;
    long raise;      // whether a row that is below zero everywhere is raised to it first
    Rows x, y, out;  // forward: x -> out; backward: y = phi(x) and x = the gradient of it -> out
};

constexpr double LOWEST = -80;  // exp of it is just above the least that float has

// Calls row(x, y, out) for all rows, in the order in which those of x stand.
template <class T, class Row> void for_rows(const Elements& e, Row row) {
    const bool heads_last = e.x.head < e.x.row;
#pragma omp parallel for num_threads(int(e.threads)) schedule(static)
    for (long i = 0; i < e.batch * e.heads * e.n; i++) {
        const long within = i % (e.heads * e.n), b = i / (e.heads * e.n);
        const long h = heads_last ? within % e.heads : within / e.n, t = heads_last ? within / e.heads : within % e.n;
        row(head_of<T>(e.x, b, h) + t * e.x.row, head_of<T>(e.y, b, h) + t * e.y.row, head_of<T>(e.out, b, h) + t * e.out.row);
    }
}

template <class T> T most(const T* x, long width) {
    Vector<T> top = all(-std::numeric_limits<T>::infinity());
    long i = 0;
    for (; i + Lanes<T>::N <= width; i += Lanes<T>::N) top = load(x + i) > top ? load(x + i) : top;
    T most = most_of<T>(top);
    for (; i < width; i++) most = x[i] > most ? x[i] : most;
    return most;
}

template <class T> void forward(const Elements& e) {
    constexpr int N = Lanes<T>::N;
    const long whole = e.width / N * N;
    for_rows<T>(e, [&](const T* x, const T*, T* out) {
        const T less = e.raise ? std::min(most<T>(x, e.width), T(0)) : T(0);
        for (long i = 0; i < whole; i += N) {
            const Vector<T> own = load(x + i) - all(less), below = own < all(T(LOWEST)) ? all(T(LOWEST)) : own;
            store(out + i, exp_of<T>(below > all(T(0)) ? all(T(0)) : below) + (own > all(T(0)) ? own : all(T(0))));
        }
        for (long i = whole; i < e.width; i++) {
            const T own = x[i] - less, below = own < T(LOWEST) ? T(LOWEST) : own;
            out[i] = std::exp(below > 0 ? T(0) : below) + (own > 0 ? own : T(0));
        }
    });
}

template <class T> void backward(const Elements& e) {
    for_rows<T>(e, [&](const T* grad, const T* phi, T* out) {
        for (long i = 0; i < e.width; i++) out[i] = grad[i] * (phi[i] > 1 ? T(1) : phi[i]);
    });
}

}  // namespace

extern "C" {
void elu_forward_float(const Elements* e) { forward<float>(*e); }
void elu_forward_double(const Elements* e) { forward<double>(*e); }
void elu_backward_float(const Elements* e) { backward<float>(*e); }
void elu_backward_double(const Elements* e) { backward<double>(*e); }
}
