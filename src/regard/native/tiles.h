// Tiles of 64 tokens, as rows in memory and as strips: transposed blocks of two vectors of tokens, one row per channel.
#pragma once
#include "parallel.h"
#include "simd.h"

#include <memory>

constexpr int TILE = 64;

template <class T> T* head_data(const TensorRef& x, long b, long h) { return reinterpret_cast<T*>(x.data) + b * x.batch + h * x.head; }

template <class T> struct Strip {
    static constexpr int tokens = VECTORS * Lanes<T>::N, count = TILE / tokens;
    // Offset of a row for the tokens from `lane` on, in strips of `rows` rows.
    static long at(long lane, long row, long rows) { return lane / tokens * rows * tokens + row * tokens + lane % tokens; }
};

// Into how many pieces each head is split so that all threads have work; 1 if the heads suffice.
inline long pieces_per_head(long heads, long threads) {
    return heads % threads == 0 || heads >= 4 * threads ? 1 : std::min(threads, (4 * threads + heads - 1) / heads);
}

template <class T> struct AlignedBuffer {  // aligned to a cache line
    std::unique_ptr<T[]> held;
    T* data;
    explicit AlignedBuffer(long size) : held(new T[size + 64 / sizeof(T)]) {
        data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(held.get()) + 63) & ~uintptr_t(63));
    }
};

// 64 tokens, or fewer at the end of the sequence; `order` is nullptr for the natural order.
struct TokenTile {
    const long* order;
    long start, count;

    TokenTile(const long* token_order, long tile, long n) : order(token_order), start(tile * TILE), count(std::min<long>(TILE, n - start)) {}
    long operator[](long i) const { return order ? order[start + i] : start + i; }

    // Whether their rows are contiguous in memory.
    bool is_contiguous(long row, long width) const { return !order && row == width; }

    // Their rows of x: in place if contiguous, else copied to `space`.
    template <class T> const T* contiguous_rows(const T* x, long row, long width, T* space) const {
        if (is_contiguous(row, width)) return x + start * row;
        for (long i = 0; i < count; i++) std::copy_n(x + (*this)[i] * row, width, space + i * width);
        return space;
    }
    // Prefetch their rows of x.
    template <class T> void prefetch(const T* x, long row, long width) const {
        for (long i = 0; i < count; i++)
            for (long j = 0; j < width; j += 64 / long(sizeof(T))) __builtin_prefetch(x + (*this)[i] * row + j, 0, 2);
    }
    // Write strips (strips width tokens) of x * scale, zero past the end.
    template <class T> void to_strips(const T* x, long row, long width, T scale, T* to) const {
        constexpr int N = Lanes<T>::N;
        for (long lane = 0; lane < TILE; lane += N)
            for (long j = 0; j < width; j += N) {
                Vector<T> own[N];
                for (int i = 0; i < N; i++) own[i] = lane + i < count ? load(x + (*this)[lane + i] * row + j) * broadcast(scale) : broadcast(T(0));
                transpose<T>(own);
                for (int i = 0; i < N; i++) store(to + Strip<T>::at(lane, j + i, width), own[i]);
            }
    }
    // x = the strips, each token multiplied by its scale.
    template <class T> void from_strips(const T* from, const T* scale, T* x, long row, long width) const {
        constexpr int N = Lanes<T>::N;
        for (long lane = 0; lane < count; lane += N)
            for (long j = 0; j < width; j += N) {
                Vector<T> own[N];
                for (int i = 0; i < N; i++) own[i] = load(from + Strip<T>::at(lane, j + i, width)) * load(scale + lane);
                transpose<T>(own);
                for (int i = 0; i < N && lane + i < count; i++) store(x + (*this)[lane + i] * row + j, own[i]);
            }
    }
};

// Contiguous copies of the rows of recently used tiles. Neighbouring rows of tiles read nearly the same keys, and rows with
// large strides may map to so few cache sets that they evict each other.
template <class T> struct RowCache {
    static constexpr long slots = 8;
    T* space;
    const T* from[slots] = {};
    long start[slots] = {};

    explicit RowCache(T* at) : space(at) {}
    static long size(long width) { return slots * TILE * width; }
    const T* operator()(const TokenTile& tokens, const T* x, long row, long width) {
        if (tokens.is_contiguous(row, width)) return tokens.contiguous_rows(x, row, width, space);
        const long slot = tokens.start / TILE % slots;
        T* at = space + slot * TILE * width;
        if (from[slot] == x && start[slot] == tokens.start) return at;
        from[slot] = x, start[slot] = tokens.start;
        return tokens.contiguous_rows(x, row, width, at);
    }
};
