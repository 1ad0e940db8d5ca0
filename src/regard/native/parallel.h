// Loops on several threads: those of the OpenMP runtime that PyTorch uses, because two pools of threads would compete for the
// cores. The runtime is called through GOMP_parallel, which needs no support from the compiler. Without one, threads are started
// for each loop.
#pragma once
#include "kernels.h"

#include <algorithm>
#include <atomic>

void run_on_threads(void (*body)(void*), void* data, long threads);  // parallel.cpp

// Calls body(i, buffers) for all i < count, `chunk` at a time, in whichever thread is free. `buffers` is the result of
// make_buffers(), one for each thread.
template <class MakeBuffers, class Body> void parallel_for(long threads, long count, long chunk, MakeBuffers make_buffers, Body body) {
    std::atomic<long> next{0};
    const auto work = [&] {
        long from = next.fetch_add(chunk, std::memory_order_relaxed);
        if (from >= count) return;
        auto buffers = make_buffers();
        for (; from < count; from = next.fetch_add(chunk, std::memory_order_relaxed))
            for (long i = from, to = std::min(from + chunk, count); i < to; i++) body(i, buffers);
    };
    if (threads <= 1 || count <= chunk) return work();
    run_on_threads([](void* data) { (*static_cast<decltype(work)*>(data))(); }, const_cast<void*>(static_cast<const void*>(&work)), threads);
}

// The same without buffers: body(i).
template <class Body> void parallel_for(long threads, long count, long chunk, Body body) {
    parallel_for(threads, count, chunk, [] { return 0; }, [&](long i, int) { body(i); });
}
