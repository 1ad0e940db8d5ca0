// Tokens by the 64, as rows in memory and as strips: a row for each number of a token, and in it two vectors of tokens.
#pragma once
#include "product.h"

#include <algorithm>
#include <memory>

constexpr int SIDE = 64;

struct Rows {  // a tensor (batch heads length width) whose last axis is dense; strides in numbers
    char* data;
    long batch, head, row;
};

template <class T> T* head_of(const Rows& x, long b, long h) { return reinterpret_cast<T*>(x.data) + b * x.batch + h * x.head; }

template <class T> struct Strip {
    static constexpr int tokens = VECTORS * Lanes<T>::N, count = SIDE / tokens;
    // Where a row begins for the tokens from `lane` on, in strips of so many rows.
    static long at(long lane, long row, long rows) { return lane / tokens * rows * tokens + row * tokens + lane % tokens; }
};

// In how many pieces each head is cut, so that all threads have work: none where the heads go round.
inline long pieces_of(long heads, long threads) {
    return heads % threads == 0 || heads >= 4 * threads ? 1 : std::min(threads, (4 * threads + heads - 1) / heads);
}

template <class T> struct Buffer {  // starts at a cache line
    std::unique_ptr<T[]> held;
    T* data;
    explicit Buffer(long size) : held(new T[size + 64 / sizeof(T)]) {
        data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(held.get()) + 63) & ~uintptr_t(63));
    }
};

// 64 tokens, or fewer at the end; `order` nullptr: as they come.
struct Tokens {
    const long* order;
    long start, count;

    Tokens(const long* all, long tile, long n) : order(all), start(tile * SIDE), count(std::min<long>(SIDE, n - start)) {}
    long operator[](long i) const { return order ? order[start + i] : start + i; }

    // Whether their rows stand in memory one after the other, without gaps.
    bool dense(long row, long width) const { return !order && row == width; }

    // Their rows of x without gaps, where they stand, or else copied to `space`.
    template <class T> const T* rows(const T* x, long row, long width, T* space) const {
        if (dense(row, width)) return x + start * row;
        for (long i = 0; i < count; i++) std::copy_n(x + (*this)[i] * row, width, space + i * width);
        return space;
    }
    // Have their rows of x brought nearer, for a use to come.
    template <class T> void expect(const T* x, long row, long width) const {
        for (long i = 0; i < count; i++)
            for (long j = 0; j < width; j += 64 / long(sizeof(T))) __builtin_prefetch(x + (*this)[i] * row + j, 0, 2);
    }
    // Strips (strips width tokens) of x * scale, with zeros past the end.
    template <class T> void strips(const T* x, long row, long width, T scale, T* to) const {
        constexpr int N = Lanes<T>::N;
        for (long lane = 0; lane < SIDE; lane += N)
            for (long j = 0; j < width; j += N) {
                Vector<T> own[N];
                for (int i = 0; i < N; i++) own[i] = lane + i < count ? load(x + (*this)[lane + i] * row + j) * all(scale) : all(T(0));
                transpose<T>(own);
                for (int i = 0; i < N; i++) store(to + Strip<T>::at(lane, j + i, width), own[i]);
            }
    }
    // x = the strips, each token times its scale
    template <class T> void put(const T* from, const T* scale, T* x, long row, long width) const {
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


// Rows without gaps of the tokens that were asked for last: neighbouring rows of tiles look at nearly the same keys, and rows
// with gaps may share so few places in the caches of the processor that they drive each other out.
template <class T> struct Near {
    static constexpr long slots = 8;
    T* space;
    const T* from[slots] = {};
    long start[slots] = {};

    explicit Near(T* at) : space(at) {}
    static long size(long width) { return slots * SIDE * width; }
    const T* operator()(const Tokens& tokens, const T* x, long row, long width) {
        if (tokens.dense(row, width)) return tokens.rows(x, row, width, space);
        const long slot = tokens.start / SIDE % slots;
        T* at = space + slot * SIDE * width;
        if (from[slot] == x && start[slot] == tokens.start) return at;
        from[slot] = x, start[slot] = tokens.start;
        return tokens.rows(x, row, width, at);
    }
};
