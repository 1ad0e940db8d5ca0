// SIMD vectors, the matrix product that all kernels are built from, and exp.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

// Bytes of a vector register, and the accumulators of a matrix product, MATMUL_ROWS x VECTORS, which have to fit into registers.
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, MATMUL_ROWS = 8, VECTORS = 2;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, MATMUL_ROWS = 4, VECTORS = 2;
#elif defined(__aarch64__)  // NEON: 32 registers of 16 bytes
constexpr int VECTOR_BYTES = 16, MATMUL_ROWS = 4, VECTORS = 4;
#else
constexpr int VECTOR_BYTES = 16, MATMUL_ROWS = 4, VECTORS = 2;
#endif

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t Word;
    static constexpr int N = VECTOR_BYTES / 4;
};
template <> struct Lanes<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef double Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t Word;
    static constexpr int N = VECTOR_BYTES / 8;
};
template <class T> using Vector = typename Lanes<T>::V;
template <class T> using Integers = typename Lanes<T>::I;

template <class T> inline Vector<T> load(const T* at) { return *reinterpret_cast<const typename Lanes<T>::Unaligned*>(at); }
template <class T> inline void store(T* at, Vector<T> x) { *reinterpret_cast<typename Lanes<T>::Unaligned*>(at) = x; }
template <class T> inline Vector<T> broadcast(T x) { return x - Vector<T>{}; }

// The elements of a and b, numbered 0..N-1 and N..2N-1, in the order Order::at(0), ..., Order::at(N - 1).
template <class T, class Order, int... I> inline Vector<T> shuffle(Vector<T> a, Vector<T> b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Order::at(I)...);
#else
    return __builtin_shuffle(a, b, Integers<T>{Order::at(I)...});
#endif
}
template <class T, class Order> inline Vector<T> shuffle(Vector<T> a, Vector<T> b) {
    return shuffle<T, Order>(a, b, std::make_integer_sequence<int, Lanes<T>::N>{});
}

template <int BY> struct XorOrder {
    static constexpr int at(int i) { return i ^ BY; }
};
template <class T, int HALF = Lanes<T>::N / 2> inline T horizontal_sum(Vector<T> x) {
    x += shuffle<T, XorOrder<HALF>>(x, x);
    if constexpr (HALF > 1) return horizontal_sum<T, HALF / 2>(x);
    else return x[0];
}
template <class T, int HALF = Lanes<T>::N / 2> inline T horizontal_max(Vector<T> x) {
    const Vector<T> y = shuffle<T, XorOrder<HALF>>(x, x);
    x = y > x ? y : x;
    if constexpr (HALF > 1) return horizontal_max<T, HALF / 2>(x);
    else return x[0];
}

template <class T> inline T dot(const T* x, const T* y, long size) {
    Vector<T> sum = broadcast(T(0));
    for (long i = 0; i < size; i += Lanes<T>::N) sum += load(x + i) * load(y + i);
    return horizontal_sum<T>(sum);
}

// c[r, :] = (ACCUMULATE ? c[r, :] : 0) + sum_t a[r * a_row + t * a_step] * b[t, :]  for R rows and C vectors.
// Without the unroll pragmas the compiler keeps the accumulators in memory.
template <class T, bool ACCUMULATE, int R, int C>
inline void matmul_block(const T* a, long a_row, long a_step, const T* b, long b_row, T* c, long c_row, long depth) {
    constexpr int N = Lanes<T>::N;
    Vector<T> sum[R][C];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int i = 0; i < C; i++) sum[r][i] = ACCUMULATE ? load(c + r * c_row + i * N) : broadcast(T(0));
    for (long t = 0; t < depth; t++) {
        Vector<T> x[C];
        UNROLL
        for (int i = 0; i < C; i++) x[i] = load(b + t * b_row + i * N);
    UNROLL
        for (int r = 0; r < R; r++) {
            const Vector<T> y = broadcast(a[r * a_row + t * a_step]);
        UNROLL
            for (int i = 0; i < C; i++) sum[r][i] += y * x[i];
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int i = 0; i < C; i++) store(c + r * c_row + i * N, sum[r][i]);
}

template <class T, bool ACCUMULATE, int R, int C>
inline void matmul_rows(const T* a, long a_row, long a_step, const T* b, long b_row, T* c, long c_row, long rows, long depth) {
    long r = 0;
    for (; r + R <= rows; r += R) matmul_block<T, ACCUMULATE, R, C>(a + r * a_row, a_row, a_step, b, b_row, c + r * c_row, c_row, depth);
    if constexpr (R > 1)
        if (r < rows) matmul_rows<T, ACCUMULATE, R / 2, C>(a + r * a_row, a_row, a_step, b, b_row, c + r * c_row, c_row, rows - r, depth);
}

// The same for any number of rows; `cols` is a multiple of the vector length.
template <class T, bool ACCUMULATE>
inline void matmul(const T* a, long a_row, long a_step, const T* b, long b_row, T* c, long c_row, long rows, long cols, long depth) {
    constexpr int N = Lanes<T>::N;
    long i = 0;
    for (; i + VECTORS * N <= cols; i += VECTORS * N)
        matmul_rows<T, ACCUMULATE, MATMUL_ROWS, VECTORS>(a, a_row, a_step, b + i, b_row, c + i, c_row, rows, depth);
    for (; i < cols; i += N) matmul_rows<T, ACCUMULATE, MATMUL_ROWS, 1>(a, a_row, a_step, b + i, b_row, c + i, c_row, rows, depth);
}

// The first and the second blocks of HALF elements of two vectors a and b.
template <int HALF, int N> struct FirstBlocks {
    static constexpr int at(int i) { return i & HALF ? i - HALF + N : i; }
};
template <int HALF, int N> struct SecondBlocks {
    static constexpr int at(int i) { return i & HALF ? i + N : i + HALF; }
};
// Transposes N vectors of N elements in place: swaps blocks of half the size, then recurses into them.
template <class T, int HALF = Lanes<T>::N / 2> inline void transpose(Vector<T>* x) {
    constexpr int N = Lanes<T>::N;
    for (int i = 0; i < N; i++) {
        if (i & HALF) continue;
        const Vector<T> a = x[i], b = x[i + HALF];
        x[i] = shuffle<T, FirstBlocks<HALF, N>>(a, b);
        x[i + HALF] = shuffle<T, SecondBlocks<HALF, N>>(a, b);
    }
    if constexpr (HALF > 1) transpose<T, HALF / 2>(x);
}

// exp(x) for x <= 80; zero if the result would be subnormal. x = k ln 2 + r, with a Taylor series for |r| <= ln 2 / 2.
template <class T> inline Vector<T> vector_exp(Vector<T> x) {
    constexpr bool single = sizeof(T) == 4;
    constexpr int bits = single ? 23 : 52, degree = single ? 7 : 13;
    const T least = single ? T(-87.3) : T(-708.3), round = single ? T(12582912.0) : T(6755399441055744.0);
    const T high = single ? T(0.693145751953125) : T(0.6931471803691238), low = single ? T(1.4286068203094172e-6) : T(1.9082149292705877e-10);
    const typename Lanes<T>::Word one = single ? 127 << 23 : static_cast<typename Lanes<T>::Word>(int64_t(1023) << 52);
    const auto small = x < broadcast(least);
    x = small ? broadcast(least) : x;
    const Vector<T> shifted = x * broadcast(T(1.4426950408889634)) + broadcast(round);
    const Vector<T> k = shifted - broadcast(round);
    const Vector<T> r = x - k * broadcast(high) - k * broadcast(low);
    T each = 1;
    for (int i = 2; i <= degree; i++) each /= i;
    Vector<T> y = broadcast(each);
    for (int i = degree; i >= 1; i--) y = y * r + broadcast(each *= i);
    Integers<T> exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent << bits) + one;
    Vector<T> power;
    std::memcpy(&power, &exponent, sizeof power);
    return small ? broadcast(T(0)) : y * power;  // a product, so that NaN stays NaN
}
